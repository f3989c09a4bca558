"""A sender over TLS, and what it knows of bodies."""

import asyncio
import contextlib
import ssl
from pathlib import Path

import pytest
import trustme

from llmtap.clock import SystemClock
from llmtap.exchange.exchange import Exchange
from llmtap.exchange.outcome import Outcome
from llmtap.load.http import LoadSender
from llmtap.load.options import BodyOptions, SendingOptions
from llmtap.load.sending import DeferredWork, parse_target
from llmtap.net.tls import client_context
from llmtap.protocol.http1_response import INTERIM_HEADS_MAX
from tests.support.servers.loading import BODY, sender_to, streamed_answer
from tests.support.servers.peer import wait_until
from tests.support.servers.upstream import OK, Call, says, upstream


async def test_tls(tmp_path: Path) -> None:
    ca, served = trustme.CA(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ca.issue_cert("127.0.0.1").configure_cert(served)
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):  # the end of the connection
            while head := (await reader.readuntil(b"\r\n\r\n")).lower():
                length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
                await reader.readexactly(int(length.split(b":")[1]))
                writer.writelines(streamed_answer(3))
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=served)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with sender_to(url, tls=client_context(str(tmp_path / "ca.pem"), True)) as to:
        assert await to.sender.open(2) == 2
        for body in (BODY, BODY[:-1] + b',"user":"' + b"a" * 5_000_000 + b'"}'):
            x = await to.ask(body)
            assert (x.outcome, x.tokens.output, x.clock) == (Outcome.COMPLETE, 3, "mono"), x.error
        assert to.sender.pool.connects == 2
    server.close()


async def test_bodies_that_are_not_read_tell_the_same() -> None:
    async with upstream() as server:
        target = parse_target(server.url + server.on(says(*streamed_answer(3))), "chat.completions", [])
        found = []
        for bodies in (BodyOptions(), BodyOptions(model="m", stream=True)):
            sender = LoadSender(asyncio.get_running_loop(), target, SendingOptions(), bodies)
            before = len(found)
            sender.send(BODY, lambda call, x: found.append((x.model, x.stream, x.request_bytes)))
            await wait_until(lambda: len(found) > before)  # noqa: B023
            sender.close()
        assert found[0] == found[1]
        assert await server.calls[0].body() == await server.calls[1].body() == BODY


@pytest.mark.parametrize(("surplus", "idle"), [(False, 1), (True, 0)])
async def test_a_connection_with_more_than_its_answer_is_not_kept(
    surplus: bool, idle: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the surplus was read before the answer was parsed."""
    monkeypatch.setattr(DeferredWork, "is_behind", lambda self, t_ns: True)
    right = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nright"

    async def never(call: Call) -> None:
        await call.left()

    async with upstream() as server:
        target = parse_target(server.url + server.on(never), "chat.completions", [])
        sender = LoadSender(asyncio.get_running_loop(), target, SendingOptions())
        found: list[Exchange] = []
        call = sender.send(BODY, lambda call, x: found.append(x))
        await wait_until(lambda: bool(server.calls))
        now_ns = SystemClock.mono_ns()
        call.on_data(right, now_ns)
        if surplus:
            call.on_data(b"HTTP/1.1", now_ns)
        await wait_until(lambda: bool(found))
        assert (found[0].status, found[0].outcome) == (200, Outcome.COMPLETE)
        assert sender.pool.idle == idle
        sender.close()


async def test_interim_answers_have_a_bound() -> None:
    async with upstream() as server:
        hints = b"HTTP/1.1 103 Early Hints\r\n\r\n"
        found: list[Outcome] = []
        for number, n in enumerate((INTERIM_HEADS_MAX, 2_500), 1):
            path = server.on(says(hints * n + b"\r\n" + OK))
            target = parse_target(server.url + path, "chat.completions", [])
            sender = LoadSender(asyncio.get_running_loop(), target, SendingOptions())
            sender.send(BODY, lambda call, x: found.append(x.outcome))
            await wait_until(lambda: len(found) == number)  # noqa: B023
            sender.close()
        assert found == [Outcome.COMPLETE, Outcome.UPSTREAM_ERROR]
