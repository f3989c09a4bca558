"""Estimate the duration of a benchmark from the loads that were measured.

A test declares the loads that it expects to send (`ExpectedLoad`, `BenchTest.expected`). A session removes a
load from the list when it is measured, and a search replaces its part of the list before each level, because
the next levels depend on the verdicts so far. `Pace` keeps the measured durations, and the completion rate of
the server by its concurrency, for each kind of request; from these it estimates the duration of the remaining
loads. `perform.py` reports the remaining time of all tests before each load. Before the first load, it
reports no time: the speed of the server is not known yet.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import log
from statistics import fmean, median
from typing import Final, NamedTuple

SLOTS_DEFAULT: Final = 16
"""Concurrency at which a server is assumed to reach its capacity, until a load has shown the real one."""
REPORT_DEFAULT_S: Final = 5.0
"""Assumed seconds of the self-test and the report after a test, until a first test has ended."""
POWER_SATURATED: Final = 0.3
"""A server counts as saturated if its completion rate grows more slowly than (concurrency ** this power): if
twice the concurrency raises the rate by less than a quarter."""
NEAR_CAPACITY: Final = 0.95
"""Smallest share of the capacity that counts as the rate of a saturated server."""


class RequestKind(NamedTuple):
    """Requests that take about the same time on an idle server."""

    workload: str = ""
    """Name of the workload; empty: any."""
    output_tokens: float | None = None
    """Mean length of a response; None if unknown."""


class ExpectedLoad(NamedTuple):
    """A load that a test is expected to send: an open loop at a rate, or a closed loop of `slots`."""

    requests: float = 0.0
    """Smallest number of requests."""
    seconds: float = 0.0
    """Smallest planned duration of sending."""
    rate_rps: float | None = None
    """Rate of an open loop."""
    share: float | None = None
    """Rate as a share of the capacity, if `rate_rps` is not known yet."""
    slots: float | None = None
    """Number of concurrent requests of a closed loop."""
    search: str = ""
    """Name of the search that decides whether this load is sent; empty: the load does not depend on one."""


def open_loops(requests: int, shares: Iterable[float], capacity_rps: float | None) -> list[ExpectedLoad]:
    """Return an open loop of `requests` requests for each share of the capacity (None: not known yet)."""
    return [
        ExpectedLoad(requests, rate_rps=None if capacity_rps is None else share * capacity_rps, share=share)
        for share in shares
    ]


@dataclass(slots=True)
class ExpectedLoads:
    """The loads that a test is still expected to send."""

    loads: list[ExpectedLoad]
    warmups: int = 1
    """Number of warm-ups, one for each configuration."""

    def replace_search(self, name: str, loads: Iterable[ExpectedLoad]) -> None:
        """Replace the remaining loads of a search; the new loads come before all other loads."""
        self.loads = [load._replace(search=name) for load in loads] + [
            load for load in self.loads if load.search != name
        ]

    def end_load(self) -> None:
        """Remove the first load of the list, because it was measured."""
        self.loads = self.loads[1:]


def doublings(first: int, slots_max: int, saturation_slots: float | None) -> list[int]:
    """Return the concurrencies that a search is expected to try: it doubles `first` until saturation."""
    levels = [min(first, slots_max)]
    while levels[-1] < min(slots_max, 2 * (saturation_slots or SLOTS_DEFAULT)):
        levels.append(min(2 * levels[-1], slots_max))
    return levels


class MeasuredLoad(NamedTuple):
    """Figures of a measured load, from which the durations of other loads are estimated."""

    requests: int
    """Number of requests that ended well."""
    span_s: float
    """Time from the start of the load to the last response."""
    response_s: float
    """Mean duration of a response (E2E)."""
    output_tokens: float | None
    """Mean number of output tokens; None if unknown."""


class _Point(NamedTuple):
    """Completion rate of the server at a mean number of requests in flight."""

    concurrency: float
    """Mean number of requests in flight."""
    rate_rps: float


@dataclass(slots=True)
class Pace:
    """Measured durations of warm-ups, loads and reports, and estimates of further loads from them."""

    _warmups_s: list[float] = field(default_factory=list)
    """Durations of the warm-ups."""
    _overheads_s: dict[RequestKind, list[float]] = field(default_factory=dict)
    """By kind of request: for each load, the time of preparation before it and of work after its end."""
    _loads: dict[RequestKind, list[MeasuredLoad]] = field(default_factory=dict)
    """By kind of request: loads of such requests."""
    _reports_s: list[float] = field(default_factory=list)
    """For each test: duration of the self-test and the report, after the last load."""

    def add_warmup(self, seconds: float) -> None:
        self._warmups_s.append(seconds)

    def add_load(self, kind: RequestKind, load: MeasuredLoad, duration_s: float | None) -> None:
        """Add a load. `duration_s`: its time with preparation; None if an earlier command measured it."""
        if load.requests and load.span_s > 0 and load.response_s > 0:
            self._loads.setdefault(kind, []).append(load)
        if duration_s is not None:
            self._overheads_s.setdefault(kind, []).append(max(0.0, duration_s - load.span_s))

    def add_report(self, seconds: float) -> None:
        self._reports_s.append(seconds)

    @property
    def has_measured_load(self) -> bool:
        return bool(self._overheads_s) and bool(self._loads)

    def seconds(self, kind: RequestKind, expected: ExpectedLoads) -> float:
        """Return the estimated duration of the remaining part of a test."""
        overheads_s = self._overheads_s.get(kind) or [s for many in self._overheads_s.values() for s in many]
        return (
            expected.warmups * _mean(self._warmups_s)
            + sum(self._load_seconds(kind, load) for load in expected.loads)
            + len(expected.loads) * (median(overheads_s) if overheads_s else 0.0)
            + (_mean(self._reports_s) if self._reports_s else REPORT_DEFAULT_S)
        )

    def capacity_rps(self, kind: RequestKind) -> float | None:
        """Return the completion rate at saturation; None before the first load.

        It is the highest measured rate. If no load has saturated the server yet, it is the rate that is
        expected at the concurrency `SLOTS_DEFAULT`.
        """
        points = self._points(kind)
        if not points:
            return None
        return (
            max(one.rate_rps for one in points) if _is_saturated(points) else _rate_at(points, SLOTS_DEFAULT)
        )

    def saturation_slots(self, kind: RequestKind) -> float | None:
        """Return the lowest concurrency at which the server reaches `capacity_rps`; None if unknown."""
        points, capacity = self._points(kind), self.capacity_rps(kind)
        if capacity is None:
            return None
        at_capacity = next((one for one in points if one.rate_rps >= NEAR_CAPACITY * capacity), None)
        below = points if at_capacity is None else points[: points.index(at_capacity)]
        # Extrapolate from the last point below the capacity: the rate grows at most like the concurrency.
        slots = [] if at_capacity is None else [at_capacity.concurrency]
        slots += [capacity / one.rate_rps * one.concurrency for one in below[-1:]]
        return min(slots)

    def slots_within(self, kind: RequestKind, wait_p99_s: float) -> float | None:
        """Return the highest concurrency at which the P99 of the wait in the queue is at most `wait_p99_s`.

        The waiting times are assumed to be exponentially distributed. None before the first load.
        """
        capacity, slots = self.capacity_rps(kind), self.saturation_slots(kind)
        return None if capacity is None or slots is None else slots + capacity * wait_p99_s / log(100)

    def rate_rps(self, kind: RequestKind, slots: float) -> float | None:
        """Return the expected completion rate of a closed loop of `slots`; None before the first load."""
        points = self._points(kind)
        return _rate_at(points, slots) if points else None

    def _load_seconds(self, kind: RequestKind, load: ExpectedLoad) -> float:
        """Return the expected time from the start of a load to its last response."""
        points, capacity = self._points(kind), self.capacity_rps(kind)
        if capacity is None:
            return load.seconds
        if load.slots is not None:
            rate = _rate_at(points, load.slots)
            return max(load.requests / rate, load.seconds + load.slots / rate if load.seconds else 0.0)
        rate = capacity * (load.share or 1.0) if load.rate_rps is None else load.rate_rps
        requests = max(load.requests, rate * load.seconds)
        served_rps = capacity if _is_saturated(points) else max(rate, capacity)
        response_s = 1 / max(one.rate_rps / one.concurrency for one in points)
        return max(requests / rate, requests / served_rps) + response_s

    def _points(self, kind: RequestKind) -> list[_Point]:
        """Return the measured completion rates for requests of this kind, sorted by concurrency.

        Without a measured load of this kind, the loads with the same workload are used, or else all loads: a
        response of half the tokens is assumed to take half the time.
        """
        loads = self._loads.get(kind)
        if loads is None:
            related = [many for one, many in self._loads.items() if one.workload == kind.workload]
            loads = [_with_tokens(one, kind) for many in related or self._loads.values() for one in many]
        points = [
            _Point(one.requests * one.response_s / one.span_s, one.requests / one.span_s) for one in loads
        ]
        return sorted(points)


def _with_tokens(load: MeasuredLoad, kind: RequestKind) -> MeasuredLoad:
    """Return the load as if its answers had the length of the kind's answers."""
    if kind.output_tokens is None or not load.output_tokens:
        return load
    ratio = kind.output_tokens / load.output_tokens
    return load._replace(span_s=load.span_s * ratio, response_s=load.response_s * ratio)


