"""Comparisons of a system with itself, and of systems that differ by what was planted."""

from collections.abc import Callable, Iterator
from math import sqrt

import numpy as np
from laws import BIMODAL, EXPONENTIAL, LOGNORMAL, NORMAL, WIDE, Law, Values
from scipy import stats
from tables import Effort, Table, percent

from llmtap.metrics.comparison import (
    Comparison,
    compare_paired,
    compare_quantile,
    compare_runs,
    compare_unpaired,
)

ALPHA = 0.05

Random = np.random.Generator
Pair = Callable[[Random], tuple[Values, Values]]
Test = Callable[[Values, Values], Comparison | None]


def rejects(effort: Effort, repeats: int, draw: Pair, test: Test) -> float:
    """Share of pairs of samples that the test tells apart."""
    hits = 0
    for _ in range(repeats):
        found = test(*draw(effort.random))
        assert found is not None
        hits += found.p < ALPHA
    return hits / repeats


def alike(law: Law, n: int, m: int | None = None) -> Pair:
    """Two samples of one law."""
    return lambda random: (law.draw(random, n), law.draw(random, m or n))


def in_pairs(law: Law, n: int, factor: float = 1.0, noise: float = 0.1) -> Pair:
    """Requests of very different size, each sent twice, each time with some noise of its own."""

    def draw(random: Random) -> tuple[Values, Values]:
        size = law.draw(random, n)
        return size * np.exp(random.normal(0, noise, n)), factor * size * np.exp(random.normal(0, noise, n))

    return draw


def run_figures(runs: int, apart: float = 0.0) -> Pair:
    """A figure of each run: runs differ by one standard deviation among themselves."""
    return lambda random: (random.normal(100, 1, runs), random.normal(100 + apart, 1, runs))


def quantile_test(p: float, paired: bool) -> Test:
    return lambda a, b: compare_quantile(a, b, p, paired=paired, resamples=499)


def false_positives(effort: Effort) -> Iterator[Table]:
    """A against A: the same system twice."""
    rows = []
    sizes = (10, 100, 1_000)
    laws = (LOGNORMAL, WIDE, BIMODAL)
    pairs = [[in_pairs(law, n) for n in sizes] for law in laws]
    apart = [[alike(law, n) for n in sizes] for law in laws]
    for law, full, name, draws, test in (
        # Ranks know nothing of the law: for samples apart, one stands for all.
        ("any", 4_000, "`compare_unpaired`", apart[0], compare_unpaired),
        *((law.name, 2_000, "`compare_paired`", pairs[i], compare_paired) for i, law in enumerate(laws)),
        *(
            (law.name, 1_000, name, draws, test)
            for i, law in enumerate(laws)
            for name, draws, test in (
                ("`compare_quantile` P50, paired", pairs[i], quantile_test(0.5, True)),
                ("`compare_quantile` P50", apart[i], quantile_test(0.5, False)),
                ("`compare_quantile` P99", apart[i][2:], quantile_test(0.99, False)),
            )
        ),
    ):
        repeats = effort.times(full)
        found = [percent(rejects(effort, repeats, draw, test), 1) for draw in draws]
        rows.append([law, name, *["-"] * (len(sizes) - len(found)), *found])
    yield Table(
        "False positives of A/A comparisons at p < 0.05, %", ["law", "test", "n = 10", "100", "1,000"], rows
    )
    repeats = effort.times(10_000)
    found = [percent(rejects(effort, repeats, run_figures(k), compare_runs), 1) for k in (3, 5, 10)]
    yield Table("The same of `compare_runs`", ["", "3 runs each", "5", "10"], [["normal", *found]])

    def whitney(a: Values, b: Values) -> float:
        return float(stats.mannwhitneyu(a, b).pvalue)

    repeats = effort.times(4_000)
    rows = []
    for n, m in ((100, 100), (300, 100), (100, 300)):
        samples = [(effort.random.normal(0, 1, n), effort.random.normal(0, 3, m)) for _ in range(repeats)]
        ours = sum(compare_unpaired(a, b).p < ALPHA for a, b in samples)
        theirs = sum(whitney(a, b) < ALPHA for a, b in samples)
        rows.append([str(n), str(m), percent(ours, repeats), percent(theirs, repeats)])
    title = "Equal medians, b three times as variable: p < 0.05, %"
    yield Table(title, ["n", "m", "`compare_unpaired`", "Mann and Whitney"], rows)


