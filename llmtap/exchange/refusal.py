"""Decide from its answer whether an exchange was refused, or a guardrail acted on it.

`observer.py` passes each verdict of an event (`protocol/verdicts.py` finds them) to `Interventions`; `judge`
combines them with the HTTP status, a header and the first words of the answer, and writes `refusal` and
`guardrail` into the Exchange at its end. A verdict that acts (blocks, replaces) goes before one that flags,
the first before the later, signs before words. A flag alone is no refusal. An intervention behind tokens that
the client already has is marked `late`.

Source: docs/dialects.md.
"""

import re
from dataclasses import dataclass
from typing import Final

from llmtap.exchange.exchange import Exchange
from llmtap.protocol.delta import Verdict
from llmtap.protocol.verdicts import INPUT, MODEL_REFUSAL, OUTPUT, PASSED_ON, reason_kind

APPLIED_GUARDRAILS: Final = b"x-litellm-applied-guardrails"

_CANNOT: Final = (
    r"I (?:can(?:no|['\u2019])t|won['\u2019]t) (?:help|assist|answer|provide|comply|respond|discuss)\b"
)
TEXT_PATTERNS: Final = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(?P<said>Sorry, the model cannot answer this question)",  # Bedrock's default
        r"(?P<said>I['\u2019]?m sorry, I can['\u2019]t respond to that)",  # NeMo's default
        rf"^(?P<said>(?:I['\u2019]?m|I am) (?:sorry|unable)(?:(?:,? but|,|\.) {_CANNOT})?)",
        r"^(?P<said>Sorry,)",
        rf"(?P<said>{_CANNOT})",
        r"(?P<said>Content blocked)",
        r"violates [^\n]{0,80}\b(?:policy|guidelines)\b",
    )
)
"""Words of a refusal. What the group `said` matched is reported, so it may only match closed phrases; a
pattern without one is reported by its own text."""
_OPENING_CHARS: Final = 200
_PATTERN_CHARS_MAX: Final = 64
_STOPS: Final = frozenset({"stop", "end_turn", "stop_sequence", "eos", "eos_token", "complete", "completed"})
_HOOKS_FAILED: Final = 446
"""Status of Portkey and WSO2: denied by a hook, by a policy."""
_HOOKS_FLAGGED: Final = 246
"""Portkey's: a hook failed and did not deny."""
_BEFORE: Final = re.compile(rb"\bpre[-_]|[-_]pre\b|input|request", re.IGNORECASE)
_AFTER: Final = re.compile(rb"\bpost[-_]|[-_]post\b|output|response", re.IGNORECASE)


@dataclass(slots=True, frozen=True)
class _Said:
    verdict: Verdict
    event: int
    tokens_before: int


