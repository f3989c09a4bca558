"""How long do prompts of exact length take to prepare, by which tokenizer, and how often is it asked?

    .venv/bin/python benchmarks/load/prompts.py [--prompts 10000] [--tokens 500]
        [--tokenizer sim --tokenizer tiktoken:cl100k_base --tokenizer MODEL_FOLDER ...] [--trace FILE]
        [--rounds 3] [--json FILE]

Prepares bodies as `llmtap replay` does, into a file without a name. Every prompt is counted by its tokenizer;
the run fails if one of them is not as long as it was to be by a second counting, one by one. Opening a
tokenizer is told apart. With --trace the lengths and the shared blocks are those of its first rows.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from llmtap.errors import ConfigError
from llmtap.load.bodies import BodyMaker, prepare
from llmtap.load.options import BodyOptions
from llmtap.workload.prompts.fitting import RowPrompts
from llmtap.workload.prompts.prompt import Prompt
from llmtap.workload.prompts.text import Words
from llmtap.workload.prompts.tokenizer import TokenCounter, Tokenizer, load_counter
from llmtap.workload.requests import Requests
from llmtap.workload.trace import load_trace

CHECKED = 200
"""Prompts that are counted again."""


class Counted:
    """A counter that counts its countings."""

    def __init__(self, inner: TokenCounter) -> None:
        self._inner = inner
        self.prompts = 0

    @property
    def method(self) -> str:
        return self._inner.method

    @property
    def tokenizer(self) -> Tokenizer:
        return self._inner.tokenizer

    @property
    def words(self) -> Words:
        return self._inner.words

    def count(self, prompts: Sequence[Prompt]) -> list[int]:
        self.prompts += len(prompts)
        return self._inner.count(prompts)

    def overhead(self, like: Prompt) -> tuple[int, int]:
        return self._inner.overhead(like)


def measure(requests: Requests, name: str, rounds: int) -> dict[str, Any]:
    """Figures of one tokenizer; times are the median of the rounds, in seconds."""
    began = time.perf_counter()
    counter = load_counter(name, chat=True, place="--tokenizer")
    opened_s = time.perf_counter() - began
    maker = BodyMaker(BodyOptions(model="m"))
    walls, cpus = [], []
    counted = Counted(counter)
    for seed in range(rounds):
        counted.prompts = 0
        source = RowPrompts(requests, counted, seed=seed)
        wall, cpu = time.perf_counter(), time.process_time()
        with prepare(requests, source, maker) as prepared:
            walls.append(time.perf_counter() - wall)
            cpus.append(time.process_time() - cpu)
            lengths, total = prepared.lengths, prepared.bytes_total
    countings = counted.prompts / len(requests)
    for row in range(0, len(requests), max(1, len(requests) // CHECKED)):
        prompt, fitted = source.prompts([row])[0]
        if counter.count([prompt]) != [fitted.tokens]:
            sys.exit(f"{name}: row {row} has other tokens than it was said to have")
    wall = statistics.median(walls)
    return {
        "tokenizer": Path(name).name if os.path.sep in name else name,
        "way": counter.method,
        "words": counter.words.distinct,
        "opened_s": opened_s,
        "prepared_s": wall,
        "prepared_s_all": walls,
        "cpu_s": statistics.median(cpus),
        "prompts_per_s": len(requests) / wall,
        "tokens_per_s": sum(requests.input) / wall,
        "countings_per_prompt": countings,
        "exact": lengths.exact,
        "n": lengths.n,
        "missed": [lengths.missed_min, lengths.missed_max],
        "bytes": total,
    }


def rows_of(args: argparse.Namespace) -> Requests:
    if args.trace:
        return load_trace(args.trace, count=args.prompts).requests
    n = args.prompts
    return Requests(array("q", bytes(8 * n)), array("q", [args.tokens]) * n, array("q", [100]) * n)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=500, help="of each prompt")
    parser.add_argument(
        "--tokenizer", action="append", help="tiktoken:NAME, a file, a model's folder, or sim"
    )
    parser.add_argument("--trace", help="lengths and blocks from a trace")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="figures go here, too")
    args = parser.parse_args()

    try:
        requests = rows_of(args)
        found = [measure(requests, name, args.rounds) for name in args.tokenizer or ["sim"]]
    except ConfigError as exc:
        parser.error(str(exc))
    table = Table(
        title=f"{len(requests):,} prompts, {sum(requests.input):,} tokens; "
        f"Python {platform.python_version()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}"
    )
    for column in (
        "tokenizer",
        "way",
        "open s",
        "prepare s",
        "CPU s",
        "prompts/s",
        "countings",
        "exact",
        "MB",
    ):
        table.add_column(column, justify="left" if column in ("tokenizer", "way") else "right")
    for one in found:
        table.add_row(
            one["tokenizer"],
            one["way"],
            f"{one['opened_s']:.2f}",
            f"{one['prepared_s']:.2f}",
            f"{one['cpu_s']:.2f}",
            f"{one['prompts_per_s']:,.0f}",
            f"{one['countings_per_prompt']:.2f}",
            f"{one['exact']:,} of {one['n']:,}",
            f"{one['bytes'] / 1e6:.0f}",
        )
    Console(width=140).print(table)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
