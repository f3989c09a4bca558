"""Determine outcome, token counts, usage and server times of an exchange; remove impossible values.

`observer.py` feeds `TokenLadder` and `ServerTiming` with each event, and calls `judge` and
`remove_implausible` at the end. Texts of the server are not kept, except single words. Impossible durations
and token counts are removed and counted by reason (`REMOVAL_REASONS`): `server_time_negative`,
`server_time_not_finite`, `server_time_too_long` (longer than the exchange) and `token_count` (negative, not
whole, above `USAGE_TOKENS_MAX`, or not a number).

Source: IETF draft, 4.4 and 4.6.3; docs/dialects.md.
"""

from array import array
from collections.abc import Callable, Iterable
from math import isfinite
from typing import Any, Final

from llmtap.exchange.exchange import Exchange, Timeline, Tokens
from llmtap.exchange.outcome import EventClass, Outcome, TokenSource, is_client_error
from llmtap.exchange.strings import is_word
from llmtap.json_types import JsonObject
from llmtap.protocol.delta import USAGE_TOKENS_MAX, Delta, ServerTime, UsageCounts
from llmtap.protocol.server_times import header_times, trailer_times
from llmtap.protocol.verdicts import MODEL_REFUSAL

_FIGURE_MAX: Final = 1 << 53
_USAGE_DEPTH_MAX: Final = 4
_USAGE_ITEMS_MAX: Final = 64
"""Maximum number of members of a usage object, and of each object in it; the longest known has 18."""


def judge(
    x: Exchange, reported: Outcome, *, cut_off: bool, lost: str | None, error_type: str | None
) -> tuple[Outcome, str | None]:
    """Return the outcome (as the relay reported it, or more exact by the events), and a sentence about it.

    Args:
        cut_off: the answer ended without the end marker that its dialect always has.
        lost: reason why the body could not be parsed to its end; None: it was parsed.
        error_type: type of an error in the events.
    """
    if reported is not Outcome.COMPLETE:
        return reported, None
    about = f" ({error_type})" if error_type is not None and is_word(error_type) else ""
    if x.refusal is not None and x.refusal["confidence"] != "low":
        return Outcome.REFUSED, None
    if x.status is not None and x.status >= 400:
        outcome = Outcome.CLIENT_ERROR if is_client_error(x.status) else Outcome.UPSTREAM_ERROR
        return outcome, f"upstream answered {x.status}{about}"
    if error_type is not None:
        return Outcome.UPSTREAM_ERROR, f"upstream sent an error in its answer{about}"
    if lost is not None:
        return reported, lost if lost.startswith(
            "client "
        ) else f"upstream sent a body that cannot be read: {lost}"
    if x.stream and cut_off and x.timeline.first_token_ns is not None:
        return Outcome.TRUNCATED, "upstream ended the stream without a finish reason or an end marker"
    return reported, None


_NO_TOKEN: Final = {
    Outcome.CLIENT_CANCELLED: "cancelled",
    Outcome.CLIENT_ERROR: "client_error",
    Outcome.REJECTED: "rejected",
}


def no_token_reason(x: Exchange) -> str:
    """Return the reason why a stream has no token (`Exchange.no_token_reason`)."""
    if x.outcome is Outcome.COMPLETE:
        classes = set(x.timeline.events.classes) - {EventClass.KEEPALIVE, EventClass.DONE}
        return "only_metadata" if classes else "empty"
    if x.outcome is Outcome.REFUSED:
        kind = (x.refusal or {}).get("kind")
        return "refusal" if kind in (None, MODEL_REFUSAL) else "guardrail"
    return _NO_TOKEN.get(x.outcome, "error")


