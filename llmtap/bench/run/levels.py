"""Shared parts of tests that measure several load levels: SLO bounds, loads, figures, capacity.

`level_load` makes the load of a level, with a seed of its own so that a prefix cache has no hits, and
`measure_closed` sends a closed loop. `Bounds` judges a level; further functions make its JSON, tables and
charts. Tests that set loads as shares of the capacity take it from the parameter `max_rate` or from the
throughput test's result with the same workload (`known_capacity`). Otherwise they measure it: they double the
concurrency of closed loops until the output rate no longer grows (`find_capacity`). `RateSearch` chooses the
levels of a search for the highest level that passes ("holds"): it doubles the level until one fails, then
bisects. Its choice depends only on the verdicts, so an interrupted search can be resumed.

Source: IETF draft, 5.2.3 (4), 5.2.3.2 and 5.5.3 (4).
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Final
from zlib import crc32

import msgspec
import pyarrow.compute as pc

from llmtap.bench.run.figures import KEY_SHARES, METRICS, LatencyRow, latency_row, line_series, ms, ms_of
from llmtap.bench.run.measurement import Measurement, SteadyPart, steady_part_of
from llmtap.bench.run.pace import ExpectedLoad, doublings
from llmtap.bench.run.session import BASELINE, BenchSession, Load, duration_text, make_load
from llmtap.bench.run.test import ChartMark, ChartSeries, ChartSpec, ReportTable
from llmtap.errors import ConfigError
from llmtap.metrics.saturation import SaturationLevel
from llmtap.metrics.summary import ENDED_WELL
from llmtap.report.summary import not_judged_text
from llmtap.report.values import at
from llmtap.units import Duration, to_seconds

COLUMNS: Final = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "End-to-End"}
FAILED_MAX: Final = 0.01
"""Largest allowed share of failed requests if there is a bound on a P99; with more, no bound is met."""
ROWS_SPARE: Final = 1.5
"""Safety factor on the number of requests of a closed loop that is estimated from the previous level."""
ROWS_PER_SLOT_S: Final = 5.0
"""Assumed number of requests per slot and second (200 ms each) until a level has shown the real number."""
DURATION_SHARE_MIN: Final = 0.95
"""Smallest share of the planned duration for which a closed loop must last; else it is sent again, longer."""
ROWS_MAX: Final = 100_000
"""Largest number of requests of a closed loop. Without this limit, a server that refuses each request at
once would get an unlimited number."""
_NO_MEMORY: Final = re.compile(
    r"out[ -]of[ -]memory|\boom\b|memoryallocation|alloc_failed|insufficient memory", re.IGNORECASE
)


_P99_METRICS: Final = ("ttft", "tpot")


@dataclass(frozen=True, slots=True)
class LevelAttempt:
    """One level of load that was sent, and whether it meets the bounds."""

    level: float
    """Requests per second, or concurrent requests."""
    measurement: Measurement
    steady_part: SteadyPart
    """Part of the level after the ramp-up, from which the figures are computed."""
    holds: bool
    """Whether the level meets the bounds."""
    reason: str
    """Violated bounds, or why the level passes, as text."""

    @property
    def status(self) -> str:
        return "Pass" if self.holds else "Fail"


class BoundsReport(msgspec.Struct, frozen=True):
    """JSON of the `Bounds` of a level: times in seconds, shares from 0 to 1; None: there is no such bound."""

    ttft_p99: float | None
    tpot_p99: float | None
    objectives: str | None
    """Objectives of each request as text."""
    attainment: float | None
    """Smallest allowed share of requests that meet all `objectives`."""
    smooth: float | None
    """Smallest allowed smooth goodput, as a share of the output tokens."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds that a level must meet: on P99s, the share of requests within objectives, and smooth goodput."""

    ttft: Duration | None = None
    """Largest allowed P99 of TTFT."""
    tpot: Duration | None = None
    """Largest allowed P99 of TPOT."""
    objectives: str | None = None
    """Objectives of each request, as `Objectives.parse` reads them."""
    attainment: float = 0.99
    """Smallest allowed share of requests that meet all `objectives`."""
    smooth: float | None = None
    """Smallest allowed smooth goodput (`metrics/deadlines.py`), as a share of the output tokens."""

    def __bool__(self) -> bool:
        return bool(self._p99_bounds()) or self.objectives is not None or self.smooth is not None

    @property
    def slo(self) -> str | None:
        """The bounds as objectives that each request is judged by: `ttft:2000ms tpot:50ms`; None without."""
        return self.objectives or " ".join(f"{name}:{ns}ns" for name, ns in self._p99_bounds()) or None

    @property
    def text(self) -> str:
        """Return the bounds as text: `TTFT P99 <= 2000 ms, TPOT P99 <= 50.0 ms`."""
        parts = [f"{COLUMNS[name]} P99 <= {ms(to_seconds(ns))}" for name, ns in self._p99_bounds()]
        if self.objectives is not None:
            parts.append(f"{share_text(self.attainment)} of the requests within {self.objectives}")
        if self.smooth is not None:
            parts.append(f"smooth goodput >= {share_text(self.smooth)} of the output tokens")
        return ", ".join(parts)

    def report(self) -> "BoundsReport | None":
        """Return the bounds for the JSON report; None without bounds."""
        if not self:
            return None
        ttft, tpot = (None if ns is None else to_seconds(ns) for ns in (self.ttft, self.tpot))
        attainment = None if self.objectives is None else self.attainment
        return BoundsReport(ttft, tpot, self.objectives, attainment, self.smooth)

    def violations(self, steady: SteadyPart) -> list[str]:
        """Return the violated bounds as texts. Too many failed requests violate every bound."""
        texts = []
        for name, ns in self._p99_bounds():
            p99 = steady.latency(f"{name}_ns", 0.99)
            if p99 is None and name == "ttft":
                texts.append("no answer has a TTFT")
            elif p99 is not None and p99 > to_seconds(ns):
                texts.append(f"{COLUMNS[name]} P99 {ms(p99)} > {ms(to_seconds(ns))}")
        if self.objectives is not None:
            met = steady.attainment
            if met is None:
                texts.append(f"no request counts for {self.objectives}")
            elif met < self.attainment:
                needed = f"{share_text(self.attainment)} needed"
                texts.append(f"{share_text(met)} of the requests met {self.objectives}, {needed}")
        if self.smooth is not None:
            smooth = steady.smooth_share
            if smooth is None or smooth < self.smooth:
                texts.append(
                    f"smooth goodput is {share_text(smooth)} of the tokens, {share_text(self.smooth)} needed"
                )
        if self._p99_bounds() and steady.failed_share > FAILED_MAX:
            texts.append(
                f"{share_text(steady.failed_share)} of the requests failed: a P99 leaves {FAILED_MAX:.0%}"
            )
        return texts

    def _p99_bounds(self) -> list[tuple[str, int]]:
        """Return the metrics of which the 99th percentile has a bound, with the bound."""
        return [
            (name, ns)
            for name, ns in zip(_P99_METRICS, (self.ttft, self.tpot), strict=True)
            if ns is not None
        ]


