"""A gateway of our own between two relays, with an engine and clients, all of which note times.

Each request has a number, which the engine's texts contain and which is the tenant of its exchanges. The
gateway waits before it forwards a request, collects tokens into larger events, sends them later, tries some
requests again, and changes or cuts some texts (`Plan`). `Passage` has what engine, gateway and client noted.
"""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Final

from tests.support.servers.peer import Gone, chunk
from tests.support.servers.raw_client import RawClient, request
from tests.support.servers.upstream import RESET, Call, Script, Upstream

CHAT: Final = "/v1/chat/completions"
TENANT: Final = "x-llm-d-inference-fairness-id"
TOKENS: Final = 24
LOST_TOKENS: Final = 3
"""Tokens of an attempt that fails."""
_HEAD: Final = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_USAGE: Final = {"prompt_tokens": 9, "completion_tokens": TOKENS, "total_tokens": 9 + TOKENS}


@dataclass(frozen=True, slots=True)
class Plan:
    """What engine and gateway do with the request of a number."""

    number: int

    @property
    def group(self) -> int:
        """Tokens of an event of the gateway."""
        return (1, 4, 8)[self.number % 3]

    @property
    def fails(self) -> bool:
        return self.number % 100 == 3

    @property
    def changes(self) -> bool:
        return self.number % 50 == 7

    @property
    def tokens(self) -> int:
        """Tokens that are delivered."""
        return 16 if self.number % 50 == 9 else TOKENS

    def text(self, i: int) -> str:
        return f"{self.number:05}-{i:02} word "

    def delivered(self, i: int) -> str:
        return "[changed] pass" if self.changes and i == 12 else self.text(i)


@dataclass(slots=True)
class Passage:
    """Times of one request, monotonic ns; lists have one for each token that was delivered."""

    asked_ns: int = 0
    read_ns: int = 0
    """The gateway had the whole request."""
    sent_ns: list[int] = field(default_factory=list)
    """Begin of each attempt."""
    arrived_ns: list[int] = field(default_factory=list)
    """The engine had each attempt."""
    generated_ns: list[int] = field(default_factory=list)
    had_ns: list[int] = field(default_factory=list)
    wrote_ns: list[int] = field(default_factory=list)
    got_ns: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Gateway:
    """Scripts of the gateway and of the engine, and the clients' requests."""

    port: int = 0
    """Where the gateway finds its engine."""
    wait_s: float = 0.02
    delay_s: float = 0.005
    gap_s: float = 0.04
    keeps_ids: bool = True
    passages: dict[int, Passage] = field(default_factory=dict)

    def serve(self, engine: Upstream, gateway: Upstream) -> None:
        engine.at(CHAT, self._engine())
        gateway.at(CHAT, self._gateway())

    def _engine(self) -> Script:
        async def script(call: Call) -> str | None:
            await call.body()
            plan, passage = self._of(call)
            passage.arrived_ns.append(time.monotonic_ns())
            fails = plan.fails and len(passage.arrived_ns) == 1
            await call.say(_HEAD)
            for i in range(LOST_TOKENS if fails else TOKENS):
                await asyncio.sleep(self.gap_s)
                if not fails:
                    passage.generated_ns.append(time.monotonic_ns())
                await call.say(chunk(_event("lost " if fails else plan.text(i))))
            if fails:
                await call.peer.taken()
                return RESET
            await call.say(chunk(_event("", usage=_USAGE)), chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
            return None

        return script

    def _gateway(self) -> Script:
        async def script(call: Call) -> str | None:
            body = await call.body()
            plan, passage = self._of(call)
            passage.read_ns = time.monotonic_ns()
            await asyncio.sleep(self.wait_s)
            fields = [f"{TENANT}: {plan.number}"]
            request_id = call.head.get("x-request-id")
            if self.keeps_ids and request_id is not None:
                fields.append(f"X-Request-Id: {request_id.decode()}")
            while True:
                client = await RawClient.connect(self.port)
                passage.sent_ns.append(time.monotonic_ns())
                await client.send(request("POST", CHAT, *fields, body=body))
                try:
                    await client.head()
                    if plan.fails and len(passage.sent_ns) == 1:
                        while await client.chunk():
                            pass
                    break
                except (Gone, ConnectionError):
                    client.close()
            await call.say(_HEAD)
            await self._deliver(call, client, plan, passage)
            client.close()
            return None

        return script

    async def _deliver(self, call: Call, client: RawClient, plan: Plan, passage: Passage) -> None:
        waiting: list[str] = []
        tokens = 0
        while data := await client.chunk():
            if b'"usage"' in data:
                await call.say(chunk(data), chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
                continue
            n = data.count(b'"content"')
            for i in range(tokens, min(tokens + n, plan.tokens)):
                passage.had_ns.append(time.monotonic_ns())
                waiting.append(plan.delivered(i))
            tokens += n
            if waiting and (len(waiting) >= plan.group or tokens >= plan.tokens):
                await asyncio.sleep(self.delay_s)
                passage.wrote_ns += [time.monotonic_ns()] * len(waiting)
                await call.say(chunk(_event("".join(waiting))))
                waiting.clear()

    async def ask(self, port: int, number: int, prompt: str) -> None:
        """Send a request through the front, and read its answer."""
        plan, passage = Plan(number), self.passages.setdefault(number, Passage())
        client = await RawClient.connect(port)
        body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": prompt}]}
        fields = [f"{TENANT}: {number}", f"X-Request-Id: request-{number}"]
        passage.asked_ns = time.monotonic_ns()
        await client.send(request("POST", CHAT, *fields, body=json.dumps(body).encode()))
        await client.head()
        text = ""
        while data := await client.chunk():
            text += "".join(_texts(data))
            chars = 0
            for i in range(plan.tokens):
                chars += len(plan.delivered(i))
                if chars <= len(text) and i >= len(passage.got_ns):
                    passage.got_ns.append(time.monotonic_ns())
        client.close()
        assert text == "".join(map(plan.delivered, range(plan.tokens)))

    def _of(self, call: Call) -> tuple[Plan, Passage]:
        number = int(call.head.get(TENANT) or b"")
        return Plan(number), self.passages.setdefault(number, Passage())


def _event(content: str, **more: object) -> bytes:
    delta = {"content": content} if content else {}
    choice = {"index": 0, "delta": delta, "finish_reason": None if content else "stop"}
    return b"data: %b\n\n" % json.dumps({"model": "m", "choices": [choice], **more}).encode()


def _texts(data: bytes) -> list[str]:
    events = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: {")]
    return [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events]
