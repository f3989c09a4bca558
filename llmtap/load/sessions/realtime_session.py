"""One connection to a server of Realtime: opened, upgraded, asked, and asked again.

The handler of its stream. Bytes go to the Observer of the answer under way before anything else; then they
are read here, too, to know where the answer ends, and to answer pings.
"""

import asyncio
import os
from typing import Any, Final

import msgspec

from llmtap.clock import SystemClock
from llmtap.errors import PeerProtocolError
from llmtap.exchange.observer import Observer
from llmtap.exchange.outcome import Outcome
from llmtap.net.failures import failure_said
from llmtap.net.pool import Attempt, Pool
from llmtap.net.stream import Stream
from llmtap.protocol.http1 import header_value, parse_response_head
from llmtap.protocol.websocket import MessageParser, Opcode, accept_key, frame

__all__ = ["OpeningFailed", "RealtimeAnswer", "RealtimeSession"]

HEAD_BYTES_MAX: Final = 1 << 18
"""As for HTTP."""
QUIET_NS: Final = 200_000_000
"""After this long without a byte a session is asked whether the loop has stopped watching it."""
NORMAL: Final = (1000).to_bytes(2, "big")
"""RFC 6455 7.4.1: it has served its purpose."""

mono_ns = SystemClock.mono_ns


class OpeningFailed(Exception):
    """There is no session. `status` is what the server answered in place of one."""

    def __init__(self, outcome: Outcome, problem: str, status: int | None = None) -> None:
        super().__init__(problem)
        self.outcome = outcome
        self.status = status


class _Error(msgspec.Struct):
    type: Any = None
    code: Any = None
    event_id: Any = None


class _Event(msgspec.Struct):
    """As much of a server's event as says where an answer ends."""

    type: str = ""
    error: _Error | None = None


_read = msgspec.json.Decoder(_Event).decode


class RealtimeAnswer:
    """One request on its way; `done` is set at its end."""

    def __init__(self, observer: Observer, request_id: str) -> None:
        self.observer = observer
        self.request_id = request_id
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.outcome = Outcome.COMPLETE
        self.error: str | None = None
        self.refused: str | None = None
        """The kind of the error that came in place of a response."""
        self.status: int | None = 101
        self.submit_ns: int | None = None
        self.submit_width_ns = 0
        """How much later than that it may have been."""
        self.created = False
        """The server has begun a response."""
        self.response_bytes = 0

    def submitted(self, t_ns: int, began_ns: int, width_ns: int = 0) -> None:
        """The kernel took the last of the request then, or up to `width_ns` later."""
        self.submit_ns, self.submit_width_ns = t_ns, width_ns
        self.observer.submitted(t_ns, t_ns - began_ns)

    def end(self, t_ns: int) -> None:
        """It is whole, with what was read at `t_ns`."""
        if not self.done.done():
            self.observer.response_end(t_ns)
            self.done.set_result(None)

    def fail(self, outcome: Outcome, error: str) -> None:
        """It will not be."""
        if not self.done.done():
            self.outcome, self.error = outcome, error
            self.done.set_result(None)


