"""From a client's traceparent, through a real proxy, to a real receiver."""

import http.client
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.export.telemetry import PARENT, SPAN, TRACE
from tests.support.servers.live_proxy import port_free
from tests.support.servers.otlp_receiver import OtlpReceiver, plain

GUARD_S = 60.0
CLEAN = {k: v for k, v in os.environ.items() if not k.startswith(("LLMTAP_", "OTEL_"))}
EVENTS = (
    '{"model":"tiny-1","choices":[{"index":0,"delta":{"role":"assistant"}}]}',
    '{"model":"tiny-1","choices":[{"index":0,"delta":{"content":"Hi"}}]}',
    '{"model":"tiny-1","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}',
    '{"model":"tiny-1","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1}}',
    "[DONE]",
)


class Gateway(BaseHTTPRequestHandler):
    heads: "list[dict[str, str]]" = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.heads.append({name.lower(): value for name, value in self.headers.items()})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for event in EVENTS:
            self.wfile.write(f"data: {event}\n\n".encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def gateway() -> Iterator[int]:
    Gateway.heads.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join(GUARD_S)


def ask(port: int, method: str, path: str, body: bytes = b"", **fields: str) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=GUARD_S)
    try:
        connection.request(method, path, body, fields)
        return connection.getresponse().read()
    finally:
        connection.close()


@contextmanager
def proxy(gateway: int, environ: dict[str, str], *settings: str) -> Iterator[tuple[int, int]]:
    """A proxy with these settings: its port and its admin port. It ends in order with the block."""
    listen, admin = port_free(), port_free()
    sets = [part for setting in ("log.level=warning", *settings) for part in ("--set", setting)]
    process = subprocess.Popen(
        [sys.executable, "-m", "llmtap.cli", "proxy", "--upstream", f"http://127.0.0.1:{gateway}",
         "--listen", f"127.0.0.1:{listen}", "--admin", f"127.0.0.1:{admin}", *sets],
        env=CLEAN | environ, cwd=Path(__file__).parents[3], stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until(lambda: ask(admin, "GET", "/readyz") == b"ready\n")
        yield listen, admin
        process.send_signal(signal.SIGTERM)
        assert process.wait(GUARD_S) == 0
    finally:
        process.kill()
        process.wait(GUARD_S)


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + GUARD_S
    while time.monotonic() < end:
        try:
            if true():
                return
        except OSError:
            pass
        time.sleep(0.05)
    raise AssertionError("waited in vain")


CHAT = b'{"model":"tiny","stream":true,"messages":[{"role":"user","content":"a secret"}]}'


def test_a_request_becomes_a_span_of_its_callers_trace(gateway: int) -> None:
    with OtlpReceiver() as receiver:
        with proxy(gateway, {}, f"otlp.endpoint={receiver.endpoint}") as (listen, admin):
            answer = ask(listen, "POST", "/v1/chat/completions", CHAT, traceparent=PARENT, tracestate="a=b")
            assert answer.endswith(b"data: [DONE]\n\n")
            receiver.wait(lambda: len(receiver.spans) == 1)
            until(lambda: b'llmtap_export_sent_total{exporter="otlp"} 1.0' in ask(admin, "GET", "/metrics"))
        (span,) = receiver.spans
        metrics = receiver.last_metrics
    assert Gateway.heads[0]["traceparent"] == PARENT, "forwarded unchanged"
    assert Gateway.heads[0]["tracestate"] == "a=b"
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, SPAN)
    said = plain(span.attributes)
    assert span.name == "chat tiny"
    assert said["gen_ai.response.model"] == "tiny-1"
    assert said["gen_ai.usage.input_tokens"] == 9
    assert said["server.address"] == "127.0.0.1"
    assert said["server.port"] == gateway
    assert said["llmtap.outcome"] == "complete"
    assert metrics["gen_ai.client.operation.duration"].histogram.data_points[0].count == 1
    everything = b"".join(request.SerializeToString() for request in [*receiver.traces, *receiver.metrics])
    assert b"secret" not in everything
    assert b"Hi" not in everything


def test_without_an_endpoint_the_meter_loads_none_of_it() -> None:
    code = (
        "import sys, llmtap.meter.process, llmtap.config\n"
        "print([m for m in sys.modules if m in ('grpc', 'google.protobuf')])"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=GUARD_S, env=CLEAN,
        cwd=Path(__file__).parents[3], check=True,
    )  # fmt: skip
    assert told.stdout == "[]\n"
