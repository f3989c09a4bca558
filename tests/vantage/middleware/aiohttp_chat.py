"""A small chat gateway on aiohttp, with the tap in it."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from llmtap.middleware.aiohttp import setup
from tests.vantage.middleware.chat_words import REFUSED, streamed, whole

__all__ = ["aiohttp_chat"]


async def _chat(request: web.Request) -> web.StreamResponse:
    asked = await request.json()
    model, how = asked["model"], asked.get("how", "")
    if how == "raise":
        raise RuntimeError("planted")
    if how == "refuse":
        return web.json_response(REFUSED, status=429)
    if not asked.get("stream"):
        return web.json_response(await whole(model))
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    async for event in streamed(model, how):
        await response.write(event)
    return response


@asynccontextmanager
async def aiohttp_chat(path: str) -> AsyncIterator[int]:
    """It runs, on this loop; gives its port. `path`: where the meter listens."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", _chat)
    setup(app, socket=path)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
    await runner.setup()
    sock = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, sock).start()
    try:
        yield sock.getsockname()[1]
    finally:
        await runner.cleanup()
