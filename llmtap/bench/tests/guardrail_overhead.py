"""Guardrail Overhead (IETF draft, 5.10): what safety systems cost in latency and throughput.

Configurations are arms of the bench file: `baseline`, and any of `input_filter`, `output_filter` and `full`.
At each load and repeat, `run` sends the same rows to all of them in random order, so that drift becomes
noise, and twice to the baseline (A/A). It returns Tables 13 and 14 and charts. An overhead is the mean over
repeats of the shift of pairs (Hodges and Lehmann), with Student's interval (6.3); of a percentile, the
difference of percentiles (5.10.4) with an interval by pairs. p-values are Holm's, for each metric over all
configurations and loads. The parameter `search` adds the maximum throughput of each
configuration (Table 14).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Annotated, Any, Final

import msgspec
import pyarrow.compute as pc
from msgspec import Meta

from llmtap.bench.run import figures, test
from llmtap.bench.run.levels import WARM_TOKENS, Capacity, capacity_told, find_capacity, overload
from llmtap.bench.run.measurement import Measurement
from llmtap.bench.run.session import BenchSession, Load, make_load
from llmtap.errors import ConfigError
from llmtap.metrics.comparison import adjusted, compare_paired, compare_quantile, reduction
from llmtap.metrics.statistics import is_enough, percentile

BASELINE: Final = "baseline"
AGAIN: Final = "baseline_again"
ARMS: Final = {
    BASELINE: "Baseline", "input_filter": "Input Filter", "output_filter": "Output Filter",
    "full": "Full Filter",
}  # fmt: skip
"""Names in the draft's tables by arm."""
NAMES: Final = {**ARMS, AGAIN: "Baseline again (A/A)"}
METRICS: Final = {"ttft": "TTFT", "e2e": "E2E"}
Cell = dict[int, Measurement]
"""A configuration at a load: one block per repeat."""
Cells = Mapping[tuple[str, float], Cell]
_APART: Final = 1_000
"""Difference between seeds of repeats; levels and searches use the seeds between."""
CACHED_SHARE: Final = 0.01
"""Largest share of cached input tokens at which the order of configurations does not matter."""

Level = Annotated[float, Meta(gt=0, le=100)]


class GuardrailParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    workload: Annotated[str, Meta(description="benign workload; conversation is recommended")] = (
        "conversation"
    )
    output_tokens: test.OutputTokens = None
    levels: Annotated[tuple[Level, ...], Meta(min_length=1, description="loads in % of max_rate")] = (
        25.0, 50.0, 75.0,
    )  # fmt: skip
    max_rate: Annotated[
        test.Rate | None,
        Meta(
            description="capacity of the baseline, requests/s; default: as measured",
        ),
    ] = None
    requests: Annotated[
        int, Meta(ge=1, description="requests per block; percentiles are over all repeats")
    ] = 200
    repeats: Annotated[
        int, Meta(ge=1, description="blocks of each configuration and load; 6.3 demands 3")
    ] = 5
    arrivals: test.ArrivalProcess = "poisson"
    search: Annotated[bool, Meta(description="measurement of maximum throughputs (Table 14)")] = True
    slots_max: test.SlotsMax = 128


def check(session: BenchSession, params: GuardrailParams) -> None:
    hint = "in the file of --config, as what differs from [target]: url, headers, body or apply"
    named = "[arms.input_filter], [arms.output_filter] or [arms.full]"
    if BASELINE not in session.arms:
        problem = f"is missing: all guardrails disabled (5.10.2), with which {named} is compared"
        raise ConfigError(f"[arms.{BASELINE}]", problem, hint)
    if not _filters(session):
        raise ConfigError(named, f"is missing: one has to be compared with [arms.{BASELINE}] (5.10.2)", hint)


