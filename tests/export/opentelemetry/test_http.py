"""OTLP over HTTP, to a real server on loopback."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from zlib import decompress

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from llmtap.clock import ManualClock
from llmtap.export.opentelemetry.exporter import OtlpExporter
from llmtap.export.options import OtlpOptions
from llmtap.export.sinks import ExporterState, SeriesKey
from llmtap.metrics.latency import measure
from tests.export.telemetry import chat

GUARD_S = 60.0


class Server(ThreadingHTTPServer):
    """Answers spans with `answer` (status, body), and everything else with 200."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = (200, b"")
        self.got: dict[str, tuple[dict[str, str], bytes]] = {}


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got[self.path] = {k.lower(): v for k, v in self.headers.items()}, body
        status, answer = self.server.answer if self.path.endswith("traces") else (200, b"")
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join(GUARD_S)


def export(server: Server) -> ExporterState:
    url = f"http://127.0.0.1:{server.server_address[1]}/prefix/"
    e = OtlpExporter(
        OtlpOptions(endpoint=url, protocol="http/protobuf"),
        ManualClock(now_ns=1),
        "1",
    )
    x = chat()
    e.on_end(x, measure(x), SeriesKey("t", "m"), None)
    e.close(GUARD_S)
    return e.state()


def test_spans_and_metrics_arrive_at_their_paths(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_COMPRESSION", "deflate")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=k")
    state = export(server)
    assert set(server.got) == {"/prefix/v1/traces", "/prefix/v1/metrics"}
    for fields, _ in server.got.values():
        assert (fields["content-type"], fields["x-key"]) == ("application/x-protobuf", "k")
    traces = ExportTraceServiceRequest.FromString(server.got["/prefix/v1/traces"][1])
    assert [span.name for span in traces.resource_spans[0].scope_spans[0].spans] == ["chat gpt-x"]
    metrics = decompress(server.got["/prefix/v1/metrics"][1])
    assert ExportMetricsServiceRequest.FromString(metrics).resource_metrics
    assert (state.sent, state.dropped) == (1, {})


@pytest.mark.parametrize(
    ("status", "body", "sent", "dropped"),
    [
        (204, b"", 1, {}),
        (200, b"\xff\xff\xff", 1, {}),
        (200, b"rejected", 0, {"rejected": 1}),
        (400, b"", 0, {"refused": 1}),
        (429, b"", 0, {"shutdown": 1}),
    ],
)
def test_every_answer_is_accounted_for(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    body: bytes,
    sent: int,
    dropped: dict[str, int],
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    if body == b"rejected":
        response = ExportTraceServiceResponse()
        response.partial_success.rejected_spans = 1
        body = response.SerializeToString()
    server.answer = status, body
    state = export(server)
    assert (state.sent, state.dropped) == (sent, dropped)
