"""One streamed answer on its way: at each due moment the bytes of a write, straight onto the connection.

A response of aiohttp takes a coroutine and two more calls per write; ten thousand tokens a second on one
core leave no time for them. So aiohttp reads the request, writes the head and ends the body, and what is
between is written to its transport here, in chunks if the body is chunked (RFC 9112 7.1).
"""

import asyncio
import socket
import struct
from collections.abc import Iterator
from typing import Any, Final

from llmtap.clock import Clock
from llmtap.sim.delivery import Chunk, Write
from llmtap.sim.gauges import Gauges
from llmtap.sim.shapes.shape import Answer, Shape
from llmtap.sim.truth import Truth

__all__ = ["Sender", "reset"]

BUFFER_BYTES_MAX: Final = 256 << 10
"""What a slow client may leave unread here before its answer waits."""
HELD_NS: Final = 5_000_000
"""How soon a client that was slow is looked at again."""


class Sender:
    """Call `act` when it is due, until it answers None; `done` is then set.

    `outcome` is what the request comes to when its client stays; a fault has it break off as it says.
    """

    def __init__(
        self,
        answer: Answer,
        shape: Shape,
        writes: Iterator[Write],
        truth: Truth,
        stamps: list[int],
        gauges: Gauges,
        clock: Clock,
        outcome: str,
    ) -> None:
        self._answer = answer
        self._shape = shape
        self._writes = writes
        self._truth = truth
        self._stamps = stamps
        self._gauges = gauges
        self._mono_ns = clock.mono_ns
        self._outcome = outcome
        self._transport: Any = None
        self._framed = True
        self._opened = False
        self._next: Write | None = next(writes)
        self._last_ns = 0
        self.first_ns: int | None = None
        """When the first token was sent."""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def due_ns(self) -> int:
        """When the next write is due."""
        assert self._next is not None
        return self._truth.accepted_ns + self._next.due_ns

    def start(self, transport: asyncio.Transport, *, framed: bool) -> None:
        """The head is sent; `framed` if the body is chunked."""
        self._transport = transport
        self._framed = framed

    def act(self) -> int | None:
        """Send what is due; when the next write is, or None after the last."""
        transport = self._transport
        write = self._next
        if write is None or self.done.done():
            return None
        if transport.is_closing():
            self._end("client_left")
            return None
        if transport.get_write_buffer_size() > BUFFER_BYTES_MAX:
            return self._mono_ns() + HELD_NS
        following = next(self._writes, None)
        if write.chunks:
            broken = self._send(write, following is None)
            if broken:
                self._end(self._outcome)
                return None
        elif silence := self._shape.keepalive():
            self._put(silence)
        self._next = following
        if following is None:
            self._end(self._outcome)
            return None
        return self._truth.accepted_ns + following.due_ns

    def abandon(self) -> None:
        """Whoever waited for it has gone."""
        if not self.done.done():
            self._end("client_left")

    def _send(self, write: Write, ends: bool) -> bool:
        """Whether the answer broke off."""
        shape = self._shape
        chunks = write.chunks
        data = b""
        if not self._opened:
            self._opened = True
            data = shape.opening()
        if len(chunks) > 1:
            data += b"".join([shape.chunk(c.choice, c.first, c.last, c.final) for c in chunks[:-1]])
        last = chunks[-1]
        if last.breaks:
            return self._break_off(data, chunks)
        data += shape.chunk(last.choice, last.first, last.last, last.final)
        if ends:
            answer, accepted_ns, now_ns = self._answer, self._truth.accepted_ns, self._mono_ns()
            first_ns = now_ns if self.first_ns is None else self.first_ns
            answer.prompt_ns, answer.output_ns = first_ns - accepted_ns, now_ns - first_ns
            data += shape.ending()
        self._note(write, chunks)
        self._put(data)
        return False

    def _note(self, write: Write, chunks: tuple[Chunk, ...]) -> None:
        """Write down that these tokens leave now."""
        truth = self._truth
        now_ns = self._mono_ns()
        due_ns = truth.accepted_ns + write.due_ns
        carried = False
        for chunk in chunks:
            if tokens := chunk.last - chunk.first:
                carried = True
                truth.due_ns[chunk.choice] += [due_ns] * tokens
                truth.sent_ns[chunk.choice] += [now_ns] * tokens
                self._stamps += [now_ns] * tokens
        truth.late_ns_max = max(truth.late_ns_max, now_ns - due_ns)
        if carried:
            if self.first_ns is None:
                self.first_ns = now_ns
                self._gauges.first(now_ns - truth.accepted_ns)
            else:
                self._gauges.gap(now_ns - self._last_ns)
            self._last_ns = now_ns

    def _break_off(self, data: bytes, chunks: tuple[Chunk, ...]) -> bool:
        last = chunks[-1]
        transport = self._transport
        if self._outcome == "truncate":
            event = self._shape.chunk(last.choice, last.first, last.last, last.final)
            data += event[: max(1, len(event) // 2)]
        elif self._outcome == "error":
            data += self._shape.failure()
        if len(chunks) > 1:
            self._note(Write(last.due_ns, chunks[:-1]), chunks[:-1])
        self._put(data)
        if self._outcome == "reset":
            reset(transport)
        elif self._outcome == "truncate":
            transport.close()
        return True

    def _put(self, data: bytes) -> None:
        if data:  # an empty chunk would be the end of the body
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._framed else data)

    def _end(self, outcome: str) -> None:
        self._next = None
        self._truth.outcome = outcome
        self.done.set_result(None)


def reset(transport: asyncio.Transport) -> None:
    """End the connection by RST, whatever is unsent."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
