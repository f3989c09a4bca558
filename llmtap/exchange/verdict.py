"""Determine the outcome, token counts, usage and server times of an exchange, and remove impossible values.

`observer.py` feeds `TokenLadder` and `ServerTiming` with each event, and calls `judge` and
`remove_implausible` at the end. Texts of the server are not kept, except single words. Durations and counts
that cannot be true are removed and counted by reason (`KINDS`): `server_time_negative`,
`server_time_not_finite`, `server_time_too_long` (longer than the exchange) and `token_count` (negative, not
whole, above `USAGE_TOKENS_MAX`, no number).

Source: IETF draft, 4.4 and 4.6.3; docs/dialects.md.
"""

import re
from array import array
from collections.abc import Callable, Iterable
from math import isfinite
from typing import Any, Final

from llmtap.exchange.bounds import BOUNDS
from llmtap.exchange.exchange import Exchange, Timeline, Tokens
from llmtap.exchange.outcome import EventClass, Outcome, TokenSource, is_client_error
from llmtap.exchange.paths import holds_key
from llmtap.protocol.delta import USAGE_TOKENS_MAX, Delta, ServerTime, UsageCounts
from llmtap.protocol.server_times import header_times, trailer_times
from llmtap.protocol.verdicts import MODEL_REFUSAL

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


def no_token_reason(x: Exchange) -> str:
    match x.outcome:
        case Outcome.COMPLETE:
            said = set(x.timeline.events.classes) - {EventClass.KEEPALIVE, EventClass.DONE}
            return "only_metadata" if said else "empty"
        case Outcome.REFUSED:
            kind = (x.refusal or {}).get("kind")
            return "refusal" if kind in (None, MODEL_REFUSAL) else "guardrail"
        case Outcome.CLIENT_CANCELLED:
            return "cancelled"
        case Outcome.CLIENT_ERROR:
            return "client_error"
        case Outcome.REJECTED:
            return "rejected"
        case _:
            return "error"


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
    kept: list[dict[str, object]] = []
    for entry in x.server_timing or ():
        reason = _reason(entry.get("ms"), limit_ns)
        if reason is None:
            kept.append(entry)
        else:
            _count(x, reason)
    if limit_ns is not None and _sum_ns(kept) > limit_ns + len(_PARTS) * ROUNDING_NS:
        parts = [entry for entry in kept if entry.get("name") in _PARTS]
        kept = [entry for entry in kept if entry.get("name") not in _PARTS]
        _count(x, TOO_LONG, len(parts))
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


def _sum_ns(entries: list[dict[str, object]]) -> float:
    """The sum of the parts, each as it was told first, which is the one that figures use."""
    first: dict[object, float] = {}
    for entry in entries:
        ms: Any = entry["ms"]
        first.setdefault(entry.get("name"), ms)
    return sum(first.get(name, 0.0) for name in _PARTS) * 1e6


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
    if x.invalid_values is None:
        x.invalid_values = {}
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
        "_counted", "_counts", "_declared", "_declared_sum", "_tokenizer", "_total", "chunks", "textless",
    )  # fmt: skip

    def __init__(self, tokenizer: Callable[[str], int] | None) -> None:
        self.chunks = 0
        self.textless = 0
        """Chunks of output without a text or a count: audio, the name of a call, arguments as an object. They
        stand in for `chunks` where there are none: beside a transcript or the arguments they add nothing."""
        self._counts = UsageCounts()
        self._total = False
        self._declared = {TokenSource.TOKEN_IDS: 0, TokenSource.LOGPROBS: 0, TokenSource.RUNNING_USAGE: 0}
        self._declared_sum = 0
        self._tokenizer = tokenizer
        self._counted = 0

    @property
    def tokenizes(self) -> bool:
        return self._tokenizer is not None

    @property
    def refused(self) -> int:
        return self._counts.refused

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
        self._counts, self._total = counts, total

    def result(self, *, stream: bool) -> Tokens:
        counts = self._counts
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
