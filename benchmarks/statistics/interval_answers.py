"""Intervals against the truth, where it is known."""

from collections.abc import Iterator
from math import log, sqrt

import numpy as np
from laws import LAWS, NORMAL, queue
from scipy import stats
from tables import Effort, Table, percent

from llmtap.metrics.intervals import (
    Interval,
    clustered_quantile_interval,
    mean_interval,
    quantile_interval,
    share_interval,
)
from llmtap.metrics.statistics import samples_needed

SHARES = (0.5, 0.9, 0.99)
SIZES = (100, 300, 1_000, 3_000, 10_000)


def encloses(found: Interval | None, truth: float) -> bool:
    """An open end is no end."""
    assert found is not None
    return ("below" in found.method or found.low <= truth) and (
        "above" in found.method or truth <= found.high
    )


def quantiles(effort: Effort) -> Iterator[Table]:
    """Order statistics: any law, any quantile."""
    repeats = effort.times(10_000)
    hits = {(law.name, p, n): 0 for law in LAWS for p in SHARES for n in SIZES}
    opened = set()
    for law in LAWS:
        truths = {p: law.quantile(p) for p in SHARES}
        for n in SIZES:
            for _ in range(repeats):
                ordered = np.sort(law.draw(effort.random, n)).tolist()
                for p, truth in truths.items():
                    found = quantile_interval(ordered, p)
                    hits[law.name, p, n] += encloses(found, truth)
                    if found is not None and "open" in found.method:
                        opened.add((p, n))
    rows = [
        [law.name, f"P{100 * p:g}"]
        + [percent(hits[law.name, p, n], repeats) + " (open)" * ((p, n) in opened) for n in SIZES]
        for law in LAWS
        for p in SHARES
    ]
    heads = ["law", "", *(f"n = {n:,}" for n in SIZES)]
    yield Table(f"Coverage of `quantile_interval`, %, of {repeats:,} samples each", heads, rows)


def exact_quantiles(effort: Effort) -> Iterator[Table]:
    """The same without luck: of values 1 .. n the ranks can be read off, and the rest is binomial."""
    rows = []
    for p in (*SHARES, 0.999):
        first, covers = 0, {}
        for n in (*range(2, 4_000, 2), *range(4_000, 40_000, 50)):
            found = quantile_interval(range(1, n + 1), p)
            if found is not None and found.method == "order statistics":
                first = first or n
                law = stats.binom(n, p)
                covers[n] = float(law.cdf(found.high - 1) - law.cdf(found.low - 1))
        assert min(covers.values()) >= 0.95 - 1e-9
        settled = max((n for n, share in covers.items() if share > 0.96), default=first)
        typical = [f"{100 * covers[n]:.2f}" if n in covers else "open" for n in SIZES]
        rows.append([f"P{100 * p:g}", f"{first:,}", *typical, f"{settled:,}"])
    heads = ["", "both ends from n", *(f"n = {n:,}" for n in SIZES), "never above 96 beyond n"]
    yield Table("Coverage of `quantile_interval`, %, exactly (even n)", heads, rows)


def means(effort: Effort) -> Iterator[Table]:
    """Student's t leans on the normal distribution."""
    repeats = effort.times(10_000)
    rows = []
    for law in LAWS:
        row = [law.name]
        for n in (30, *SIZES):
            hits = sum(encloses(mean_interval(law.draw(effort.random, n)), law.mean) for _ in range(repeats))
            row.append(percent(hits, repeats))
        rows.append(row)
    heads = ["law", *(f"n = {n:,}" for n in (30, *SIZES))]
    yield Table(f"Coverage of `mean_interval`, %, of {repeats:,} samples each", heads, rows)


def shares(effort: Effort) -> Iterator[Table]:
    """All counts there can be, weighed by how likely they are; beside Clopper and Pearson's."""
    rows = []
    for n in (100, 1_000):
        counts = range(n + 1)
        wilson = [share_interval(k, n) for k in counts]
        exact = [stats.binomtest(k, n).proportion_ci(0.95, method="exact") for k in counts]
        for name, truths in (
            ("0.5", [0.5]),
            ("0.9", [0.9]),
            ("0.99", [0.99]),
            ("0.999", [0.999]),
            ("0.9 to 1, mean", np.linspace(0.9, 1, 101)[:-1]),
        ):
            covers = []
            for ends in (wilson, exact):
                inside = [
                    sum(
                        w
                        for e, w in zip(ends, stats.binom.pmf(counts, n, t), strict=True)
                        if e.low <= t <= e.high
                    )
                    for t in truths
                ]
                covers.append(float(np.mean(inside)))
            rows.append([f"{n:,}", name, *(f"{100 * share:.1f}" for share in covers)])
    heads = ["n", "true share", "Wilson (ours)", "Clopper and Pearson"]
    yield Table("Coverage of `share_interval`, %, exactly", heads, rows)


