"""Compare results folders of several systems, or of one system with itself, by section 6 of the IETF draft.

Input: results folders of `llmtap bench`. Output: public JSON (`compare_results`) for `llmtap report
--compare` and `llmtap bench --against`, with tables and charts, which `llmtap/report/bench.py` renders.

The samples are runs, at least three of each system (6.3), because requests of one run share the state of the
machine. With fewer runs, the samples are the requests of the first run of each system. Figures of loads whose
requests or times differ between the systems are not tested. p-values of a test's main figures are corrected
by Holm's method, and their intervals are simultaneous 95 % intervals (Bonferroni). p-values of other figures
are corrected by Benjamini and Hochberg's method, and each has a 95 % interval of its own.

Source: IETF draft, 6.1 to 6.4.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec

from llmtap.bench.compliance.judge import RUNS_MIN, judge_comparison, request_sequence_text
from llmtap.bench.report.comparison import (
    ALPHA,
    LEVEL,
    BurstySystem,
    ComparedSystem,
    FigureComparison,
    LeftOutTest,
    NormalisedThroughput,
    ResultsComparison,
    ResultsFolder,
    TestComparison,
)
from llmtap.bench.report.report import is_results_folder
from llmtap.bench.run.figures import Cell, cdf_series, ms, table_of
from llmtap.bench.run.measurement import Measurement
from llmtap.bench.run.session import RESULT, Folder
from llmtap.bench.run.test import TESTS, ChartSpec, ReportTable
from llmtap.errors import ConfigError
from llmtap.metrics.comparison import Comparison, adjusted_p_values, compare_quantile, compare_runs
from llmtap.metrics.latency import BURST_SENSITIVE, arrives_in_bursts, chunks_at_a_time
from llmtap.metrics.statistics import is_enough, percentile
from llmtap.report.values import MARK

_AtLevel = Callable[..., Comparison | None]
"""Function that compares one figure again; its argument `level` is the interval's confidence level."""
_GAPS: Final = "gaps"
_FIGURES: Final = {
    "TTFT P50": ("ttft_ns", 0.5),
    "TTFT P99": ("ttft_ns", 0.99),
    "TPOT P50": ("tpot_ns", 0.5),
    "TPOT P99": ("tpot_ns", 0.99),
    "TBC P50": (_GAPS, 0.5),
    "TBC P99": (_GAPS, 0.99),
    "E2E P50": ("e2e_ns", 0.5),
    "E2E P99": ("e2e_ns", 0.99),
}
"""By name of a figure that every load has: its column in the table of requests, or `_GAPS`; its quantile."""
_RATE: Final = "output rate, mean of runs"
_TTFT: Final = ("TTFT P50", "TTFT P99")
_KEYS: Final[Mapping[str, Sequence[str]]] = {
    "ttft": _TTFT,
    "itl": ("TBC P50", "TBC P99", "TPOT P50"),
    "tradeoff": (*_TTFT, "TPOT P50"),
    "fairness": _TTFT,
    "prefix-cache": _TTFT,
    "memory-pressure": _TTFT,
    "long-context": _TTFT,
    "guardrail-overhead": ("TTFT P50", "E2E P50"),
}
"""Main figures of each test, compared in each of its loads. Tests that search have `_HEADLINES` instead."""
_HEADLINES: Final[Mapping[str, Sequence[tuple[str, str, str]]]] = {
    "throughput": (
        ("max_output_tps", "maximum output rate", "tok/s"),
        ("max_request_rps", "maximum request rate", "requests/s"),
    ),
    "tradeoff": (
        ("knee_rps", "knee", "requests/s"),
        ("peak_rps", "peak", "requests/s"),
        ("operating_point_rps", "operating point", "requests/s"),
    ),
    "capacity": (("max_concurrency", "maximum concurrency", "requests"),),
}
"""By test: main figures of the whole test (name in its measurements, title, unit). Higher is better."""

DISTRIBUTIONS_MAX: Final = 6
_ABSENT: Final = "-"
_FAMILIES: Final = {
    True: "what the test is about, p by Holm, intervals of 95 % for all of them together",
    False: "other figures, p by Benjamini-Hochberg, each interval of 95 % by itself",
}


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """Report and measurements of one run of a test."""

    report: Mapping[str, Any]
    steps: Mapping[str, Measurement]
    """By name of a load: its measurement."""


@dataclass(frozen=True, slots=True)
class System:
    """Runs of one test on one system."""

    label: str
    runs: Sequence[ComparedRun]


