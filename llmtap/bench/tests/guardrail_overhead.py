"""Guardrail Overhead (IETF draft, 5.10): what safety systems cost in latency and throughput.

Configurations are arms of the bench file: `baseline`, and any of `input_filter`, `output_filter` and `full`.
At each load and repeat, `run` sends the same rows to all of them in random order, and twice to the baseline
(A/A). `paired.py` calculates the figures; this module has parameters, loads, Tables 13 and 14 and charts. An
overhead is the mean over repeats of the shift of pairs (Hodges and Lehmann), with Student's interval (6.3);
of a percentile, the difference of percentiles (5.10.4) with an interval by pairs. p-values are Holm's, for
each metric over all configurations and loads. The parameter `search` adds the maximum throughput of each
configuration (Table 14).
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from llmtap.bench.run import figures, test
from llmtap.bench.run.levels import WARM_TOKENS, Capacity, capacity_told, find_capacity
from llmtap.bench.run.loads import Load, make_load
from llmtap.bench.run.session import BenchSession
from llmtap.bench.tests.paired import (
    AGAIN,
    ARMS,
    BASELINE,
    METRICS,
    NAMES,
    Block,
    Cells,
    GuardrailCell,
    blocks,
    cached_share,
    guardrail_figures,
)
from llmtap.errors import ConfigError
from llmtap.metrics.statistics import is_enough

RUNS_MIN: Final = 3
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
    others = [name for name in ARMS if name != BASELINE]
    named = f"{', '.join(f'[arms.{name}]' for name in others[:-1])} or [arms.{others[-1]}]"
    if BASELINE not in session.arms:
        raise ConfigError(
            f"[arms.{BASELINE}]",
            f"is missing: all guardrails disabled (5.10.2), with which {named} is compared", hint,
        )  # fmt: skip
    if not _filters(session):
        problem = f"is missing: one at least has to be compared with [arms.{BASELINE}] (5.10.2)"
        for name in session.arms:
            near = difflib.get_close_matches(name, others, 1, 0.5)
            if near:
                hint = f"[arms.{name}] is none of them: did you mean [arms.{near[0]}]?"
        raise ConfigError(named, problem, hint)


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
    cells = {(arm, level): GuardrailCell() for level in levels for arm in arms}
    last: Load | None = None
    for i, block in enumerate(order):
        session.watcher.left(f"{len(order) - i} of {len(order)} blocks")
        last = _load(session, params, block, levels, capacity.rps)
        cells[block.arm, block.level].runs[block.repeat] = await session.measure(
            f"{block.level:g}-percent/{block.repeat}/{block.arm}", last,
            arm=BASELINE if block.arm == AGAIN else block.arm, warm_by=warm_by,
        )  # fmt: skip
    assert last is not None
    peaks = await _peaks(session, params, capacity, warm_by) if params.search else None
    found = test.TestResult(configuration=figures.load_lines(last, session.steps[-1]))
    found.measurements = guardrail_figures(cells, arms, levels, capacity, peaks)
    found.configuration |= _configuration(session, params, found.measurements, order, arms, switches)
    found.tables = _tables(found.measurements)
    found.charts = _charts(cells, found.measurements)
    _remark(found, session, params, cells)
    return found


def _filters(session: BenchSession) -> list[str]:
    return [name for name in ARMS if name != BASELINE and name in session.arms]


def _load(
    session: BenchSession, params: GuardrailParams, block: Block, levels: Sequence[float], capacity_rps: float
) -> Load:
    """Return the requests of a repeat and a level, the same for all configurations."""
    return make_load(
        params.workload, rate_rps=capacity_rps * block.level / 100, requests=params.requests,
        seed=session.seed + _APART * block.repeat + levels.index(block.level), arrivals=params.arrivals,
        output_tokens=params.output_tokens, **session.target.counting,
    )  # fmt: skip


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


def _configuration(
    session: BenchSession,
    params: GuardrailParams,
    told: Mapping[str, Any],
    order: Sequence[Block],
    arms: Sequence[str],
    switches: bool,
) -> dict[str, str]:
    rates = ", ".join(f"{one['level']:g} % ({one['rate_rps']:.3g}/s)" for one in told["levels"])
    capacity = told["capacity"]["rps"]
    way = (
        "all loads of one, then the next: it takes a command to switch"
        if switches
        else "at each load in turn"
    )
    seconds = sum(one.seconds for one in session.steps if "-percent/" in one.name)
    return {
        "Workload": f"{params.workload}, seeds from {session.seed}, one for each repeat and load",
        "Test duration": f"{seconds:.0f} s in all",
        "Load model": f"open loop, arrivals {params.arrivals}; of {capacity:.4g} requests/s: {rates}",
        "Configurations": ", ".join(NAMES[arm] for arm in arms),
        "Request count": f"{params.requests:,} in each of {len(order)} blocks",
        "Order of blocks": f"drawn from the seed; {way}",
    }


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
    "Reduction": lambda one: _change(one["reduction"]),
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
            if level == highest and (values := cell.values(f"{metric}_ns"))
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
    capacity = told["capacity"]
    found.notes.append(f"capacity of the baseline: {capacity['rps']:.4g} requests/s ({capacity['how']})")
    missing = [NAMES[name] for name in ARMS if name not in session.arms]
    if missing:
        found.deviations.append(f"5.10.2: not compared, as no such arm is declared: {', '.join(missing)}")
    found.notes += [
        "input filter overhead is of TTFT; total guardrail overhead is of E2E, in the full configuration",
        "the baseline was measured twice (A/A): what the two differ by is found where there is no difference",
        'intervals of "Overhead" hold what changes from block to block; those at P50 only these requests',
        figures.SPANS,
        *_refusals(told),
    ]
    rows = list(_rows(told["levels"]))
    if any(map(_lacks_interval, rows)):
        found.notes.append(
            "an overhead at a percentile is a dash where it has no interval: fewer than five pairs lie beyond"
        )
    found.deviations += _lacks(told, params)
    if figures.marked(rows, *METRICS):
        found.notes.append(figures.FEW)
    if not params.search:
        found.notes.append("maximum throughput was not measured (search = false): Table 14 is left out")
    cached = cached_share(cells)
    if cached is not None and cached > CACHED_SHARE:
        found.deviations.append(
            f"{cached:.1%} of the input tokens came from a prefix cache: all configurations get the same"
            " requests, so whoever comes later finds them there, and who that is was drawn: turn it off"
        )


def _lacks_interval(row: Mapping[str, Any]) -> bool:
    overheads = (row["overhead"] or {}).values()
    return any(
        one[name] is None or one[name]["low"] is None for one in overheads for name in figures.KEY_SHARES
    )


def _refusals(told: Mapping[str, Any]) -> Iterator[str]:
    refused: dict[str, int] = {}
    for row in _rows(told["levels"]):
        refused[row["arm"]] = refused.get(row["arm"], 0) + row["refused"]
    counted = ", ".join(f"{NAMES[arm]} {n:,}" for arm, n in refused.items() if n)
    if counted:
        yield f"refused although the content is benign: {counted}. Refused answers are in no latency"
    else:
        yield "no request was refused"


def _lacks(told: Mapping[str, Any], params: GuardrailParams) -> Iterator[str]:
    if params.repeats < RUNS_MIN:
        yield f"6.3: {params.repeats} independent runs of each configuration and load, {RUNS_MIN} wanted"
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


def _change(share: float | None) -> str:
    """Format a reduction as in Table 14: `-3.9%`."""
    return "-" if share is None else f"{-share:+.1%}"


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
