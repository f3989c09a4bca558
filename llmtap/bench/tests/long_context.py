"""Long Context Scaling (IETF draft, 5.9): TTFT and throughput by prompt length.

`run` sends prompts of rising length, until a length gets no answer; none share a prefix. It returns Table 12,
fits of TTFT by length, and charts. The draft does not define the fits. llmtap uses least squares on the mean
TTFT of each length, and the lengths that the server reports. The fits are compared by the criterion (BIC)
n ln(RSS / n) + p ln n, for n requests, p parameters and RSS, the sum of squared residuals. Of the fits whose
criterion is at most 6 above the lowest, the best is the one with the fewest parameters.

The search for the maximum throughput at a length is the same as for the capacity in 5.3: it doubles the
concurrency of closed loops until the rate of responses no longer grows.

Source: Kass and Raftery 1995 (a difference of 6 is strong evidence).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp, log
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from llmtap.bench.run import figures
from llmtap.bench.run.levels import GAIN_MIN
from llmtap.bench.run.measurement import Measurement
from llmtap.bench.run.pace import ExpectedLoad, ExpectedLoads, doublings
from llmtap.bench.run.session import BenchSession, Load, make_load
from llmtap.bench.run.test import BenchTest, ChartSeries, ChartSpec, Count, ReportTable, TestResult
from llmtap.errors import ConfigError
from llmtap.metrics import saturation
from llmtap.metrics.intervals import mean_interval
from llmtap.metrics.statistics import mean
from llmtap.options.fields import opt

LENGTHS: Final = (1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 65_536, 131_072)
SHORT: Final = 128
"""Tokens of each prompt of the warm-up (IETF 5.9.3 step 1)."""
SHORT_OUTPUT: Final = 100
SHORT_REQUESTS: Final = 4
"""Number of different requests of the warm-up, which sends each of them several times."""
_SHARES: Final = {"p50": 0.50, "p95": 0.95}
_REQUESTS_PER_SLOT: Final = 3
"""Number of requests per slot in the search for the throughput: enough to keep all slots mostly busy."""
_SLOTS_SHIFT: Final = 32
"""Number of low bits of a seed for the prompt length; the concurrency is above them, so all seeds differ."""
_CURVE_POINTS: Final = 60
BIC_STRONG: Final = 6.0
"""Reduction of the criterion (see the module) that justifies a fit with more parameters."""

Length = Annotated[int, Meta(ge=SHORT, le=1 << 24)]


class LengthThroughput(msgspec.Struct, frozen=True):
    """Rates from the first request to the last response, for complete responses only."""

    concurrency: int
    """Number of concurrent requests."""
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float


class LengthFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one context length."""

    length: int
    """Planned number of input tokens."""
    context: float
    """Mean number of input tokens, as the server counts."""
    requests: int
    ttft: figures.LatencyRow
    ttft_mean: figures.IntervalFigure
    e2e: figures.LatencyRow
    seconds_per_1000_tokens: float
    """Mean TTFT per 1,000 input tokens."""
    throughput: list[LengthThroughput]
    """Rates at each concurrency."""
    throughput_max: LengthThroughput
    """The entry of `throughput` with the most requests per second."""
    throughput_saturated: bool
    """Whether the throughput no longer grew at the highest concurrency."""


class LongContextMeasurements(msgspec.Struct, frozen=True, kw_only=True):
    """Public JSON of the test's figures."""

    lengths: list[LengthFigures]
    scaling_exponent: figures.IntervalFigure | None
    """Power of the prompt length with which TTFT grows."""
    best_fit: str | None
    """Name of the function that fits TTFT best."""
    fits: dict[str, dict[str, object]]
    """By name of a fit: its coefficients, R^2 and BIC."""


class LongContextParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Setup of the test (IETF 5.9.2)."""

    workload: Annotated[
        str,
        opt("workload: long-context (document and question), or FILE.toml with texts of your own"),
    ] = "long-context"
    lengths: Annotated[
        tuple[Length, ...],
        opt("input lengths in tokens; the first that the SUT refuses ends the test", min_length=1),
    ] = LENGTHS
    output_tokens: Annotated[int, opt("tokens of each response", ge=1)] = 256
    requests: Annotated[int, opt("requests per length; the draft demands 20", ge=1)] = 20
    concurrency: Annotated[int, opt("concurrent requests, 1 to 4", ge=1, le=4)] = 1
    throughput_concurrency: Annotated[
        Count | None,
        opt(
            "highest concurrency of the search for the maximum throughput at each length, which"
            " doubles the concurrency until the throughput no longer grows; none: no search"
        ),
    ] = 64


def check(session: BenchSession, params: LongContextParams) -> None:
    """Raise ConfigError unless the lengths differ and the workload can make prompts of any length."""
    twice = [length for length in params.lengths if params.lengths.count(length) > 1]
    if twice:
        raise ConfigError("lengths", f"has the length {twice[0]} more than once", "list each length once")
    plan = _load(session, params, min(params.lengths), slots=1, requests=1).plan
    if plan.requests.after:
        problem = f"{params.workload} has conversations; the test needs single prompts"
        raise ConfigError("workload", problem, "use another workload, such as long-context")
    if plan.prompts is None or plan.prompts.prompt(0).ids:
        raise ConfigError(
            "workload",
            f"{params.workload} has prompts of fixed token ids, whose length cannot be changed",
            "expected long-context, or FILE.toml with words or a text",
        )


async def run(session: BenchSession, params: LongContextParams) -> TestResult:
    """Send prompts of rising length until one gets no answer; return TTFT by length (IETF 5.9.3, 5.9.4)."""
    result = TestResult()
    short = _load(session, params, SHORT, slots=SHORT_REQUESTS, requests=SHORT_REQUESTS, output=SHORT_OUTPUT)
    by_length: list[LengthFigures] = []
    points: list[tuple[float, float]] = []
    lengths = sorted(params.lengths)
    for i, length in enumerate(lengths):
        session.report_remaining(f"{len(lengths) - i} of {len(lengths)} lengths")
        load = _load(session, params, length, slots=params.concurrency, requests=params.requests)
        measured = await session.measure(f"{length}-tokens", load, warm_by=short)
        if not measured.values("ttft_ns"):
            result.notes.append(_refusal_text(length, measured))
            break
        throughput, is_saturated = await _search_throughput(session, params, length, measured, warm_by=short)
        by_length.append(_length_results(length, measured, throughput, is_saturated=is_saturated))
        result.main = measured.name
        points += [(by_length[-1].context, ttft) for ttft in measured.values("ttft_ns")]
        result.configuration = figures.load_lines(load, measured)
        if len(measured.successful_rows()) < measured.n:
            failed = measured.n - len(measured.successful_rows())
            result.notes.append(f"{length} tokens: {failed} of {measured.n} answers did not come whole")
    result.configuration |= {
        "Context lengths": ", ".join(f"{one.length:,}" for one in by_length) or "none was served",
        "Output length": f"{params.output_tokens} tokens",
        "Workload": f"{params.workload}, seed {session.seed} + 2 x length",
        "Request count": f"{params.requests} for each length",
        "Test duration": ", ".join(f"{step.seconds:.1f}" for step in session.steps) + " s by load",
        "Warm-up": f"requests of {SHORT} tokens (5.9.3 step 1)",
    }
    fits = _fits(by_length, points)
    exponent = _scaling_exponent(fits, len(by_length))
    result.measurements = LongContextMeasurements(
        lengths=by_length,
        scaling_exponent=exponent,
        best_fit=fits[0].name.lower() if fits else None,
        fits={one.name.lower(): {**one.coefficients, "r2": one.r2, "bic": one.bic} for one in fits},
    )
    result.tables = _tables(by_length, fits)
    result.charts = _charts(by_length, fits)
    _add_notes(result, by_length, fits, exponent)
    return result


def _slots_of_search(params: LongContextParams) -> list[int]:
    """Return the concurrencies above `params.concurrency` that the search for the throughput can try."""
    slots, slots_max, tried = params.concurrency, params.throughput_concurrency or 0, []
    while slots < slots_max:
        slots = min(2 * slots, slots_max)
        tried.append(slots)
    return tried


async def _search_throughput(
    session: BenchSession, params: LongContextParams, length: int, first: Measurement, *, warm_by: Load
) -> tuple[list[LengthThroughput], bool]:
    """Double the concurrency until the throughput no longer grows (IETF 5.9.4).

    `first`: measurement at `params.concurrency`. Returns the throughput of each concurrency, beginning with
    `first`, and whether it no longer grew at the highest one.
    """
    throughput = [_throughput(first, params.concurrency)]
    for slots in _slots_of_search(params):
        requests = max(params.requests, _REQUESTS_PER_SLOT * slots)
        load = _load(session, params, length, slots=slots, requests=requests)
        measured = await session.measure(f"{length}-tokens-{slots}-at-a-time", load, warm_by=warm_by)
        best = max(one.requests_per_s for one in throughput)
        throughput.append(_throughput(measured, slots))
        if throughput[-1].requests_per_s < best * (1 + GAIN_MIN):
            return throughput, True
    return throughput, False


def _load(
    session: BenchSession,
    params: LongContextParams,
    length: int,
    *,
    slots: int,
    requests: int,
    output: int | None = None,
) -> Load:
    """Return a load of requests of one length. Its texts differ from those of all other loads."""
    load = make_load(
        params.workload,
        slots=slots,
        # Loads of one length get different texts, so that no prompt is in a prefix cache.
        seed=session.seed + 2 * length + (slots << _SLOTS_SHIFT if slots > params.concurrency else 0),
        requests=requests,
        output_tokens=output or params.output_tokens,
        counting=session.target.counting,
    )
    for row in range(requests):
        load.plan.requests.input[row] = length
    load.plan.about = {**load.plan.about, "input_tokens": length}
    load.about["input_tokens"] = length
    return load


def _length_results(
    length: int, measured: Measurement, throughput: list[LengthThroughput], *, is_saturated: bool
) -> LengthFigures:
    ttft = measured.values("ttft_ns")
    context = mean(measured.values("input_tokens")) or float(length)
    interval = mean_interval(ttft)
    average = mean(ttft)
    assert average is not None
    (per_thousand,) = saturation.per_thousand_tokens([context], [average])
    mean_figure = figures.IntervalFigure(value=average, low=None, high=None, n=len(ttft))
    return LengthFigures(
        length=length,
        context=context,
        requests=measured.n,
        ttft=figures.latency_row(ttft, _SHARES),
        ttft_mean=mean_figure if interval is None else figures.interval_figure(interval),
        e2e=figures.latency_row(measured.values("e2e_ns"), _SHARES),
        seconds_per_1000_tokens=per_thousand,
        throughput=throughput,
        throughput_max=max(throughput, key=lambda one: one.requests_per_s),
        throughput_saturated=is_saturated,
    )


def _throughput(measured: Measurement, slots: int) -> LengthThroughput:
    seconds = measured.seconds
    return LengthThroughput(
        slots,
        len(measured.successful_rows()) / seconds,
        sum(measured.values("input_tokens")) / seconds,
        sum(measured.values("output_tokens")) / seconds,
    )


def _refusal_text(length: int, measured: Measurement) -> str:
    outcomes = measured.result.get("outcomes") or {}
    counts = ", ".join(f"{name}: {n}" for name, n in outcomes.items() if n)
    errors = measured.result.get("errors") or {}
    reason = f"; {next(iter(errors))}" if errors else ""
    return f"no answer at {length:,} tokens ({counts}{reason}): longer contexts were not tried"


@dataclass(frozen=True, slots=True)
class _Fit:
    """TTFT as a function of the prompt length, fitted to the measurements."""

    name: str
    formula: str
    """Formula for reports."""
    parameters: int
    """Number of parameters."""
    r2: float
    """R^2 of the fit to the mean TTFT in seconds, also if the fit was made with logarithms."""
    bic: float
    """Criterion by which fits are compared (see the module); lower is better."""
    predict: Callable[[float], float]
    """Function that returns the TTFT in seconds for a prompt length."""
    model: saturation.PowerFit | saturation.LinearFit | saturation.QuadraticFit

    @property
    def coefficients(self) -> dict[str, object]:
        return asdict(self.model)


def _fits(by_length: Sequence[LengthFigures], points: Sequence[tuple[float, float]]) -> list[_Fit]:
    """Return the fits, the best one first."""
    xs = [one.context for one in by_length]
    ys = [one.ttft_mean.value or 0.0 for one in by_length]
    if len(set(xs)) < 2:
        return []  # A fit needs two lengths, but some servers count equally many tokens for all prompts.
    n, fits = len(points), []

    def add(name: str, formula: str, parameters: int, predict: Callable[[float], float], model: Any) -> None:
        # Assume an error of at least 1 ns for each point: the logarithm of a perfect fit would be undefined.
        rss = max(sum((y - predict(x)) ** 2 for x, y in points), n * 1e-18)
        bic = n * log(rss / n) + parameters * log(n)
        r2 = saturation.r_squared(ys, [predict(x) for x in xs])
        fits.append(_Fit(name, formula, parameters, r2, bic, predict, model))

    power, line = saturation.fit_power(xs, ys), saturation.fit_linear(xs, ys)
    add("Power", f"{power.a * 1e6:.4g} us x L^{power.k:.3f}", 2, lambda x: power.a * x**power.k, power)
    formula = f"{line.intercept * 1e3:.4g} ms + {line.slope * 1e6:.4g} us x L"
    add("Linear", formula, 2, lambda x: line.intercept + line.slope * x, line)
    if len(set(xs)) > 2:
        curve = saturation.fit_quadratic(xs, ys)
        formula = f"{curve.c0 * 1e3:.4g} ms + {curve.c1 * 1e6:.4g} us x L + {curve.c2 * 1e9:.4g} ns x L^2"
        add(
            "Quadratic",
            formula,
            3,
            lambda x: curve.c0 + curve.c1 * x + curve.c2 * x * x,
            curve,
        )
    lowest = min(one.bic for one in fits)
    return sorted(fits, key=lambda one: (one.bic > lowest + BIC_STRONG, one.parameters, one.bic))


def _scaling_exponent(fits: Sequence[_Fit], lengths: int) -> figures.IntervalFigure | None:
    power = next((one.model for one in fits if isinstance(one.model, saturation.PowerFit)), None)
    if power is None:
        return None
    low, high = power.k_interval or (None, None)
    return figures.IntervalFigure(value=power.k, low=low, high=high, n=lengths, r2_log=power.r2_log)


def _best_fit_text(fits: Sequence[_Fit]) -> str:
    """Format as in IETF 5.9.5: `Best fit: Linear (R^2 = 0.9987), ~68 microseconds per input token`."""
    best = fits[0]
    text = f"Best fit: {best.name} (R^2 = {best.r2:.4f})"
    if isinstance(best.model, saturation.LinearFit):
        return f"{text}, ~{best.model.slope * 1e6:.3g} microseconds per input token"
    return f"{text}, TTFT = {best.formula}"


def _maximum_cell(name: str, form: str) -> figures.Cell:
    return lambda one: format(getattr(one.throughput_max, name), form)


TABLE_12: Final[Mapping[str, figures.Cell]] = {
    "Context (tokens)": figures.attribute_cell("length"),
    "TTFT Mean": lambda one: figures.ms_with_interval(one.ttft_mean),
    **figures.latency_columns("ttft p95"),
    "ms/1K tokens": lambda one: figures.ms(one.seconds_per_1000_tokens, unit=False),
}
THROUGHPUT_COLUMNS: Final[Mapping[str, figures.Cell]] = {
    "Context (tokens)": figures.attribute_cell("length"),
    "Requests": figures.attribute_cell("requests"),
    **figures.latency_columns("ttft p50"),
    "E2E Mean": lambda one: figures.ms_of(one.e2e, "mean"),
    "Requests/s": _maximum_cell("requests_per_s", ".3g"),
    "Input tok/s": _maximum_cell("input_tokens_per_s", ".0f"),
    "Output tok/s": _maximum_cell("output_tokens_per_s", ".0f"),
    "At a time": _maximum_cell("concurrency", ""),
    "More": lambda one: "no gain" if one.throughput_saturated else "not tried",
}
FIT_COLUMNS: Final[Mapping[str, figures.Cell]] = {
    "Fit": lambda fit: fit.name,
    "TTFT": lambda fit: fit.formula,
    "R^2": lambda fit: f"{fit.r2:.4f}",
    "BIC": lambda fit: f"{fit.bic:.1f}",
}


def _tables(by_length: Sequence[LengthFigures], fits: Sequence[_Fit]) -> list[ReportTable]:
    tables = [
        figures.table_of("Table 12: Long Context Scaling", by_length, TABLE_12),
        figures.table_of("Latency and throughput at each length (5.9.4)", by_length, THROUGHPUT_COLUMNS),
    ]
    if fits:
        tables.append(figures.table_of("Scaling of mean TTFT with context length L", fits, FIT_COLUMNS))
    return tables


def _charts(by_length: Sequence[LengthFigures], fits: Sequence[_Fit]) -> list[ChartSpec]:
    if not by_length:
        return []
    contexts: list[float | str] = [one.context for one in by_length]
    series = [figures.line_series("mean TTFT", contexts, [one.ttft_mean for one in by_length])]
    series += [_fit_curve(one, float(contexts[0]), float(contexts[-1])) for one in fits]
    rates: list[float | None] = [one.throughput_max.input_tokens_per_s for one in by_length]
    x_title = "context (tokens)"
    return [
        ChartSpec(
            "TTFT against context length", "line", x_title, "TTFT (ms)", series, log_x=True, log_y=True
        ),
        ChartSpec(
            "Throughput against context length",
            "line",
            x_title,
            "input tokens/s",
            [ChartSeries("highest", contexts, rates)],
            log_x=True,
        ),
    ]


def _fit_curve(fit: _Fit, first: float, last: float) -> ChartSeries:
    """Return points of a fit, evenly spaced on a logarithmic axis; a TTFT below 0 is None."""
    steps = _CURVE_POINTS - 1
    xs = [first * exp(log(last / first) * i / steps) for i in range(_CURVE_POINTS)]
    ys = [fit.predict(x) * 1e3 for x in xs]
    return ChartSeries(f"{fit.name}: {fit.formula}", list(xs), [y if y > 0 else None for y in ys])


def _add_notes(
    result: TestResult,
    by_length: Sequence[LengthFigures],
    fits: Sequence[_Fit],
    exponent: figures.IntervalFigure | None,
) -> None:
    notes = result.notes
    if exponent is not None:
        notes.insert(0, _best_fit_text(fits))
        within = figures.with_interval(exponent, ".3f")
        notes.insert(1, f"scaling exponent k = {within}, R^2 of the logarithms {exponent.r2_log:.4f}")
        notes.append(
            "fits are of the mean at each length; best is the one of fewest parameters whose BIC over all"
            f" requests is within {BIC_STRONG:g} of the lowest"
        )
    counts = [f"{one.length:,}: {one.context:,.0f}" for one in by_length if round(one.context) != one.length]
    if counts:
        notes.append(f"tokens as the server counted them, on average: {'; '.join(counts)}")
    if not fits and len(by_length) > 1:
        notes.append("no fit: the server counted the same number of tokens for the prompts of each length")
    notes += figures.legend(by_length, "ttft")
    notes.append(
        "maximum throughput: of closed loops whose concurrency is doubled until the rate of responses grows"
        f" by less than {GAIN_MIN:.0%}"
    )
    unsaturated = [f"{one.length:,}" for one in by_length if not one.throughput_saturated]
    if unsaturated:
        result.deviations.append(
            f"5.9.4: the throughput at {', '.join(unsaturated)} tokens still grew at the highest concurrency,"
            " or was not searched: it is a bound from below"
        )
    few = [f"{one.length:,}" for one in by_length if one.ttft.n < 20]
    if few:
        result.deviations.append(f"5.9.2: fewer than 20 answers at {', '.join(few)} tokens")


def _expected_loads(session: BenchSession, params: LongContextParams) -> ExpectedLoads:
    loads = [ExpectedLoad(params.requests, slots=params.concurrency)]
    saturation_slots = session.pace.saturation_slots(session.kind)
    if (slots_max := params.throughput_concurrency or 0) > params.concurrency:
        slots_of_search = doublings(params.concurrency, slots_max, saturation_slots)[1:]
        loads += [
            ExpectedLoad(max(params.requests, _REQUESTS_PER_SLOT * slots), slots=slots)
            for slots in slots_of_search
        ]
    return ExpectedLoads(loads * len(params.lengths))


TEST: Final = BenchTest(
    name="long-context",
    params=LongContextParams,
    run=run,
    expected=_expected_loads,
    figures=("ttft", "tokens"),
    quick={
        "lengths": (1_024, 2_048, 4_096, 8_192),
        "requests": 5,
        "output_tokens": 16,
        "throughput_concurrency": None,
    },
    forfeits=("5.9.2-p1", "5.9.2-p3"),
    check=check,
)
