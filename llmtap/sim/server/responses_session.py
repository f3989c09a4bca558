"""A session of OpenAI's Responses API over WebSocket on the simulated server: each event is a message.

Reads the client's events (`response.create`, `response.steer`) and writes the events of the responses. The
connection itself is handled by `websocket.py`; `server.py` starts a session.

Requests with the same `stream_id`, or without one, are answered one after the other; different streams at the
same time. A `previous_response_id` puts that response and its input before the new input. Of a session's
responses the newest 64 are remembered. A `response.steer` ends the running response that it names as
incomplete, and its continuation begins. A client cancels by closing the session.

Source: developers.openai.com api/docs/guides/websocket-mode, steering; openai/openai-python
types/responses/responses_client_event.py, responses_server_event.py.
"""

from collections import OrderedDict
from dataclasses import replace
from typing import Any, Final

import msgspec
from aiohttp import web

from llmtap.protocol.websocket import Opcode, frame
from llmtap.sim.server.reception import Reception
from llmtap.sim.server.shapes.openai import OpenAIResponsesShape, openai_error, read_responses
from llmtap.sim.server.shapes.shape import Answer, BadRequest, decode
from llmtap.sim.server.websocket import Plan, SessionTurn, SimulatedSession

_REMEMBERED_MAX: Final = 64


class _ClientEvent(msgspec.Struct):
    type: str
    stream_id: str | None = None
    previous_response_id: str | None = None
    input: Any = None
    body: bytes = b""
    """The whole message, which has the fields of a request."""


class _UnknownResponse(BadRequest):
    code = "previous_response_not_found"


class _MessagesShape(OpenAIResponsesShape):
    """Writes one response as frames."""

    def __init__(self, answer: Answer, lane: dict[str, str]) -> None:
        super().__init__(answer)
        self._lane = lane

    def _sent_as(self, event: dict[str, Any], kind: str) -> bytes:
        return frame(msgspec.json.encode(event | self._lane))

    @property
    def begun(self) -> bool:
        return self._sequence > 0

    def accepted(self, name: str) -> bytes:
        """Return the receipt of a steering."""
        return self._event("steer.accepted", steer={"id": name, "previous_response_id": self.id})

    def keepalive(self) -> bytes:
        return frame(b"", Opcode.PING)


class SimulatedResponsesSession(SimulatedSession):
    path = "/v1/responses"

    def __init__(self, reception: Reception, request: web.Request, number: int) -> None:
        super().__init__(reception, request, number)
        self._texts: OrderedDict[str, str] = OrderedDict()
        """Input and output of responses by id."""

    def _receive(self, data: str | bytes, now_ns: int) -> None:
        event = _ClientEvent("")
        try:
            if isinstance(data, bytes):
                raise BadRequest("an event is a text message")
            event = decode(data.encode(), _ClientEvent)
            if event.type == "response.steer":
                self._steer(event)
                return
            if event.type != "response.create":
                raise BadRequest(f"there is no event {event.type!r} for a client to send")
            event.body = data.encode()
            self._ask(event, now_ns, event.stream_id or "")
        except ValueError as exc:
            self._refuse(event, 400, BadRequest.code, str(exc))

    def _steer(self, event: _ClientEvent) -> None:
        """Queue the input as the continuation of the running response, and end that one here."""
        named = event.previous_response_id
        found = next((r for r in self._running.items() if _is_under_way(r[1], named)), None)
        if found is None:
            steer = {"previous_response_id": named, "input": event.input}
            told = {"type": "response.steer.failed", "sequence_number": 0, "steer": steer}
            error = openai_error(400, BadRequest.code, f"there is no response {named!r} under way")
            self._write(frame(msgspec.json.encode(told | error)))
            return
        task, turn = found
        assert isinstance(turn.job.shape, _MessagesShape)
        continued = decode(turn.event.body, dict) | {"input": event.input}
        more = _ClientEvent("response.create", turn.event.stream_id, named)
        more.body = msgspec.json.encode(continued)
        read_responses(more.body)  # before anything has happened
        self._write(turn.job.shape.accepted(f"steer_sim{turn.job.answer.number}"))
        self._lanes[turn.event.stream_id or ""].insert(1, more)
        turn.cancelled = True
        task.cancel()

    def _cut(self, turn: SessionTurn) -> None:
        assert isinstance(turn.job.shape, _MessagesShape)
        self._write(turn.job.shape.steered())
        self._remember(turn)

    def _plan(self, event: _ClientEvent) -> Plan:
        asked, before = read_responses(event.body), event.previous_response_id
        if before is not None:
            if before not in self._texts:
                raise _UnknownResponse(f"there is no response {before!r} in this session")
            asked = replace(asked, prompts=(f"{self._texts[before]}\n{asked.prompts[0]}",))
        return replace(asked, stream=True), lambda answer: _MessagesShape(answer, _lane(event)), None

    def _refuse(self, event: _ClientEvent, status: int, code: str, message: str) -> None:
        error = {"type": "error", "status": status, **openai_error(status, code, message), **_lane(event)}
        self._write(frame(msgspec.json.encode(error)))

    def _remember(self, turn: SessionTurn) -> None:
        shape = turn.job.shape
        assert isinstance(shape, _MessagesShape)
        self._texts[shape.id] = f"{turn.job.answer.asked.prompts[0]}\n{shape.said}"
        if len(self._texts) > _REMEMBERED_MAX:
            self._texts.popitem(last=False)


def _is_under_way(turn: SessionTurn, name: str | None) -> bool:
    shape, sender = turn.job.shape, turn.sender
    running = sender is not None and not sender.done.done() and not turn.cancelled
    return running and isinstance(shape, _MessagesShape) and shape.begun and shape.id == name


def _lane(event: _ClientEvent) -> dict[str, str]:
    return {} if event.stream_id is None else {"stream_id": event.stream_id}
