"""Kept connections are never trusted blindly; which one is taken, and when they are given up."""

import asyncio
import errno
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from llmtap.clock import SystemClock
from llmtap.errors import ConfigError
from llmtap.net import pool as pool_module
from llmtap.net.lag import make_lag_meter
from llmtap.net.listener import keep_port
from llmtap.net.pool import Origin, Pool, parse_origin
from llmtap.net.stream import Stream, Timebase
from tests.net.test_stream import Notes
from tests.support.servers.peer import wait_until
from tests.support.servers.upstream import Upstream, unanswered_port, upstream

CONNECT_NS = 1_000_000_000_000
IDLE_NS = 10_000_000_000


# ---------------------------------------------------------------- where the upstream is


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://gw.test", Origin("gw.test", 80, False, b"gw.test", b"")),
        ("http://gw.test:80/", Origin("gw.test", 80, False, b"gw.test", b"")),
        ("http://gw.test:8000", Origin("gw.test", 8000, False, b"gw.test:8000", b"")),
        ("https://gw.test", Origin("gw.test", 443, True, b"gw.test", b"")),
        ("https://gw.test:443", Origin("gw.test", 443, True, b"gw.test", b"")),
        ("https://gw.test:80", Origin("gw.test", 80, True, b"gw.test:80", b"")),
        ("http://gw.test/base/path/", Origin("gw.test", 80, False, b"gw.test", b"/base/path")),
        ("http://[::1]:8000", Origin("::1", 8000, False, b"[::1]:8000", b"")),
    ],
)
def test_an_origin(url: str, origin: Origin) -> None:
    assert parse_origin(url, "relay.upstream") == origin


