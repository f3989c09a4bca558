"""Time to First Token (IETF draft, 5.1): its distribution at one load.

`run` sends one load, in an open or a closed loop, and returns percentiles of TTFT, also by input length
(Tables 1 and 2), and charts. TTFT is the time from the last byte of the request to the first content token
that is not empty or white space (5.1.3.1, B.1.1). The time to a token of any kind is reported in addition.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Final, NamedTuple

import msgspec
import pyarrow.compute as pc

from llmtap.bench.compliance.evidence import plural
from llmtap.bench.run import figures, test
from llmtap.bench.run.levels import Capacity, known_capacity, server_total
from llmtap.bench.run.measurement import Measurement
from llmtap.bench.run.pace import ExpectedLoad, ExpectedLoads
from llmtap.bench.run.session import BenchSession, Load, OpenLoop, make_load
from llmtap.errors import ConfigError
from llmtap.metrics.statistics import percentile
from llmtap.options.fields import opt

EDGES: Final = (0, 256, 512, 1_024, 2_048, 4_096)
"""Ranges of input lengths that IETF 5.1.4.2 recommends: the first length of each; the last has no end."""
_ROWS: Final = {"p50": "P50", "p90": "P90", "p95": "P95", "p99": "P99", "p999": "P99.9"}
_HISTOGRAM_TO: Final = 0.995
_HISTOGRAMS: Final = {
    "ttft": "TTFT (server)",
    "queue": "Queue wait (server)",
    "prefill": "Prefill (server)",
}
"""Labels of times in the server's /metrics (`server_metrics.MEAN_TIMES`): TTFT as the server measures it, and
parts of TTFT."""
SHARE: Final = 0.5
"""Default load, as a share of the sustainable rate."""


class TtftParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Setup (IETF 5.1.2). Default load: half of the throughput test's sustainable load."""

    workload: test.Workload = "synthetic-uniform"
    requests: Annotated[int, opt("number; P99 needs 1,000, P99.9 needs 10,000", ge=1)] = 10_000
    rate: Annotated[test.Rate | None, opt("open loop: rate, requests/s")] = None
    arrivals: test.ArrivalProcess = "poisson"
    concurrency: Annotated[test.Count | None, opt("closed loop: concurrent requests")] = None


class InputRange(figures.LatencyRow, frozen=True, kw_only=True):
    """TTFT of the requests whose input lengths are in one range."""

    begin: int = msgspec.field(name="from")
    """First length of the range, in tokens."""
    below: int | None
    """First length above the range; None: the range has no end."""

    @property
    def text(self) -> str:
        return f"{self.begin}+" if self.below is None else f"{self.begin}-{self.below}"


class AnyTokenRow(figures.LatencyRow, frozen=True, kw_only=True):
    """Time to the first token of any kind, such as reasoning."""

    answers_with_others_first: int
    """Number of answers with tokens of another kind before the first content token."""


class ServerMean(msgspec.Struct, frozen=True):
    """Number and mean (in seconds) of the values of one time that the server measured."""

    n: int
    mean: float


class TtftMeasurements(msgspec.Struct, frozen=True, kw_only=True):
    """Public JSON of the test's figures."""

    requests: int
    """Number of requests that were sent."""
    answered: int
    """Number of requests that ended well."""
    ttft: figures.LatencyRow
    ttft_by_input: list[InputRange] | None
    """TTFT by range of input lengths; None if all inputs have one length."""
    ttft_any: AnyTokenRow | None
    """Time to the first token of any kind; None if it was always content (IETF 5.1.3.1)."""
    server_queue: figures.LatencyRow | None
    """Wait in the server's queue, a part of TTFT that the server reports; None if it does not report it."""
    server_prefill: figures.LatencyRow | None
    """Prefill time, a part of TTFT that the server reports; None if it does not report it."""
    server_histograms: dict[str, ServerMean]
    """Times of the server's /metrics by name (`_HISTOGRAMS`); times that it does not have are absent."""
    tpot: figures.LatencyRow
    e2e: figures.LatencyRow
    uncertainty_max: float | None
    """Largest uncertainty, over all responses, of a response's times, in seconds."""


class _ComponentRow(NamedTuple):
    """Row of a table: one part of TTFT."""

    name: str
    row: figures.LatencyRow


class _MeanRow(NamedTuple):
    """Row of a table: mean of one time that the server measured."""

    name: str
    row: ServerMean


def check(session: BenchSession, params: TtftParams) -> None:
    """Raise ConfigError if both `rate` and `concurrency` are set, or neither and the default is unknown."""
    if params.rate is None and params.concurrency is None and _capacity(session, params) is None:
        raise ConfigError(
            "rate",
            "is not given, and neither is concurrency: one of them is required",
            "rate = 10.0 is an open loop, concurrency = 8 a closed loop; if the results folder has a result"
            " of the throughput test, the default is half of its highest sustained rate",
        )
    if params.rate is not None and params.concurrency is not None:
        raise ConfigError(
            "concurrency",
            "cannot be combined with rate",
            "remove one: rate is an open loop, concurrency closed",
        )


