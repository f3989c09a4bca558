"""Determine the refusal and the guardrail of an exchange, from the verdicts of its events and its text.

`observer.py` feeds `Interventions` with each event, and calls `judge` at the end.

`protocol/verdicts.py` finds verdicts in events. Of several verdicts, one that acts (blocks, replaces) takes
precedence over one that only flags, and the first over later ones. A verdict takes precedence over a refusal
that is found in the text. A flag alone is not a refusal. An intervention after tokens that the client already
has is marked `late`. Texts are not kept.

Source: docs/dialects.md.
"""

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from llmtap.exchange.exchange import Exchange
from llmtap.exchange.strings import clean_word
from llmtap.protocol.delta import Verdict
from llmtap.protocol.verdicts import (
    INPUT,
    MODEL_REFUSAL,
    OUTPUT,
    PASSED_ON,
    UNKNOWN,
    mark_unknown,
    reason_kind,
)

APPLIED_GUARDRAILS: Final = b"x-litellm-applied-guardrails"
_CANNOT: Final = (
    r"I (?:can(?:no|['\u2019])t|won['\u2019]t) (?:help|assist|answer|provide|comply|respond|discuss)\b"
    r"(?! but\b)"
)
_SYMPATHY: Final = r"(?!,? (?:to (?:hear|learn|see)|for|about|if|(?:that )?you)\b)"
"""No match if `sorry` is followed by these words: such an answer comforts its reader or corrects an earlier
one, and is no refusal."""


class TextPattern(NamedTuple):
    """A pattern of the beginning of a refusal. The match of the group `phrase` is reported, so it must match
    only fixed phrases and no text of the answer; without this group, the pattern itself is reported."""

    regex: re.Pattern[str]
    words: tuple[str, ...] = ("",)
    """One of these is in each text that matches, after `str.casefold`. This test is much faster. No `i` is in
    these words, because a regular expression that ignores case also accepts a dotless one."""


TEXT_PATTERNS: Final = tuple(
    TextPattern(re.compile(pattern, re.IGNORECASE), words)
    for words, pattern in (
        # Bedrock's default.
        (("cannot answer",), r"(?P<phrase>Sorry, the model cannot answer this question)"),
        # NeMo's default.
        (("respond to that",), r"(?P<phrase>I['\u2019]?m sorry, I can['\u2019]t respond to that)"),
        (
            ("sorry", "unable"),
            rf"^(?P<phrase>(?:I['\u2019]?m|I am) (?:sorry{_SYMPATHY}|unable)(?:(?:,? but|,|\.) {_CANNOT})?)",
        ),
        (("sorry,",), r"^(?P<phrase>Sorry,)"),
        ((" can", " won"), rf"(?P<phrase>{_CANNOT})"),
        (("content blocked",), r"(?P<phrase>Content blocked)"),
        (("olates ",), r"violates [^\n]{0,80}\b(?:policy|guidelines)\b"),
    )
)
_OPENING_CHARS: Final = 200
_PATTERN_CHARS_MAX: Final = 64
_STOPS: Final = frozenset({"stop", "end_turn", "stop_sequence", "eos", "eos_token", "complete", "completed"})
_STATUS_DENIED: Final = 446
"""Status of Portkey (denied by a hook) and WSO2 (denied by a policy)."""
_STATUS_FLAGGED: Final = 246
"""Status of Portkey: a guardrail hook failed, but was not set to deny."""
_INPUT_WORDS: Final = re.compile(rb"\bpre[-_]|[-_]pre\b|input|request", re.IGNORECASE)
_OUTPUT_WORDS: Final = re.compile(rb"\bpost[-_]|[-_]post\b|output|response", re.IGNORECASE)


class RefusalSigns(NamedTuple):
    """Signs of refusals that the operator of a meter can set."""

    patterns: tuple[TextPattern, ...] = TEXT_PATTERNS
    """Patterns of the beginning of an answer."""
    error_types: frozenset[str] = frozenset()
    """Types or codes of errors by which a guardrail refuses, in lower case."""


BUILT_IN_SIGNS: Final = RefusalSigns()


class _Signal(NamedTuple):
    """A verdict, the index of its event, and the number of tokens before this event."""

    verdict: Verdict
    event: int
    """Index of the event that has the verdict."""
    tokens_before: int
    """Number of tokens before the event."""


