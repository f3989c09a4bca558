"""Differential fuzzing of parsers: `make fuzz` runs each target in full, `make test` for a moment.

    make fuzz                                      # every target, 10 million inputs each
    make fuzz FUZZ=framing INPUTS=1000000 SEED=7

A target makes inputs from a seed and checks one at a time. A failure names the seed and the input's number,
and prints the input.
"""

import argparse
import time
from collections.abc import Callable
from random import Random
from typing import Final

from tests.native.targets import FULL, TARGETS

REPORT_S: Final = 30.0
"""Seconds between two lines of progress."""
BETWEEN_LOOKS: Final = 4_096
"""Inputs between two looks at the clock."""


def fuzz(name: str, inputs: int, seed: int, report: Callable[[str], None] = lambda line: None) -> None:
    """Check a target's inputs. Raises AssertionError for the first one on which implementations differ."""
    target = TARGETS[name](Random(seed))
    start = told = time.monotonic()
    for number in range(inputs):
        case = target.case()
        try:
            target.check(case)
        except Exception as error:
            raise AssertionError(f"{name}, seed {seed}, input {number}: {error!r}\n{case!r}") from error
        if not number % BETWEEN_LOOKS and (now := time.monotonic()) - told >= REPORT_S:
            told = now
            report(f"{name}: {number:,} of {inputs:,} inputs, {now - start:.0f} s")
    report(f"{name}: {inputs:,} inputs, seed {seed}, {time.monotonic() - start:.0f} s: ok")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"some of {', '.join(TARGETS)}")
    parser.add_argument("--inputs", type=int, default=FULL, help="inputs for each target")
    parser.add_argument("--seed", type=int, default=1, help="random seed")
    options = parser.parse_args()
    if unknown := set(options.targets) - set(TARGETS):
        parser.error(f"unknown target {', '.join(sorted(unknown))}; known: {', '.join(TARGETS)}")
    for name in options.targets or TARGETS:
        fuzz(name, options.inputs, options.seed, lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()
