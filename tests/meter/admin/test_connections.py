"""Limits of the admin port: a client that keeps connections, or reads nothing, takes nothing from others."""

import asyncio
import contextlib
import gzip
import ssl
import threading
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import pytest
import trustme
from aiohttp import web

import llmtap.meter.admin.connections as module
from llmtap.meter.admin.connections import AdminRunner, AdminSite, SharedWork
from llmtap.meter.admin.server import admin_app, admin_runner
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from tests.meter.admin.serving import pipeline
from tests.support.servers.peer import wait_until
from tests.support.servers.raw_client import RawClient
from tests.support.traffic.streams import streamed

GET = b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def serving(
    tally: ExchangePipeline, play: Callable[[int], Awaitable[None]], tls: ssl.SSLContext | None = None
) -> None:
    runner = admin_runner(admin_app(tally), tls)
    await runner.setup()
    await AdminSite(runner, ("127.0.0.1", 0)).start()
    try:
        await play(port_of(runner))
    finally:
        await runner.cleanup()


def port_of(runner: AdminRunner) -> int:
    (site,) = runner.sites
    return int(site.name.rpartition(":")[2])


async def answer_of(port: int, path: bytes = b"/healthz", tls: ssl.SSLContext | None = None) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
    try:
        writer.write(GET % path)
        return await reader.readuntil(b"\r\n\r\n")
    finally:
        writer.close()


async def test_idle_connections_make_room_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONNECTIONS_MAX", 5)
    tally = pipeline()

    async def play(port: int) -> None:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        assert b"200 OK" in await answer_of(port)
        for reader, _ in idle[:15]:
            assert await reader.read(1) == b""
        assert tally.admin_limits["connections"] >= 15
        for _, writer in idle:
            writer.close()

    await serving(tally, play)


@pytest.mark.parametrize(
    ("sent", "limit", "name"),
    [
        (b"", "IDLE_S", "idle_timeout"),
        (b"GET /healthz HT", "HEAD_S", "head_timeout"),
        (GET % b"/healthz", "IDLE_S", "idle_timeout"),
    ],
)
async def test_a_connection_without_a_request_is_closed_in_time(
    sent: bytes, limit: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, limit, 0.05)
    monkeypatch.setattr(module, "SWEEP_S", 0.01)
    tally = pipeline()

    async def play(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        answers = await reader.read()
        assert answers.count(b"200 OK") == sent.count(b"Host")
        assert tally.admin_limits == {name: 1}
        writer.close()

    await serving(tally, play)


class Tls(NamedTuple):
    server: ssl.SSLContext
    client: ssl.SSLContext


@pytest.fixture(scope="module")
def tls() -> Tls:
    ca = trustme.CA()
    served, client = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), ssl.create_default_context()
    ca.issue_cert("127.0.0.1").configure_cert(served)
    ca.configure_trust(client)
    return Tls(served, client)


HELLO = b"\x16\x03\x01\x02\x00\x01"
"""The start of a ClientHello (RFC 8446 5.1)."""


