"""TLS on the listener and towards the upstream: verified by default, and refused in plain words where not.

Long because the listener, the upstream and the tunnels between share certificates, a client and a server.
"""

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import trustme

from llmtap.clock import SystemClock
from llmtap.errors import ConfigError
from llmtap.net.lag import make_lag_meter
from llmtap.net.pool import Pool, parse_origin
from llmtap.net.stream import Stream, Timebase
from llmtap.net.tls import TlsStream, client_context, server_context
from tests.support.servers.peer import Ending, Head, at_end, wait_still, wait_until
from tests.support.servers.proxy import Tapped, ms, stage, tapped
from tests.support.servers.raw_client import request
from tests.support.servers.upstream import CLOSE, Call, answers

# ---------------------------------------------------------------- certificates, made once


class Papers(NamedTuple):
    """Paths of PEM files."""

    ca: str
    other_ca: str
    certificate: str
    key: str

    @property
    def served(self) -> dict[str, Any]:
        """Options of a relay that listens with TLS."""
        return {"tls_certificate": self.certificate, "tls_key": self.key}


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    folder: Path = tmp_path_factory.mktemp("papers")
    ca, other = trustme.CA(), trustme.CA()
    served = ca.issue_cert("localhost", "127.0.0.1", "gateway.test")
    paths = Papers(*(str(folder / f"{name}.pem") for name in ("ca", "other", "cert", "key")))
    ca.cert_pem.write_to_path(paths.ca)
    other.cert_pem.write_to_path(paths.other_ca)
    served.private_key_pem.write_to_path(paths.key)
    for pem in served.cert_chain_pems:
        pem.write_to_path(paths.certificate, append=True)
    return paths


# ---------------------------------------------------------------- both sides with TLS


class TlsClient:
    """A verifying client of the relay's TLS port."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, port: int, ca: str | None) -> "TlsClient":
        """Without a CA in plain text."""
        if ca is None:
            return cls(*await asyncio.open_connection("127.0.0.1", port))
        context = ssl.create_default_context(cafile=ca)
        context.set_alpn_protocols(["http/1.1"])
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=context, server_hostname="localhost"
        )
        at_end(writer.transport.abort)
        return cls(reader, writer)

    async def head(self) -> Head:
        return Head.parse(await self.reader.readuntil(b"\r\n\r\n"))

    async def ask(self, raw: bytes) -> tuple[Head, bytes]:
        self.writer.write(raw)
        head = await self.head()
        return head, await self.reader.readexactly(int(head.get("content-length") or 0))


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class TlsUpstream:
    """An https upstream: what `handler` says, and the names it was called by."""

    def __init__(self) -> None:
        self.port = 0
        self.names: list[str | None] = []
        self.connections = 0


@asynccontextmanager
async def tls_upstream(papers: Papers | None, handler: Handler) -> AsyncIterator[TlsUpstream]:
    """Without papers the same in plain text."""
    upstream = TlsUpstream()
    context: ssl.SSLContext | None = None
    if papers is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(papers.certificate, papers.key)
        context.sni_callback = lambda _obj, name, _context: upstream.names.append(name)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream.connections += 1
        try:
            await handler(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    upstream.port = server.sockets[0].getsockname()[1]
    try:
        yield upstream
    finally:
        server.close()


@asynccontextmanager
async def secure(
    papers: Papers, handler: Handler, **options: Any
) -> AsyncIterator[tuple[TlsUpstream, Tapped]]:
    """An https upstream, and a relay that trusts its CA unless `options` say otherwise."""
    options = options or {"upstream_ca": papers.ca}
    async with (
        tls_upstream(papers, handler) as up,
        tapped(f"https://localhost:{up.port}", **options) as tap,
    ):
        yield up, tap


async def says_hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        head = Head.parse(await reader.readuntil(b"\r\n\r\n"))
        body = await reader.readexactly(int(head.get("content-length") or 0))
        text = b"hello " + body
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text) + text)


async def refused_with(tap: Tapped, status: int) -> dict[str, str | None]:
    """Ask, expect the tap's own answer, give its error."""
    client = await tap.client()
    answer = await client.get("/")
    assert answer.status == status
    assert answer.head.get("x-llmtap-error")
    assert answer.head.get("content-type") == b"application/json"
    error: dict[str, str | None] = json.loads(answer.data)["error"]
    assert error["message"]
    return error


# ---------------------------------------------------------------- contexts


