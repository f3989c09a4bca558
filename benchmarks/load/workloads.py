"""What a document says of each reference workload, against what is generated.

    .venv/bin/python benchmarks/load/workloads.py [--requests 10000] [--seed 42] [WORKLOAD ...]

Prints Markdown, which `WORKLOADS.md` here holds. `documented` is what seed 000 says (or whom the row names);
`ours` is the figure of the distribution that we draw from, after rounding and cutting; `found` is what the
requests have, with its 95 % interval by theory. A row is marked where the interval does not hold `ours` (of a
hundred right ones five) or `documented`. WORKLOAD may be any name that `llmtap replay` takes and that claims
something, `conversation:FILE` for one.
"""

import argparse
import sys
import time
from typing import Any

from llmtap.errors import ConfigError
from llmtap.workload.claims import ClaimFinding, check
from llmtap.workload.registry import DEFAULT_SEED, REFERENCE, report_of, workload_named

HEADER = "| figure | documented | where | ours | found | 95 % interval | |\n|---|---|---|---|---|---|---|"


def shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if abs(value) < 1 and value else f"{value:,.1f}".removesuffix(".0")


def row(x: ClaimFinding) -> str:
    marks = []
    if x.expected is not None and not x.covers(x.expected):
        marks.append("not ours")
    if x.claim.documented is not None and not x.covers(x.claim.documented):
        marks.append("not as documented")
    interval = "-" if x.low is None else f"{shown(x.low)} to {shown(x.high)}"
    cells = (
        x.claim.name, shown(x.claim.documented), x.claim.source, shown(x.expected), shown(x.found), interval,
        ", ".join(marks),
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def table(name: str, count: int, seed: int) -> str:
    workload: Any = workload_named(name, "WORKLOAD")
    begun = time.perf_counter()
    told = report_of(workload, workload.requests(count, seed), seed)
    seconds = time.perf_counter() - begun
    digest = told["sha256"][:16]
    lines = [
        f"## {name}",
        "",
        f"{told['about']}.",
        "",
        f"{count:,} requests, seed {seed}, sha256 `{digest}`, made in {seconds:.2f} s.",
        "",
        HEADER,
        *map(row, check(workload, count, seed)),
        "",
    ]
    if told["deviations"]:
        lines += ["Where it is not the draft's word:", ""]
        lines += [f"- {d['section']} says {d['says']}. Here: {d['here']}." for d in told["deviations"]]
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "workloads", nargs="*", metavar="WORKLOAD", help="names; all reference workloads if none"
    )
    parser.add_argument("--requests", type=int, default=10_000, help="requests of each")
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED)
    asked = parser.parse_args()
    if asked.requests < 2:
        parser.error("--requests: two at least")
    try:
        for name in asked.workloads or REFERENCE:
            print(table(name, asked.requests, asked.seed))
    except ConfigError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
