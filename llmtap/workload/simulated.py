"""The workloads that `sim run` draws, as workloads with texts: the same rows for the same seed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from llmtap.workload.composed import Composed, Written, check_rows
from llmtap.workload.lengths import LogNormal
from llmtap.workload.plan import PlannedTurn, Speaker, WorkloadPlan, assemble
from llmtap.workload.prompts.prompt import ElasticSource
from llmtap.workload.prompts.prose import ProseWords
from llmtap.workload.requests import Requests
from llmtap.workload.synthetic import Synthetic, draw

__all__ = ["Simulated"]


@dataclass(frozen=True, slots=True)
class Simulated:
    """One of `synthetic.WORKLOADS`, without its arrivals: they are in its description."""

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

    def requests(self, count: int, seed: int) -> Requests:
        return self.plan(count, seed).requests

    def prompts(self, requests: Requests, seed: int) -> ElasticSource:
        """`requests` are the first of `requests(count, seed)`. Raises ValueError where they are not."""
        plan = self.plan(len(requests), seed)
        check_rows(plan.requests, requests)
        return Speaker(plan, Written(ProseWords(), plan, seed))