def test_bad_files_name_their_setting(papers: Papers, tmp_path: Path) -> None:
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("not a certificate")
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: server_context(str(tmp_path / "none"), papers.key), "relay.tls_certificate"),
        (lambda: server_context(papers.certificate, str(tmp_path / "none")), "relay.tls_key"),
        (lambda: server_context(str(nonsense), papers.key), "relay.tls_certificate"),
        (
            lambda: server_context(papers.ca, papers.key),
            "relay.tls_certificate",
        ),  # they do not belong together
        (lambda: client_context(str(tmp_path / "none"), True), "relay.upstream_ca"),
        (lambda: client_context(str(nonsense), True), "relay.upstream_ca"),
    ]
    for make, place in cases:
        with pytest.raises(ConfigError) as refused:
            make()
        assert refused.value.place == place


# ---------------------------------------------------------------- the listener


async def test_plain_bytes_on_the_tls_port_are_turned_away(papers: Papers) -> None:
    async with stage(**papers.served) as (up, tap):
        path = up.on(answers())
        client = await tap.client()
        await client.send(request("GET", path))
        data, _ = await client.to_end()
        assert not data.startswith(b"HTTP/")
        assert tap.relay.reporter.status().refused == {"tls_handshake": 1}
        assert up.calls == []
        await wait_until(lambda: not tap.relay.connections)


@pytest.mark.parametrize("end", ["close", "abort"])
def test_what_was_given_up_during_the_handshake_is_closed_behind_it(end: str) -> None:
    stream, transport = TlsStream(mock.Mock(), mock.Mock()), mock.Mock()
    getattr(stream, end)()
    stream.connection_made(transport)
    transport.abort.assert_called_once_with()


