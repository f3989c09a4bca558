"""Fairness between classes of requests. Source: IETF draft, 5.6.4."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

from llmtap.metrics.statistics import percentile

__all__ = [
    "STARVED_MEDIANS", "UNFAIR_BELOW", "JainReadings", "Starvation", "inflation", "jain", "jain_readings",
    "starvation",
]  # fmt: skip

UNFAIR_BELOW: Final = 0.9
"""An index below it means significant unfairness (5.6.4)."""
STARVED_MEDIANS: Final = 5.0
"""Who waited longer than so many medians of the class was starved (5.6.4)."""


def jain(values: Sequence[float]) -> float | None:
    """Jain's index (sum x)^2 / (n sum x^2): 1 when all are equal, 1/n when one has it all.

    None without values, or when all are 0.
    """
    squares = sum(x * x for x in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else None


def inflation(mixed: float, isolated: float) -> float | None:
    """How much a class's latency grew by sharing: mixed / isolated; None when the isolated one is 0."""
    return mixed / isolated if isolated else None


@dataclass(frozen=True, slots=True)
class JainReadings:
    """Jain's index by what x_i may mean: the draft says "normalized latency" and not by what, nor of whom."""

    per_request: float | None
    """x_i: a request's latency / the isolated median of its class."""
    per_class: float | None
    """x_i: a class's mean latency / its isolated median, one for each class."""
    raw: float | None
    """x_i: a request's latency as it is; long requests then look unfair by being long."""
    inflation: Mapping[str, float]
    """By class: mean latency / isolated median."""


def jain_readings(latencies: Mapping[str, Sequence[float]], isolated: Mapping[str, float]) -> JainReadings:
    """The three readings, from latencies by class and each class's median latency in isolation (above 0)."""
    normal = [value / isolated[name] for name, values in latencies.items() for value in values]
    per_class = {
        name: sum(values) / len(values) / isolated[name] for name, values in latencies.items() if values
    }
    raw = list(chain.from_iterable(latencies.values()))
    return JainReadings(jain(normal), jain(list(per_class.values())), jain(raw), per_class)


@dataclass(frozen=True, slots=True)
class Starvation:
    """Of one class: who waited more than five medians. `n` and `median` belong next to the rate: with a
    median of 0 any wait at all is more."""

    n: int
    median: float
    threshold: float
    starved: int

    @property
    def rate(self) -> float:
        return self.starved / self.n


def starvation(
    waits: Sequence[float], median: float | None = None, *, medians: float = STARVED_MEDIANS
) -> Starvation | None:
    """Who of a class waited longer than (strictly) `medians` times the median; None without waits.

    `median` takes another's median in place of the class's own, such as that of all classes pooled.
    """
    if not waits:
        return None
    if median is None:
        median = percentile(sorted(waits), 0.5)
    assert median is not None
    threshold = medians * median
    return Starvation(len(waits), median, threshold, sum(wait > threshold for wait in waits))
