"""Determine outcome, refusal, token counts, usage and server times of an exchange; remove impossible values.

`observer.py` feeds `Interventions` (refusals and guardrails), `TokenLadder` and `ServerTiming` with each
event, and calls `judge` and `remove_implausible` at the end. Texts of the server are not kept, except single
words.

A verdict of an event (`protocol/verdicts.py` finds them) that acts (blocks, replaces) goes before one that
flags, the first before the later, signs before words. A flag alone is no refusal. An intervention behind
tokens that the client already has is marked `late`. Durations and counts that cannot be true are removed and
counted by reason (`KINDS`): `server_time_negative`, `server_time_not_finite`, `server_time_too_long` (longer
than the exchange) and `token_count` (negative, not whole, above `USAGE_TOKENS_MAX`, no number).

Source: IETF draft, 4.4 and 4.6.3; docs/dialects.md.
"""

import re
from array import array
from collections.abc import Callable, Iterable
from math import isfinite
from typing import Any, Final, NamedTuple

from llmtap.exchange.bounds import BOUNDS, holds_key
from llmtap.exchange.exchange import Exchange, Timeline, Tokens
from llmtap.exchange.outcome import EventClass, Outcome, TokenSource, is_client_error
from llmtap.protocol.delta import USAGE_TOKENS_MAX, Delta, ServerTime, UsageCounts, Verdict
from llmtap.protocol.server_times import header_times, trailer_times
from llmtap.protocol.verdicts import INPUT, MODEL_REFUSAL, OUTPUT, PASSED_ON, reason_kind

WORD_CHARS_MAX: Final = BOUNDS["usage"].chars
_WORD: Final = re.compile(rf"[A-Za-z0-9_.:/\-]{{1,{WORD_CHARS_MAX}}}")
_FIGURE_MAX: Final = 1 << 53
_USAGE_DEPTH_MAX: Final = 4
_USAGE_ITEMS_MAX: Final = 64
"""Members of a usage object, and of each object in it; the longest known has 18."""


def judge(
    x: Exchange, said: Outcome, *, done: bool, lost: str | None, error_type: str | None
) -> tuple[Outcome, str | None]:
    """Return the relay's outcome refined by the events, and a sentence about it. `lost` says why the body
    could not be followed, `error_type` names an error that the events reported."""
    if said is not Outcome.COMPLETE:
        return said, None
    about = f" ({error_type})" if error_type is not None and is_word(error_type) else ""
    if x.refusal is not None and x.refusal["confidence"] != "low":
        return Outcome.REFUSED, None
    if x.status is not None and x.status >= 400:
        outcome = Outcome.CLIENT_ERROR if is_client_error(x.status) else Outcome.UPSTREAM_ERROR
        return outcome, f"upstream answered {x.status}{about}"
    if error_type is not None:
        return Outcome.UPSTREAM_ERROR, f"upstream sent an error in its answer{about}"
    if lost is not None:
        return said, f"upstream sent a body that cannot be read: {lost}"
    if x.stream and x.dialect is not None and not done and x.finish_reason is None:
        return Outcome.TRUNCATED, "upstream ended the stream without a finish reason or an end marker"
    return said, None


_NO_TOKEN: Final = {
    Outcome.CLIENT_CANCELLED: "cancelled", Outcome.CLIENT_ERROR: "client_error",
    Outcome.REJECTED: "rejected",
}  # fmt: skip


def no_token_reason(x: Exchange) -> str:
    if x.outcome is Outcome.COMPLETE:
        said = set(x.timeline.events.classes) - {EventClass.KEEPALIVE, EventClass.DONE}
        return "only_metadata" if said else "empty"
    if x.outcome is Outcome.REFUSED:
        kind = (x.refusal or {}).get("kind")
        return "refusal" if kind in (None, MODEL_REFUSAL) else "guardrail"
    return _NO_TOKEN.get(x.outcome, "error")


