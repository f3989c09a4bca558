"""Load over WebSockets: Realtime against the simulated engine, exchanges as its books have them; Responses
against a server that plays recorded answers."""

import asyncio
import itertools
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import WSMsgType, web

from llmtap.clock import SystemClock
from llmtap.exchange.exchange import OUTPUT, Exchange
from llmtap.exchange.outcome import Outcome, TokenSource
from llmtap.load import websocket as module
from llmtap.load.options import BodyOptions, SendingOptions
from llmtap.load.websocket import WebSocketTarget
from llmtap.metrics.latency import ttft_ns
from llmtap.net.stream import READ_BYTES_MAX
from llmtap.sim.server.options import SimOptions
from llmtap.units import Duration
from llmtap.workload.prompts.prompt import Prompt
from llmtap.workload.prompts.text import count_tokens
from tests.support.data import CORPUS
from tests.support.servers.live_proxy import port_free
from tests.support.servers.sim_engine import Engine, engine

MS = 1_000_000
HI = Prompt(text="hi")
NUMBERS = itertools.count(1)
mono_ns = SystemClock.mono_ns
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
NAMED = BodyOptions(model="m")
TIMED = SimOptions(ttft=Duration(6 * MS), itl=Duration(3 * MS), tokens=8)


@asynccontextmanager
async def target_of(e: Engine, **sim: str) -> AsyncIterator[WebSocketTarget]:
    headers = [(name.replace("_", "-").encode(), value.encode()) for name, value in sim.items()]
    url = e.url.replace("http", "ws")
    target = WebSocketTarget(url, bodies=NAMED, headers=headers, exact_output=True)
    try:
        yield target
    finally:
        await target.close()


async def ask(
    target: WebSocketTarget,
    prompt: Prompt = HI,
    output: int = 8,
    *,
    due: int | None = None,
) -> Exchange:
    return await target.send_prompt(prompt, output, due, f"load-{next(NUMBERS)}")


@pytest.mark.parametrize("clock", ["kernel", "mono"])
async def test_an_exchange_is_what_the_engine_did(clock: str) -> None:
    async with engine(TIMED) as e:
        target = WebSocketTarget(e.url.replace("http", "ws"), SendingOptions(clock=clock), NAMED)
        found = [await ask(target, due=5) for _ in range(3)]
        await target.close()
        truths = await e.ended(3)
    for x, truth in zip(found, truths, strict=True):
        assert x.request_id == truth["id"]
        assert (x.outcome, x.status, x.error, x.stream) == (Outcome.COMPLETE, 101, None, True)
        assert (x.dialect, x.endpoint, x.path) == ("openai.realtime", "realtime", "/v1/realtime")
        assert (x.model, x.tenant, x.clock, x.unparsed_events) == ("m", "default", clock, 0)
        assert (x.tokens.input, x.tokens.output, x.tokens.source) == (1, 8, TokenSource.USAGE)
        t, log = x.timeline, x.timeline.events
        stamps = [at for at, flags in zip(log.t_ns, log.flags, strict=True) if flags & OUTPUT]
        assert len(stamps) == 8
        sent = truth["sent_ns"][0]
        # Nothing is read before it was sent, nor taken for later than it can have waited unread.
        assert all(at >= one - x.uncertainty_ns for at, one in zip(stamps, sent, strict=True))
        assert t.submit_ns is not None and t.first_content_ns == stamps[0] and t.last_token_ns == stamps[-1]
        assert t.submit_ns <= truth["accepted_ns"]
        assert ttft_ns(x.timeline) == stamps[0] - t.submit_ns
        assert t.head_ns is None
        assert x.scheduled_ns == 5 and x.dispatch_late_ns == t.arrival_ns - 5


async def test_one_session_serves_one_request_after_another_and_nothing_is_remembered() -> None:
    async with engine() as e, target_of(e) as target:
        prompt = Prompt(text="more", system="Be brief.", history=(("user", "hi"), ("assistant", "hello")))
        found = [await ask(target, prompt, n) for n in (3, 9, 1)]
        assert [x.tokens.output for x in found] == [3, 9, 1]
        assert {x.tokens.input for x in found} == {count_tokens("Be brief.\nhi\nhello\nmore")}
        assert len(e.server._sessions) == 1
        assert found[0].request_bytes > found[1].request_bytes, "the first one opened the session"


