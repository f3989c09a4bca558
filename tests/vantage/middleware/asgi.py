"""An ASGI server reduced to its messages, and an app with the tap around it, whose meter keeps the frames."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from typing import Any

from llmtap.channel import Ledger
from llmtap.vantage.middleware.asgi import App, LlmtapMiddleware, Message
from llmtap.vantage.middleware.exchange import Emitter
from tests.support.servers.peer import wait_until
from tests.support.servers.proxy import FakeMeter, Recording


def http_scope(method: str = "POST", path: str = "/v1/chat/completions", **more: Any) -> dict[str, Any]:
    """A request as a server announces it. `headers` are pairs of text."""
    headers = more.pop("headers", [("host", "app.test"), ("content-type", "application/json")])
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(n.lower().encode(), v.encode()) for n, v in headers],
        "client": ("127.0.0.1", 9),
        "server": ("127.0.0.1", 80),
        **more,
    }


def asked(*pieces: bytes) -> list[Message]:
    """A request's body in these pieces; at least one."""
    pieces = pieces or (b"",)
    last = len(pieces) - 1
    return [{"type": "http.request", "body": piece, "more_body": i < last} for i, piece in enumerate(pieces)]


def said(*pieces: bytes, status: int = 200, headers: Iterable[tuple[bytes, bytes]] = ()) -> list[Message]:
    """A whole answer, its body in these pieces; at least one."""
    pieces = pieces or (b"",)
    last = len(pieces) - 1
    start: Message = {"type": "http.response.start", "status": status, "headers": list(headers)}
    return [
        start,
        *(
            {"type": "http.response.body", "body": piece, "more_body": i < last}
            for i, piece in enumerate(pieces)
        ),
    ]


class Server:
    """What a server is to an app: says the request's messages, keeps the answer's.

    When all is said, `receive` waits until the client has left, or the answer is complete, as servers do.
    """

    def __init__(self, messages: Iterable[Message], *, breaks_after: int | None = None) -> None:
        """`breaks_after` so many messages `send` raises, as a server does whose client has left."""
        self.sent: list[Message] = []
        self.left = asyncio.Event()
        self._messages = list(messages)
        self._breaks_after = breaks_after

    async def receive(self) -> Message:
        if self._messages:
            return self._messages.pop(0)
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self._breaks_after is not None and len(self.sent) >= self._breaks_after:
            raise OSError("the client has left")
        self.sent.append(message)
        body = message["type"] == "http.response.body"
        if body and not message.get("more_body", False):
            self.left.set()


class Watched:
    """An app with the tap around it."""

    def __init__(self, app: App, meter: FakeMeter, skip: Collection[str] = ()) -> None:
        self.meter = meter
        self.app = LlmtapMiddleware(app, socket=meter.path, skip=skip)

    @property
    def emitter(self) -> Emitter:
        found = self.app._emitters.current()
        assert found is not None
        return found

    @property
    def ledger(self) -> Ledger:
        return self.emitter.tap.ledger

    async def call(self, messages: Iterable[Message], **more: Any) -> Server:
        """One request; what the app raises comes out."""
        server = Server(messages, breaks_after=more.pop("breaks_after", None))
        await self.app(http_scope(**more), server.receive, server.send)
        return server

    async def seen(self, seq: int = 1) -> Recording:
        """The frames of an exchange that is over."""
        return await self.meter.closed(seq)


@asynccontextmanager
async def watched(app: App, *, with_meter: bool = True, skip: Collection[str] = ()) -> AsyncIterator[Watched]:
    """At the end all exchanges must be accounted for, and none may be open."""
    folder = tempfile.mkdtemp(prefix="tap-")
    meter = FakeMeter(f"{folder}/tap.sock")
    try:
        if with_meter:
            await meter.start()
        of = Watched(app, meter, skip)
        ledger = of.ledger
        yield of
        await wait_until(lambda: not ledger.unsettled)
        assert ledger.opened == ledger.measured + sum(ledger.dropped.values())
        assert not of.emitter.arrivals, "an exchange outlived its call"
        await of.app._emitters.close()
    finally:
        meter.stop()
        shutil.rmtree(folder, ignore_errors=True)
