"""Event streams, and the exchange that the observer makes of one; for the tests of this folder."""

import json
from typing import Any

from llmtap.exchange.exchange import Exchange
from llmtap.exchange.observer import Observer

REQUEST = (
    b"POST /v1/chat/completions?x=1 HTTP/1.1\r\nHost: g\r\nX-Request-Id: req-1\r\nContent-Length: 9\r\n\r\n"
)
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n%b\r\n"


def sse(value: Any) -> bytes:
    return b"data: %b\n\n" % (value if isinstance(value, bytes) else json.dumps(value).encode())


def chunk(delta: dict[str, Any], reason: str | None = None, **top: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return sse({"object": "chat.completion.chunk", "choices": [choice], **top})


ROLE = chunk({"role": "assistant", "content": ""}, model="acme-8b-0901")
STOP = chunk({}, "stop")
DONE = sse(b"[DONE]")


def observe(
    *reads: tuple[int, bytes],
    head: bytes = OK % b"",
    request: bytes = REQUEST,
    body: bytes = b"",
    outcome: str = "complete",
    end_ns: int | None = 900,
    status: int | None = None,
    error: str | None = None,
    paused_ns: int = 11,
    **options: Any,
) -> Exchange:
    """The exchange of a response that was read so; stamps are small numbers of ns."""
    o = Observer("r1", 7, 10, 1_700_000_000_000_000_000, request, **options)
    o.request_data(body, 20)
    o.request_end(20)
    o.on_submit(30, 5)
    if head:
        o.response_head(head, 40, 1)
    for t_ns, data in reads:
        o.response_data(data, t_ns, t_ns // 10)
    if end_ns is not None:
        o.response_end(end_ns)
    return o.finish(950, outcome, status, error, paused_ns, 12, 13, 14)


def framed(body: bytes, size: int) -> bytes:
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(b"%x;e=1\r\n%b\r\n" % (len(p), p) for p in pieces) + b"0\r\nx-trailer: 1\r\n\r\n"
