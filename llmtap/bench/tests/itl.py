"""Inter-Token Latency Distribution (IETF draft, 5.4): gaps between tokens at several shares of saturation.

`run` sends an open loop at each share of the saturation rate, which the user sets or the throughput test has
measured, and returns percentiles, modes, tables and charts by level. TTFT and responses of fewer than 50
tokens are excluded.

The gap is the time between events with output. It is ITL if nearly all events have one token (B.2.1), else
the time between chunks (TBC, option A of 4.6.3); with option C, the server's timestamps are used. Option B
(all tokens of a chunk have the same time) is used only if the user chooses it, because it underestimates the
variance.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from llmtap.bench.compliance.evidence import plural
from llmtap.bench.run import figures, test
from llmtap.bench.run.levels import Capacity, known_capacity
from llmtap.bench.run.measurement import Measurement
from llmtap.bench.run.pace import ExpectedLoads, open_loops
from llmtap.bench.run.session import BenchSession, Load, OpenLoop, make_load
from llmtap.errors import ConfigError
from llmtap.metrics.intervals import Tail, modes, tail
from llmtap.metrics.latency import itl_ns
from llmtap.metrics.statistics import deviation, percentile, tail_ratio
from llmtap.options.fields import opt

OUTPUT_MIN: Final = 50
"""Smallest number of tokens of a response that counts; shorter responses are left out (IETF 5.4.2)."""
REQUESTS_MIN: Final = 100
SAMPLES_MIN: Final = 5_000
DIRECT_SHARE: Final = 0.9
"""Share of chunks with a single token above which gaps between chunks count as ITL (IETF B.2.1)."""
_ROWS: Final = {"p50": "P50", "p90": "P90", "p95": "P95", "p99": "P99", "p999": "P99.9"}
_RESULTS: Final = ("Samples", *_ROWS.values(), "Mean", "Std Dev", "P99/P50 Ratio")
_HISTOGRAM_TO: Final = 0.995
_METHODS: Final = {
    "A": "option A (time between chunks)",
    "A (direct)": "option A, direct (more than 90 % single-token chunks, B.2.1)",
    "B": "option B (all tokens of a chunk at its time)",
    "C": "option C (the server's own stamps)",
}

Level = Annotated[float, Meta(gt=0, le=200)]


class ItlParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Setup of the test (IETF 5.4.2)."""

    workload: test.Workload = "synthetic-uniform"
    output_tokens: Annotated[
        Annotated[int, Meta(ge=OUTPUT_MIN)] | None,
        opt("tokens of each response; default: the workload's lengths, if at least 50"),
    ] = None
    requests: Annotated[int, opt("requests per level; the draft demands 100", ge=1)] = REQUESTS_MIN
    max_rate: Annotated[
        test.Rate | None,
        opt("saturation rate, requests/s; default: from the throughput test"),
    ] = None
    levels: Annotated[tuple[Level, ...], opt("loads in % of max_rate", min_length=1)] = (
        25.0,
        50.0,
        75.0,
        90.0,
    )
    arrivals: test.ArrivalProcess = "poisson"
    option: Annotated[
        Literal["auto", "A", "B", "C"],
        opt(
            "4.6.3: A, time between chunks; B, all tokens of a chunk at one time; C, the server's"
            " timestamps; auto: C if available, else A"
        ),
    ] = "auto"


class Modality(msgspec.Struct, frozen=True):
    """Modes (peaks) of the distribution of gaps, in seconds, and whether there is only one."""

    unimodal: bool
    """Whether there is only one peak."""
    modes: list[float]
    """Positions of the peaks."""


class ChunkSizes(msgspec.Struct, frozen=True):
    """Numbers of tokens per chunk; None if they are unknown."""

    single_token_share: float | None
    """Share of the chunks with exactly one token."""
    tokens_per_chunk_mean: float | None
    tokens_per_chunk_max: float | None