async def run(session: BenchSession, params: GuardrailParams) -> test.TestResult:
    longer = msgspec.structs.replace(params, output_tokens=WARM_TOKENS)
    warm_by = _closed(session, longer, slots=8, requests=32, seed=session.seed - 1)
    capacity = capacity_told(
        session, params.max_rate, params.workload if params.output_tokens is None else None
    )
    if capacity is None:
        capacity = await _capacity(session, params, BASELINE, warm_by)
    arms = [BASELINE, *_filters(session), AGAIN]
    levels = sorted(params.levels)
    switches = any(session.arms[name].switches for name in arms if name != AGAIN)
    order = blocks(arms, levels, params.repeats, session.seed, together=switches)
    cells: Cells = {(arm, level): {} for level in levels for arm in arms}
    for i, (arm, level, repeat) in enumerate(order):
        session.watcher.left(f"{len(order) - i} of {len(order)} blocks")
        load = make_load(  # the same for all configurations
            params.workload, rate_rps=capacity.rps * level / 100, requests=params.requests,
            seed=session.seed + _APART * repeat + levels.index(level), arrivals=params.arrivals,
            output_tokens=params.output_tokens, **session.target.counting,
        )  # fmt: skip
        cells[arm, level][repeat] = await session.measure(
            f"{level:g}-percent/{repeat}/{arm}", load, arm=BASELINE if arm == AGAIN else arm, warm_by=warm_by
        )
    peaks = await _peaks(session, params, capacity, warm_by) if params.search else None
    found = test.TestResult(configuration=figures.load_lines(load, session.steps[-1]))
    found.main = f"{levels[-1]:g}-percent/0/{BASELINE}"
    told = found.measurements = guardrail_figures(cells, arms, levels, capacity, peaks)
    rates = ", ".join(f"{one['level']:g} % ({one['rate_rps']:.3g}/s)" for one in told["levels"])
    way = "all loads of one, then the next: it takes a command to switch"
    seconds = sum(one.seconds for one in session.steps if "-percent/" in one.name)
    found.configuration |= {
        "Workload": f"{params.workload}, seeds from {session.seed}, one for each repeat and load",
        "Test duration": f"{seconds:.0f} s in all",
        "Load model": f"open loop, arrivals {params.arrivals}; of {capacity.rps:.4g} requests/s: {rates}",
        "Configurations": ", ".join(NAMES[arm] for arm in arms),
        "Request count": f"{params.requests:,} in each of {len(order)} blocks",
        "Order of blocks": f"drawn from the seed; {way if switches else 'at each load in turn'}",
    }
    found.tables = _tables(told)
    found.charts = _charts(cells, told)
    _remark(found, session, params, cells)
    return found


def blocks(
    arms: Sequence[str], levels: Sequence[float], repeats: int, seed: int, *, together: bool = False
) -> list[tuple[str, float, int]]:
    """Return all arms at all levels, `repeats` times, in random order; arms of a level are neighbours.

    `together`: for arms that cost a restart, an arm has all levels before the next one.
    """
    random = Random(f"{seed}/blocks")
    order: list[tuple[str, float, int]] = []
    for repeat in range(repeats):
        if together:
            for arm in random.sample(arms, len(arms)):
                order += [(arm, level, repeat) for level in random.sample(levels, len(levels))]
        else:
            for level in random.sample(levels, len(levels)):
                order += [(arm, level, repeat) for arm in random.sample(arms, len(arms))]
    return order


def _filters(session: BenchSession) -> list[str]:
    return [name for name in ARMS if name != BASELINE and name in session.arms]


def _closed(session: BenchSession, params: GuardrailParams, *, slots: int, requests: int, seed: int) -> Load:
    return make_load(
        params.workload, slots=slots, requests=requests, seed=seed, output_tokens=params.output_tokens,
        **session.target.counting,
    )  # fmt: skip


async def _capacity(session: BenchSession, params: GuardrailParams, arm: str, warm_by: Load) -> Capacity:
    first = session.seed + _APART // 2

    def load_of(slots: int, requests: int) -> Load:
        return _closed(session, params, slots=slots, requests=requests, seed=first + slots)

    name = f"capacity/{arm}"
    return await find_capacity(session, load_of, params.slots_max, arm=arm, name=name, warm_by=warm_by)