async def run(session: BenchSession, params: TtftParams) -> test.TestResult:
    """Send one load, and return the distribution of TTFT (IETF 5.1.3, 5.1.4)."""
    load = _load(session, params)
    measured = await session.measure("load", load)
    ttft = measured.values("ttft_ns")
    measurements = TtftMeasurements(
        requests=measured.n,
        answered=len(measured.successful_rows()),
        ttft=figures.latency_row(ttft),
        ttft_by_input=_by_input(measured, load),
        ttft_any=_any_token(measured),
        server_queue=_server_part(measured, "server_queue_ns"),
        server_prefill=_server_part(measured, "server_prefill_ns"),
        server_histograms=_server_histograms(measured),
        tpot=figures.latency_row(measured.values("tpot_ns")),
        e2e=figures.latency_row(measured.values("e2e_ns")),
        uncertainty_max=max(measured.values("uncertainty_ns"), default=None),
    )
    result = test.TestResult(
        measurements,
        _tables(measurements),
        configuration=figures.load_lines(load, measured),
        main=measured.name,
    )
    result.charts = _charts(ttft, measured, measurements.ttft_any is not None)
    result.notes += _notes(measurements)
    return result


def _capacity(session: BenchSession, params: TtftParams) -> Capacity | None:
    return known_capacity(session, None, params.workload)


def _rate(session: BenchSession, params: TtftParams) -> float | None:
    """Return the rate that the user set, or a share of the capacity; None: unknown, or a closed loop."""
    if params.rate is not None or params.concurrency is not None:
        return params.rate
    capacity = _capacity(session, params)
    return None if capacity is None else SHARE * capacity.rps


def _load(session: BenchSession, params: TtftParams) -> Load:
    rate = _rate(session, params)
    return make_load(
        params.workload,
        open_loop=None if rate is None else OpenLoop(rate, params.arrivals),
        slots=params.concurrency,
        seed=session.seed,
        requests=params.requests,
        counting=session.target.counting,
    )


def _expected_loads(session: BenchSession, params: TtftParams) -> ExpectedLoads:
    rate, slots = _rate(session, params), params.concurrency
    return ExpectedLoads([ExpectedLoad(params.requests, rate_rps=rate, share=SHARE, slots=slots)])


def _by_input(measured: Measurement, load: Load) -> list[InputRange] | None:
    """Return TTFT by range of input lengths (IETF 5.1.4.2); None if all inputs have one length."""
    planned = load.plan.requests.input
    samples: dict[int, list[float]] = {}
    lengths = set()
    table = measured.successful_rows().select(["row", "input_tokens", "ttft_ns"])
    for row, reported, ttft_ns in zip(*(column.to_pylist() for column in table.columns), strict=True):
        length = planned[row] if reported is None else reported
        lengths.add(length)
        if ttft_ns is not None:
            bucket = max(i for i, edge in enumerate(EDGES) if length >= edge)
            samples.setdefault(bucket, []).append(ttft_ns / 1e9)
    if len(lengths) < 2:
        return None
    return [
        InputRange(
            begin=EDGES[bucket],
            below=EDGES[bucket + 1] if bucket + 1 < len(EDGES) else None,
            **msgspec.structs.asdict(figures.latency_row(samples[bucket], figures.KEY_SHARES)),
        )
        for bucket in sorted(samples)
    ]


def _any_token(measured: Measurement) -> AnyTokenRow | None:
    """Return the time to the first token of any kind; None if it was always content (IETF 5.1.3.1)."""
    table = measured.successful_rows()
    # `earlier`: other tokens came before the content; `only_other`: the response has no content at all.
    earlier = pc.less(table["ttft_any_ns"], table["ttft_ns"])
    only_other = pc.and_(pc.is_valid(table["ttft_any_ns"]), pc.is_null(table["ttft_ns"]))
    if not pc.any(earlier).as_py() and not pc.any(only_other).as_py():
        return None
    earlier_count = int(pc.sum(earlier).as_py() or 0) + int(pc.sum(only_other).as_py() or 0)
    row = figures.latency_row(measured.values("ttft_any_ns"))
    return AnyTokenRow(**msgspec.structs.asdict(row), answers_with_others_first=earlier_count)


def _server_part(measured: Measurement, column: str) -> figures.LatencyRow | None:
    """Return the statistics of a part of TTFT that the server reports; None if it does not report it."""
    values = measured.values(column)
    return figures.latency_row(values) if values else None


def _server_histograms(measured: Measurement) -> dict[str, ServerMean]:
    """Return by name of a server histogram: number and mean of the values that were added during the load.

    Percentiles would not be exact: the lowest edge of vLLM's histograms of these times is 0.3 s.
    """
    rows = {}
    for name in _HISTOGRAMS:
        seconds, n = (server_total(measured, f"{name}_{part}") for part in ("seconds", "values"))
        if seconds is not None and n:
            rows[name] = ServerMean(round(n), seconds / n)
    return rows


