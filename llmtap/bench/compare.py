"""Several systems, or the same one twice, held against each other: seed 000, section 6.

A run is one results folder's answer to one test. Requests within a run share its weather (what else the machine
did, how warm it was), so what is compared are figures of runs, at least three a system (6.3). With fewer, the
requests themselves are compared, and it says that this leaves out how much one run differs from the next.

Source: IETF seed 000, 6.1 to 6.4.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from llmtap.bench.compliance.judge import judge_comparison
from llmtap.bench.figures import ms
from llmtap.bench.folder import Folder
from llmtap.bench.measurement import Measurement
from llmtap.bench.test import Chart, Table
from llmtap.errors import ConfigError
from llmtap.metrics.significance import Comparison, adjusted, compare_quantile, compare_runs

__all__ = ["System", "compare", "read_system"]

RUNS_MIN: Final = 3
"""Independent runs of a system, for a claim (6.3)."""
LATENCIES: Final = (
    ("ttft_ns", 0.5, "TTFT P50"), ("ttft_ns", 0.99, "TTFT P99"), ("tpot_ns", 0.5, "TPOT P50"),
    ("tpot_ns", 0.99, "TPOT P99"), ("e2e_ns", 0.5, "E2E P50"), ("e2e_ns", 0.99, "E2E P99"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Run:
    report: Mapping[str, Any]
    steps: Mapping[str, Measurement]


@dataclass(frozen=True, slots=True)
class System:
    """A system and its runs of one test."""

    label: str
    runs: Sequence[_Run]


def read_system(label: str, places: Sequence[Path], test: str) -> System:
    """Its runs from their results folders. Raises ConfigError where one has no such test."""
    runs = []
    for place in places:
        if not (place / test / "result.json").is_file():
            raise ConfigError(str(place), f"has no result of {test}")
        folder = Folder(place).within(test)
        report = folder.read_json("result.json")
        steps = {
            step["name"]: Measurement.load(
                folder.path / "steps" / step["name"], step["name"], step["arm"], step["result"]
            )
            for step in report["steps"]
        }
        runs.append(_Run(report, steps))
    return System(label, runs)


def compare(base: System, others: Sequence[System]) -> dict[str, Any]:
    """Each of `others` against `base`: the checklist, and every latency of every step that both have.

    As public JSON: `systems`, `checklist` (a compliance matrix), `comparisons` (a figure each, with the
    difference, its interval, p and p adjusted for how many there are by Holm's method), `normalised` (6.2),
    `notes`, `tables`, `charts`.
    """
    systems = [base, *others]
    found = [one for other in others for one in _compared(base, other)]
    corrected = adjusted([one["p"] for one in found]) if found else []
    for one, p in zip(found, corrected, strict=True):
        one["p_adjusted"] = p
    reports = [run.report for system in systems for run in system.runs]
    together = {
        "systems": [_told(system) for system in systems],
        "comparisons": found,
        "normalised": [_normalised(system) for system in systems],
    }
    return {
        "test": base.runs[0].report["test"],
        **together,
        "checklist": judge_comparison(reports, together).to_dict(),
        "notes": list(_notes(systems)),
        "tables": [_table(found)],
        "charts": list(_charts(systems)),
    }


def _told(system: System) -> dict[str, Any]:
    first = system.runs[0].report
    return {
        "label": system.label, "runs": len(system.runs), "sut": first["sut"], "quick": first["quick"],
        "began": [run.report["steps"][0]["result"]["window"]["start"] for run in system.runs],
    }  # fmt: skip


def _compared(base: System, other: System) -> Iterator[dict[str, Any]]:
    shared = [name for name in base.runs[0].steps if all(name in run.steps for run in other.runs)]
    enough = min(len(base.runs), len(other.runs)) >= RUNS_MIN
    for step in shared:
        for column, share, says in LATENCIES:
            if enough:
                result = compare_runs(
                    _quantiles(base, step, column, share), _quantiles(other, step, column, share)
                )
            else:
                a, b = (system.runs[0].steps[step].values(column) for system in (base, other))
                result = compare_quantile(a, b, share, paired=False)
            if result is not None:
                yield _row(base.label, other.label, step, says, result, "runs" if enough else "requests")


def _quantiles(system: System, step: str, column: str, share: float) -> list[float]:
    """The figure of each run."""
    from llmtap.metrics.statistics import percentile

    found = (percentile(run.steps[step].values(column), share) for run in system.runs if step in run.steps)
    return [value for value in found if value is not None]


def _row(a: str, b: str, step: str, says: str, result: Comparison, unit: str) -> dict[str, Any]:
    return {"a_system": a, "b_system": b, "step": step, "figure": says, "unit_of": unit, **result.to_dict()}


def _normalised(system: System) -> dict[str, Any]:
    """Output tokens by GPU-second and by money, medians over runs; None where the SUT does not say (6.2)."""
    hardware = system.runs[0].report["sut"].get("hardware") or {}
    rates = [max((_tps(step) for step in run.steps.values()), default=0.0) for run in system.runs]
    tps = median(rates) if rates else None
    count, price = hardware.get("count"), hardware.get("price_per_hour")
    return {
        "label": system.label,
        "output_tps_max": tps,
        "tokens_per_gpu_second": None if tps is None or not count else tps / count,
        "tokens_per_currency": None if tps is None or not price else tps * 3_600 / price,
        "currency": hardware.get("currency"),
        "method": "the highest output rate of any step / GPUs, and x 3,600 s / price of an hour",
    }


def _tps(step: Measurement) -> float:
    tokens = sum(step.ended_well().column("output_tokens").drop_null().to_pylist())
    return tokens / step.seconds if step.seconds else 0.0


def _notes(systems: Sequence[System]) -> Iterator[str]:
    for system in systems:
        runs = len(system.runs)
        if runs < RUNS_MIN:
            yield (
                f"{system.label}: {runs} of {RUNS_MIN} independent runs (6.3). Requests are compared instead, and"
                " how much one run differs from the next is in no interval: this supports no claim"
            )
        if any(run.report["quick"] for run in system.runs):
            yield f"{system.label}: a quick run"


def _table(found: Sequence[Mapping[str, Any]]) -> Table:
    rows = [
        [
            one["b_system"], one["step"], one["figure"], ms(one["a"]), ms(one["b"]), ms(one["difference"]),
            f"{ms(one['low'])} to {ms(one['high'])}", f"{one['p_adjusted']:.3g}",
        ]
        for one in found
    ]  # fmt: skip
    heads = ["System", "Step", "Figure", "Base", "System's", "Difference", "95 % interval", "p (Holm)"]
    return Table(caption="Differences from the base system", heads=heads, rows=rows)


def _charts(systems: Sequence[System]) -> Iterator[Chart]:
    """TTFT of each step that all have, all systems in one chart."""
    from llmtap.bench.figures import cdf_series

    for step in systems[0].runs[0].steps:
        if not all(step in run.steps for system in systems for run in system.runs):
            continue
        series = [
            cdf_series(f"{system.label}, run {number}", run.steps[step].values("ttft_ns"))
            for system in systems
            for number, run in enumerate(system.runs, 1)
        ]
        yield Chart(
            title=f"TTFT, {step}", kind="cdf", x_title="TTFT (s)", y_title="share of requests", series=series
        )
