"""What guardrails cost, from blocks of the same requests in several configurations (seed 000, 5.10.4).

A cell is a configuration at a load, with a block for each repeat. All figures are public JSON.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import pyarrow.compute as pc

from llmtap.bench.report.paired import over_repeats, pairs, values_by_row
from llmtap.bench.run.figures import latency_row
from llmtap.bench.run.load_level import Capacity, is_long, overload
from llmtap.bench.run.measurement import Measurement
from llmtap.bench.run.steady import steady_of
from llmtap.exchange.outcome import Outcome
from llmtap.metrics.comparison import adjusted, compare_paired, compare_quantile, reduction
from llmtap.metrics.statistics import percentile

__all__ = [
    "AGAIN",
    "ARMS",
    "BASELINE",
    "METRICS",
    "NAMES",
    "SHARES",
    "Cells",
    "GuardrailCell",
    "cached_share",
    "figures",
]

BASELINE: Final = "baseline"
AGAIN: Final = "baseline_again"
"""The baseline's second set of blocks."""
ARMS: Final = {
    BASELINE: "Baseline", "input_filter": "Input Filter", "output_filter": "Output Filter",
    "full": "Full Filter",
}  # fmt: skip
"""By name, as the draft's tables call them."""
NAMES: Final = {**ARMS, AGAIN: "Baseline again (A/A)"}
METRICS: Final = {"ttft": "TTFT", "e2e": "E2E"}
SHARES: Final = {"p50": 0.50, "p95": 0.95, "p99": 0.99}


@dataclass(slots=True)
class GuardrailCell:
    """A configuration at a load: a block for each repeat."""

    runs: dict[int, Measurement] = field(default_factory=dict)

    def values(self, column: str) -> list[float]:
        """Of complete answers, all repeats."""
        return [value for one in self.runs.values() for value in values_by_row(one, column).values()]

    def tps(self) -> dict[int, float] | None:
        """Output tokens per second, by repeat; requests where tokens are not known. None of short blocks."""
        if not all(is_long(one) for one in self.runs.values()):
            return None
        steadies = {i: steady_of(self.runs[i]) for i in sorted(self.runs)}
        known = all(one.output_tps is not None for one in steadies.values())
        return {i: (one.output_tps if known else one.completed_rps) or 0.0 for i, one in steadies.items()}


Cells = Mapping[tuple[str, float], GuardrailCell]


def figures(
    cells: Cells,
    arms: Sequence[str],
    levels: Sequence[float],
    capacity: Capacity,
    peaks: Mapping[str, Capacity] | None,
) -> dict[str, Any]:
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
            one["overhead"][metric]["overall"]
            for told_level in told["levels"]
            for arm, one in told_level["arms"].items()
            if arm not in (BASELINE, AGAIN) and one["overhead"][metric]["overall"] is not None
        ]
        for one, p in zip(compared, adjusted([one["p"] for one in compared]), strict=True):
            one["p_adjusted"] = p
    return told


def _made(peak: Capacity) -> float:
    return peak.rps if peak.tps is None else peak.tps


def _arm(cells: Cells, arm: str, level: float) -> dict[str, Any]:
    cell = cells[arm, level]
    counted = _outcomes(cell)
    base = cells[BASELINE, level]
    return {
        "sent": sum(one.n for one in cell.runs.values()),
        "complete": counted.get(Outcome.COMPLETE.value, 0),
        "refused": counted.get(Outcome.REFUSED.value, 0),
        "outcomes": counted,
        **{metric: latency_row(cell.values(f"{metric}_ns"), SHARES) for metric in METRICS},
        "overhead": None if arm == BASELINE else {
            metric: _overhead(base, cell, f"{metric}_ns") for metric in METRICS
        },
        "throughput": _throughput(base, cell, arm),
        "overload": [kept for one in cell.runs.values() if (kept := overload(one)) is not None],
    }  # fmt: skip


def _outcomes(cell: GuardrailCell) -> dict[str, int]:
    counted: dict[str, int] = {}
    for one in cell.runs.values():
        for entry in pc.value_counts(one.table["outcome"]).to_pylist():
            counted[entry["values"]] = counted.get(entry["values"], 0) + entry["counts"]
    return counted


def _overhead(base: GuardrailCell, other: GuardrailCell, column: str) -> dict[str, Any]:
    """other - base: by repeats, by pairs, and percentile by percentile.

    The figure itself is the mean of what the repeats found; with fewer than three, what all pairs show, which
    leaves out how much one block differs from the next.
    """
    both = [(base.runs[i], other.runs[i]) for i in sorted(base.runs)]
    ours, theirs = pairs(both, column)
    shift = compare_paired(ours, theirs)
    found = [value for one in both if (value := _shift(*pairs([one], column))) is not None]
    head = over_repeats(found)
    if head is None and shift is not None:
        head = {
            "value": shift.difference, "low": shift.low, "high": shift.high, "n": shift.n, "level": 0.95,
            "p": shift.p, "method": shift.method,
        }  # fmt: skip
    quantiles: dict[str, Any] = {}
    for name, p in SHARES.items():
        compared = compare_quantile(ours, theirs, p, paired=True) if ours else None
        first, second = percentile(sorted(ours), p), percentile(sorted(theirs), p)
        quantiles[name] = None if first is None or second is None else {
            "value": second - first,
            "low": None if compared is None else compared.low,
            "high": None if compared is None else compared.high,
            "n": len(ours), "level": 0.95,
        }  # fmt: skip
    return {
        "overall": head,
        "by_repeat": found,
        "pairs": len(ours),
        "shift": None if shift is None else shift.to_dict(),
        **quantiles,
    }


def _shift(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Of one block against another: Hodges and Lehmann's, or of very few pairs the median."""
    compared = compare_paired(ours, theirs)
    if compared is not None:
        return compared.difference
    return percentile(sorted(b - a for a, b in zip(ours, theirs, strict=True)), 0.5)


def _throughput(base: GuardrailCell, other: GuardrailCell, arm: str) -> dict[str, Any] | None:
    """None where blocks are so short that most of the time answers begin or end."""
    ours, theirs = base.tps(), other.tps()
    if ours is None or theirs is None:
        return None
    told: dict[str, Any] = {
        "value": sum(theirs.values()) / len(theirs), "runs": [*theirs.values()], "reduction": None
    }  # fmt: skip
    if arm != BASELINE:
        less = [change for i in ours if (change := reduction(ours[i], theirs[i])) is not None]
        told["reduction"] = over_repeats(less) or {
            "value": sum(less) / len(less) if less else None, "low": None, "high": None, "n": len(less),
            "level": 0.95, "p": None,
        }  # fmt: skip
    return told


def cached_share(cells: Cells) -> float | None:
    """Of all input tokens; None where no answer tells."""
    columns = [one.table for cell in cells.values() for one in cell.runs.values()]
    cached = [pc.sum(table["cached_tokens"]).as_py() for table in columns]
    known = [count for count in cached if count is not None]
    total = sum(pc.sum(table["input_tokens"]).as_py() or 0 for table in columns)
    return sum(known) / total if known and total else None
