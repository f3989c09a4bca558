"""Other scopes than requests, mistakes of apps and of ours: what must never reach the app."""

import asyncio
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from llmtap.errors import ConfigError
from llmtap.meter.pipeline.receiver import listen_on
from llmtap.vantage.middleware.asgi import LlmtapMiddleware, Message, Receive, Scope, Send
from llmtap.vantage.middleware.exchange import Emitters
from tests.support.servers.peer import wait_until
from tests.vantage.middleware.asgi import Server, asked, http_scope, watched
from tests.vantage.middleware.test_asgi import STREAM, WHOLE, answering, app_of, take_all

# ---------------------------------------------------------------- other scopes


async def test_a_websocket_passes_unmeasured_and_is_counted() -> None:
    calls: list[tuple[Any, ...]] = []

    async def app(*args: Any) -> None:
        calls.append(args)

    async def receive() -> Message:
        return {}

    async def send(message: Message) -> None: ...

    async with watched(app) as of:
        scope = {"type": "websocket", "path": "/v1/realtime", "headers": []}
        await of.app(scope, receive, send)
        assert calls == [(scope, receive, send)]
        assert of.ledger.dropped == {"websocket": 1}


@pytest.mark.parametrize(
    ("kind", "path"), [("http", "/v1/chat/completions"), ("http", "/health"), ("websocket", "/v1/realtime")]
)
async def test_the_app_does_not_get_the_label_of_a_request(kind: str, path: str) -> None:
    scopes: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(scope)
        for message in WHOLE:
            await send(message)

    async with watched(app, skip=("/health",)) as of:
        server = Server(asked(b"{}"))
        scope = http_scope(path=path, state={}) | {"type": kind}
        host, content_type = scope["headers"]
        scope["headers"] = [host, (b"X-Llmtap-Label", b"should-refuse"), content_type]
        before = scope | {"headers": list(scope["headers"])}
        await of.app(scope, server.receive, server.send)
        assert scopes == [before | {"headers": [host, content_type]}]
        assert scopes[0]["state"] is scope["state"] and scope == before, "nothing else differs"
        if of.ledger.opened and kind == "http":
            assert b"should-refuse" in (await of.seen()).request, "the meter has the label"


async def test_skipped_requests_are_counted_by_rule_and_not_measured() -> None:
    calls: list[tuple[Any, ...]] = []

    async def app(*args: Any) -> None:
        calls.append(args)
        if args[0]["type"] == "http":
            for message in WHOLE:
                await args[2](message)

    async def receive() -> Message:
        return {}

    async with watched(app, skip=("/health", "/metrics")) as of:
        server = Server(asked(b""))
        probe = http_scope("GET", "/health/live")
        await of.app(probe, server.receive, server.send)
        assert server.sent == WHOLE
        assert calls == [(probe, server.receive, server.send)], "the app has what its server gave"
        await of.app({"type": "websocket", "path": "/metrics", "headers": []}, receive, server.send)
        assert len(calls) == 2
        assert of.ledger.opened == 0
        assert of.emitter.status().skipped == {"/health": 1, "/metrics": 1}
        await of.call(asked(b""), method="GET", path="/healthz")
        assert b"/healthz" in (await of.seen()).request
        assert of.ledger.opened == 1


async def test_at_the_apps_end_the_meter_has_everything_first() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await answering(*STREAM)(receive, send)
            return
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async with watched(app) as of:
        down = asyncio.Event()
        sent: list[str] = []
        words = iter(["lifespan.startup", "lifespan.shutdown"])

        async def receive() -> Message:
            word = next(words)
            if word == "lifespan.shutdown":
                await down.wait()
            return {"type": word}

        async def send(message: Message) -> None:
            sent.append(message["type"])

        life = asyncio.create_task(of.app({"type": "lifespan"}, receive, send))
        await wait_until(lambda: sent)
        await wait_until(lambda: of.meter.hellos)
        ledger = of.ledger
        await of.call(asked(b"{}"))
        down.set()
        await life
        assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
        assert ledger.measured == 1, "acknowledged before the server may end the process"
        await wait_until(lambda: of.meter.statuses)
        assert of.meter.statuses[-1].draining


# ---------------------------------------------------------------- what must never reach the app


