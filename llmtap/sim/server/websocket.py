"""WebSocket sessions of the simulated server in which a client requests responses.

`SimulatedSession` is the base class of the sessions of two APIs: OpenAI's Responses API
(`SimulatedResponsesSession`) and Realtime API (`realtime.py`). Its subclasses parse the client's messages and
make the frames of responses. A lane is a sequence of requests, whose responses are sent one after the other.
aiohttp opens the session, reads its messages and answers pings. The `ResponseSender` of `sender.py` writes
due frames directly to the connection, between whole frames of aiohttp.

The client's headers (`x-sim-*`) apply to every response of the session. Faults: a rejected request gets an
error event and no response; `reset` and `truncate` end the session in the same way as a stream over HTTP, and
`unfinished` closes the session properly in the middle of a response.

In a Responses session, requests with the same `stream_id` are one lane, and all requests without a
`stream_id` are another lane. With a `previous_response_id`, the input and output of that response are put
before the new input; the newest 64 responses of a session are stored for this. A client cancels by closing
the session.

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
from llmtap.sim.server.openai import OpenAIResponsesShape, openai_error, read_responses_request
from llmtap.sim.server.reception import BUSY, FILTERED, Reception
from llmtap.sim.server.sender import ResponseSender, ServerJob
from llmtap.sim.server.shapes import Answer, BadRequest, Shape, SimulatedRequest, decode

_MESSAGE_BYTES_MAX: Final = 64 << 20
_TURNS_MAX: Final = 64
"""Maximum number of responses of a session that run or wait, as in llmtap; further requests get an error."""

Plan = tuple[SimulatedRequest, Callable[[Answer], Shape], str | None]
"""A request, the function that makes the shape of its answer, and its id if the client gave one."""


@dataclass(slots=True, eq=False)
class SessionTurn:
    """A response in progress, and the client's event that requested it."""

    event: Any
    """Event of the client that requested the response."""
    job: ServerJob
    sender: ResponseSender | None = None
    """Sender of the response; None before it begins."""
    is_cancelled: bool = False
    """Whether a message of the client cancelled the response."""


class SimulatedSession:
    """One WebSocket session of a client: base class for the Realtime and the Responses API.

    The argument `event` of its methods is a message of the client, as parsed by the subclass.
    """

    path: ClassVar[str]
    protocols: ClassVar[tuple[str, ...]] = ()

    def __init__(self, reception: Reception, request: web.Request, number: int) -> None:
        self._reception = reception
        self._request = request
        self._number = number
        """Number of the session in its server, a part of ids."""
        self._socket = web.WebSocketResponse(
            compress=False, protocols=self.protocols, max_msg_size=_MESSAGE_BYTES_MAX
        )
        self._transport: asyncio.Transport | None = None
        self._lanes: dict[str, deque[Any]] = {}
        """Events that request a response, by lane. The response to the first event of a lane is running."""
        self._running: dict[asyncio.Task[None], SessionTurn] = {}
        """Running responses by their tasks."""
        self._is_over = False
        """Whether the session has ended, so that no response begins."""

    async def run(self) -> web.StreamResponse:
        socket = self._socket
        if not socket.can_prepare(self._request).ok:
            error = openai_error(426, "upgrade_required", f"GET {self.path} needs a WebSocket upgrade")
            return web.json_response(error, status=426, headers={"Upgrade": "websocket"})
        await socket.prepare(self._request)
        self._transport = self._request.transport
        self._send_greeting()
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

    def _send_greeting(self) -> None:
        """Send the event with which the server begins a session, if the API has one."""

    def _receive(self, data: str | bytes, now_ns: int) -> None:
        """Handle one message of the client."""
        raise NotImplementedError

    def _plan(self, event: Any) -> Plan:
        """Return the request of an event. It is called when all earlier responses of the lane have ended.

        Raises ValueError if the request is invalid.
        """
        raise NotImplementedError

    def _refuse(self, event: Any, status: int, code: str, message: str) -> None:
        """Send an error instead of the response that an event requests."""
        raise NotImplementedError

    def _store_response(self, turn: SessionTurn) -> None:
        """Store a response that has ended, because later requests can refer to it."""

    def _write_cancelled_end(self, turn: SessionTurn) -> None:
        """Write the last events of a response that a message of the client cancelled."""

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _queue_response(self, event: Any, now_ns: int, lane: str = "") -> None:
        """Queue the response that an event requests, after all earlier responses of the lane."""
        if sum(map(len, self._lanes.values())) >= _TURNS_MAX:
            raise BadRequest(
                f"{_TURNS_MAX} responses run or wait, the maximum of a session; wait until one has ended"
            )
        waiting = self._lanes.setdefault(lane, deque())
        waiting.append(event)
        if len(waiting) == 1:
            self._begin_next(lane, now_ns)

    def _begin_next(self, lane: str, now_ns: int) -> None:
        """Begin the next waiting response of a lane."""
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
        """Accept a request that the client sent as a message. `lane`: requests of one lane run one after the
        other."""
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
            # Submit here, not in the task: it runs later, when the engine's time can already be past
            # `now_ns`.
            self._reception.submit(job)
        turn = SessionTurn(event, job)
        task = asyncio.create_task(self._respond(turn))
        self._running[task] = turn
        # Use a callback instead of `finally` in the task: a task that is cancelled before it begins runs no
        # code.
        task.add_done_callback(partial(self._on_ended, lane))

    def _on_ended(self, lane: str, task: "asyncio.Task[None]") -> None:
        self._reception.end(self._running.pop(task).job)
        self._lanes[lane].popleft()
        self._begin_next(lane, self._reception.clock.mono_ns())

    async def _respond(self, turn: SessionTurn) -> None:
        """Send one response, also if it is cancelled or fails."""
        try:
            await self._answer(turn)
        except asyncio.CancelledError:
            if not turn.is_cancelled:
                raise
            self._write_cancelled_end(turn)

    async def _answer(self, turn: SessionTurn) -> None:
        """Send the answer of one turn."""
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
            sender.abandon("cancelled" if turn.is_cancelled else None)
        self._store_response(turn)
        if job.truth.outcome == "unfinished":
            await self._socket.close()

    def _reject(self, turn: SessionTurn, status: int) -> None:
        turn.job.set_rejected(status)
        self._refuse(turn.event, status, *BUSY.get(status, ("content_filter", FILTERED)))


