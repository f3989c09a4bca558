"""Whether a replay's figures may be believed, in words: the same for a terminal, Markdown and a page."""

from collections.abc import Mapping
from typing import Any, Final

from llmtap.report.sweep import number
from llmtap.report.terminal import milliseconds

__all__ = ["UNJUDGED", "finding_said", "judged"]

UNJUDGED: Final = "Nobody has judged whether these figures may be believed."
_NOTHING: Final = (
    "Nothing that is checked speaks against the figures: the load was sent as asked and on time, the sender"
    " had room, requests ended well."
)
_IN_MS: Final = frozenset({"clocks", "dispatch_lateness", "uncertainty"})
_IN_SHARES: Final = frozenset({"rate", "sender_cpu", "failed", "prompt_tokens"})


def judged(verdict: Mapping[str, Any]) -> tuple[str, str]:
    """The verdict in a word or two, and what stands between it and its findings."""
    if not verdict["valid"]:
        return "Not valid.", "What speaks against the figures:"
    if verdict.get("findings"):
        return "Valid.", "But mind:"
    return "Valid.", _NOTHING


def finding_said(finding: Mapping[str, Any]) -> str:
    """One finding, with the limit that it is beyond."""
    limit, what, says = finding.get("limit"), finding.get("what"), str(finding["says"])
    if not isinstance(limit, int | float):
        return says
    if what in _IN_MS:
        return f"{says} (limit {milliseconds(limit)} ms)"
    shown = f"{number(limit * 100)} %" if what in _IN_SHARES else number(limit)
    return f"{says} (limit {shown})"
