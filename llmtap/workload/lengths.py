"""Distributions of prompt and answer lengths in tokens, each defined by its quantile function.

`draw_length` draws a length, `mean_of` returns the mean, `describe_lengths` the parameters for reports. A
length is the quantile of one uniform random number, in whole tokens within bounds. A workload has one
distribution for prompts and one for answers.

Source: IETF draft, 4.3.1 (type, parameters, unit; fixed, uniform, normal, empirical) and its lognormal
workloads.
"""

import functools
import itertools
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from random import Random
from statistics import NormalDist
from typing import Annotated, Any, Final

import msgspec

from llmtap.metrics.statistics import deviation, mean, percentile

Tokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]

TOKENS_MAX: Final = 1 << 24
_STANDARD: Final = NormalDist()
"""The standard normal distribution: its quantile function gives normal scores."""
_P95_SCORE: Final = _STANDARD.inv_cdf(0.95)
_PERCENTILES: Final = {"p50": 0.50, "p95": 0.95, "p99": 0.99}


class _Distribution(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="distribution"
):
    """Base class of the distributions. Values beyond the bounds are clipped, not drawn again."""


class Fixed(_Distribution, frozen=True, kw_only=True, tag="fixed"):
    """All values are equal."""

    tokens: Tokens

    def quantile(self, p: float) -> int:
        return self.tokens


class _Bounded(_Distribution, frozen=True, kw_only=True):
    """Base class of the distributions with a smallest and a largest value."""

    min: Tokens = 1
    max: Tokens = TOKENS_MAX

    def __post_init__(self) -> None:
        if self.min > self.max:
            raise ValueError(f"min: expected at most max ({self.max:,}), got {self.min:,}")

    def _clipped_length(self, length: float) -> int:
        return max(self.min, min(self.max, round(min(length, TOKENS_MAX))))


class UniformLengths(_Bounded, frozen=True, kw_only=True, tag="uniform"):
    """Uniform distribution of all whole numbers from `min` to `max`, both included."""

    min: Tokens
    max: Tokens

    def quantile(self, p: float) -> int:
        return min(self.max, self.min + int(p * (self.max - self.min + 1)))


class Normal(_Bounded, frozen=True, kw_only=True, tag="normal"):
    """Normal distribution, rounded and clipped."""

    mean: Positive
    std: NotNegative

    def quantile(self, p: float) -> int:
        return self._clipped_length(self.mean + self.std * _STANDARD.inv_cdf(p))


class ExponentialLengths(_Bounded, frozen=True, kw_only=True, tag="exponential"):
    """Exponential distribution, rounded: the quantile of p is -mean ln(1 - p)."""

    mean: Positive

    def quantile(self, p: float) -> int:
        return self._clipped_length(-self.mean * math.log1p(-p))


class LogNormal(_Bounded, frozen=True, kw_only=True, tag="lognormal"):
    """Lognormal distribution, rounded. Needs `mu` and `sigma` of the logarithm, or `median` and `p95`."""

    mu: float | None = None
    sigma: NotNegative | None = None
    median: Positive | None = None
    p95: Positive | None = None

    def __post_init__(self) -> None:
        # Do not use super(): it fails in a class that msgspec has recreated.
        _Bounded.__post_init__(self)
        given = [name for name in ("mu", "sigma", "median", "p95") if getattr(self, name) is not None]
        if given not in (["mu", "sigma"], ["median", "p95"]):
            raise ValueError(f"expected mu and sigma, or median and p95, got {' and '.join(given) or 'none'}")
        if self.median is not None and self.p95 is not None and self.p95 < self.median:
            raise ValueError(f"p95: expected at least the median ({self.median:g}), got {self.p95:g}")

    @property
    def log_parameters(self) -> tuple[float, float]:
        """Mean and standard deviation of the logarithm."""
        if self.median is not None and self.p95 is not None:
            return math.log(self.median), math.log(self.p95 / self.median) / _P95_SCORE
        assert self.mu is not None and self.sigma is not None
        return self.mu, self.sigma

    def quantile(self, p: float) -> int:
        mu, sigma = self.log_parameters
        return self._clipped_length(_bounded_exp(mu + sigma * _STANDARD.inv_cdf(p)))