def figures_of(usage: dict[str, Any], depth: int = 1) -> dict[str, Any]:
    """A usage object as sent, as far as it is figures and single words: texts have no business in it."""
    out: dict[str, Any] = {}
    for key, value in usage.items():
        if len(out) == _USAGE_ITEMS_MAX:
            break
        if not isinstance(key, str) or not is_word(key):
            continue
        if isinstance(value, dict):
            if depth < _USAGE_DEPTH_MAX:
                out[key] = figures_of(value, depth + 1)
        elif value is None or _is_figure(value) or (isinstance(value, str) and is_word(value)):
            out[key] = value
    return out


def is_reason(text: str) -> bool:
    """Whether it is a word, or two with a colon between: `content_filter: PROHIBITED_CONTENT` (Gemini)."""
    return is_word(text.replace(": ", ":", 1))


def is_word(text: str) -> bool:
    """A name of at most WORD_CHARS_MAX characters, as programs write them, and no key."""
    return _WORD.fullmatch(text) is not None and not holds_key(text)


def _is_figure(value: Any) -> bool:
    # What every JSON reader can take: NaN is none, and beyond 2^53 not all of them are exact.
    return isinstance(value, int | float) and -_FIGURE_MAX <= value <= _FIGURE_MAX


TOKEN_COUNT: Final = "token_count"
NEGATIVE: Final = "server_time_negative"
NOT_FINITE: Final = "server_time_not_finite"
TOO_LONG: Final = "server_time_too_long"
KINDS: Final = (NEGATIVE, NOT_FINITE, TOO_LONG, TOKEN_COUNT)
ROUNDING_NS: Final = 1_000_000
"""Tolerance for each duration: many servers round theirs to whole milliseconds."""
TOKENS_MAX: Final = 1 << 20
"""Tokens that the events of one exchange may declare: no answer is as long, and figures counted from them
take memory."""
_TOKENIZED_CHARS_MAX: Final = 1 << 16
"""Of one event; a tokenizer is given up at a longer text, which would delay all other exchanges."""
_PARTS: Final = ("queue", "prefill", "decode")
"""Durations that follow one another, so that their sum is no longer than the exchange."""


def remove_implausible(x: Exchange) -> None:
    """Remove durations and counts that cannot be true, and count them. A duration may last from submit to the
    end, plus the exchange's uncertainty and ROUNDING_NS; without an end only its sign and finiteness are
    checked."""
    if x.server_timing is not None or x.server_gaps_ns is not None:
        _check_times(x)
    tokens = x.tokens
    for name in ("input", "output", "reasoning", "cached"):
        n = getattr(tokens, name)
        if n is not None and not 0 <= n <= USAGE_TOKENS_MAX:
            setattr(tokens, name, None)
            _count(x, TOKEN_COUNT)
            if name == "output":
                tokens.source = TokenSource.NONE


def _check_times(x: Exchange) -> None:
    lasted_ns = _lasted_ns(x.timeline)
    limit_ns = None if lasted_ns is None else lasted_ns + x.uncertainty_ns
    kept: list[dict[str, Any]] = []
    for entry in x.server_timing or ():
        reason = _reason(entry.get("ms"), limit_ns)
        if reason is None:
            kept.append(entry)
        else:
            _count(x, reason)
    # Each part as it was told first, which is the one that figures use.
    first = {entry["name"]: entry["ms"] for entry in reversed(kept) if entry.get("name") in _PARTS}
    if limit_ns is not None and sum(first.values()) * 1e6 > limit_ns + len(_PARTS) * ROUNDING_NS:
        others = [entry for entry in kept if entry.get("name") not in _PARTS]
        _count(x, TOO_LONG, len(kept) - len(others))
        kept = others
    x.server_timing = kept or None
    gaps_ns = x.server_gaps_ns
    if gaps_ns is not None and limit_ns is not None and sum(gaps_ns) > limit_ns + ROUNDING_NS:
        x.server_gaps_ns = None
        _count(x, TOO_LONG)


