"""Fuzz target: connections to an upstream over TLS that are used again, with all that may come in between.

A relay's client connections, flows and pool run over the TLS of the event loop (uvloop's), in memory. The
server sends surplus answers, whole or in part, and closes at any moment. No client may get a byte that is not
of the answer to its own request, and a connection on which nothing came must be used again.
"""

import re
import ssl
import struct
from collections.abc import Callable
from itertools import pairwise
from random import Random
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, cast

import trustme
import uvloop

from llmtap.clock import SystemClock
from llmtap.net.lag import PythonLagMeter
from llmtap.net.pool import Pool, Route, Waiter, parse_origin
from llmtap.net.stream import Timebase
from llmtap.net.tls import TlsStream
from llmtap.vantage.relay.connection import ClientConnection
from llmtap.vantage.relay.options import RelayOptions
from llmtap.vantage.relay.upload import RelayContext

_ANONYMOUS: Final = "AECDH-AES128-SHA:@SECLEVEL=0"
"""Of TLS 1.2, without certificates, whose handshake takes a third of the time."""
_STRAY: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nstray",
    b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 5\r\n\r\nstray",
    b"HTTP/1.1 102 Processing\r\nX: stray\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nstray\r\n0\r\n\r\n",
    b"stray",
    b"\r\n",
    b"s",
)
"""What a server sends that no request asked for."""
BETWEEN: Final = ("nothing", "nothing", "stray", "part", "notice", "closed", "reset", "cut")
"""On the idle connection, before the next request: `part` of a TLS record, the notice of a TLS close,
`closed` with that notice, `cut` without it."""
ANSWERS: Final = (
    "whole",
    "whole",
    "whole",
    "whole",
    "surplus",
    "surplus record",
    "surplus part",
    "half",
    "none",
    "client leaves",
)
"""Surplus bytes come in the last record of the answer, or with it in one read: a record, or part of one."""
_ENDS: Final = ("closed", "reset", "cut")
_SESSION_USES: Final = 1_000
"""Connections with one session: a session is valid for some minutes, and reading it is slow."""
_TCP_CLOSE_WAIT: Final = 8


class Case(NamedTuple):
    """A request, its answer, and what came before it on the idle connection."""

    is_13: bool
    """A new connection has TLS 1.3."""

    method: bytes
    between: str
    is_read: bool
    """The loop reads what came in between before the next request is there."""
    stray: bytes
    answer: str
    chunked: bool
    cuts: tuple[float, ...]
    """Where the answer's records are cut into reads, as shares of their length."""
    share: float
    """Of what comes in part only."""
    end: str
    """How the server closes."""
    number: int


class _Loop(uvloop.Loop):
    """An event loop that turns when it is told to, and has no sockets."""

    def __init__(self) -> None:
        super().__init__()
        self.ready: list[tuple[Callable[..., object], tuple[object, ...]]] = []

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        self.ready.append((callback, args))
        return SimpleNamespace(cancel=lambda: None)

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return SimpleNamespace(cancel=lambda: None)

    def time(self) -> float:
        return 0.0

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        raise AssertionError(context) from context.get("exception")

    def turn(self) -> None:
        while self.ready:
            ready, self.ready = self.ready, []
            for callback, args in ready:
                callback(*args)

    def run_queue(self) -> None:
        """Run the loop's own queue, to which its TLS adds reads; each holds its connection until it ran."""
        self.stop()
        self.run_forever()


class _Socket:
    """The kernel's side of a connection: bytes that came and are unread."""

    def __init__(self) -> None:
        self.unread = bytearray()
        self.received_bytes = 0
        self.left = False
        """The peer has closed."""

    def arrive(self, data: bytes) -> None:
        self.unread += data
        self.received_bytes += len(data)

    def recv(self, size: int, flags: int) -> bytes:
        if not self.unread and not self.left:
            raise BlockingIOError
        return bytes(self.unread[:size])

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        if size == 1:
            return bytes((_TCP_CLOSE_WAIT if self.left else 1,))
        return struct.pack(f"={size - 8}xQ", self.received_bytes)


