"""A session of OpenAI's Realtime API over WebSocket on the simulated server, with text only.

`SimulatedRealtimeSession` reads the client's events, has the settings and items of the session, and writes
the events of one response at a time. `websocket.py` handles the connection; `server.py` starts a session. The
id of a request is the id of its `response.create` event or, if the client gave none, the id of the response.

Source: OpenAI's Realtime API reference; openai/openai-python types/realtime.
"""

import asyncio
from typing import Any, Final, Literal

import msgspec
from aiohttp import web

from llmtap.json_types import JsonObject
from llmtap.protocol.websocket import Opcode, frame
from llmtap.sim.server.openai import openai_error
from llmtap.sim.server.reception import Reception
from llmtap.sim.server.shapes import BROKEN, Answer, BadRequest, Shape, SimulatedRequest, text_of
from llmtap.sim.server.websocket import Plan, SessionTurn, SimulatedSession

_ITEMS_MAX: Final = 10_000
"""Maximum number of items of a conversation, to limit the memory; further items get an error."""


class Item(msgspec.Struct, omit_defaults=True):
    """An item of a conversation: a message of the user or of the assistant."""

    type: str = "message"
    id: str | None = None
    role: str = "user"
    content: Any = None


class RealtimeSettings(msgspec.Struct):
    """Settings of a session, or of one response. A field of None does not change the setting."""

    instructions: str | None = None
    output_modalities: list[str] | None = None
    max_output_tokens: int | Literal["inf"] | None = None
    conversation: str | None = None
    input: list[Item] | None = None
    """Input that the response uses instead of the items of the conversation."""
    min_tokens: int | None = None
    """`min_tokens`, `ignore_eos` and `seed` are no fields of OpenAI's API, but of other endpoints of vLLM."""
    ignore_eos: bool | None = None
    seed: int | None = None

    def with_changes(self, new: "RealtimeSettings | None") -> "RealtimeSettings":
        """Return a copy with the settings that `new` sets."""
        fields = {name: getattr(new, name, None) for name in self.__struct_fields__}
        return msgspec.structs.replace(self, **{k: v for k, v in fields.items() if v is not None})


class _ClientEvent(msgspec.Struct):
    """An event of the client, of any type."""

    type: str
    event_id: str | None = None
    session: RealtimeSettings | None = None
    item: Item | None = None
    response: RealtimeSettings | None = None


def _read_event(data: str) -> _ClientEvent:
    try:
        event = msgspec.json.decode(data, type=_ClientEvent)
    except msgspec.MsgspecError as exc:
        raise BadRequest(f"invalid event: {exc}") from None
    for settings in (event.session, event.response):
        if settings is not None and (others := set(settings.output_modalities or ()) - {"text"}):
            raise BadRequest(
                f"output_modalities: only 'text' is supported, got {', '.join(sorted(others))!r}"
            )
    return event


class _EventWriter:
    """Makes the WebSocket frames of the events of one session, with ascending event ids."""

    def __init__(self) -> None:
        self._count = 0
        """Number of events so far."""

    def event(self, kind: str, **fields: Any) -> bytes:
        self._count += 1
        event = {"type": kind, "event_id": f"event_sim{self._count}", **fields}
        return frame(msgspec.json.encode(event))

    def delta(self, rest: bytes) -> bytes:
        """Return the frame of an event with a piece of text. `rest`: its JSON after the event's id.

        The JSON is joined from bytes, which is faster: thousands of these events are sent per second.
        """
        self._count += 1
        return frame(
            b'{"type":"response.output_text.delta","event_id":"event_sim%d",%b' % (self._count, rest)
        )

    def error(self, kind: str, code: str, message: str, cause_id: str | None) -> bytes:
        """Return an error event. `cause_id`: id of the client's event that caused it; None: it has no id."""
        error = {"type": kind, "code": code, "message": message, "param": None, "event_id": cause_id}
        return self.event("error", error=error)


