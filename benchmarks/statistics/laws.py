"""Distributions of latencies of which everything is known, and a queue, in which requests are not
independent."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Law:
    """In any unit."""

    name: str
    draw: Callable[[np.random.Generator, int], Values]
    quantile: Callable[[float], float]
    density: Callable[[float], float]
    mean: float
    deviation: float


def _of(name: str, law: Any, draw: Callable[[np.random.Generator, int], Values]) -> Law:
    return Law(name, draw, law.ppf, law.pdf, float(law.mean()), float(law.std()))


def _bimodal() -> Law:
    """Four of five gaps about 20 ms, one about 60 ms: decoding, and decoding beside a prefill."""
    fast, slow, share = stats.norm(20, 2), stats.norm(60, 6), 0.2

    def draw(random: np.random.Generator, n: int) -> Values:
        values: Values = np.where(random.random(n) < share, random.normal(60, 6, n), random.normal(20, 2, n))
        return values

    def below(x: float) -> float:
        return float((1 - share) * fast.cdf(x) + share * slow.cdf(x))

    mean = (1 - share) * 20 + share * 60
    variance = (1 - share) * (2**2 + (20 - mean) ** 2) + share * (6**2 + (60 - mean) ** 2)
    return Law(
        "bimodal",
        draw,
        lambda p: float(optimize.brentq(lambda x: below(x) - p, 0, 120)),
        lambda x: float((1 - share) * fast.pdf(x) + share * slow.pdf(x)),
        mean,
        variance**0.5,
    )


UNIFORM = _of("uniform", stats.uniform(1, 1), lambda random, n: random.uniform(1, 2, n))
NORMAL = _of("normal", stats.norm(10, 1), lambda random, n: random.normal(10, 1, n))
EXPONENTIAL = _of("exponential", stats.expon(), lambda random, n: random.exponential(1, n))
LOGNORMAL = _of("lognormal, sigma 0.5", stats.lognorm(0.5), lambda random, n: random.lognormal(0, 0.5, n))
WIDE = _of("lognormal, sigma 1.5", stats.lognorm(1.5), lambda random, n: random.lognormal(0, 1.5, n))
PARETO = _of("Pareto, alpha 2", stats.pareto(2), lambda random, n: 1 + random.pareto(2, n))
BIMODAL = _bimodal()
LAWS = (EXPONENTIAL, LOGNORMAL, WIDE, BIMODAL)
"""Those that latencies may be like."""


def queue(random: np.random.Generator, load: float, n: int, runs: int) -> Values:
    """Latencies of `n` successive requests in each of so many runs, a row each: M/M/1, a service takes 1 on
    the average.

    Runs begin in the steady state, in which a latency is exponential with mean 1 / (1 - load); each waits for
    what the one before has left over (Lindley).
    """
    waiting = np.where(random.random(runs) < load, random.exponential(1 / (1 - load), runs), 0.0)
    latency = np.empty((runs, n))
    for i in range(n):
        latency[:, i] = waiting + random.exponential(1, runs)
        waiting = np.maximum(0.0, latency[:, i] - random.exponential(1 / load, runs))
    return latency