class Percentiles(_Bounded, frozen=True, kw_only=True, tag="percentiles"):
    """Distribution with given percentiles. Between two of them, the logarithm of the length is linear in the
    normal score. The first and the last piece continue to `min` and `max`."""

    points: tuple[tuple[float, Positive], ...]
    """Percent and tokens of each percentile, both ascending: `[[50, 156], [95, 892]]`."""

    def __post_init__(self) -> None:
        _Bounded.__post_init__(self)
        percents = [percent for percent, _ in self.points]
        if len(percents) < 2:
            raise ValueError(f"points: expected at least two points, got {len(percents)}")
        if any(a >= b for a, b in itertools.pairwise(percents)) or not 0 < percents[0] < percents[-1] < 100:
            raise ValueError(f"points: percents must ascend between 0 and 100, got {percents}")
        if any(a > b for (_, a), (_, b) in itertools.pairwise(self.points)):
            raise ValueError(f"points: token counts must not decrease, got {[n for _, n in self.points]}")

    def quantile(self, p: float) -> int:
        percents = [percent for percent, _ in self.points]
        i = min(max(bisect_left(percents, p * 100), 1), len(percents) - 1)
        (low, a), (high, b) = self.points[i - 1], self.points[i]
        score, first, last = (_STANDARD.inv_cdf(share) for share in (p, low / 100, high / 100))
        slope = math.log(b / a) / (last - first)
        return self._clipped_length(_bounded_exp(math.log(a) + slope * (score - first)))


class Empirical(_Bounded, frozen=True, kw_only=True, tag="empirical"):
    """Distribution of measured values, each weighted by its frequency."""

    values: Annotated[tuple[Tokens, ...], msgspec.Meta(min_length=1)]

    def __post_init__(self) -> None:
        _Bounded.__post_init__(self)
        msgspec.structs.force_setattr(self, "values", tuple(sorted(self.values)))

    def quantile(self, p: float) -> int:
        ordered = self.values
        return self._clipped_length(ordered[min(len(ordered) - 1, int(p * len(ordered)))])


Lengths = Fixed | UniformLengths | Normal | ExponentialLengths | LogNormal | Percentiles | Empirical
"""All distributions. `quantile(p)` returns whole tokens, for 0 < p < 1."""

_LISTED_VALUES_MAX: Final = 32


def as_lengths(lengths: int | Lengths) -> Lengths:
    return Fixed(tokens=lengths) if isinstance(lengths, int) else lengths


def uniform_draw(random: Random) -> float:
    """Return a random number above 0 and below 1: the normal scores of 0 and 1 are infinite."""
    return random.random() or 2**-54


def draw_length(lengths: Lengths, random: Random) -> int:
    """Draw a length. This draws one number from `random`."""
    return lengths.quantile(uniform_draw(random))


def correlated_draw(p: float, q: float, correlation: float) -> float:
    """Return a uniform number whose normal score has this correlation with the normal score of `p`.

    `q`: another uniform number, independent of `p`. All numbers are between 0 and 1, both excluded.
    """
    score = correlation * _STANDARD.inv_cdf(p) + math.sqrt(1 - correlation**2) * _STANDARD.inv_cdf(q)
    return min(max(_STANDARD.cdf(score), 2**-54), 1 - 2**-53)


@functools.lru_cache(256)
def mean_of(lengths: Lengths, steps: int = 100_000) -> float:
    """Return the mean after rounding and clipping: the integral of the quantile function."""
    return math.fsum(lengths.quantile((i + 0.5) / steps) for i in range(steps)) / steps


def describe_lengths(lengths: Lengths) -> Mapping[str, Any]:
    """Return the type and the parameters of a distribution as JSON (IETF draft, 4.3.1)."""
    about: dict[str, Any] = msgspec.to_builtins(lengths)
    if isinstance(lengths, Empirical) and len(lengths.values) > _LISTED_VALUES_MAX:
        about |= {
            "values": len(lengths.values),
            "percentiles": [[p, lengths.quantile(p / 100)] for p in (5, 25, 50, 75, 90, 95, 99)],
        }
    if about.get("max") == TOKENS_MAX:
        del about["max"]
    return {name: value for name, value in about.items() if value is not None} | {"unit": "tokens"}


def recorded_lengths(tokens: Sequence[int]) -> Mapping[str, object]:
    """Describe recorded lengths as JSON, in the form of `describe_lengths`. Without lengths, return {}."""
    ordered = sorted(tokens)
    middle, spread = mean(ordered), deviation(ordered)
    if middle is None or spread is None:
        return {}
    return {
        "distribution": "empirical",
        "unit": "tokens",
        "n": len(ordered),
        "mean": round(middle, 1),
        "std": round(spread, 1),
        "min": ordered[0],
        "max": ordered[-1],
        **{name: percentile(ordered, p) for name, p in _PERCENTILES.items()},
    }


def _bounded_exp(x: float) -> float:
    return math.exp(min(x, 64.0))  # exp(64) exceeds every bound and does not overflow.