def compare_results(base: Path, others: Sequence[Path]) -> ResultsComparison:
    """Compare each of `others` with `base`; all are results folders of `llmtap bench`.

    Raises ConfigError if a folder is no results folder, is given twice or lacks data, or if the folders have
    no test in common.
    """
    places = [base, *others]
    for i, place in enumerate(places):
        if not is_results_folder(place):
            hint = "compare results of llmtap bench or of llmtap replay; for a capture, use --by arm"
            raise ConfigError("--compare", f"{place} is not a results folder of llmtap bench", hint)
        if place.resolve() in [other.resolve() for other in places[:i]]:
            raise ConfigError("--compare", f"{place} is given twice", "give each folder once")
    names = [place.resolve().name for place in places]
    labels = names if len(set(names)) == len(names) else [str(place) for place in places]
    folders = dict(zip(labels, map(Folder, places), strict=True))
    tests_by_label = {
        label: [test for test in TESTS if folder.subfolder(test).runs()] for label, folder in folders.items()
    }
    labels_by_test = {
        test: [label for label, tests in tests_by_label.items() if test in tests]
        for test in TESTS
        if any(test in tests for tests in tests_by_label.values())
    }
    shared = [test for test, labels_with_test in labels_by_test.items() if labels_with_test == labels]
    if not shared:
        tests_text = "; ".join(
            f"{label} has {', '.join(tests) or 'none'}" for label, tests in tests_by_label.items()
        )
        raise ConfigError(
            "--compare",
            f"the results have no test in common: {tests_text}",
            "compare results of the same tests",
        )
    return ResultsComparison(
        [ResultsFolder(label, str(folder.path), tests_by_label[label]) for label, folder in folders.items()],
        [
            compare(*(_read_system(label, folder.subfolder(test)) for label, folder in folders.items()))
            for test in shared
        ],
        [LeftOutTest(test, only) for test, only in labels_by_test.items() if test not in shared],
    )


def _read_system(label: str, folder: Folder) -> System:
    """Read a system's runs of a test. Raises ConfigError if the folder lacks data of a reported load."""
    runs = []
    for run_folder in map(folder.run, folder.runs()):
        report, steps = run_folder.read_json(RESULT), {}
        for step in report["steps"]:
            step_path = run_folder.step(step["name"]).path
            try:
                steps[step["name"]] = Measurement.load(step_path, step["name"], step["arm"], step["result"])
            except FileNotFoundError:
                hint = "run the same llmtap bench command again: it continues the unfinished tests"
                raise ConfigError(str(step_path), "has no requests.parquet", hint) from None
        runs.append(ComparedRun(report, steps))
    return System(label, runs)


def compare(base: System, *others: System) -> TestComparison:
    """Compare each of `others` with `base` in one test."""
    systems, exclusions = _with_common_seeds([base, *others])
    base, *rest = systems
    shared = _shared_loads(systems)
    unlike: list[str] = []
    figures: list[tuple[FigureComparison, _AtLevel]] = []
    cautions: list[BurstySystem] = []
    for other in rest:
        bursty = list(_bursty_systems(base, other, shared))
        cautions += bursty
        bursty_steps = {step for caution in bursty for step in caution.steps}
        param_differences = _different_params(base, other)
        loads = (
            {}
            if param_differences
            else {
                step: difference
                for step in shared
                if (difference := _load_difference_text(base, other, step))
            }
        )
        unlike += param_differences + [f"{step}: {difference}" for step, difference in loads.items()]
        for row, at_level in _comparisons(base, other, shared):
            flattered = row.step in bursty_steps and row.figure.split()[0].lower() in BURST_SENSITIVE
            if param_differences or row.step in loads or flattered:
                row.discard_result()
            figures.append((row, at_level))
    _judge_figures(figures)
    rows = [row for row, _ in figures]
    compared = [_compared_system(system) for system in systems]
    normalised = [_normalised_throughput(system) for system in systems]
    evidence = msgspec.to_builtins({"systems": compared, "comparisons": rows, "normalised": normalised})
    reports = [run.report for system in systems for run in system.runs]
    report = base.runs[0].report
    return TestComparison(
        test=report["test"],
        section=report["section"],
        title=report["title"],
        unlike=unlike,
        invalid=list(_invalid_run_notes(systems)),
        cautions=cautions,
        systems=compared,
        comparisons=rows,
        normalised=normalised,
        checklist=judge_comparison(reports, evidence).to_dict(),
        notes=[*exclusions, *_run_notes(systems), *_load_notes(systems, shared), *_figure_notes(rows)],
        tables=list(_tables(base.label, rows)),
        charts=list(_distribution_charts(report["test"], systems, shared)),
    )


