"""Shared parts of tests that measure several load levels: SLO bounds, loads, figures, capacity.

`level_load` makes the load of a level, with a seed of its own so that a prefix cache has no hits, and
`measure_closed` sends a closed loop. `Bounds` judges a level; the functions beside it make its JSON, tables
and charts. The capacity, of which other levels are shares, is the parameter `max_rate` or the throughput
test's result with the same workload (`capacity_told`), or is measured: the concurrency of closed loops is
doubled until the output rate no longer grows (`find_capacity`). `RateSearch` chooses the levels of a search
for the highest level that holds: it doubles until one fails, then bisects. Its choice depends on the verdicts
alone, so an interrupted search can be resumed.

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

from llmtap.bench.run.figures import KEY_SHARES, METRICS, latency_row, line_series, ms, ms_of
from llmtap.bench.run.measurement import Measurement, Steady, steady_of
from llmtap.bench.run.session import BASELINE, BenchSession, Load, make_load, time_said
from llmtap.bench.run.test import ChartSeries, ChartSpec, Mark, ReportTable
from llmtap.errors import ConfigError
from llmtap.metrics.saturation import SaturationLevel
from llmtap.metrics.summary import ENDED_WELL
from llmtap.report.values import at
from llmtap.units import Duration, to_seconds

COLUMNS: Final = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "End-to-End"}
FAILED_MAX: Final = 0.01
"""Largest share of failures that a bound on a P99 allows."""
ROWS_SPARE: Final = 1.5
"""Factor on the number of requests that the previous level suggests for a closed loop."""
ROWS_PER_SLOT_S: Final = 5.0
"""Requests per slot and second if no response time is known (200 ms each)."""
ENOUGH: Final = 0.95
"""Share of its time for which the requests of a closed loop have to last."""
ROWS_MAX: Final = 100_000
"""A server that turns requests away at once could be sent any number."""
_NO_MEMORY: Final = re.compile(
    r"out[ -]of[ -]memory|\boom\b|memoryallocation|alloc_failed|insufficient memory", re.IGNORECASE
)


_P99S: Final = ("ttft", "tpot")


@dataclass(frozen=True, slots=True)
class Tried:
    level: float
    """Requests per second, or concurrent requests."""
    measured: Measurement
    steady: Steady
    holds: bool
    why: str

    @property
    def status(self) -> str:
        return "Pass" if self.holds else "Fail"


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a level has to meet: P99s, a share of requests within objectives, a share of smooth tokens."""

    ttft: Duration | None = None
    tpot: Duration | None = None
    objectives: str | None = None
    """`Objectives.parse` reads it."""
    attainment: float = 0.99
    """Smallest share of requests that meet all `objectives`."""
    smooth: float | None = None
    """Smallest smooth goodput, as a share of the output tokens."""

    def __bool__(self) -> bool:
        return bool(self._given()) or self.objectives is not None or self.smooth is not None

    @property
    def slo(self) -> str | None:
        return self.objectives or " ".join(f"{name}:{ns}ns" for name, ns in self._given()) or None

    @property
    def says(self) -> str:
        """`TTFT P99 <= 2000 ms, TPOT P99 <= 50.0 ms`"""
        said = [f"{COLUMNS[name]} P99 <= {ms(to_seconds(ns))}" for name, ns in self._given()]
        if self.objectives is not None:
            said.append(f"{share(self.attainment)} of the requests within {self.objectives}")
        if self.smooth is not None:
            said.append(f"smooth goodput >= {share(self.smooth)} of the output tokens")
        return ", ".join(said)

    def to_dict(self) -> dict[str, float | str | None] | None:
        if not self:
            return None
        given = dict(self._given())
        return {
            **{f"{name}_p99": None if (ns := given.get(name)) is None else to_seconds(ns) for name in _P99S},
            "objectives": self.objectives,
            "attainment": None if self.objectives is None else self.attainment,
            "smooth": self.smooth,
        }

    def broken(self, steady: Steady) -> list[str]:
        """Return the violated bounds as texts. Failed requests violate every bound."""
        found = []
        for name, ns in self._given():
            p99 = steady.latency(f"{name}_ns", 0.99)
            if p99 is None and name == "ttft":
                found.append("no answer has a TTFT")
            elif p99 is not None and p99 > to_seconds(ns):
                found.append(f"{COLUMNS[name]} P99 {ms(p99)} > {ms(to_seconds(ns))}")
        if self.objectives is not None:
            met = steady.attainment
            if met is None:
                found.append(f"no request counts for {self.objectives}")
            elif met < self.attainment:
                needed = f"{share(self.attainment)} needed"
                found.append(f"{share(met)} of the requests met {self.objectives}, {needed}")
        if self.smooth is not None:
            smooth = steady.smooth_share
            if smooth is None or smooth < self.smooth:
                found.append(f"smooth goodput is {share(smooth)} of the tokens, {share(self.smooth)} needed")
        if self._given() and steady.failed > FAILED_MAX:
            found.append(f"{share(steady.failed)} of the requests failed: a P99 leaves {FAILED_MAX:.0%}")
        return found

    def _given(self) -> list[tuple[str, int]]:
        return [(name, ns) for name, ns in zip(_P99S, (self.ttft, self.tpot), strict=True) if ns is not None]


