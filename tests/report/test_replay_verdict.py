"""A verdict in words: a word, what follows it, and findings with limits in the unit of their figure."""

from typing import Any

import pytest

from llmtap.report.replay_verdict import finding_said, judged

ONE = {"what": "rate", "figure": 0.9, "limit": 0.995, "says": "too few"}


@pytest.mark.parametrize(
    ("verdict", "word", "more"),
    [
        ({"valid": True, "findings": []}, "Valid.", "Nothing that is checked speaks against the figures:"),
        ({"valid": True, "findings": [ONE]}, "Valid.", "But mind:"),
        ({"valid": False, "findings": [ONE]}, "Not valid.", "What speaks against the figures:"),
    ],
)
def test_a_verdict(verdict: dict[str, Any], word: str, more: str) -> None:
    said = judged(verdict)
    assert said[0] == word
    assert said[1].startswith(more)


@pytest.mark.parametrize(
    ("finding", "said"),
    [
        (ONE, "too few (limit 99.5 %)"),
        ({"what": "dispatch_lateness", "limit": 0.002, "says": "late"}, "late (limit 2.00 ms)"),
        ({"what": "lost", "limit": 0, "says": "one died"}, "one died (limit 0)"),
        ({"what": "of another version", "says": "so it is"}, "so it is"),
    ],
)
def test_a_finding_has_its_limit(finding: dict[str, Any], said: str) -> None:
    assert finding_said(finding) == said