def _with_common_seeds(systems: Sequence[System]) -> tuple[list[System], list[str]]:
    """Return the systems, reduced to runs whose seed all systems have (IETF 6.1), and notes on other runs.

    If fewer than three seeds are common to all systems, return all runs, without notes.
    """
    shared = set.intersection(*({run.report["seed"] for run in system.runs} for system in systems))
    if len(shared) < RUNS_MIN:
        return list(systems), []
    chosen, notes = [], []
    for system in systems:
        chosen.append(System(system.label, [run for run in system.runs if run.report["seed"] in shared]))
        left_out_runs = [str(run.report["run"]) for run in system.runs if run.report["seed"] not in shared]
        if left_out_runs:
            notes.append(
                "left out, since their requests were not sent to all systems (6.1): run"
                f" {', '.join(left_out_runs)} of {system.label}"
            )
    return chosen, notes


def _shared_loads(systems: Sequence[System]) -> list[str]:
    runs = [run for system in systems for run in system.runs]
    return [name for name in runs[0].steps if all(name in run.steps for run in runs)]


def _different_params(base: System, other: System) -> list[str]:
    """Return the parameters that differ, as texts such as `rate 4 of a, 8 of b`."""
    ours, theirs = (one.runs[0].report["params"] for one in (base, other))
    return [
        f"{name} {_param_text(ours[name])} of {base.label}, {_param_text(theirs[name])} of {other.label}"
        for name in ours
        if ours[name] != theirs[name]
    ]


def _load_difference_text(base: System, other: System, step: str) -> str | None:
    """Return a text if the requests of a load or their times differ between two systems, else None."""
    runs = None if min(len(base.runs), len(other.runs)) >= RUNS_MIN else 1
    ours, theirs = (
        {
            _load_identity(one)
            for run in system.runs[:runs]
            for one in run.report["steps"]
            if one["name"] == step
        }
        for system in (base, other)
    )
    if ours == theirs:
        return None
    first, second = (min(one - others, default="no more") for one, others in ((ours, theirs), (theirs, ours)))
    return f"{first} of {base.label}, {second} of {other.label}"


def _bursty_systems(base: System, other: System, shared: Sequence[str]) -> Iterator[BurstySystem]:
    """Yield each system whose chunks come in larger bursts than the other's, with the loads concerned."""
    for system, reference in ((base, other), (other, base)):
        numbers = {
            step: (_chunks_at_a_time(system, step), _chunks_at_a_time(reference, step)) for step in shared
        }
        steps = [step for step, (n, usual) in numbers.items() if arrives_in_bursts(n, usual)]
        if steps:
            most = max(numbers[step][0] or 0 for step in steps)
            yield BurstySystem(system.label, reference.label, steps, BURST_SENSITIVE, most)


def _chunks_at_a_time(system: System, step: str) -> float | None:
    """Return the median number of chunks that arrived together; None: unknown."""
    numbers = [chunks_at_a_time(run.steps[step].result.get("chunking") or {}) for run in system.runs]
    known = [n for n in numbers if n is not None]
    return median(known) if known else None


def _load_identity(step: Mapping[str, Any]) -> str:
    """Return a text that is equal for loads that can be compared."""
    closed = (step.get("load") or {}).get("closed")
    return request_sequence_text(step) + (f", {closed} at a time" if closed else "")


def _param_text(value: Any) -> str:
    return "none" if value is None else str(value)


def _compared_system(system: System) -> ComparedSystem:
    first = system.runs[0].report
    return ComparedSystem(
        system.label,
        len(system.runs),
        first["sut"],
        first["target"],
        any(run.report["quick"] for run in system.runs),
        [run.report["seed"] for run in system.runs],
        all((run.report.get("verdict") or {}).get("valid", True) for run in system.runs),
    )