class RealtimeSession:
    """`open` it, then `send` and `listen`, one answer at a time."""

    def __init__(
        self, pool: Pool, upgrade: bytes, key: bytes, tenant: str | None, all_of_them: "set[RealtimeSession]"
    ) -> None:
        """`upgrade`: the head of the request that opens it, with that key in it."""
        self.upgrade = upgrade
        self.tenant = tenant
        self._pool = pool
        self._key = key
        self._all = all_of_them
        self._attempt: Attempt | None = None
        self._stream: Stream | None = None
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._head: bytearray | None = bytearray()
        """Of the server's answer, until it is whole."""
        self._parser = MessageParser("the server", masked=False)
        self._fed = 0
        """Bytes that the parser got, and those of whole messages: equal between two."""
        self._whole = 0
        self._answer: RealtimeAnswer | None = None
        self._began_ns = 0
        """When the request was begun to be written."""
        self._submit_ns: int | None = None
        self._broken: str | None = None
        """Why it could not be written."""
        self._last_ns = 0

    @property
    def reusable(self) -> bool:
        """It is open, idle, and between two messages."""
        answer = self._answer
        return (
            self._stream is not None
            and self._opened.done()
            and self._fed == self._whole
            and (answer is None or (answer.done.done() and answer.outcome is Outcome.COMPLETE))
        )

    @property
    def used(self) -> bool:
        """It has served a request."""
        return self._began_ns > 0

    def is_alive(self) -> bool:
        """The server has not closed it since. What it said after an answer is still there to be read."""
        return self._stream is not None and not self._stream.closed and not self._stream.peer_left()

    async def open(self) -> None:
        """Connect, upgrade, and hear the server's greeting. Raises OpeningFailed."""
        self._attempt = self._pool.connect(self)
        if self._stream is not None or self._opened.done():
            self._attempt = None
        await self._opened

    def send(self, data: bytes) -> None:
        """Write a request, before anything else is done about it; `listen` comes next, before anything is
        read."""
        assert self._stream is not None
        self._answer = self._submit_ns = self._broken = None
        self._began_ns = self._last_ns = mono_ns()
        try:
            if self._stream.write(data):
                self._submit_ns = mono_ns()
        except OSError as exc:
            self._broken = f"the session broke as we wrote ({failure_said(exc)})"

    def listen(self, answer: RealtimeAnswer) -> None:
        """What comes from now on is the answer."""
        self._answer = answer
        answer.observer.upgraded(self._began_ns)
        if self._submit_ns is not None:
            # The earlier end, as over HTTP: a server on this host may answer before we have the CPU back.
            answer.submitted(self._began_ns, self._began_ns, self._submit_ns - self._began_ns)
        if self._broken is not None:
            self._end(Outcome.UPSTREAM_RESET, self._broken)

    def call_off(self) -> None:
        """Whoever waits for it to be open has gone."""
        self._fail_opening(Outcome.CLIENT_CANCELLED, "the run was over")

    def look_again(self, now_ns: int) -> None:
        """The loop may have stopped watching a socket that was reset: see `net/stream.py`."""
        if self._stream is not None and now_ns - self._last_ns > QUIET_NS:
            self._last_ns = now_ns
            self._stream.look_again()

    def leave(self) -> None:
        """Close it as a WebSocket is closed; what is under way is cancelled."""
        if self._answer is not None:
            self._answer.fail(Outcome.CLIENT_CANCELLED, "the run was over")
        self._say(Opcode.CLOSE, NORMAL)
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
        self.drop()

    def drop(self) -> None:
        """Nobody wants it any more."""
        self._all.discard(self)
        if self._attempt is not None:
            self._attempt.cancel()
            self._attempt = None
        stream, self._stream = self._stream, None
        if stream is not None and not stream.closed:
            stream.abort()

    # The waiter for a connection.

    def on_connected(self, stream: Stream, took_ns: int) -> None:
        self._attempt = None
        self._stream = stream
        try:
            stream.write(self.upgrade)
        except OSError as exc:
            self._gone(exc)

    def on_connect_failed(self, error: OSError) -> None:
        self._attempt = None
        self._fail_opening(Outcome.UPSTREAM_ERROR, f"cannot connect ({failure_said(error)})")

    def _fail_opening(self, outcome: Outcome, problem: str, status: int | None = None) -> None:
        if not self._opened.done():
            self._opened.set_exception(OpeningFailed(outcome, problem, status))

    # The handler of the stream.

    def on_data(self, data: bytes, t_ns: int) -> None:
        self._last_ns = t_ns
        if self._head is not None:
            data = self._read_head(data)
        if not data:
            return
        answer = self._answer
        if answer is not None and not answer.done.done():
            answer.response_bytes += len(data)
            answer.observer.tunnel(None, data, t_ns, 0)
        self._fed += len(data)
        for message in self._parser.feed(data):
            self._whole += message.size
            self._hear(message.opcode, message.payload or b"", t_ns)
        if self._parser.broken is not None:
            self._end(Outcome.UPSTREAM_ERROR, f"the server broke WebSocket: {self._parser.broken}")

    def on_eof(self) -> None:
        self._gone(None)

    def on_lost(self, error: OSError | None) -> None:
        self._gone(error)

    def on_drained(self) -> None:
        if self._answer is not None and self._answer.submit_ns is None:
            self._answer.submitted(mono_ns(), self._began_ns)

    def _read_head(self, data: bytes) -> bytes:
        """What is behind the head; empty while that is incomplete."""
        assert self._head is not None
        searched = max(0, len(self._head) - 3)
        self._head += data
        end = self._head.find(b"\r\n\r\n", searched) + 4
        if end < 4:
            if len(self._head) > HEAD_BYTES_MAX:
                self._fail_opening(Outcome.UPSTREAM_ERROR, "the answer's head is too long")
            return b""
        data, self._head = bytes(self._head), None
        try:
            head = parse_response_head(data[:end], b"GET")
        except PeerProtocolError as exc:
            self._fail_opening(Outcome.UPSTREAM_ERROR, f"the server broke HTTP: {exc}")
            return b""
        if head.status != 101:
            what = f"the server answered {head.status} in place of a WebSocket"
            self._fail_opening(Outcome.UPSTREAM_ERROR, what, head.status)
            return b""
        # RFC 6455 4.1: a server that does not know the key has not understood the upgrade.
        if header_value(head.headers, b"sec-websocket-accept") != accept_key(self._key):
            self._fail_opening(Outcome.UPSTREAM_ERROR, "the server accepted another WebSocket's key")
            return b""
        return data[end:]

    def _hear(self, opcode: Opcode, payload: bytes, t_ns: int) -> None:
        match opcode:
            case Opcode.PING:
                self._say(Opcode.PONG, payload)
            case Opcode.CLOSE:
                self._say(Opcode.CLOSE, payload[:2])  # RFC 6455 5.5.1: as an answer
                self._gone(None)
            case Opcode.TEXT:
                if not self._opened.done():
                    self._opened.set_result(None)  # the greeting
                elif self._answer is not None and not self._answer.done.done():
                    self._read_event(self._answer, payload, t_ns)

    def _say(self, opcode: Opcode, payload: bytes) -> None:
        if self._stream is not None and not self._stream.closed:
            try:
                self._stream.write(frame(payload, opcode, key=os.urandom(4)))
            except OSError:
                pass  # the reader will be told

    def _read_event(self, answer: RealtimeAnswer, payload: bytes, t_ns: int) -> None:
        try:
            event = _read(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return  # not for us; the observer counts it
        match event.type:
            case "response.created":
                answer.created = True
            case "response.done":
                answer.end(t_ns)
            case "error" if not answer.created:
                error = event.error or _Error()
                if error.event_id in (None, answer.request_id):
                    answer.refused = str(error.code or error.type or "error")[:64]
                    answer.end(t_ns)

    def _gone(self, error: OSError | None) -> None:
        """The connection is, or will be in a moment."""
        how = "closed" if error is None else "reset"
        answer = self._answer
        if answer is not None and answer.response_bytes:
            outcome = Outcome.TRUNCATED if error is None else Outcome.UPSTREAM_RESET
            self._end(outcome, f"the server {how} the connection within its answer")
        else:
            self._end(Outcome.UPSTREAM_RESET, f"the server {how} the connection without an answer")

    def _end(self, outcome: Outcome, problem: str) -> None:
        self._fail_opening(outcome, problem)
        if self._answer is not None:
            self._answer.fail(outcome, problem)
        self.drop()