class Interventions:
    """What the events of one answer say of refusals; its first words are kept only until they are judged."""

    __slots__ = ("_acted", "_flagged", "_opening", "_patterns", "_refused", "_words", "applied", "reading")

    def __init__(self, patterns: tuple[re.Pattern[str], ...] = TEXT_PATTERNS) -> None:
        self.applied: bytes | None = None
        self.reading = bool(patterns)
        self._patterns = patterns
        self._opening = ""
        self._words: str | None = None
        self._refused: _Said | None = None  # by the model
        self._acted: _Said | None = None
        self._flagged: _Said | None = None

    def add(self, verdict: Verdict, event: int, tokens_before: int) -> None:
        """What the event with this index says, which came behind so many tokens."""
        if verdict.kind == MODEL_REFUSAL:
            self._refused = self._refused or _Said(verdict, event, tokens_before)
        elif verdict.action in PASSED_ON:
            self._flagged = self._flagged or _Said(verdict, event, tokens_before)
            acted = self._acted
            if verdict.action == "redacted" and acted is not None and acted.verdict.confidence == "medium":
                self._acted = None  # Bedrock's trace: the guardrail named by the stop reason only masked
        else:
            acted = self._acted
            # A trace that follows says what a stop reason left open.
            if acted is None or (acted.verdict.confidence == "medium" and verdict.confidence == "high"):
                self._acted = _Said(verdict, event, tokens_before)

    def read(self, text: str) -> None:
        self._opening = (self._opening + text[:_OPENING_CHARS]).lstrip()
        if len(self._opening) >= _OPENING_CHARS:
            self._judge_words()

    def _judge_words(self) -> None:
        opening, self._opening = self._opening[:_OPENING_CHARS], ""
        self.reading = False
        for pattern in self._patterns:
            m = pattern.search(opening)
            if m is not None:
                said = m["said"] if "said" in pattern.groupindex else None
                self._words = said or pattern.pattern[:_PATTERN_CHARS_MAX]
                return

    def judge(self, x: Exchange) -> None:
        if self.reading:
            self._judge_words()
        status = x.status or 0
        acted, flagged = self._acted, self._flagged
        if acted is None and status == _HOOKS_FAILED:
            acted = _Said(Verdict("error.type", None, "blocked"), 0, 0)
        if status == _HOOKS_FLAGGED:
            found = Verdict("http_status", None, "flagged", "input") if flagged is None else flagged.verdict
            found.signal = "http_status"
            flagged = _Said(found, 0 if flagged is None else flagged.event, 0)
        if acted is not None:
            self._settle(acted, x)
            x.guardrail = _guardrail(acted)
        refused = self._refused
        if acted is not None and (refused is None or acted.event < refused.event):
            refused = acted
        if refused is not None:
            x.refusal = self._refusal(refused, x)
        elif self._words is not None and (x.finish_reason or "").lower() in _STOPS:
            x.refusal = _public(MODEL_REFUSAL, "text_pattern", {"value": self._words}, "low")
        if x.guardrail is None and flagged is not None:
            flagged.verdict.phase = flagged.verdict.phase or "output"
            x.guardrail = _guardrail(flagged)

    def _settle(self, said: _Said, x: Exchange) -> None:
        verdict, status = said.verdict, x.status or 0
        nothing_came = x.timeline.first_token_ns is None
        if verdict.signal == "finish_reason" and nothing_came and not verdict.substituted:
            verdict.confidence = "medium"
            if x.tokens.output is None:
                verdict.detail = {"why": "no usage: input or output"}
            elif x.tokens.output == 0 and reason_kind(verdict.value or "") == "content_filter":
                verdict.kind, verdict.phase = INPUT, "input"
                verdict.detail = {"why": "no text and completion_tokens 0"}
        if verdict.phase is None:
            # A code that is used for both: by whether text came. Whole answers may be withheld.
            coded = verdict.signal.endswith("error.code") and status < 400
            withheld = x.stream and not coded
            verdict.phase = self._phase_of_header() or (
                "output" if withheld or said.tokens_before else "input"
            )
        if verdict.kind is None:
            verdict.kind = INPUT if verdict.phase == "input" else OUTPUT
        if verdict.signal.startswith("error."):
            self._name_error(verdict, status, streamed=x.stream)

    def _phase_of_header(self) -> str | None:
        if self.applied is None:
            return None
        before, after = _BEFORE.search(self.applied), _AFTER.search(self.applied)
        if (before is None) == (after is None):
            return None
        return "output" if before is None else "input"

    def _name_error(self, verdict: Verdict, status: int, *, streamed: bool) -> None:
        """The signal of an error: an HTTP status with it is part of the sign."""
        part = verdict.signal.removeprefix("error.")
        if status < 400:
            if streamed:
                verdict.signal, verdict.path = f"stream_error.{part}", None
        elif part == "type" and status == _HOOKS_FAILED:
            verdict.signal = "http_status"
        elif part != "message":
            verdict.signal = f"http_status+{part}"
        elif verdict.value is None and self.applied is not None:
            verdict.signal, verdict.detail = "header+error.message", None
        elif verdict.value is None:
            verdict.signal = "http_status+message"

    def _refusal(self, said: _Said, x: Exchange) -> dict[str, object]:
        verdict = said.verdict
        detail: dict[str, object] = {"event": said.event}
        if x.status is not None and x.status >= 400:
            detail["http_status"] = x.status
        known = {"path": verdict.path, "value": verdict.value, "category": verdict.category}
        detail |= {name: value for name, value in known.items() if value is not None}
        if self.applied is not None and "error" in verdict.signal:
            detail["header"] = APPLIED_GUARDRAILS.decode()
        if verdict.substituted:
            detail["substituted"] = True
        detail |= verdict.detail or {}
        return _public(verdict.kind, verdict.signal, detail, verdict.confidence)


def _public(kind: str | None, source: str, detail: dict[str, object], confidence: str) -> dict[str, object]:
    return {"kind": kind, "source": source, "detail": detail, "confidence": confidence}


def _guardrail(said: _Said) -> dict[str, object]:
    verdict = said.verdict
    out: dict[str, object] = {
        "phase": verdict.phase, "action": verdict.action, "signal": verdict.signal, "event": said.event,
    }  # fmt: skip
    if verdict.category is not None:
        out["category"] = verdict.category
    if said.tokens_before and verdict.action not in PASSED_ON and not verdict.substituted:
        out["late"], out["tokens_before"] = True, said.tokens_before
    return out
