"""The rates of `benchmarks/dialects/hidden.py`, which docs/dialects.md publishes, hold."""

import pytest

from benchmarks.dialects import hidden
from llmtap.protocol.delta import Reading


@pytest.fixture(scope="module", params=[False, True], ids=["each dialect hidden", "all hidden"])
def compared(request: pytest.FixtureRequest) -> list[hidden.Comparison]:
    return list(hidden.compare(all_hidden=request.param))


def test_first_tokens_and_output_are_found_in_most_streams(compared: list[hidden.Comparison]) -> None:
    streams = [c for c in compared if c.has_output and not c.whole]
    assert len(streams) > 100
    assert sum(c.ttft_exact for c in streams) / len(streams) >= 0.9
    assert sum(c.events_exact for c in streams) / len(streams) >= 0.85
    counted = [c for c in streams if c.usage_exact is not None]
    assert sum(c.usage_exact is True for c in counted) / len(counted) >= 0.85


def test_no_stream_without_text_has_output_and_none_is_judged(compared: list[hidden.Comparison]) -> None:
    assert [c.name for c in compared if not c.has_text and hidden.outputs(c.hidden)] == []
    assert [c.name for c in compared if c.judged] == []
    assert all(c.hidden.dialect is None for c in compared if c.hidden.reading is not Reading.DIALECT)
