"""A server of known schedule: `python truth_server.py MODE LOG` prints its port and answers until stdin ends.

It streams chat completions as the mode says, and logs each request as a line of JSON: when it was read, when
each piece of output was sent and with how many tokens, when the answer ended, and how. Times are in ns of
CLOCK_MONOTONIC, taken right before the write. Standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

WORD = " sea"
HANG_S = 60.0
EVERY = 4
"""The fault of a mode is that of every fourth request."""


@dataclass(frozen=True, slots=True)
class Mode:
    """Schedule and fault of the answers."""

    about: str
    ttft_s: tuple[float, ...] = (0.1,)
    """Time to the first token of request k: entry k modulo the number of entries."""
    tokens: tuple[int, ...] = (20,)
    gap_s: float = 0.02
    burst: int = 1
    """Tokens in an event."""
    usage: bool = True
    stall_s: float = 0.0
    """Pause in the middle of an answer."""
    fault: str = ""


MODES = {
    "constant": Mode("a token each 20 ms after 100 ms"),
    "mixed": Mode("TTFT of 50 and 200 ms, 10 and 40 tokens", ttft_s=(0.05, 0.2), tokens=(10, 40)),
    "bursts": Mode("5 tokens in an event, each 100 ms, with usage", gap_s=0.1, burst=5),
    "bursts-no-usage": Mode("the same without usage", gap_s=0.1, burst=5, usage=False),
    "stalls": Mode("a pause of 500 ms in the middle", stall_s=0.5),
    "errors": Mode("every fourth request: status 500", fault="error"),
    "retry-after": Mode("every fourth request: status 429, Retry-After 1, then an answer", fault="429"),
    "cut": Mode("every fourth answer is cut in the middle", fault="cut"),
    "hang": Mode("every fourth answer stops in the middle", fault="hang"),
    "closed": Mode("the connection is closed after each answer, unannounced", fault="close"),
}


class Server:
    def __init__(self, mode: Mode, log: IO[str]) -> None:
        self.mode = mode
        self.log = log
        self.number = 0
        self.refused: set[bytes] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lengths = [
                    int(line.partition(b":")[2])
                    for line in head.split(b"\r\n")
                    if line.lower().startswith(b"content-length:")
                ]
                body = await reader.readexactly(lengths[0]) if lengths else b""
                read_ns = time.monotonic_ns()
                if not head.startswith(b"POST"):
                    models = b'{"object":"list","data":[{"id":"sim-model","object":"model"}]}'
                    # guidellm asks for /health before it sends anything.
                    found = any(path in head.split(b"\r\n")[0] for path in (b"/models", b"/health"))
                    writer.write(whole(b"200 OK" if found else b"404 Not Found", models if found else b"{}"))
                elif not await self.answer(writer, body, read_ns):
                    break
        with contextlib.suppress(ConnectionError):
            writer.close()

    async def answer(self, writer: asyncio.StreamWriter, body: bytes, read_ns: int) -> bool:
        """Answer a request and log it; return whether the connection stays open."""
        mode = self.mode
        again = body in self.refused  # the retry of a request has the same body
        number = self.number
        if not again:
            self.number += 1
        faulty = bool(mode.fault) and number % EVERY == EVERY - 1 and not again
        entry: dict[str, Any] = {
            "read": read_ns,
            "sent": [],
            "tokens": [],
            "end": None,
            "outcome": "complete",
        }
        if faulty and mode.fault in ("error", "429"):
            refused = mode.fault == "429"
            if refused:
                self.refused.add(body)
            status = b"429 Too Many Requests" if refused else b"500 Internal Server Error"
            writer.write(
                whole(status, b'{"error":{"message":"busy"}}', b"Retry-After: 1\r\n" if refused else b"")
            )
            self.note(entry | {"outcome": mode.fault, "end": time.monotonic_ns()})
            return True
        self.refused.discard(body)
        open_ = await self.stream(writer, entry, number, faulty)
        if entry["outcome"] == "complete":
            self.note(entry)
        return open_ and mode.fault != "close"

    async def stream(
        self, writer: asyncio.StreamWriter, entry: dict[str, Any], number: int, faulty: bool
    ) -> bool:
        mode = self.mode
        tokens = mode.tokens[number % len(mode.tokens)]
        events = tokens // mode.burst
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        due = entry["read"] / 1e9 + mode.ttft_s[number % len(mode.ttft_s)]
        for i in range(events):
            due += (mode.gap_s if i else 0) + (mode.stall_s if i == events // 2 else 0)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if faulty and i == events // 2 and mode.fault in ("hang", "cut"):
                entry["outcome"] = mode.fault
                self.note(entry)  # before the client gives up, and this server is ended
                if mode.fault == "hang":
                    await asyncio.sleep(HANG_S)
                writer.close()
                return False
            entry["sent"].append(time.monotonic_ns())
            entry["tokens"].append(mode.burst)
            writer.write(event({"choices": [{"index": 0, "delta": {"content": WORD * mode.burst}}]}))
        last: dict[str, Any] = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        writer.write(event(last))
        if mode.usage:
            usage = {"prompt_tokens": 10, "completion_tokens": tokens, "total_tokens": 10 + tokens}
            writer.write(event({"choices": [], "usage": usage}))
        entry["end"] = time.monotonic_ns()
        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        return True

    def note(self, entry: dict[str, Any]) -> None:
        self.log.write(json.dumps(entry) + "\n")
        self.log.flush()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(value: dict[str, Any]) -> bytes:
    base = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "sim-model"}
    return chunk(b"data: " + json.dumps(base | value).encode() + b"\n\n")


def whole(status: bytes, body: bytes, fields: bytes = b"") -> bytes:
    head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n" % (status, len(body))
    return head + fields + b"\r\n" + body


async def main(mode: Mode, log: IO[str]) -> None:
    one = Server(mode, log)
    server = await asyncio.start_server(one.serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    ended: Callable[[], Any] = sys.stdin.read
    await asyncio.get_running_loop().run_in_executor(None, ended)
    server.close()


if __name__ == "__main__":
    with contextlib.suppress(PermissionError):  # as root it is on time on a busy machine, too
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    with Path(sys.argv[2]).open("w") as file:
        asyncio.run(main(MODES[sys.argv[1]], file))