def _reason(ms: Any, limit_ns: int | None) -> str | None:
    if not isinstance(ms, int | float) or not isfinite(ms):
        return NOT_FINITE
    if ms < 0:
        return NEGATIVE
    return TOO_LONG if limit_ns is not None and ms * 1e6 > limit_ns + ROUNDING_NS else None


def _lasted_ns(t: Timeline) -> int | None:
    """From submit to the last that is known of the response; None where nothing tells."""
    end_ns = t.response_end_ns
    if end_ns is None:
        last = t.events.t_ns[-1] if t.events.t_ns else None
        points = (t.head_ns, t.first_byte_ns, t.last_token_ns, last, t.delivered_ns)
        end_ns = max((ns for ns in points if ns is not None), default=None)
    if end_ns is None:
        return None
    # An answer may come before the request was all out.
    began_ns = t.arrival_ns if t.submit_ns is None or t.submit_ns > end_ns else t.submit_ns
    return end_ns - began_ns if end_ns > began_ns else None


def _count(x: Exchange, reason: str, n: int = 1) -> None:
    x.invalid_values = x.invalid_values or {}
    x.invalid_values[reason] = x.invalid_values.get(reason, 0) + n


_ENTRIES_MAX: Final = 64
"""Kept of one exchange, from each place; the most talkative server known tells five."""
_BURST_TOKENS_MAX: Final = 1_024
"""Tokens between two stamps of a server's clock. Speculation gives a handful; more is no clock of tokens."""
_GAPS_MAX: Final = 1 << 18
"""Of one exchange, as many as events are logged of it; 8 bytes each. Later ones are left out."""


class TokenLadder:
    """Token count of one answer by its best source (IETF draft, 4.4). `tokenizer` counts the tokens in a
    text."""

    __slots__ = (
        "_counted", "_declared", "_declared_sum", "_tokenizer", "_total", "chunks", "counts", "textless",
    )  # fmt: skip

    def __init__(self, tokenizer: Callable[[str], int] | None) -> None:
        self.chunks = 0
        self.textless = 0
        """Chunks of output without a text or a count: audio, the name of a call, arguments as an object. They
        stand in for `chunks` where there are none: beside a transcript or the arguments they add nothing."""
        self.counts = UsageCounts()
        self._total = False
        self._declared = {TokenSource.TOKEN_IDS: 0, TokenSource.LOGPROBS: 0, TokenSource.RUNNING_USAGE: 0}
        self._declared_sum = 0
        self._tokenizer = tokenizer
        self._counted = 0

    @property
    def tokenizes(self) -> bool:
        return self._tokenizer is not None

    @property
    def so_far(self) -> int:
        declared = next((n for n in self._declared.values() if n), 0)
        return declared or self._counted or self.chunks or self.textless

    def add(self, delta: Delta) -> int:
        """Count an event that declares tokens, or has a text; return its tokens, -1 if they are unknown."""
        tokens = delta.tokens
        if tokens > 0:
            self._declared_sum += tokens
            if self._declared_sum > TOKENS_MAX:
                return -1
            self._declared[delta.token_source] += tokens
        elif delta.text:
            return self.tokenize(delta.text)
        return tokens

    def tokenize(self, text: str) -> int:
        """Return the tokens in the text of an event; -1 from the first text on that cannot be counted."""
        tokenizer = self._tokenizer
        try:
            if tokenizer is None or len(text) > _TOKENIZED_CHARS_MAX:
                raise ValueError
            n = tokenizer(text)
        except Exception:  # a tokenizer that fails must not end the measurement
            self._tokenizer = None
            self._counted = 0
            return -1
        self._counted += n
        return n

    def count(self, counts: UsageCounts, *, total: bool) -> None:
        self.counts, self._total = counts, total

    def result(self, *, stream: bool) -> Tokens:
        counts = self.counts
        tokens = Tokens(counts.input, None, counts.reasoning, counts.cached)
        if self._total and counts.output is not None:
            tokens.output, tokens.source = counts.output, TokenSource.USAGE
            return tokens
        for source, n in (
            *self._declared.items(),
            (TokenSource.TOKENIZER, self._counted if stream else 0),
            (TokenSource.CHUNKS, (self.chunks or self.textless) if stream else 0),
        ):
            if n:
                tokens.output, tokens.source = n, source
                break
        return tokens


