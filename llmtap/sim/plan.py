"""When the engine makes the tokens of an answer: the seam between whatever schedules and whatever sends.

A `Plan` is the due time of each token, in ns from when the request was accepted. For now a fixed schedule
makes it: token i is due at `ttft + i * itl`, counted from the request and not from the token before, so that
lateness does not add up.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, chain, repeat
from typing import Protocol

from llmtap.sim.options import SimOptions

__all__ = ["FixedSchedule", "Plan", "Planner", "Work"]


@dataclass(frozen=True, slots=True)
class Work:
    """What a scheduler must know of an answer."""

    prompt_tokens: int
    output_tokens: int
    options: SimOptions
    """With what the request asked for."""


@dataclass(frozen=True, slots=True)
class Plan:
    """When the tokens of one answer are made."""

    due_ns: Iterator[int]
    """From acceptance, never falling, as many as there are tokens or more. Read as the answer goes on."""


class Planner(Protocol):
    """Whoever knows when tokens are made."""

    def plan(self, work: Work, chance: random.Random) -> Plan:
        """The plan of one answer; `chance` is the answer's own, so that it depends on no other."""
        ...


class FixedSchedule:
    """An engine without a queue, as fast for a thousand as for one."""

    def plan(self, work: Work, chance: random.Random) -> Plan:
        options = work.options
        ttft_ns = round(options.ttft * _vary(options.spread, chance))
        itl_ns = round(options.itl * _vary(options.spread, chance))
        sigma = options.pacing.jitter
        if not sigma:
            gaps: Iterator[int] = repeat(itl_ns)
        else:
            # The mean of a lognormal is exp(mu + sigma^2 / 2): with this mu it is 1, and no rate changes.
            mu = -sigma * sigma / 2
            gaps = (round(itl_ns * chance.lognormvariate(mu, sigma)) for _ in repeat(None))
        return Plan(accumulate(chain((ttft_ns,), gaps)))


def _vary(spread: float, chance: random.Random) -> float:
    return 1 + chance.uniform(-spread, spread)
