"""A day of traffic, pressed into minutes: who asks what when, and a client that asks it.

The plan is seeded: arrivals are llmtap's own diurnal process, one wave over the run. Tenants come and go by
the hour of that day, more of them than the proxy tells apart. Some clients leave midway, some ask for an
answer in one piece. How long answers are and how fast they come is asked of the server by header fields.
"""

from __future__ import annotations

import asyncio
import json
import re
from array import array
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from typing import cast

from llmtap.workload.arrivals import parse_arrivals

HOURS = 24
AMPLITUDE = 0.8
TENANTS_AT_ONCE, TENANTS_NEW_AN_HOUR = 8, 3
PLAIN_SHARE, CANCELLED_SHARE, LARGE_SHARE = 0.1, 0.03, 0.2
TOKENS_MAX = 256
PROMPT_WORDS_MAX = 300
ITL_MS = 10
ATTEMPTS = 3
"""A kept-alive connection may have been closed meanwhile, as by a relay that drains."""
ANSWER_S_MAX = 60.0
END = b"\r\n0\r\n\r\n"
DONE = b"data: [DONE]\n\n"
TAIL_BYTES = 64


@dataclass(frozen=True, slots=True)
class Request:
    """One of the plan."""

    number: int
    raw: bytes
    tokens: int
    stream: bool
    leave_after: int
    """Reads of the answer after which the client leaves; 0: it stays."""