def clusters(effort: Effort) -> Iterator[Table]:
    """Gaps of a request are alike: a lognormal factor for each request, another for each gap."""
    repeats = effort.times(600)
    rows = []
    for between in (0.0, 0.2, 0.5):
        law = stats.lognorm(sqrt(between**2 + 0.3**2))
        for requests in (30, 100, 300):
            hits = {(p, how): 0 for p in SHARES for how in ("single", "whole")}
            for seed in range(repeats):
                lengths = effort.random.integers(20, 81, requests)
                groups = [
                    np.exp(effort.random.normal(0, between) + effort.random.normal(0, 0.3, length))
                    for length in lengths
                ]
                pooled = np.sort(np.concatenate(groups)).tolist()
                for p in SHARES:
                    truth = float(law.ppf(p))
                    hits[p, "single"] += encloses(quantile_interval(pooled, p), truth)
                    whole = clustered_quantile_interval(groups, p, resamples=500, seed=seed)
                    hits[p, "whole"] += encloses(whole, truth)
            rows.append(
                [f"{between:g}", str(requests)]
                + [percent(hits[p, how], repeats) for p in SHARES for how in ("single", "whole")]
            )
    heads = ["sigma between requests (0.3 within)", "requests"]
    heads += [f"P{100 * p:g}, {how}" for p in SHARES for how in ("gaps for independent", "whole requests")]
    yield Table(f"Coverage of `clustered_quantile_interval`, %, of {repeats:,} runs each", heads, rows)


def queues(effort: Effort) -> Iterator[Table]:
    """Latency of 1,000 successive requests to one server with a queue, in its steady state, which is
    exponential."""
    repeats = effort.times(4_000)
    n, blocks, runs = 1_000, 20, 5
    rows = []
    for load in (0.1, 0.5, 0.8, 0.9):
        latency = queue(effort.random, load, n, repeats)
        for p in (0.5, 0.99):
            truth = -log(1 - p) / (1 - load)
            hits = sum(encloses(quantile_interval(np.sort(row).tolist(), p), truth) for row in latency)
            some = latency[: max(20, repeats // 8)]
            in_blocks = sum(
                encloses(clustered_quantile_interval(np.split(row, blocks), p, resamples=500), truth)
                for row in some
            )
            figures = np.quantile(latency, p, axis=1)
            groups = figures[: repeats // runs * runs].reshape(-1, runs)
            # What a run's quantile is on the average: at high load a little less than that of the steady
            # state.
            aim = float(figures.mean())
            of_runs = sum(encloses(mean_interval(group), aim) for group in groups)
            rows.append(
                [
                    f"{load:g}",
                    f"P{100 * p:g}",
                    percent(hits, repeats),
                    percent(in_blocks, len(some)),
                    percent(of_runs, len(groups)),
                    f"{100 * (aim / truth - 1):+.1f} %",
                ]
            )
    heads = [
        "load",
        "",
        "requests for independent",
        "20 stretches of 50",
        "5 runs, Student",
        "bias of one run",
    ]
    yield Table(
        f"Coverage of 95 % intervals where requests queue, %, of {repeats:,} runs of {n:,}", heads, rows
    )


def samples(effort: Effort) -> Iterator[Table]:
    """5.1.4.3: is P99 of 1,000 samples right within 10 % at 95 % confidence?"""
    repeats = effort.times(10_000)
    rows = []
    for law in (NORMAL, *LAWS):
        for p in (0.99, 0.999):
            n, truth = samples_needed(p), law.quantile(p)
            found = [
                np.quantile(law.draw(effort.random, n), p)
                for _ in range(repeats if p == 0.99 else repeats // 5)
            ]
            off = float(np.quantile(np.abs(np.array(found) / truth - 1), 0.95))
            error = 1.96 * sqrt(p * (1 - p)) / law.density(truth) / truth
            rows.append(
                [law.name, f"P{100 * p:g}", f"{n:,}", f"{100 * off:.1f} %", f"{(error / 0.1) ** 2:,.0f}"]
            )
    heads = ["law", "", "n", "95 % of errors within", "n for 10 %"]
    yield Table(f"Error of percentiles with as many samples as 5.1.4.3 asks for, of {repeats:,}", heads, rows)