async def test_an_early_answer_reaches_a_tls_client_that_still_uploads(papers: Papers) -> None:
    """RFC 9112 9.6: the answer must not be lost to a reset because its reader was still talking."""
    async with stage(**papers.served) as (up, tap):

        async def too_large(call: Call) -> str:
            await call.say(b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 3\r\n\r\nbig")
            return CLOSE

        client = await TlsClient.connect(tap.port, papers.ca)
        head = request("POST", up.on(too_large), "Content-Length: 3000000")
        client.writer.write(head + b"x" * 200_000)
        for _ in range(20):
            client.writer.write(b"x" * 50_000)
            await asyncio.sleep(0.005)
        answer = await client.head()
        assert answer.line.startswith(b"HTTP/1.1 413 ")
        assert await client.reader.readexactly(3) == b"big"
        client.writer.transport.abort()


async def test_a_slow_tls_client_is_back_pressure(papers: Papers) -> None:
    async with stage(**papers.served) as (up, tap):
        total = 40_000_000
        call_peer = []

        async def flood(call: Call) -> None:
            call_peer.append(call.peer)
            await call.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total)
            for _ in range(total // 100_000):
                await call.say(b"z" * 100_000)

        client = await TlsClient.connect(tap.port, papers.ca)
        client.writer.write(request("GET", up.on(flood)))
        await client.head()
        client.writer.transport.pause_reading()
        # Until the upstream can push no more.
        assert await wait_still(lambda: call_peer[0].sent_bytes) < 30_000_000
        (flow,) = tap.relay.flows
        acked = await wait_still(lambda: flow._stream.acked_bytes)
        assert 0 < acked < 30_000_000
        client.writer.transport.resume_reading()
        got = 0
        # Without a reader, the buffers of the client may be full, and the kernel acknowledges nothing more.
        while got <= acked:
            got += len(await client.reader.read(1 << 20))
        await wait_until(lambda: flow._stream.acked_bytes > acked)
        while got < total:
            got += len(await client.reader.read(1 << 20))
        assert got == total
        client.writer.close()


# ---------------------------------------------------------------- towards the upstream


async def test_an_https_upstream_is_verified_called_by_name_and_kept(papers: Papers) -> None:
    async with secure(papers, says_hello) as (up, tap):
        client = await tap.client()
        for i in range(3):
            answer = await client.post("/x", b"%d" % i)
            assert (answer.status, answer.data) == (200, b"hello %d" % i)
        assert up.names == ["localhost"], "SNI (RFC 6066 3), on the one connection"
        assert up.connections == 1
        assert tap.relay.pool.reuses == 2
        assert (await tap.closing()).connect_ns is not None
        assert (await tap.closing(2)).connect_ns is None


async def test_the_name_for_sni_and_verification_may_be_set(papers: Papers) -> None:
    options = {"upstream_ca": papers.ca, "upstream_server_name": "gateway.test"}
    async with tls_upstream(papers, says_hello) as up:
        async with tapped(f"https://127.0.0.1:{up.port}", **options) as tap:
            assert (await tap.get("/")).status == 200
        assert up.names == ["gateway.test"]
        async with tapped(f"https://127.0.0.1:{up.port}", upstream_ca=papers.ca) as tap:
            assert (await tap.get("/")).data == b"hello ", "known by its address"
        options["upstream_server_name"] = "somebody-else.test"
        async with tapped(f"https://127.0.0.1:{up.port}", **options) as tap:
            await refused_with(tap, 502)


@pytest.mark.parametrize("trusted", ["another", "the system's"])
async def test_an_upstream_nobody_vouches_for_is_a_502(papers: Papers, trusted: str) -> None:
    ca = papers.other_ca if trusted == "another" else None
    async with secure(papers, says_hello, upstream_ca=ca) as (_, tap):
        error = await refused_with(tap, 502)
        assert error["type"] == "api_error"
        assert (await tap.closing()).outcome == "upstream_error"


@asynccontextmanager
async def plain_server(says: bytes) -> AsyncIterator[int]:
    """A port that knows nothing of TLS: it says its piece and then waits for the other side to go."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(says)
        with contextlib.suppress(OSError):
            await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def test_an_upstream_that_speaks_no_tls_is_a_502() -> None:
    async with (
        plain_server(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n") as port,
        tapped(f"https://127.0.0.1:{port}", upstream_verify=False) as tap,
    ):
        assert (await refused_with(tap, 502))["code"] == "upstream_connect"


async def test_an_upstream_that_never_shakes_hands_is_a_504() -> None:
    """The limit for connecting includes TLS."""
    async with (
        plain_server(b"") as port,
        tapped(f"https://127.0.0.1:{port}", upstream_verify=False, connect_timeout=ms(150)) as tap,
    ):
        assert (await refused_with(tap, 504))["code"] == "upstream_connect_timeout"


async def test_a_tls_answer_to_the_close_that_is_cut_looks_cut(papers: Papers) -> None:
    """RFC 9112 9.8: without a closure alert an answer that the close would end is incomplete."""
    heard = asyncio.Event()

    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nhalf of the")
        await heard.wait()
        writer.transport.abort()  # TCP ends, TLS never said so

    async with secure(papers, cut) as (_up, tap):
        client = await tap.client()
        await client.send(request("GET", "/"))
        await client.head()
        assert await client.exactly(11) == b"half of the"
        heard.set()
        assert await client.to_end() == (b"", Ending.RST), "a cut answer was passed off as complete"


async def test_a_tls_answer_to_the_close_that_ends_in_order_is_whole(papers: Papers) -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 100_000)
        await writer.drain()

    async with secure(papers, say) as (_up, tap):
        answer = await tap.get("/")
        assert (len(answer.data), answer.whole) == (100_000, True)


# ---------------------------------------------------------------- tunnels

SWITCH = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
MUCH = 16_000_000
"""More than the sockets between take: the relay is left with some of it."""


@asynccontextmanager
async def tunnel(
    papers: Papers, *, client_tls: bool, upstream_tls: bool, talk: Handler
) -> AsyncIterator[tuple[TlsClient, Tapped]]:
    """A client behind its handshake with an upstream that goes on with `talk`."""

    async def switches(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(SWITCH)
        await talk(reader, writer)

    options: dict[str, Any] = papers.served if client_tls else {}
    async with (
        tls_upstream(papers if upstream_tls else None, switches) as up,
        tapped(
            f"http{'s' if upstream_tls else ''}://localhost:{up.port}", upstream_ca=papers.ca, **options
        ) as tap,
    ):
        client = await TlsClient.connect(tap.port, papers.ca if client_tls else None)
        client.writer.write(request("GET", "/", "Connection: Upgrade", "Upgrade: websocket"))
        assert (await client.head()).line.startswith(b"HTTP/1.1 101 ")
        yield client, tap
        client.writer.transport.abort()


async def how_it_ended(tap: Tapped) -> tuple[str, str | None]:
    """Without a wait for any limit; and nothing is left behind."""
    closing = await tap.closing()
    await wait_until(lambda: not tap.relay.connections)
    return closing.outcome, closing.error


SIDES = [(False, False), (True, False), (False, True), (True, True)]
BY_SIDES = pytest.mark.parametrize(("client_tls", "upstream_tls"), SIDES)


@BY_SIDES
async def test_the_end_of_a_server_waits_for_all_that_it_said(
    papers: Papers, client_tls: bool, upstream_tls: bool
) -> None:
    async def says_much(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"z" * MUCH)

    async with tunnel(papers, client_tls=client_tls, upstream_tls=upstream_tls, talk=says_much) as (
        client,
        tap,
    ):
        client.writer.transport.pause_reading()
        (flow,) = tap.relay.flows
        await wait_until(lambda: flow._stream.pending)
        await wait_still(lambda: flow.response_bytes)
        client.writer.transport.resume_reading()
        assert len(await client.reader.read()) == MUCH
        client.writer.close()
        assert await how_it_ended(tap) == ("complete", None)


# ---------------------------------------------------------------- before a connection is used again


class _Waits:
    """Handler of a connection that is opened, then used."""

    def __init__(self) -> None:
        self.came: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()
        self.got = b""

    def on_connected(self, stream: Stream, took_ns: int) -> None:
        self.came.set_result(stream)

    def on_connect_failed(self, error: OSError) -> None:
        self.came.set_exception(error)

    def on_data(self, data: bytes, t_ns: int) -> None:
        self.got += data

    def on_eof(self) -> None: ...
    def on_lost(self, error: OSError | None) -> None: ...
    def on_drained(self) -> None: ...


class _Server:
    """A TLS server in a thread: it sends what it is told, while the test's loop stands still."""

    ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nright"

    def __init__(self, papers: Papers) -> None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(papers.certificate, papers.key)
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=True)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sock: socket.socket | None = None

    def answer(self) -> None:
        """Accept a connection, read a request, and answer it."""
        self._sock, _ = self._listener.accept()
        self._sock.settimeout(60)
        self._each(self._tls.do_handshake)
        self._each(lambda: self._tls.read(1_000))
        self.send(self.ANSWER)

    def _each(self, step: Callable[[], object]) -> None:
        assert self._sock is not None
        while True:
            try:
                step()
            except ssl.SSLWantReadError:
                self._flush()
                self._in.write(self._sock.recv(65_536))
            else:
                self._flush()
                return

    def _flush(self, size: int = -1) -> None:
        assert self._sock is not None
        self._sock.sendall(self._out.read()[: size if size >= 0 else None])

    def send(self, data: bytes, size: int = -1) -> None:
        """Send data as one record, or the first `size` bytes of the record."""
        self._tls.write(data)
        self._flush(size)

    def close_in_order(self) -> None:
        """Send the notice of the close, and close."""
        assert self._sock is not None
        with contextlib.suppress(ssl.SSLWantReadError):
            self._tls.unwrap()
        self._flush()
        self._sock.close()

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
        self._listener.close()