@pytest.mark.parametrize(
    "url",
    [
        "",
        "gw.test",
        "gw.test:80",
        "ftp://gw.test",
        "http://",
        "http://:80",
        "http://gw.test:99999",
        "http://gw:x",
        "http://gw.test?q=1",
        "http://gw.test#f",
        "http://user:pw@gw.test",
        "http://[::1",
    ],
)
def test_no_origin_names_the_setting(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_origin(url, "relay.upstream")
    assert refused.value.place == "relay.upstream"


# ---------------------------------------------------------------- the pool


@asynccontextmanager
async def pool_to(
    url: str, *, idle_max: int = 8, idle_ns: int = IDLE_NS, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Pool]:
    pool = Pool(
        asyncio.get_running_loop(),
        parse_origin(url, "test"),
        Timebase(SystemClock(), make_lag_meter(0)),
        clock="mono",
        idle_max=idle_max,
        idle_ns=idle_ns,
        connect_ns=CONNECT_NS,
        tls=tls,
    )
    try:
        yield pool
    finally:
        pool.close()


def pool_of(server: Upstream, **limits: int) -> AbstractAsyncContextManager[Pool]:
    return pool_to(server.url, **limits)


class Waits(Notes):
    """A handler for whom a connection is being opened."""

    def __init__(self) -> None:
        super().__init__()
        self.came: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()
        self.took_ns = -1

    def on_connected(self, stream: Stream, took_ns: int) -> None:
        self.took_ns = took_ns
        self.came.set_result(stream)

    def on_connect_failed(self, error: OSError) -> None:
        self.came.set_exception(error)


async def opened(pool: Pool, waiter: Waits | None = None) -> Stream:
    """A fresh connection of the pool. Raises what the waiter is told."""
    waiter = waiter or Waits()
    pool.connect(waiter)
    return await waiter.came


def keep(pool: Pool, stream: Stream) -> None:
    """Give a connection back, just used."""
    pool.give_back(stream, SystemClock.mono_ns())


def taken(pool: Pool, handler: Notes | None = None) -> Stream | None:
    return pool.take(handler or Notes())


async def test_the_youngest_is_taken_first() -> None:
    async with upstream() as server, pool_of(server) as pool:
        streams = [await opened(pool) for _ in range(3)]
        assert taken(pool) is None, "what was never given back is not the pool's to give"
        for stream in streams:
            keep(pool, stream)
        assert pool.idle == 3
        assert [taken(pool) for _ in range(4)] == [*reversed(streams), None]
        assert (pool.connects, pool.reuses, pool.idle) == (3, 3, 0)
        for stream in streams:
            stream.close()


async def test_the_taker_becomes_the_handler() -> None:
    async with upstream() as server, pool_of(server) as pool:
        first, second = Waits(), Notes()
        began_ns = SystemClock.mono_ns()
        stream = await opened(pool, first)
        keep(pool, stream)
        assert taken(pool, second) is stream
        peer = await server.take_over()
        await peer.send(b"hello")
        await wait_until(lambda: second.data)
        assert (first.data, second.data) == ([], [b"hello"])
        assert 0 < first.took_ns <= SystemClock.mono_ns() - began_ns
        stream.close()
        keep(pool, stream)
        assert pool.idle == 0, "a closed one is not kept"


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("how", ["fin", "rst", "words"])
async def test_an_idle_connection_that_ended_or_spoke_is_not_handed_out(how: str, at_once: bool) -> None:
    """At once: the loop has had no chance to say so, and the pool has to ask the socket."""
    async with upstream() as server, pool_of(server) as pool:
        stream = await opened(pool)
        peer = await server.take_over()
        keep(pool, stream)
        match how:
            case "fin":
                peer.half_close()
            case "rst":
                peer.reset()
            case _:
                peer.sock.send(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
        if not at_once:
            await wait_until(lambda: pool.idle == 0)
        assert taken(pool) is None
        assert stream.closed


@pytest.mark.parametrize(
    ("limits", "kept"), [({"idle_max": 2}, 2), ({"idle_max": 0}, 0), ({"idle_ns": 0}, 0)]
)
async def test_a_full_pool_closes_what_comes_back(limits: dict[str, int], kept: int) -> None:
    async with upstream() as server, pool_of(server, **limits) as pool:
        streams = [await opened(pool) for _ in range(3)]
        for stream in streams:
            keep(pool, stream)
        assert pool.idle == kept
        assert [s.closed for s in streams] == [i >= kept for i in range(3)]


async def test_what_is_idle_too_long_is_closed_and_the_rest_stays() -> None:
    async with upstream() as server, pool_of(server, idle_ns=1_000_000_000) as pool:
        streams = [await opened(pool) for _ in range(2)]
        now = SystemClock.mono_ns()
        pool.give_back(streams[0], now)
        pool.give_back(streams[1], now + 20_000_000)
        pool.sweep(now + 1_010_000_000)
        assert (pool.idle, [s.closed for s in streams]) == (1, [True, False])
        pool.sweep(now + 3_600_000_000_000)
        assert pool.idle == 0
        await wait_until(lambda: not server.open)


def resolve_to(monkeypatch: pytest.MonkeyPatch, *addresses: tuple[str, int]) -> None:
    """Give every host name these addresses."""

    async def look_up(*args: Any, **how: Any) -> list[tuple[Any, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", address) for address in addresses]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)


async def test_every_address_of_a_name_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    async with upstream() as server, pool_of(server) as pool:
        resolve_to(monkeypatch, ("127.0.0.2", 1), ("127.0.0.1", server.port))
        stream = await opened(pool)
        assert stream.is_alive()
        stream.close()


async def test_what_takes_too_long_to_open_is_given_up() -> None:
    async with unanswered_port() as port, pool_to(f"http://127.0.0.1:{port}") as pool:
        waiter = Waits()
        pool.connect(waiter)
        await wait_until(lambda: not pool.unresolved)
        pool.sweep(SystemClock.mono_ns())
        assert not waiter.came.done()
        pool.sweep(SystemClock.mono_ns() + CONNECT_NS)
        with pytest.raises(TimeoutError):
            await waiter.came
        assert not pool.attempts


async def test_who_no_longer_waits_is_told_nothing() -> None:
    async with unanswered_port() as port, pool_to(f"http://127.0.0.1:{port}") as pool:
        waiters = [Waits() for _ in range(3)]
        attempt = pool.connect(waiters[0])
        attempt.cancel()  # while the name is looked up
        attempt = pool.connect(waiters[1])
        await wait_until(lambda: not pool.unresolved)
        pool.connect(waiters[2])
        attempt.cancel()  # while the handshake is under way
        assert len(pool.attempts) == 1
        pool.close()
        await asyncio.sleep(0.02)
        assert not pool.attempts
        assert not any(w.came.done() for w in waiters)


# ---------------------------------------------------------------- the name


class Lookups:
    """What the loop's look-ups are replaced by: counted, and answered when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        self._real = loop.getaddrinfo
        self.names: list[str] = []
        self.answered = asyncio.Event()
        self.error: Exception | None = None
        self.cancelled = False
        monkeypatch.setattr(loop, "getaddrinfo", self._look_up)

    async def _look_up(self, host: str, port: int, **how: Any) -> Any:
        self.names.append(host)
        try:
            await self.answered.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if self.error is not None:
            raise self.error
        return await self._real("127.0.0.1", port, **how)


def pool_by_name(server: Upstream, tls: ssl.SSLContext | None = None) -> AbstractAsyncContextManager[Pool]:
    url = server.url.replace("127.0.0.1", "gw.test")
    assert "gw.test" in url
    return pool_to(url if tls is None else url.replace("http:", "https:"), tls=tls)


@pytest.mark.parametrize("tls", [False, True])
async def test_one_look_up_serves_all_who_wait(tls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for TLS, which is given the address: here it then fails, for nobody speaks it."""
    context = ssl.create_default_context() if tls else None
    async with upstream() as server, pool_by_name(server, context) as pool:
        lookups = Lookups(monkeypatch)
        waiters = [Waits() for _ in range(100)]
        for waiter in waiters:
            pool.connect(waiter)
        await wait_until(lambda: lookups.names)
        assert lookups.names == ["gw.test"]
        lookups.answered.set()
        if tls:
            await wait_until(lambda: server.connections == 100)
        else:
            for waiter in waiters:
                (await waiter.came).close()
            (await opened(pool)).close()
        assert lookups.names == ["gw.test"], "it is known for a while"


async def test_who_leaves_during_a_look_up_leaves_it_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cancels(Waits):
        def on_connected(self, stream: Stream, took_ns: int) -> None:
            super().on_connected(stream, took_ns)
            attempts[2].cancel()  # the name is known, and this one's turn has not come

    async with upstream() as server, pool_by_name(server) as pool:
        lookups = Lookups(monkeypatch)
        waiters = [Waits(), Cancels(), Waits()]
        attempts = [pool.connect(waiter) for waiter in waiters]
        await wait_until(lambda: lookups.names)
        attempts[0].cancel()
        lookups.answered.set()
        stream = await waiters[1].came
        assert stream.is_alive()
        await wait_until(lambda: server.connections == 1)
        assert [w.came.done() for w in waiters] == [False, True, False]
        assert not pool.attempts
        stream.close()


@pytest.mark.parametrize("error", [socket.gaierror(socket.EAI_NONAME, "not known"), UnicodeError("no label")])
async def test_a_look_up_that_fails_fails_all_who_waited_and_nobody_later(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with upstream() as server, pool_by_name(server) as pool:
        lookups = Lookups(monkeypatch)
        lookups.error = error
        lookups.answered.set()
        waiters = [Waits() for _ in range(3)]
        for waiter in waiters:
            pool.connect(waiter)
        for waiter in waiters:
            with pytest.raises(OSError, match=r"not known|no label"):
                await waiter.came
        assert not pool.attempts
        lookups.error = None
        (await opened(pool)).close()
        assert len(lookups.names) == 2


async def test_closing_the_pool_ends_a_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async with upstream() as server, pool_by_name(server) as pool:
        lookups = Lookups(monkeypatch)
        waiter = Waits()
        pool.connect(waiter)
        await wait_until(lambda: lookups.names)
        pool.close()
        await wait_until(lambda: lookups.cancelled)
        lookups.answered.set()
        await asyncio.sleep(0.01)
        assert (waiter.came.done(), server.connections) == (False, 0)


# ---------------------------------------------------------------- what is missing here, not there


def sockets_fail(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    """The next sockets of pools cannot be made, for these reasons; then they can."""
    left = list(numbers)

    def make(*args: Any) -> socket.socket:
        if left:
            number = left.pop(0)
            raise OSError(number, errno.errorcode[number])
        return socket.socket(*args)

    others = {name: getattr(socket, name) for name in dir(socket)}
    monkeypatch.setattr(pool_module, "socket", SimpleNamespace(**{**others, "socket": make}))


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
async def test_no_socket_left_is_told_and_no_address_blamed(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with upstream() as server, pool_of(server) as pool:
        (await opened(pool)).close()
        lookups = Lookups(monkeypatch)
        sockets_fail(monkeypatch, number)
        waiter = Waits()
        pool.connect(waiter)
        assert waiter.came.done(), "it is known at once"
        with pytest.raises(OSError) as told:
            await waiter.came
        assert told.value.errno == number
        assert not pool.attempts
        (await opened(pool)).close()
        assert lookups.names == []


async def test_a_family_that_this_host_lacks_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async with upstream() as server, pool_of(server) as pool:
        resolve_to(monkeypatch, ("127.0.0.1", server.port), ("127.0.0.1", server.port))
        sockets_fail(monkeypatch, errno.EAFNOSUPPORT)
        (await opened(pool)).close()


# ---------------------------------------------------------------- TLS, until it is spoken


async def test_a_tls_handshake_may_be_given_up_at_any_moment() -> None:
    async with upstream() as server:
        url = server.url.replace("http:", "https:")
        async with pool_to(url, tls=ssl.create_default_context()) as pool:
            waiters = [Waits() for _ in range(20)]
            for turns, waiter in enumerate(waiters):
                attempt = pool.connect(waiter)
                for _ in range(turns):
                    await asyncio.sleep(0)
                attempt.cancel()
            await wait_until(lambda: not server.open)
            assert not pool.attempts
        assert not any(waiter.came.done() for waiter in waiters)


async def test_each_change_of_an_upstream_is_reported_once() -> None:
    changes: list[bool] = []
    with keep_port() as port:
        async with pool_to(f"http://127.0.0.1:{port.getsockname()[1]}") as pool:
            pool.on_change = lambda error: changes.append(error is None)
            for _ in range(3):
                for _ in range(2):
                    with pytest.raises(ConnectionRefusedError):
                        await opened(pool)
                with socket.create_server(port.getsockname()):
                    for _ in range(2):
                        (await opened(pool)).close()
    assert changes == [False, True] * 3
