"""Compare configurations of one system request by request: figures of the prefix cache and guardrail tests.

Input: measurements of each configuration, sent by `prefix_cache.py` and `guardrail_overhead.py`. Output:
figures as public JSON (`prefix_figures`, `guardrail_figures`). `blocks` draws the random order in which the
guardrail test sends its configurations, so that drift becomes noise. The fairness test uses `quantile_ratio`.
All configurations of a repeat get the same rows, and each row is compared with itself. Repeats have rows of
their own and are independent runs (IETF draft, 6.1 and 6.3).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from random import Random
from typing import Any, Final, TypeVar

import msgspec
import pyarrow.compute as pc
from scipy import stats

from llmtap.bench.run.figures import KEY_SHARES, figure, latency_row
from llmtap.bench.run.levels import Capacity, overload
from llmtap.bench.run.measurement import Measurement
from llmtap.exchange.outcome import Outcome
from llmtap.metrics import comparison
from llmtap.metrics.intervals import mean_interval
from llmtap.metrics.statistics import percentile
from llmtap.workload.plan import NO_CONTEXT

T = TypeVar("T")
RUNS_MIN: Final = 3
"""Independent runs that a claim needs (6.3)."""
_NS: Final = 1e9


@dataclass(frozen=True, slots=True)
class Block:
    arm: str
    level: float
    repeat: int


def blocks(
    arms: Sequence[str], levels: Sequence[float], repeats: int, seed: int, *, together: bool = False
) -> list[Block]:
    """Return all arms at all levels, `repeats` times, in random order; arms of a level are neighbours.

    `together`: for arms that cost a restart, an arm has all levels before the next one.
    """
    random = Random(f"{seed}/blocks")
    order: list[Block] = []
    for repeat in range(repeats):
        if together:
            for arm in _shuffled(arms, random):
                order += [Block(arm, level, repeat) for level in _shuffled(levels, random)]
        else:
            for level in _shuffled(levels, random):
                order += [Block(arm, level, repeat) for arm in _shuffled(arms, random)]
    return order


def pairs(both: Iterable[tuple[Measurement, Measurement]], column: str) -> tuple[list[float], list[float]]:
    """Return a column of the rows that both arms answered completely, in seconds if it ends in `_ns`."""
    first: list[float] = []
    second: list[float] = []
    for a, b in both:
        ours, theirs = values_by_row(a, column), values_by_row(b, column)
        for row in sorted(ours.keys() & theirs.keys()):
            first.append(ours[row])
            second.append(theirs[row])
    return first, second


def values_by_row(measured: Measurement, column: str) -> dict[int, float]:
    """Return a column of complete responses by row of the plan, in seconds if its name ends in `_ns`."""
    table = measured.table
    scale = _NS if column.endswith("_ns") else 1
    columns = (table.column(name).to_pylist() for name in ("row", "outcome", column))
    return {
        row: value / scale
        for row, outcome, value in zip(*columns, strict=True)
        if outcome == Outcome.COMPLETE.value and value is not None
    }


def over_repeats(values: Sequence[float]) -> dict[str, Any] | None:
    """Return the mean difference of three or more repeats, with Student's interval and p; else None."""
    found = mean_interval(values)
    if len(values) < RUNS_MIN or found is None:
        return None
    if min(values) == max(values):
        p = 1.0 if values[0] == 0 else 0.0
    else:
        p = float(stats.ttest_1samp(values, 0.0).pvalue)
    return figure(found.value, found.low, found.high, found.n, p=p, method="Student's t over repeats")


def quantile_ratio(
    base: Sequence[float], other: Sequence[float], p: float, *, paired: bool
) -> dict[str, Any] | None:
    """Return other / base of the p-th quantiles, with its interval; None without values above 0."""
    if not base or not other or min(base) <= 0 or min(other) <= 0:
        return None
    first, second = percentile(sorted(base), p), percentile(sorted(other), p)
    assert first is not None and second is not None
    found = comparison.compare_quantile([log(x) for x in base], [log(x) for x in other], p, paired=paired)
    if found is None:
        return figure(second / first, None, None, len(other), method=None)
    return figure(second / first, exp(found.low), exp(found.high), len(other), method=found.method)


def _shuffled(values: Sequence[T], random: Random) -> list[T]:
    return random.sample(list(values), len(values))


