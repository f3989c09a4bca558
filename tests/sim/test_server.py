"""The simulated engine: an answer in the form of OpenAI's, and every token sent when it was due."""

import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from llmtap.clock import Clock, SystemClock
from llmtap.sim.options import SimOptions
from llmtap.sim.server import SimServer
from llmtap.units import Duration
from tests.support.peer import scene

MS = 1_000_000
QUICK = SimOptions(ttft=Duration(0), itl=Duration(0), tokens=5)


class RecordingClock(SystemClock):
    """The machine's clock; remembers its readings."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def mono_ns(self) -> int:  # type: ignore[override]
        self.read.append(SystemClock.mono_ns())
        return self.read[-1]


@asynccontextmanager
async def engine(
    options: SimOptions = QUICK, clock: Clock | None = None
) -> AsyncIterator[tuple[SimServer, str, aiohttp.ClientSession]]:
    server = SimServer(options, clock)
    sock = socket.create_server(("127.0.0.1", 0))
    runner = web.AppRunner(server.app, access_log=None)
    await runner.setup()
    await web.SockSite(runner, sock).start()
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    try:
        async with aiohttp.ClientSession() as session:
            yield server, url, session
    finally:
        await runner.cleanup()


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], **more}


async def events_of(response: aiohttp.ClientResponse) -> list[dict[str, Any]]:
    """The JSON events of a stream, whose last block is the end marker."""
    blocks = (await response.read()).split(b"\n\n")
    assert blocks[-2:] == [b"data: [DONE]", b""]
    assert all(b.startswith(b"data: ") for b in blocks[:-1])
    return [json.loads(b.removeprefix(b"data: ")) for b in blocks[:-2]]


@scene
async def test_a_streamed_chat() -> None:
    async with engine() as (_, url, session):
        async with session.post(f"{url}/v1/chat/completions", json=asked(stream=True)) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            events = await events_of(response)
        assert len(events) == 5
        assert {e["object"] for e in events} == {"chat.completion.chunk"}
        assert {e["model"] for e in events} == {"m"}
        assert len({e["id"] for e in events}) == 1
        deltas = [e["choices"][0]["delta"] for e in events]
        assert deltas[0]["role"] == "assistant"
        assert all(d["content"] for d in deltas)
        assert [e["choices"][0]["finish_reason"] for e in events] == [None] * 4 + ["stop"]
        assert all("usage" not in e for e in events), "usage comes when it is asked for"


@scene
async def test_usage_comes_last_when_it_is_asked_for() -> None:
    async with engine() as (_, url, session):
        body = asked(stream=True, stream_options={"include_usage": True}, max_tokens=3)
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            events = await events_of(response)
        assert len(events) == 4
        assert events[-1]["choices"] == []
        assert events[-1]["usage"]["completion_tokens"] == 3
        assert events[-1]["usage"]["total_tokens"] == events[-1]["usage"]["prompt_tokens"] + 3


@scene
async def test_streamed_and_whole_say_the_same() -> None:
    async with engine() as (_, url, session):
        for path, chat in (("chat/completions", True), ("completions", False)):
            body = asked() if chat else {"model": "m", "prompt": "hi"}
            async with session.post(f"{url}/v1/{path}", json=body) as response:
                whole = await response.json()
            async with session.post(f"{url}/v1/{path}", json={**body, "stream": True}) as response:
                events = await events_of(response)
            if chat:
                text = "".join(e["choices"][0]["delta"]["content"] for e in events)
                assert whole["choices"][0]["message"] == {"role": "assistant", "content": text}
            else:
                text = "".join(e["choices"][0]["text"] for e in events)
                assert whole["choices"][0]["text"] == text
            assert whole["usage"]["completion_tokens"] == len(events) == 5
            assert whole["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("body", "headers", "tokens"),
    [
        ({}, {}, 5),
        ({"max_tokens": 2}, {}, 2),
        ({"max_completion_tokens": 3}, {}, 3),
        ({"max_tokens": 50}, {}, 5),
        ({"max_tokens": 2}, {"x-sim-tokens": "9"}, 9),
    ],
)
@scene
async def test_how_many_tokens(body: dict[str, Any], headers: dict[str, str], tokens: int) -> None:
    async with engine() as (_, url, session):
        body = asked(stream=True, **body)
        async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
            assert len(await events_of(response)) == tokens


@scene
async def test_every_token_is_sent_when_it_is_due_and_never_before() -> None:
    """Due at request + ttft + i * itl, so that lateness does not add up; what was done is on record."""
    options = SimOptions(ttft=Duration(30 * MS), itl=Duration(5 * MS), tokens=20)
    clock = RecordingClock()
    async with engine(options, clock) as (server, url, session):
        headers = {"x-request-id": "mine"}
        async with session.post(
            f"{url}/v1/chat/completions", json=asked(stream=True), headers=headers
        ) as response:
            await response.read()
        sent = server.sent["mine"]
        began_ns = clock.read[0]  # when the request had come
        assert len(sent) == 20
        for i, stamp in enumerate(sent):
            assert stamp >= began_ns + (30 + 5 * i) * MS, f"token {i} came early"
        assert all(b > a for a, b in pairwise(sent))


@scene
async def test_a_request_may_ask_for_its_own_schedule() -> None:
    async with engine(SimOptions(ttft=Duration(60_000 * MS), itl=Duration(60_000 * MS), tokens=4)) as (
        server,
        url,
        session,
    ):
        headers = {"x-sim-ttft-ms": "1.5", "x-sim-itl-ms": "0", "x-sim-tokens": "3", "x-request-id": "r"}
        async with session.post(
            f"{url}/v1/chat/completions", json=asked(stream=True), headers=headers
        ) as response:
            assert len(await events_of(response)) == 3
        assert len(server.sent["r"]) == 3


@scene
async def test_a_seed_gives_the_same_spread_again() -> None:
    async def gaps(seed: int) -> list[tuple[int, int, int]]:
        server = SimServer(SimOptions(spread=0.5, seed=seed))
        plain = type("Request", (), {"headers": {}})()
        wants = type("Asked", (), {"max_completion_tokens": None, "max_tokens": None})()
        return [server._plan(plain, wants) for _ in range(20)]  # type: ignore[arg-type]

    first, again, other = await gaps(1), await gaps(1), await gaps(2)
    assert first == again != other
    assert all(75 * MS <= ttft <= 225 * MS and 10 * MS <= itl <= 30 * MS for ttft, itl, _ in first)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"stream": 5}', b'{"max_tokens": "many"}'])
@scene
async def test_a_body_that_does_not_fit_is_told_so(body: bytes) -> None:
    async with (
        engine() as (_, url, session),
        session.post(f"{url}/v1/chat/completions", data=body) as response,
    ):
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "invalid_request_error"


@scene
async def test_it_has_models_and_health() -> None:
    async with engine() as (_, url, session):
        async with session.get(f"{url}/v1/models") as response:
            assert [m["id"] for m in (await response.json())["data"]] == ["sim"]
        async with session.get(f"{url}/health") as response:
            assert response.status == 200


@scene
async def test_what_it_remembers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmtap.sim.server.TRUTHS_MAX", 3)
    async with engine() as (server, url, session):
        for i in range(6):
            headers = {"x-request-id": f"r{i}"}
            async with session.post(f"{url}/v1/chat/completions", json=asked(), headers=headers) as response:
                await response.read()
        assert list(server.sent) == ["r3", "r4", "r5"]