class Interventions:
    """Refusals and guardrail interventions of one answer. Its first words are stored only until they are
    compared with the patterns."""

    __slots__ = (
        "_blocking_signal",
        "_error_types",
        "_opening_text",
        "_passing_signal",
        "_patterns",
        "_refusal_phrase",
        "_refusal_signal",
        "applied_guardrails",
        "needs_text",
    )

    def __init__(self, signs: RefusalSigns = BUILT_IN_SIGNS) -> None:
        self.applied_guardrails: bytes | None = None  # value of the header field APPLIED_GUARDRAILS
        self.needs_text = bool(signs.patterns)  # whether `read` still needs texts of the answer
        self._patterns, self._error_types = signs
        """Patterns of refusal texts, and types of errors by which guardrails refuse."""
        self._opening_text = ""
        """First words of the answer so far, in which refusals are searched."""
        self._refusal_phrase: str | None = None  # phrase or pattern that the opening of the answer matches
        self._refusal_signal: _Signal | None = None  # refusal by the model
        self._blocking_signal: _Signal | None = None  # verdict of a guardrail that blocked or replaced text
        self._passing_signal: _Signal | None = None  # verdict of a guardrail that passed the text on

    def add(self, verdict: Verdict, event: int, tokens_before: int) -> None:
        """Add the verdict of the event with this index; `tokens_before`: number of tokens before it."""
        if verdict.kind == MODEL_REFUSAL:
            self._refusal_signal = self._refusal_signal or _Signal(verdict, event, tokens_before)
        elif verdict.action in PASSED_ON:
            self._passing_signal = self._passing_signal or _Signal(verdict, event, tokens_before)
            acted = self._blocking_signal
            if verdict.action == "redacted" and acted is not None and acted.verdict.confidence == "medium":
                # In Bedrock, the stop reason names the guardrail, but the trace shows that the guardrail only
                # masked text. So it blocked nothing.
                self._blocking_signal = None
        else:
            acted = self._blocking_signal
            # A later trace has more details than a stop reason, so it replaces the verdict of a stop reason.
            if acted is None or (acted.verdict.confidence == "medium" and verdict.confidence == "high"):
                self._blocking_signal = _Signal(verdict, event, tokens_before)

    def add_error(self, names: Iterable[str | None], event: int, tokens_before: int) -> None:
        """Add an error of the event with this index: a verdict, if the operator named its type or code."""
        for name in names:
            if name is not None and name.lower() in self._error_types:
                self.add(Verdict("error.type", None, "blocked", value=name), event, tokens_before)
                return

    def read(self, text: str) -> None:
        """Add a text of the answer to its opening; judge the opening as soon as it is long enough."""
        self.read_all((text[:_OPENING_CHARS],))

    def read_all(self, texts: Iterable[str]) -> None:
        self._opening_text = (self._opening_text + "".join(texts)).lstrip()
        if len(self._opening_text) >= _OPENING_CHARS:
            self._search_opening_for_refusal()

    def _search_opening_for_refusal(self) -> None:
        """Search the first characters of the answer for the words of a refusal."""
        opening, self._opening_text = self._opening_text[:_OPENING_CHARS], ""
        self.needs_text = False
        folded = opening.casefold()
        for regex, words in self._patterns:
            m = regex.search(opening) if _has_a_word(folded, words) else None
            if m is not None:
                phrase = m["phrase"] if "phrase" in regex.groupindex else None
                self._refusal_phrase = phrase or regex.pattern[:_PATTERN_CHARS_MAX]
                return

    def judge(self, x: Exchange) -> None:
        """Set `refusal` and `guardrail` of the finished exchange."""
        if self.needs_text:
            self._search_opening_for_refusal()
        acted, flagged = self._blocking_signal, self._passing_signal
        if acted is None and x.status == _STATUS_DENIED:
            acted = _Signal(Verdict("error.type", None, "blocked"), 0, 0)
        if x.status == _STATUS_FLAGGED:
            flagged = flagged or _Signal(Verdict("", None, "flagged", "input"), 0, 0)
            flagged.verdict.signal = "http_status"
        if acted is not None:
            self._complete_verdict(acted, x)
            x.guardrail = _guardrail_json(acted)
        refused = self._refusal_signal
        if acted is not None and (refused is None or acted.event < refused.event):
            refused = acted
        if refused is not None:
            x.refusal = self._refusal_json(refused, x)
        elif self._refusal_phrase is not None and (x.finish_reason or "").lower() in _STOPS:
            x.refusal = {
                "kind": MODEL_REFUSAL,
                "source": "text_pattern",
                "detail": {"value": self._refusal_phrase},
                "confidence": "low",
            }
        if x.guardrail is None and flagged is not None:
            flagged.verdict.phase = flagged.verdict.phase or "output"
            x.guardrail = _guardrail_json(flagged)

    def _complete_verdict(self, signal: _Signal, x: Exchange) -> None:
        """Set phase, kind and confidence of a verdict, which can depend on the whole exchange."""
        verdict, status = signal.verdict, x.status or 0
        no_token = x.timeline.first_token_ns is None
        if verdict.signal == "finish_reason" and no_token and not verdict.substituted:
            verdict.confidence = "medium"
            # Filters of prompts and filters of answers both use `content_filter`, so the number of tokens
            # must show which of them acted. Only filters of answers use the other reasons.
            if reason_kind(verdict.value or "") == "content_filter":
                if x.tokens.output is None:
                    mark_unknown(verdict, "no usage: input or output")
                elif x.tokens.output == 0:
                    verdict.kind, verdict.phase = INPUT, "input"
                    verdict.detail = {"why": "no text and completion_tokens 0"}
        if verdict.phase == UNKNOWN and (phase := self._phase_of_header()) is not None:
            verdict.kind, verdict.phase = None, phase
            verdict.detail = {"header": APPLIED_GUARDRAILS.decode()}
        if verdict.phase is None:
            # The signal does not name the phase. Use the phase of a header, if there is one. Else the phase
            # is `output` if text came before the signal, or if the answer is a stream and the signal is not
            # an error code in its body: the guardrail has possibly withheld the whole answer. Else it is
            # `input`.
            coded = verdict.signal.endswith("error.code") and status < 400
            withheld = x.stream and not coded
            verdict.phase = self._phase_of_header() or (
                "output" if withheld or signal.tokens_before else "input"
            )
        if verdict.kind is None:
            verdict.kind = INPUT if verdict.phase == "input" else OUTPUT
        if verdict.signal.startswith("error."):
            self._name_error(verdict, status, streamed=x.stream)

    def _phase_of_header(self) -> str | None:
        """Return the phase that the header of applied guardrails names; None: none, or both."""
        if self.applied_guardrails is None:
            return None
        before, after = (
            _INPUT_WORDS.search(self.applied_guardrails),
            _OUTPUT_WORDS.search(self.applied_guardrails),
        )
        if (before is None) == (after is None):
            return None
        return "output" if before is None else "input"

    def _name_error(self, verdict: Verdict, status: int, *, streamed: bool) -> None:
        """Set the signal of an error's verdict: the parts of the answer, such as the status, that show it."""
        part = verdict.signal.removeprefix("error.")
        is_decisive = verdict.value is not None or "value" in (verdict.detail or {})
        if status < 400:
            if streamed:
                verdict.signal, verdict.path = f"stream_error.{part}", None
        elif part == "type" and status == _STATUS_DENIED:
            verdict.signal = "http_status"
        elif part != "message":
            verdict.signal = f"http_status+{part}"
        elif not is_decisive and self.applied_guardrails is not None:
            verdict.signal, verdict.detail = "header+error.message", None
        elif not is_decisive:
            verdict.signal = "http_status+message"

    def _refusal_json(self, signal: _Signal, x: Exchange) -> dict[str, object]:
        verdict = signal.verdict
        detail: dict[str, object] = {"event": signal.event}
        if x.status is not None and x.status >= 400:
            detail["http_status"] = x.status
        if verdict.path is not None:
            detail["path"] = verdict.path
        words = {"value": verdict.value, "category": verdict.category}
        detail |= {name: clean_word(word) for name, word in words.items() if word is not None}
        if self.applied_guardrails is not None and "error" in verdict.signal:
            detail["header"] = APPLIED_GUARDRAILS.decode()
        if verdict.substituted:
            detail["substituted"] = True
        detail |= verdict.detail or {}
        return {
            "kind": verdict.kind,
            "source": verdict.signal,
            "detail": detail,
            "confidence": verdict.confidence,
        }


def _has_a_word(text: str, words: tuple[str, ...]) -> bool:
    # A loop is faster than `any` with a generator, which takes as long as the search that it saves.
    for word in words:  # noqa: SIM110
        if word in text:
            return True
    return False


def _guardrail_json(signal: _Signal) -> dict[str, object]:
    verdict = signal.verdict
    out: dict[str, object] = {
        "phase": verdict.phase,
        "action": verdict.action,
        "signal": verdict.signal,
        "event": signal.event,
    }
    if verdict.category is not None:
        out["category"] = clean_word(verdict.category)
    if signal.tokens_before and verdict.action not in PASSED_ON and not verdict.substituted:
        out["late"], out["tokens_before"] = True, signal.tokens_before
    return out