STATES: Final = {"off": "Cache Disabled", "cold": "Cache (Cold)", "warm": "Cache (Warm)"}
Rates = Mapping[str, Sequence[tuple[float, float | None]]]
"""Requests and output tokens per second of each repeat, `off` and `on`."""


@dataclass(slots=True)
class PrefixRun:
    """Repeat of the prefix cache test: one measurement per state of the cache."""

    contexts: Sequence[int]
    """Number of the shared prefix by row, or NO_CONTEXT."""
    lengths: Sequence[int]
    states: dict[str, Measurement] = field(default_factory=dict)

    def prefix(self, row: int) -> int:
        context = self.contexts[row]
        return 0 if context == NO_CONTEXT else self.lengths[context]


def prefix_figures(
    runs: Sequence[PrefixRun], rate: float, capacity: Capacity | None, rates: Rates | None
) -> dict[str, Any]:
    """Return the measurements of 5.7.4, of cold and warm compared with off."""
    told: dict[str, Any] = {
        "rate_rps": rate,
        "capacity": None if capacity is None else msgspec.to_builtins(capacity),
        "ttft": {state: latency_row(ttfts(runs, state), KEY_SHARES) for state in STATES},
        "reduction": {},
        "hit_rate": {state: _hits(runs, state) for state in STATES},
        "throughput": None if rates is None else _improvement(rates),
    }  # fmt: skip
    for state in ("cold", "warm"):
        off, on = pairs(((one.states["off"], one.states[state]) for one in runs), "ttft_ns")
        ratios = {name: quantile_ratio(off, on, p, paired=True) for name, p in KEY_SHARES.items()}
        shift = comparison.compare_paired(off, on)
        told["reduction"][state] = {
            **{name: None if ratio is None else _less(ratio) for name, ratio in ratios.items()},
            "pairs": len(off),
            "shift": None if shift is None else shift.to_dict(),
            "by_repeats": _by_repeats(runs, state),
        }
    return told


def ttfts(runs: Iterable[PrefixRun], state: str) -> list[float]:
    return [value for one in runs for value in values_by_row(one.states[state], "ttft_ns").values()]


