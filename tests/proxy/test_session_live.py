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


async def serve(request: web.Request) -> web.StreamResponse:
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    n = 0
    async for message in socket:
        asked = json.loads(message.data)
        tokens, n = TOKENS[n], n + 1
        response = {"id": f"resp_{n}", "object": "response", "model": "gpt-6"}
        lane = {"stream_id": asked["stream_id"]}
        await socket.send_json({"type": "response.created", "response": response, **lane})
        await asyncio.sleep(PAUSE_S)
        for text in "abc":
            await socket.send_json({"type": "response.output_text.delta", "delta": text, **lane})
        usage = {"input_tokens": 5, "output_tokens": tokens}
        done = {**response, "status": "completed", "usage": usage}
        await socket.send_json({"type": "response.completed", "response": done, **lane})
    return socket


@asynccontextmanager
async def upstream() -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/v1/responses", serve)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
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


async def through_a_tap() -> tuple[list[int], list[dict[str, Any]]]:
    async with upstream() as url, live_proxy(url) as proxy:
        took_ns = await talk(proxy.listen)
        await proxy.measured(len(TOKENS))
        told = await proxy.told("/api/v1/exchanges?events=1")
    return took_ns, sorted(told["exchanges"], key=lambda x: x["id"])


def test_each_response_has_its_own_figures() -> None:
    took_ns, exchanges = play(through_a_tap(), limit_s=120)
    assert [(x["tokens"]["output"], x["retries"], x["outcome"], x["dialect"]) for x in exchanges] == [
        (tokens, 0, "complete", "openai.responses") for tokens in TOKENS
    ]
    assert [x["id"].rpartition(".")[2] for x in exchanges] == ["1", "2"]
    for x, client_ns in zip(exchanges, took_ns, strict=True):
        # The tap's span lies within the client's, and the server waited before its first text.
        assert PAUSE_S * 1e9 <= x["metrics"]["ttft"] * 1e9 <= client_ns
