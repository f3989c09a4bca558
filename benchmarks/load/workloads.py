"""What a document says of each reference workload, against what is generated.

    .venv/bin/python benchmarks/load/workloads.py [--requests 10000] [--seed 42] [WORKLOAD ...]

Prints Markdown, as in `WORKLOADS.md`. `documented` is the value of the IETF draft or the named source;
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any, Final, Literal, Protocol

from llmtap.errors import ConfigError
from llmtap.metrics.statistics import percentile
from llmtap.workload.ietf import TARGETS
from llmtap.workload.lengths import Fixed, Lengths, as_lengths, mean_of
from llmtap.workload.plan import NO_CONTEXT, Sharing, WorkloadPlan, zipf_shares
from llmtap.workload.registry import DEFAULT_SEED, REFERENCE, report_of, workload_named

_Z: Final = 1.959964
"""Two-sided 95 % of the standard normal."""
_PERCENTS: Final = {"p5": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p90": 0.9, "p95": 0.95, "p99": 0.99}

_TINY: Final = 1e-12
"""The share at which a distribution has come to its bounds."""


Column = Literal["message", "output", "sharing", "context"]
"""`message`: tokens of the prompt without its context; `sharing`: whether it has one; `context`: its
tokens."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A documented figure of a workload."""

    column: Column
    statistic: str
    """mean, min, max, a percentile such as p95; `share` of requests with a context, `share K` of the K-th
    context among them, `share N` of messages or outputs of N tokens."""
    documented: float | None
    """None if the document implies it without a figure."""
    source: str

    @property
    def name(self) -> str:
        return f"{self.column} {self.statistic}"


def claims_of(column: Column, source: str, figures: Mapping[str, float | None]) -> tuple[Claim, ...]:
    """Return the claims of a column that a source documents, by statistic."""
    return tuple(Claim(column, statistic, figure, source) for statistic, figure in figures.items())


_OF_CODE: Final = (
    *claims_of("output", "4.3.2.4: exp(mu)", {"p50": None}),
    *claims_of("output", "4.3.2.4", {"p95": None, "mean": None}),
    *claims_of("sharing", "A.4.2", {"share": 0.8}),
    *claims_of("context", "A.4.2: at least 512", {"min": None}),
    *claims_of("context", "A.4.2: at most 1,024", {"max": None}),
    *claims_of("context", "A.4.2: Zipf, s=1.5", {"share 1": None, "share 2": None, "share 10": None}),
)
_AZURE: Final = {
    "p5": 76,
    "p25": 577.75,
    "p50": 1_452.5,
    "p75": 2_692,
    "p90": 5_025,
    "p95": 7_375.35,
    "p99": 7_436,
}
_OF_CHATS: Final = (
    *claims_of("message", "A.3.2", {"p50": 156, "p95": 892, "p99": 2_134}),
    *claims_of("output", "A.3.2", {"p50": 234, "p95": 789, "p99": 1_567}),
)
_SYSTEM_PROMPT: Final = (
    *claims_of("sharing", "4.3.2.3", {"share": 0.5}),
    *claims_of("context", "4.3.2.3", {"min": 200}),
)
_LONG: Final = claims_of("output", "A.5.2", {"min": 256, "max": 256})
CLAIMS: Final[dict[str, tuple[Claim, ...]]] = {
    "synthetic-uniform": (
        *claims_of("message", "A.1.1", {"min": 128, "max": 512, "mean": 320}),
        *claims_of("output", "A.1.2", {"min": 64, "max": 256, "mean": 160}),
    ),
    "synthetic-skewed": (
        *claims_of("message", "A.2.1", {"min": 32, "max": 4_096, "p50": 245, "mean": 405}),
        *claims_of("output", "A.2.2", {"min": 16, "max": 2_048}),
        *claims_of("output", "4.3.2.2: exp(mu)", {"p50": None}),
        *claims_of("output", "A.2.2", {"mean": None}),
    ),
    "conversation": (*_OF_CHATS, *_SYSTEM_PROMPT),
    "code-completion": (*claims_of("message", "Azure code trace 2023", _AZURE), *_OF_CODE),
    "long-context": (
        *claims_of("message", "A.5.1", {**{f"share {target}": 0.2 for target in TARGETS}, "mean": None}),
        *_LONG,
    ),
    "long-context-uniform": (
        *claims_of("message", "4.3.2.5", {"mean": None, "p5": None, "p95": None}),
        *_LONG,
    ),
    "conversation:FILE": (*_OF_CHATS, *_SYSTEM_PROMPT),
    "code-completion:FILE": _OF_CODE,
}
"""By the names of workloads; those of files have a colon."""


def claims_for(name: str) -> tuple[Claim, ...]:
    """The claims of a workload by the name that it was asked for."""
    kind, colon, _ = name.partition(":")
    return CLAIMS.get(f"{kind}:FILE" if colon else name, ())


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
    def input(self) -> Lengths | None:
        """Of messages; None where data has them."""
        ...

    @property
    def output(self) -> Lengths | None: ...

    @property
    def sharing(self) -> Sharing | None: ...

    def plan(self, count: int, seed: int) -> WorkloadPlan: ...


def check(workload: Checked, claims: Sequence[Claim], count: int, seed: int) -> list[ClaimFinding]:
    """Each claim of a workload, compared with a sample of its requests."""
    plan = workload.plan(count, seed)
    return [replace(_finding(claim, plan), expected=_expected(claim, workload)) for claim in claims]


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
            lengths = as_lengths(workload.sharing.tokens) if workload.sharing else None
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
        x.claim.name,
        shown(x.claim.documented),
        x.claim.source,
        shown(x.expected),
        shown(x.found),
        interval,
        ", ".join(marks),
    )
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
        *map(row, check(workload, claims_for(name), count, seed)),
        "",
    ]
    if told["deviations"]:
        lines += ["Deviations from the draft:", ""]
        lines += [f"- Draft, {d['section']}: {d['says']}. llmtap: {d['here']}." for d in told["deviations"]]
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
