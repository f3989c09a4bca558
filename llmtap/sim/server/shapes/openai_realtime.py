"""OpenAI's Realtime, as far as it is text: what a client asks in a session, and the events of one response.

Every event is a message of a WebSocket, and what a shape makes are the bytes of its frames.

Source: OpenAI's Realtime API reference; openai/openai-python types/realtime; RFC 6455.
"""

from typing import Any, Literal

import msgspec

from llmtap.protocol.websocket import Opcode, frame
from llmtap.sim.server.shapes.shape import Answer, BadRequest, text_of

__all__ = ["ClientEvent", "Events", "Item", "OpenAIRealtimeShape", "RealtimeSettings", "read_event"]


class Item(msgspec.Struct, omit_defaults=True):
    """Something said in a conversation."""

    type: str = "message"
    id: str | None = None
    role: str = "user"
    content: Any = None

    @property
    def text(self) -> str:
        return text_of(self.content)


class RealtimeSettings(msgspec.Struct):
    """Of a session, or of one response. None: as before."""

    instructions: str | None = None
    output_modalities: list[str] | None = None
    max_output_tokens: int | Literal["inf"] | None = None
    conversation: str | None = None
    input: list[Item] | None = None
    """In place of the conversation."""
    min_tokens: int | None = None
    """This and the next two are not OpenAI's: what vLLM takes elsewhere."""
    ignore_eos: bool | None = None
    seed: int | None = None


class ClientEvent(msgspec.Struct):
    """What a client sends."""

    type: str
    event_id: str | None = None
    session: RealtimeSettings | None = None
    item: Item | None = None
    response: RealtimeSettings | None = None


def read_event(data: str) -> ClientEvent:
    """A message of a client. Raises BadRequest."""
    try:
        event = msgspec.json.decode(data, type=ClientEvent)
    except msgspec.MsgspecError as exc:
        raise BadRequest(f"the event does not fit: {exc}") from None
    for settings in (event.session, event.response):
        if settings is not None and set(settings.output_modalities or ()) - {"text"}:
            raise BadRequest("output_modalities: this engine only writes; it can be text")
    return event


class Events:
    """The events of one session, which count up."""

    def __init__(self) -> None:
        self._count = 0

    def event(self, kind: str, **fields: Any) -> bytes:
        """The frame of an event."""
        self._count += 1
        event = {"type": kind, "event_id": f"event_sim{self._count}", **fields}
        return frame(msgspec.json.encode(event))

    def delta(self, rest: bytes) -> bytes:
        """The frame of a piece of text, of which there are thousands a second: `rest` is what stands behind
        the id in its JSON."""
        self._count += 1
        return frame(
            b'{"type":"response.output_text.delta","event_id":"event_sim%d",%b' % (self._count, rest)
        )

    def error(self, kind: str, code: str, message: str, about: str | None) -> bytes:
        """`about`: the client's event that it answers, if that had an id."""
        error = {"type": kind, "code": code, "message": message, "param": None, "event_id": about}
        return self.event("error", error=error)


class OpenAIRealtimeShape:
    """Writes one response, which has one choice."""

    media_type = ""

    def __init__(self, answer: Answer, events: Events, conversation: str | None) -> None:
        """`conversation`: what it becomes part of; None if nothing."""
        self.id = f"resp_sim{answer.number}"
        self.item_id = f"item_sim{answer.number}"
        self._answer = answer
        self._choice = answer.choices[0]
        self._event = events.event
        self._delta = events.delta
        self._error = events.error
        self._conversation = conversation
        self._place = {
            "response_id": self.id, "item_id": self.item_id, "output_index": 0, "content_index": 0,
        }  # fmt: skip
        self._place_text = msgspec.json.encode(self._place)[1:-1]

    @property
    def said(self) -> str:
        """The text as far as it was sent."""
        return "".join(self._choice.pieces[: self._answer.sent[0]])

    def _item(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [{"type": "output_text", "text": self.said}]
        return {
            "id": self.item_id, "object": "realtime.item", "type": "message", "status": status,
            "role": "assistant", "content": content,
        }  # fmt: skip

    def _response(self, status: str, details: dict[str, Any] | None = None) -> dict[str, Any]:
        sent, ended = self._answer.sent[0], status != "in_progress"
        usage = {
            "total_tokens": self._answer.prompt_tokens + sent, "input_tokens": self._answer.prompt_tokens,
            "output_tokens": sent,
            "input_token_details": {
                "cached_tokens": self._answer.cached_tokens or 0, "text_tokens": self._answer.prompt_tokens,
                "audio_tokens": 0, "image_tokens": 0,
            },
            "output_token_details": {"text_tokens": sent, "audio_tokens": 0},
        }  # fmt: skip
        return {
            "object": "realtime.response", "id": self.id, "status": status, "status_details": details,
            "output": [self._item("completed" if status == "completed" else "incomplete")]
            if ended and sent
            else [],
            "conversation_id": self._conversation, "output_modalities": ["text"],
            "max_output_tokens": self._answer.asked.max_tokens or "inf",
            "usage": usage if ended else None, "metadata": None,
        }  # fmt: skip

    def opening(self) -> bytes:
        begun = self._event("response.created", response=self._response("in_progress"))
        if not self._choice.pieces:
            return begun
        item = self._item("in_progress")
        begun += self._event("response.output_item.added", response_id=self.id, output_index=0, item=item)
        if self._conversation is not None:
            begun += self._event("conversation.item.added", previous_item_id=None, item=item)
        part = {"type": "text", "text": ""}
        return begun + self._event("response.content_part.added", **self._place, part=part)

    def chunk(self, index: int, first: int, last: int, final: bool) -> bytes:
        self._answer.sent[index] = last
        events = b""
        if last > first:
            pieces = self._choice.pieces
            text = pieces[first] if last == first + 1 else "".join(pieces[first:last])
            events = self._delta(b'%b,"delta":%b}' % (self._place_text, msgspec.json.encode(text)))
        if final and last:
            part = {"type": "text", "text": self.said}
            item = self._item("completed" if self._choice.finish == "stop" else "incomplete")
            events += self._event("response.output_text.done", **self._place, text=self.said)
            events += self._event("response.content_part.done", **self._place, part=part)
            events += self._event("response.output_item.done", response_id=self.id, output_index=0, item=item)
            if self._conversation is not None:
                events += self._event("conversation.item.done", previous_item_id=None, item=item)
        return events

    def ending(self) -> bytes:
        reasons = {"stop": None, "length": "max_output_tokens", "content_filter": "content_filter"}
        reason = reasons[self._choice.finish]
        if reason is None:
            return self._event("response.done", response=self._response("completed"))
        details = {"type": "incomplete", "reason": reason}
        return self._event("response.done", response=self._response("incomplete", details))

    def cancelled(self) -> bytes:
        """The client wants no more of it."""
        details = {"type": "cancelled", "reason": "client_cancelled"}
        return self._event("response.done", response=self._response("cancelled", details))

    def keepalive(self) -> bytes:
        return frame(b"", Opcode.PING)

    def failure(self) -> bytes:
        error = {"type": "server_error", "code": "server_error"}
        failed = self._response("failed", {"type": "failed", "error": error})
        told = self._error("server_error", "server_error", "the engine broke down", None)
        return told + self._event("response.done", response=failed)

    def whole(self) -> dict[str, Any]:
        """A response always streams."""
        raise NotImplementedError
