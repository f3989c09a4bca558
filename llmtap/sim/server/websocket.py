"""WebSocket sessions of the simulated server in which a client requests responses.

`SimulatedSession` is the base class of both APIs, which parse the client's messages: OpenAI's Responses API
(here) and Realtime (`realtime.py`). A lane is one stream of requests; the responses of a lane are sent one
after the other. aiohttp opens the session, reads its messages and answers pings. The `ResponseSender` of
`sender.py` writes due frames directly to the connection, between whole frames of aiohttp; the derived classes
make these frames.

The client's headers (`x-sim-*`) apply to every response of the session. Faults: a rejected request gets an
error event and no response; `reset` and `truncate` end the session as they end a stream, and `unfinished`
closes it properly in the middle of a response.

In a Responses session, requests with the same `stream_id` are one lane, and so are all requests without one.
A `previous_response_id` puts the earlier response and its input before the new input; the newest 64 responses
of a session are remembered. A client cancels by closing the session.

Source: RFC 6455; developers.openai.com api/docs/guides/websocket-mode; openai/openai-python
types/responses/responses_client_event.py, responses_server_event.py.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Final

import msgspec
from aiohttp import WSCloseCode, WSMsgType, web

from llmtap.json_types import JsonObject
from llmtap.protocol.websocket import Opcode, frame
from llmtap.sim.server.openai import OpenAIResponsesShape, openai_error, read_responses
from llmtap.sim.server.reception import BUSY, FILTERED, Reception
from llmtap.sim.server.sender import ResponseSender, ServerJob
from llmtap.sim.server.shapes import Answer, BadRequest, Shape, SimulatedRequest, decode

_MESSAGE_BYTES_MAX: Final = 64 << 20
_TURNS_MAX: Final = 64
"""Maximum number of responses of a session that run or wait; llmtap can measure the same number."""

Plan = tuple[SimulatedRequest, Callable[[Answer], Shape], str | None]
"""A request, the shape of its answer, and its id if the client gave one."""


@dataclass(slots=True, eq=False)
class SessionTurn:
    """A response in progress."""

    event: Any
    job: ServerJob
    sender: ResponseSender | None = None
    cancelled: bool = False


class SimulatedSession:
    """One WebSocket session of a client; base class for the Realtime and the Responses API.

    Parameter `event` of its methods: a message of the client, as the subclass has parsed it.
    """

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
        """Events that request a response, by lane. The response to the first event of a lane is in
        progress."""
        self._running: dict[asyncio.Task[None], SessionTurn] = {}
        self._is_over = False

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
            self._is_over = True
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
        return socket

    async def close(self) -> None:
        await self._socket.close(code=WSCloseCode.GOING_AWAY)

    def _greet(self) -> None:
        """Send the server's first event, if any."""

    def _receive(self, data: str | bytes, now_ns: int) -> None:
        """Handle one message of the client."""
        raise NotImplementedError

    def _plan(self, event: Any) -> Plan:
        """Return the request of an event. It is called when all earlier responses of the lane have ended.

        Raises ValueError for an invalid request.
        """
        raise NotImplementedError

    def _refuse(self, event: Any, status: int, code: str, message: str) -> None:
        """Send an error instead of the response that an event requests."""
        raise NotImplementedError

    def _remember(self, turn: SessionTurn) -> None:
        """Store a response, because later requests may refer to it."""

    def _end_cancelled(self, turn: SessionTurn) -> None:
        """Write the end of a response that a message of the client cancelled."""

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _queue_response(self, event: Any, now_ns: int, lane: str = "") -> None:
        """Queue the response that an event requests. It begins when all earlier responses of
        the lane have ended."""
        if sum(map(len, self._lanes.values())) >= _TURNS_MAX:
            raise BadRequest(
                f"a session has at most {_TURNS_MAX} responses that run or wait; wait until one has ended"
            )
        waiting = self._lanes.setdefault(lane, deque())
        waiting.append(event)
        if len(waiting) == 1:
            self._begin_next(lane, now_ns)

    def _begin_next(self, lane: str, now_ns: int) -> None:
        waiting = self._lanes[lane]
        while waiting and not self._is_over:
            try:
                self._begin(waiting[0], lane, now_ns)
            except ValueError as exc:
                self._refuse(waiting.popleft(), 400, getattr(exc, "code", BadRequest.code), str(exc))
            else:
                return
        del self._lanes[lane]

    def _begin(self, event: Any, lane: str, now_ns: int) -> None:
        parsed, shape_of, request_id = self._plan(event)
        job = self._reception.accept(
            parsed,
            shape_of,
            path=self.path,
            headers=self._request.headers,
            accepted_ns=now_ns,
            request_id=request_id,
        )
        if job.rejection_status is None:
            self._reception.submit(
                job
            )  # Submit here: the task runs later, when the engine may be past this time.
        turn = SessionTurn(event, job)
        task = asyncio.create_task(self._respond(turn))
        self._running[task] = turn
        # Use a callback: a task that is cancelled before it begins would not run code at its end.
        task.add_done_callback(partial(self._on_ended, lane))

    def _on_ended(self, lane: str, task: "asyncio.Task[None]") -> None:
        self._reception.end(self._running.pop(task).job)
        self._lanes[lane].popleft()
        self._begin_next(lane, self._reception.clock.mono_ns())

    async def _respond(self, turn: SessionTurn) -> None:
        try:
            await self._answer(turn)
        except asyncio.CancelledError:
            if not turn.cancelled:
                raise
            self._end_cancelled(turn)

    async def _answer(self, turn: SessionTurn) -> None:
        job, reception = turn.job, self._reception
        if (status := job.rejection_status) is not None:
            if status == 400:
                await reception.wait_for_input_filter(job)
            self._reject(turn, status)
            return
        sender = turn.sender = reception.make_sender(job)
        try:
            if not await reception.wait_to_begin(job, sender):
                self._reject(turn, 503)
                return
            if self._transport is not None:
                sender.start(self._transport, framed=False)
                await asyncio.shield(sender.done)
        finally:
            sender.abandon("cancelled" if turn.cancelled else None)
        self._remember(turn)
        if job.truth.outcome == "unfinished":
            await self._socket.close()

    def _reject(self, turn: SessionTurn, status: int) -> None:
        turn.job.set_rejected(status)
        self._refuse(turn.event, status, *BUSY.get(status, ("content_filter", FILTERED)))