class ItlLevel(msgspec.Struct, frozen=True, kw_only=True):
    """Gaps between tokens at one load."""

    level: float
    """Load in % of the saturation rate."""
    rate_rps: float
    """Planned rate."""
    requests: int
    answers: int
    """Number of responses with at least `OUTPUT_MIN` tokens, which the figures include."""
    too_short: int
    """Number of responses with fewer tokens, which no figure includes."""
    offered_rps: float | None
    """Rate at which requests were sent."""
    option: str
    """ITL option (IETF 4.6.3) by which the gaps were measured."""
    term: str
    """`ITL`, or `TBC` if the gaps are times between chunks."""
    itl: figures.LatencyRow
    std: float | None
    """Standard deviation of all gaps."""
    jitter: figures.LatencyRow
    """Statistics over responses: standard deviation of the gaps within a response."""
    max_pause: figures.LatencyRow
    """Statistics over responses: longest gap within a response."""
    p99_p50: float | None
    """P99 of the gaps / P50 of the gaps."""
    modality: Modality | None
    """Shape of the distribution of gaps; None without gaps."""
    tail: Tail
    """Shape of the longest gaps."""
    chunking: ChunkSizes
    """Numbers of tokens per chunk."""

    @property
    def name(self) -> str:
        return f"{self.level:g} %"


class ItlMeasurements(msgspec.Struct, frozen=True):
    """Public JSON of the test's figures."""

    max_rate_rps: float
    """Saturation rate, from which the loads are computed."""
    max_rate_from: str
    """Source of the saturation rate, as text."""
    levels: list[ItlLevel]


def check(session: BenchSession, params: ItlParams) -> None:
    """Raise ConfigError if the saturation rate is unknown, or responses are too short (IETF 5.4.2)."""
    rate = _capacity(session, params).rps
    shortest = min(_load(session, params, rate).plan.requests.output)
    if shortest < OUTPUT_MIN:
        raise ConfigError(
            "output_tokens",
            f"answers have only {shortest} tokens; the IETF draft (section 5.4.2) requires {OUTPUT_MIN}",
            "set output_tokens = 128, or use another workload",
        )


async def run(session: BenchSession, params: ItlParams) -> test.TestResult:
    """Send a load at each share of saturation, and return distributions of the gaps (IETF 5.4.3, 5.4.4)."""
    capacity = _capacity(session, params)
    result = test.TestResult()
    levels: list[ItlLevel] = []
    samples: list[list[list[float]]] = []
    measured: Measurement | None = None
    percentages = sorted(params.levels)
    for i, percentage in enumerate(percentages):
        session.report_remaining(f"{len(percentages) - i} of {len(percentages)} levels")
        rate = capacity.rps * percentage / 100
        load = _load(session, params, rate)
        measured = await session.measure(f"{percentage:g}-percent", load)
        gaps, level = _level_figures(percentage, rate, measured, params.option)
        samples.append(gaps)
        levels.append(level)
        result.configuration = figures.load_lines(load, measured)
    assert measured is not None
    rates = ", ".join(f"{one.name} ({one.rate_rps:.3g}/s)" for one in levels)
    result.configuration |= {
        "Load model": f"open loop, arrivals {params.arrivals}; of {capacity.rps:.4g} requests/s: {rates}",
        "Request count": ", ".join(f"{one.requests:,}" for one in levels) + " by level",
        "Test duration": ", ".join(f"{step.seconds:.1f}" for step in session.steps) + " s by level",
        "ITL measurement": "; ".join(dict.fromkeys(_METHODS[one.option] for one in levels)),
    }
    result.main = measured.name
    result.itl_option = " + ".join(sorted({one.option for one in levels}))
    result.measurements = ItlMeasurements(capacity.rps, capacity.how, levels)
    result.tables = _tables(levels)
    result.charts = _charts(levels, [[gap for group in groups for gap in group] for groups in samples])
    result.notes.append("the time before an answer's first token is in no figure (5.4.3)")
    result.notes.append(f"saturation: {capacity.how}")
    _add_notes(result, levels)
    return result


def _capacity(session: BenchSession, params: ItlParams) -> Capacity:
    """Return the saturation rate, to which the levels refer. Raises ConfigError if it is unknown."""
    capacity = known_capacity(session, params.max_rate, params.workload)
    if capacity is None:
        raise ConfigError(
            "max_rate",
            f"is not given, and the results folder has no throughput test of {params.workload}",
            "run `llmtap bench throughput` with the same --results first, or set it, such as max_rate = 20.0",
        )
    return capacity


def _load(session: BenchSession, params: ItlParams, rate: float) -> Load:
    return make_load(
        params.workload,
        open_loop=OpenLoop(rate, params.arrivals),
        seed=session.seed,
        requests=params.requests,
        output_tokens=params.output_tokens,
        counting=session.target.counting,
    )