async def _peaks(
    session: BenchSession, params: GuardrailParams, capacity: Capacity, warm_by: Load
) -> dict[str, Capacity]:
    found = {}
    for arm in (BASELINE, *_filters(session)):
        measured = arm == BASELINE and capacity.tps is not None
        found[arm] = capacity if measured else await _capacity(session, params, arm, warm_by)
    return found


def guardrail_figures(
    cells: Cells, arms: Sequence[str], levels: Sequence[float], capacity: Capacity,
    peaks: Mapping[str, Capacity] | None,
) -> dict[str, Any]:  # fmt: skip
    told: dict[str, Any] = {
        "capacity": msgspec.to_builtins(capacity),
        "levels": [
            {
                "level": level,
                "rate_rps": capacity.rps * level / 100,
                "arms": {arm: _arm(cells, arm, level) for arm in arms},
            }
            for level in levels
        ],
        "max_throughput": None if peaks is None else {
            arm: {
                **msgspec.to_builtins(peak),
                "reduction": None if arm == BASELINE else reduction(_made(peaks[BASELINE]), _made(peak)),
            }
            for arm, peak in peaks.items()
        },
    }  # fmt: skip
    for metric in METRICS:
        compared = [
            overall
            for row in _rows(told["levels"])
            if row["arm"] not in (BASELINE, AGAIN)
            and (overall := row["overhead"][metric]["overall"]) is not None
        ]
        for one, p in zip(compared, adjusted([one["p"] for one in compared]), strict=True):
            one["p_adjusted"] = p
    return told


def _made(peak: Capacity) -> float:
    return peak.rps if peak.tps is None else peak.tps


def _values(cell: Cell, metric: str) -> list[float]:
    return [value for one in cell.values() for value in one.by_row(f"{metric}_ns").values()]


def _arm(cells: Cells, arm: str, level: float) -> dict[str, Any]:
    cell, base = cells[arm, level], cells[BASELINE, level]
    outcomes = Counter(outcome for one in cell.values() for outcome in one.table["outcome"].to_pylist())
    return {
        "sent": outcomes.total(),
        "complete": outcomes["complete"],
        "refused": outcomes["refused"],
        **{
            metric: figures.latency_row(_values(cell, metric), figures.KEY_SHARES)
            for metric in (*METRICS, "tpot")
        },
        "overhead": None if arm == BASELINE else {
            metric: _overhead(base, cell, f"{metric}_ns") for metric in METRICS
        },
        "overload": [kept for one in cell.values() if (kept := overload(one)) is not None],
    }  # fmt: skip


def _overhead(base: Cell, other: Cell, column: str) -> dict[str, Any]:
    """Return other - base by repeats (by pairs, if fewer than three), by pairs, and by percentile."""
    both = [(base[repeat], other[repeat]) for repeat in sorted(base)]
    ours, theirs = figures.pairs(both, column)
    shift = compare_paired(ours, theirs)
    found = [value for one in both if (value := _shift(*figures.pairs([one], column))) is not None]
    head = figures.over_repeats(found)
    if head is None and shift is not None:
        head = figures.figure(
            shift.difference, shift.low, shift.high, shift.n, p=shift.p, method=shift.method
        )
    quantiles: dict[str, Any] = {}
    for name, p in figures.KEY_SHARES.items():
        compared = compare_quantile(ours, theirs, p, paired=True) if ours else None
        first, second = percentile(sorted(ours), p), percentile(sorted(theirs), p)
        low, high = (None, None) if compared is None else (compared.low, compared.high)
        quantiles[name] = None
        if first is not None and second is not None:
            quantiles[name] = figures.figure(second - first, low, high, len(ours))
    return {
        "overall": head,
        "by_repeat": found,
        "pairs": len(ours),
        "shift": None if shift is None else shift.to_dict(),
        **quantiles,
    }


