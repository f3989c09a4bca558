"""A server that a command starts: its model load is measured, and the process ends with the run."""

import json
import socket
import sys
from pathlib import Path

import pytest

from llmtap.bench.sut.detect import round_trip_ns
from llmtap.bench.sut.start import ModelLoad, running_server
from llmtap.bench.sut.sut import BenchTarget
from llmtap.clock import SystemClock
from llmtap.errors import ConfigError, LlmtapError
from tests.support.servers.live_proxy import port_free
from tests.support.servers.peer import play

SLOW = """
import http.server, json, sys, time
time.sleep(0.3)
ready_at, posts = time.monotonic() + 0.3, []

class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, status, kind, body):
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        ok = time.monotonic() >= ready_at
        self.answer(200 if ok else 503, "application/json", b'{"data": [{"id": "m"}]}')
    def do_POST(self):
        posts.append(time.monotonic())
        self.rfile.read(int(self.headers["content-length"]))
        if len(posts) == 1:
            return self.answer(500, "text/plain", b"loading")
        time.sleep(0.2)
        print(json.dumps([*posts, time.monotonic()]), flush=True)
        self.answer(200, "text/event-stream", b'data: {"choices": [{"text": "sea"}]}\\n\\ndata: [DONE]\\n\\n')

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


STAMPS_APART_S = 0.001
"""The server reads the monotonic clock; the kernel's timestamps are on the wall clock."""


@pytest.fixture
def port() -> int:
    return port_free()


def slow(port: int) -> list[str]:
    return [sys.executable, "-c", SLOW, str(port)]


def target(port: int) -> BenchTarget:
    return BenchTarget(url=f"http://127.0.0.1:{port}", endpoint="completions")


async def start(command: list[str], to: BenchTarget, log: Path, stop_after: int = 1 << 30) -> ModelLoad:
    """The model load. `stop_after`: number of checks before a signal to stop."""
    checks = 0

    def check() -> None:
        nonlocal checks
        checks += 1
        if checks > stop_after:
            raise LlmtapError("stopped")

    try:
        async with running_server(command, to, log, SystemClock(), check) as load:
            return load
    finally:
        assert await round_trip_ns(to.url, SystemClock()) is None, "its process has ended"


def test_each_step_of_the_start_is_timed(tmp_path: Path, port: int) -> None:
    load = play(start(slow(port), target(port), tmp_path / "log"), 120)
    assert load.port_open >= 0.3
    assert load.ready >= load.port_open
    assert load.ready >= 0.6
    assert load.failed_before == 1
    (line,) = [text for text in (tmp_path / "log").read_text().splitlines() if text.startswith("[")]
    first, second, answered = json.loads(line)
    assert load.ttft is not None and load.ttft >= answered - second - STAMPS_APART_S
    assert load.first_token - load.ready >= answered - first - STAMPS_APART_S


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (
            [sys.executable, "-c", "print('no GPU'); raise SystemExit(3)"],
            "the server ended with status 3: no GPU",
        ),
        (["/nowhere/engine"], "cannot start /nowhere/engine: No such file or directory"),
    ],
)
def test_a_server_that_does_not_start_is_an_error(
    command: list[str], problem: str, tmp_path: Path, port: int
) -> None:
    with pytest.raises(ConfigError) as caught:
        play(start(command, target(port), tmp_path / "log"), 120)
    assert (caught.value.place, caught.value.problem) == ("sut.start", problem)


def test_a_server_that_already_listens_is_no_cold_start(tmp_path: Path) -> None:
    async def beside() -> None:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            to = target(sock.getsockname()[1])
            async with running_server(["true"], to, tmp_path / "log", SystemClock(), lambda: None):
                pass

    with pytest.raises(ConfigError) as caught:
        play(beside(), 120)
    assert caught.value.place == "sut.start"


def test_a_stop_while_it_loads_ends_it(tmp_path: Path, port: int) -> None:
    with pytest.raises(LlmtapError, match="stopped"):
        play(start(slow(port), target(port), tmp_path / "log", stop_after=5), 120)
