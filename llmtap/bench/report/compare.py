"""Compare results folders of several systems, or of one system with itself, by section 6 of the IETF draft.

Input: folders of `llmtap bench`. Output: public JSON (`compare_results`) for `llmtap report --compare` and
`llmtap bench --against`; `compare_tables.py` adds tables and charts, `llmtap/report/bench.py` renders it.

The samples are runs, at least three of each system (6.3), since requests of one run share the state of the
machine. With fewer runs, the samples are the requests of the first runs. Figures of loads that differ are not
tested. p-values of a test's main figures are corrected by Holm's method, and their intervals are simultaneous
95 % intervals (Bonferroni). p-values of other figures are corrected by Benjamini and Hochberg's method, and
each has a 95 % interval of its own.

Source: IETF draft, 6.1 to 6.4.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec

from llmtap.bench.compliance.comparison import RUNS_MIN, sequence
from llmtap.bench.compliance.judge import judge_comparison
from llmtap.bench.report.compare_tables import charts_of, tables_of
from llmtap.bench.report.report import is_results
from llmtap.bench.run.measurement import Measurement
from llmtap.bench.run.session import RESULT, Folder
from llmtap.bench.run.test import TESTS
from llmtap.errors import ConfigError
from llmtap.metrics.comparison import Comparison, adjusted, compare_quantile, compare_runs
from llmtap.metrics.latency import FLATTERED, chunks_at_a_time, come_in_bursts
from llmtap.metrics.statistics import is_enough, percentile

ALPHA: Final = 0.05
LEVEL: Final = 1 - ALPHA
_AtLevel = Callable[..., Comparison | None]
"""Compare one figure; `level` is the level of its interval."""
_GAPS: Final = "gaps"
_FIGURES: Final = {
    "TTFT P50": ("ttft_ns", 0.5), "TTFT P99": ("ttft_ns", 0.99),
    "TPOT P50": ("tpot_ns", 0.5), "TPOT P99": ("tpot_ns", 0.99),
    "TBC P50": (_GAPS, 0.5), "TBC P99": (_GAPS, 0.99),
    "E2E P50": ("e2e_ns", 0.5), "E2E P99": ("e2e_ns", 0.99),
}  # fmt: skip
"""Figures of every load: name, column of its requests (or all gaps between chunks), and quantile."""
_RATE: Final = "output rate, mean of runs"
_TTFT: Final = ("TTFT P50", "TTFT P99")
_KEYS: Final[Mapping[str, Sequence[str]]] = {
    "ttft": _TTFT, "itl": ("TBC P50", "TBC P99", "TPOT P50"), "tradeoff": (*_TTFT, "TPOT P50"),
    "fairness": _TTFT, "prefix-cache": _TTFT, "memory-pressure": _TTFT, "long-context": _TTFT,
    "guardrail-overhead": ("TTFT P50", "E2E P50"),
}  # fmt: skip
"""Main figures of each test, in each of its loads. Searches have `_HEADLINES` instead."""
_HEADLINES: Final[Mapping[str, Sequence[tuple[str, str, str]]]] = {
    "throughput": (
        ("max_output_tps", "maximum output rate", "tok/s"),
        ("max_request_rps", "maximum request rate", "requests/s"),
    ),
    "tradeoff": (
        ("knee_rps", "knee", "requests/s"), ("peak_rps", "peak", "requests/s"),
        ("operating_point_rps", "operating point", "requests/s"),
    ),
    "capacity": (("max_concurrency", "maximum concurrency", "requests"),),
}  # fmt: skip
"""Figures of a whole test by their name in its measurements; higher is better."""


@dataclass(frozen=True, slots=True)
class ComparedRun:
    report: Mapping[str, Any]
    steps: Mapping[str, Measurement]


@dataclass(frozen=True, slots=True)
class System:
    label: str
    runs: Sequence[ComparedRun]


def compare_results(base: Path, others: Sequence[Path]) -> dict[str, Any]:
    """Compare results folders with the first, in every test that all have.

    Public JSON: `systems` (`label`, `results`, `tests`), `tests` (as `compare` returns each), `left_out`
    (`test`, `only`). Raises ConfigError: no results folder, named twice, broken, or no test in common.
    """
    places = [base, *others]
    for i, place in enumerate(places):
        if not is_results(place):
            raise ConfigError("--compare", f"{place} is not a results folder of llmtap bench")
        if place.resolve() in [other.resolve() for other in places[:i]]:
            raise ConfigError("--compare", f"{place} is named twice")
    names = [place.resolve().name for place in places]
    labels = names if len(set(names)) == len(names) else [str(place) for place in places]
    held = {
        label: [test for test in TESTS if (place / test / RESULT).is_file()]
        for label, place in zip(labels, places, strict=True)
    }
    known = [test for test in TESTS if any(test in tests for tests in held.values())]
    shared = [test for test in known if all(test in tests for tests in held.values())]
    if not shared:
        told = "; ".join(f"{label} has {', '.join(tests) or 'none'}" for label, tests in held.items())
        raise ConfigError("--compare", f"the results have no test in common: {told}")
    tests = []
    for test in shared:
        first, *rest = (read_system(label, at, test) for label, at in zip(labels, places, strict=True))
        tests.append(compare(first, rest))
    return {
        "systems": [
            {"label": label, "results": str(place), "tests": held[label]}
            for label, place in zip(labels, places, strict=True)
        ],
        "tests": tests,
        "left_out": [
            {"test": test, "only": [label for label in labels if test in held[label]]}
            for test in known
            if test not in shared
        ],
    }  # fmt: skip


def read_system(label: str, results: Path, test: str) -> System:
    """Read a system's runs of a test. Raises ConfigError if the folder lacks data of a reported load."""
    folder = Folder(results).within(test)
    return System(label, [_read_run(folder.run(number)) for number in folder.runs()])


