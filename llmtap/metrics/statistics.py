"""Summary statistics of a distribution, and marks for figures with too few samples.

One rule for percentiles, everywhere: linear interpolation between order statistics at rank (n - 1) p
(numpy's default, type 7 of Hyndman and Fan). `percentile` applies it to values, `Histogram` to its
buckets. `percentile_by` has the rules of others, for comparing with them. Nothing is summed up as None,
never as 0.
"""

import re
from collections.abc import Mapping, Sequence
from math import ceil, sqrt
from typing import Final

from llmtap.errors import ConfigError
from llmtap.metrics.histogram import Histogram

__all__ = [
    "PERCENTILE_RULES", "SAMPLES_MIN", "SHARES", "deviation",
    "marks", "mean", "parse_percentiles", "percentile", "percentile_by", "summarise_ns", "tail_ratio",
]  # fmt: skip

SHARES: Final = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99, "p999": 0.999}
SAMPLES_MIN: Final = {"p99": 1_000, "p999": 10_000}
"""Samples that a percentile needs to be right within 10 % at 95 % confidence (IETF draft, 5.1.4.3)."""


def percentile(ordered: Sequence[float], p: float) -> float | None:
    """The value at rank (n - 1) p of values in ascending order, interpolated; None when there is none."""
    if not ordered:
        return None
    rank = (len(ordered) - 1) * p
    lower = int(rank)
    low, high = ordered[lower], ordered[min(lower + 1, len(ordered) - 1)]
    return low + (high - low) * (rank - lower)


PERCENTILE_RULES: Final = (
    "linear", "nearest_rank", "hazen", "weibull", "median_unbiased", "lower", "higher", "nearest",
)  # fmt: skip
"""What `percentile_by` knows: types 7, 1, 5, 6 and 8 of Hyndman and Fan, and numpy's three others."""

_ROUNDING: Final = 1e-9
"""0.07 x 100 is a little over 7 in binary; the rank meant is 7."""


def percentile_by(rule: str, ordered: Sequence[float], p: float) -> float | None:
    """The percentile by another rule of `PERCENTILE_RULES`, so that a figure of another tool can be checked.

    Source: Hyndman and Fan 1996, "Sample quantiles in statistical packages"; numpy's names.
    """
    assert rule in PERCENTILE_RULES
    n = len(ordered)
    if not n:
        return None
    rank = (n - 1) * p
    match rule:
        case "linear":
            return percentile(ordered, p)
        case "lower":
            return ordered[int(rank + _ROUNDING)]
        case "higher":
            return ordered[ceil(rank - _ROUNDING)]
        case "nearest":
            return ordered[round(rank)]  # halves go to the even rank, as in numpy
        case "nearest_rank":
            return ordered[max(0, ceil(n * p - _ROUNDING) - 1)]
    shift, grow = {"hazen": (0.5, 0.0), "weibull": (0.0, 1.0), "median_unbiased": (1 / 3, 1 / 3)}[rule]
    place = min(max((n + grow) * p + shift, 1.0), n) - 1
    lower = int(place)
    low, high = ordered[lower], ordered[min(lower + 1, n - 1)]
    return low + (high - low) * (place - lower)


def mean(values: Sequence[float]) -> float | None:
    """Arithmetic mean; None when there is none."""
    return sum(values) / len(values) if values else None


def deviation(values: Sequence[float], *, sample: bool = False) -> float | None:
    """Standard deviation of a population (divided by n), or of a sample (n - 1); None with too few values."""
    n = len(values)
    if n < (2 if sample else 1):
        return None
    middle = sum(values) / n
    return sqrt(sum((value - middle) ** 2 for value in values) / (n - 1 if sample else n))


def tail_ratio(p50: float | None, p99: float | None) -> float | None:
    """P99 / P50, how heavy the tail is; None when either is missing or the median is 0.

    Source: IETF draft, 5.4.4.3.
    """
    return None if p99 is None or not p50 else p99 / p50


def marks(n: int) -> list[str]:
    """The percentiles that `n` samples are too few for, by name (IETF draft, 5.1.4.3)."""
    return [name for name, least in SAMPLES_MIN.items() if n < least]


def parse_percentiles(text: str, place: str) -> dict[str, float]:
    """Return the shares of `25,75,99.5` by name: `p25`, `p75`, `p995`. Raises ConfigError."""
    found = {}
    for word in text.replace(",", " ").split():
        number = float(word) if re.fullmatch(r"\d+(\.\d+)?", word) else 0.0
        if not 0 < number < 100:
            raise ConfigError(place, f"{word!r} is no percentile", f"such as {place} 25,75,99.5")
        # Two digits before the point, so that 9.95 and 99.5 differ.
        whole, point, rest = f"{number:g}".partition(".")
        found[f"p{whole.zfill(2) if point else whole}{rest}"] = number / 100
    return found


def summarise_ns(histogram: Histogram, more: Mapping[str, float] | None = None) -> dict[str, object]:
    """The summary of a histogram of nanoseconds, in seconds.

    Returns `n, mean, min, max, p50, p90, p95, p99, p999` and `marks`, the names of the percentiles
    that rest on too few samples. With no samples every figure is None and `marks` is empty. `more`: further
    percentiles, as from `parse_percentiles`.
    """
    n = histogram.n
    shares = {**SHARES, **(more or {})}
    values = histogram.percentiles(tuple(shares.values()))
    figures = {"mean": histogram.mean, "min": histogram.min, "max": histogram.max}
    figures.update(zip(shares, values, strict=True))
    seconds = {name: None if value is None else value / 1e9 for name, value in figures.items()}
    return {"n": n, **seconds, "marks": marks(n) if n else []}