def _is_saturated(points: Sequence[_Point]) -> bool:
    """Return whether the rate hardly grew from half the highest concurrency, or less, to the highest."""
    last = points[-1].concurrency
    lower = [one for one in points if one.concurrency <= last / 2]
    if not lower:
        return False
    highest = max(one.rate_rps for one in points)
    # Assume rate = c * concurrency ** power: the power is 1 on an idle server and 0 on a saturated one.
    return log(highest / lower[-1].rate_rps) < POWER_SATURATED * log(last / lower[-1].concurrency)


def _rate_at(points: Sequence[_Point], slots: float) -> float:
    """Return the rate at a concurrency, estimated from the measured points.

    Between two points, it is interpolated. Above all points, it is proportional to the concurrency, but if
    the server is saturated, it is the highest measured rate.
    """
    below = [one for one in points if one.concurrency <= slots]
    above = [one for one in points if one.concurrency > slots]
    if not below:
        return slots * above[0].rate_rps / above[0].concurrency
    best = max(below, key=lambda one: one.rate_rps)
    if above:
        low, high = below[-1], above[0]
        share = (slots - low.concurrency) / (high.concurrency - low.concurrency)
        return max(best.rate_rps, low.rate_rps + share * (high.rate_rps - low.rate_rps))
    if _is_saturated(points):
        return best.rate_rps
    return best.rate_rps * slots / best.concurrency


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
