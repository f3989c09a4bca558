"""A sender over TLS, and what it knows of bodies."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import trustme

from llmtap.exchange.outcome import Outcome
from llmtap.load.http import LoadSender, SenderOptions
from llmtap.load.target import parse_target
from llmtap.net.tls import client_context
from tests.support.servers.loading import BODY, sender_to, streamed_answer
from tests.support.servers.peer import scene, wait_until
from tests.support.servers.upstream import says, upstream

Handle = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(
    handle: Handle, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """A server of asyncio's streams; `handle` is called for each request, whose body it is not shown."""
    faults: list[BaseException] = []

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    int(line.split(b":")[1])
                    for line in head.split(b"\r\n")
                    if line.lower().startswith(b"content-length")
                )
                await reader.readexactly(length)
                await handle(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError, RuntimeError):
            pass
        except BaseException as exc:
            faults.append(exc)
        finally:
            writer.close()

    server = await asyncio.start_server(connection, host, 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
    assert not [fault for fault in faults if not isinstance(fault, asyncio.CancelledError)]


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    for piece in streamed_answer(3):
        writer.write(piece)
        await writer.drain()


# ---------------------------------------------------------------- TLS


class Papers(NamedTuple):
    ca: str
    other_ca: str
    server: ssl.SSLContext


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    folder: Path = tmp_path_factory.mktemp("papers")
    ca, other = trustme.CA(), trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ca.issue_cert("localhost", "127.0.0.1").configure_cert(context)
    ca.cert_pem.write_to_path(folder / "ca.pem")
    other.cert_pem.write_to_path(folder / "other.pem")
    return Papers(str(folder / "ca.pem"), str(folder / "other.pem"), context)


def test_tls(papers: Papers) -> None:
    @scene
    async def play() -> None:
        trusting = client_context(papers.ca, True)
        async with (
            serving(answer, tls=papers.server) as port,
            sender_to(f"https://127.0.0.1:{port}", tls=trusting) as to,
        ):
            assert await to.sender.open(2) == 2
            for body in (BODY, BODY[:-1] + b',"user":"' + b"a" * 5_000_000 + b'"}'):
                x = await to.ask(body)
                assert (x.outcome, x.tokens.output, x.clock) == (Outcome.COMPLETE, 3, "mono"), x.error
            assert to.sender.pool.connects == 2

    play()


# ---------------------------------------------------------------- what is known of bodies


@scene
async def test_bodies_that_are_not_read_tell_the_same() -> None:
    async with upstream() as server:
        target = parse_target(server.url + server.on(says(*streamed_answer(3))), "chat.completions", [])
        found = []
        for options in (SenderOptions(), SenderOptions(model="m", stream=True)):
            sender = LoadSender(asyncio.get_running_loop(), target, options)
            ended = []
            sender.send(BODY, lambda call, x: ended.append(x))  # noqa: B023
            await wait_until(lambda: ended)  # noqa: B023
            sender.close()
            found.append(ended[0])
        plain, told = found
        assert (plain.model, plain.stream, plain.request_bytes) == (
            told.model,
            told.stream,
            told.request_bytes,
        )
        assert await server.calls[0].body() == await server.calls[1].body() == BODY
