"""Streams of a server with a known plan through a real `llmtap proxy`: only those that stall are found."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Final

from tests.proxy.capturing import chat_body
from tests.support.servers.live_proxy import LiveProxy, live_proxy
from tests.support.servers.peer import chunk
from tests.support.servers.raw_client import RawClient, request
from tests.support.servers.upstream import Call, Upstream, upstream
from tests.support.waiting import wait_until

STREAMS: Final = 40
HEAD: Final = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
GAP_S: Final = 0.05
THRESHOLD: Final = "1s"
"""Far above GAP_S, also on a busy machine."""
STALLED: Final = {"m-7": "next_token", "m-23": "next_token", "m-31": "first_token"}
UNREAD: Final = "m-11"
"""A stream of events that no dialect reads."""


class Plan:
    """Sends a token every GAP_S; the streams of STALLED only keep-alives, until `resumed` is set."""

    def __init__(self) -> None:
        self.resumed = asyncio.Event()
        self.ended = asyncio.Event()

    async def script(self, call: Call) -> str | None:
        model = json.loads(await call.body())["model"]
        await call.say(HEAD)
        n = 0
        while not self.ended.is_set():
            stalls = model in STALLED and not self.resumed.is_set()
            if stalls and (n or STALLED[model] == "first_token"):
                await call.say(chunk(b": keep-alive\n\n"))
            elif model == UNREAD:
                await call.say(chunk(b'data: {"kind": "progress", "percent": %d}\n\n' % n))
            else:
                await call.say(chunk(b'data: {"choices":[{"index":0,"delta":{"content":"w%d "}}]}\n\n' % n))
            n += 1
            await asyncio.sleep(GAP_S)
        stop = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
        await call.say(chunk(stop), chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n")
        return None


def models() -> Iterator[str]:
    """Each stream names a model of its own, by which it is known on both sides."""
    return (f"m-{i}" for i in range(STREAMS))


async def ask(port: int, model: str) -> int:
    client = await RawClient.connect(port)
    try:
        answer = await client.ask(request("POST", "/v1/chat/completions", body=chat_body(model=model)))
        return answer.status if answer.whole else 0
    finally:
        client.close()


async def silent(proxy: LiveProxy) -> tuple[dict[str, str], Any]:
    answer = await proxy.told("/api/v1/silences")
    assert isinstance(answer, dict)
    return {one["model"]: one["kind"] for one in answer["streams"]}, answer


async def run(server: Upstream, plan: Plan) -> None:
    async with live_proxy(server.url, f"meter.silence_threshold={THRESHOLD}") as proxy:
        clients = [asyncio.create_task(ask(proxy.listen, model)) for model in models()]

        latest: list[Any] = [None]

        async def found(stalled: dict[str, str]) -> Any:
            by_model, answer = await silent(proxy)
            latest[0] = answer
            # Of the stream that is not understood, the first events wait until the dialect is certain.
            judged = (answer["running"], answer["not_judged"]) == (STREAMS, 1)
            return answer if judged and by_model == stalled else None

        answer = await wait_until(lambda: found(STALLED), hint=lambda: latest)
        assert all(one["since_read"] < one["silent"] for one in answer["streams"]), "keep-alives arrive"
        assert {one["upstream"] for one in answer["streams"]} == {server.url}
        plan.resumed.set()
        await wait_until(lambda: found({}), hint=lambda: latest)
        plan.ended.set()
        assert await asyncio.gather(*clients) == [200] * STREAMS
        await proxy.measured(STREAMS)


async def test_stalls_behind_keep_alives_are_found_while_they_last_and_no_other_stream() -> None:
    plan = Plan()
    async with upstream() as server:
        server.at("/v1/chat/completions", plan.script)
        await run(server, plan)