@pytest.mark.parametrize("sent", [b"", HELLO])
async def test_idle_handshakes_make_room_for_new_connections(
    sent: bytes, tls: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CONNECTIONS_MAX", 5)
    tally = pipeline()

    async def play(port: int) -> None:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        for _, writer in idle:
            writer.write(sent)
        assert b"200 OK" in await answer_of(port, tls=tls.client)
        for reader, _ in idle[:15]:
            assert await reader.read(1) == b""
        assert tally.admin_limits == {"connections": 16}
        for _, writer in idle:
            writer.close()

    await serving(tally, play, tls.server)


@pytest.mark.parametrize("sent", [b"", HELLO])
async def test_a_handshake_that_stays_idle_is_ended_in_time(
    sent: bytes, tls: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HEAD_S", 0.05)
    monkeypatch.setattr(module, "SWEEP_S", 0.01)
    tally = pipeline()

    async def play(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        assert await reader.read() == b""
        assert tally.admin_limits == {"handshake_timeout": 1}
        writer.close()

    await serving(tally, play, tls.server)


async def test_requests_over_tls_have_the_limits_of_plain_ones(
    tls: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.3)
    monkeypatch.setattr(module, "SWEEP_S", 0.01)
    tally = pipeline()

    async def play(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls.client)
        writer.write(GET % b"/healthz" + GET % b"/healthz")
        answers = await reader.read()
        assert answers.count(b"200 OK") == 2
        assert tally.admin_limits == {"idle_timeout": 1}
        writer.close()
        refused, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET % b"/healthz")
        assert b"HTTP" not in await refused.read()
        writer.close()
        assert b"200 OK" in await answer_of(port, tls=tls.client)

    await serving(tally, play, tls.server)


async def test_a_request_in_one_read_with_the_end_of_the_handshake_is_answered(tls: Tls) -> None:
    async def play(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        received, to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = tls.client.wrap_bio(received, to_send, server_hostname="127.0.0.1")
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                writer.write(to_send.read())
                received.write(await reader.read(65_536))
        client.write(GET % b"/healthz")
        writer.write(to_send.read())
        answer = b""
        while b"ok\n" not in answer:
            received.write(await reader.read(65_536))
            with contextlib.suppress(ssl.SSLWantReadError):
                answer += client.read(65_536)
        assert answer.startswith(b"HTTP/1.1 200 OK")
        writer.close()

    await serving(pipeline(), play, tls.server)


async def test_a_client_that_reads_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEND_S", 0.2)
    tally = pipeline()
    page = b"x" * (8 << 20)
    app = admin_app(tally)

    async def large(request: web.Request) -> web.Response:
        return web.Response(body=page)

    app.router.add_get("/large", large)
    runner = admin_runner(app)
    await runner.setup()
    await AdminSite(runner, ("127.0.0.1", 0)).start()
    port = port_of(runner)
    client = await RawClient.connect(port, receive_buffer=4_096)
    await client.send(GET % b"/large")
    await wait_until(lambda: tally.admin_limits["send_timeout"] == 1)
    client.close()
    monkeypatch.setattr(module, "SEND_S", 60.0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    writer.write(GET % b"/large")
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"Content-Length: %d\r\n" % len(page) in head
    assert await reader.readexactly(len(page)) == page
    writer.close()
    await runner.cleanup()


async def test_answers_that_wait_have_a_common_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWERS_BYTES_MAX", 20 << 20)
    tally = pipeline()
    app = admin_app(tally)

    async def large(request: web.Request) -> web.Response:
        return web.Response(body=bytes(8 << 20))

    app.router.add_get("/large", large)
    runner = admin_runner(app)
    await runner.setup()
    await AdminSite(runner, ("127.0.0.1", 0)).start()
    clients = []
    for _ in range(6):
        client = await RawClient.connect(port_of(runner), receive_buffer=4_096)
        await client.send(GET % b"/large")
        clients.append(client)
    await wait_until(lambda: tally.admin_limits["answer_bytes"] == 4)
    for client in clients:
        client.close()
    await runner.cleanup()


async def test_metrics_are_kept_compressed_while_they_are_sent() -> None:
    tally = pipeline()
    for seq in range(300):
        tally.on_end(streamed(100, 140, seq=seq, tenant=f"t{seq}"))

    async def play(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 26)
        bodies = []
        for coding in (b"gzip", b"identity", b"gzip;q=0"):
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept-Encoding: %s\r\n\r\n" % coding)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            size = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            body = await reader.readexactly(size)
            assert (b"content-encoding: gzip" in head) == (coding == b"gzip")
            bodies.append(gzip.decompress(body) if coding == b"gzip" else body)
        for body in bodies:
            assert body.count(b"llmtap_exchanges_total{") == bodies[0].count(b"llmtap_exchanges_total{") > 300
        writer.close()

    await serving(tally, play)


async def test_work_runs_once_for_all_that_wait_and_is_never_older_than_a_request() -> None:
    work = SharedWork()
    began: list[int] = []
    running = threading.Semaphore(0)

    def begin() -> Callable[[], int]:
        number = len(began)
        began.append(number)

        def run() -> int:
            assert running.acquire(timeout=60)
            return number

        return run

    first = asyncio.ensure_future(work.get("metrics", begin))
    await wait_until(lambda: len(began) == 1)
    later = [asyncio.ensure_future(work.get("metrics", begin)) for _ in range(30)]
    await asyncio.sleep(0)
    later[0].cancel()  # its client has left
    running.release()
    running.release()
    assert await first == 0
    assert await asyncio.gather(*later[1:]) == [1] * 29
    assert len(began) == 2