class _Connection:
    """A TLS connection in memory: the relay's stream, the loop's TLS, and a server."""

    def __init__(self, world: "_World", waiter: Waiter) -> None:
        self.loop = world.loop
        self.socket = _Socket()
        self.stream = TlsStream(waiter, cast(Any, self.socket))
        self.is_closed = self.is_reset = False
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._server = world.server_context.wrap_bio(self._in, self._out, server_side=True)
        self._tls: Any = cast(Any, uvloop.loop).SSLProtocol(
            self.loop, self.stream, world.client_context, None
        )
        self._tls.connection_made(self)
        for step in (self._server.do_handshake, self._server.do_handshake, lambda: self._server.read(1)):
            try:
                step()
            except ssl.SSLWantReadError:
                pass
            self.socket.arrive(self._out.read())
            self.read()

    def __del__(self) -> None:
        if not self.is_closed:  # or TLS warns that it was not closed
            self._tls.connection_lost(None)

    # The loop's transport of a plain socket.

    def write(self, data: bytes) -> None:
        if not self.is_closed:
            self._in.write(data)

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.loop.call_soon(self._tls.connection_lost, None)

    def abort(self) -> None:
        self.close()

    def _force_close(self, error: BaseException | None) -> None:
        self.close()

    def is_closing(self) -> bool:
        return self.is_closed

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...

    def read(self) -> None:
        """One turn of the loop: read what has come, and find that the peer has left."""
        if self.socket.unread and not self.is_closed:
            data = bytes(self.socket.unread)
            self.socket.unread.clear()
            self._tls.get_buffer(len(data))[: len(data)] = data
            self._tls.buffer_updated(len(data))
        if self.socket.left and not self.is_closed:
            if self.is_reset:
                self.is_closed = True
                self.loop.call_soon(self._tls.connection_lost, ConnectionResetError())
            elif not self._tls.eof_received():
                self.close()
        self.loop.turn()

    # The server.

    def request_path(self) -> bytes:
        """Return the path of the request that came; it came whole."""
        try:
            request = self._server.read(65_536)
        except ssl.SSLWantReadError:
            raise AssertionError("no request came") from None
        match = re.fullmatch(rb"(?s)\w+ (\S+) HTTP/1.1\r\n.*\r\n\r\n(\{\})?", request)
        assert match is not None, request
        return match[1]

    def seal(self, *records: bytes) -> bytes:
        for record in records:
            self._server.write(record)
        return self._out.read()

    def end(self, how: str) -> None:
        """Close, with the notice of TLS or without it; `reset` is a close, too."""
        if how in ("notice", "closed"):
            try:
                self._server.unwrap()
            except (ssl.SSLWantReadError, ssl.SSLSyscallError):
                pass
            self.socket.arrive(self._out.read())
        self.socket.left = how != "notice"
        self.is_reset = how == "reset"


class _ClientContext:
    """A client's TLS context that may resume a session, which costs half of a handshake."""

    def __init__(self, context: ssl.SSLContext, *, resumes: bool) -> None:
        self._context = context
        self._resumes = resumes
        self._last: ssl.SSLObject | None = None
        self._session: ssl.SSLSession | None = None
        self._uses = 0

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, **named: Any) -> ssl.SSLObject:
        if self._resumes and self._last is not None:
            if not self._uses % _SESSION_USES:
                self._session = self._last.session
            self._uses += 1
        self._last = self._context.wrap_bio(incoming, outgoing, session=self._session, **named)
        return self._last


class _Pool(Pool):
    def connect(self, waiter: Waiter) -> Any:
        world = cast(_World, self.world)
        world.latest = _Connection(world, waiter)
        self.connects += 1
        waiter.on_connected(world.latest.stream, 1)
        return SimpleNamespace(cancel=lambda: None)

    world: Any = None


class _Client:
    """The stream of a client that takes all."""

    def __init__(self, context: RelayContext) -> None:
        self.closed = self.paused = False
        self.resumed_ns = self.pending = 0
        self.got = b""
        self.connection = ClientConnection(context, b"", lambda connection: None)
        self.connection.attach(cast(Any, self), 1)

    def write(self, data: bytes) -> bool:
        assert not self.closed
        self.got += data
        return True

    def close(self) -> None:
        self.closed = True

    abort = shutdown_write = close

    def pause(self) -> None: ...
    def resume(self) -> None: ...


