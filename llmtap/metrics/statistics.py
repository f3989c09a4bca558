"""What a distribution is summed up by, and when a figure of it rests on too little.

One rule for percentiles, everywhere: linear interpolation between order statistics at rank (n - 1) p
(numpy's default, type 7 of Hyndman and Fan). `percentile` applies it to values, `Histogram` to its
buckets. Nothing is summed up as None, never as 0.
"""

from collections.abc import Sequence
from typing import Final

from llmtap.metrics.histogram import Histogram

__all__ = ["SAMPLES_MIN", "SHARES", "marks", "percentile", "summarise_ns"]

SHARES: Final = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99, "p999": 0.999}
SAMPLES_MIN: Final = {"p99": 1_000, "p999": 10_000}
"""Samples that a percentile needs to be right within 10 % at 95 % confidence (IETF seed 000, 5.1.4.3)."""


def percentile(ordered: Sequence[float], p: float) -> float | None:
    """The value at rank (n - 1) p of values in ascending order, interpolated; None when there is none."""
    if not ordered:
        return None
    rank = (len(ordered) - 1) * p
    lower = int(rank)
    low, high = ordered[lower], ordered[min(lower + 1, len(ordered) - 1)]
    return low + (high - low) * (rank - lower)


def marks(n: int) -> list[str]:
    """The percentiles that `n` samples are too few for, by name (IETF seed 000, 5.1.4.3)."""
    return [name for name, least in SAMPLES_MIN.items() if n < least]


def summarise_ns(histogram: Histogram) -> dict[str, object]:
    """The summary of a histogram of nanoseconds, in seconds.

    Returns `n, mean, min, max, p50, p90, p95, p99, p999` and `marks`, the names of the percentiles
    that rest on too few samples. With no samples every figure is None and `marks` is empty.
    """
    n = histogram.n
    values = histogram.percentiles(tuple(SHARES.values()))
    figures = {"mean": histogram.mean, "min": histogram.min, "max": histogram.max}
    figures.update(zip(SHARES, values, strict=True))
    seconds = {name: None if value is None else value / 1e9 for name, value in figures.items()}
    return {"n": n, **seconds, "marks": marks(n) if n else []}