def _comparisons(
    base: System, other: System, shared: Sequence[str]
) -> Iterator[tuple[FigureComparison, _AtLevel]]:
    """Yield the comparison of each figure, and a function that repeats it at another confidence level."""
    test = base.runs[0].report["test"]
    for name, label, unit in _HEADLINES.get(test, ()):
        a, b = ([run.report["measurements"].get(name) for run in one.runs] for one in (base, other))
        if None not in a and None not in b:
            at_any_level = partial(_compare_runs, a, b)
            row = _make_row(base, other, None, label, unit, at_any_level())
            if row.p is None:
                row.a, row.b = median(a), median(b)
            yield row, at_any_level
    for step in shared:
        for label, (column, share) in _FIGURES.items():
            a, b = ([_column_values(run.steps[step], column) for run in one.runs] for one in (base, other))
            if not all((*a, *b)):
                continue
            at_level: _AtLevel
            if min(len(a), len(b)) >= RUNS_MIN:
                at_level = partial(_compare_runs, *([percentile(v, share) for v in runs] for runs in (a, b)))
            elif column == _GAPS:
                continue  # Do not compare gaps of few runs: gaps of one request are not independent samples.
            else:
                at_level = partial(compare_quantile, a[0], b[0], share, paired=False)
            result = at_level()
            if result is not None:
                doubtful = not all(is_enough(len(values), share) for values in (*a, *b))
                yield _make_row(base, other, step, label, "s", result, doubtful=doubtful), at_level
        rates = [[_output_tps(run.steps[step]) for run in one.runs] for one in (base, other)]
        at_level = partial(_compare_runs, *rates)
        rate = at_level()
        if rate is not None and any(map(any, rates)):
            yield _make_row(base, other, step, _RATE, "tok/s", rate), at_level


def _column_values(step: Measurement, column: str) -> list[float]:
    return sorted(step.gaps()) if column == _GAPS else step.values(column)


def _compare_runs(
    a: Sequence[float | None], b: Sequence[float | None], *, level: float = LEVEL
) -> Comparison | None:
    known = ([x for x in runs if x is not None] for runs in (a, b))
    return compare_runs(*known, level=level)


def _make_row(
    base: System,
    other: System,
    step: str | None,
    label: str,
    unit: str,
    result: Comparison | None,
    *,
    doubtful: bool = False,
) -> FigureComparison:
    """Return the comparison of one figure between two systems. `result`: outcome of its statistical test."""
    test = base.runs[0].report["test"]
    tested: Any = {} if result is None else result.to_dict()
    return FigureComparison(
        a_system=base.label,
        b_system=other.label,
        step=step,
        figure=label,
        unit=unit,
        better="lower" if unit == "s" else "higher",
        key=step is None or label in _KEYS.get(test, ()),
        samples="runs" if min(len(base.runs), len(other.runs)) >= RUNS_MIN else "requests",
        doubtful=doubtful,
        **tested,
    )


def _judge_figures(figures: Sequence[tuple[FigureComparison, _AtLevel]]) -> None:
    """Correct the figures' p-values, widen the intervals of main figures, and set `share` and `finding`."""
    for key in (True, False):
        family = [(row, row.p, at_level) for row, at_level in figures if row.key is key]
        tested = [(row, p, at_level) for row, p, at_level in family if p is not None]
        corrected = adjusted_p_values([p for _, p, _ in tested], "holm" if key else "bh")
        for (row, _, at_level), p_adjusted in zip(tested, corrected, strict=True):
            row.p_adjusted = p_adjusted
            if key and (wider := at_level(level=1 - ALPHA / len(tested))) is not None:
                row.level, row.low, row.high = 1 - ALPHA / len(tested), wider.low, wider.high
    for row, _ in figures:
        p, difference = row.p_adjusted, row.difference
        row.share = difference / row.a if difference is not None and row.a else None
        if p is None:
            row.finding = "not tested"
        elif p >= ALPHA or not difference:
            row.finding = "no difference shown"
        else:
            row.finding = "better" if (difference < 0) == (row.better == "lower") else "worse"


def _normalised_throughput(system: System) -> NormalisedThroughput:
    hardware = system.runs[0].report["sut"].get("hardware") or {}
    rates = [max(map(_output_tps, run.steps.values()), default=0.0) for run in system.runs]
    tps = median(rates)
    count, price = hardware.get("count"), hardware.get("price_per_hour")
    return NormalisedThroughput(
        system.label,
        tps,
        tps / count if count else None,
        tps * 3_600 / price if price else None,
        hardware.get("currency") if price else None,
    )


def _output_tps(step: Measurement) -> float:
    """Return the tokens of responses that ended well / seconds from the load's start to the last response."""
    tokens: Sequence[int] = step.successful_rows().column("output_tokens").drop_null().to_pylist()
    return sum(tokens) / step.seconds if step.seconds else 0.0


