"""LM Studio's own `/api/v1/chat`: named events from the loading of the model to the end of the chat.

Source: lmstudio-ai/docs#142; shared/dialects/dialects.md section 4.
"""

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from llmtap.protocol.delta import MODEL_CHARS_MAX, Delta, EventClass, UsageCounts
from llmtap.protocol.dialects.native_shapes import (
    Fields,
    Piece,
    counted,
    failure_in,
    gather,
    is_object,
    kind_of,
    piece,
    text_of,
)
from llmtap.protocol.dialects.openai_shapes import read_frame, read_json, unknown
from llmtap.protocol.server_times import object_times
from llmtap.protocol.sse import SseEvent

__all__ = ["LmStudio"]


class _Event(msgspec.Struct, gc=False):
    type: Any = None
    content: Any = None
    tool: Any = None
    tool_name: Any = None
    arguments: Any = None
    result: Any = None
    model_instance_id: Any = None


_fields: Final = Fields(_Event)
_FAMILIES: Final = frozenset({"chat", "model_load", "prompt_processing", "reasoning", "tool_call", "message"})
"""First words of the events' types."""
_PARTS: Final = {"message": EventClass.CONTENT, "reasoning": EventClass.REASONING}


class LmStudio:
    """Reads one answer."""

    name = "lmstudio.native"

    __slots__ = ("_model",)

    def __init__(self) -> None:
        self._model: str | None = None

    @staticmethod
    def claim(value: dict[str, Any], path: str) -> int:
        """How sure a first JSON value makes us that the answer is ours; see `registry.py`."""
        kind = value.get("type")
        if isinstance(kind, str) and "." in kind and kind.partition(".")[0] in _FAMILIES:
            return 3
        if isinstance(value.get("stats"), dict) and isinstance(value.get("output"), list):
            return 3 if "model_instance_id" in value else 2
        return int("error" in value and path.endswith("/api/v1/chat"))

    def read_event(self, event: SseEvent) -> Delta:
        """What one event of a stream says. Never raises."""
        data = event.data
        if data is None or not is_object(data):
            return read_frame(event)
        said = _fields.read(data)
        if said is None:
            return unknown(event.event)
        kind = kind_of(said.type, event)
        text = text_of(said.content)
        if kind in ("message.delta", "reasoning.delta"):
            known = EventClass.CONTENT if kind == "message.delta" else EventClass.REASONING
            return piece(known, text) if text else Delta(EventClass.METADATA)
        if kind == "error" or "." not in kind:
            return failure_in(read_json(data), event.event)
        if kind == "message.start":
            delta = Delta(EventClass.ROLE)
        elif kind in ("tool_call.start", "tool_call.name", "tool_call.arguments"):
            named = said.tool or said.tool_name or said.arguments
            delta = (
                gather([(EventClass.TOOL_CALL, text_of(said.arguments))])
                if named
                else gather((), (EventClass.TOOL_CALL,))
            )
        elif kind == "chat.end":
            delta = self._close(said.result if isinstance(said.result, dict) else {}, [], EventClass.DONE)
            delta.done = True
        else:
            delta = Delta(EventClass.METADATA, parsed=kind.partition(".")[0] in _FAMILIES)
        self._name(delta, said.model_instance_id)
        return delta

    def read_body(self, body: bytes) -> Delta:
        """What a whole JSON answer says. Never raises."""
        value = read_json(body)
        if not isinstance(value, dict) or not isinstance(value.get("output"), list):
            return failure_in(value)
        return self._close(value, list(_output(value["output"])))

    def _close(self, result: dict[str, Any], pieces: list[Piece], *beside: EventClass) -> Delta:
        """The end of a chat, with its statistics."""
        stats = result.get("stats")
        counts = _counts(stats)
        delta = gather(pieces, beside if counts is None else (*beside, EventClass.USAGE))
        if counts is not None:
            delta.usage, delta.counts = stats, counts
        delta.server_times = object_times("result.stats", stats)
        self._name(delta, result.get("model_instance_id"))
        return delta

    def _name(self, delta: Delta, model: Any) -> None:
        if isinstance(model, str) and model and model != self._model:
            self._model = delta.model = model[:MODEL_CHARS_MAX]


def _counts(stats: Any) -> UsageCounts | None:
    if not isinstance(stats, dict):
        return None
    return counted(
        stats.get("input_tokens"), stats.get("total_output_tokens"), stats.get("reasoning_output_tokens")
    )


def _output(items: list[Any]) -> Iterator[Piece]:
    for item in items:
        if not isinstance(item, dict):
            continue
        kind = text_of(item.get("type"))
        known = _PARTS.get(kind)
        text = text_of(item.get("content"))
        if known is not None and text:
            yield known, text
        elif kind == "tool_call" and item.get("tool"):
            yield EventClass.TOOL_CALL, ""
