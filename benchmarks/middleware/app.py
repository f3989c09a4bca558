"""The app that is measured: streams at a fixed pace, each event with the moment it was made.

    LLMTAP_BENCH_SOCKET=PATH python -m uvicorn --app-dir benchmarks/middleware app:app

Plain ASGI, so that the framework's own cost hides nothing. `?events=N&gap_us=N` say how long and how fast.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs

HEADERS = [(b"content-type", b"text/event-stream")]
# As long as a chunk of OpenAI's; the stamp stands in the text.
EVENT = (
    b'data: {"id":"chatcmpl-9f8e7d6c5b4a","object":"chat.completion.chunk","created":1760000000,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":"~%d~"},"logprobs":null,"finish_reason":null}]}\n\n'
)
END = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'

Message = dict[str, Any]


async def stream(
    scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
) -> None:
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
        return
    asked = parse_qs(scope["query_string"].decode())
    events, gap_ns = int(asked.get("events", ["0"])[0]), int(asked.get("gap_us", ["0"])[0]) * 1_000
    while (await receive()).get("more_body", False):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    due_ns = time.monotonic_ns()
    for _ in range(events):
        due_ns += gap_ns
        await asyncio.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)
        body = EVENT % time.monotonic_ns()
        await send({"type": "http.response.body", "body": body, "more_body": True})
    await send({"type": "http.response.body", "body": END, "more_body": False})


app: Callable[..., Awaitable[None]] = stream
if (_socket := os.environ.get("LLMTAP_BENCH_SOCKET")) is not None:
    from llmtap.middleware.asgi import LlmtapMiddleware

    app = LlmtapMiddleware(stream, socket=_socket)