def verdict_text(steady: SteadyPart, violations: Sequence[str], met: str = "") -> str:
    """Return the violated bounds as text, or `met` if none is, and the number of requests not judged."""
    return "; ".join(
        filter(None, (*(violations or (met,)), not_judged_text({"not_judged": steady.not_judged})))
    )


def level_load(session: BenchSession, name: str, workload: str, **options: Any) -> Load:
    """Return a load whose seed follows from the names of test and load; `options`: see `make_load`."""
    seed = session.seed + crc32(f"{session.name}/{name}".encode())
    return make_load(workload, seed=seed, **options, counting=session.target.counting)


async def measure_closed(
    session: BenchSession,
    name: str,
    workload: str,
    slots: int,
    duration: Duration,
    previous_level: tuple[float, float] | None,
    *,
    slo: str | None = None,
    output_tokens: int | None = None,
) -> tuple[Measurement, SteadyPart, bool]:
    """Send a closed loop. If too few requests were planned for its duration, repeat it as `NAME-longer`.

    `previous_level`: see `rows_for`. Returns the measurement (the second one, if the loop was repeated), its
    steady part, and whether its requests ended too soon.
    """
    seconds = to_seconds(duration)
    rows = rows_for(slots, seconds, previous_level)
    planned = ExpectedLoad(seconds=seconds, slots=slots)
    for step in (name, f"{name}-longer"):
        if step != name:
            session.expected.loads.insert(0, planned)
        load = level_load(
            session,
            step,
            workload,
            slots=slots,
            requests=rows,
            duration_s=seconds,
            output_tokens=output_tokens,
        )
        measured = await session.measure(step, load, slo=slo)
        steady = steady_part_of(measured, seconds)
        ended_early = steady.to_s < DURATION_SHARE_MIN * seconds
        if not ended_early or steady.failed_share > FAILED_MAX:
            break
        rows = max(rows, rows_for(slots, seconds, (slots, measured.n / max(steady.to_s, 1e-3))))
    return measured, steady, ended_early