class Day:
    """`rate_rps` requests a second through 24 hours, `compression` times as fast, for `minutes` of them."""

    def __init__(
        self,
        rate_rps: float,
        compression: float,
        minutes: float,
        tokens_mean: float,
        seed: int,
        name: str = "soak",
    ) -> None:
        self.hours = minutes * compression / 60
        self.seconds = minutes * 60
        self.requests = round(rate_rps * compression * self.seconds)
        text = f"diurnal:amplitude={AMPLITUDE},period={self.seconds:g}s"
        arrivals = parse_arrivals(text, rate_rps=rate_rps * compression, seed=seed)
        self.offsets_ns = array("q", islice(arrivals, self.requests))
        self.tokens = array("i", bytes(4 * self.requests))
        """Of each request's answer, asked for exactly."""
        self.rate_rps_max = rate_rps * compression * (1 + AMPLITUDE)
        self._name = name
        self._tokens_mean = tokens_mean
        self._dice = Random(f"{seed}/day")

    def request(self, number: int) -> Request:
        """The next one: to be called once for each number, in order."""
        dice = self._dice
        hour = int(self.offsets_ns[number] / 1e9 / self.seconds * HOURS)
        tenant = f"tenant-{hour * TENANTS_NEW_AN_HOUR + dice.randrange(TENANTS_AT_ONCE)}"
        stream = dice.random() >= PLAIN_SHARE
        tokens = min(TOKENS_MAX, 1 + int(dice.expovariate(1 / self._tokens_mean)))
        leaves = dice.random() < CANCELLED_SHARE and stream and tokens >= 8
        leave_after = dice.randrange(1, tokens // 2) if leaves else 0
        model = "sim-large" if dice.random() < LARGE_SHARE else "sim"
        ttft_ms = dice.randrange(20, 80)
        words = dice.randrange(PROMPT_WORDS_MAX)
        body: dict[str, object] = {
            "model": model,
            "stream": stream,
            "max_tokens": TOKENS_MAX,
            "messages": [{"role": "user", "content": f"Question {number}:" + " word" * words}],
        }
        if stream:
            body["stream_options"] = {"include_usage": True}
        data = json.dumps(body, separators=(",", ":")).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n"
            f"X-Request-Id: {self._name}-{number}\r\nx-llm-d-inference-fairness-id: {tenant}\r\n"
            f"x-sim-ttft-ms: {ttft_ms}\r\nx-sim-itl-ms: {ITL_MS}\r\nx-sim-tokens: {tokens}\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        self.tokens[number] = tokens
        return Request(number, head.encode() + data, tokens, stream, leave_after)


# ---------------------------------------------------------------- the client

_STATUS = re.compile(rb"HTTP/1\.1 (\d{3})")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class _Connection(asyncio.Protocol):
    """One connection, one question at a time. It understands of HTTP what our two servers say."""

    def __init__(self) -> None:
        self.served = 0
        self.open = True
        self.bytes = 0
        """Read for the present question."""
        self._answer: asyncio.Future[str] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its type

    def ask(self, request: Request) -> asyncio.Future[str]:
        """How it ends: complete, cancelled, a status that is not 200, cut, or nothing at all."""
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self._head: bytes | None = b""
        self._left, self._reads, self.bytes = -1, 0, 0
        self._tail = b""
        self._status = ""
        self._leave_after = request.leave_after
        if self.open:
            self._transport.write(request.raw)
        else:
            self._finish("nothing")
        return self._answer

    def close(self) -> None:
        self.open = False
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self.bytes += len(data)
        if self._head is not None:
            self._head += data
            at = self._head.find(b"\r\n\r\n")
            if at < 0:
                return
            head, data, self._head = self._head[: at + 2], self._head[at + 4 :], None
            status = _STATUS.match(head)
            self._status = "" if status is None else status[1].decode()
            length = _LENGTH.search(head)
            self._left = -1 if length is None else int(length[1])
        if self._left >= 0:
            self._left -= len(data)
            if self._left <= 0:
                self._finish("complete" if self._status == "200" else self._status)
            return
        self._reads += 1
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        if self._tail.endswith(END):
            whole = DONE in self._tail if self._status == "200" else True
            self._finish(("complete" if whole else "cut") if self._status == "200" else self._status)
        elif self._leave_after and self._reads > self._leave_after:
            self._finish("cancelled")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        self._finish("cut" if self.bytes else "nothing")

    def _finish(self, how: str) -> None:
        if self._answer is not None and not self._answer.done():
            self.served += 1
            self._answer.set_result(how)


@dataclass(slots=True)
class Client:
    """All clients of the day, on connections that are kept alive."""

    port: int
    day: Day
    outcomes: Counter[str] = field(default_factory=Counter)
    """Of requests: how they ended for their client."""
    whole: set[int] = field(default_factory=set)
    """Numbers of the streams that came whole."""
    retried: int = 0
    bytes: int = 0
    late_s_max: float = 0.0
    under_way: int = 0
    under_way_max: int = 0
    _idle: list[_Connection] = field(default_factory=list)

    async def run(self) -> None:
        """Sends everything at its time, and waits for the answers."""
        loop = asyncio.get_running_loop()
        begin = loop.time()
        async with asyncio.TaskGroup() as group:
            for number in range(self.day.requests):
                due = begin + self.day.offsets_ns[number] / 1e9
                if due > loop.time():
                    await asyncio.sleep(due - loop.time())
                self.late_s_max = max(self.late_s_max, loop.time() - due)
                group.create_task(self._one(self.day.request(number)))

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _one(self, request: Request) -> None:
        self.under_way += 1
        self.under_way_max = max(self.under_way_max, self.under_way)
        try:
            how = await self._answered(request)
        except (OSError, TimeoutError) as error:
            how = type(error).__name__
        finally:
            self.under_way -= 1
        self.outcomes[how] += 1
        if how == "complete" and request.stream:
            self.whole.add(request.number)

    async def _answered(self, request: Request) -> str:
        how = "nothing"
        for attempt in range(ATTEMPTS):
            self.retried += attempt > 0
            connection = self._kept() or await self._connect()
            kept = connection.served > 0
            try:
                how = await asyncio.wait_for(connection.ask(request), ANSWER_S_MAX)
            except TimeoutError:
                connection.close()
                raise
            self.bytes += connection.bytes
            if connection.open:
                self._idle.append(connection)
            if how != "nothing" or not kept:
                return how
        return how

    async def _connect(self) -> _Connection:
        _, connection = await asyncio.get_running_loop().create_connection(
            _Connection, "127.0.0.1", self.port
        )
        return connection

    def _kept(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        return None
