"""A sender in the test's own loop, servers to send to, and answers as servers write them."""

import asyncio
import json
import ssl
import tempfile
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from llmtap.exchange.exchange import Exchange
from llmtap.load.http import Call, LoadSender
from llmtap.load.options import LoadPlan, SendingOptions
from llmtap.load.sending import parse_target
from llmtap.load.workers.worker_handle import WorkerSetup
from llmtap.units import Duration
from tests.support.servers.peer import chunk, wait_until

BODY = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}'


def body_of(row: int) -> bytes:
    """A body that says which row it is."""
    return json.dumps({"model": "m", "stream": True, "user": f"row-{row}", "messages": []}).encode()


def events(tokens: int, *, done: bool = True) -> list[bytes]:
    """The events of a chat completion of so many tokens, one each, and its end."""
    out = [
        b'data: {"id":"c","object":"chat.completion.chunk","model":"m","choices":[{"index":0,"delta":'
        b'{"content":" w%d"},"finish_reason":null}]}\n\n' % i
        for i in range(tokens)
    ]
    if done:
        out.append(
            b'data: {"id":"c","object":"chat.completion.chunk","model":"m","choices":[{"index":0,"delta":{},'
            b'"finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":%d}}\n\n' % tokens
        )
        out.append(b"data: [DONE]\n\n")
    return out


def streamed_answer(tokens: int = 3, *, fields: bytes = b"") -> list[bytes]:
    """The same as an answer: the head, a chunk for each event, the last chunk."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
    return [head + fields + b"\r\n", *(chunk(event) for event in events(tokens)), b"0\r\n\r\n"]


def sockets(port: int) -> int:
    """Sockets of this host that lead to a port of it and belong to a process."""
    n = 0
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            n += int(fields[2].rpartition(":")[2], 16) == port and fields[9] != "0"
    return n


def alive(pid: int) -> bool:
    """Return whether a process runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Sending:
    """A sender, and every end it has told of."""

    def __init__(self, sender: LoadSender) -> None:
        self.sender = sender
        self.begun = 0
        self.ended: list[tuple[Call, Exchange]] = []

    def send(self, body: bytes = BODY, *, row: int = 0, scheduled_ns: int | None = None) -> Call:
        """Begin a request; its end goes to `ended`."""
        before = len(self.ended)
        self.begun += 1
        call = self.sender.send(body, self._done, row=row, scheduled_ns=scheduled_ns)
        assert len(self.ended) == before, "nobody is told of an end before `send` returns"
        return call

    async def ask(self, body: bytes = BODY, *, row: int = 0, scheduled_ns: int | None = None) -> Exchange:
        """Begin a request and wait for its end."""
        return await self.end_of(self.send(body, row=row, scheduled_ns=scheduled_ns))

    async def end_of(self, call: Call) -> Exchange:
        await wait_until(lambda: any(of is call for of, _ in self.ended))
        return self.of(call)

    def of(self, call: Call) -> Exchange:
        """The one exchange of a call that is over."""
        (x,) = [x for of, x in self.ended if of is call]
        return x

    def _done(self, call: Call, x: Exchange) -> None:
        assert all(of is not call for of, _ in self.ended), "a call ends once"
        self.ended.append((call, x))


@asynccontextmanager
async def sender_to(
    url: str,
    *,
    tls: ssl.SSLContext | None = None,
    endpoint: str = "chat.completions",
    timeout_s: float = 100,
    clock: str = "kernel",
    fresh: bool = False,
    retries: int = 0,
    headers: Sequence[tuple[bytes, bytes]] = (),
) -> AsyncIterator[Sending]:
    """The only sender to `url`. At the end every call has ended, once, and every socket is closed."""
    options = SendingOptions(
        clock=clock,
        fresh=fresh,
        retries=retries,
        connect_timeout=Duration(100 * 10**9),
        timeout=Duration(int(timeout_s * 1e9)),
    )
    target = parse_target(url, endpoint, list(headers))
    before = sockets(target.origin.port)
    sending = Sending(LoadSender(asyncio.get_running_loop(), target, options, tls=tls))
    try:
        yield sending
    finally:
        sending.sender.close()
    assert len(sending.ended) == sending.begun
    assert not sending.sender.calls
    await wait_until(lambda: sockets(target.origin.port) <= before)


@contextmanager
def bodies(url: str, count: int, **more: Any) -> Iterator[tuple[WorkerSetup, "array[int]", "array[int]"]]:
    """A setup for so many rows whose bodies say which they are, and where these begin and end."""
    begins, ends = array("q"), array("q")
    with tempfile.TemporaryFile() as file:
        for row in range(count):
            begins.append(file.tell())
            file.write(body_of(row))
            ends.append(file.tell())
        file.flush()
        setup = {name: more.pop(name) for name in WorkerSetup.__struct_fields__ if name in more}
        plain = {"bodies_fd": file.fileno(), "spill_fd": None, **setup}
        yield WorkerSetup(load=LoadPlan.of(url=url, **more), **plain), begins, ends
