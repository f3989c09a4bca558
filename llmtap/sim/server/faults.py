"""What befalls a request, drawn once when it comes: a fault, a refusal, a block midway. Pure."""

import random
from dataclasses import dataclass
from typing import Final

from llmtap.sim.server.options import FaultKind, RefusalKind, SimOptions

__all__ = ["REFUSAL", "Mishaps", "draw"]

REFUSAL: Final = "I'm sorry, but I can't help with that."
"""What the model says when it refuses."""


@dataclass(frozen=True, slots=True)
class Mishaps:
    """Of one request."""

    fault: FaultKind | None = None
    refusal: RefusalKind | None = None
    block_after: int | None = None


def draw(options: SimOptions, chance: random.Random) -> Mishaps:
    """Always three draws, so that a rate that changes leaves the other fates alone."""
    at = (chance.random(), chance.random(), chance.random())
    fault: FaultKind | None = None
    reached = 0.0
    for kind, rate in options.faults.rates():
        reached += rate
        if at[0] < reached:
            fault = kind
            break
    g = options.guardrails
    return Mishaps(
        fault=fault,
        refusal=g.refusal if at[1] < g.refusal_rate else None,
        block_after=g.block_after if at[2] < g.block_rate else None,
    )