def figures_of(usage: JsonObject, depth: int = 1) -> JsonObject:
    """Return the numbers and single words of a usage object; texts are omitted."""
    out: JsonObject = {}
    for key, value in usage.items():
        if len(out) == _USAGE_ITEMS_MAX:
            break
        if not isinstance(key, str) or not is_word(key):
            continue
        if isinstance(value, dict):
            if depth < _USAGE_DEPTH_MAX:
                out[key] = figures_of(value, depth + 1)
        elif value is None or _is_json_number(value) or (isinstance(value, str) and is_word(value)):
            out[key] = value
    return out


def _is_json_number(value: Any) -> bool:
    # Accept only numbers that every JSON reader can represent: not NaN, and within 2^53.
    return isinstance(value, int | float) and -_FIGURE_MAX <= value <= _FIGURE_MAX


TOKEN_COUNT: Final = "token_count"
NEGATIVE: Final = "server_time_negative"
NOT_FINITE: Final = "server_time_not_finite"
TOO_LONG: Final = "server_time_too_long"
REMOVAL_REASONS: Final = (NEGATIVE, NOT_FINITE, TOO_LONG, TOKEN_COUNT)
ROUNDING_NS: Final = 1_000_000
"""Tolerance in the comparison of a duration with the exchange: many servers round to whole milliseconds."""
TOKENS_MAX: Final = 1 << 20
"""Maximum number of tokens that the events of an exchange can declare. No answer has more, and the figures
computed from the tokens take memory."""
_TOKENIZED_CHARS_MAX: Final = 1 << 16
"""Maximum length of an event's text for the tokenizer. A longer text would delay all other exchanges."""
_PARTS: Final = ("queue", "prefill", "decode")
"""Names of durations of consecutive phases, whose sum cannot exceed the duration of the exchange."""


def remove_implausible(x: Exchange) -> None:
    """Remove impossible durations and token counts from an exchange, and count them. The longest possible
    duration is the time from submit to the end, plus the exchange's uncertainty and ROUNDING_NS. If the end
    is unknown, every finite duration that is not negative is possible."""
    if x.server_timing is not None or x.server_gaps_ns is not None:
        _check_times(x)
    tokens = x.tokens
    for name in ("input", "output", "reasoning", "cached"):
        n = getattr(tokens, name)
        if n is not None and not 0 <= n <= USAGE_TOKENS_MAX:
            setattr(tokens, name, None)
            _add_count(x, TOKEN_COUNT)
            if name == "output":
                tokens.source = TokenSource.NONE


def _check_times(x: Exchange) -> None:
    """Remove impossible times of the server, such as those longer than the exchange, and count them."""
    duration_ns = _duration_ns(x.timeline)
    limit_ns = None if duration_ns is None else duration_ns + x.uncertainty_ns
    valid: list[dict[str, Any]] = []
    for entry in x.server_timing or ():
        reason = _reason_to_remove(entry.get("ms"), limit_ns)
        if reason is None:
            valid.append(entry)
        else:
            _add_count(x, reason)
    # Sum the first duration of each name, because the metrics use the first one.
    first = {entry["name"]: entry["ms"] for entry in reversed(valid) if entry.get("name") in _PARTS}
    if limit_ns is not None and sum(first.values()) * 1e6 > limit_ns + len(_PARTS) * ROUNDING_NS:
        others = [entry for entry in valid if entry.get("name") not in _PARTS]
        _add_count(x, TOO_LONG, len(valid) - len(others))
        valid = others
    x.server_timing = valid or None
    gaps_ns = x.server_gaps_ns
    if gaps_ns is not None and limit_ns is not None and sum(gaps_ns) > limit_ns + ROUNDING_NS:
        x.server_gaps_ns = None
        _add_count(x, TOO_LONG)


def _reason_to_remove(ms: Any, limit_ns: int | None) -> str | None:
    if not isinstance(ms, int | float) or not isfinite(ms):
        return NOT_FINITE
    if ms < 0:
        return NEGATIVE
    return TOO_LONG if limit_ns is not None and ms * 1e6 > limit_ns + ROUNDING_NS else None