def _shift(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Return the shift between two blocks: Hodges and Lehmann's, or the median of very few pairs."""
    compared = compare_paired(ours, theirs)
    if compared is not None:
        return compared.difference
    return percentile(sorted(b - a for a, b in zip(ours, theirs, strict=True)), 0.5)


def cached_share(cells: Cells) -> float | None:
    """Return the share of cached input tokens, or None."""
    tables = [one.table for cell in cells.values() for one in cell.values()]
    cached, given = (
        sum(pc.sum(table[name]).as_py() or 0 for table in tables)
        for name in ("cached_tokens", "input_tokens")
    )
    known = any(table["cached_tokens"].null_count < len(table) for table in tables)
    return cached / given if known and given else None


def _rows(levels: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for one in levels:
        for arm, row in one["arms"].items():
            yield {"load": f"{one['level']:g} %", "arm": arm, "name": NAMES[arm], **row}


def _overheads(levels: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in _rows(levels):
        for metric, says in METRICS.items() if row["overhead"] is not None else ():
            yield {**row, "metric": says, **row["overhead"][metric]}


def _at(share: str) -> figures.Cell:
    """Return the cell of an overhead at a percentile, or a dash if it has no interval."""

    def cell(row: Mapping[str, Any]) -> str:
        figure = row[share]
        if figure is None or figure["low"] is None:
            return "-"
        return figures.spanned(figure, doubtful=not is_enough(figure["n"], figures.KEY_SHARES[share]))

    return cell


def _p(row: Mapping[str, Any]) -> str:
    overall = row["overall"]
    if overall is None:
        return "-"
    return f"{overall['p_adjusted']:.2g}" if "p_adjusted" in overall else f"{overall['p']:.2g} (unadjusted)"


TABLE_13: Final[Mapping[str, figures.Cell]] = {
    "Configuration": figures.text("name"),
    **figures.latency_columns("ttft p50", "ttft p99", "e2e p50", "e2e p99"),
}
OVERHEAD_COLUMNS: Final[Mapping[str, figures.Cell]] = {
    "Load": figures.text("load"),
    "Configuration": figures.text("name"),
    "Metric": figures.text("metric"),
    "Overhead": lambda row: figures.spanned(row["overall"]),
    **{f"at {share.upper()}": _at(share) for share in figures.KEY_SHARES},
    "p (Holm)": _p,
}
TABLE_14: Final[Mapping[str, figures.Cell]] = {
    "Configuration": figures.text("name"),
    "Max Throughput": lambda one: (
        f"{one['rps']:.3g} req/s" if one["tps"] is None else f"{one['tps']:.0f} tok/s"
    ),
    "Reduction": lambda one: "-" if one["reduction"] is None else f"{-one['reduction']:+.1%}",
}
ANSWER_COLUMNS: Final[Mapping[str, figures.Cell]] = {
    "Load": figures.text("load"),
    "Configuration": figures.text("name"),
    **figures.latency_columns("ttft p95", "e2e p95"),
    "Sent": figures.text("sent", ","),
    "Complete": figures.text("complete", ","),
    "Refused": figures.text("refused", ","),
}


def _tables(told: Mapping[str, Any]) -> list[test.ReportTable]:
    levels, peaks = told["levels"], told["max_throughput"]
    rows = [] if peaks is None else [{"name": NAMES[arm], **one} for arm, one in peaks.items()]
    return [
        # One Table 13 per load.
        *(
            figures.table_of(
                f"Table 13: Guardrail Overhead at {one['level']:g} % of capacity"
                f" ({one['rate_rps']:.3g} requests/s)",
                _rows([one]),
                TABLE_13,
            )
            for one in levels
        ),
        figures.table_of(
            "Overhead against the baseline, with 95 % intervals (5.10.4)", _overheads(levels),
            OVERHEAD_COLUMNS,
        ),
        *([figures.table_of("Table 14: Throughput Impact", rows, TABLE_14)] if rows else []),
        figures.table_of("Answers of each configuration, and P95 (5.10.4)", _rows(levels), ANSWER_COLUMNS),
    ]  # fmt: skip


def _charts(cells: Cells, told: Mapping[str, Any]) -> list[test.ChartSpec]:
    charts, levels = [], told["levels"]
    highest = max(level for _, level in cells)
    for metric, says in METRICS.items():
        curves = [
            figures.cdf_series(NAMES[arm], values)
            for (arm, level), cell in cells.items()
            if level == highest and (values := _values(cell, metric))
        ]
        if curves:
            title = f"{says} of each configuration at {highest:g} % of capacity"
            charts.append(test.ChartSpec(title, "cdf", f"{says} (ms)", "share of requests", curves))
        lines = [
            figures.line_series(
                NAMES[arm],
                [one["level"] for one in levels],
                [one["arms"][arm]["overhead"][metric]["overall"] for one in levels],
            )
            for arm in levels[0]["arms"]
            if arm != BASELINE
        ]
        title = f"Overhead of {says} by load, with 95 % intervals"
        y_title = f"{says} over the baseline's (ms)"
        charts.append(test.ChartSpec(title, "points", "load (% of capacity)", y_title, lines))
    return charts


def _remark(found: test.TestResult, session: BenchSession, params: GuardrailParams, cells: Cells) -> None:
    told = found.measurements
    capacity, rows = told["capacity"], list(_rows(told["levels"]))
    found.notes.append(f"capacity of the baseline: {capacity['rps']:.4g} requests/s ({capacity['how']})")
    missing = [NAMES[name] for name in ARMS if name not in session.arms]
    if missing:
        found.deviations.append(f"5.10.2: not compared, as no such arm is declared: {', '.join(missing)}")
    found.notes += [
        "the baseline was measured twice (A/A): what the two differ by is found where there is no difference",
        'intervals of "Overhead" hold what changes from block to block; those at P50 only these requests',
        *figures.legend(rows, *METRICS),
    ]
    refused: Counter[str] = Counter()
    for row in rows:
        refused[row["arm"]] += row["refused"]
    if counted := ", ".join(f"{NAMES[arm]} {n:,}" for arm, n in refused.items() if n):
        found.notes.append(
            f"refused although the content is benign: {counted}. Refused answers are in no latency"
        )
    found.deviations += _lacks(told, params)
    cached = cached_share(cells)
    if cached is not None and cached > CACHED_SHARE:
        found.deviations.append(
            f"{cached:.1%} of the input tokens came from a prefix cache: all configurations get the same"
            " requests, so whoever comes later finds them there, and who that is was drawn: turn it off"
        )


def _lacks(told: Mapping[str, Any], params: GuardrailParams) -> Iterator[str]:
    least = figures.RUNS_MIN
    if params.repeats < least:
        yield f"6.3: {params.repeats} independent runs of each configuration and load, {least} wanted"
    if not told["capacity"]["saturated"]:
        yield "5.10.2: capacity was not reached: loads are shares of the most that was tried"
    for row in _rows(told["levels"]):
        if row["refused"]:
            at = f"{row['name']}, {row['load']}"
            yield f"5.10.2: {row['refused']} benign requests were refused ({at})"
        if row["overload"]:
            yield (
                f"{row['name']} did not keep up at {row['load']}: answers came at"
                f" {min(row['overload']):.0%} of the rate of requests"
            )


TEST: Final = test.BenchTest(
    name="guardrail-overhead",
    params=GuardrailParams,
    run=run,
    quick={
        "levels": (25.0, 75.0), "requests": 24, "repeats": 3, "output_tokens": 32, "slots_max": 32,
    },
    forfeits=("5.10.2-p2",),
    check=check,
    arms=(BASELINE,),
    arms_any=tuple(name for name in ARMS if name != BASELINE),
)  # fmt: skip
