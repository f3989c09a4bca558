"""The tap inside aiohttp apps, on a real socket: raw clients ask, a fake meter keeps the frames."""

import asyncio
import gzip
import json
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtap.channel.frames import FrameKind
from llmtap.exchange.outcome import Outcome
from llmtap.middleware.aiohttp import setup
from llmtap.protocol.http1 import parse_request_head, parse_response_head
from tests.support.servers.peer import Ending, chunked, play, wait_until
from tests.support.servers.proxy import FakeMeter, Recording
from tests.support.servers.raw_client import RawClient, request

OPEN, DATA, END, SUBMIT = FrameKind.OPEN, FrameKind.REQUEST_DATA, FrameKind.REQUEST_END, FrameKind.SUBMIT
HEAD, BODY, OVER, CLOSE = (
    FrameKind.RESPONSE_HEAD,
    FrameKind.RESPONSE_DATA,
    FrameKind.RESPONSE_END,
    FrameKind.CLOSE,
)
EVENTS = [b"data: one\n\n", b"data: two\n\n", b"data: [DONE]\n\n"]


class Running:
    """An app that runs, with the tap in it or without."""

    def __init__(self, meter: FakeMeter, port: int) -> None:
        self.meter = meter
        self.port = port

    async def ask(self, raw: bytes) -> Any:
        client = await RawClient.connect(self.port)
        try:
            return await client.ask(raw)
        finally:
            client.close()

    async def seen(self, seq: int = 1) -> Recording:
        return await self.meter.closed(seq)


async def json_answer(request: web.Request) -> web.StreamResponse:
    asked = await request.json()
    return web.json_response({"asked": asked})


async def stream(request: web.Request) -> web.StreamResponse:
    await request.read()
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in EVENTS:
        await response.write(event)
    await response.write_eof()
    return response