def rows_for(slots: int, seconds: float, previous_level: tuple[float, float] | None) -> int:
    """Return the number of requests for a closed loop of `seconds`.

    `previous_level`: slots and completed requests per second of the level that was measured before, or None.
    """
    rate = ROWS_PER_SLOT_S * slots
    if previous_level is not None:
        rate = previous_level[1] * max(1.0, slots / previous_level[0]) * ROWS_SPARE
    return min(ROWS_MAX, ceil(rate * seconds) + 2 * slots)


def saturation_signs(steady: SteadyPart) -> list[str]:
    """Return as texts why a load is not sustained; empty if `steady.is_sustained`."""
    signs = []
    if steady.queue_grows:
        signs.append(f"the queue grows: {steady.in_flight[0]:.1f} to {steady.in_flight[-1]:.1f} in flight")
    if steady.falls_short:
        signs.append(f"completes {share_text(steady.delivered_share)} of the arrival rate")
    if not steady.throughput_is_stable:
        first, second = (2 * amount / steady.seconds for amount in steady.halves)
        unit = "req/s" if steady.output_tokens is None else "tok/s"
        signs.append(
            f"throughput is not stable: {rate_text(first)} and {rate_text(second, unit)} in the halves of its"
            " time"
        )
    return signs


def saturation_level(attempt: LevelAttempt) -> SaturationLevel:
    """Convert a level for the rules of `metrics/saturation.py`, with TTFT as latency; infinite if unknown."""
    steady, infinite = attempt.steady_part, float("inf")
    p50, p99 = (infinite if (ttft := steady.latency("ttft_ns", p)) is None else ttft for p in (0.50, 0.99))
    return SaturationLevel(attempt.level, steady.output_tps or 0.0, p50, p99, steady.success_share)


class Latencies(msgspec.Struct, frozen=True, kw_only=True):
    """P50, P95 and P99 of TTFT, TPOT and E2E with their intervals."""

    ttft: LatencyRow
    tpot: LatencyRow
    e2e: LatencyRow


class LevelWindow(msgspec.Struct, frozen=True):
    """Steady part of a level, from which its figures are computed, in seconds from the level's start."""

    begin: float = msgspec.field(name="from")
    end: float = msgspec.field(name="to")


class LevelFigures(Latencies, frozen=True, kw_only=True):
    """Figures of a level's steady part (see `SteadyPart`): rates per second, shares from 0 to 1."""

    step: str
    """Name of the load."""
    holds: bool | None
    """Whether the level meets the objectives; None without objectives."""
    why: str
    """Reason for `holds` as text."""
    sustained: bool
    """Whether the server kept up with the load: no sign of saturation."""
    requests: int
    """Number of requests of the whole level."""
    window: LevelWindow
    """Steady part of the level, from which the figures are computed."""
    arrivals: int
    """Number of requests sent in the steady part."""
    arrival_rps: float
    """Requests sent per second."""
    completed: int
    """Number of complete responses that ended in the steady part."""
    completed_rps: float
    """Responses completed per second."""
    delivered: float
    """Completed requests / requests expected to complete without a queue."""
    success: float
    """Share of the requests that ended well."""
    attainment: float | None
    """Share of the requests that met all objectives; None without objectives."""
    not_judged: int | None
    """Number of requests that the objectives could not judge."""
    output_tps: float | None
    """Output tokens per second; None without token counts."""
    input_tps: float | None
    """Input tokens per second; None without token counts."""
    in_flight: list[float]
    """Mean number of requests in flight in each of the five divisions of the steady part."""
    queue: str
    """`growing` or `stable`."""
    throughput_stable: bool
    """Whether both halves of the steady part have the same output rate."""


