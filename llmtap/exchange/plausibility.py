"""What servers tell of themselves, held against what was measured of the exchange.

A server that is wrong, or hostile, tells any number. A duration that cannot be true, and a count of tokens
that is none, enters no figure: it is removed from its exchange, and counted by reason.

| reason (`KINDS`) | value |
|---|---|
| `server_time_negative` | a duration below 0 |
| `server_time_not_finite` | a duration that is infinite or no number |
| `server_time_too_long` | a duration, or a sum of durations, that is longer than its exchange |
| `token_count` | of usage: negative, not whole, above `USAGE_TOKENS_MAX`, no number |
"""

from math import isfinite
from typing import Any, Final

from llmtap.exchange.exchange import Exchange, Timeline
from llmtap.exchange.outcome import TokenSource
from llmtap.protocol.delta import USAGE_TOKENS_MAX

__all__ = ["KINDS", "ROUNDING_NS", "TOKEN_COUNT", "remove_implausible"]

TOKEN_COUNT: Final = "token_count"
NEGATIVE: Final = "server_time_negative"
NOT_FINITE: Final = "server_time_not_finite"
TOO_LONG: Final = "server_time_too_long"
KINDS: Final = (NEGATIVE, NOT_FINITE, TOO_LONG, TOKEN_COUNT)
ROUNDING_NS: Final = 1_000_000
"""Tolerance for each duration: many servers round theirs to whole milliseconds."""
_PARTS: Final = ("queue", "prefill", "decode")
"""Durations that follow one another, so that their sum is no longer than the exchange."""


def remove_implausible(x: Exchange) -> None:
    """Remove from an exchange that has ended the durations and counts that cannot be true, and count them.

    A duration is compared with the time from submit to the end, plus the exchange's uncertainty and
    ROUNDING_NS. An answer that was saved without times has no duration: sign and finiteness are checked then.
    """
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
        # Nothing tells which of them is wrong.
        parts = [entry for entry in kept if entry.get("name") in _PARTS]
        kept = [entry for entry in kept if entry.get("name") not in _PARTS]
        _count(x, TOO_LONG, len(parts))
    x.server_timing = kept or None
    gaps_ns = x.server_gaps_ns
    if gaps_ns is not None and limit_ns is not None and sum(gaps_ns) > limit_ns + ROUNDING_NS:
        x.server_gaps_ns = None
        _count(x, TOO_LONG)


def _reason(ms: Any, limit_ns: int | None) -> str | None:
    """Why a duration is not used; None if it is."""
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