class ServerTiming:
    """Collects it. The same duration told again from the same place replaces the earlier one."""

    __slots__ = ("_by_event", "_by_head", "_by_trailer", "_clock_ns", "_gaps_ns")

    def __init__(self) -> None:
        self._by_head: list[ServerTime] = []
        self._by_event: dict[tuple[str, str], tuple[int, ServerTime]] = {}
        self._by_trailer: list[ServerTime] = []
        self._clock_ns = -1
        self._gaps_ns: array[int] = array("q")

    def read_head(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self._by_head = header_times(headers)

    def read_trailers(self, lines: Iterable[bytes]) -> None:
        self._by_trailer = trailer_times(lines)

    def read_event(self, event: int, delta: Delta) -> None:
        for told in delta.server_times:
            key = (told.name, told.where)
            if key in self._by_event or len(self._by_event) < _ENTRIES_MAX:
                self._by_event[key] = (event, told)
        clock_ns = delta.server_clock_ns
        if clock_ns < 0:
            return
        gap_ns, tokens = clock_ns - self._clock_ns, max(1, delta.tokens)
        # A clock that goes back was set anew, by another attempt say.
        known = self._clock_ns >= 0 and gap_ns >= 0 and tokens <= _BURST_TOKENS_MAX
        if known and len(self._gaps_ns) + tokens <= _GAPS_MAX:
            share_ns, left = divmod(gap_ns, tokens)
            self._gaps_ns.extend([share_ns] * (tokens - left) + [share_ns + 1] * left)
        self._clock_ns = clock_ns

    def entries(self) -> list[dict[str, object]] | None:
        events = [_public(told) | {"event": i, "path": told.path} for i, told in self._by_event.values()]
        head, trailer = (map(_public, part[:_ENTRIES_MAX]) for part in (self._by_head, self._by_trailer))
        return [*head, *events, *trailer] or None

    def gaps_ns(self) -> "array[int] | None":
        """Gaps between tokens by the server's own clock, a gap of several tokens shared among them."""
        return self._gaps_ns or None


def _public(told: ServerTime) -> dict[str, object]:
    return {"name": told.name, "ms": told.ms, "where": told.where, "unit": told.unit}


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


class _Said(NamedTuple):
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
        acted, flagged = self._acted, self._flagged
        if acted is None and x.status == _HOOKS_FAILED:
            acted = _Said(Verdict("error.type", None, "blocked"), 0, 0)
        if x.status == _HOOKS_FLAGGED:
            flagged = flagged or _Said(Verdict("", None, "flagged", "input"), 0, 0)
            flagged.verdict.signal = "http_status"
        if acted is not None:
            self._settle(acted, x)
            x.guardrail = _guardrail(acted)
        refused = self._refused
        if acted is not None and (refused is None or acted.event < refused.event):
            refused = acted
        if refused is not None:
            x.refusal = self._refusal(refused, x)
        elif self._words is not None and (x.finish_reason or "").lower() in _STOPS:
            x.refusal = {
                "kind": MODEL_REFUSAL, "source": "text_pattern", "detail": {"value": self._words},
                "confidence": "low",
            }  # fmt: skip
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
        return {
            "kind": verdict.kind, "source": verdict.signal, "detail": detail,
            "confidence": verdict.confidence,
        }  # fmt: skip


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
