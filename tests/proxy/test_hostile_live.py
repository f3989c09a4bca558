"""Answers made to hurt whoever reads them, through a real proxy: the client gets every byte, and the meter
goes on measuring."""

import asyncio
import gzip
import hashlib
from typing import Any

from tests.support.servers.live_proxy import LiveProxy, live_proxy
from tests.support.servers.peer import play
from tests.support.servers.raw_client import RawClient
from tests.support.servers.upstream import answers, upstream

MIB = 1 << 20
STREAM = b"Content-Type: text/event-stream\r\n"
OPENING = b'data: {"choices":[{"index":0,"delta":{"content":"'
CLOSING = b'"}}]}\n\n'
DEEP = b"[" * 200_000

HOSTILE = {
    "an event of 100 MB": (OPENING + b"x" * (100 * MIB) + CLOSING, STREAM),
    "a bomb": (
        gzip.compress(OPENING + b"x" * (100 * MIB) + CLOSING, 9, mtime=0),
        STREAM + b"Content-Encoding: gzip\r\n",
    ),
    "broken gzip": (
        gzip.compress(OPENING + CLOSING, mtime=0)[:20] + b"\xff" * 50,
        STREAM + b"Content-Encoding: gzip\r\n",
    ),
    "a depth bomb": (b"data: " + DEEP + b"\n\n", STREAM),
    "a depth bomb of JSON": (b'{"choices":' + DEEP, b"Content-Type: application/json\r\n"),
    "no text": (OPENING + bytes(range(256)) * 100 + CLOSING, STREAM),
    "a hundred thousand events": (b": \n\n" * 100_000, STREAM),
}


async def scenario() -> None:
    async with upstream() as up, live_proxy(up.url, "relay.skip=[]") as proxy:
        for opened, (body, fields) in enumerate(HOSTILE.values(), 1):
            path = up.on(answers(body, fields=fields))
            client = await RawClient.connect(proxy.listen)
            answer = await client.get(path)
            client.close()
            assert hashlib.sha256(answer.data).digest() == hashlib.sha256(body).digest()
            # One after another: else what one of them leaves to do costs the next its measuring.
            summary = await settled(proxy, opened)
        told = await proxy.told("/api/v1/exchanges?limit=100")
        assert len(told["exchanges"]) == summary["n"] >= len(HOSTILE) - 1, "100 MB at once may be too much"
        assert all(x["timeline"]["first_byte"] is not None for x in told["exchanges"])
        assert summary["meter_errors"] == {}, "none of it is an exception"


async def settled(proxy: LiveProxy, opened: int) -> dict[str, Any]:
    """The summary, once so many exchanges are measured or counted as dropped."""
    while True:
        summary = await proxy.told("/api/v1/summary?window=all")
        relays = list(summary["relays"].values()) if isinstance(summary, dict) else []
        if len(relays) == 1 and relays[0].get("opened") == opened:
            (relay,) = relays
            if opened == relay["measured"] + sum(relay["dropped"].values()):
                return dict(summary)
        await asyncio.sleep(0.1)


def test_hostile_answers_reach_the_client_and_do_not_stop_the_meter() -> None:
    play(scenario(), limit_s=250)
