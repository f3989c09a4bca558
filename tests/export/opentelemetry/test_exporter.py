"""Spans and metrics to a real gRPC receiver; what becomes of them when it is away, slow or unwilling."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_CUMULATIVE

from llmtap.clock import ManualClock
from llmtap.errors import ConfigError
from llmtap.exchange.exchange import Exchange
from llmtap.export.opentelemetry.exporter import BATCH_MAX, OtlpExporter, pause_s
from llmtap.export.opentelemetry.otlp import OtlpLink, OtlpResponse, connect
from llmtap.export.options import OtlpOptions
from llmtap.export.sinks import SeriesKey
from llmtap.metrics.latency import measure
from tests.export.telemetry import MS, PARENT, SPAN, TRACE, chat
from tests.support.servers.otlp_receiver import GUARD_S, OtlpReceiver, plain

WALL_NS = 1_700_000_000_000_000_000
SERVERS = {"": ("gateway.example", 443)}
SOON = {"span_delay_s": 0.01, "backoff_s": (0.01, 0.05)}


def exporter(endpoint: str, **options: Any) -> OtlpExporter:
    """Sends at its end; a ManualClock keeps metrics from coming due before."""
    more = {key: options.pop(key) for key in ("span_delay_s", "backoff_s", "make_link") if key in options}
    options.setdefault("resource", "deployment.environment.name=test")
    return OtlpExporter(
        OtlpOptions(endpoint=endpoint, **options), ManualClock(now_ns=1), "1.2.3", SERVERS, **more
    )


def export(receiver: OtlpReceiver, *exchanges: Exchange, **options: Any) -> OtlpExporter:
    """Exports these exchanges, all of it."""
    e = exporter(receiver.endpoint, **options)
    e.start()
    for x in exchanges:
        e.ended(x, measure(x), SeriesKey("t", "m"), None)
    e.close(GUARD_S)
    return e


# ---------------------------------------------------------------- spans


def test_the_callers_span_is_the_parent() -> None:
    with OtlpReceiver() as receiver:
        export(receiver, chat(trace_parent=PARENT), chat(seq=2), chat(seq=2))
        child, root, again = receiver.spans
    assert (child.trace_id.hex(), child.parent_span_id.hex()) == (TRACE, SPAN)
    assert child.flags & 0xFF == 1
    assert child.flags & 0x300 == 0x300, "the parent is another process's"
    assert (len(root.trace_id), len(root.span_id), root.parent_span_id) == (16, 8, b"")
    assert (root.flags & 0xFF, root.flags & 0x300) == (3, 0x100)
    assert any(root.trace_id)
    assert (again.trace_id, again.span_id) == (root.trace_id, root.span_id), "found again by who knows the id"
    assert child.span_id not in (root.span_id, bytes.fromhex(SPAN))


@pytest.mark.parametrize(
    ("trace_parent", "options", "spans"),
    [
        (f"00-{TRACE}-{SPAN}-00", {}, 0),
        (f"00-{TRACE}-{SPAN}-00", {"sampler": "always"}, 1),
        (f"00-{TRACE}-{SPAN}-00", {"sampler": "always", "sample_ratio": 0.0}, 1),
        (PARENT, {"sample_ratio": 0.0}, 1),
        (None, {"sample_ratio": 0.0}, 0),
        ("not a traceparent", {"sample_ratio": 0.0}, 0),
        ("not a traceparent", {}, 1),
        (None, {"traces": False}, 0),
    ],
)
def test_who_gets_a_span(trace_parent: str | None, options: dict[str, object], spans: int) -> None:
    with OtlpReceiver() as receiver:
        e = export(receiver, chat(trace_parent=trace_parent), **options)
        assert len(receiver.spans) == spans == e.state().sent
        assert receiver.last_metrics, "metrics know no sampling"
        assert e.state().dropped == {}


def test_a_share_of_the_roots_is_sampled_by_their_ids() -> None:
    with OtlpReceiver() as receiver:
        export(receiver, *(chat(seq=i) for i in range(400)), sample_ratio=0.25, metrics=False)
        ids = {span.trace_id for span in receiver.spans}
    assert 60 < len(ids) < 140
    assert all(int.from_bytes(i[8:]) < 2**62 for i in ids)


def test_text_that_is_no_unicode_does_no_harm() -> None:
    with OtlpReceiver() as receiver:
        e = export(receiver, chat(model="\ud800", refusal={"kind": "model_refusal"}), chat())
        odd, _ = receiver.spans
    assert plain(odd.attributes)["gen_ai.request.model"] == "?"
    assert plain(odd.attributes)["llmtap.refusal.kind"] == "model_refusal"
    assert (e.state().sent, e.state().dropped) == (2, {})


# ---------------------------------------------------------------- metrics


def test_metrics_arrive_with_names_units_edges_and_exact_counts() -> None:
    with OtlpReceiver() as receiver:
        export(receiver, chat(), chat(110, 1110), semconv="1.41")
        found = receiver.last_metrics
    assert set(found) == {
        "gen_ai.client.operation.duration", "gen_ai.client.operation.time_to_first_chunk",
        "gen_ai.client.operation.time_per_output_chunk", "gen_ai.client.token.usage",
        "gen_ai.server.request.duration", "gen_ai.server.time_to_first_token",
        "gen_ai.server.time_per_output_token", "llmtap.time_to_first_token", "llmtap.inter_chunk",
        "llmtap.user_idle", "llmtap.exchanges",
    }  # fmt: skip
    duration = found["gen_ai.client.operation.duration"]
    assert duration.unit == "s"
    assert duration.histogram.aggregation_temporality == AGGREGATION_TEMPORALITY_CUMULATIVE
    (point,) = duration.histogram.data_points
    assert (point.count, point.sum) == (2, pytest.approx(0.261 + 1.121))
    assert list(point.explicit_bounds)[:6] == [0.01, 0.02, 0.04, 0.08, 0.16, 0.32]
    assert list(point.bucket_counts) == [0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    assert point.start_time_unix_nano == point.time_unix_nano == WALL_NS + 1
    assert plain(point.attributes) == {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "openai", "gen_ai.request.model": "gpt-x",
        "gen_ai.response.model": "gpt-x-2026-11-01", "llmtap.tenant": "default",
        "server.address": "gateway.example", "server.port": 443,
    }  # fmt: skip
    chunks = found["gen_ai.client.operation.time_per_output_chunk"].histogram.data_points[0]
    assert (chunks.count, chunks.sum) == (7, pytest.approx(0.160 + 1.020))
    usage = {plain(p.attributes)["gen_ai.token.type"]: p.sum for p in
             found["gen_ai.client.token.usage"].histogram.data_points}  # fmt: skip
    assert usage == {"input": 14, "output": 5}
    (exchanges,) = found["llmtap.exchanges"].sum.data_points
    assert (exchanges.as_int, found["llmtap.exchanges"].sum.is_monotonic) == (2, True)


def test_many_series_go_in_several_requests_and_all_arrive() -> None:
    with OtlpReceiver() as receiver:
        export(receiver, *(chat(model=f"m{i}") for i in range(300)), traces=False)
        assert len(receiver.metrics) > 1
        models = {
            plain(point.attributes)["gen_ai.request.model"]
            for request in receiver.metrics
            for metric in request.resource_metrics[0].scope_metrics[0].metrics
            if metric.name == "gen_ai.client.operation.duration"
            for point in metric.histogram.data_points
        }
    assert len(models) == 300


def test_metrics_go_out_by_the_clock() -> None:
    clock = ManualClock(now_ns=1)
    with OtlpReceiver() as receiver:
        options = OtlpOptions(endpoint=receiver.endpoint, interval=60_000 * MS)  # type: ignore[arg-type]
        e = OtlpExporter(options, clock, "1", span_delay_s=0.01)
        e.start()
        x = chat()
        e.ended(x, measure(x), SeriesKey("t", "m"), None)
        receiver.wait(lambda: len(receiver.spans) == 1)
        assert receiver.metrics == []
        clock.advance(60_000 * MS)
        receiver.wait(lambda: len(receiver.metrics) == 1)
        e.close(GUARD_S)


# ---------------------------------------------------------------- a receiver that is away, full or unwilling


class Watched:
    """A link that tells when a send failed."""

    def __init__(self, options: OtlpOptions) -> None:
        self.failed = threading.Event()
        self._link = connect(options)

    def send(self, signal: str, body: bytes, timeout_s: float) -> OtlpResponse:
        answer = self._link.send(signal, body, timeout_s)
        if not answer.ok:
            self.failed.set()
        return answer

    def close(self) -> None:
        self._link.close()


def test_a_receiver_that_was_away_gets_everything_when_it_is_back() -> None:
    links: list[Watched] = []

    def watched(options: OtlpOptions) -> OtlpLink:
        links.append(Watched(options))
        return links[0]

    with OtlpReceiver() as receiver:
        receiver.stop()
        e = exporter(receiver.endpoint, make_link=watched, **SOON)
        e.start()
        for i in range(1, 11):
            x = chat(seq=i)
            e.ended(x, measure(x), SeriesKey("t", "m"), None)
        assert links[0].failed.wait(GUARD_S)
        receiver.start()
        receiver.wait(lambda: len(receiver.spans) == 10)
        x = chat(seq=11)
        e.ended(x, measure(x), SeriesKey("t", "m"), None)
        e.close(GUARD_S)
        assert len({span.span_id for span in receiver.spans}) == 11
        assert receiver.last_metrics["llmtap.exchanges"].sum.data_points[0].as_int == 11
    state = e.state()
    assert (state.sent, state.queued, state.dropped) == (11, 0, {})
    assert state.failures >= 1


@pytest.mark.parametrize(
    ("failures", "after_s", "least", "most"),
    [
        (1, 0.0, 1.0, 1.25),
        (2, 0.0, 5.0, 6.25),
        (99, 0.0, 5.0, 6.25),
        (1, 20.0, 20.0, 20.0),
        (2, 1e6, 60.0, 60.0),
    ],
)
def test_pauses_grow_to_a_bound_and_heed_the_receiver(
    failures: int, after_s: float, least: float, most: float
) -> None:
    pauses = [pause_s((1.0, 5.0), failures, after_s) for _ in range(50)]
    assert least <= min(pauses) <= max(pauses) <= most


class Stuck:
    """A link whose receiver never answers."""

    def __init__(self, options: OtlpOptions) -> None:
        self.asked = threading.Event()
        self.closed = threading.Event()

    def send(self, signal: str, body: bytes, timeout_s: float) -> OtlpResponse:
        self.asked.set()
        assert self.closed.wait(GUARD_S)
        return OtlpResponse(False, again=True, problem="closed")

    def close(self) -> None:
        self.closed.set()


def test_the_queue_has_a_bound_and_every_span_is_accounted_for() -> None:
    stuck = Stuck(OtlpOptions())
    e = exporter("http://x", make_link=lambda _: stuck, queue_max=5, span_delay_s=0.01)
    e.start()
    x = chat()
    m = measure(x)
    e.ended(x, m, SeriesKey("t", "m"), None)
    assert stuck.asked.wait(GUARD_S)
    for _ in range(100):
        e.ended(x, m, SeriesKey("t", "m"), None)  # a receiver that hangs does not hold up who calls
    assert e.state().queued == 5, "those on their way included"
    assert e.state().dropped == {"queue_full": 96}
    e.close(0.05)
    state = e.state()
    assert (state.sent, state.queued) == (0, 0)
    assert state.dropped == {"queue_full": 96, "shutdown": 5}


def test_the_end_does_not_wait_for_a_receiver_that_hangs() -> None:
    with OtlpReceiver() as receiver:
        receiver.hold = threading.Event()
        e = exporter(receiver.endpoint)
        e.start()
        x = chat()
        e.ended(x, measure(x), SeriesKey("t", "m"), None)
        e.close(0.2)
        assert (e.state().sent, e.state().dropped) == (0, {"shutdown": 1})
        receiver.hold.set()


def test_more_than_a_batch_goes_in_several_requests() -> None:
    with OtlpReceiver() as receiver:
        n = 2 * BATCH_MAX + 1
        e = export(receiver, *(chat(seq=i) for i in range(n)), metrics=False)
        assert max(len(r.resource_spans[0].scope_spans[0].spans) for r in receiver.traces) <= BATCH_MAX
        assert len({span.span_id for span in receiver.spans}) == n == e.state().sent


RETRY_INFO = b"\x08\x08\x1a\x2a\x0a\x28type.googleapis.com/google.rpc.RetryInfo"


@pytest.mark.parametrize(
    ("code", "details", "again"),
    [
        (grpc.StatusCode.UNAVAILABLE, None, True),
        (grpc.StatusCode.DEADLINE_EXCEEDED, None, True),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, RETRY_INFO, True),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, None, False),
        (grpc.StatusCode.INVALID_ARGUMENT, None, False),
        (grpc.StatusCode.UNIMPLEMENTED, None, False),
        (grpc.StatusCode.PERMISSION_DENIED, None, False),
    ],
)
def test_a_refusal_is_tried_again_where_that_may_help(
    code: grpc.StatusCode, details: bytes | None, again: bool
) -> None:
    with OtlpReceiver() as receiver:
        receiver.refuse, receiver.details = code, details
        e = exporter(receiver.endpoint, metrics=False, **SOON)
        e.start()
        x = chat()
        e.ended(x, measure(x), SeriesKey("t", "m"), None)
        receiver.wait(lambda: receiver.refused >= (2 if again else 1))
        receiver.refuse = None
        x = chat(seq=2)
        e.ended(x, measure(x), SeriesKey("t", "m"), None)
        e.close(GUARD_S)
        assert len(receiver.spans) == (2 if again else 1)
    assert e.state().sent == len(receiver.spans)
    assert e.state().dropped == ({} if again else {"refused": 1})


def test_what_a_receiver_rejects_of_a_batch_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    with OtlpReceiver() as receiver:
        receiver.reject = 2
        e = export(receiver, *(chat(seq=i) for i in range(5)), metrics=False)
    assert (e.state().sent, e.state().dropped) == (3, {"rejected": 2})
    assert [r for r in caplog.records if "otlp_rejected" in r.getMessage()]


def test_a_bug_of_ours_costs_a_batch_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Stuck):
        def send(self, signal: str, body: bytes, timeout_s: float) -> OtlpResponse:
            raise RuntimeError("odd")

    e = exporter("http://x", make_link=Broken, metrics=False)
    e.start()
    x = chat()
    e.ended(x, measure(x), SeriesKey("t", "m"), None)
    e.close(GUARD_S)
    assert e.state().dropped == {"refused": 1}
    assert len([r for r in caplog.records if "otlp_bug" in r.getMessage()]) == 1


# ---------------------------------------------------------------- who we are, and TLS


def test_headers_go_along_and_the_service_has_the_operators_name() -> None:
    with OtlpReceiver() as receiver:
        export(receiver, chat(), headers="API-Key=s3cret, x-scope=a%20b", service_name="edge")
        assert receiver.metadata["api-key"] == "s3cret"
        assert receiver.metadata["x-scope"] == "a b"
        named = plain(receiver.traces[0].resource_spans[0].resource.attributes)
    assert named["service.name"] == "edge"


def test_tls_is_checked_against_the_authorities_given(tmp_path: Path) -> None:
    ca, other = trustme.CA(), trustme.CA()
    server = ca.issue_cert("localhost")
    credentials = grpc.ssl_server_credentials(
        [(server.private_key_pem.bytes(), b"".join(pem.bytes() for pem in server.cert_chain_pems))]
    )
    trusted, untrusted = tmp_path / "ca.pem", tmp_path / "other.pem"
    ca.cert_pem.write_to_path(trusted)
    other.cert_pem.write_to_path(untrusted)
    with OtlpReceiver(credentials) as receiver:
        assert receiver.endpoint.startswith("https://")
        assert export(receiver, chat(), ca=str(trusted)).state().sent == 1
        e = exporter(receiver.endpoint, ca=str(untrusted))
        e.start()
        x = chat()
        e.ended(x, measure(x), SeriesKey("t", "m"), None)
        e.close(2.0)
        assert e.state().dropped == {"shutdown": 1}
        assert len(receiver.spans) == 1


def test_a_file_of_authorities_that_cannot_be_read_is_named() -> None:
    with pytest.raises(ConfigError) as told:
        exporter("https://localhost:1", ca="/none/ca.pem")
    assert told.value.place == "otlp.ca"
    with pytest.raises(ConfigError) as told:
        exporter("https://localhost:1", ca="/none/ca.pem", protocol="http/protobuf")
    assert told.value.place == "otlp.ca"


def test_http_that_is_no_operation_is_a_plain_client_span() -> None:
    with OtlpReceiver() as receiver:
        export(receiver, chat(endpoint=None, method="GET", path="/v1/models", stream=False))
        (span,) = receiver.spans
    assert span.name == "GET"
    assert not [key for key in plain(span.attributes) if key.startswith("gen_ai.")]
    assert plain(span.attributes)["url.path"] == "/v1/models"


def test_the_resource_may_name_the_service_as_well() -> None:
    with OtlpReceiver() as receiver:
        export(receiver, chat(), resource="service.name=edge,service.version=9,team=llm")
        named = plain(receiver.traces[0].resource_spans[0].resource.attributes)
    assert {key: named[key] for key in ("service.name", "service.version", "team")} == {
        "service.name": "edge", "service.version": "9", "team": "llm",
    }  # fmt: skip


def test_without_an_endpoint_the_meter_loads_none_of_it() -> None:
    code = (
        "import sys, llmtap.meter.process, llmtap.config\n"
        "print([m for m in sys.modules if m in ('grpc', 'google.protobuf')])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "[]\n"
