"""Configurations of one system compared: the order in which they take turns, and the requests they share.

A machine drifts while it is measured: it warms up, others use it, memory fills. What is compared is therefore
sent in blocks whose order is drawn from the seed, so that drift is noise and no difference. All arms of a
repeat get the same rows of one plan, and each row is compared with itself; every repeat has rows of its own,
so repeats are independent runs (IETF seed 000, 6.1 and 6.3).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, log
from random import Random
from typing import Any, Final, TypeVar

from scipy import stats

from llmtap.bench.run.measurement import Measurement
from llmtap.exchange.outcome import Outcome
from llmtap.metrics.comparison import compare_quantile
from llmtap.metrics.intervals import mean_interval
from llmtap.metrics.statistics import percentile

__all__ = ["Block", "blocks", "over_repeats", "pairs", "quantile_ratio", "values_by_row"]

T = TypeVar("T")
RUNS_MIN: Final = 3
"""Independent runs, for a claim (6.3)."""
_NS: Final = 1e9


@dataclass(frozen=True, slots=True)
class Block:
    """A load that one arm gets in one go."""

    arm: str
    level: float
    repeat: int


def blocks(
    arms: Sequence[str], levels: Sequence[float], repeats: int, seed: int, *, together: bool = False
) -> list[Block]:
    """All arms at all levels, so many times, in an order drawn from the seed.

    Within a repeat the levels come in some order, and at each of them the arms: those that are compared are
    neighbours. `together` is for arms that cost a restart: an arm is at all levels before the next one's
    turn.
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
    """A column of the same rows in two arms, row by row, in seconds where it ends in `_ns`.

    Only rows that both answered completely: a refusal is quick, and an error no latency.
    """
    first: list[float] = []
    second: list[float] = []
    for a, b in both:
        ours, theirs = values_by_row(a, column), values_by_row(b, column)
        for row in sorted(ours.keys() & theirs.keys()):
            first.append(ours[row])
            second.append(theirs[row])
    return first, second


def values_by_row(measured: Measurement, column: str) -> dict[int, float]:
    """A column's known values of complete answers, by row of the plan; seconds where it ends in `_ns`."""
    table = measured.table
    scale = _NS if column.endswith("_ns") else 1
    columns = (table.column(name).to_pylist() for name in ("row", "outcome", column))
    return {
        row: value / scale
        for row, outcome, value in zip(*columns, strict=True)
        if outcome == Outcome.COMPLETE.value and value is not None
    }


def over_repeats(values: Sequence[float]) -> dict[str, Any] | None:
    """The mean of a difference that each repeat found, with Student's interval and the p-value of none at
    all.

    None of fewer than three. Requests of a block share its weather, so as pairs they tell more exactly how
    two blocks differed than how two configurations do; repeats are what was drawn anew.
    """
    found = mean_interval(values)
    if len(values) < RUNS_MIN or found is None:
        return None
    if min(values) == max(values):
        p = 1.0 if values[0] == 0 else 0.0
    else:
        p = float(stats.ttest_1samp(values, 0.0).pvalue)
    return {
        "value": found.value, "low": found.low, "high": found.high, "n": found.n, "level": found.level,
        "p": p, "method": "Student's t over repeats",
    }  # fmt: skip


def quantile_ratio(
    base: Sequence[float], other: Sequence[float], p: float, *, paired: bool
) -> dict[str, Any] | None:
    """other / base of the p-th quantiles as a figure with its interval; None where one has no values above 0.

    A quantile of logarithms is the logarithm of the quantile, so the ratio's interval is that of a
    difference. With `paired`, values that stand at one place belong together.
    """
    if not base or not other or min(base) <= 0 or min(other) <= 0:
        return None
    first, second = percentile(sorted(base), p), percentile(sorted(other), p)
    assert first is not None and second is not None
    found = compare_quantile([log(x) for x in base], [log(x) for x in other], p, paired=paired)
    return {
        "value": second / first,
        "low": None if found is None else exp(found.low), "high": None if found is None else exp(found.high),
        "n": len(other), "level": 0.95, "method": None if found is None else found.method,
    }  # fmt: skip


def _shuffled(values: Sequence[T], random: Random) -> list[T]:
    return random.sample(list(values), len(values))
