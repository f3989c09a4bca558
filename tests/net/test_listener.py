import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest
import trustme

from llmtap.errors import ConfigError
from llmtap.net.listener import (
    ACCEPTS_PER_TURN,
    FULL_PAUSE_S,
    Listener,
    bind,
    check_free,
    failure_text,
    is_own_shortage,
    name_of,
    parse_address,
)
from tests.support.servers.peer import play, wait_until


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:8080", ("127.0.0.1", 8080)),
        ("localhost:1", ("localhost", 1)),
        ("[::1]:8080", ("::1", 8080)),
        (":8080", ("", 8080)),
        ("0.0.0.0:65535", ("0.0.0.0", 65535)),
        ("127.0.0.1:0", ("127.0.0.1", 0)),
    ],
)
def test_an_address(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text, "x") == address


@pytest.mark.parametrize(
    "text", ["", "8080", "host", "host:", "host:http", "host:65536", "host:-1", "host:1.5", "::1:80"]
)
def test_no_address(text: str) -> None:
    with pytest.raises(ConfigError) as told:
        parse_address(text, "relay.listen")
    assert told.value.place == "relay.listen"


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1"])
def test_a_bound_socket_has_a_url(host: str) -> None:
    with bind(host, 0, shared=False) as sock:
        port = sock.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        assert name_of(sock) == f"{shown}:{port}"


def test_several_of_us_share_a_port_and_a_stranger_does_not() -> None:
    with bind("127.0.0.1", 0, shared=True) as first:
        port = first.getsockname()[1]
        with bind("127.0.0.1", port, shared=True) as second:
            assert second.getsockname() == first.getsockname()
        with pytest.raises(OSError):
            bind("127.0.0.1", port, shared=False)
        # A second proxy would share it without a word: that is what check_free is for.
        with pytest.raises(OSError):
            check_free("127.0.0.1", port)


def no_shortage(error: OSError) -> None:
    raise AssertionError from error


async def test_every_connection_is_handed_over_without_blocking() -> None:
    sock = bind("127.0.0.1", 0, shared=False)
    accepted: list[socket.socket] = []
    listener = Listener(asyncio.get_running_loop(), sock, accepted.append, no_shortage)
    clients = [socket.create_connection(sock.getsockname()) for _ in range(ACCEPTS_PER_TURN * 2 + 3)]
    await wait_until(lambda: len(accepted) == len(clients))
    assert not any(s.getblocking() for s in accepted)
    assert {s.getpeername() for s in accepted} == {c.getsockname() for c in clients}
    # Inherited from the listening socket.
    assert all(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for s in accepted)
    listener.close()
    for s in [*accepted, *clients]:
        s.close()


async def test_who_is_in_the_queue_is_let_in_before_the_door_closes() -> None:
    sock = bind("127.0.0.1", 0, shared=False)
    address = sock.getsockname()
    accepted: list[socket.socket] = []
    listener = Listener(asyncio.get_running_loop(), sock, accepted.append, no_shortage)
    clients = [socket.create_connection(address) for _ in range(5)]  # the loop has had no turn yet
    listener.close()
    assert len(accepted) == 5
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
    for s in [*accepted, *clients]:
        s.close()


class NoFilesLeft:
    """A listening socket whose accept fails until told otherwise."""

    def __init__(self, sock: socket.socket, error: OSError) -> None:
        self.sock = sock
        self.error: OSError | None = error
        self.tries = 0
        self.told: list[OSError] = []

    def fileno(self) -> int:
        return self.sock.fileno()

    def accept(self) -> tuple[socket.socket, object]:
        self.tries += 1
        if self.error is not None:
            raise self.error
        return self.sock.accept()

    def close(self) -> None:
        self.sock.close()


def listening_with(error: OSError) -> tuple[NoFilesLeft, list[socket.socket], Callable[[], Listener]]:
    fake = NoFilesLeft(bind("127.0.0.1", 0, shared=False), error)
    accepted: list[socket.socket] = []
    return (
        fake,
        accepted,
        lambda: Listener(  # type: ignore[arg-type]
            asyncio.get_running_loop(), fake, accepted.append, fake.told.append
        ),
    )


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
async def test_without_file_descriptors_it_waits_instead_of_spinning(number: int) -> None:
    fake, accepted, start = listening_with(OSError(number, "none left"))
    listener = start()
    client = socket.create_connection(fake.sock.getsockname())
    await wait_until(lambda: fake.told)
    await asyncio.sleep(FULL_PAUSE_S / 2)
    assert fake.tries <= 2, "a full process must not spin on its listening socket"
    fake.error = None
    await wait_until(lambda: accepted)  # the connection waited in the kernel
    assert {e.errno for e in fake.told} == {number}
    listener.close()
    for s in [*accepted, client]:
        s.close()


