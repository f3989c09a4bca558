"""Metric families from counts that we keep ourselves."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

__all__ = ["WHO", "CounterFamily", "HistogramFamily", "counter", "gauge"]

WHO: Final = ("tenant", "model", "arm")
"""The labels that most metrics share."""


@dataclass(frozen=True, slots=True)
class HistogramFamily:
    """One histogram metric: its name, help and edges, and how many of their units make one of its own."""

    name: str
    help: str
    edges: tuple[int, ...]
    unit: float = 1e9
    labels: tuple[str, ...] = WHO

    def with_edges(self, more: Iterable[int]) -> "HistogramFamily":
        """The same with further edges."""
        return replace(self, edges=tuple(sorted({*self.edges, *more})))


@dataclass(frozen=True, slots=True)
class CounterFamily:
    """One counter metric; the exposition adds `_total` to its name."""

    name: str
    help: str
    labels: tuple[str, ...] = WHO


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
