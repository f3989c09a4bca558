"""The catalogue of metrics and what loops over it."""

from dataclasses import fields

import pytest

from llmtap.export.prometheus.catalogue import HISTOGRAMS
from llmtap.metrics.catalogue import FAMILIES, METRICS, OF_AN_EXCHANGE, Metric, Surface, shown_on
from llmtap.metrics.latency import Measured


@pytest.mark.parametrize("metric", OF_AN_EXCHANGE, ids=lambda metric: metric.name)
def test_each_metric_of_an_exchange_is_computed(metric: Metric) -> None:
    assert metric.field in {field.name for field in fields(Measured)}


def test_each_name_and_title_is_there_once() -> None:
    assert (
        len({metric.name for metric in METRICS}) == len({metric.title for metric in METRICS}) == len(METRICS)
    )


def test_metrics_of_one_histogram_have_different_labels() -> None:
    places = [(metric.family, metric.label) for metric in OF_AN_EXCHANGE if metric.family is not None]
    assert len(set(places)) == len(places)
    for family, label in places:
        assert (label is None) == (family.label is None), family.name
    assert {family.key for family in FAMILIES} <= set(HISTOGRAMS)


def test_a_surface_shows_its_metrics_in_the_order_of_tables() -> None:
    assert [metric.name for metric in shown_on(Surface.LIVE)] == [
        "ttft",
        "tbc",
        "itl",
        "tpot",
        "e2e",
        "user_idle",
    ]