class _World:
    """A relay with one upstream, which lives as long as the target."""

    def __init__(self) -> None:
        self.loop = _Loop()
        self.latest: _Connection
        ca = trustme.CA(key_type=trustme.KeyType.RSA)
        issued = ca.issue_cert("localhost", key_type=trustme.KeyType.RSA)
        self._contexts = []
        for is_13 in (False, True):
            server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            client.check_hostname, client.verify_mode = False, ssl.CERT_NONE  # tests/net/test_tls.py verifies
            if is_13:
                server.minimum_version = ssl.TLSVersion.TLSv1_3
                issued.configure_cert(server)
            else:
                server.maximum_version = ssl.TLSVersion.TLSv1_2
                server.set_ciphers(_ANONYMOUS)
                client.set_ciphers(_ANONYMOUS)
            self._contexts.append((server, _ClientContext(client, resumes=is_13)))
        self.use(is_13=False)
        origin = parse_origin("https://localhost:1", "test")
        loop = cast(Any, self.loop)
        self.pool = _Pool(
            loop,
            origin,
            Timebase(SystemClock(), PythonLagMeter(1_000)),
            clock="mono",
            idle_max=8,
            idle_ns=10**18,
            connect_ns=10**18,
            tls=None,
        )
        self.pool.world = self
        tap = SimpleNamespace(
            open=lambda *_, **__: (1, False), offer=lambda *_: False, ledger=SimpleNamespace(opened=0)
        )
        reporter = SimpleNamespace(
            tap=tap,
            now_ns=SystemClock.mono_ns,
            arrivals={},
            draining=False,
            name="r",
            on_begin=lambda *_: None,
            on_end=lambda *_: None,
            stamp_error_since=lambda t_ns: 0,
            side="",
            lag=SimpleNamespace(worst_since=lambda t_ns: 0),
        )
        self.context = RelayContext(
            loop,
            RelayOptions(upstream="https://localhost:1", skip=()),
            cast(Any, reporter),
            Route(origin, origin.authority, self.pool),
        )
        self.context.warn = lambda *_: None  # type: ignore[method-assign]  # the faults are ours

    def use(self, *, is_13: bool) -> None:
        """Set the version of TLS of new connections."""
        self.server_context, self.client_context = self._contexts[is_13]


