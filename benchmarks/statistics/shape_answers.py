"""Modes and tails of laws whose shape is known."""

from collections.abc import Callable, Iterator

import numpy as np
from laws import BIMODAL, EXPONENTIAL, LOGNORMAL, NORMAL, PARETO, UNIFORM, WIDE, Values
from tables import Effort, Table, percent

from llmtap.metrics.intervals import modes, tail

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


def places(effort: Effort) -> Iterator[Table]:
    """How many places `modes` names."""
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