# ---------------------------------------------------------------- session of the Responses API

_STORED_MAX: Final = 64
"""Maximum number of responses of a session stored for `previous_response_id`; the oldest are removed."""


class _ClientEvent(msgspec.Struct):
    """An event of the client, of any type."""

    type: str
    stream_id: str | None = None
    previous_response_id: str | None = None
    body: bytes = b""
    """The whole message of the client, which has the fields of a request."""


class _UnknownResponse(BadRequest):
    code = "previous_response_not_found"


class _MessagesShape(OpenAIResponsesShape):
    """Writes one response as WebSocket frames."""

    def __init__(self, answer: Answer, lane_field: dict[str, str]) -> None:
        """`lane_field`: field `stream_id` of each event, if the request has one."""
        super().__init__(answer)
        self._lane_field = lane_field
        """The field `stream_id`, if the client's event has it."""

    def _encode_event(self, event: JsonObject, kind: str) -> bytes:
        return frame(msgspec.json.encode(event | self._lane_field))

    def keepalive(self) -> bytes:
        return frame(b"", Opcode.PING)


class SimulatedResponsesSession(SimulatedSession):
    """A session of the Responses API."""

    path = "/v1/responses"

    def __init__(self, reception: Reception, request: web.Request, number: int) -> None:
        super().__init__(reception, request, number)
        self._texts: OrderedDict[str, str] = OrderedDict()
        """Text of the input and output of each stored response, by the id of the response."""

    def _receive(self, data: str | bytes, now_ns: int) -> None:
        event = _ClientEvent("")
        try:
            if isinstance(data, bytes):
                raise BadRequest("expected a text message with a JSON object, got a binary message")
            event = decode(data.encode(), _ClientEvent)
            if event.type != "response.create":
                raise BadRequest(f"type: expected 'response.create', got {event.type!r}")
            event.body = data.encode()
            self._queue_response(event, now_ns, event.stream_id or "")
        except ValueError as exc:
            self._refuse(event, 400, BadRequest.code, str(exc))

    def _plan(self, event: _ClientEvent) -> Plan:
        """Return the request of an event; its prompt begins with the response that it continues."""
        request, previous_id = read_responses_request(event.body), event.previous_response_id
        if previous_id is not None:
            if previous_id not in self._texts:
                raise _UnknownResponse(
                    f"previous_response_id: {previous_id!r} is none of the last {_STORED_MAX} responses: send"
                    " the whole conversation"
                )
            request = replace(request, prompts=(f"{self._texts[previous_id]}\n{request.prompts[0]}",))
        return replace(request, stream=True), lambda answer: _MessagesShape(answer, _lane_field(event)), None

    def _refuse(self, event: _ClientEvent, status: int, code: str, message: str) -> None:
        error = {
            "type": "error",
            "status": status,
            **openai_error(status, code, message),
            **_lane_field(event),
        }
        self._write(frame(msgspec.json.encode(error)))

    def _store_response(self, turn: SessionTurn) -> None:
        shape = turn.job.shape
        assert isinstance(shape, _MessagesShape)
        self._texts[shape.id] = f"{turn.job.answer.request.prompts[0]}\n{shape.sent_text}"
        if len(self._texts) > _STORED_MAX:
            self._texts.popitem(last=False)


def _lane_field(event: _ClientEvent) -> dict[str, str]:
    return {} if event.stream_id is None else {"stream_id": event.stream_id}