async def test_requests_at_the_same_time_have_a_session_each() -> None:
    async with engine(TIMED) as e, target_of(e) as target:
        assert await target.open(2) == 2
        assert len(e.server._sessions) == 2
        found = await asyncio.gather(*(ask(target) for _ in range(4)))
        assert len(e.server._sessions) == 4
        assert {x.outcome for x in found} == {Outcome.COMPLETE}
        await ask(target)
        assert len(e.server._sessions) == 4
        assert len(await e.ended(5)) == 5


@pytest.mark.parametrize(
    ("headers", "outcome", "tokens", "says"),
    [
        ({"x_sim_fault": "429"}, Outcome.UPSTREAM_ERROR, None, "rate_limit_exceeded"),
        ({"x_sim_refusal": "error"}, Outcome.REFUSED, None, ""),
        ({"x_sim_block_after": "3"}, Outcome.REFUSED, 3, ""),
        ({"x_sim_fault": "error", "x_sim_fault_after": "3"}, Outcome.UPSTREAM_ERROR, 3, "server_error"),
    ],
)
async def test_what_goes_wrong_is_an_outcome_and_the_session_goes_on(
    headers: dict[str, str], outcome: Outcome, tokens: int | None, says: str
) -> None:
    async with engine() as e, target_of(e, **headers) as target:
        for _ in range(2):
            x = await ask(target)
            assert (x.outcome, x.tokens.output) == (outcome, tokens)
            assert says in (x.error or "")
        assert len(e.server._sessions) == 1


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [("reset", Outcome.UPSTREAM_RESET), ("truncate", Outcome.TRUNCATED)],
)
async def test_a_session_that_breaks_off_is_not_used_again(fault: str, outcome: Outcome) -> None:
    async with engine() as e, target_of(e, x_sim_fault=fault, x_sim_fault_after="3") as target:
        for _ in range(2):
            x = await ask(target)
            assert x.outcome is outcome
            assert (x.tokens.output, x.tokens.source) == (3, TokenSource.CHUNKS)
            assert "in the middle of its answer" in (x.error or "")
        assert [truth["outcome"] for truth in await e.ended(2)] == [fault] * 2


async def test_no_server_and_no_websocket_are_told() -> None:
    port = port_free()
    target = WebSocketTarget(f"ws://127.0.0.1:{port}")
    x = await ask(target)
    assert (x.outcome, x.status, x.timeline.submit_ns) == (Outcome.UPSTREAM_ERROR, None, None)
    assert "cannot connect" in (x.error or "")
    assert await target.open(1) == 0
    await target.close()
    async with engine() as e:
        target = WebSocketTarget(e.url.replace("http", "ws") + "/v1/models")
        x = await ask(target)
        await target.close()
    assert (x.outcome, x.status) == (Outcome.UPSTREAM_ERROR, 200)
    assert x.error == "the server refused to open a WebSocket: status 200"


@asynccontextmanager
async def served(path: str, handler: Handler) -> AsyncIterator[str]:
    """Yield the URL of a server."""
    app = web.Application()
    app.add_routes([web.get(path, handler)])
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    sock = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, sock).start()
    try:
        yield f"ws://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        await runner.cleanup()