def _duration_ns(t: Timeline) -> int | None:
    """Return the time from submission to the last known point of the response; None: unknown."""
    end_ns = t.response_end_ns
    if end_ns is None:
        last = t.events.t_ns[-1] if t.events.t_ns else None
        points = (t.head_ns, t.first_byte_ns, t.last_token_ns, last, t.delivered_ns)
        end_ns = max((ns for ns in points if ns is not None), default=None)
    if end_ns is None:
        return None
    # A server can answer before the request has been sent completely. Then count from the arrival.
    began_ns = t.arrival_ns if t.submit_ns is None or t.submit_ns > end_ns else t.submit_ns
    return end_ns - began_ns if end_ns > began_ns else None


def _add_count(x: Exchange, reason: str, n: int = 1) -> None:
    x.invalid_values = x.invalid_values or {}
    x.invalid_values[reason] = x.invalid_values.get(reason, 0) + n


_ENTRIES_MAX: Final = 64
"""Maximum number of server times of an exchange from each place; no known server sends more than five."""
_BURST_TOKENS_MAX: Final = 1_024
"""Maximum number of tokens between two timestamps of a server. Speculative decoding gives a few; with more,
the timestamps are not those of tokens."""
_GAPS_MAX: Final = 1 << 18
"""Maximum number of gaps between tokens that are stored for an exchange, 8 bytes each: as many as logged
events. Further gaps are omitted."""


class TokenLadder:
    """Token count of one answer by its best source (IETF draft, 4.4). `tokenizer` returns the number of
    tokens in a text."""

    __slots__ = (
        "_declared_counts",
        "_declared_sum",
        "_has_total",
        "_tokenized_count",
        "_tokenizer",
        "chunks",
        "counts",
        "textless",
    )

    def __init__(self, tokenizer: Callable[[str], int] | None) -> None:
        self.chunks = 0
        """Number of chunks of output with a text."""
        self.textless = 0
        """Number of chunks of output without a text or a count: audio, the name of a call, arguments as an
        object. Used only if `chunks` is 0: otherwise a transcript or arguments as text count already."""
        self.counts = UsageCounts()  # counts in the latest usage
        self._has_total = False  # whether `counts` are of the whole answer
        self._declared_counts = {
            TokenSource.TOKEN_IDS: 0,
            TokenSource.LOGPROBS: 0,
            TokenSource.RUNNING_USAGE: 0,
        }
        """By source: number of output tokens that the events declared."""
        self._declared_sum = 0
        """Sum of the tokens that events declared, for the limit TOKENS_MAX."""
        self._tokenizer = tokenizer
        self._tokenized_count = 0
        """Number of tokens that the configured tokenizer counted."""

    @property
    def tokenizes(self) -> bool:
        return self._tokenizer is not None

    @property
    def so_far(self) -> int:
        """Number of tokens by the best source so far."""
        declared = next((n for n in self._declared_counts.values() if n), 0)
        return declared or self._tokenized_count or self.chunks or self.textless

    def add(self, delta: Delta) -> int:
        """Count an event that declares tokens, or has a text; return its tokens, -1 if they are unknown."""
        tokens = delta.tokens
        if tokens > 0:
            return self.add_declared(tokens, delta.token_source)
        return self.tokenize(delta.text) if delta.text else tokens

    def add_declared(self, tokens: int, source: TokenSource = TokenSource.RUNNING_USAGE) -> int:
        """Count tokens that an event declares; return them, or -1 if there are none or too many in all."""
        if tokens <= 0:
            return -1
        self._declared_sum += tokens
        if self._declared_sum > TOKENS_MAX:
            return -1
        self._declared_counts[source] += tokens
        return tokens

    def tokenize(self, text: str) -> int:
        """Return the number of tokens in an event's text; -1 after the first text that cannot be counted."""
        tokenizer = self._tokenizer
        try:
            if tokenizer is None or len(text) > _TOKENIZED_CHARS_MAX:
                raise ValueError("there is no tokenizer, or the text is too long for it")
            n = tokenizer(text)
        except Exception:  # a tokenizer that fails must not end the measurement, so use another source
            self._tokenizer = None
            self._tokenized_count = 0
            return -1
        self._tokenized_count += n
        return n

    def count(self, counts: UsageCounts, *, total: bool) -> None:
        """Store the usage that an event has; `total`: it covers the whole answer."""
        self.counts, self._has_total = counts, total

    @property
    def has_output(self) -> bool:
        """Whether an event had output."""
        return bool(self.chunks or self.textless)

    def result(self, *, stream: bool, without_usage: bool = False) -> Tokens:
        """Return the counts of the whole answer. `without_usage`: ignore the output count of the usage."""
        counts = self.counts
        tokens = Tokens(counts.input, None, counts.reasoning, counts.cached)
        if self._has_total and counts.output is not None and not without_usage:
            tokens.output, tokens.source = counts.output, TokenSource.USAGE
            return tokens
        for source, n in (
            *self._declared_counts.items(),
            (TokenSource.TOKENIZER, self._tokenized_count if stream else 0),
            (TokenSource.CHUNKS, (self.chunks or self.textless) if stream else 0),
        ):
            if n:
                tokens.output, tokens.source = n, source
                break
        return tokens


