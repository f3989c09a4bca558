"""Responses over WebSocket through a real `llmtap proxy`: the tap's figures lie within the client's."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic_ns
from typing import Any

from aiohttp import ClientSession, web

from tests.support.servers.live_proxy import live_proxy
from tests.support.servers.peer import play

TOKENS = (7, 4)
PAUSE_S = 0.05
"""Before the first text of a response; the client thinks as long between two."""


WAITED_NS = web.AppKey("waited_ns", list[int])
"""From the server's read of each request to its first text, by the server's clock."""


async def serve(request: web.Request) -> web.StreamResponse:
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    n = 0
    async for message in socket:
        began_ns = monotonic_ns()
        asked = json.loads(message.data)
        tokens, n = TOKENS[n], n + 1
        response = {"id": f"resp_{n}", "object": "response", "model": "gpt-6"}
        lane = {"stream_id": asked["stream_id"]}
        await socket.send_json({"type": "response.created", "response": response, **lane})
        await asyncio.sleep(PAUSE_S)
        request.app[WAITED_NS].append(monotonic_ns() - began_ns)
        for text in "abc":
            await socket.send_json({"type": "response.output_text.delta", "delta": text, **lane})
        usage = {"input_tokens": 5, "output_tokens": tokens}
        done = {**response, "status": "completed", "usage": usage}
        await socket.send_json({"type": "response.completed", "response": done, **lane})
    return socket


@asynccontextmanager
async def upstream() -> AsyncIterator[tuple[str, list[int]]]:
    app = web.Application()
    app[WAITED_NS] = waited_ns = []
    app.router.add_get("/v1/responses", serve)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", waited_ns
    finally:
        await runner.cleanup()


async def talk(port: int) -> list[int]:
    """The time to the first text of each response, ns, by the client."""
    took_ns = []
    async with (
        ClientSession() as client,
        client.ws_connect(f"http://127.0.0.1:{port}/v1/responses") as socket,
    ):
        for i in range(len(TOKENS)):
            began_ns = monotonic_ns()
            await socket.send_json(
                {"type": "response.create", "model": "gpt-6", "input": "x", "stream_id": f"s{i}"}
            )
            async for message in socket:
                said = json.loads(message.data)
                if said["type"] == "response.output_text.delta" and len(took_ns) == i:
                    took_ns.append(monotonic_ns() - began_ns)
                if said["type"] == "response.completed":
                    break
            await asyncio.sleep(PAUSE_S)
    return took_ns


async def through_a_tap() -> tuple[list[int], list[int], list[dict[str, Any]]]:
    # The server and the client read the monotonic clock, so the tap does, too.
    async with upstream() as (url, waited_ns), live_proxy(url, "relay.clock=mono") as proxy:
        took_ns = await talk(proxy.listen)
        await proxy.measured(len(TOKENS))
        told = await proxy.told("/api/v1/exchanges?events=1")
    return waited_ns, took_ns, sorted(told["exchanges"], key=lambda x: x["id"])


def test_each_response_has_its_own_figures() -> None:
    waited_ns, took_ns, exchanges = play(through_a_tap(), limit_s=120)
    assert [(x["tokens"]["output"], x["retries"], x["outcome"], x["dialect"]) for x in exchanges] == [
        (tokens, 0, "complete", "openai.responses") for tokens in TOKENS
    ]
    assert [x["id"].rpartition(".")[2] for x in exchanges] == ["1", "2"]
    for x, server_ns, client_ns in zip(exchanges, waited_ns, took_ns, strict=True):
        # The tap's span lies within the client's and contains the server's.
        ttft_ns = x["metrics"]["ttft"] * 1e9
        assert server_ns - x["uncertainty"] * 1e9 <= ttft_ns <= client_ns + x["uncertainty"] * 1e9
