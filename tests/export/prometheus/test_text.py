"""Invariant: what is written fast says the same as what prometheus_client writes of the same counts."""

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from llmtap.export.prometheus.catalogue import CounterFamily, HistogramFamily
from llmtap.export.prometheus.writers import TextWriter

FAMILY = HistogramFamily("x_seconds", "Some help", (500_000, 1_000_000_000, 2_500_000_000), labels=("b", "a"))
COUNTER = CounterFamily("y", "More help", ("b", "a"))
labels = st.tuples(st.text(max_size=8), st.text(min_size=1, max_size=8))
cells = st.dictionaries(
    labels,
    st.tuples(st.lists(st.integers(0, 10**6), min_size=4, max_size=4), st.integers(0, 10**15)),
    max_size=4,
)


class Collected:
    def __init__(self, *metrics: Metric) -> None:
        self._metrics = metrics

    def collect(self) -> tuple[Metric, ...]:
        return self._metrics


def theirs(found: dict[tuple[str, str], tuple[list[int], int]]) -> CollectorRegistry:
    histogram = HistogramMetricFamily(FAMILY.name, FAMILY.help, labels=FAMILY.labels)
    counter = CounterMetricFamily(COUNTER.name, COUNTER.help, labels=COUNTER.labels)
    edges = [repr(edge / FAMILY.unit) for edge in FAMILY.edges] + ["+Inf"]
    for values, (counts, total) in found.items():
        buckets = list(zip(edges, accumulate(counts), strict=True))
        histogram.add_metric(values, buckets, total / FAMILY.unit)
        counter.add_metric(values, total)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collected(histogram, counter))  # type: ignore[arg-type]
    return registry


def ours(found: dict[tuple[str, str], tuple[list[int], int]], *, openmetrics: bool) -> str:
    writer = TextWriter(openmetrics=openmetrics)
    writer.write_histogram(FAMILY, [(values, counts, total) for values, (counts, total) in found.items()])
    writer.write_counter(COUNTER, [(values, total) for values, (_, total) in found.items()])
    return writer.content().decode() + ("# EOF\n" if openmetrics else "")


def samples(families: object) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (s.name, frozenset((k, v) for k, v in s.labels.items() if v)): s.value
        for family in families  # type: ignore[attr-defined]
        for s in family.samples
    }


@given(cells)
def test_text_is_that_of_the_library(found: dict[tuple[str, str], tuple[list[int], int]]) -> None:
    expected = generate_latest(theirs(found)).decode()
    assert samples(parse_text(ours(found, openmetrics=False))) == samples(parse_text(expected))


@given(cells)
def test_openmetrics_is_that_of_the_library(found: dict[tuple[str, str], tuple[list[int], int]]) -> None:
    expected = generate_openmetrics(theirs(found)).decode()
    assert samples(parse_openmetrics(ours(found, openmetrics=True))) == samples(parse_openmetrics(expected))
