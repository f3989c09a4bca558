"""OTLP over HTTP, to a real server on loopback."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from llmtap.clock import ManualClock
from llmtap.export.opentelemetry.exporter import OtlpExporter
from llmtap.export.opentelemetry.otlp import METRICS, TRACES, OtlpResponse, connect
from llmtap.export.options import OtlpOptions
from llmtap.export.sinks import SeriesKey
from llmtap.metrics.latency import measure
from tests.export.telemetry import chat

GUARD_S = 60.0


class Server(ThreadingHTTPServer):
    """Answers each request with the next of `answers` (status, fields, body), then with 200."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[tuple[int, dict[str, str], bytes]] = []
        self.got: list[tuple[str, dict[str, str], bytes]] = []
        self.connections = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        self.server.connections += 1
        super().setup()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
        status, fields, answer = self.server.answers.pop(0) if self.server.answers else (200, {}, b"")
        self.send_response(status)
        for name, value in {"Content-Length": str(len(answer)), **fields}.items():
            self.send_header(name, value)
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


def options(url: str, **more: object) -> OtlpOptions:
    return OtlpOptions(endpoint=url, protocol="http/protobuf", **more)  # type: ignore[arg-type]


def test_spans_and_metrics_arrive_at_their_paths_on_one_connection(server: Server) -> None:
    e = OtlpExporter(options(f"{server.url}/prefix/", headers="x-key=k"), ManualClock(now_ns=1), "1")
    e.start()
    x = chat()
    e.ended(x, measure(x), SeriesKey("t", "m"), None)
    e.close(GUARD_S)
    assert [path for path, _, _ in server.got] == ["/prefix/v1/traces", "/prefix/v1/metrics"]
    assert server.connections == 1
    for _, fields, _ in server.got:
        assert (fields["content-type"], fields["x-key"]) == ("application/x-protobuf", "k")
    spans = ExportTraceServiceRequest.FromString(server.got[0][2]).resource_spans[0].scope_spans[0].spans
    assert [span.name for span in spans] == ["chat gpt-x"]
    assert ExportMetricsServiceRequest.FromString(server.got[1][2]).resource_metrics
    assert (e.state().sent, e.state().dropped) == (1, {})


@pytest.mark.parametrize(
    ("status", "fields", "expected"),
    [
        (204, {}, OtlpResponse(True)),
        (400, {}, OtlpResponse(False, problem="HTTP 400")),
        (301, {"Location": "/x"}, OtlpResponse(False, problem="HTTP 301")),
        (404, {}, OtlpResponse(False, problem="HTTP 404")),
        (500, {}, OtlpResponse(False, problem="HTTP 500")),
        (429, {"Retry-After": "7"}, OtlpResponse(False, again=True, problem="HTTP 429", after_s=7.0)),
        (502, {}, OtlpResponse(False, again=True, problem="HTTP 502")),
        (
            503,
            {"Retry-After": "Fri, 20 Nov 2026 10:00:00 GMT"},
            OtlpResponse(False, True, problem="HTTP 503"),
        ),
        (504, {"Retry-After": "1234567"}, OtlpResponse(False, True, problem="HTTP 504")),
    ],
)
def test_what_an_answer_means(
    server: Server, status: int, fields: dict[str, str], expected: OtlpResponse
) -> None:
    server.answers.append((status, fields, b""))
    link = connect(options(server.url))
    assert link.send(TRACES, b"", GUARD_S) == expected
    assert link.send(METRICS, b"", GUARD_S) == OtlpResponse(True), "the link goes on"
    link.close()


def test_partial_success_is_read_and_nonsense_is_success(server: Server) -> None:
    traces, metrics = ExportTraceServiceResponse(), ExportMetricsServiceResponse()
    traces.partial_success.rejected_spans = 3
    traces.partial_success.error_message = "too old"
    metrics.partial_success.rejected_data_points = 4
    server.answers += [
        (200, {}, traces.SerializeToString()),
        (200, {}, metrics.SerializeToString()),
        (200, {}, b"\xff\xff\xff"),
        (200, {}, b"x" * ((1 << 20) + 5)),
    ]
    link = connect(options(server.url))
    assert link.send(TRACES, b"", GUARD_S) == OtlpResponse(True, rejected=3, problem="too old")
    assert link.send(METRICS, b"", GUARD_S) == OtlpResponse(True, rejected=4)
    assert link.send(TRACES, b"", GUARD_S) == OtlpResponse(True)
    assert link.send(TRACES, b"", GUARD_S) == OtlpResponse(True), "an endless answer is left unread"
    assert link.send(TRACES, b"", GUARD_S) == OtlpResponse(True)
    link.close()


def test_a_connection_that_was_closed_is_opened_again(server: Server) -> None:
    server.answers += [(200, {"Connection": "close"}, b"")]
    link = connect(options(server.url))
    assert link.send(TRACES, b"", GUARD_S).ok
    assert link.send(TRACES, b"", GUARD_S).ok
    assert server.connections == 2
    link.close()


def test_a_server_that_is_away_is_worth_another_try() -> None:
    with Server() as gone:
        url = gone.url
    link = connect(options(url))
    answer = link.send(TRACES, b"", GUARD_S)
    assert (answer.ok, answer.again) == (False, True)
    assert "Refused" in answer.problem
    link.close()
