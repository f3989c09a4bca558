"""Conversations: how many turns, how long somebody thinks before the next one.

A turn's prompt is all that was said before it, and a new message: its length is the context's, plus every
earlier message and answer, plus the message. What the model is taken to have said is text of the planned
length, not what a server really answered, so that prompts are the same in each run. A turn waits for the
answer before it and then thinks (`Requests.after`, `Requests.think_ns`); only first turns have an arrival.
"""

import math
from collections.abc import Mapping
from random import Random
from statistics import NormalDist
from typing import Annotated, Any

import msgspec

from llmtap.units import Duration, to_seconds
from llmtap.workload.lengths import Fixed, Lengths, described, drawn, uniform_draw

__all__ = ["Conversations", "Think", "ThinkExponential", "ThinkFixed", "ThinkLogNormal"]

_P95 = NormalDist().inv_cdf(0.95)


class _Think(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="distribution"):
    """Times that people take."""


class ThinkFixed(_Think, frozen=True, kw_only=True, tag="fixed"):
    """Always the same."""

    time: Duration

    def quantile_ns(self, p: float) -> int:
        return int(self.time)

    def describe(self) -> Mapping[str, Any]:
        return {"distribution": "fixed", "time": to_seconds(self.time), "unit": "s"}


class ThinkExponential(_Think, frozen=True, kw_only=True, tag="exponential"):
    """Without memory."""

    mean: Duration

    def quantile_ns(self, p: float) -> int:
        return round(-self.mean * math.log1p(-p))

    def describe(self) -> Mapping[str, Any]:
        return {"distribution": "exponential", "mean": to_seconds(self.mean), "unit": "s"}


class ThinkLogNormal(_Think, frozen=True, kw_only=True, tag="lognormal"):
    """Lognormal, by its median and 95th percentile."""

    median: Duration
    p95: Duration

    def __post_init__(self) -> None:
        if not 0 < self.median <= self.p95:
            raise ValueError("a lognormal needs a median above 0 and a p95 that is no less")

    def quantile_ns(self, p: float) -> int:
        sigma = math.log(self.p95 / self.median) / _P95
        return round(self.median * math.exp(sigma * NormalDist().inv_cdf(p)))

    def describe(self) -> Mapping[str, Any]:
        told = {"median": to_seconds(self.median), "p95": to_seconds(self.p95)}
        return {"distribution": "lognormal", **told, "unit": "s"}


Think = ThinkFixed | ThinkExponential | ThinkLogNormal


class Conversations(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What makes requests turns."""

    turns: Annotated[int, msgspec.Meta(ge=1, le=10_000)] | Lengths
    think: Think
    tokens_max: Annotated[int, msgspec.Meta(ge=1)] = 32_768
    """A conversation whose next prompt would be longer is over: as a model's context window has it."""

    def turns_drawn(self, random: Random) -> int:
        return drawn(self._turns, random)

    @property
    def _turns(self) -> Lengths:
        return Fixed(tokens=self.turns) if isinstance(self.turns, int) else self.turns

    def think_drawn_ns(self, random: Random) -> int:
        return self.think.quantile_ns(uniform_draw(random))

    def describe(self) -> Mapping[str, Any]:
        return {
            "turns": {**described(self._turns), "unit": "turns"},
            "think": self.think.describe(),
            "prompt": "history and new message; answers in the history are text of the planned length",
            "tokens_max": self.tokens_max,
        }
