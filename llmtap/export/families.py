"""Metric families from counts that we keep ourselves."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

__all__ = ["WHO", "HistogramFamily", "counter", "gauge", "histogram"]

WHO: Final = ("tenant", "model")
"""The labels that most metrics share."""


@dataclass(frozen=True, slots=True)
class HistogramFamily:
    """One histogram metric: its name, help and edges, and how many of their units make one of its own."""

    name: str
    help: str
    edges: tuple[int, ...]
    unit: float = 1e9
    labels: tuple[str, ...] = WHO


def histogram(
    family: HistogramFamily, cells: Iterable[tuple[Sequence[str], Sequence[int], int]]
) -> HistogramMetricFamily:
    """Cells are `(labels, counts by bucket with the one beyond, sum)`."""
    edges = [repr(edge / family.unit) for edge in family.edges] + ["+Inf"]
    metric = HistogramMetricFamily(family.name, family.help, labels=family.labels)
    for labels, counts, total in cells:
        metric.add_metric(labels, list(zip(edges, accumulate(counts), strict=True)), total / family.unit)
    return metric


def counter(
    name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]
) -> CounterMetricFamily:
    """Values are `(labels, count)`; the exposition adds `_total` to the name."""
    metric = CounterMetricFamily(name, text, labels=labels)
    for key, value in values:
        metric.add_metric(key, value)
    return metric


def gauge(
    name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]
) -> GaugeMetricFamily:
    """Values are `(labels, value)`."""
    metric = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values:
        metric.add_metric(key, value)
    return metric
