"""Trace ids beside buckets, read back by the OpenMetrics parser."""

from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Exemplar

from llmtap.exchange.exchange import Exchange
from llmtap.exchange.outcome import Outcome
from llmtap.exchange.trace_context import TraceParent
from llmtap.export.prometheus.exposition import Exemplars, Exposition, group_by_series
from llmtap.export.sinks import SeriesKey
from llmtap.metrics.latency import measure
from tests.export.telemetry import PARENT, SPAN, TRACE, chat

OPENMETRICS = "application/openmetrics-text;version=1.0.0"


def exemplars(*exchanges: Exchange) -> dict[tuple[str, str, str], Exemplar]:
    """By name, kind and bucket."""
    exposition = Exposition("1")
    for x in exchanges:
        exposition.on_end(x, measure(x), SeriesKey("t", "m"), None)
    body, _ = exposition.freeze().render(OPENMETRICS)
    assert b"trace_id" not in exposition.freeze().render("text/plain")[0]
    return {
        (sample.name, sample.labels.get("kind", ""), sample.labels["le"]): Exemplar(
            sample.exemplar.labels, sample.exemplar.value, float(sample.exemplar.timestamp or 0)
        )
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
        if sample.exemplar is not None
    }


def test_a_traced_request_is_the_exemplar_of_its_buckets() -> None:
    traced, ended = {"trace_id": TRACE, "span_id": SPAN}, 1_700_000_000.26
    assert exemplars(chat(trace_parent=PARENT), chat()) == {
        ("llmtap_time_to_first_token_seconds_bucket", "content", "0.1"): Exemplar(traced, 0.1, ended),
        ("llmtap_time_to_first_token_seconds_bucket", "any", "0.1"): Exemplar(traced, 0.1, ended),
        ("llmtap_request_duration_seconds_bucket", "", "0.25"): Exemplar(traced, 0.25, ended),
    }


def test_what_no_one_records_is_no_exemplar() -> None:
    assert exemplars(chat(), chat(trace_parent=f"00-{TRACE}-{SPAN}-00"), chat(trace_parent="x")) == {}
    found = exemplars(chat(trace_parent=PARENT, outcome=Outcome.TRUNCATED))
    assert {name for name, _, _ in found} == {"llmtap_time_to_first_token_seconds_bucket"}


def test_their_number_has_a_bound_and_the_newest_stay() -> None:
    kept = Exemplars(exemplars_max=3)
    parent = TraceParent(TRACE, SPAN, 1)
    for i, value in enumerate([5, 15, 25, 5, 35]):
        kept.add(("x", ("t",), value // 10), value, parent, i)
    found = group_by_series(kept.freeze())["x"][("t",)]
    assert {bucket: exemplar.value for bucket, exemplar in found.items()} == {0: 5, 2: 25, 3: 35}
    longest = "".join(text for pair in found[0].labels.items() for text in pair)
    assert len(longest) <= 128
