"""Spans and metrics to a real gRPC receiver; what becomes of them when it is away, slow or unwilling."""

import os
import subprocess
import sys
import threading
from typing import Any

import grpc
import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_CUMULATIVE

from llmtap.clock import ManualClock
from llmtap.exchange.exchange import BACK, FRONT, Exchange, PairMember
from llmtap.export.opentelemetry import exporter as exporting
from llmtap.export.opentelemetry.exporter import OtlpExporter
from llmtap.export.options import OtlpOptions
from llmtap.export.sinks import SeriesKey
from llmtap.metrics.latency import measure
from tests.export.telemetry import PARENT, SPAN, TRACE, chat
from tests.support.servers.otlp_receiver import GUARD_S, OtlpReceiver, plain
from tests.support.waiting import block_until

WALL_NS = 1_700_000_000_000_000_000
SERVERS = {"": ("gateway.example", 443)}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variables of the machine; spans leave with a full batch or at the end, tries follow each other."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    monkeypatch.setattr(exporting, "RETRY_S", 0.02)


def exporter(endpoint: str | None, **options: Any) -> OtlpExporter:
    return OtlpExporter(OtlpOptions(endpoint=endpoint, **options), ManualClock(now_ns=1), "1.2.3", SERVERS)


def end(e: OtlpExporter, *exchanges: Exchange) -> None:
    for x in exchanges:
        e.on_end(x, measure(x), SeriesKey("t", "m"), None)


def export(receiver: OtlpReceiver, *exchanges: Exchange, **options: Any) -> OtlpExporter:
    """Exports these exchanges, all of it."""
    e = exporter(receiver.endpoint, **options)
    end(e, *exchanges)
    e.close(GUARD_S)
    return e


# ---------------------------------------------------------------- spans


def test_the_callers_span_is_the_parent() -> None:
    with OtlpReceiver() as receiver:
        export(receiver, chat(trace_parent=PARENT), chat(seq=2), chat(seq=2))
        child, root, again = receiver.spans
    assert (child.trace_id.hex(), child.parent_span_id.hex()) == (TRACE, SPAN)
    assert child.flags & 0x300 == 0x300, "the parent is another process's"
    assert (len(root.trace_id), len(root.span_id), root.parent_span_id) == (16, 8, b"")
    assert root.flags & 0x300 == 0x100
    assert any(root.trace_id)
    assert (again.trace_id, again.span_id) == (root.trace_id, root.span_id), "found again by who knows the id"
    assert child.span_id not in (root.span_id, bytes.fromhex(SPAN))


def test_the_spans_of_a_pair_link_to_each_other_and_only_the_front_is_counted() -> None:
    front, delivered, retry = (
        chat(side=FRONT),
        chat(seq=2, side=BACK, trace_parent=PARENT),
        chat(seq=3, side=BACK),
    )
    front.pair = PairMember("a", partners=(retry.span_ids, delivered.span_ids))
    retry.pair = PairMember("a", role="retry", partners=(front.span_ids,))
    delivered.pair = PairMember("a", role="delivered", partners=(front.span_ids,))
    with OtlpReceiver() as receiver:
        e = OtlpExporter(
            OtlpOptions(endpoint=receiver.endpoint),
            ManualClock(now_ns=1),
            "1",
            SERVERS,
            back_server=("engine", 8000),
        )
        end(e, front, retry, delivered)
        e.close(GUARD_S)
        spans = receiver.spans
        (exchanges,) = receiver.last_metrics["llmtap.exchanges"].sum.data_points
    a, b, c = ((span.trace_id, span.span_id) for span in spans)
    assert [[(link.trace_id, link.span_id) for link in span.links] for span in spans] == [[b, c], [a], [a]]
    assert c[0].hex() == TRACE
    shown = [plain(span.attributes) for span in spans]
    assert [one["llmtap.side"] for one in shown] == [FRONT, BACK, BACK]
    assert [one.get("llmtap.pair.role") for one in shown] == [None, "retry", "delivered"]
    assert [one["server.address"] for one in shown] == ["gateway.example", "engine", "engine"]
    assert exchanges.as_int == 1


