"""The simulated engine on a real socket, and what a stream of it says to llmtap's own reader."""

import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from llmtap.clock import Clock
from llmtap.exchange.saved import Explained, explain, read_saved
from llmtap.sim.server.options import EngineOptions, SimOptions
from llmtap.sim.server.server import SimServer
from llmtap.units import Duration
from tests.support.waiting import wait_until

QUICK = SimOptions(ttft=Duration(0), itl=Duration(0), tokens=5)
CHAT = "/v1/chat/completions"
_HI = {"messages": [{"role": "user", "content": "hi"}]}
PATHS: dict[str, dict[str, Any]] = {
    CHAT: _HI,
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {**_HI, "max_tokens": 99},
    "/api/chat": _HI,
    "/api/generate": {"prompt": "hi"},
}
"""A request for each endpoint."""


class Engine:
    """A server that runs, and a client of it."""

    def __init__(self, server: SimServer, url: str, session: aiohttp.ClientSession) -> None:
        self.server = server
        self.url = url
        self.session = session

    def post(self, path: str, body: Any, **headers: str) -> Any:
        """An open request; keywords are headers, with dashes for underscores."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.session.post(self.url + path, json=body, headers=named)

    async def answer(self, path: str, body: Any, **headers: str) -> tuple[int, bytes]:
        """Status and body."""
        async with self.post(path, body, **headers) as response:
            return response.status, await response.read()

    async def truths(self, since: int = 0) -> list[dict[str, Any]]:
        async with self.session.get(f"{self.url}/sim/truth?since={since}") as response:
            found: list[dict[str, Any]] = (await response.json())["truths"]
            return found

    async def ended(self, count: int = 1) -> list[dict[str, Any]]:
        """The truths, once so many requests have ended."""

        async def enough() -> bool:
            return len(await self.truths()) >= count

        await wait_until(enough)
        return await self.truths()

    async def metrics(self) -> dict[str, float]:
        """Values of `/metrics`, labels and all."""
        async with self.session.get(f"{self.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    async def gauge(self, name: str) -> float:
        return (await self.metrics())[f'vllm:{name}{{engine="0",model_name="sim"}}']

    async def until(self, name: str) -> None:
        """Until some request runs, or waits."""
        await wait_until(lambda: self.gauge(f"num_requests_{name}"))


@asynccontextmanager
async def engine(
    options: SimOptions = QUICK,
    clock: Clock | None = None,
    behind: EngineOptions | None = None,
) -> AsyncIterator[Engine]:
    """A server; `behind` it an engine, or a fixed schedule."""
    server = SimServer(options, clock, engine=behind)
    sock = socket.create_server(("127.0.0.1", 0))
    runner = web.AppRunner(server.app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.SockSite(runner, sock).start()
    try:
        async with aiohttp.ClientSession() as session:
            yield Engine(server, f"http://127.0.0.1:{sock.getsockname()[1]}", session)
    finally:
        await runner.cleanup()


def ask_chat(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], **more}


def json_events(body: bytes) -> list[dict[str, Any]]:
    """The JSON in the events of a stream, without end marker and comments."""
    data = [line.removeprefix(b"data: ") for line in body.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(text) for text in data if text != b"[DONE]"]


def explained(body: bytes, path: str) -> Explained:
    """A body as llmtap reads it."""
    return explain(read_saved(body, path=path))
