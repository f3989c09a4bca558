"""An OpenAI-compatible server whose every send is due at a known moment.

The first lines of the simulated engine: no scheduler and no latency model yet, only a schedule. Token i of
an answer is due at `request + ttft + i * itl`, counted from the request and not from the token before, so
lateness does not add up. Headers `x-sim-ttft-ms`, `x-sim-itl-ms` and `x-sim-tokens` override the options
for one request. What was really sent when is kept per request id, for whoever wants to hold a
measurement against it.
"""

import asyncio
import logging
import random
from collections import OrderedDict
from typing import Any, Final

import msgspec
from aiohttp import web

from llmtap.clock import Clock, SystemClock
from llmtap.sim.options import SimOptions
from llmtap.units import Duration

__all__ = ["SimServer"]

WORDS: Final = ("The", "tap", "saw", "each", "token", "pass", "and", "wrote", "down", "its", "time")
TRUTHS_MAX: Final = 10_000
"""Answers whose send times are remembered."""

log = logging.getLogger(__name__)


class _Request(msgspec.Struct):
    """What matters of a request's body."""

    model: str = "sim"
    stream: bool = False
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream_options: dict[str, Any] | None = None
    messages: list[Any] | None = None
    prompt: Any = None


class SimServer:
    """The server; `app` is for aiohttp to run."""

    def __init__(self, options: SimOptions, clock: Clock | None = None) -> None:
        self._options = options
        self._clock = clock or SystemClock()
        self._random = random.Random(options.seed)
        self._count = 0
        self.sent: OrderedDict[str, list[int]] = OrderedDict()
        """By request id: the monotonic ns just before each token was written."""
        self.app = web.Application(client_max_size=64 << 20)
        self.app.add_routes([
            web.post("/v1/chat/completions", self._chat),
            web.post("/v1/completions", self._completions),
            web.get("/v1/models", self._models),
            web.get("/health", self._health),
        ])  # fmt: skip

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"object": "list", "data": [{"id": "sim", "object": "model", "owned_by": "llmtap"}]}
        )

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=True)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=False)

    async def _answer(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        body = await request.read()
        began_ns = self._clock.mono_ns()
        try:
            asked = msgspec.json.decode(body, type=_Request)
        except msgspec.MsgspecError as exc:
            error = {"message": f"the request body does not fit: {exc}", "type": "invalid_request_error"}
            return web.json_response({"error": {**error, "param": None, "code": None}}, status=400)
        plan = self._plan(request, asked)
        self._count += 1
        answer = _Answer(self._count, asked, chat, plan[2])
        stamps = self._remember(request.headers.get("x-request-id", answer.id))
        if not asked.stream:
            await self._until(began_ns + plan[0] + plan[1] * (plan[2] - 1))
            stamps.append(self._clock.mono_ns())
            return web.json_response(answer.whole())
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        for i in range(plan[2]):
            await self._until(began_ns + plan[0] + i * plan[1])
            event = answer.event(i)
            stamps.append(self._clock.mono_ns())
            await response.write(event)
        await response.write(answer.ending())
        await response.write_eof()
        return response

    def _plan(self, request: web.Request, asked: _Request) -> tuple[int, int, int]:
        """(ttft ns, itl ns, tokens) of this answer."""
        options, headers = self._options, request.headers

        def duration(name: str, default: Duration) -> int:
            share = 1 + self._random.uniform(-options.spread, options.spread)
            value = headers.get(name)
            return round(float(value) * 1e6) if value is not None else round(default * share)

        wanted = asked.max_completion_tokens or asked.max_tokens or options.tokens
        tokens = int(headers.get("x-sim-tokens", min(wanted, options.tokens)))
        return duration("x-sim-ttft-ms", options.ttft), duration("x-sim-itl-ms", options.itl), max(1, tokens)

    def _remember(self, request_id: str) -> list[int]:
        stamps: list[int] = []
        self.sent[request_id] = stamps
        if len(self.sent) > TRUTHS_MAX:
            self.sent.popitem(last=False)
        return stamps

    async def _until(self, due_ns: int) -> None:
        # Timers of the loop are a hint, whole milliseconds and sometimes early: look at the clock again.
        while (left_ns := due_ns - self._clock.mono_ns()) > 0:
            await asyncio.sleep(left_ns / 1e9)


class _Answer:
    """The bytes of one answer."""

    def __init__(self, number: int, asked: _Request, chat: bool, tokens: int) -> None:
        self._asked = asked
        self._chat = chat
        self._tokens = tokens
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-sim{number}"
        self._usage = {
            "prompt_tokens": 8,
            "completion_tokens": tokens,
            "total_tokens": tokens + 8,
        }

    def _word(self, i: int) -> str:
        return WORDS[i % len(WORDS)] + " "

    def _frame(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        frame: dict[str, Any] = {
            "id": self.id, "object": kind, "created": 1_700_000_000, "model": self._asked.model,
            "choices": choices,
        }  # fmt: skip
        if usage is not None:
            frame["usage"] = usage
        return b"data: " + msgspec.json.encode(frame) + b"\n\n"

    def event(self, i: int) -> bytes:
        """Token `i`; with the first one comes the role, with the last the reason to finish."""
        finish = "stop" if i == self._tokens - 1 else None
        if not self._chat:
            return self._frame(
                [{"index": 0, "text": self._word(i), "logprobs": None, "finish_reason": finish}]
            )
        delta = {"content": self._word(i)}
        if i == 0:
            delta = {"role": "assistant", **delta}
        return self._frame([{"index": 0, "delta": delta, "finish_reason": finish}])

    def ending(self) -> bytes:
        """Usage, if asked for, and the end marker."""
        wants = (self._asked.stream_options or {}).get("include_usage")
        return (self._frame([], self._usage) if wants else b"") + b"data: [DONE]\n\n"

    def whole(self) -> dict[str, Any]:
        """The answer that is not streamed."""
        text = "".join(self._word(i) for i in range(self._tokens))
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        kind = "chat.completion" if self._chat else "text_completion"
        return {
            "id": self.id, "object": kind, "created": 1_700_000_000, "model": self._asked.model,
            "choices": [choice], "usage": self._usage,
        }  # fmt: skip