def _tables(measurements: TtftMeasurements) -> list[test.ReportTable]:
    results = {"Requests": f"{measurements.requests}"}
    results |= {f"TTFT {name}": figures.ms_of(measurements.ttft, key) for key, name in _ROWS.items()}
    results |= {
        f"TTFT {name.title()}": figures.ms_of(measurements.ttft, name) for name in ("mean", "min", "max")
    }
    tables = [figures.metric_table("Table 1: TTFT Results", results)]
    if measurements.ttft_by_input is not None:
        rows = [_ComponentRow(one.text, one) for one in measurements.ttft_by_input]
        tables.append(figures.table_of("Table 2: TTFT by Input Length", rows, TABLE_2))
    parts = {
        "Time to any token": measurements.ttft_any,
        "Queue wait (server)": measurements.server_queue,
        "Prefill (server)": measurements.server_prefill,
    }
    components = [_ComponentRow(name, row) for name, row in parts.items() if row is not None]
    if components:
        tables.append(figures.table_of("Components of TTFT (5.1.4.2)", components, COMPONENT_COLUMNS))
    if measurements.server_histograms:
        means = [_MeanRow(_HISTOGRAMS[name], row) for name, row in measurements.server_histograms.items()]
        caption = "Components of TTFT by the server's /metrics (5.1.4.2)"
        tables.append(figures.table_of(caption, means, _HISTOGRAM_COLUMNS))
    return tables


def _percentile_cell(share: str, *, unit: bool = True) -> figures.Cell:
    return lambda one: figures.ms_of(one.row, share, unit=unit)


TABLE_2: Final[Mapping[str, figures.Cell]] = {
    "Input Tokens": figures.attribute_cell("name"),
    **{f"{share.upper()} (ms)": _percentile_cell(share, unit=False) for share in figures.KEY_SHARES},
}
_HISTOGRAM_COLUMNS: Final[Mapping[str, figures.Cell]] = {
    "Component": figures.attribute_cell("name"),
    "Samples": lambda one: f"{one.row.n}",
    "Mean": lambda one: figures.ms(one.row.mean),
}
COMPONENT_COLUMNS: Final[Mapping[str, figures.Cell]] = {
    "Component": figures.attribute_cell("name"),
    "Samples": lambda one: f"{one.row.n}",
    "Mean": _percentile_cell("mean"),
    **{name: _percentile_cell(share) for share, name in _ROWS.items()},
}


def _charts(ttft: list[float], measured: Measurement, has_others: bool) -> list[test.ChartSpec]:
    if not ttft:
        return []
    curves: list[test.ChartSeries] = [figures.cdf_series("TTFT (first content token)", ttft)]
    if has_others:
        curves.append(figures.cdf_series("time to any token", measured.values("ttft_any_ns")))
    histogram_max = percentile(ttft, _HISTOGRAM_TO)
    assert histogram_max is not None
    histogram = figures.histogram_series("TTFT", ttft, span=(ttft[0], histogram_max))
    cdf_title, histogram_title = (
        "TTFT: share of requests that had their first token by then",
        "TTFT: how often which",
    )
    return [
        test.ChartSpec(cdf_title, "cdf", "TTFT (ms)", "share of requests", curves),
        test.ChartSpec(
            f"{histogram_title} (without the slowest 0.5 %)",
            "histogram",
            "TTFT (ms)",
            "share of requests",
            [histogram],
        ),
    ]


def _notes(measurements: TtftMeasurements) -> Iterator[str]:
    yield f"TTFT is of {plural(measurements.ttft.n, 'answer')}, to the first content token"
    yield from figures.legend([measurements], "ttft")
    if measurements.ttft_any is not None:
        share = measurements.ttft_any.answers_with_others_first / max(1, measurements.answered)
        yield (
            f"{share:.0%} of answers had tokens of another kind before the first content token (reasoning,"
            f" tool calls), the first after {figures.ms_of(measurements.ttft_any, 'mean')} on average"
        )
    if measurements.ttft_by_input is not None:
        counts = ", ".join(f"{one.text}: {one.n:,}" for one in measurements.ttft_by_input)
        yield f"requests by input tokens: {counts}"
    if measurements.answered < measurements.requests:
        failed = measurements.requests - measurements.answered
        yield f"{failed:,} of {measurements.requests:,} answers did not come whole: not in TTFT"
    if measurements.uncertainty_max is not None:
        yield f"a stamp may be late by {figures.ms(measurements.uncertainty_max)} at the worst"


TEST: Final = test.BenchTest(
    name="ttft",
    params=TtftParams,
    run=run,
    figures=("load", "ttft"),
    quick={"requests": 200},
    expected=_expected_loads,
    forfeits=("5.1.2.1-1a", "5.1.2.1-1b"),
    check=check,
)