# ---------------------------------------------------------------- Responses

_REMEMBERED_MAX: Final = 64


class _ClientEvent(msgspec.Struct):
    type: str
    stream_id: str | None = None
    previous_response_id: str | None = None
    body: bytes = b""
    """The whole message of the client, which has the fields of a request."""


class _UnknownResponse(BadRequest):
    code = "previous_response_not_found"


class _MessagesShape(OpenAIResponsesShape):
    """Writes one response as frames."""

    def __init__(self, answer: Answer, lane: dict[str, str]) -> None:
        super().__init__(answer)
        self._lane = lane

    def _encode_event(self, event: JsonObject, kind: str) -> bytes:
        return frame(msgspec.json.encode(event | self._lane))

    def keepalive(self) -> bytes:
        return frame(b"", Opcode.PING)


class SimulatedResponsesSession(SimulatedSession):
    path = "/v1/responses"

    def __init__(self, reception: Reception, request: web.Request, number: int) -> None:
        super().__init__(reception, request, number)
        self._texts: OrderedDict[str, str] = OrderedDict()
        """Text of the input and output of each response, by the id of the response."""

    def _receive(self, data: str | bytes, now_ns: int) -> None:
        event = _ClientEvent("")
        try:
            if isinstance(data, bytes):
                raise BadRequest("expected a text message, got a binary one")
            event = decode(data.encode(), _ClientEvent)
            if event.type != "response.create":
                raise BadRequest(f"unknown client event {event.type!r}")
            event.body = data.encode()
            self._queue_response(event, now_ns, event.stream_id or "")
        except ValueError as exc:
            self._refuse(event, 400, BadRequest.code, str(exc))

    def _plan(self, event: _ClientEvent) -> Plan:
        plan, before = read_responses(event.body), event.previous_response_id
        if before is not None:
            if before not in self._texts:
                raise _UnknownResponse(f"there is no response {before!r} in this session")
            plan = replace(plan, prompts=(f"{self._texts[before]}\n{plan.prompts[0]}",))
        return replace(plan, stream=True), lambda answer: _MessagesShape(answer, _lane_field(event)), None

    def _refuse(self, event: _ClientEvent, status: int, code: str, message: str) -> None:
        error = {
            "type": "error",
            "status": status,
            **openai_error(status, code, message),
            **_lane_field(event),
        }
        self._write(frame(msgspec.json.encode(error)))

    def _remember(self, turn: SessionTurn) -> None:
        shape = turn.job.shape
        assert isinstance(shape, _MessagesShape)
        self._texts[shape.id] = f"{turn.job.answer.request.prompts[0]}\n{shape.sent_text}"
        if len(self._texts) > _REMEMBERED_MAX:
            self._texts.popitem(last=False)


def _lane_field(event: _ClientEvent) -> dict[str, str]:
    return {} if event.stream_id is None else {"stream_id": event.stream_id}
