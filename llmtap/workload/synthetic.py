"""Built-in workloads of `llmtap sim run`: lognormal lengths, exponential or gamma gaps between arrivals.

`draw` returns requests with arrivals; `Simulated` is the same as a `Workload` without them, for
`registry.py`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Final

from llmtap.workload.composed import Composed, PlannedWorkload, Written
from llmtap.workload.lengths import LogNormal
from llmtap.workload.plan import PlannedTurn, Speaker, WorkloadPlan, assemble
from llmtap.workload.prompts.prompt import ElasticSource
from llmtap.workload.prompts.prose import ProseWords
from llmtap.workload.requests import Requests

_P95: Final = 1.6448536269514722


@dataclass(frozen=True, slots=True)
class SyntheticLengths:
    """Lognormal lengths in tokens, at least 1 and at most `longest`."""

    median: float
    sigma: float
    longest: int

    @classmethod
    def by_p95(cls, median: float, p95: float, longest: int) -> "SyntheticLengths":
        return cls(median, math.log(p95 / median) / _P95, longest)

    @classmethod
    def by_mean(cls, median: float, mean: float, longest: int) -> "SyntheticLengths":
        """The mean of a lognormal is its median times exp(sigma^2 / 2)."""
        return cls(median, math.sqrt(2 * math.log(mean / median)), longest)

    def drawn(self, random: Random) -> int:
        return max(1, min(self.longest, round(self.median * math.exp(self.sigma * random.gauss(0, 1)))))


@dataclass(frozen=True, slots=True)
class Synthetic:
    about: str
    input: SyntheticLengths
    output: SyntheticLengths
    rate_rps: float = 1.0
    gap_cv: float = 1.0
    """Coefficient of variation of the gaps; 1 is Poisson."""


WORKLOADS: Final = {
    "chat": Synthetic(
        "chats: input of median 156 and p95 892, output of 234 and 789 (IETF draft, A.3); Poisson arrivals",
        SyntheticLengths.by_p95(156, 892, 8_192),
        SyntheticLengths.by_p95(234, 789, 4_096),
    ),
    "long-chat": Synthetic(
        "chats with prompts of 1,600 tokens on average, outputs as in chat; Poisson arrivals",
        SyntheticLengths.by_mean(1_400, 1_600, 8_192),
        SyntheticLengths.by_p95(234, 789, 4_096),
    ),
    "bursty": Synthetic(
        "as in BurstGPT: input of median 251 and mean 611, output of 34 and 123, gaps with a CV of 13.28",
        SyntheticLengths.by_mean(251, 611, 16_000),
        SyntheticLengths.by_mean(34, 123, 4_096),
        rate_rps=0.27,
        gap_cv=13.28,
    ),
}


def draw(workload: Synthetic, count: int, seed: int) -> Requests:
    # One generator per column: changing one distribution leaves the other columns as they were.
    gaps, given, made = (Random(f"{seed}/{what}") for what in ("gaps", "input", "output"))
    requests = Requests()
    for at_ns in _arrivals(workload, count, gaps):
        requests.arrival_ns.append(at_ns)
        requests.input.append(workload.input.drawn(given))
        requests.output.append(workload.output.drawn(made))
    return requests


def _arrivals(workload: Synthetic, count: int, random: Random) -> Iterator[int]:
    mean_ns = 1e9 / workload.rate_rps
    shape = workload.gap_cv**-2
    at_ns = 0.0
    for _ in range(count):
        yield round(at_ns)
        at_ns += mean_ns * random.gammavariate(shape, 1 / shape)


@dataclass(frozen=True, slots=True)
class Simulated(PlannedWorkload):
    """One of WORKLOADS as a Workload; its arrivals are only in its description."""

    name: str
    drawn: Synthetic

    def describe(self) -> Mapping[str, object]:
        given, made = (
            LogNormal(mu=math.log(one.median), sigma=one.sigma, max=one.longest)
            for one in (self.drawn.input, self.drawn.output)
        )
        cv = self.drawn.gap_cv
        about = {
            "about": self.drawn.about,
            "source": "llmtap sim run",
            "generation": "Python's random.Random, its gauss, one generator for each column: SEED/COLUMN",
            "arrivals": "poisson" if cv == 1 else f"gamma:cv={cv:g}",
            "rate_rps": self.drawn.rate_rps,
        }
        return Composed(self.name, given, made, about=about).describe()

    def plan(self, count: int, seed: int) -> WorkloadPlan:
        rows = draw(self.drawn, count, seed)
        turns = (PlannedTurn(given, made) for given, made in zip(rows.input, rows.output, strict=True))
        return assemble(turns, count, seed)

    def source(self, plan: WorkloadPlan, seed: int) -> ElasticSource:
        return Speaker(plan, Written(ProseWords(), plan, seed))
