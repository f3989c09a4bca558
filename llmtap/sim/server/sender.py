"""A running request (`ServerJob`), and the senders, which write its answer at the scheduled times.

`ResponseSender` sends a stream: it takes the due writes of a `Delivery`, gets their bytes from the API's
`Shape`, writes them to the transport, and records the time of each token. `Gatherer` waits until an answer
that is not streamed is complete. `reception.py` creates both; one `Pacer` wakes them.

A write by aiohttp needs a coroutine and two more calls, which is too slow for ten thousand tokens per second
on one core. So aiohttp only reads the request, writes the head and ends the body. The sender writes the rest
directly to the transport, in chunks if the body is chunked (RFC 9112 7.1).
"""

import asyncio
import socket
import struct
from dataclasses import dataclass
from typing import Any, Final

from llmtap.clock import Clock
from llmtap.net.pacing import Pacer, Waker
from llmtap.sim.server.delivery import Chunk, Delivery, PlanSource, Write
from llmtap.sim.server.gauges import EngineMetrics
from llmtap.sim.server.options import FaultKind, RefusalKind, SimOptions
from llmtap.sim.server.shapes import Answer, Shape
from llmtap.sim.server.truth import Truth
from llmtap.units import NEVER

BUFFER_BYTES_MAX: Final = 256 << 10
"""Number of bytes in the write buffer above which the answer to a slow client is paused."""
BUFFER_CHECK_NS: Final = 5_000_000
"""Time between two checks of the write buffer while an answer to a slow client is paused."""


@dataclass(frozen=True, slots=True)
class RequestFaults:
    """Faults and guardrails of one request, as drawn at random; None: the request has no such fault."""

    fault: FaultKind | None = None
    refusal: RefusalKind | None = None
    """Form in which the model refuses the request."""
    block_after: int | None = None
    """Number of tokens after which the output filter blocks the answer."""


@dataclass(slots=True)
class ServerJob:
    """An accepted request and its answer."""

    options: SimOptions
    answer: Answer
    shape: Shape
    faults: RequestFaults
    delivery: Delivery
    source: PlanSource
    """Source of the answer's tokens."""
    outcome: str
    """Planned outcome for the truth log, unless the client or the engine ends the request earlier."""
    truth: Truth
    """Log entry of the request with its exact times."""
    send_times: list[int]
    """Send time of each token, of all choices (`TruthLog.send_times`)."""

    @property
    def rejection_status(self) -> int | None:
        """HTTP status with which the request is rejected without an answer; None: it is answered."""
        if self.faults.fault in ("429", "503"):
            return int(self.faults.fault)
        return 400 if self.faults.refusal == "error" else None

    def set_rejected(self, status: int) -> None:
        """Record in the truth log that an error with this status is sent instead of an answer."""
        self.truth.status = status
        self.truth.outcome = (
            "refused" if status == 400 else "given_up" if self.source.given_up else str(status)
        )

    def next_ns(self) -> int:
        """Return the time of the next write, or of the source's next token if it is earlier."""
        return min(self.delivery.next_ns(), self.source.next_ns)

    def complete(self, first_ns: int, last_ns: int) -> None:
        """Set the fields that the end of an answer reports, from the times of its first and last token."""
        answer, accepted_ns = self.answer, self.truth.accepted_ns
        answer.prompt_ns, answer.output_ns = first_ns - accepted_ns, last_ns - first_ns
        answer.cached_tokens = self.source.cached_tokens