def _invalid_run_notes(systems: Sequence[System]) -> Iterator[str]:
    for system in systems:
        invalid_runs = [
            (number, findings[0]["says"])
            for number, run in enumerate(system.runs, 1)
            if (findings := (run.report.get("verdict") or {}).get("findings"))
        ]
        if invalid_runs:
            numbers = ", ".join(str(number) for number, _ in invalid_runs)
            reason = invalid_runs[0][1]
            yield f"{system.label}: not valid are its runs {numbers} of {len(system.runs)}: {reason}"


def _run_notes(systems: Sequence[System]) -> Iterator[str]:
    for system in systems:
        if len(system.runs) < RUNS_MIN:
            yield (
                f"{system.label} has {len(system.runs)} of the {RUNS_MIN} independent runs of a claim (6.3,"
                " --runs): instead of runs, requests of first runs are compared with it, and how much runs"
                " differ is in no interval"
            )


def _load_notes(systems: Sequence[System], shared: Sequence[str]) -> Iterator[str]:
    for system in systems:
        extra = {name for run in system.runs for name in run.steps} - set(shared)
        if extra:
            loads_text = ", ".join(sorted(extra))
            yield f"left out, since not every run of all systems has them: {loads_text} of {system.label}"
        for name in shared:
            loads = [run.steps[name] for run in system.runs]
            sent, complete = sum(load.n for load in loads), sum(len(load.successful_rows()) for load in loads)
            if complete < sent:
                yield (
                    f"{system.label}, {name}: {complete:,} of {sent:,} requests ({complete / sent:.1%}) were"
                    " answered whole, and latencies are of these alone"
                )


def _figure_notes(rows: Sequence[FigureComparison]) -> Iterator[str]:
    if any(row.p is not None for row in rows):
        yield (
            f"a difference counts as one where p, corrected for how many are compared, is below {ALPHA:g};"
            " none shown does not mean none: it may be as large as its interval"
        )
    if any(row.doubtful for row in rows):
        yield "* rests on fewer samples than 5.1.4.3 asks for: 1,000 in a run for P99"


def _tables(base: str, all_rows: Sequence[FigureComparison]) -> Iterator[ReportTable]:
    for other in dict.fromkeys(row.b_system for row in all_rows):
        columns = {{"a": base, "b": other}.get(head, head): cell for head, cell in COLUMNS.items()}
        for key, family in _FAMILIES.items():
            rows = [row for row in all_rows if row.b_system == other and row.key is key]
            if rows:
                yield table_of(f"{other} against {base}: {family}", rows, columns)


def _interval_text(row: FigureComparison) -> str:
    if row.low is None:
        return _ABSENT
    return f"{_value_text(row.low, row.unit)} to {_value_text(row.high, row.unit)}"


def _difference_text(row: FigureComparison) -> str:
    share_text = "" if row.share is None else f" ({row.share:+.1%})"
    return _value_text(row.difference, row.unit) + share_text


def _p_value_text(row: FigureComparison) -> str:
    p = row.p_adjusted
    return _ABSENT if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"


def _value_text(value: float | None, unit: str) -> str:
    if value is None:
        return _ABSENT
    return ms(value) if unit == "s" else f"{value:,.4g} {unit}"


COLUMNS: Final[Mapping[str, Cell]] = {
    "Figure": lambda row: row.figure + f" {MARK}" * row.doubtful,
    "Load": lambda row: row.step or "all",
    "a": lambda row: _value_text(row.a, row.unit),
    "b": lambda row: _value_text(row.b, row.unit),
    "Difference": _difference_text,
    "Interval": _interval_text,
    "p": _p_value_text,
    "Finding": lambda row: row.finding,
}


def _distribution_charts(test: str, systems: Sequence[System], shared: Sequence[str]) -> Iterator[ChartSpec]:
    """Yield distribution charts of gaps (ITL test) or TTFT, for at most `DISTRIBUTIONS_MAX` of the loads."""
    gaps = test == "itl"
    metric, population = ("TBC", "gaps") if gaps else ("TTFT", "requests")
    for name in shared[:: ceil(len(shared) / DISTRIBUTIONS_MAX) or 1]:
        series = []
        for system in systems:
            steps = [run.steps[name] for run in system.runs]
            values = [v for step in steps for v in _column_values(step, _GAPS if gaps else "ttft_ns")]
            if values:
                label = f"{system.label} ({len(steps)} runs)" if len(steps) > 1 else system.label
                series.append(cdf_series(label, values))
        if series:
            yield ChartSpec(f"{metric}, {name}", "cdf", f"{metric} (ms)", f"share of {population}", series)