def _read_run(folder: Folder) -> ComparedRun:
    report = folder.read_json(RESULT)
    steps = {}
    for step in report["steps"]:
        at = folder.path / "steps" / step["name"]
        try:
            steps[step["name"]] = Measurement.load(at, step["name"], step["arm"], step["result"])
        except FileNotFoundError:
            hint = "the command that measured it goes on"
            raise ConfigError(str(at), "lacks its requests.parquet", hint) from None
    return ComparedRun(report, steps)


def compare(base: System, others: Sequence[System]) -> dict[str, Any]:
    """Compare each of `others` with `base` in one test.

    Public JSON: `test`, `section`, `title`, `unlike` (how parameters or loads differ, which are not tested),
    `invalid` (invalid runs, and why), `systems`, `checklist` (6.4, as a compliance matrix), `cautions`
    (`system`, `against`, `steps`, `metrics`, `events_per_read`: a system whose chunks come in bursts; figures
    of these metrics are not tested), `comparisons` (a figure each: `a` of the base, `b`, the `difference`
    b - a with its interval and its `level`, `p`, `p_adjusted`, `finding`), `normalised` (6.2), `notes`,
    `tables`, `charts`. Times are in seconds.
    """
    systems, left_out = _in_common([base, *others])
    base, *others = systems
    shared = _shared(systems)
    unlike: list[str] = []
    found: list[dict[str, Any]] = []
    intervals: list[_AtLevel] = []
    cautions: list[dict[str, Any]] = []
    for other in others:
        bursty = list(_bursty(base, other, shared))
        cautions += bursty
        misled = {step for caution in bursty for step in caution["steps"]}
        differing = _unlike_params(base, other)
        loads = {} if differing else {step: told for step in shared if (told := _unlike(base, other, step))}
        unlike += differing + [f"{step}: {told}" for step, told in loads.items()]
        for row, at_level in _compared(base, other, shared):
            flattered = row["step"] in misled and row["figure"].split()[0].lower() in FLATTERED
            found.append(_untested(row) if differing or row["step"] in loads or flattered else row)
            intervals.append(at_level)
    _judge(found)
    _widen(found, intervals)
    normalised = [_normalised(system) for system in systems]
    together = {
        "systems": [_told(system) for system in systems], "comparisons": found, "normalised": normalised,
    }  # fmt: skip
    report = base.runs[0].report
    return {
        "test": report["test"], "section": report["section"], "title": report["title"], "unlike": unlike,
        "invalid": list(_invalid(systems)), "cautions": cautions,
        **together,
        "checklist": judge_comparison(
            [run.report for system in systems for run in system.runs], together
        ).to_dict(),
        "notes": [
            *left_out, *_run_notes(systems), *_load_notes(systems, shared), *_figure_notes(found),
            *_rate_notes(normalised),
        ],
        "tables": msgspec.to_builtins(tables_of(base.label, found)),
        "charts": msgspec.to_builtins(charts_of(report["test"], _loads(systems, shared), found)),
    }  # fmt: skip