@pytest.mark.parametrize("pausing", [False, True])
async def test_nothing_resumes_a_door_that_was_closed_without_file_descriptors(pausing: bool) -> None:
    fake, accepted, start = listening_with(OSError(errno.EMFILE, "none left"))
    listener = start()
    with socket.create_connection(fake.sock.getsockname()):
        if pausing:
            await wait_until(lambda: fake.told)
        before = len(fake.told)
        listener.close()
        assert len(fake.told) == before + 1, "who is in the queue was to be let in"
        # Whatever a timer raises fails the scene.
        await asyncio.sleep(FULL_PAUSE_S * 2)
    assert (len(fake.told), accepted) == (before + 1, [])


async def test_a_connection_that_was_aborted_in_the_queue_is_passed_over() -> None:
    fake, accepted, start = listening_with(ConnectionAbortedError())
    listener = start()
    client = socket.create_connection(fake.sock.getsockname())
    await wait_until(lambda: fake.tries >= ACCEPTS_PER_TURN)
    fake.error = None
    await wait_until(lambda: accepted)
    assert fake.told == []
    listener.close()
    for s in [*accepted, client]:
        s.close()


def test_an_error_nobody_expects_is_not_swallowed() -> None:
    async def accept_once() -> None:
        fake, _, start = listening_with(OSError(errno.EBADF, "bad"))
        start()
        with socket.create_connection(fake.sock.getsockname()):
            await wait_until(lambda: fake.tries)
        asyncio.get_running_loop().remove_reader(fake)
        fake.close()

    with pytest.raises(AssertionError, match="bad"):
        play(accept_once())


REFUSED = "connection refused"


class Wrapping(Exception):
    """As aiohttp's errors of a connector."""

    def __init__(self, os_error: OSError) -> None:
        super().__init__("Cannot connect to host h:1 ssl:default")
        self.os_error = os_error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed ('127.0.0.1', 9)"), REFUSED),
        (OSError("Multiple exceptions: [Errno 111] Connect call failed (), [Errno 111] Conn"), REFUSED),
        (Wrapping(ConnectionRefusedError(errno.ECONNREFUSED, "x")), REFUSED),
        (Wrapping(socket.gaierror(socket.EAI_NONAME, "x")), "name not known"),
        (socket.gaierror(socket.EAI_AGAIN, "x"), "name cannot be looked up at the moment"),
        (TimeoutError(), "timed out"),
        (OSError(errno.ETIMEDOUT, "x"), "timed out"),
        (OSError(errno.EHOSTUNREACH, "x"), "no route to host"),
        (ConnectionResetError(errno.ECONNRESET, "x"), "connection reset by peer"),
        (ConnectionAbortedError("SSL handshake is taking too long"), "SSL handshake is taking too long"),
        (ssl.SSLCertVerificationError(1, "x"), "TLS: certificate not trusted"),
        (aiohttp.ServerDisconnectedError(), "server disconnected"),
        (ssl.SSLError(1, "x"), "TLS: it failed"),
        (asyncio.CancelledError(), "CancelledError"),
    ],
)
def test_words(error: BaseException, said: str) -> None:
    assert failure_text(error) == said


async def why_not(url: str, tls: ssl.SSLContext | bool = True) -> str:
    async with aiohttp.ClientSession() as session:
        with pytest.raises((aiohttp.ClientError, OSError)) as caught:
            await session.get(url, ssl=tls)
    return failure_text(caught.value)


async def test_certificates_and_servers_without_any(tmp_path: Path) -> None:
    ca = trustme.CA()
    served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ca.issue_cert("127.0.0.1").configure_cert(served)
    trusting = ssl.create_default_context()
    ca.configure_trust(trusting)

    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        await reader.read(1)
        writer.close()

    secure = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0, ssl=served)
    insecure = await asyncio.start_server(plain, "127.0.0.1", 0)
    async with secure, insecure:
        tls, bare = (server.sockets[0].getsockname()[1] for server in (secure, insecure))
        said = await why_not(f"https://127.0.0.1:{tls}")
        assert said.startswith("TLS: certificate not trusted (") and "certificate" in said[30:]
        mismatch = await why_not(f"https://localhost:{tls}", trusting)
        assert mismatch.startswith("TLS: certificate not trusted (Hostname mismatch")
        assert await why_not(f"https://127.0.0.1:{bare}") == (
            "TLS: the server does not speak it (its URL begins with http://)"
        )
        # What the server says in the middle of it is no failure of TLS.
        said = await why_not(f"https://127.0.0.1:{tls}", trusting)
        assert said in ("server disconnected", "connection reset by peer")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
def test_a_shortage_of_this_host_is_nobody_elses_fault(number: int) -> None:
    assert is_own_shortage(OSError(number, os.strerror(number)))


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(errno.ECONNREFUSED, "refused"),
        TimeoutError(),
        OSError("no number"),
        socket.gaierror(socket.EAI_NONAME, "not known"),
        ssl.SSLError(1, "no"),
    ],
)
def test_any_other_failure_is_no_shortage(error: OSError) -> None:
    assert not is_own_shortage(error)