def level_load(session: BenchSession, name: str, workload: str, **how: Any) -> Load:
    seed = session.seed + crc32(f"{session.name}/{name}".encode())
    return make_load(workload, seed=seed, **how, **session.target.counting)


async def measure_closed(
    session: BenchSession,
    name: str,
    workload: str,
    slots: int,
    duration: Duration,
    before: tuple[float, float] | None,
    *,
    slo: str | None = None,
    output_tokens: int | None = None,
) -> tuple[Measurement, Steady, bool]:
    """Send a closed loop; again as `NAME-longer` if its requests ended too soon and none failed.

    `before`: see `rows_for`. Returns the measurement, its steady part, and whether it still ended too soon.
    """
    seconds = to_seconds(duration)
    rows = rows_for(slots, seconds, before)
    for step in (name, f"{name}-longer"):
        load = level_load(
            session, step, workload, slots=slots, requests=rows, duration_s=seconds,
            output_tokens=output_tokens,
        )  # fmt: skip
        measured = await session.measure(step, load, slo=slo)
        steady = steady_of(measured, seconds)
        short = steady.to_s < ENOUGH * seconds
        if not short or steady.failed > FAILED_MAX:
            break
        rows = max(rows, rows_for(slots, seconds, (slots, measured.n / max(steady.to_s, 1e-3))))
    return measured, steady, short


def rows_for(slots: int, seconds: float, before: tuple[float, float] | None) -> int:
    """Return the requests for a closed loop; `before`: slots and answers per second of another level."""
    rate = ROWS_PER_SLOT_S * slots
    if before is not None:
        rate = before[1] * max(1.0, slots / before[0]) * ROWS_SPARE
    return min(ROWS_MAX, ceil(rate * seconds) + 2 * slots)


def saturation_level(tried: Tried) -> SaturationLevel:
    """Return a level for the rules of `metrics/saturation.py`, by TTFT; an unknown one is infinite."""
    steady, endless = tried.steady, float("inf")
    p50, p99 = (endless if (ttft := steady.latency("ttft_ns", p)) is None else ttft for p in (0.50, 0.99))
    return SaturationLevel(tried.level, steady.output_tps or 0.0, p50, p99, steady.success)


def level_json(tried: Tried) -> dict[str, Any]:
    steady = tried.steady
    return {
        "step": tried.measured.name,
        "holds": tried.holds,
        "why": tried.why,
        "requests": tried.measured.n,
        "window": {"from": steady.from_s, "to": steady.to_s},
        "arrivals": steady.arrivals,
        "arrival_rps": steady.arrival_rps,
        "completed": steady.completed,
        "completed_rps": steady.completed_rps,
        "delivered": steady.delivered,
        "success": steady.success,
        "output_tps": steady.output_tps,
        "input_tps": steady.input_tps,
        "in_flight": list(steady.in_flight),
        "queue": "growing" if steady.queue_grows else "stable",
        "throughput_stable": steady.throughput_is_stable,
        **latency_rows(steady.sent),
    }


def latency_rows(measured: Measurement) -> dict[str, dict[str, Any]]:
    """Return P50, P95 and P99 of TTFT, TPOT and E2E with their intervals."""
    return {name: latency_row(measured.values(f"{name}_ns"), KEY_SHARES) for name in COLUMNS}