def _level_figures(
    percentage: float, rate: float, measured: Measurement, option: Literal["auto", "A", "B", "C"]
) -> tuple[list[list[float]], ItlLevel]:
    """Return the gaps of each response with at least `OUTPUT_MIN` tokens, and the figures of the level."""
    columns = ["gaps_ns", "server_gaps_ns", "output_tokens", "itl_policy"]
    columns += ["chunk_tokens"] * (option == "B")
    rows = measured.successful_rows().select(columns).to_pylist()
    answers = [row for row in rows if _output_tokens(row) >= OUTPUT_MIN]
    by_server = [row for row in answers if row["server_gaps_ns"]]
    server = bool(by_server) and (option == "C" or (option == "auto" and len(by_server) == len(answers)))
    direct = sum("direct" in (row["itl_policy"] or "") for row in answers) > DIRECT_SHARE * len(answers)
    column = "server_gaps_ns" if server else "gaps_ns"
    chosen = by_server if server else answers
    if option == "B":
        groups = [group for row in answers if row["chunk_tokens"] and (group := _option_b_gaps(row))]
    else:
        groups = [[ns / 1e9 for ns in row[column]] for row in chosen if row[column]]
    gaps = [gap for group in groups for gap in group]
    itl = figures.clustered_row(groups)
    chunking = measured.result.get("chunking") or {}
    load = measured.result.get("load") or {}
    jitters = [value for group in groups if len(group) > 1 and (value := deviation(group)) is not None]
    median, p99 = itl.percentile("p50"), itl.percentile("p99")
    return groups, ItlLevel(
        level=percentage,
        rate_rps=rate,
        requests=measured.n,
        answers=len(groups),
        too_short=len(rows) - len(answers),
        offered_rps=load.get("offered_rps"),
        option="B" if option == "B" else "C" if server else "A (direct)" if direct else "A",
        term="ITL" if option == "B" or server or direct else "TBC",
        itl=itl,
        std=deviation(gaps),
        jitter=figures.latency_row(jitters, figures.KEY_SHARES),
        max_pause=figures.latency_row([max(group) for group in groups], figures.KEY_SHARES),
        p99_p50=None if median is None or p99 is None else tail_ratio(median.value, p99.value),
        modality=_modality(gaps),
        tail=tail(gaps),
        chunking=ChunkSizes(
            chunking.get("single_token_share"),
            chunking.get("tokens_per_chunk_mean"),
            chunking.get("tokens_per_chunk_max"),
        ),
    )


def _option_b_gaps(row: Mapping[str, Any]) -> list[float]:
    """Return the gaps of an answer in seconds by option B: each token has the time of its chunk."""
    times_ns = list(accumulate(row["gaps_ns"] or (), initial=0))
    return [ns / 1e9 for ns in itl_ns(times_ns, row["chunk_tokens"])]


def _output_tokens(row: Mapping[str, Any]) -> int:
    """Return the number of output tokens of a response or, if it is unknown, the number of chunks."""
    tokens = row["output_tokens"]
    return len(row["gaps_ns"] or ()) + 1 if tokens is None else int(tokens)


def _modality(gaps: Sequence[float]) -> Modality | None:
    """Return the peaks of the distribution of the gaps; None: too few gaps."""
    peaks = modes(gaps)
    return Modality(len(peaks) == 1, peaks) if peaks else None


def _tables(levels: Sequence[ItlLevel]) -> list[test.ReportTable]:
    loads = [f"{one.name} ({one.rate_rps:.3g}/s)" for one in levels]
    terms = "/".join(dict.fromkeys(one.term for one in levels))
    rows = [[name, *cells] for name, *cells in zip(_RESULTS, *map(_result_cells, levels), strict=True)]
    heads = ["Metric", *loads] if len(loads) > 1 else ["Metric", "Value"]
    at_load = "" if len(loads) > 1 else f" at {loads[0]}"
    return [
        test.ReportTable(f"Table 6: {terms} Results{at_load}, load in % of saturation", heads, rows),
        figures.table_of("Per-request statistics (5.4.4.2)", levels, REQUEST_COLUMNS),
        figures.table_of("Distribution shape (5.4.4.3)", levels, SHAPE_COLUMNS),
    ]


def _result_cells(one: ItlLevel) -> list[str]:
    cells = [figures.ms_of(one.itl, key) for key in (*_ROWS, "mean")]
    return [f"{one.itl.n}", *cells, figures.ms(one.std), _number_text(one.p99_p50)]


def _modes_cell(cell: figures.Cell) -> figures.Cell:
    """Return a cell function that applies `cell` to the level's `modality`, or returns `-` if it has none."""
    return lambda one: "-" if one.modality is None else cell(one.modality)