async def stream_compressed(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    response.enable_compression(web.ContentCoding.gzip)
    await response.prepare(request)
    for event in EVENTS:
        await response.write(event)
    return response


async def whole_compressed(request: web.Request) -> web.StreamResponse:
    response = web.json_response({"text": "x" * 400})
    response.enable_compression(web.ContentCoding.gzip)
    return response


async def from_generator(request: web.Request) -> web.StreamResponse:
    async def pieces() -> AsyncIterator[bytes]:
        for event in EVENTS:
            yield event

    return web.Response(body=pieces(), content_type="text/event-stream")


async def raising(request: web.Request) -> web.StreamResponse:
    raise RuntimeError("sk-secret")


async def refusing(request: web.Request) -> web.StreamResponse:
    raise web.HTTPTooManyRequests(text="slow down")


async def raising_midway(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(EVENTS[0])
    raise RuntimeError("sk-secret")


async def for_ever(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(EVENTS[0])
        await asyncio.sleep(0.005)


async def empty(request: web.Request) -> web.StreamResponse:
    return web.Response(status=204)


async def takes_the_stream(request: web.Request) -> web.StreamResponse:
    size = 0
    async for piece in request.content.iter_any():
        size += len(piece)
    return web.json_response({"bytes": size})


async def reads_nothing(request: web.Request) -> web.StreamResponse:
    return web.Response(text="no need")


async def bad_header(request: web.Request) -> web.StreamResponse:
    return web.Response(headers={"x-bad": "a\x01b"})


async def unprepared(request: web.Request, response: web.StreamResponse) -> None:
    """A signal of an app's own."""
    if request.path == "/unprepared":
        raise RuntimeError("planted")


async def sockets(request: web.Request) -> web.StreamResponse:
    response = web.WebSocketResponse()
    await response.prepare(request)
    await response.send_str("hello")
    await response.close()
    return response


HANDLERS = {
    "/json": json_answer,
    "/stream": stream,
    "/gzip-stream": stream_compressed,
    "/gzip": whole_compressed,
    "/generator": from_generator,
    "/raises": raising,
    "/refuses": refusing,
    "/midway": raising_midway,
    "/forever": for_ever,
    "/empty": empty,
    "/upload": takes_the_stream,
    "/unread": reads_nothing,
    "/bad": bad_header,
    "/ws": sockets,
    "/unprepared": reads_nothing,
}


@asynccontextmanager
async def running(
    *, tapped: bool = True, with_meter: bool = True, cancels: bool = False, skip: Collection[str] = ()
) -> AsyncIterator[Running]:
    folder = tempfile.mkdtemp(prefix="tap-")
    meter = FakeMeter(f"{folder}/tap.sock")
    if with_meter:
        await meter.start()
    app = web.Application()
    for path, handler in HANDLERS.items():
        app.router.add_route("*", path, handler)
    app.on_response_prepare.append(unprepared)
    if tapped:
        setup(app, socket=meter.path, skip=skip)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=cancels, shutdown_timeout=1)
    await runner.setup()
    sock = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, sock).start()
    try:
        if tapped and with_meter:
            await wait_until(lambda: meter.hellos)
        yield Running(meter, sock.getsockname()[1])
    finally:
        await runner.cleanup()
        meter.stop()
        shutil.rmtree(folder, ignore_errors=True)


def measured(meter: FakeMeter) -> tuple[int, int, dict[str, int]]:
    """Opened, measured and dropped, by the app's last word."""
    last = meter.statuses[-1]
    return last.opened, last.measured, last.dropped


ASKED = request("POST", "/json", "Content-Type: application/json", body=b'{"model":"m"}')


@pytest.mark.parametrize("path", ["/stream", "/generator"])
async def test_a_stream_is_told_as_it_is_written(path: str) -> None:
    async with running() as app:
        answer = await app.ask(request("POST", path, body=b"{}"))
        assert answer.data == b"".join(EVENTS)
        seen = await app.seen()
        assert [f.data for f in seen.of(BODY)] == EVENTS
        assert seen.closing.outcome == Outcome.COMPLETE
        assert seen.kinds[-2:] == [OVER, CLOSE]
        stamps = [f.t_ns for f in seen.frames]
        assert stamps == sorted(stamps)


async def test_an_exchange_is_told_in_the_frames_of_a_relay() -> None:
    async with running() as app:
        answer = await app.ask(ASKED)
        assert json.loads(answer.data) == {"asked": {"model": "m"}}
        seen = await app.seen()
        assert seen.kinds == [OPEN, DATA, END, SUBMIT, HEAD, BODY, OVER, CLOSE]
        assert seen.data(DATA) == b'{"model":"m"}'
        assert seen.data(BODY) == answer.data
        head = parse_request_head(seen.data(OPEN))
        assert (head.method, head.target) == (b"POST", b"/json")
        assert (b"Content-Type", b"application/json") in head.headers
        reply = parse_response_head(seen.data(HEAD), b"POST")
        assert reply.status == 200
        assert (b"Content-Type", b"application/json; charset=utf-8") in reply.headers


@pytest.mark.parametrize(
    ("method", "path", "kinds"),
    [
        ("GET", "/unread", [OPEN, END, SUBMIT, HEAD, BODY, OVER, CLOSE]),
        ("HEAD", "/unread", [OPEN, END, SUBMIT, HEAD, OVER, CLOSE]),
        ("GET", "/empty", [OPEN, END, SUBMIT, HEAD, OVER, CLOSE]),
    ],
)
async def test_requests_and_answers_without_a_body(method: str, path: str, kinds: list[FrameKind]) -> None:
    async with running() as app:
        await app.ask(request(method, path))
        assert (await app.seen()).kinds == kinds


async def test_a_compressed_request_is_told_as_the_handler_got_it() -> None:
    async with running() as app:
        zipped = gzip.compress(b'{"model":"m"}')
        raw = request(
            "POST", "/json", "Content-Type: application/json", "Content-Encoding: gzip", body=zipped
        )
        assert json.loads((await app.ask(raw)).data) == {"asked": {"model": "m"}}
        seen = await app.seen()
        assert seen.data(DATA) == b'{"model":"m"}'
        assert b"ncoding" not in seen.data(OPEN)


@pytest.mark.parametrize("path", ["/gzip-stream", "/gzip"])
async def test_a_compressed_answer_is_told_so_that_it_can_be_read(path: str) -> None:
    async with running() as app:
        answer = await app.ask(request("GET", path, "Accept-Encoding: gzip"))
        plain = gzip.decompress(answer.data)
        assert answer.head.get("content-encoding") == b"gzip"
        seen = await app.seen()
        told = seen.data(BODY)
        coded = b"content-encoding" in seen.data(HEAD).lower()
        assert (gzip.decompress(told) if coded else told) == plain


@pytest.mark.parametrize(
    ("path", "status", "outcome"),
    [
        ("/raises", 500, Outcome.COMPLETE),
        ("/refuses", 429, Outcome.COMPLETE),
        ("/none", 404, Outcome.COMPLETE),
    ],
)
async def test_what_aiohttp_answers_for_a_handler_is_the_answer(
    path: str, status: int, outcome: Outcome
) -> None:
    async with running() as app:
        answer = await app.ask(request("GET", path))
        assert answer.status == status
        closing = (await app.seen()).closing
        # The meter makes an error of the status, as of a relay's.
        assert (closing.status, closing.outcome) == (status, outcome)


async def test_a_handler_that_raises_midway_has_cut_its_answer() -> None:
    async with running() as app:
        answer = await app.ask(request("GET", "/midway"))
        assert not answer.whole
        closing = (await app.seen()).closing
        assert (closing.outcome, closing.error) == (
            Outcome.TRUNCATED,
            "the app raised RuntimeError in the middle of its answer",
        )
        assert "secret" not in str(closing)


@pytest.mark.parametrize("path", ["/bad", "/unprepared"])
async def test_an_answer_that_aiohttp_cannot_send_is_over_all_the_same(path: str) -> None:
    async with running() as app:
        client = await RawClient.connect(app.port)
        await client.send(request("GET", path))
        _, how = await client.to_end()
        assert how is Ending.FIN
        client.close()
        closing = (await app.seen()).closing
        assert (closing.outcome, closing.status) == (Outcome.UPSTREAM_ERROR, None)


@pytest.mark.parametrize("cancels", [False, True], ids=["a write fails", "the handler is cancelled"])
async def test_a_client_that_leaves(cancels: bool) -> None:
    async with running(cancels=cancels) as app:
        client = await RawClient.connect(app.port)
        await client.send(request("GET", "/forever"))
        await client.until(b"data: one\n\n")
        client.reset()
        assert (await app.seen()).closing.outcome == Outcome.CLIENT_CANCELLED


async def test_a_websocket_passes_unmeasured_and_is_counted() -> None:
    async with running() as app:
        client = await RawClient.connect(app.port)
        upgrade = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")
        await client.send(request("GET", "/ws", *upgrade, "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="))
        assert b"101" in (await client.head()).line
        assert await client.exactly(7) == b"\x81\x05hello"
        client.close()
        await wait_until(lambda: app.meter.statuses and app.meter.statuses[-1].opened)
        assert measured(app.meter) == (1, 0, {"websocket": 1})


async def test_skipped_requests_are_counted_by_rule_and_not_measured() -> None:
    async with running(skip=("/gzip", "/raises")) as app:
        client = await RawClient.connect(app.port)
        assert (await client.ask(request("GET", "/gzip?deep=1"))).status == 200
        assert (await client.ask(request("GET", "/gzip/deeper"))).status == 404
        assert (await client.ask(request("GET", "/gzip-stream"))).status == 200
        client.close()
        assert (await app.ask(request("GET", "/raises"))).status == 500
        assert b"GET /gzip-stream " in (await app.seen()).request
        await wait_until(lambda: app.meter.statuses and app.meter.statuses[-1].measured)
        assert measured(app.meter) == (1, 1, {})
        assert app.meter.statuses[-1].skipped == {"/gzip": 2, "/raises": 1}


@settings(max_examples=25)
@given(body=st.lists(st.binary(min_size=1, max_size=50), max_size=6))
def test_what_the_client_gets_is_what_it_would_get_without(body: list[bytes]) -> None:
    """The head but for its date, and the body with its framing."""
    raw = request("POST", "/upload", "Transfer-Encoding: chunked") + chunked(*body)

    async def answer(tapped: bool) -> tuple[list[tuple[bytes, bytes]], bytes, bytes]:
        async with running(tapped=tapped) as app:
            got = await app.ask(raw)
            head = [(n, v) for n, v in got.head.fields if n != b"Date"]
            stream = await app.ask(request("GET", "/stream"))
            return head, got.body.raw, stream.body.raw

    assert play(answer(True)) == play(answer(False))


async def test_the_writer_has_its_own_methods_back_at_the_end() -> None:
    writers: list[Any] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        writers.append(request.writer)
        return web.Response(text="ok")

    HANDLERS["/writer"] = handler
    try:
        async with running() as app:
            await app.ask(request("GET", "/writer"))
            await app.seen()
            await wait_until(lambda: "write" not in vars(writers[0]))
            assert not {"write", "write_eof", "write_headers", "enable_compression"} & set(vars(writers[0]))
    finally:
        del HANDLERS["/writer"]