class TlsReuse:
    """Requests one after another over kept TLS connections: each client gets the answer to its own."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._world = _World()
        self._idle: _Connection | None = None
        """The connection that the next request must use, if nothing comes on it."""
        self.seen: dict[str, int] = {}
        """Cases by what happened in them."""

    def case(self) -> Case:
        rng = self._rng
        cuts = tuple(sorted(rng.random() for _ in range(rng.choice((0, 0, 1, 3)))))
        case = Case(
            rng.random() < 0.1,
            rng.choice((b"GET", b"POST")),
            rng.choice(BETWEEN),
            rng.random() < 0.5,
            rng.choice(_STRAY),
            rng.choice(ANSWERS),
            rng.random() < 0.5,
            cuts,
            rng.random(),
            rng.choice(_ENDS),
            rng.getrandbits(30),
        )
        # Otherwise few connections would be used a second time.
        return case if rng.random() < 0.5 else case._replace(answer="whole", between="nothing")

    def check(self, case: Case) -> None:
        world, idle, rest = self._world, self._idle, b""
        world.use(is_13=case.is_13)
        if idle is not None:
            rest = self._between(idle, case)
        must_reuse = idle is not None and case.between == "nothing"
        opened, reuses = world.pool.connects, world.pool.reuses
        client = _Client(world.context)
        path = b"/%d" % case.number
        body = b"Content-Length: 2\r\n\r\n{}" if case.method == b"POST" else b"\r\n"
        client.connection.on_data(b"%b %b HTTP/1.1\r\nHost: a\r\n%b" % (case.method, path, body), 1)
        world.loop.turn()
        reused = world.pool.connects == opened
        assert reused == must_reuse == (world.pool.reuses > reuses), f"reused is {reused}"
        if idle is not None and not reused:
            assert idle.stream.closed, "a connection on which something came stays open"
            idle.socket.arrive(rest)
            idle.read()
        self._saw(f"{'used again' if reused else 'new'}, {case.answer}")
        self._idle = world.latest if self._answer(case, client, world.latest, path, reused=reused) else None
        world.loop.run_queue()

    def _between(self, idle: _Connection, case: Case) -> bytes:
        """Let bytes come on the idle connection; return those that come after the next request."""
        rest = b""
        self._saw(f"{case.between}, {'read' if case.is_read else 'unread'}")
        if case.between in ("stray", "part"):
            record = idle.seal(case.stray)
            size = len(record) if case.between == "stray" else 1 + int(case.share * (len(record) - 1))
            idle.socket.arrive(record[:size])
            rest = record[size:]
        elif case.between != "nothing":
            idle.end(case.between)
        if case.is_read:
            idle.read()
        return rest

    def _answer(
        self, case: Case, client: _Client, connection: _Connection, path: bytes, *, reused: bool
    ) -> bool:
        """Answer a request; return whether the connection must be used for the next one."""
        world = self._world
        assert connection.request_path() == path
        if case.answer == "none":
            connection.end(case.end)
            connection.read()
            if not reused or case.method == b"POST":
                assert connection is world.latest, "the request is sent twice"
                assert client.got.startswith(b"HTTP/1.1 502 "), client.got
                assert b"stray" not in client.got
                return False
            assert connection is not world.latest, "the request is not sent again"
            connection = world.latest
            assert connection.request_path() == path
        records = _answer_to(path, chunked=case.chunked)
        whole = b"".join(records)
        if case.answer == "surplus":
            records[-1] += case.stray
        elif case.answer.startswith("surplus"):
            records.append(case.stray)
        sealed = connection.seal(*records)
        edges = [0, *(int(cut * len(sealed)) for cut in case.cuts), len(sealed)]
        if case.answer.startswith("surplus "):
            behind = _start_of_last_record(sealed)
            if case.answer == "surplus part":
                edges[-1] = behind + 1 + int(case.share * (len(sealed) - behind - 1))
            edges = [*(edge for edge in edges if edge < behind), edges[-1]]
        is_part = case.answer in ("half", "client leaves")
        if is_part:
            # Without the end of its last record.
            size = int(case.share * (len(sealed) - 1))
            edges = [*(edge for edge in edges if edge < size), size]
        for start, end in pairwise(edges):
            connection.socket.arrive(sealed[start:end])
            connection.read()
        if is_part:
            self._cut_short(case, client, connection, whole, sealed[edges[-1] :])
            return False
        assert client.got == whole, f"{client.got!r} instead of {whole!r}"
        if case.answer == "surplus part" and not connection.stream.closed:
            # The rest comes before the next request.
            connection.socket.arrive(sealed[edges[-1] :] or b"\x17")
            if case.is_read:
                connection.read()
            assert world.pool.take(cast(Any, None)) is None
        if case.answer.startswith("surplus"):
            assert connection.stream.closed, "a connection with more than its answer is kept"
            return False
        return True

    def _cut_short(
        self, case: Case, client: _Client, connection: _Connection, whole: bytes, rest: bytes
    ) -> None:
        """The server or the client leaves within the answer."""
        if case.answer == "client leaves":
            client.connection.on_eof()
            self._world.loop.turn()
            connection.socket.arrive(rest)
        else:
            connection.end(case.end)
        connection.read()
        assert connection.stream.closed
        if connection is not self._world.latest:
            assert not client.got, "a request is sent again after a byte of its answer"
            client.connection.on_eof()
        elif client.got.startswith(b"HTTP/1.1 502 "):
            assert case.answer == "half"
            assert b"stray" not in client.got
        else:
            assert client.closed, "an answer that is cut looks whole"
            assert whole.startswith(client.got), client.got

    def _saw(self, what: str) -> None:
        self.seen[what] = self.seen.get(what, 0) + 1


def _answer_to(path: bytes, *, chunked: bool) -> list[bytes]:
    """The records of an answer."""
    if not chunked:
        return [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (2 * len(path)), path, path]
    chunk = b"%x\r\n%b\r\n" % (len(path), path)
    return [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk, chunk, b"0\r\n\r\n"]


def _start_of_last_record(sealed: bytes) -> int:
    """Return where the last TLS record begins (RFC 8446 5.1: a head of 5 bytes)."""
    at = after = 0
    while after < len(sealed):
        at, after = after, after + 5 + int.from_bytes(sealed[after + 3 : after + 5], "big")
    return at
