"""WebSocket session of the simulated server in which a client asks for responses: the base of both APIs.

`realtime.py` and `responses_session.py` derive from `SimulatedSession` and say what a client's message means.
Responses of one lane (one stream of requests) are sent one after the other. aiohttp opens the session, reads
its messages and answers pings. The `ResponseSender` of `sender.py` writes what is due directly to the
connection, between whole frames of aiohttp's; the derived classes make its frames.

The client's headers (`x-sim-*`) hold for every response of the session. Faults: a rejected request gets an
error event and no response; `reset` and `truncate` end the session as they end a stream, and `unfinished`
closes it properly in the middle of a response.

Source: RFC 6455.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final

from aiohttp import WSCloseCode, WSMsgType, web

from llmtap.sim.server.openai import openai_error
from llmtap.sim.server.reception import BUSY, FILTERED, Reception
from llmtap.sim.server.sender import ResponseSender, ServerJob
from llmtap.sim.server.shapes import Answer, BadRequest, Shape, SimulatedRequest

_MESSAGE_BYTES_MAX: Final = 64 << 20
_TURNS_MAX: Final = 64
"""Responses of one session that run or wait; as many as llmtap measures in one."""

Plan = tuple[SimulatedRequest, Callable[[Answer], Shape], str | None]
"""A request, the shape of its answer, and its id if the client gave one."""


@dataclass(slots=True, eq=False)
class SessionTurn:
    """A response that a client asked for and that has begun."""

    event: Any
    job: ServerJob
    sender: ResponseSender | None = None
    cancelled: bool = False


class SimulatedSession:
    """Base of both APIs over WebSocket; `event` is what a subclass makes of a client's message."""

    path: ClassVar[str]
    protocols: ClassVar[tuple[str, ...]] = ()

    def __init__(self, reception: Reception, request: web.Request, number: int) -> None:
        self._reception = reception
        self._request = request
        self._number = number
        self._socket = web.WebSocketResponse(
            compress=False, protocols=self.protocols, max_msg_size=_MESSAGE_BYTES_MAX
        )
        self._transport: asyncio.Transport | None = None
        self._lanes: dict[str, deque[Any]] = {}
        """Events that ask for a response; the first of each lane has begun."""
        self._running: dict[asyncio.Task[None], SessionTurn] = {}
        self._over = False

    async def run(self) -> web.StreamResponse:
        socket = self._socket
        if not socket.can_prepare(self._request).ok:
            error = openai_error(426, "upgrade_required", f"GET {self.path} is for a WebSocket")
            return web.json_response(error, status=426, headers={"Upgrade": "websocket"})
        await socket.prepare(self._request)
        self._transport = self._request.transport
        self._greet()
        try:
            while (message := await socket.receive()).type in (WSMsgType.TEXT, WSMsgType.BINARY):
                self._receive(message.data, self._reception.clock.mono_ns())
        finally:
            self._over = True
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
        return socket

    async def close(self) -> None:
        await self._socket.close(code=WSCloseCode.GOING_AWAY)

    def _greet(self) -> None:
        """Send what the server sends first, if anything."""

    def _receive(self, data: str | bytes, now_ns: int) -> None:
        """Handle one message of the client."""
        raise NotImplementedError

    def _plan(self, event: Any) -> Plan:
        """Return what an event asks for, now that all before it on its lane have ended. Raises ValueError."""
        raise NotImplementedError

    def _refuse(self, event: Any, status: int, code: str, message: str) -> None:
        """Send an error in place of the response that an event asks for."""
        raise NotImplementedError

    def _remember(self, turn: SessionTurn) -> None:
        """Keep what later requests may refer to."""

    def _cut(self, turn: SessionTurn) -> None:
        """Write the end of a response that a message of the client cancelled."""

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _ask(self, event: Any, now_ns: int, lane: str = "") -> None:
        """Begin the response that an event asks for, once those before it on its lane have ended."""
        if sum(map(len, self._lanes.values())) >= _TURNS_MAX:
            raise BadRequest(f"a session has at most {_TURNS_MAX} responses that run or wait")
        waiting = self._lanes.setdefault(lane, deque())
        waiting.append(event)
        if len(waiting) == 1:
            self._next(lane, now_ns)

    def _next(self, lane: str, now_ns: int) -> None:
        waiting = self._lanes[lane]
        while waiting and not self._over:
            try:
                self._begin(waiting[0], lane, now_ns)
            except ValueError as exc:
                self._refuse(waiting.popleft(), 400, getattr(exc, "code", BadRequest.code), str(exc))
            else:
                return
        del self._lanes[lane]

    def _begin(self, event: Any, lane: str, now_ns: int) -> None:
        asked, shape_of, request_id = self._plan(event)
        job = self._reception.take(
            asked, shape_of, path=self.path, headers=self._request.headers, accepted_ns=now_ns,
            request_id=request_id,
        )  # fmt: skip
        if job.door is None:
            self._reception.ask(job)  # at once: the engine may be further when a task runs
        turn = SessionTurn(event, job)
        task = asyncio.create_task(self._respond(turn))
        self._running[task] = turn
        # A task that is cancelled before it begins does not reach its own end.
        task.add_done_callback(partial(self._ended, lane))

    def _ended(self, lane: str, task: "asyncio.Task[None]") -> None:
        self._reception.end(self._running.pop(task).job)
        self._lanes[lane].popleft()
        self._next(lane, self._reception.clock.mono_ns())

    async def _respond(self, turn: SessionTurn) -> None:
        try:
            await self._answer(turn)
        except asyncio.CancelledError:
            if not turn.cancelled:
                raise
            self._cut(turn)

    async def _answer(self, turn: SessionTurn) -> None:
        job, reception = turn.job, self._reception
        if (status := job.door) is not None:
            if status == 400:
                await reception.filtered(job)
            self._turn_away(turn, status)
            return
        sender = turn.sender = reception.sender(job)
        try:
            if not await reception.begins(job, sender):
                self._turn_away(turn, 503)
                return
            if self._transport is not None:
                sender.start(self._transport, framed=False)
                await asyncio.shield(sender.done)
        finally:
            sender.abandon("cancelled" if turn.cancelled else None)
        self._remember(turn)
        if job.truth.outcome == "unfinished":
            await self._socket.close()

    def _turn_away(self, turn: SessionTurn, status: int) -> None:
        turn.job.turned_away(status)
        self._refuse(turn.event, status, *BUSY.get(status, ("content_filter", FILTERED)))