def latency_table(caption: str, measured: Measurement) -> ReportTable:
    rows = [
        [COLUMNS[name], *(ms_of(row, p) for p in KEY_SHARES)] for name, row in latency_rows(measured).items()
    ]
    return ReportTable(caption, ["Metric", *(p.upper() for p in KEY_SHARES)], rows)


def throughput_chart(
    by: str, x_title: str, xs: Sequence[float], levels: Sequence[Tried], marks: list[Mark], *,
    log_x: bool = False,
) -> ChartSpec:  # fmt: skip
    line = ChartSeries("throughput", list(xs), [one.steady.output_tps for one in levels])
    return ChartSpec(
        f"Output throughput by {by}", "line", x_title, "output tokens/s", [line], marks, log_x=log_x
    )


def p99_chart(
    title: str, x_title: str, xs: Sequence[float], rows: Sequence[Mapping[str, Any]],
    marks: Sequence[Mark] = (),
) -> ChartSpec:  # fmt: skip
    lines = [
        line_series(f"{name} P99", list(xs), [row[key]["p99"] for row in rows])
        for key, name in METRICS.items()
    ]
    return ChartSpec(title, "line", x_title, "ms", lines, list(marks), log_y=True)


def check_duration(session: BenchSession, duration: Duration, least: Duration, section: str) -> None:
    """Raise ConfigError if a level is shorter than the draft demands, except in a quick run."""
    if duration < least and not session.quick:
        told = f"is {to_seconds(duration):g} s, and {section} asks for {to_seconds(least):g} s at least"
        raise ConfigError("duration", told, "--quick gives that up, and the report says so")
    if duration <= 0:
        raise ConfigError("duration", "is 0; expected more than 0 s")


def number(value: float | None, unit: str = "") -> str:
    """Format a rate as `2,847 tok/s`, `18.2 req/s` or `0.45 req/s`; `-` for None."""
    if value is None:
        return "-"
    digits = 0 if abs(value) >= 1_000 else 1 if abs(value) >= 9.995 else 2
    return f"{value:,.{digits}f}" + f" {unit}" * bool(unit)


def share(value: float | None) -> str:
    if value is None:
        return "-"
    percent = value * 100
    # 0 % and 100 % are exact.
    return f"{percent:.0f}%" if percent in (0, 100) else f"{min(max(percent, 0.1), 99.9):.1f}%"


def server_mean(measured: Measurement, name: str, steady: Steady) -> float | None:
    """Return the mean of a server metric over the steady part, or None."""
    told = at(measured.result, "system", "series", "server") or {}
    series = at(told, "series", name, "values") or ()
    known = [
        value
        for t, value in zip(told.get("t", ()), series, strict=False)
        if value is not None and steady.from_s <= t < steady.to_s
    ]
    return sum(known) / len(known) if known else None


def server_total(measured: Measurement, name: str) -> float | None:
    """Return the increase of a server counter during a load, or None."""
    total: float | None = at(measured.result, "system", "summary", "server", name, "total")
    return total


def memory_errors(measured: Measurement) -> int:
    """Return the number of out-of-memory errors among the most frequent errors."""
    errors: dict[str, int] = measured.result.get("errors") or {}
    return sum(count for said, count in errors.items() if _NO_MEMORY.search(said))


def endings(measured: Measurement) -> dict[str, int]:
    """Return the number of incomplete responses by outcome."""
    counted = Counter(measured.table.column("outcome").to_pylist())
    return {outcome: n for outcome, n in sorted(counted.items()) if outcome not in ENDED_WELL}


def lasts(tries: int, duration_s: float) -> str:
    """Format the remaining time: `at most 7 levels, 7 min`."""
    time = time_said(tries * duration_s)
    return f"at most {tries} {'level' if tries == 1 else 'levels'}, {time} and the time to drain"


WARM_TOKENS: Final = 100
"""Tokens of a response in a warm-up: 100 requests then have the 10,000 tokens of 4.5.1."""
ANSWERS_MIN: Final = 3
SLOTS_FIRST: Final = 8
ROUNDS: Final = 6
"""Requests per slot at a level of the search for capacity."""
GAIN_MIN: Final = 0.05
"""Smallest gain of a doubled concurrency that continues the search."""


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    rps: float
    tps: float | None
    """Output tokens per second; None if only a rate is known."""
    how: str
    saturated: bool = True
    """False if the search ended at its highest concurrency."""


