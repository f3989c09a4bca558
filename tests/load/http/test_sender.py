"""A sender over TLS, and what it knows of bodies."""

import asyncio
import contextlib
import ssl
from pathlib import Path

import trustme

from llmtap.exchange.outcome import Outcome
from llmtap.load.http import LoadSender, SenderOptions
from llmtap.load.sending import parse_target
from llmtap.net.tls import client_context
from tests.support.servers.loading import BODY, sender_to, streamed_answer
from tests.support.servers.peer import scene, wait_until
from tests.support.servers.upstream import says, upstream


@scene
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


@scene
async def test_bodies_that_are_not_read_tell_the_same() -> None:
    async with upstream() as server:
        target = parse_target(server.url + server.on(says(*streamed_answer(3))), "chat.completions", [])
        found = []
        for options in (SenderOptions(), SenderOptions(model="m", stream=True)):
            sender = LoadSender(asyncio.get_running_loop(), target, options)
            before = len(found)
            sender.send(BODY, lambda call, x: found.append((x.model, x.stream, x.request_bytes)))
            await wait_until(lambda: len(found) > before)  # noqa: B023
            sender.close()
        assert found[0] == found[1]
        assert await server.calls[0].body() == await server.calls[1].body() == BODY
