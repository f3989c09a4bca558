"""Fairness between classes of requests: Jain's index, growth of latency by sharing, starvation.

Functions from latencies or waits by class to figures, for the fairness test of `llmtap bench`.

Source: IETF draft, 5.6.4.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

from llmtap.metrics.statistics import percentile

UNFAIR_BELOW: Final = 0.9
"""An index below it means significant unfairness (5.6.4)."""
STARVED_MEDIANS: Final = 5.0
"""A request that waited more than this many medians of its class was starved (5.6.4)."""


def jain(values: Sequence[float]) -> float | None:
    """Return Jain's index (sum x)^2 / (n sum x^2):

    1 if all are equal, 1/n if one has everything; None without values, or if all are 0.
    """
    squares = sum(x * x for x in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else None


def inflation(mixed: float, isolated: float) -> float | None:
    """Return the growth of a class's latency by sharing, mixed / isolated; None if the isolated one is 0."""
    return mixed / isolated if isolated else None


@dataclass(frozen=True, slots=True)
class JainReadings:
    """Jain's index by each meaning of x_i, because the draft does not define its "normalized latency"."""

    per_request: float | None
    """x_i: a request's latency / the isolated median of its class."""
    per_class: float | None
    """x_i: a class's mean latency / its isolated median, one for each class."""
    raw: float | None
    """x_i: a request's latency unchanged; long requests then look unfair by being long."""
    inflation: Mapping[str, float]
    """By class: mean latency / isolated median."""


def jain_readings(latencies: Mapping[str, Sequence[float]], isolated: Mapping[str, float]) -> JainReadings:
    """Return the readings, from latencies by class and each class's median latency in isolation (above 0)."""
    normal = [value / isolated[name] for name, values in latencies.items() for value in values]
    per_class = {
        name: sum(values) / len(values) / isolated[name] for name, values in latencies.items() if values
    }
    raw = list(chain.from_iterable(latencies.values()))
    return JainReadings(jain(normal), jain(list(per_class.values())), jain(raw), per_class)


@dataclass(frozen=True, slots=True)
class Starvation:
    """Starved requests of a class.

    `n` and `median` belong with the rate: with a median of 0 any wait is more.
    """

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
    """Count the requests of a class that waited more than `medians` times the median; None without waits.

    `median` replaces the class's own, for example by that of all classes.
    """
    if not waits:
        return None
    if median is None:
        median = percentile(sorted(waits), 0.5)
    assert median is not None
    threshold = medians * median
    return Starvation(len(waits), median, threshold, sum(wait > threshold for wait in waits))
