"""Read LM Studio's `/api/v1/chat` as Deltas: named events from loading the model to the end.

Source: lmstudio-ai/docs#142; docs/dialects.md.
"""

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from llmtap.protocol.delta import Delta, EventClass, UsageCounts
from llmtap.protocol.dialects import shapes
from llmtap.protocol.dialects.openai_shapes import read_json
from llmtap.protocol.server_times import object_times
from llmtap.protocol.sse import SseEvent


class _Event(msgspec.Struct, gc=False):
    type: Any = None
    content: Any = None
    tool: Any = None
    tool_name: Any = None
    arguments: Any = None
    result: Any = None
    model_instance_id: Any = None


_FAMILIES: Final = frozenset({"chat", "model_load", "prompt_processing", "reasoning", "tool_call", "message"})
_PARTS: Final = {"message": EventClass.CONTENT, "reasoning": EventClass.REASONING}
_CALLS: Final = ("tool_call.start", "tool_call.name", "tool_call.arguments")


class LmStudio(shapes.ObjectReader):
    name = "lmstudio.native"
    fields = shapes.Fields(_Event)

    __slots__ = ()

    @staticmethod
    def claim(value: dict[str, Any], path: str) -> int:
        kind = value.get("type")
        if isinstance(kind, str) and "." in kind and kind.partition(".")[0] in _FAMILIES:
            return 3
        if isinstance(value.get("stats"), dict) and isinstance(value.get("output"), list):
            return 3 if "model_instance_id" in value else 2
        return int("error" in value and path.endswith("/api/v1/chat"))

    def _read(self, said: _Event, data: bytes, event: SseEvent) -> Delta:
        kind = shapes.kind_of(said.type, event)
        family, _, step = kind.partition(".")
        if step == "delta" and family in _PARTS:
            text = shapes.text_of(said.content)
            return shapes.piece(_PARTS[family], text) if text else Delta(EventClass.METADATA)
        if "." not in kind:
            return shapes.failure_in(read_json(data), event.event)
        if kind == "message.start":
            delta = Delta(EventClass.ROLE)
        elif kind in _CALLS:
            named = said.tool or said.tool_name or said.arguments
            arguments = shapes.text_of(said.arguments)
            delta = shapes.gather(
                [(EventClass.TOOL_CALL, arguments)] if named else (), (EventClass.TOOL_CALL,)
            )
        elif kind == "chat.end":
            delta = self._close(said.result if isinstance(said.result, dict) else {}, [], EventClass.DONE)
            delta.done = True
        else:
            delta = Delta(EventClass.METADATA, parsed=family in _FAMILIES)
        self._name(delta, said.model_instance_id)
        return delta

    def read_body(self, body: bytes) -> Delta:
        value = read_json(body)
        if not isinstance(value, dict) or not isinstance(value.get("output"), list):
            return shapes.failure_in(value)
        return self._close(value, list(_output(value["output"])))

    def _close(self, result: dict[str, Any], pieces: list[shapes.Piece], *beside: EventClass) -> Delta:
        stats = result.get("stats")
        counts = _counts(stats)
        delta = shapes.gather(pieces, beside if counts is None else (*beside, EventClass.USAGE))
        if counts is not None:
            delta.usage, delta.counts = stats, counts
        delta.server_times = object_times("result.stats", stats)
        self._name(delta, result.get("model_instance_id"))
        return delta


def _counts(stats: Any) -> UsageCounts | None:
    if not isinstance(stats, dict):
        return None
    return shapes.counted(
        stats.get("input_tokens"), stats.get("total_output_tokens"), stats.get("reasoning_output_tokens")
    )


def _output(items: list[Any]) -> Iterator[shapes.Piece]:
    for item in items:
        if not isinstance(item, dict):
            continue
        kind, text = shapes.text_of(item.get("type")), shapes.text_of(item.get("content"))
        if kind in _PARTS and text:
            yield _PARTS[kind], text
        elif kind == "tool_call" and item.get("tool"):
            yield EventClass.TOOL_CALL, ""