def capacity_told(
    session: BenchSession, max_rate: float | None, workload: str | None = None
) -> Capacity | None:
    """Return the capacity given by the user or found by the throughput test of this workload, or None."""
    if max_rate is not None:
        return Capacity(rps=max_rate, tps=None, how="given as max_rate")
    if workload is None:
        return None
    found = session.results.read_json("throughput/result.json")
    if found is None or found["params"]["workload"] != workload:
        return None
    rps = found["measurements"]["sustainable_load_rps"]
    how = "sustainable load of the throughput test, of the same workload"
    return Capacity(rps=float(rps), tps=None, how=how) if rps else None


async def find_capacity(
    session: BenchSession,
    load_of: Callable[[int, int], Load],
    slots_max: int,
    *,
    arm: str = BASELINE,
    name: str = "capacity",
    warm_by: Load | None = None,
) -> Capacity:
    """Return the rate of completion at which more concurrent requests bring no more.

    `load_of` makes a closed loop of the given slots and requests; `warm_by`: see `BenchSession.measure`.
    """
    slots = min(SLOTS_FIRST, slots_max)
    best: tuple[float, float | None, float, int] | None = None
    while True:
        session.watcher.left(f"{name}: {slots} requests at a time, {slots_max} at most")
        measured = await session.measure(
            f"{name}/{slots:04d}-at-a-time", load_of(slots, ROUNDS * slots), arm=arm, warm_by=warm_by
        )
        rps, tps = _rates(measured)
        made = rps if tps is None else tps
        saturated = best is not None and made < best[2] * (1 + GAIN_MIN)
        if best is None or made > best[2]:
            best = rps, tps, made, slots
        if saturated or slots >= slots_max:
            break
        slots = min(2 * slots, slots_max)
    rps, tps, _, at = best
    more = "more bring no more" if saturated else f"more than {slots_max} were not tried"
    return Capacity(rps=rps, tps=tps, how=f"closed loop of {at} at a time: {more}", saturated=saturated)


def _rates(measured: Measurement) -> tuple[float, float | None]:
    """Return requests and output tokens per second; requests: tokens by mean length, if known."""
    steady = steady_of(measured)
    tps = steady.output_tps
    mean = pc.mean(measured.ended_well()["output_tokens"]).as_py()
    return (tps / mean if tps and mean else steady.completed_rps), tps


def overload(measured: Measurement) -> float | None:
    """Return completions by arrivals of an open loop above saturation (5.2.3.1), else None.

    A load says nothing of it that lasts less than three answers without a queue.
    """
    steady, table = steady_of(measured), measured.ended_well()
    if not (steady.falls_short and steady.queue_grows):
        return None
    first_ns = pc.min(table["ttft_ns"]).as_py() or 0
    rest_ns = pc.approximate_median(pc.subtract(table["e2e_ns"], table["ttft_ns"])).as_py() or 0.0
    return steady.delivered if steady.to_s * 1e9 >= ANSWERS_MIN * (first_ns + rest_ns) else None


@dataclass(slots=True)
class RateSearch:
    low: int
    high: int
    start: int
    resolution: int = 1
    """Difference of `best` and `limit` at which the search ends."""
    best: int | None = None
    """Highest level that holds, or None."""
    limit: int | None = None
    """Lowest level that does not hold, or None."""

    def __post_init__(self) -> None:
        assert 0 < self.low <= self.start <= self.high
        assert self.resolution > 0

    def tell(self, level: int, holds: bool) -> None:
        if holds:
            self.best = level
        else:
            self.limit = level

    @property
    def next(self) -> int | None:
        """Next level to try; None at the end of the search."""
        if self.limit is not None:
            near = self.limit - self._floor <= self._nearest
            return None if near else (self._floor + self.limit) // 2
        if self.best is None:
            return self.start
        return min(self.high, 2 * self.best) if self.best < self.high else None

    @property
    def left(self) -> int:
        """Largest possible number of further tries."""
        level = self.next
        if level is None:
            return 0
        after = [replace(self, best=level)]  # of two halves the greater, once both ends are known
        if self.best is None or self.limit is None:
            after.append(replace(self, limit=level))
        return 1 + max(one.left for one in after)

    @property
    def _floor(self) -> int:
        """Highest level known to hold, or the level below the lowest."""
        return self.low - 1 if self.best is None else self.best

    @property
    def _nearest(self) -> int:
        # If no level holds, the lowest one is tried at any resolution.
        return 1 if self.best is None else self.resolution
