"""Log records are bounded, with the traceback of an exception that quotes a peer."""

import logging

import pytest

from llmtap.log import LogSetup, set_up


def test_a_record_with_its_traceback_is_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    before = logging.root.handlers[:], logging.root.level
    set_up(LogSetup())
    try:
        try:
            raise ValueError("x" * 8_000_000)
        except ValueError as exc:
            logging.getLogger("llmtap.meter").warning("event=%s", "y" * 9_000, exc_info=exc)
    finally:
        logging.root.handlers[:], logging.root.level = before
    text = capsys.readouterr().err
    assert "level=warning" in text
    assert 9_000 < len(text) <= 16_385
