"""Objectives, and how they were kept: what alerts and dashboards of them need."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.metrics_core import Metric

from llmtap.export.prometheus.families import counter, gauge

__all__ = ["SloState", "collect_slos"]


@dataclass(frozen=True, slots=True)
class SloState:
    """All classes at the time of a scrape."""

    targets: Mapping[str, float] = field(default_factory=dict)
    """By class."""
    bounds_ns: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """By class and objective."""
    counts: Mapping[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    """By class and tenant: exchanges that counted, and those that met their objectives, since the start."""
    burn_rates: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """By class and window."""


def collect_slos(state: SloState) -> Iterator[Metric]:
    """Nothing where there are no objectives."""
    if not state.targets and not state.counts:
        return
    counted = {key: n for key, (n, _) in state.counts.items()}
    good = {key: n for key, (_, n) in state.counts.items()}
    for name in state.targets:
        # Each class from the start, so that rate() sees its first exchange.
        counted.setdefault((name, "default"), 0)
        good.setdefault((name, "default"), 0)
    labels = ("slo", "tenant")
    yield counter("llmtap_slo_events", "Exchanges that objectives applied to", labels, counted.items())
    yield counter("llmtap_slo_good", "Those that met every one of them", labels, good.items())
    yield gauge(
        "llmtap_slo_target_ratio",
        "Share of the exchanges that must meet their objectives",
        ("slo",),
        [((name,), target) for name, target in state.targets.items()],
    )
    yield gauge(
        "llmtap_slo_objective_seconds",
        "Bounds of the objectives, each an edge of the histogram that shows it",
        ("slo", "objective"),
        [(key, bound_ns / 1e9) for key, bound_ns in state.bounds_ns.items()],
    )
    yield gauge(
        "llmtap_slo_burn_rate",
        "How many times faster than allowed the error budget goes, over a window",
        ("slo", "window"),
        state.burn_rates.items(),
    )
