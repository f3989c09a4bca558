"""A client of a WebSocket session that is not ours: aiohttp's."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from tests.support.servers.sim_engine import Engine

REALTIME, RESPONSES = "/v1/realtime", "/v1/responses"
DELTA = "response.output_text.delta"


class SessionClient:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket

    async def say(self, kind: str, **fields: Any) -> None:
        await self.socket.send_json({"type": kind, **fields})

    async def receive(self) -> dict[str, Any]:
        event: dict[str, Any] = await self.socket.receive_json(timeout=100)
        return event

    async def hear_until(self, *kinds: str) -> list[dict[str, Any]]:
        """Events up to the first of these kinds."""
        events = [await self.receive()]
        while events[-1]["type"] not in kinds:
            events.append(await self.receive())
        return events


@asynccontextmanager
async def session(e: Engine, path: str, **headers: str) -> AsyncIterator[SessionClient]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with e.session.ws_connect(f"{e.url}{path}?model=m", headers=named) as socket:
        client = SessionClient(socket)
        if path == REALTIME:
            assert (await client.receive())["type"] == "session.created"
        yield client


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event["delta"] for event in events if event["type"] == DELTA)


def upgrade(path: str) -> bytes:
    return (
        b"GET %b?model=m HTTP/1.1\r\nHost: sim\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MTIzNDU2Nzg5MDEyMzQ1Ng==\r\n\r\n" % path.encode()
    )