def shifts(effort: Effort) -> Iterator[Table]:
    """The interval of the difference against a planted one."""
    repeats = effort.times(1_000)
    rows = []
    for n in (10, 30, 100, 1_000):
        row = [f"{n:,}"]
        for law in (NORMAL, EXPONENTIAL, WIDE):
            hits = 0
            for _ in range(repeats):
                found = compare_unpaired(law.draw(effort.random, n), law.draw(effort.random, n) + 2)
                hits += found.low <= 2 <= found.high
            row.append(percent(hits, repeats))
        for added in (NORMAL, EXPONENTIAL):
            # The median of the average of two such costs, which the shift estimates.
            truth = added.mean if added is NORMAL else float(stats.gamma(2, scale=0.5).median())
            hits = 0
            for _ in range(repeats):
                size = WIDE.draw(effort.random, n)
                found = compare_paired(size, size + added.draw(effort.random, n))
                hits += found.low <= truth <= found.high
            row.append(percent(hits, repeats))
        rows.append(row)
    heads = ["n", *(f"unpaired, {law.name}" for law in (NORMAL, EXPONENTIAL, WIDE))]
    heads += ["paired, normal cost", "paired, exponential cost"]
    yield Table(f"Coverage of the shift's interval, %, of {repeats:,}", heads, rows)


def powers(effort: Effort) -> Iterator[Table]:
    """What is found of a difference that is there."""
    repeats = effort.times(1_000)
    rows = []
    # Pairs that have a power of 80 % by the noncentral t (Cohen 1988, 2.3), 5 % more of them for ranks.
    for effect, n in ((0.1, 824), (0.2, 208), (0.5, 35), (1.0, 11)):

        def draw(random: Random, effect: float = effect, n: int = n) -> tuple[Values, Values]:
            size = WIDE.draw(random, n)
            return size, size + random.normal(effect, 1, n)

        def spread(random: Random, effect: float = effect, n: int = n) -> tuple[Values, Values]:
            size = WIDE.draw(random, n)
            return size, size + effect + random.laplace(0, 1 / sqrt(2), n)

        rows.append(
            [
                f"{effect:g} sd",
                f"{n:,}",
                percent(rejects(effort, repeats, draw, compare_paired), 1),
                percent(rejects(effort, repeats, spread, compare_paired), 1),
            ]
        )
    heads = ["shift", "pairs for 80 %", "found, normal", "found, Laplace"]
    yield Table("Power of `compare_paired`, %", heads, rows)
    repeats = effort.times(300)
    rows = []
    for factor in (1.05, 1.1, 1.2):
        row = [f"+{100 * (factor - 1):.0f} %"]
        for test, paired in (
            (compare_paired, True),
            (compare_unpaired, False),
            (quantile_test(0.5, True), True),
            (quantile_test(0.5, False), False),
            (quantile_test(0.99, False), False),
        ):
            pair = in_pairs(LOGNORMAL, 1_000, factor) if paired else slower(LOGNORMAL, 1_000, factor)
            row.append(percent(rejects(effort, repeats, pair, test), 1))
        rows.append(row)
    heads = ["b slower by", "`compare_paired`", "`compare_unpaired`", "P50, paired", "P50", "P99"]
    yield Table(
        "Power with 1,000 requests each, lognormal with sigma 0.5, noise of pairs 0.1, %", heads, rows
    )
    repeats = effort.times(4_000)
    rows = [
        [f"{apart:g} sd"]
        + [
            percent(rejects(effort, repeats, run_figures(runs, apart), compare_runs), 1)
            for runs in (3, 5, 10)
        ]
        for apart in (1, 2, 3, 5)
    ]
    yield Table("Power of `compare_runs`, %", ["difference, in sd of runs", "3 runs each", "5", "10"], rows)


def slower(law: Law, n: int, factor: float) -> Pair:
    return lambda random: (law.draw(random, n), factor * law.draw(random, n))