def _in_common(systems: Sequence[System]) -> tuple[list[System], list[str]]:
    """Return the systems with the runs whose seeds all have (6.1), or all if fewer than three; and notes."""
    seeds = [{run.report["seed"] for run in system.runs} for system in systems]
    shared = set.intersection(*seeds)
    if len(shared) < RUNS_MIN or all(own == shared for own in seeds):
        return list(systems), []
    notes = []
    for system in systems:
        more = [str(run.report.get("run", 1)) for run in system.runs if run.report["seed"] not in shared]
        if more:
            notes.append(
                "left out, since their requests were not sent to all systems (6.1): run"
                f" {', '.join(more)} of {system.label}"
            )
    chosen = [
        System(system.label, [run for run in system.runs if run.report["seed"] in shared])
        for system in systems
    ]
    return chosen, notes


def _shared(systems: Sequence[System]) -> list[str]:
    runs = [run for system in systems for run in system.runs]
    return [name for name in runs[0].steps if all(name in run.steps for run in runs)]


def _unlike_params(base: System, other: System) -> list[str]:
    """Return differing parameters as `rate 4 of a, 8 of b`, without those that only one version has."""
    ours, theirs = (one.runs[0].report.get("params") or {} for one in (base, other))
    return [
        f"{name} {_plain(ours[name])} of {base.label}, {_plain(theirs[name])} of {other.label}"
        for name in ours
        if name in theirs and ours[name] != theirs[name]
    ]


def _unlike(base: System, other: System, step: str) -> str | None:
    """Return how the compared requests of a load, or their sending, differ; None if they do not."""
    runs = RUNS_MIN if min(len(base.runs), len(other.runs)) >= RUNS_MIN else 1
    sent = []
    for system in (base, other):
        chosen = system.runs if runs > 1 else system.runs[:1]
        told = [one for run in chosen for one in run.report["steps"] if one["name"] == step]
        sent.append({_sent(one) for one in told})
    if sent[0] == sent[1]:
        return None
    first, second = (
        sorted(one - other)[0] if one - other else "no more" for one, other in (sent, sent[::-1])
    )
    return f"{first} of {base.label}, {second} of {other.label}"