def level_figures(attempt: LevelAttempt) -> LevelFigures:
    steady = attempt.steady_part
    return LevelFigures(
        step=attempt.measurement.name,
        holds=attempt.holds,
        why=attempt.reason,
        sustained=steady.is_sustained,
        requests=attempt.measurement.n,
        window=LevelWindow(steady.from_s, steady.to_s),
        arrivals=steady.arrivals,
        arrival_rps=steady.arrival_rps,
        completed=steady.completed,
        completed_rps=steady.completed_rps,
        delivered=steady.delivered_share,
        success=steady.success_share,
        attainment=steady.attainment,
        not_judged=steady.not_judged,
        output_tps=steady.output_tps,
        input_tps=steady.input_tps,
        in_flight=list(steady.in_flight),
        queue="growing" if steady.queue_grows else "stable",
        throughput_stable=steady.throughput_is_stable,
        **latency_rows(steady.sent_requests),
    )


def latency_rows(measured: Measurement) -> dict[str, LatencyRow]:
    """Return the fields of a `Latencies` struct by name."""
    return {name: latency_row(measured.values(f"{name}_ns"), KEY_SHARES) for name in COLUMNS}


def latency_table(caption: str, measured: Measurement) -> ReportTable:
    rows = [
        [COLUMNS[name], *(ms_of(row, p) for p in KEY_SHARES)] for name, row in latency_rows(measured).items()
    ]
    return ReportTable(caption, ["Metric", *(p.upper() for p in KEY_SHARES)], rows)


def throughput_chart(
    by: str,
    x_title: str,
    xs: Sequence[float],
    attempts: Sequence[LevelAttempt],
    marks: list[ChartMark],
    *,
    log_x: bool = False,
) -> ChartSpec:
    """Return the chart of the output rate by level; `xs` are the positions of the attempts."""
    line = ChartSeries("throughput", list(xs), [attempt.steady_part.output_tps for attempt in attempts])
    return ChartSpec(
        f"Output throughput by {by}", "line", x_title, "output tokens/s", [line], marks, log_x=log_x
    )


def p99_chart(
    title: str,
    x_title: str,
    xs: Sequence[float],
    rows: Sequence[Latencies],
    marks: Sequence[ChartMark] = (),
) -> ChartSpec:
    """Return the chart of the P99 of TTFT, TPOT and E2E. `rows`: one for each level."""
    lines = [
        line_series(f"{name} P99", list(xs), [getattr(row, key).percentile("p99") for row in rows])
        for key, name in METRICS.items()
    ]
    return ChartSpec(title, "line", x_title, "ms", lines, list(marks), log_y=True)


def check_duration(session: BenchSession, duration: Duration, duration_min: Duration, section: str) -> None:
    """Raise ConfigError if levels are shorter than the draft demands, unless the run is quick."""
    if duration < duration_min and not session.quick:
        problem = (
            f"is {to_seconds(duration):g} s; the IETF draft (section {section}) requires at least"
            f" {to_seconds(duration_min):g} s"
        )
        raise ConfigError(
            "duration", problem, "set a longer duration, or use --quick: the report then lists the deviation"
        )
    if duration <= 0:
        raise ConfigError("duration", "is 0; expected more than 0 s", "such as duration = 60s")


def rate_text(value: float | None, unit: str = "") -> str:
    """Format a rate as `2,847 tok/s`, `18.2 req/s` or `0.45 req/s`; `-` for None."""
    if value is None:
        return "-"
    digits = 0 if abs(value) >= 1_000 else 1 if abs(value) >= 9.995 else 2
    return f"{value:,.{digits}f}" + f" {unit}" * bool(unit)


def share_text(value: float | None) -> str:
    """Format a share as `12.3%`; `-` for None."""
    if value is None:
        return "-"
    percent = value * 100
    # Show 0 % and 100 % only if they are exact; show a value near them as 0.1 % or 99.9 %.
    return f"{percent:.0f}%" if percent in (0, 100) else f"{min(max(percent, 0.1), 99.9):.1f}%"


def server_mean(measured: Measurement, name: str, steady: SteadyPart) -> float | None:
    """Return the mean of a server metric over the steady part, or None."""
    server_series = at(measured.result, "system", "series", "server") or {}
    series = at(server_series, "series", name, "values") or ()
    known = [
        value
        for t, value in zip(server_series.get("t", ()), series, strict=False)
        if value is not None and steady.from_s <= t < steady.to_s
    ]
    return sum(known) / len(known) if known else None


def server_total(measured: Measurement, name: str) -> float | None:
    """Return the increase of a server counter during a load, or None."""
    total: float | None = at(measured.result, "system", "summary", "server", name, "total")
    return total