class ServerTiming:
    """Collector of durations that the server reports, in the head, in events and in trailers.

    A duration in an event replaces an earlier one with the same name and place.
    """

    __slots__ = ("_clock_ns", "_event_times", "_gaps_ns", "_head_times", "_trailer_times")

    def __init__(self) -> None:
        self._head_times: list[ServerTime] = []
        """Durations in the head of the response."""
        self._event_times: dict[tuple[str, str], tuple[int, ServerTime]] = {}
        """By name and place of a duration: index of the latest event that has it, and its value."""
        self._trailer_times: list[ServerTime] = []
        self._clock_ns = -1  # the server's clock at the previous event that reports it; -1: none
        self._gaps_ns: array[int] = array("q")
        """Times between tokens by the server's own clock."""

    def read_head(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self._head_times = header_times(headers)

    def read_trailers(self, lines: Iterable[bytes]) -> None:
        self._trailer_times = trailer_times(lines)

    def read_event(self, event: int, delta: Delta) -> None:
        """Add the durations and the server's clock of an event; `event`: its index."""
        for time in delta.server_times:
            key = (time.name, time.where)
            if key in self._event_times or len(self._event_times) < _ENTRIES_MAX:
                self._event_times[key] = (event, time)
        clock_ns = delta.server_clock_ns
        if clock_ns < 0:
            return
        gap_ns, tokens = clock_ns - self._clock_ns, max(1, delta.tokens)
        # A clock that goes back has restarted, for example with another attempt, so the gap is unknown.
        known = self._clock_ns >= 0 and gap_ns >= 0 and tokens <= _BURST_TOKENS_MAX
        if known and len(self._gaps_ns) + tokens <= _GAPS_MAX:
            share_ns, rest_ns = divmod(gap_ns, tokens)
            self._gaps_ns.extend([share_ns] * (tokens - rest_ns) + [share_ns + 1] * rest_ns)
        self._clock_ns = clock_ns

    def entries(self) -> list[dict[str, object]] | None:
        """Return the durations for `Exchange.server_timing`."""
        times = self._event_times.values()
        events = [_public_row(time) | {"event": i, "path": time.path} for i, time in times]
        places = (self._head_times, self._trailer_times)
        head, trailer = (map(_public_row, times[:_ENTRIES_MAX]) for times in places)
        return [*head, *events, *trailer] or None

    def gaps_ns(self) -> "array[int] | None":
        """Return the gaps between tokens by the server's clock; a gap of several tokens is divided
        equally."""
        return self._gaps_ns or None


def _public_row(reported: ServerTime) -> dict[str, object]:
    """Return a time of the server as the JSON of an exchange shows it."""
    return {"name": reported.name, "ms": reported.ms, "where": reported.where, "unit": reported.unit}