def _less(ratio: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the ratio on / off to the reduction (off - on) / off."""
    return {
        **ratio,
        "value": 1 - ratio["value"],
        "low": None if ratio["high"] is None else 1 - ratio["high"],
        "high": None if ratio["low"] is None else 1 - ratio["low"],
    }


def _by_repeats(runs: Sequence[PrefixRun], state: str) -> dict[str, Any] | None:
    """Return the geometric mean of the repeats' reductions of P50, or None with fewer than three."""
    logs = []
    for one in runs:
        off, on = pairs([(one.states["off"], one.states[state])], "ttft_ns")
        ratio = quantile_ratio(off, on, 0.5, paired=True)
        if ratio is not None:
            logs.append(log(ratio["value"]))
    found = over_repeats(logs)
    if found is None:
        return None
    ends = {"value": 1 - exp(found["value"]), "low": 1 - exp(found["high"]), "high": 1 - exp(found["low"])}
    return {**found, **ends}


def _hits(runs: Sequence[PrefixRun], state: str) -> dict[str, Any] | None:
    """Return the share of prefix tokens from the cache; None if the server never reports any."""
    cached = prefix = told = 0
    for one in runs:
        hits = values_by_row(one.states[state], "cached_tokens")
        told += len(hits)
        for row in values_by_row(one.states[state], "e2e_ns"):
            cached += min(int(hits.get(row, 0)), one.prefix(row))
            prefix += one.prefix(row)
    rate = comparison.cache_hit_rate(cached, prefix)
    if not told or rate is None:
        return None
    return {"value": rate, "cached_tokens": cached, "prefix_tokens": prefix, "answers_that_tell": told}


def _improvement(rates: Rates) -> dict[str, Any]:
    """Return output tokens (or requests) per second, off and on, and the increase."""
    known = all(tps is not None for runs in rates.values() for _, tps in runs)
    off, on = ([(tps if known else rps) or 0.0 for rps, tps in rates[state]] for state in ("off", "on"))
    means = [sum(values) / len(values) for values in (off, on)]
    more = [gain for a, b in zip(off, on, strict=True) if (gain := comparison.increase(a, b)) is not None]
    compared = over_repeats(more) or dict.fromkeys(("low", "high", "p"))
    mean = sum(more) / len(more) if more else None
    return {
        "unit": "output tokens/s" if known else "requests/s",
        "off": {"mean": means[0], "runs": off},
        "on": {"mean": means[1], "runs": on},
        "improvement": figure(mean, compared["low"], compared["high"], len(off), p=compared["p"]),
    }  # fmt: skip


def hot_firsts(runs: Sequence[PrefixRun]) -> int:
    """Return the number of first requests of a prefix in cold runs whose prefix was mostly cached."""
    hot = 0
    for one in runs:
        cold = one.states["cold"]
        hits = values_by_row(cold, "cached_tokens")
        seen = {NO_CONTEXT}
        for row, context in enumerate(one.contexts):
            if context not in seen:
                seen.add(context)
                hot += hits.get(row, 0) > one.prefix(row) / 2
    return hot


BASELINE: Final = "baseline"
AGAIN: Final = "baseline_again"
ARMS: Final = {
    BASELINE: "Baseline", "input_filter": "Input Filter", "output_filter": "Output Filter",
    "full": "Full Filter",
}  # fmt: skip
"""Names in the draft's tables by arm."""
NAMES: Final = {**ARMS, AGAIN: "Baseline again (A/A)"}
METRICS: Final = {"ttft": "TTFT", "e2e": "E2E"}


@dataclass(slots=True)
class GuardrailCell:
    """A configuration at a load: one block per repeat."""

    runs: dict[int, Measurement] = field(default_factory=dict)

    def values(self, column: str) -> list[float]:
        return [value for one in self.runs.values() for value in values_by_row(one, column).values()]


Cells = Mapping[tuple[str, float], GuardrailCell]


def guardrail_figures(
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
                "reduction": (
                    None if arm == BASELINE else comparison.reduction(_made(peaks[BASELINE]), _made(peak))
                ),
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
        for one, p in zip(compared, comparison.adjusted([one["p"] for one in compared]), strict=True):
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
        **{metric: latency_row(cell.values(f"{metric}_ns"), KEY_SHARES) for metric in (*METRICS, "tpot")},
        "overhead": None if arm == BASELINE else {
            metric: _overhead(base, cell, f"{metric}_ns") for metric in METRICS
        },
        "overload": [kept for one in cell.runs.values() if (kept := overload(one)) is not None],
    }  # fmt: skip


def _outcomes(cell: GuardrailCell) -> dict[str, int]:
    counted: dict[str, int] = {}
    for one in cell.runs.values():
        for entry in pc.value_counts(one.table["outcome"]).to_pylist():
            counted[entry["values"]] = counted.get(entry["values"], 0) + entry["counts"]
    return counted


def _overhead(base: GuardrailCell, other: GuardrailCell, column: str) -> dict[str, Any]:
    """Return other - base by repeats (by pairs, if fewer than three), by pairs, and by percentile."""
    both = [(base.runs[i], other.runs[i]) for i in sorted(base.runs)]
    ours, theirs = pairs(both, column)
    shift = comparison.compare_paired(ours, theirs)
    found = [value for one in both if (value := _shift(*pairs([one], column))) is not None]
    head = over_repeats(found)
    if head is None and shift is not None:
        head = figure(shift.difference, shift.low, shift.high, shift.n, p=shift.p, method=shift.method)
    quantiles: dict[str, Any] = {}
    for name, p in KEY_SHARES.items():
        compared = comparison.compare_quantile(ours, theirs, p, paired=True) if ours else None
        first, second = percentile(sorted(ours), p), percentile(sorted(theirs), p)
        low, high = (None, None) if compared is None else (compared.low, compared.high)
        quantiles[name] = None
        if first is not None and second is not None:
            quantiles[name] = figure(second - first, low, high, len(ours))
    return {
        "overall": head,
        "by_repeat": found,
        "pairs": len(ours),
        "shift": None if shift is None else shift.to_dict(),
        **quantiles,
    }


def _shift(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Return the shift between two blocks: Hodges and Lehmann's, or the median of very few pairs."""
    compared = comparison.compare_paired(ours, theirs)
    if compared is not None:
        return compared.difference
    return percentile(sorted(b - a for a, b in zip(ours, theirs, strict=True)), 0.5)


def cached_share(cells: Cells) -> float | None:
    """Return the share of cached input tokens, or None."""
    columns = [one.table for cell in cells.values() for one in cell.runs.values()]
    cached = [pc.sum(table["cached_tokens"]).as_py() for table in columns]
    known = [count for count in cached if count is not None]
    total = sum(pc.sum(table["input_tokens"]).as_py() or 0 for table in columns)
    return sum(known) / total if known and total else None