def _bursty(base: System, other: System, shared: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the system of the two whose chunks come in bursts, with the loads where they do."""
    for system, reference in ((base, other), (other, base)):
        numbers = {
            step: (_chunks_at_a_time(system, step), _chunks_at_a_time(reference, step)) for step in shared
        }
        steps = [step for step, (n, usual) in numbers.items() if come_in_bursts(n, usual)]
        if steps:
            yield {
                "system": system.label, "against": reference.label, "steps": steps, "metrics": FLATTERED,
                "events_per_read": max(numbers[step][0] or 0 for step in steps),
            }  # fmt: skip


def _chunks_at_a_time(system: System, step: str) -> float | None:
    found = [chunks_at_a_time(run.steps[step].result.get("chunking") or {}) for run in system.runs]
    known = [n for n in found if n is not None]
    return median(known) if known else None


def _sent(step: Mapping[str, Any]) -> str:
    closed = (step.get("load") or {}).get("closed")
    return sequence(step) + (f", {closed} at a time" if closed else "")


def _plain(value: Any) -> str:
    return (
        "none" if value is None else value if isinstance(value, str) else msgspec.json.encode(value).decode()
    )


def _untested(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, **dict.fromkeys(("difference", "low", "high", "p", "method"))}


def _loads(systems: Sequence[System], shared: Sequence[str]) -> dict[str, dict[str, list[Measurement]]]:
    return {name: {one.label: [run.steps[name] for run in one.runs] for one in systems} for name in shared}


def _told(system: System) -> dict[str, Any]:
    first = system.runs[0].report
    return {
        "label": system.label, "runs": len(system.runs), "sut": first["sut"], "target": first["target"],
        "quick": any(run.report["quick"] for run in system.runs),
        "seeds": [run.report["seed"] for run in system.runs], "began": [_began(run) for run in system.runs],
        "valid": all((run.report.get("verdict") or {}).get("valid", True) for run in system.runs),
    }  # fmt: skip


def _began(run: ComparedRun) -> str:
    """Return the start time of the first load."""
    starts = [str(step.result["window"].get("start") or "") for step in run.steps.values()]
    return min(starts, default="")


def _compared(
    base: System, other: System, shared: Sequence[str]
) -> Iterator[tuple[dict[str, Any], _AtLevel]]:
    """Yield each figure with its own interval, and a function that compares it at another level."""
    test = base.runs[0].report["test"]
    for name, says, unit in _HEADLINES.get(test, ()):
        a, b = ([run.report["measurements"].get(name) for run in one.runs] for one in (base, other))
        if None not in a and None not in b:
            of_runs = partial(_of_runs, a, b)
            row = _row(base, other, None, says, unit, of_runs())
            yield {**row, "a": median(a), "b": median(b)} if row["p"] is None else row, of_runs
    for step in shared:
        for says, (column, share) in _FIGURES.items():
            a, b = ([_values(run.steps[step], column) for run in one.runs] for one in (base, other))
            if not all((*a, *b)):
                continue
            at_level: _AtLevel
            if min(len(a), len(b)) >= RUNS_MIN:
                at_level = partial(_of_runs, *([percentile(v, share) for v in runs] for runs in (a, b)))
            elif column == _GAPS:
                continue  # gaps of a request are not independent
            else:
                at_level = partial(compare_quantile, a[0], b[0], share, paired=False)
            result = at_level()
            if result is not None:
                doubtful = not all(is_enough(len(values), share) for values in (*a, *b))
                yield _row(base, other, step, says, "s", result, doubtful=doubtful), at_level
        rates = [[_output_tps(run.steps[step]) for run in one.runs] for one in (base, other)]
        at_level = partial(_of_runs, *rates)
        made = at_level()
        if made is not None and any(map(any, rates)):
            yield _row(base, other, step, _RATE, "tok/s", made), at_level


def _values(step: Measurement, column: str) -> list[float]:
    return sorted(step.gaps()) if column == _GAPS else step.values(column)


def _of_runs(
    a: Sequence[float | None], b: Sequence[float | None], *, level: float = LEVEL
) -> Comparison | None:
    known = ([x for x in runs if x is not None] for runs in (a, b))
    return compare_runs(*known, level=level)


def _row(
    base: System, other: System, step: str | None, says: str, unit: str, result: Comparison | None, *,
    doubtful: bool = False,
) -> dict[str, Any]:  # fmt: skip
    test = base.runs[0].report["test"]
    nothing = dict.fromkeys(("difference", "low", "high", "p", "method"))
    return {
        "a_system": base.label, "b_system": other.label, "step": step, "figure": says, "unit": unit,
        "better": "lower" if unit == "s" else "higher",
        "key": step is None or says in _KEYS.get(test, ()),
        "samples": "runs" if min(len(base.runs), len(other.runs)) >= RUNS_MIN else "requests",
        "doubtful": doubtful, "level": LEVEL, **(nothing if result is None else result.to_dict()),
    }  # fmt: skip


def _judge(found: Sequence[dict[str, Any]]) -> None:
    for key in (True, False):
        family = [row for row in found if row["key"] is key and row["p"] is not None]
        corrected = adjusted([row["p"] for row in family], "holm" if key else "bh")
        for row, judged in zip(family, corrected, strict=True):
            row["p_adjusted"] = judged
    for row in found:
        p, difference = row.setdefault("p_adjusted", None), row["difference"]
        row["share"] = difference / row["a"] if difference is not None and row["a"] else None
        if p is None:
            row["finding"] = "not tested"
        elif p >= ALPHA or not difference:
            row["finding"] = "no difference shown"
        else:
            row["finding"] = "better" if (difference < 0) == (row["better"] == "lower") else "worse"


def _widen(found: Sequence[dict[str, Any]], intervals: Sequence[_AtLevel]) -> None:
    family = [
        (row, at_level)
        for row, at_level in zip(found, intervals, strict=True)
        if row["key"] and row["p"] is not None
    ]
    level = 1 - ALPHA / max(1, len(family))
    for row, at_level in family:
        wider = at_level(level=level)
        assert wider is not None
        row |= {"level": level, "low": wider.low, "high": wider.high}


def _normalised(system: System) -> dict[str, Any]:
    """Return output tokens per GPU-second and per unit of money; None if undeclared (6.2)."""
    hardware = system.runs[0].report["sut"].get("hardware") or {}
    rates = [max(map(_output_tps, run.steps.values()), default=0.0) for run in system.runs]
    tps = median(rates)
    count, price = hardware.get("count"), hardware.get("price_per_hour")
    return {
        "label": system.label,
        "output_tps_max": tps,
        "tokens_per_gpu_second": tps / count if count else None,
        "tokens_per_currency": tps * 3_600 / price if price else None,
        "currency": hardware.get("currency") if price else None,
        "method": "the highest output rate of any load, the median of runs; by GPUs, by an hour's price",
    }


def _output_tps(step: Measurement) -> float:
    """Return tokens of complete responses / time from the load's start to the last response."""
    tokens: Sequence[int] = step.ended_well().column("output_tokens").drop_null().to_pylist()
    return sum(tokens) / step.seconds if step.seconds else 0.0


def _invalid(systems: Sequence[System]) -> Iterator[str]:
    for system in systems:
        broken = [
            (number, findings[0]["says"])
            for number, run in enumerate(system.runs, 1)
            if (findings := (run.report.get("verdict") or {}).get("findings"))
        ]
        if broken:
            named = ", ".join(str(number) for number, _ in broken)
            yield f"{system.label}: not valid are its runs {named} of {len(system.runs)}: {broken[0][1]}"


def _run_notes(systems: Sequence[System]) -> Iterator[str]:
    for system in systems:
        runs = len(system.runs)
        if runs < RUNS_MIN:
            yield (
                f"{system.label} has {runs} of the {RUNS_MIN} independent runs of a claim (6.3, --runs):"
                " instead of runs, requests of first runs are compared with it, and how much runs differ is"
                " in no interval"
            )
    quick = [one.label for one in systems if any(run.report["quick"] for run in one.runs)]
    if quick:
        yield f"with --quick, which gives demands of the methodology up, was measured: {', '.join(quick)}"
    versions = {str((run.report.get("versions") or {}).get("llmtap")) for one in systems for run in one.runs}
    if len(versions) > 1:
        yield f"measured with different versions of llmtap: {', '.join(sorted(versions))}"
    began = sorted((_began(run), system.label) for system in systems for run in system.runs)
    in_turn = [label for label, _ in groupby(label for _, label in began)]
    if all(at for at, _ in began) and len(in_turn) == len(systems) < len(began):
        yield (
            f"runs were not taken in turn, but all of {', then all of '.join(in_turn)}: whatever changed on"
            " the machine meanwhile is in the differences. --runs 1 for each system, then --runs 2 into the"
            " same folders, and so on, takes them in turn"
        )


def _load_notes(systems: Sequence[System], shared: Sequence[str]) -> Iterator[str]:
    for system in systems:
        own = {name for run in system.runs for name in run.steps} - set(shared)
        if own:
            named = ", ".join(sorted(own))
            yield f"left out, since not every run of all systems has them: {named} of {system.label}"
    for name in shared:
        for system in systems:
            loads = [run.steps[name] for run in system.runs]
            sent, well = sum(load.n for load in loads), sum(len(load.ended_well()) for load in loads)
            if well < sent:
                yield (
                    f"{system.label}, {name}: {well:,} of {sent:,} requests ({well / sent:.1%}) were answered"
                    " whole, and latencies are of these alone"
                )


def _rate_notes(normalised: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if all(one["tokens_per_gpu_second"] is None and one["tokens_per_currency"] is None for one in normalised):
        yield (
            "output rates are not normalised (6.2): no system has accelerators (sut.hardware.count) or a"
            " price (sut.hardware.price_per_hour)"
        )


def _figure_notes(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if any(row["p"] is not None for row in found):
        yield (
            f"a difference counts as one where p, corrected for how many are compared, is below {ALPHA:g};"
            " none shown does not mean none: it may be as large as its interval"
        )
    if any(row["doubtful"] for row in found):
        yield "* rests on fewer samples than 5.1.4.3 asks for: 1,000 in a run for P99"