def _number_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percentile_cell(what: str, share: str) -> figures.Cell:
    return lambda one: figures.ms_of(getattr(one, what), share)


REQUEST_COLUMNS: Final[Mapping[str, figures.Cell]] = {
    "Load": figures.attribute_cell("name"),
    "Answers": figures.attribute_cell("answers"),
    **{
        f"{head} {share.upper()}": _percentile_cell(what, share)
        for what, head in (("jitter", "Jitter"), ("max_pause", "Max Pause"))
        for share in figures.KEY_SHARES
    },
}
SHAPE_COLUMNS: Final[Mapping[str, figures.Cell]] = {
    "Load": figures.attribute_cell("name"),
    "Modality": _modes_cell(lambda modality: "unimodal" if modality.unimodal else "multimodal"),
    "Modes": _modes_cell(lambda modality: ", ".join(map(figures.ms, modality.modes)) or "-"),
    "Tail": lambda one: one.tail.kind or "-",
    "P99/P50 Ratio": lambda one: _number_text(one.p99_p50),
}


def _charts(levels: Sequence[ItlLevel], samples: Sequence[Sequence[float]]) -> list[test.ChartSpec]:
    all_gaps = sorted(gap for gaps in samples for gap in gaps)
    histogram_max = percentile(all_gaps, _HISTOGRAM_TO)
    if histogram_max is None:
        return []
    term = " and ".join(dict.fromkeys(one.term for one in levels))
    named = [(one.name, gaps) for one, gaps in zip(levels, samples, strict=True) if gaps]
    percentages: list[float | str] = [one.level for one in levels]
    x_title, cdfs = f"{term} (ms)", [figures.cdf_series(name, gaps) for name, gaps in named]
    histograms = [
        figures.histogram_series(name, gaps, span=(all_gaps[0], histogram_max)) for name, gaps in named
    ]
    lines = [
        figures.line_series(_ROWS[share], percentages, [one.itl.percentile(share) for one in levels])
        for share in ("p50", "p90", "p95", "p99")
    ]
    histogram_title = f"{term}: how often which (without the longest 0.5 %)"
    return [
        test.ChartSpec(f"{term} at each load", "cdf", x_title, "share of gaps", cdfs),
        test.ChartSpec(histogram_title, "histogram", x_title, "share of gaps", histograms),
        test.ChartSpec(f"{term} against load", "line", "load (% of saturation)", x_title, lines),
    ]


def _add_notes(result: test.TestResult, levels: Sequence[ItlLevel]) -> None:
    notes = result.notes
    notes += figures.legend(levels, "itl", "jitter", "max_pause")
    notes.append(
        "intervals take an answer's gaps together, since they are alike; jitter is the standard deviation of"
        " an answer's gaps, its longest pause the greatest of them"
    )
    for one in levels:
        if one.term == "TBC":
            mean, share = one.chunking.tokens_per_chunk_mean, one.chunking.single_token_share
            size = "unknown sizes" if mean is None else f"{mean:.2f} tokens on average"
            single = "" if share is None else f", {share:.0%} of one token"
            notes.append(f"{one.name}: chunks have {size}{single}, so the figures are times between chunks")
        if one.too_short:
            notes.append(
                f"{one.name}: {plural(one.too_short, 'answer')} had fewer than {OUTPUT_MIN} tokens: left out"
            )
        if one.answers < REQUESTS_MIN or one.itl.n < SAMPLES_MIN:
            result.deviations.append(
                f"5.4.2: {plural(one.answers, 'answer')} with {one.itl.n:,} gaps at"
                f" {one.name} of saturation, where {REQUESTS_MIN} with {SAMPLES_MIN:,} are wanted"
            )
    if any(one.option == "B" for one in levels):
        notes.append("option B: answers whose tokens per chunk are unknown are left out")


def _expected_loads(session: BenchSession, params: ItlParams) -> ExpectedLoads:
    capacity = known_capacity(session, params.max_rate, params.workload)
    rps = None if capacity is None else capacity.rps
    return ExpectedLoads(open_loops(params.requests, [level / 100 for level in params.levels], rps))


TEST: Final = test.BenchTest(
    name="itl",
    params=ItlParams,
    run=run,
    expected=_expected_loads,
    figures=("load", "tbc", "itl", "tbc_max", "jitter"),
    quick={"requests": 40, "levels": (25.0, 75.0)},
    forfeits=("5.4.2-3", "5.4.2-p1"),
    check=check,
)