class OpenAIRealtimeShape(Shape):
    """Writes one response as WebSocket frames: every event is a message."""

    media_type = ""

    def __init__(self, answer: Answer, events: _EventWriter, conversation: str | None) -> None:
        """`conversation`: id of the conversation to which the response is added; None: it is not added."""
        super().__init__(answer, "resp_sim")
        self.item_id = f"item_sim{answer.number}"
        self._events = events
        self._event = events.event
        self.conversation = conversation
        """Conversation to which the answer is added; None: to none."""
        self._place = {"response_id": self.id, "item_id": self.item_id, "output_index": 0, "content_index": 0}
        """Fields that say to which part of the answer an event belongs."""
        self._place_text = msgspec.json.encode(self._place)[1:-1]
        """JSON of `_place` without its braces, to make many events fast."""

    def _item(self, status: str) -> JsonObject:
        content = [] if status == "in_progress" else [{"type": "output_text", "text": self.sent_text}]
        return {
            "id": self.item_id,
            "object": "realtime.item",
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _item_event(self, kind: str, item: JsonObject) -> bytes:
        """Return the event which reports that the response's item was added or is done, and the same event
        of the conversation, if the response belongs to one."""
        event = self._event(f"response.output_item.{kind}", response_id=self.id, output_index=0, item=item)
        if self.conversation is not None:
            event += self._event(f"conversation.item.{kind}", previous_item_id=None, item=item)
        return event

    def _response(self, status: str, details: JsonObject | None = None) -> JsonObject:
        sent_tokens, prompt_tokens, ended = (
            self._answer.sent_tokens[0],
            self._answer.prompt_tokens,
            status != "in_progress",
        )
        usage = {
            "total_tokens": prompt_tokens + sent_tokens,
            "input_tokens": prompt_tokens,
            "output_tokens": sent_tokens,
            "input_token_details": {
                "cached_tokens": self._answer.cached_tokens or 0,
                "text_tokens": prompt_tokens,
                "audio_tokens": 0,
                "image_tokens": 0,
            },
            "output_token_details": {"text_tokens": sent_tokens, "audio_tokens": 0},
        }
        item = self._item("completed" if status == "completed" else "incomplete")
        return {
            "object": "realtime.response",
            "id": self.id,
            "status": status,
            "status_details": details,
            "output": [item] if ended and sent_tokens else [],
            "conversation_id": self.conversation,
            "output_modalities": ["text"],
            "max_output_tokens": self._request.max_tokens or "inf",
            "usage": usage if ended else None,
            "metadata": None,
        }

    def _done_event(self, status: str, details: JsonObject | None = None) -> bytes:
        return self._event("response.done", response=self._response(status, details))

    def opening(self) -> bytes:
        events = self._event("response.created", response=self._response("in_progress"))
        if not self._choice.pieces:
            return events
        part = {"type": "text", "text": ""}
        events += self._item_event("added", self._item("in_progress"))
        return events + self._event("response.content_part.added", **self._place, part=part)

    def chunk(self, index: int, first: int, last: int, final: bool) -> bytes:
        text = self._take(index, first, last)
        events = b""
        if last > first:
            events = self._events.delta(b'%b,"delta":%b}' % (self._place_text, msgspec.json.encode(text)))
        if final and last:
            part = {"type": "text", "text": self.sent_text}
            events += self._event("response.output_text.done", **self._place, text=self.sent_text)
            events += self._event("response.content_part.done", **self._place, part=part)
            events += self._item_event("done", self._item(self._status()[0]))
        return events

    def ending(self) -> bytes:
        status, reason = self._status()
        return self._done_event(status, {"type": "incomplete", "reason": reason} if reason else None)

    def cancelled_events(self) -> bytes:
        """Return the final events of a response that the client cancelled."""
        return self._done_event("cancelled", {"type": "cancelled", "reason": "client_cancelled"})

    def keepalive(self) -> bytes:
        return frame(b"", Opcode.PING)

    def failure(self) -> bytes:
        events = self._events.error("server_error", "server_error", BROKEN, None)
        error = {"type": "server_error", "code": "server_error"}
        return events + self._done_event("failed", {"type": "failed", "error": error})


class SimulatedRealtimeSession(SimulatedSession):
    """A session of the Realtime API."""

    path = "/v1/realtime"
    protocols = ("realtime",)

    def __init__(self, reception: Reception, request: web.Request, number: int) -> None:
        super().__init__(reception, request, number)
        self._model = request.query.get("model", reception.options.model)
        self._events = _EventWriter()
        self._settings = RealtimeSettings()
        """Settings of the session, which each response can change for itself."""
        self._items: list[Item] = []
        """Messages of the conversation so far."""

    def _send_greeting(self) -> None:
        self._send_event("session.created", session=self._session_json())

    def _send_event(self, kind: str, **fields: Any) -> None:
        self._write(self._events.event(kind, **fields))

    def _session_json(self) -> JsonObject:
        return {
            "type": "realtime",
            "object": "realtime.session",
            "id": f"sess_sim{self._number}",
            "model": self._model,
            "output_modalities": ["text"],
            "instructions": self._settings.instructions or "",
            "max_output_tokens": self._settings.max_output_tokens or "inf",
        }

    def _receive(self, data: str | bytes, now_ns: int) -> None:
        event = _ClientEvent("")
        try:
            if isinstance(data, bytes):
                raise BadRequest("expected a text message with a JSON object, got a binary message")
            event = _read_event(data)
            match event.type:
                case "session.update":
                    self._settings = self._settings.with_changes(event.session)
                    self._send_event("session.updated", session=self._session_json())
                case "conversation.item.create":
                    self._add_item(event.item)
                case "response.create":
                    if self._running_response() is not None:
                        raise BadRequest(
                            "response.create: a response is running; wait for its end, or cancel it"
                        )
                    self._queue_response(event, now_ns)
                case "response.cancel":
                    if (running := self._running_response()) is None or running[1].sender is None:
                        raise BadRequest("response.cancel: no response is running that can be cancelled")
                    running[1].is_cancelled = True
                    running[0].cancel()
                case kind:
                    raise BadRequest(f"type: expected an event such as response.create, got {kind!r}")
        except ValueError as exc:
            self._refuse(event, 400, BadRequest.code, str(exc))

    def _running_response(self) -> "tuple[asyncio.Task[None], SessionTurn] | None":
        """Return the response that has not ended, with its task; None if there is none."""
        for task, turn in self._running.items():
            if turn.sender is None or not turn.sender.done.done():
                return task, turn
        return None

    def _add_item(self, item: Item | None) -> None:
        if item is None:
            raise BadRequest("conversation.item.create: the field 'item' is missing")
        if len(self._items) >= _ITEMS_MAX:
            raise BadRequest(f"the conversation has {_ITEMS_MAX} items, the maximum: open a new session")
        previous = self._items[-1].id if self._items else None
        if item.id is None:
            item.id = f"item_user{len(self._items) + 1}"
        self._items.append(item)
        shown = {**msgspec.to_builtins(item), "type": item.type, "object": "realtime.item", "role": item.role}
        shown["status"] = "completed"
        for kind in ("added", "done"):
            self._send_event(f"conversation.item.{kind}", previous_item_id=previous, item=shown)

    def _plan(self, event: _ClientEvent) -> Plan:
        settings = self._settings.with_changes(event.response)
        items = self._items if settings.input is None else settings.input
        limit = settings.max_output_tokens
        texts = (settings.instructions, *(text_of(item.content) for item in items))
        parsed = SimulatedRequest(
            model=self._model,
            stream=True,
            prompts=("\n".join(filter(None, texts)),),
            max_tokens=limit if isinstance(limit, int) else None,
            min_tokens=settings.min_tokens or 0,
            ignore_eos=bool(settings.ignore_eos),
            seed=settings.seed,
            include_usage=True,
        )
        conversation = None if settings.conversation == "none" else "conv_sim"
        return parsed, lambda answer: OpenAIRealtimeShape(answer, self._events, conversation), event.event_id

    def _refuse(self, event: _ClientEvent, status: int, code: str, message: str) -> None:
        kind = openai_error(status, code, message)["error"]["type"]
        self._write(self._events.error(kind, code, message, event.event_id))

    def _store_response(self, turn: SessionTurn) -> None:
        shape = turn.job.shape
        assert isinstance(shape, OpenAIRealtimeShape)
        if shape.conversation is not None and shape.sent_text:
            parts = [{"type": "output_text", "text": shape.sent_text}]
            self._items.append(Item(id=shape.item_id, role="assistant", content=parts))

    def _write_cancelled_end(self, turn: SessionTurn) -> None:
        assert isinstance(turn.job.shape, OpenAIRealtimeShape)
        self._write(turn.job.shape.cancelled_events())