@pytest.mark.parametrize(
    ("trace_parent", "sampler", "spans"),
    [
        (f"00-{TRACE}-{SPAN}-00", "parentbased_always_on", 0),
        (f"00-{TRACE}-{SPAN}-00", "always_on", 1),
        (PARENT, "parentbased_always_off", 1),
        (None, "parentbased_always_off", 0),
        ("not a traceparent", "parentbased_always_off", 0),
    ],
)
def test_who_gets_a_span(
    monkeypatch: pytest.MonkeyPatch, trace_parent: str | None, sampler: str, spans: int
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    with OtlpReceiver() as receiver:
        e = export(receiver, chat(trace_parent=trace_parent))
        assert len(receiver.spans) == spans == e.state().sent
        assert receiver.last_metrics, "metrics know no sampling"
        assert e.state().dropped == {}


# ---------------------------------------------------------------- metrics


def test_metrics_arrive_with_names_units_edges_and_exact_counts() -> None:
    with OtlpReceiver() as receiver:
        export(receiver, chat(), chat(110, 1110), semconv="1.41")
        found = receiver.last_metrics
    assert set(found) == {
        "gen_ai.client.operation.duration",
        "gen_ai.client.operation.time_to_first_chunk",
        "gen_ai.client.operation.time_per_output_chunk",
        "gen_ai.client.token.usage",
        "gen_ai.server.request.duration",
        "gen_ai.server.time_to_first_token",
        "gen_ai.server.time_per_output_token",
        "llmtap.time_to_first_token",
        "llmtap.inter_chunk",
        "llmtap.user_idle",
        "llmtap.exchanges",
    }
    duration = found["gen_ai.client.operation.duration"]
    assert duration.unit == "s"
    assert duration.histogram.aggregation_temporality == AGGREGATION_TEMPORALITY_CUMULATIVE
    (point,) = duration.histogram.data_points
    assert (point.count, point.sum) == (2, pytest.approx(0.261 + 1.121))
    assert list(point.explicit_bounds)[:6] == [0.01, 0.02, 0.04, 0.08, 0.16, 0.32]
    assert list(point.bucket_counts) == [0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    assert point.start_time_unix_nano == point.time_unix_nano == WALL_NS + 1
    assert plain(point.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "gpt-x",
        "gen_ai.response.model": "gpt-x-2026-11-01",
        "llmtap.tenant": "default",
        "server.address": "gateway.example",
        "server.port": 443,
    }
    chunks = found["gen_ai.client.operation.time_per_output_chunk"].histogram.data_points[0]
    assert (chunks.count, chunks.sum) == (7, pytest.approx(0.160 + 1.020))
    usage = {
        plain(p.attributes)["gen_ai.token.type"]: p.sum
        for p in found["gen_ai.client.token.usage"].histogram.data_points
    }
    assert usage == {"input": 14, "output": 5}
    (exchanges,) = found["llmtap.exchanges"].sum.data_points
    assert (exchanges.as_int, found["llmtap.exchanges"].sum.is_monotonic) == (2, True)


# ---------------------------------------------------------------- a receiver that is away, full or unwilling


def test_a_receiver_that_was_away_gets_everything_when_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    with OtlpReceiver() as receiver:
        receiver.stop()
        e = exporter(receiver.endpoint)
        end(e, *(chat(seq=i) for i in range(1, 11)))
        block_until(lambda: e.state().failures >= 2)
        receiver.start()
        receiver.wait(lambda: len({span.span_id for span in receiver.spans}) == 10)
        end(e, chat(seq=11))
        receiver.wait(lambda: len({span.span_id for span in receiver.spans}) == 11)
        e.close(GUARD_S)
        assert receiver.last_metrics["llmtap.exchanges"].sum.data_points[0].as_int == 11
    state = e.state()
    assert (state.sent, state.queued, state.dropped) == (11, 0, {})


def test_the_queue_has_a_bound_and_every_span_is_accounted_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "5")
    with OtlpReceiver() as receiver:
        receiver.hold = threading.Event()
        e = exporter(receiver.endpoint)
        end(e, *(chat(seq=i) for i in range(101)))  # a receiver that hangs does not hold up who calls
        assert e.state().queued == 5, "those on their way included"
        assert e.state().dropped == {"queue_full": 96}
        e.close(0.05)
        state = e.state()
        assert (state.sent, state.queued) == (0, 0)
        assert state.dropped == {"queue_full": 96, "shutdown": 5}


@pytest.mark.parametrize(
    ("code", "again"),
    [
        (grpc.StatusCode.UNAVAILABLE, True),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, False),
        (grpc.StatusCode.UNIMPLEMENTED, False),
    ],
)
def test_a_refusal_is_tried_again_where_that_may_help(
    monkeypatch: pytest.MonkeyPatch, code: grpc.StatusCode, again: bool
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    with OtlpReceiver() as receiver:
        receiver.refuse = code
        e = exporter(receiver.endpoint)
        end(e, chat())
        receiver.wait(lambda: receiver.refused >= (2 if again else 1))
        receiver.refuse = None
        end(e, chat(seq=2))
        receiver.wait(lambda: len({span.span_id for span in receiver.spans}) == (2 if again else 1))
        e.close(GUARD_S)
    assert e.state().sent == (2 if again else 1)
    assert e.state().dropped == ({} if again else {"refused": 1})


# ---------------------------------------------------------------- who we are


@pytest.mark.parametrize(
    ("variables", "spans", "names"),
    [
        ({"OTEL_TRACES_SAMPLER": "always_off"}, 0, {"service.name": "llmtap", "service.version": "1.2.3"}),
        ({"OTEL_TRACES_EXPORTER": "none"}, 0, {}),
        ({"OTEL_SDK_DISABLED": "true"}, 0, None),
        ({"OTEL_METRICS_EXPORTER": "none"}, 1, None),
        ({"OTEL_SERVICE_NAME": "edge"}, 1, {"service.name": "edge"}),
        (
            {"OTEL_RESOURCE_ATTRIBUTES": "service.version=9,service.instance.id=a%20b"},
            1,
            {"service.version": "9", "service.instance.id": "a b"},
        ),
    ],
)
def test_variables_of_opentelemetry_count_where_no_key_is_set(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], spans: int, names: dict[str, str] | None
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with OtlpReceiver() as receiver:
        export(receiver, chat())
        assert len(receiver.spans) == spans
        if names is None:
            assert receiver.metrics == []
            return
        named = plain(receiver.metrics[0].resource_metrics[0].resource.attributes)
    assert {name: named[name] for name in names} == names
    assert os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") is None, "our keys do not stay in the environment"


def test_a_signal_may_have_an_endpoint_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with OtlpReceiver() as traces, OtlpReceiver() as all_else:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", traces.endpoint)
        export(all_else, chat())
        assert (len(traces.spans), traces.metrics) == (1, [])
        assert (all_else.spans, len(all_else.metrics)) == ([], 1)
        e = exporter(None)
        end(e, chat())
        e.close(GUARD_S)
        assert (len(traces.spans), len(all_else.metrics)) == (2, 1)


def test_histograms_are_exponential_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    variable = "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION"
    monkeypatch.setenv(variable, "base2_exponential_bucket_histogram")
    with OtlpReceiver() as receiver:
        export(receiver, chat(), chat(1110, 1120))
        metric = receiver.last_metrics["llmtap.time_to_first_token"]
    (point,) = metric.exponential_histogram.data_points
    assert (point.count, point.sum, point.zero_count) == (2, pytest.approx(1.2), 0)
    base = 2 ** (2**-point.scale)
    found = [
        base ** (point.positive.offset + i)
        for i, n in enumerate(point.positive.bucket_counts)
        for _ in range(n)
    ]
    for lower, exact in zip(found, (0.1, 1.1), strict=True):
        assert lower < exact <= lower * base


def test_without_an_endpoint_the_meter_loads_none_of_it() -> None:
    code = (
        "import sys, llmtap.meter.process, llmtap.config\n"
        "print([m for m in sys.modules if m in ('grpc', 'google.protobuf', 'opentelemetry.sdk')])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "[]\n"