class Broken:
    """A channel in which everything goes wrong."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("planted")


@pytest.mark.parametrize("broken", ["at the start", "in the middle"])
async def test_our_own_failures_do_not_reach_the_app(broken: str, caplog: pytest.LogCaptureFixture) -> None:
    async def tell(receive: Receive, send: Send) -> None:
        await take_all(receive)
        await send(STREAM[0])
        if broken == "in the middle":
            (exchange,) = of.emitter.arrivals
            exchange._tap = Broken()  # type: ignore[attr-defined]
        for message in STREAM[1:]:
            await send(message)

    async with watched(app_of(tell)) as of:
        await wait_until(lambda: of.meter.hellos)
        more = {"headers": None} if broken == "at the start" else {}
        scope = http_scope()
        scope.update(more)
        server = Server(asked(b"{}"))
        await of.app(scope, server.receive, server.send)
        assert server.sent == STREAM
        assert of.ledger.dropped == {"middleware_error": 1}
        await of.app(http_scope(), *_ends(server := Server(asked(b"{}"))))
        assert server.sent == STREAM
        assert of.ledger.opened == 2
    lines = [r.getMessage() for r in caplog.records if "middleware_error" in r.getMessage()]
    assert len(lines) == 1, "told once for each kind"
    assert "planted" not in lines[0], "an error's text may quote a header"


WITHOUT_A_METER = """
import asyncio, os, sys
from llmtap.vantage.middleware import exchange
exchange.NO_METER_S = exchange.STATUS_S = 0.01
write, told = sys.stderr.write, asyncio.Event()
def note(text):
    if "WARNING" in text:
        told.set()
    return write(text)
sys.stderr.write = note
async def run():
    emitters = exchange.Emitters(sys.argv[1], 1 << 20)
    emitters.current()
    await told.wait()
    await asyncio.sleep(0.1)
    await emitters.close()
os.seteuid(int(sys.argv[2]))
asyncio.run(run())
"""


def warning_without_a_meter(path: Path, uid: int) -> str:
    args = [sys.executable, "-c", WITHOUT_A_METER, str(path), str(uid)]
    done = subprocess.run(args, capture_output=True, text=True, timeout=60)
    *lost, line = done.stderr.splitlines()
    assert all(line.startswith("event=meter_lost unmeasured=0 ") for line in lost) and len(lost) <= 1
    told = re.match(r"llmtap \d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} WARNING event=(\w+) ", line)
    assert told is not None, line
    assert f"socket={path} " in line
    return told[1]


def test_a_missing_meter_is_reported_once_with_prefix_and_time() -> None:
    assert warning_without_a_meter(Path("/nowhere/tap.sock"), os.geteuid()) == "no_meter"


def test_a_directory_that_others_may_write_to_is_reported(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    args = [sys.executable, "-c", WITHOUT_A_METER, str(tmp_path / "tap.sock"), str(os.geteuid())]
    done = subprocess.run(args, capture_output=True, text=True, timeout=60)
    assert re.findall(r"event=(\w+)", done.stderr) == ["meter_socket_exposed", "no_meter"]


@pytest.mark.machine
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_a_meter_of_another_user_is_reported_as_such(mode: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, path = Path(name), Path(name) / "tap.sock"
        folder.chmod(mode)
        with listen_on(str(path)):
            assert warning_without_a_meter(path, 65_534) == "meter_denied"


def _ends(server: Server) -> tuple[Receive, Send]:
    return server.receive, server.send


async def test_garbage_from_an_app_meets_the_server_and_not_us() -> None:
    garbage: list[Any] = [{"type": "http.response.start"}, {}, {"type": "http.response.body", "body": "text"}]

    class Tolerant(Server):
        async def send(self, message: Message) -> None:
            self.sent.append(message)

    async with watched(app_of(answering(*garbage))) as of:
        server = Tolerant(asked(b"{}"))
        await of.app(http_scope(), server.receive, server.send)
        assert server.sent == garbage
        assert of.ledger.dropped == {"middleware_error": 1}


@pytest.mark.parametrize(
    ("options", "place"),
    [({"socket": ""}, "socket"), ({"socket": "/" + "x" * 200}, "socket"), ({"tap_bytes": 10}, "tap_bytes")],
)
def test_what_a_user_sets_wrong_is_told_at_the_start(options: dict[str, Any], place: str) -> None:
    with pytest.raises(ConfigError) as told:
        LlmtapMiddleware(app_of(answering()), **{"socket": "/tmp/x", **options})
    assert told.value.place == place


def test_each_loop_has_an_emitter_of_its_own() -> None:
    emitters = Emitters("/nowhere/tap.sock", 1 << 20)

    async def name() -> str:
        here = emitters.current()
        assert here is not None
        assert emitters.current() is here
        await emitters.close()
        return here.name

    assert len({asyncio.run(name()) for _ in range(3)}) == 3
    assert emitters.current() is None, "no loop runs, and nothing is raised"


def test_the_app_is_called_where_there_is_no_loop_of_asyncio() -> None:
    """As on trio: nothing is measured, and the app is called all the same."""
    called = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        called.append(scope["type"])

    middleware = LlmtapMiddleware(app, socket="/nowhere/tap.sock")
    work = middleware(http_scope(), *_ends_of_nobody())
    with pytest.raises(StopIteration):
        work.send(None)  # type: ignore[attr-defined]
    assert called == ["http"]


def _ends_of_nobody() -> tuple[Receive, Send]:
    async def receive() -> Message:
        return {}

    async def send(message: Message) -> None: ...

    return receive, send