def memory_errors(measured: Measurement) -> int:
    """Return the number of out-of-memory errors in the result, which has only the most frequent errors."""
    errors: dict[str, int] = measured.result.get("errors") or {}
    return sum(count for message, count in errors.items() if _NO_MEMORY.search(message))


def incomplete_by_outcome(measured: Measurement) -> dict[str, int]:
    """Return the number of incomplete responses by outcome."""
    counted = Counter(measured.table.column("outcome").to_pylist())
    return {outcome: n for outcome, n in sorted(counted.items()) if outcome not in ENDED_WELL}


def remaining_text(attempts: int, duration_s: float) -> str:
    """Format the remaining levels and their time: `at most 7 levels, 7 min`."""
    time = duration_text(attempts * duration_s)
    return f"at most {attempts} {'level' if attempts == 1 else 'levels'}, {time} and the time to drain"


WARM_TOKENS: Final = 100
"""Output tokens of each request of a warm-up: with 100 requests, the 10,000 tokens of IETF 4.5.1."""
ANSWERS_MIN: Final = 3
SLOTS_FIRST: Final = 8
ROUNDS: Final = 6
"""Number of requests that the search for the capacity sends per slot, at each level."""
GAIN_MIN: Final = 0.05
"""Smallest relative gain of the output rate, after doubling the concurrency, that continues the search."""


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """Capacity of a server, and its source."""

    rps: float
    """Requests per second."""
    tps: float | None
    """Output tokens per second; None if only the rate of requests is known."""
    how: str
    """Source of the capacity, as text."""
    saturated: bool = True
    """Whether the output rate stopped growing; False if the search ended at its highest concurrency."""


def known_capacity(
    session: BenchSession, max_rate: float | None, workload: str | None = None
) -> Capacity | None:
    """Return the capacity that `max_rate` sets, or that the throughput test measured with this workload."""
    if max_rate is not None:
        return Capacity(rps=max_rate, tps=None, how="given as max_rate")
    if workload is None:
        return None
    result = session.results.read_json("throughput/result.json")
    if result is None or result["params"]["workload"] != workload:
        return None
    rps = result["measurements"]["sustainable_load_rps"]
    how = "sustainable load of the throughput test, of the same workload"
    return Capacity(rps=float(rps), tps=None, how=how) if rps else None


def expected_search(
    session: BenchSession, slots_max: int, *, name: str = "capacity", first: int = SLOTS_FIRST
) -> list[ExpectedLoad]:
    """Return the loads that `find_capacity` is expected to send, beginning at the concurrency `first`."""
    levels = doublings(first, slots_max, session.pace.saturation_slots(session.kind))
    return [ExpectedLoad(ROUNDS * slots, slots=slots, search=name) for slots in levels]


async def find_capacity(
    session: BenchSession,
    load_of: Callable[[int, int], Load],
    slots_max: int,
    *,
    arm: str = BASELINE,
    name: str = "capacity",
    warm_by: Load | None = None,
) -> Capacity:
    """Double the concurrency of closed loops until the output rate stops growing, and return the capacity.

    `load_of`: function that makes a closed loop with these slots and requests. `warm_by`: see
    `BenchSession.measure`.
    """
    slots = min(SLOTS_FIRST, slots_max)
    best: tuple[float, float | None, float, int] | None = None
    while True:
        session.expected.replace_search(name, expected_search(session, slots_max, first=slots))
        session.report_remaining(f"{name}: {slots} requests at a time, {slots_max} at most")
        measured = await session.measure(
            f"{name}/{slots:04d}-at-a-time", load_of(slots, ROUNDS * slots), arm=arm, warm_by=warm_by
        )
        rps, tps = _rates(measured)
        output = rps if tps is None else tps
        saturated = best is not None and output < best[2] * (1 + GAIN_MIN)
        if best is None or output > best[2]:
            best = rps, tps, output, slots
        if saturated or slots >= slots_max:
            break
        slots = min(2 * slots, slots_max)
    session.expected.replace_search(name, [])
    rps, tps, _, slots_best = best
    if not rps:
        outcomes = ", ".join(f"{outcome} {n:,}" for outcome, n in incomplete_by_outcome(measured).items())
        problem = f"all requests of the search for capacity failed ({outcomes})"
        hint = "see the log of the server; if the capacity is known, set the parameter max_rate"
        raise ConfigError("target.url", problem, hint)
    explanation = "more bring no more" if saturated else f"more than {slots_max} were not tried"
    return Capacity(
        rps=rps, tps=tps, how=f"closed loop of {slots_best} at a time: {explanation}", saturated=saturated
    )


