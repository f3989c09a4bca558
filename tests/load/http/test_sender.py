"""A sender beyond plain sockets of IPv4: TLS, IPv6, other people's servers; and what it knows of bodies."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import trustme
from aiohttp import web

from llmtap.exchange.outcome import Outcome
from llmtap.load.http import LoadSender, SenderOptions
from llmtap.load.target import parse_target
from llmtap.net.tls import client_context
from llmtap.units import decode_special, encode_special
from tests.support.live_proxy import port_free
from tests.support.loading import BODY, events, sender_to, streamed_answer
from tests.support.peer import scene, wait_taken, wait_until
from tests.support.sim_engine import QUICK, ask_chat, engine
from tests.support.upstream import says, upstream

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


async def until_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + b"".join(events(3)))
    await writer.drain()
    writer.close()


async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"".join(streamed_answer(3)[:3]))
    await writer.drain()
    await wait_taken(writer.get_extra_info("sockname"), writer.get_extra_info("peername"))
    writer.transport.abort()


async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


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


@pytest.mark.parametrize(
    ("handle", "outcomes", "tokens"),
    [
        (until_the_end, {Outcome.COMPLETE}, {3}),
        (cut, {Outcome.TRUNCATED, Outcome.UPSTREAM_RESET}, {2}),
        (hang_up, {Outcome.UPSTREAM_RESET}, {None}),
    ],
)
def test_ends_of_tls(papers: Papers, handle: Handle, outcomes: set[Outcome], tokens: set[int | None]) -> None:
    @scene
    async def play() -> None:
        trusting = client_context(papers.ca, True)
        async with (
            serving(handle, tls=papers.server) as port,
            sender_to(f"https://127.0.0.1:{port}", tls=trusting) as to,
        ):
            for _ in range(2):
                x = await to.ask()
                assert x.outcome in outcomes, x.error
                assert x.tokens.output in tokens

    play()


def test_tls_with_somebody_else(papers: Papers) -> None:
    @scene
    async def play() -> None:
        async with serving(answer, tls=papers.server) as port:
            async with sender_to(
                f"https://127.0.0.1:{port}", tls=client_context(papers.other_ca, True)
            ) as to:
                x = await to.ask()
                assert (x.outcome, x.timeline.submit_ns) == (Outcome.UPSTREAM_ERROR, None)
                assert "cannot connect" in (x.error or "")
            async with sender_to(f"https://127.0.0.1:{port}", tls=client_context(None, False)) as to:
                assert (await to.ask()).outcome is Outcome.COMPLETE, "whoever asks for no proof gets none"
        async with upstream() as plain:
            url = f"https://127.0.0.1:{plain.port}"
            async with sender_to(url, tls=client_context(papers.ca, True), connect_timeout_s=0.2) as to:
                assert (await to.ask()).outcome in (Outcome.UPSTREAM_ERROR, Outcome.UPSTREAM_TIMEOUT)

    play()


def test_a_sender_is_closed_while_tls_is_being_agreed_on(papers: Papers) -> None:
    @scene
    async def play() -> None:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            url = f"https://127.0.0.1:{mute.getsockname()[1]}"
            async with sender_to(url, tls=client_context(papers.ca, True)) as to:
                call = to.send()
                await asyncio.sleep(0.02)
            assert to.of(call).outcome is Outcome.CLIENT_CANCELLED

    play()


# ---------------------------------------------------------------- IPv6


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")
@scene
async def test_ipv6() -> None:
    async with serving(answer, host="::1") as port, sender_to(f"http://[::1]:{port}") as to:
        for _ in range(2):
            x = await to.ask()
            assert (x.outcome, x.tokens.output, x.clock) == (Outcome.COMPLETE, 3, "kernel")


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")
@scene
async def test_a_name_whose_first_address_does_not_answer() -> None:
    """localhost may be ::1 first; the server listens on 127.0.0.1 alone."""
    async with upstream() as server:
        path = server.on(says(*streamed_answer(3)))
        async with sender_to(f"http://localhost:{server.port}{path}") as to:
            assert (await to.ask()).outcome is Outcome.COMPLETE


# ---------------------------------------------------------------- other people's servers


@scene
async def test_aiohttp() -> None:
    async def stream(request: web.Request) -> web.StreamResponse:
        assert (await request.json())["model"] == "m"
        assert request.headers["authorization"] == "Bearer secret"
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in events(5):
            await response.write(event)
        await response.write_eof()
        return response

    async def whole(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no", "type": "overloaded"}}, status=529)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", stream)
    app.router.add_post("/v1/completions", whole)
    runner = web.AppRunner(app)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, listener).start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        async with sender_to(url, headers=[(b"Authorization", b"Bearer secret")]) as to:
            calls = [to.send() for _ in range(20)]
            for call in calls:
                x = await to.end_of(call)
                assert (x.outcome, x.tokens.output) == (Outcome.COMPLETE, 5)
        async with sender_to(url, endpoint="completions") as to:
            x = await to.ask()
            assert (x.outcome, x.status) == (Outcome.UPSTREAM_ERROR, 529)
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("chat.completions", ask_chat(stream=True, stream_options={"include_usage": True})),
        (
            "completions",
            {"model": "m", "prompt": "hi", "stream": True, "stream_options": {"include_usage": True}},
        ),
        ("responses", {"model": "m", "input": "hi", "stream": True}),
        ("chat.completions", ask_chat()),
    ],
)
def test_the_simulated_engine(endpoint: str, body: dict[str, object]) -> None:
    @scene
    async def play() -> None:
        async with engine(QUICK) as sim:
            async with sender_to(sim.url, endpoint=endpoint) as to:
                for _ in range(2):
                    x = await to.ask(msgspec.json.encode(body))
                    assert (x.outcome, x.tokens.output) == (Outcome.COMPLETE, QUICK.tokens)
                    assert (x.tokens.source, x.endpoint, x.stream) == ("usage", endpoint, "stream" in body)
            (truth,) = await sim.truths(since=1)
            assert truth["seq"] == 2

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


@scene
async def test_a_stream_that_never_began_is_known_as_one() -> None:
    url = f"http://127.0.0.1:{port_free()}"
    target = parse_target(url, "chat.completions", [])
    for stream in (True, False):
        sender = LoadSender(asyncio.get_running_loop(), target, SenderOptions(model="mine", stream=stream))
        ended = []
        sender.send(BODY, lambda call, x: ended.append(x))  # noqa: B023
        await wait_until(lambda: ended)  # noqa: B023
        sender.close()
        assert (ended[0].model, ended[0].stream) == ("mine", stream)


def test_options_travel() -> None:
    options = SenderOptions(retries=2, clock="mono", model="m")
    packed = msgspec.json.encode(options, enc_hook=encode_special)
    assert msgspec.json.decode(packed, type=SenderOptions, dec_hook=decode_special) == options
