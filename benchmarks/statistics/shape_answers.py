"""Modes and tails of laws whose shape is known."""

from collections.abc import Callable, Iterator
from math import sqrt

import numpy as np
from laws import BIMODAL, EXPONENTIAL, LOGNORMAL, NORMAL, PARETO, UNIFORM, WIDE, Values
from tables import Effort, Table, percent

from llmtap.metrics.modality import DIP_SHARES, DIP_SIZES, dip, dip_test, modes, tail

SIZES = (50, 200, 1_000, 5_000, 20_000)

Draw = Callable[[int], Values]


def shaped(random: np.random.Generator) -> Iterator[tuple[str, Draw]]:
    """Laws with one mode, and with two that are harder and harder to see."""
    for law in (UNIFORM, NORMAL, EXPONENTIAL, LOGNORMAL, BIMODAL):
        yield law.name, lambda n, law=law: law.draw(random, n)
    for apart, share in ((2.5, 0.5), (3, 0.5), (4, 0.5), (4, 0.1), (6, 0.1), (6, 0.02)):
        name = f"two normals {apart:g} sd apart, {100 * share:g} % in the second"
        yield (
            name,
            lambda n, apart=apart, share=share: random.normal(0, 1, n) + apart * (random.random(n) < share),
        )


def dips(effort: Effort) -> Iterator[Table]:
    """How often one mode is taken for several, and several are seen."""
    rounded = ("normal, rounded to 0.5 sd", lambda n: np.round(2 * effort.random.normal(0, 1, n)) / 2)
    rows = []
    for name, draw, grain in (
        *((name, draw, 0.0) for name, draw in (*shaped(effort.random), rounded)),
        ("the same, with `grain=0.5`", rounded[1], 0.5),
    ):
        row = [name]
        for n in SIZES:
            repeats = effort.times(1_000 if n <= 1_000 else 300)
            found = (dip_test(draw(n), grain=grain, seed=i) for i in range(repeats))
            row.append(percent(sum(not one.unimodal for one in found), repeats))
        rows.append(row)
    yield Table("`dip_test` says several modes at 0.05, %", ["law", *map("n = {:,}".format, SIZES)], rows)


def places(effort: Effort) -> Iterator[Table]:
    """How many places `modes` names, whatever the dip says."""
    rows = []
    for name, draw in shaped(effort.random):
        row = [name]
        for n in SIZES:
            repeats = effort.times(300)
            row.append(percent(sum(len(modes(draw(n))) > 1 for _ in range(repeats)), repeats))
        rows.append(row)
    yield Table("`modes` names several places, %", ["law", *map("n = {:,}".format, SIZES)], rows)


def tails(effort: Effort) -> Iterator[Table]:
    """What `tail` calls tails of known laws."""
    rows = []
    for law in (UNIFORM, NORMAL, EXPONENTIAL, LOGNORMAL, WIDE, PARETO):
        for n in (1_000, 10_000):
            repeats = effort.times(400)
            found = [tail(law.draw(effort.random, n)) for _ in range(repeats)]
            kinds = [
                percent(sum(one.kind == kind for one in found), repeats)
                for kind in ("light", "exponential", "heavy")
            ]
            ratio = law.quantile(0.99) / law.quantile(0.5)
            shape = float(np.median([one.shape for one in found]))
            rows.append([law.name, f"{n:,}", f"{ratio:.2f}", f"{shape:+.2f}", *kinds])
    heads = ["law", "n", "P99/P50", "shape, median", "light, %", "exponential, %", "heavy, %"]
    yield Table("`tail`", heads, rows)


def dip_table(effort: Effort) -> None:
    """Quantiles of sqrt(n) times the dip of n uniform values, as llmtap/metrics/modality.py has them."""
    for n in DIP_SIZES:
        repeats = effort.times(30_000 if n <= 1_000 else 20_000)
        found = [sqrt(n) * dip(effort.random.random(n)) for _ in range(repeats)]
        row = ", ".join(f"{value:.4f}" for value in np.quantile(found, DIP_SHARES))
        print(f"    ({row}),  # {n}: {repeats:,}", flush=True)
