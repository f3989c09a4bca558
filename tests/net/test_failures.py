"""What went wrong with a connection, in words: of errors made up, and of real ones."""

import asyncio
import errno
import os
import socket
import ssl
from pathlib import Path

import aiohttp
import pytest
import trustme

from llmtap.net.failures import failure_said, is_own_shortage
from tests.support.servers.peer import scene

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
    assert failure_said(error) == said


async def why_not(url: str, tls: ssl.SSLContext | bool = True) -> str:
    async with aiohttp.ClientSession() as session:
        with pytest.raises((aiohttp.ClientError, OSError)) as caught:
            await session.get(url, ssl=tls)
    return failure_said(caught.value)


@scene
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
        assert await why_not(f"https://127.0.0.1:{bare}") == "TLS: the server does not speak it"
        # What the server says in the middle of it is no failure of TLS.
        said = await why_not(f"https://127.0.0.1:{tls}", trusting)
        assert said in ("server disconnected", "connection reset by peer")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
def test_a_shortage_of_this_host_is_nobody_elses_fault(number: int) -> None:
    assert is_own_shortage(OSError(number, os.strerror(number)))


@pytest.mark.parametrize(
    "error",
    [ConnectionRefusedError(errno.ECONNREFUSED, "refused"), TimeoutError(), OSError("no number"),
     socket.gaierror(socket.EAI_NONAME, "not known"), ssl.SSLError(1, "no")],
)  # fmt: skip
def test_any_other_failure_is_no_shortage(error: OSError) -> None:
    assert not is_own_shortage(error)