@pytest.mark.parametrize("kind", ["nothing", "unread", "part of a record", "part, read", "closed"])
async def test_a_tls_connection_on_which_something_came_is_not_used_again(papers: Papers, kind: str) -> None:
    """An answer too many must not become that of the next request: RFC 9112 9.2."""
    loop, server = asyncio.get_running_loop(), _Server(papers)
    pool = Pool(
        loop,
        parse_origin(f"https://localhost:{server.port}", "test"),
        Timebase(SystemClock(), make_lag_meter(0)),
        clock="mono",
        idle_max=8,
        idle_ns=60 * 10**9,
        connect_ns=60 * 10**9,
        tls=client_context(papers.ca, True),
    )
    answered = loop.run_in_executor(None, server.answer)
    waits = _Waits()
    pool.connect(waits)
    stream = await waits.came
    stream.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    await answered
    await wait_until(lambda: waits.got == server.ANSWER)
    before = stream.received_bytes
    pool.give_back(stream, SystemClock.mono_ns())
    assert before > 0
    if kind == "closed":
        server.close_in_order()
    elif kind != "nothing":
        server.send(
            b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwrong", 20 if kind.startswith("part") else -1
        )
    if kind == "part, read":  # into the TLS layer, which cannot decrypt it yet
        await wait_until(lambda: stream.received_bytes > before and stream.is_alive())
    elif kind != "nothing":
        while stream.received_bytes == before and stream.is_alive():
            pass  # the loop must not turn: it would read the bytes
    taken = pool.take(waits)
    assert (taken is stream) == (kind == "nothing")
    assert stream.closed == (kind != "nothing")
    assert pool.unsolicited == (kind in ("unread", "part of a record"))
    pool.close()
    stream.close()
    server.close()
