"""Do our intervals, tests and shapes say what they claim? Samples whose truth is known, many times over.

    .venv/bin/python benchmarks/statistics/known_answers.py [--only NAME,..] [--scale 1] [--seed 42]

Samples are drawn from a law, the function under test is called as a report would call it, and its answer is
held against what is true of that law. `--scale 0.1` draws a tenth as often. README.md has the last results,
and what follows from them.
"""

import argparse
import platform
import time
from collections.abc import Callable, Iterator

import comparison_answers as comparisons
import interval_answers as intervals
import numpy as np
import scipy
import shape_answers as shapes
from tables import Effort, Table

TABLES: dict[str, Callable[[Effort], Iterator[Table]]] = {
    "quantiles": intervals.quantiles,
    "exact-quantiles": intervals.exact_quantiles,
    "means": intervals.means,
    "shares": intervals.shares,
    "clusters": intervals.clusters,
    "queues": intervals.queues,
    "samples": intervals.samples,
    "false-positives": comparisons.false_positives,
    "shifts": comparisons.shifts,
    "powers": comparisons.powers,
    "places": shapes.places,
    "tails": shapes.tails,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(TABLES), help=f"of {', '.join(TABLES)}")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=42)
    asked = parser.parse_args()
    if unknown := set(asked.only.split(",")) - set(TABLES):
        parser.error(f"no table is called {', '.join(sorted(unknown))}")
    print(f"Python {platform.python_version()}, NumPy {np.__version__}, SciPy {scipy.__version__}\n")
    for name in asked.only.split(","):
        began = time.monotonic()
        # Each has its own luck, so that it comes out the same alone.
        effort = Effort(asked.scale, np.random.default_rng([asked.seed, list(TABLES).index(name)]))
        for table in TABLES[name](effort):
            print(table, end="\n\n", flush=True)
        print(f"({name}: {time.monotonic() - began:.0f} s)\n", flush=True)


if __name__ == "__main__":
    main()
