"""A session of OpenAI's Responses API over WebSocket on the simulated server: each event is a message.

Reads the client's events (`response.create`) and writes the events of the responses. The connection itself is
handled by `websocket.py`; `server.py` starts a session.

Requests with the same `stream_id`, or without one, are answered one after the other; different streams at the
same time. A `previous_response_id` puts that response and its input before the new input. Of a session's
responses the newest 64 are remembered. A client cancels by closing the session.

Source: developers.openai.com api/docs/guides/websocket-mode; openai/openai-python
types/responses/responses_client_event.py, responses_server_event.py.
"""

from collections import OrderedDict
from dataclasses import replace
from typing import Any, Final

import msgspec
from aiohttp import web

from llmtap.protocol.websocket import Opcode, frame
from llmtap.sim.server.openai import OpenAIResponsesShape, openai_error, read_responses
from llmtap.sim.server.reception import Reception
from llmtap.sim.server.shapes import Answer, BadRequest, decode
from llmtap.sim.server.websocket import Plan, SessionTurn, SimulatedSession

_REMEMBERED_MAX: Final = 64


class _ClientEvent(msgspec.Struct):
    type: str
    stream_id: str | None = None
    previous_response_id: str | None = None
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
            if event.type != "response.create":
                raise BadRequest(f"there is no event {event.type!r} for a client to send")
            event.body = data.encode()
            self._ask(event, now_ns, event.stream_id or "")
        except ValueError as exc:
            self._refuse(event, 400, BadRequest.code, str(exc))

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


def _lane(event: _ClientEvent) -> dict[str, str]:
    return {} if event.stream_id is None else {"stream_id": event.stream_id}