class ResponseSender:
    """Sender of a streamed answer. Nothing is sent before `start` is called."""

    def __init__(self, job: ServerJob, gauges: EngineMetrics, pacer: Pacer, clock: Clock) -> None:
        self._job = job
        self._shape = job.shape
        self._delivery = job.delivery
        self._source = job.source
        self._truth = job.truth
        """Log entry of the request, to which the exact send times are added."""
        self._gauges = gauges
        self._mono_ns = clock.mono_ns
        self._waker = Waker(pacer, self._send_due)
        """Calls `_send_due` at the time of the next write."""
        self._transport: Any = None
        self._is_framed = True
        """Whether writes have HTTP chunk framing."""
        self._has_opening = False
        """Whether the first bytes of the stream were sent."""
        self._last_ns = 0
        """Time of the latest token."""
        self._first_ns: int | None = None
        """Time of the first token; None before it."""
        loop = asyncio.get_running_loop()
        self.begins: asyncio.Future[None] = loop.create_future()
        """Done when the first write is due, or when the engine gives the request up."""
        self.done: asyncio.Future[None] = loop.create_future()
        """Done when everything was sent, or when the answer was ended early."""

    def wake(self) -> None:
        """Set the time at which the next token is due."""
        self._waker.call_at(self._job.next_ns())

    def start(self, transport: asyncio.Transport, *, framed: bool) -> None:
        """Begin to send, after the head of the response. `framed`: whether the body is chunked."""
        self._transport = transport
        self._is_framed = framed
        self.wake()

    def abandon(self, outcome: str | None = None) -> None:
        """End the answer, unless it has ended. `outcome`: outcome for the truth log; None: `client_left`
        if the client has disconnected, else `cut`, because the server stops."""
        if not self.done.done():
            is_open = self._transport is not None and not self._transport.is_closing()
            self._end(outcome or ("cut" if is_open else "client_left"))

    def _send_due(self, now_ns: int) -> int:
        """Send the next write, if it is due. Return the time of the next call."""
        if self.done.done():
            return NEVER
        self._source.advance(now_ns)
        transport = self._transport
        if transport is None:
            next_ns = self._job.next_ns()
            if next_ns > now_ns:
                return next_ns
            if not self.begins.done():
                self.begins.set_result(None)
            return NEVER
        if transport.is_closing():
            self._end("client_left")
            return NEVER
        if transport.get_write_buffer_size() > BUFFER_BYTES_MAX:
            return self._mono_ns() + BUFFER_CHECK_NS
        write = self._delivery.take(now_ns)
        if write is None:
            return self._job.next_ns()
        ends = self._delivery.all_taken
        if write.chunks:
            if self._send_chunks(write, ends):
                self._end("given_up" if self._source.given_up else self._job.outcome)
                return NEVER
        elif keepalive := self._shape.keepalive():
            self._write_bytes(keepalive)
        if ends:
            self._end(self._job.outcome)
            return NEVER
        return self._job.next_ns()

    def _send_chunks(self, write: Write, ends: bool) -> bool:
        """Send the chunks of a write (the last one, if `ends`). Return whether the answer broke off."""
        shape = self._shape
        chunks = write.chunks
        data = b""
        if not self._has_opening:
            self._has_opening = True
            data = shape.opening()
        if len(chunks) > 1:
            data += b"".join([shape.chunk(c.choice, c.first, c.end, c.is_final) for c in chunks[:-1]])
        last = chunks[-1]
        if last.breaks_off:
            self._break_off(data, chunks)
            return True
        data += shape.chunk(last.choice, last.first, last.end, last.is_final)
        if ends:
            now_ns = self._mono_ns()
            self._job.complete(now_ns if self._first_ns is None else self._first_ns, now_ns)
            data += shape.ending()
        self._record_times(write.due_ns, chunks)
        self._write_bytes(data)
        return False

    def _record_times(self, due_ns: int, chunks: tuple[Chunk, ...]) -> None:
        """Record when tokens were due and when they were really sent."""
        truth = self._truth
        now_ns = self._mono_ns()
        has_tokens = False
        for chunk in chunks:
            if tokens := chunk.end - chunk.first:
                has_tokens = True
                truth.due_ns[chunk.choice] += [due_ns] * tokens
                truth.sent_ns[chunk.choice] += [now_ns] * tokens
                self._job.send_times += [now_ns] * tokens
            if chunk.is_final:
                truth.finish[chunk.choice] = self._job.answer.choices[chunk.choice].finish
        truth.late_ns_max = max(truth.late_ns_max, now_ns - due_ns)
        if has_tokens:
            if self._first_ns is None:
                self._first_ns = now_ns
                self._gauges.on_prompt(truth.prompt_tokens)
                self._gauges.on_first_token(now_ns - truth.accepted_ns)
            else:
                self._gauges.on_gap(now_ns - self._last_ns)
            self._last_ns = now_ns

    def _break_off(self, data: bytes, chunks: tuple[Chunk, ...]) -> None:
        """End the answer with its fault: reset, cut off or failed."""
        last = chunks[-1]
        transport = self._transport
        outcome = "error" if self._source.given_up else self._job.outcome
        if outcome == "truncate":
            event = self._shape.chunk(last.choice, last.first, last.end, last.is_final)
            data += event[: max(1, len(event) // 2)]
        elif outcome == "error":
            data += self._shape.failure()
        if len(chunks) > 1:
            self._record_times(last.due_ns, chunks[:-1])
        self._write_bytes(data)
        if outcome == "reset":
            reset_connection(transport)
        elif outcome == "truncate":
            transport.close()

    def _write_bytes(self, data: bytes) -> None:
        if data:  # Write no empty chunk: it would end the body (RFC 9112 7.1).
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_framed else data)

    def _end(self, outcome: str) -> None:
        self._truth.outcome = outcome
        self._waker.close()
        self.done.set_result(None)


class Gatherer:
    """Waits until an answer that is not streamed is complete."""

    def __init__(self, job: ServerJob, pacer: Pacer) -> None:
        self._job = job
        self._waker = Waker(pacer, self.take_due)
        self.due_ns = 0
        """Time at which the answer must be sent; final when `done` is done."""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the last token was made, or the engine gave the request up."""

    def wake(self) -> None:
        self._waker.call_at(self._job.next_ns())

    def close(self) -> None:
        self._waker.close()

    def take_due(self, now_ns: int) -> int:
        """Take the due writes from the delivery. Return the time of the next call."""
        delivery = self._job.delivery
        self._job.source.advance(now_ns)
        while (write := delivery.take(now_ns)) is not None:
            self.due_ns = write.due_ns
        if not delivery.all_taken:
            return self._job.next_ns()
        if not self.done.done():
            self.done.set_result(None)
        return NEVER


def reset_connection(transport: asyncio.Transport) -> None:
    """Reset the connection (TCP RST). Bytes in its buffers are lost."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