class ResponsesServer:
    """Plays a recorded answer, event by event, to each message of a session."""

    def __init__(self, name: str) -> None:
        lines = (CORPUS / f"{name}.sse").read_text().splitlines()
        self.events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        self.expected = json.loads((CORPUS / f"{name}.json").read_text())["expect"]
        self.sessions: list[Mapping[str, str]] = []
        self.messages: list[dict[str, Any]] = []
        self.received_ns: list[int] = []
        self.sent_ns: list[list[int]] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.sessions.append(request.headers)
        assert not request.query
        session = web.WebSocketResponse(autoping=False)
        await session.prepare(request)
        async for message in session:
            self.received_ns.append(mono_ns())
            self.messages.append(json.loads(message.data))
            await session.ping(b"alive?")
            pong = await session.receive()
            assert (pong.type, pong.data) == (WSMsgType.PONG, b"alive?")
            self.sent_ns.append([])
            for event in self.events:
                self.sent_ns[-1].append(mono_ns())
                await session.send_str(event)
        return session


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("responses_basic", Outcome.COMPLETE),
        ("responses_incomplete_filter", Outcome.REFUSED),
        ("responses_error_nested", Outcome.UPSTREAM_ERROR),
    ],
)
async def test_each_response_of_a_session_is_an_exchange(name: str, outcome: Outcome) -> None:
    server = ResponsesServer(name)
    prompt = Prompt(text="more", system="Be brief.", history=(("user", "hi"), ("assistant", "hello")))
    async with served("/v1/responses", server.handle) as url:
        headers = [(b"authorization", b"Bearer k")]
        target = WebSocketTarget(f"{url}/v1/responses", bodies=NAMED, headers=headers)
        found = [await ask(target, prompt, 7, due=5) for _ in range(2)]
        await target.close()
    assert [s["authorization"] for s in server.sessions] == ["Bearer k"]
    assert (target.connects, target.reuses) == (1, 1)
    for message in server.messages:
        assert message == {
            "type": "response.create",
            "model": "m",
            "instructions": "Be brief.",
            "max_output_tokens": 7,
            "input": [
                {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}
                for role, kind, text in (
                    ("user", "input_text", "hi"),
                    ("assistant", "output_text", "hello"),
                    ("user", "input_text", "more"),
                )
            ],
        }
    expected = server.expected
    for x, got_ns, sent_ns in zip(found, server.received_ns, server.sent_ns, strict=True):
        assert (x.outcome, x.dialect, x.endpoint) == (outcome, "openai.responses", "responses")
        assert (x.status, x.model, x.stream, x.unparsed_events) == (101, "m", True, 0)
        assert x.finish_reason == expected["finish_reason"]
        assert (x.tokens.output or 0) == expected["output_tokens"]
        t = x.timeline
        assert (len(t.events), t.head_ns, x.scheduled_ns) == (len(server.events), None, 5)
        assert t.submit_ns <= got_ns < sent_ns[-1] <= t.response_end_ns + x.uncertainty_ns
        stamps = [at for at, flags in zip(t.events.t_ns, t.events.flags, strict=True) if flags & OUTPUT]
        texts = [i for i, event in enumerate(server.events) if '"response.output_text.delta"' in event]
        assert len(stamps) == len(texts)
        assert all(at >= sent_ns[i] - x.uncertainty_ns for at, i in zip(stamps, texts, strict=True))
        assert (t.first_content_ns, t.last_token_ns) == ((stamps[0], stamps[-1]) if stamps else (None, None))


async def test_a_server_that_accepts_another_key_is_none() -> None:
    async def impostor(request: web.Request) -> web.StreamResponse:
        lines = (b"HTTP/1.1 101 Yes", b"Upgrade: websocket", b"Connection: upgrade")
        request.transport.write(b"\r\n".join((*lines, b"Sec-WebSocket-Accept: mine", b"", b"")))
        await asyncio.sleep(5)
        return web.Response()

    async with served("/v1/realtime", impostor) as url:
        target = WebSocketTarget(url)
        x = await ask(target)
        await target.close()
    assert x.error == "the server's Sec-WebSocket-Accept does not match the key sent to it"


async def test_an_answer_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_BYTES_MAX", 100_000)
    sessions = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sessions
        sessions += 1
        session = web.WebSocketResponse()
        await session.prepare(request)
        await session.receive()
        event = json.dumps({"type": "response.output_text.delta", "delta": "x" * 1_000})
        while True:
            await session.send_str(event)

    async with served("/v1/responses", endless) as url:
        target = WebSocketTarget(f"{url}/v1/responses")
        for _ in range(2):
            x = await ask(target)
            assert x.outcome is Outcome.UPSTREAM_ERROR
            assert "longer than" in (x.error or "")
            assert 100_000 < x.response_bytes < 100_000 + READ_BYTES_MAX + 1
        await target.close()
    assert sessions == 2, "what is left of the answer would be that of the next request"


@pytest.mark.parametrize("frame", ["message", "fragments"])
async def test_a_message_that_never_ends_is_given_up(frame: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_BYTES_MAX", 1 << 20)

    async def endless(request: web.Request) -> web.StreamResponse:
        session = web.WebSocketResponse()
        await session.prepare(request)
        await session.receive()
        assert request.transport is not None
        if frame == "message":  # RFC 6455 5.2: a text frame of 2^40 bytes
            request.transport.write(b"\x81\x7f" + (1 << 40).to_bytes(8, "big"))
        while True:
            # A frame of 1,000 bytes that is not the last one of its message.
            request.transport.write((b"" if frame == "message" else b"\x01\x7e\x03\xe8") + b"x" * 1_000)
            await asyncio.sleep(0)

    async with served("/v1/responses", endless) as url:
        target = WebSocketTarget(f"{url}/v1/responses")
        x = await ask(target)
        await target.close()
    assert x.outcome is Outcome.UPSTREAM_ERROR
    assert x.response_bytes <= (1 << 20) + READ_BYTES_MAX