def _rates(measured: Measurement) -> tuple[float, float | None]:
    """Return the rates of requests and of output tokens per second.

    The rate of requests is the rate of tokens / the mean length, if both are known: it is less noisy than a
    count of requests.
    """
    steady = steady_part_of(measured)
    tps = steady.output_tps
    mean = pc.mean(measured.successful_rows()["output_tokens"]).as_py()
    return (tps / mean if tps and mean else steady.completed_rps), tps


def is_sustained(level: Mapping[str, Any]) -> bool:
    """Return whether a level (JSON of `LevelFigures`) is sustained and meets its bounds, if it has any.

    Results of earlier versions have no `sustained`: for these, `holds` or the state of the queue decides.
    """
    holds = level.get("holds")
    if "sustained" not in level:
        return bool(level.get("queue") == "stable" if holds is None else holds)
    return bool(level["sustained"]) and holds is not False


def completion_ratio_if_overloaded(measured: Measurement) -> float | None:
    """Return completions / arrivals of an open loop above saturation (IETF 5.2.3.1); None for loads below it.

    Also None if the load was too short: shorter than three times the duration of a response without a queue.
    """
    steady, table = steady_part_of(measured), measured.successful_rows()
    if not (steady.falls_short and steady.queue_grows):
        return None
    first_ns = pc.min(table["ttft_ns"]).as_py() or 0
    rest_ns = pc.approximate_median(pc.subtract(table["e2e_ns"], table["ttft_ns"])).as_py() or 0.0
    return steady.delivered_share if steady.to_s * 1e9 >= ANSWERS_MIN * (first_ns + rest_ns) else None


@dataclass(slots=True)
class RateSearch:
    """Search for the highest level that holds (passes): double the level until it fails, then bisect.

    The search begins at the level `start`, and stays within `low` and `high`.
    """

    low: int
    high: int
    start: int
    """First level that is tried."""
    resolution: int = 1
    """Difference between `best` and `limit` at which the search ends."""
    best: int | None = None
    """Highest level that has passed so far, or None."""
    limit: int | None = None
    """Lowest level that has failed so far, or None."""

    def __post_init__(self) -> None:
        assert 0 < self.low <= self.start <= self.high
        assert self.resolution > 0

    def record(self, level: int, holds: bool) -> None:
        """Record the verdict on a level."""
        if holds:
            self.best = level
        else:
            self.limit = level

    @property
    def next_level(self) -> int | None:
        """Next level to try; None at the end of the search."""
        if self.limit is not None:
            is_close = self.limit - self._floor <= self._gap_min
            return None if is_close else (self._floor + self.limit) // 2
        if self.best is None:
            return self.start
        return min(self.high, 2 * self.best) if self.best < self.high else None

    @property
    def attempts_max(self) -> int:
        """Largest possible number of levels that are still to be tried."""
        level = self.next_level
        if level is None:
            return 0
        # If a level has passed and one has failed, follow only the search after a success: it has at least as
        # many levels left as the search after a failure.
        successors = [replace(self, best=level)]
        if self.best is None or self.limit is None:
            successors.append(replace(self, limit=level))
        return 1 + max(one.attempts_max for one in successors)

    def expected_levels(self, highest: float | None) -> list[int]:
        """Return the levels that are still to be tried if `highest` is the highest level that holds.

        If the verdicts so far exclude `highest`, the nearest level that they allow is used instead; None: the
        middle of the levels that they allow.
        """
        limit = 2 * max(self._floor, self.start) if self.limit is None else self.limit
        if highest is None:
            highest = (self._floor + limit) / 2
        elif highest < self._floor:
            highest = self._floor
        elif self.limit is not None and highest >= self.limit:
            highest = self.limit - 1
        search, levels = replace(self), []
        while (level := search.next_level) is not None:
            levels.append(level)
            search.record(level, level <= highest)
        return levels

    @property
    def _floor(self) -> int:
        """Highest level that passed so far; if none did, `low` - 1, which stands for a level that passes."""
        return self.low - 1 if self.best is None else self.best

    @property
    def _gap_min(self) -> int:
        """Smallest difference between both ends at which the search ends."""
        # While no level has passed, ignore `resolution`, so that the search goes down to the lowest level.
        return 1 if self.best is None else self.resolution
