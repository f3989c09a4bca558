"""Where a service stops keeping up, from measurements at rising load.

Levels are given in ascending order of offered load. Every rule is answered by itself, because the draft's
own example (Table 5) calls the level of highest throughput its saturation point, as none of its rules does.

Source: IETF seed 000, 5.2.3.1 (saturation), 5.3.4 (knee, saturation and operating point), 5.5.3 (capacity).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = [
    "SaturationLevel",
    "capacity",
    "delivered_shares",
    "heavy_tail",
    "incomplete",
    "knee",
    "operating_point",
    "peak",
    "saturation_point",
    "undelivered",
]


@dataclass(frozen=True, slots=True)
class SaturationLevel:
    """What was measured at one offered load. Latencies in any one unit."""

    offered_rps: float
    achieved_tps: float
    """Output tokens per second."""
    p50: float
    p99: float
    success: float = 1.0
    """Share of requests that completed, 0 to 1."""


def knee(levels: Sequence[SaturationLevel], times: float = 2.0) -> float | None:
    """The first load whose P99 exceeds `times` the smallest P99 of all levels; None if none does (5.3.4)."""
    if not levels:
        return None
    limit = times * min(level.p99 for level in levels)
    return _first(levels, lambda level: level.p99 > limit)


def saturation_point(levels: Sequence[SaturationLevel]) -> float | None:
    """The first load that achieved less than the level before; None while throughput only grows (5.3.4)."""
    for before, level in pairwise(levels):
        if level.achieved_tps < before.achieved_tps:
            return level.offered_rps
    return None


def peak(levels: Sequence[SaturationLevel]) -> float | None:
    """The load of the highest throughput, the first if several share it: the point that Table 5 prints."""
    return max(levels, key=lambda level: level.achieved_tps).offered_rps if levels else None


def incomplete(levels: Sequence[SaturationLevel], share: float = 0.9) -> float | None:
    """The first load at which fewer than `share` of the requests completed (5.2.3.1)."""
    return _first(levels, lambda level: level.success < share)


def delivered_shares(levels: Sequence[SaturationLevel]) -> list[float]:
    """Tokens achieved / tokens that the load asks for, at the first level's tokens per request."""
    if not levels:
        return []
    per_request = levels[0].achieved_tps / levels[0].offered_rps
    return [level.achieved_tps / (level.offered_rps * per_request) for level in levels]


def undelivered(levels: Sequence[SaturationLevel], share: float = 0.9) -> float | None:
    """The first load whose tokens fall below `share` of what it asks for (5.2.3.1, counted in tokens)."""
    shares = zip(levels, delivered_shares(levels), strict=True)
    return next((level.offered_rps for level, delivered in shares if delivered < share), None)


def heavy_tail(levels: Sequence[SaturationLevel], times: float = 10.0, *, of: str = "lowest") -> float | None:
    """The first load whose P99 exceeds `times` the P50 "at lower load" (5.2.3.1).

    `of="lowest"` compares with the lowest level, `of="previous"` with the one before.
    """
    assert of in ("lowest", "previous")
    for before, level in pairwise(levels):
        p50 = levels[0].p50 if of == "lowest" else before.p50
        if level.p99 > times * p50:
            return level.offered_rps
    return None


def operating_point(
    levels: Sequence[SaturationLevel], meets: Callable[[SaturationLevel], bool]
) -> float | None:
    """The load of the highest throughput among the levels that meet the objectives (5.3.4)."""
    return peak([level for level in levels if meets(level)])


def capacity(completion: Sequence[tuple[float, float]], share: float = 0.99) -> float | None:
    """The highest load, of `(load, share completed)`, at which at least `share` completed (5.5.3)."""
    return max((load for load, completed in completion if completed >= share), default=None)


def _first(levels: Sequence[SaturationLevel], broken: Callable[[SaturationLevel], bool]) -> float | None:
    return next((level.offered_rps for level in levels if broken(level)), None)
