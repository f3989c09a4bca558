"""What a document says of each reference workload, against what is generated.

    .venv/bin/python benchmarks/load/workloads.py [--requests 10000] [--seed 42] [WORKLOAD ...]

Prints Markdown, which `WORKLOADS.md` here holds. `documented` is what seed 000 says (or whom the row names);
`ours` is the figure of the distribution that we draw from, after rounding and cutting; `found` is what the
requests have, with its 95 % interval by theory. A row is marked where the interval does not hold `ours` (of a
hundred right ones five) or `documented`. WORKLOAD may be any name that `llmtap replay` takes and that claims
something, `conversation:FILE` for one.

The interval of a mean is 1.96 standard errors, of a percentile the values at the ranks between which the true
percentile lies (binomial, which needs no distribution), of a share binomial. Extremes have none.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any, Final, Protocol

from llmtap.errors import ConfigError
from llmtap.metrics.statistics import percentile
from llmtap.workload.composed import Claim
from llmtap.workload.lengths import Fixed, Lengths, mean_of
from llmtap.workload.plan import NO_CONTEXT, Sharing, WorkloadPlan, zipf_shares
from llmtap.workload.registry import DEFAULT_SEED, REFERENCE, report_of, workload_named

_Z: Final = 1.959964
"""Two-sided 95 % of the standard normal."""
_PERCENTS: Final = {"p5": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p90": 0.9, "p95": 0.95, "p99": 0.99}

_TINY: Final = 1e-12
"""The share at which a distribution has come to its bounds."""


@dataclass(frozen=True, slots=True)
class ClaimFinding:
    """What was found of a claim; `low` and `high` are its 95 % interval."""

    claim: Claim
    n: int
    found: float
    low: float | None = None
    high: float | None = None
    expected: float | None = None
    """By the distribution that is drawn from; None where only data can say."""

    def covers(self, value: float) -> bool:
        """Whether a value is what was found, as far as a sample can tell."""
        if self.low is None or self.high is None:
            return value == self.found
        # Lengths are whole: a percentile of them may be anything that rounds to it.
        half = 0.5 if self.claim.statistic in _PERCENTS else 0.0
        return self.low - half <= value <= self.high + half


class Checked(Protocol):
    """A workload of which a document says something."""

    @property
    def claims(self) -> tuple[Claim, ...]: ...

    @property
    def input(self) -> Lengths | None:
        """Of messages; None where data has them."""
        ...

    @property
    def output(self) -> Lengths | None: ...

    @property
    def sharing(self) -> Sharing | None: ...

    def plan(self, count: int, seed: int) -> WorkloadPlan: ...


def check(workload: Checked, count: int, seed: int) -> list[ClaimFinding]:
    """Each claim of a workload, compared with a sample of its requests."""
    plan = workload.plan(count, seed)
    return [replace(_finding(claim, plan), expected=_expected(claim, workload)) for claim in workload.claims]


def _expected(claim: Claim, workload: Checked) -> float | None:
    """The figure of the distribution itself, after rounding and cutting."""
    lengths: Lengths | None = None
    match claim.column:
        case "message":
            lengths = workload.input
        case "output":
            lengths = workload.output
        case "sharing":
            return workload.sharing.fraction if workload.sharing else None
        case "context" if claim.statistic.startswith("share"):
            rank = int(claim.statistic.removeprefix("share")) - 1
            sharing = workload.sharing
            return zipf_shares(sharing.contexts, sharing.zipf)[rank] if sharing else None
        case "context":
            # A few are drawn, once for all requests: the bounds are no more than bounds.
            lengths = workload.sharing.tokens_drawn if workload.sharing else None
            return (
                None
                if claim.statistic not in ("min", "max") or not isinstance(lengths, Fixed)
                else lengths.tokens
            )
    if lengths is None:
        return None
    match claim.statistic:
        case "mean":
            return mean_of(lengths)
        case "min":
            return lengths.quantile(_TINY)
        case "max":
            return lengths.quantile(1 - _TINY)
    if claim.statistic in _PERCENTS:
        return lengths.quantile(_PERCENTS[claim.statistic])
    wanted, steps = int(claim.statistic.removeprefix("share")), 1_000
    return sum(lengths.quantile((i + 0.5) / steps) == wanted for i in range(steps)) / steps


def _finding(claim: Claim, plan: WorkloadPlan) -> ClaimFinding:
    if claim.statistic.startswith("share"):
        return _share(claim, plan)
    match claim.column:
        case "message":
            values: Sequence[int] = plan.messages
        case "output":
            values = plan.requests.output
        case _:
            values = plan.lengths
    ordered = sorted(values)
    n = len(ordered)
    match claim.statistic:
        case "min":
            return ClaimFinding(claim, n, ordered[0])
        case "max":
            return ClaimFinding(claim, n, ordered[-1])
        case "mean":
            mean, error = fmean(ordered), _Z * stdev(ordered) / math.sqrt(n)
            return ClaimFinding(claim, n, mean, mean - error, mean + error)
    p = _PERCENTS[claim.statistic]
    around = _Z * math.sqrt(n * p * (1 - p))
    low, high = math.floor(n * p - around), math.ceil(n * p + around)
    found = percentile(ordered, p)
    assert found is not None
    return ClaimFinding(claim, n, found, ordered[max(0, low)], ordered[min(n - 1, high)])


def _share(claim: Claim, plan: WorkloadPlan) -> ClaimFinding:
    wanted = int(claim.statistic.removeprefix("share") or 0)
    among = [context for context in plan.contexts if context != NO_CONTEXT]
    match claim.column:
        case "sharing":
            n, k = len(plan.contexts), len(among)
        case "context":
            n, k = len(among), among.count(wanted - 1)
        case "message":
            n, k = len(plan.messages), plan.messages.count(wanted)
        case "output":
            n, k = len(plan.messages), plan.requests.output.count(wanted)
    share = k / n
    error = _Z * math.sqrt(share * (1 - share) / n)
    return ClaimFinding(claim, n, share, share - error, share + error)


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
