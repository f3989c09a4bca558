"""Read Anthropic's Messages stream, whole messages and the older `completion` as Deltas.

Input is counted at the start and often nowhere else, without cached tokens. There is no `[DONE]`.

Source: anthropics/anthropic-sdk-python types; docs.anthropic.com messages-streaming.
"""

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from llmtap.protocol.delta import Delta, EventClass, UsageCounts
from llmtap.protocol.dialects import shapes
from llmtap.protocol.dialects.openai_shapes import read_json, unknown
from llmtap.protocol.server_times import object_times
from llmtap.protocol.sse import SseEvent
from llmtap.protocol.verdicts import word


class _Event(msgspec.Struct, gc=False):
    type: Any = None
    delta: Any = None
    content_block: Any = None
    message: Any = None
    usage: Any = None
    error: Any = None
    completion: Any = None
    stop_reason: Any = None
    model: Any = None
    stop_details: Any = None
    guardrail_action: Any = msgspec.field(default=None, name="amazon-bedrock-guardrailAction")
    invocation: Any = msgspec.field(default=None, name="amazon-bedrock-invocationMetrics")


_EVENTS: Final = frozenset(
    {
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop",
    }
)  # fmt: skip
_TEXTS: Final = (
    ("text", EventClass.CONTENT),
    ("thinking", EventClass.REASONING),
    ("partial_json", EventClass.TOOL_CALL),
)
_BLOCK_TEXTS: Final = {"text": EventClass.CONTENT, "thinking": EventClass.REASONING}
_CALLS: Final = "tool_use"
"""End of the types of blocks that call: `tool_use`, `server_tool_use`, `mcp_tool_use`."""
_INVOCATION: Final = "amazon-bedrock-invocationMetrics"


class Anthropic(shapes.ObjectReader):
    name = "anthropic"
    fields = shapes.Fields(_Event)
    names_read: Final = frozenset(_Event.__struct_encode_fields__)

    __slots__ = ("_id", "_input", "_so_far", "_spoken", "_stopped", "_total")

    def __init__(self) -> None:
        super().__init__()
        self._id = ""
        self._input: UsageCounts | None = None
        self._so_far: Delta | None = None
        """The end that counted the output last, before the reason to stop was told."""
        self._spoken = False
        self._stopped = False
        self._total = False

    @staticmethod
    def claim(value: dict[str, Any], path: str) -> int:
        kind = value.get("type")
        if isinstance(kind, str):
            if kind in _EVENTS or (kind == "message" and isinstance(value.get("content"), list)):
                return 3
            if kind == "completion" and "completion" in value:
                return 3
            if kind in ("ping", "error"):
                return int(path.endswith("/messages"))
        return int("error" in value and path.endswith("/messages"))

    def _read(self, said: _Event, data: bytes, event: SseEvent) -> Delta:
        match shapes.kind_of(said.type, event):
            case "content_block_delta":
                delta = self._read_delta(said.delta)
                delta.repeatable &= said.guardrail_action is None
                return delta
            case "content_block_start":
                return self._read_block(said.content_block)
            case "content_block_stop":
                return Delta(EventClass.METADATA)
            case "message_start":
                return self._read_start(said.message)
            case "message_delta":
                return self._read_end(said)
            case "message_stop":
                return self._read_stop(said)
            case "ping":
                return Delta(EventClass.KEEPALIVE)
            case "completion":
                return self._read_completion(said)
        return shapes.failure_in(read_json(data), event.event)

    def read_body(self, body: bytes) -> Delta:
        value = read_json(body)
        said = self.fields.of(value)
        if said is None:
            return unknown()
        if said.type == "completion":
            return self._read_completion(said)
        content = value.get("content")
        if said.type != "message" and not isinstance(content, list):
            return shapes.failure_in(value)
        delta = self._close(said, value.get("stop_reason"), value.get("stop_details"), list(_blocks(content)))
        self._name(delta, said.model)
        return delta

    def _read_delta(self, delta: Any) -> Delta:
        if not isinstance(delta, dict):
            return unknown()
        if delta.get("type") == "compaction_delta":
            return Delta(EventClass.METADATA)
        for key, kind in _TEXTS:
            text = delta.get(key)
            if isinstance(text, str):
                if not text:
                    # The arguments of a call begin with an empty piece.
                    return Delta(kind if kind is EventClass.TOOL_CALL else EventClass.METADATA)
                self._spoken = True
                delta_of = shapes.piece(kind, text)
                delta_of.repeatable = True
                return delta_of
        return Delta(EventClass.METADATA)

    def _read_block(self, block: Any) -> Delta:
        pieces = list(_blocks([block]))
        self._spoken |= bool(pieces)
        delta = shapes.gather(pieces)
        delta.parsed = isinstance(block, dict)
        return delta

    def _read_start(self, message: Any) -> Delta:
        if not isinstance(message, dict):
            return Delta(EventClass.ROLE)
        counts = _counts(message.get("usage"))
        delta = shapes.gather(
            (), (EventClass.ROLE,) if counts is None else (EventClass.ROLE, EventClass.USAGE)
        )
        now, model = shapes.text_of(message.get("id"))[: shapes.ID_CHARS_MAX], self._model
        self._name(delta, message.get("model"))
        # A gateway that starts again sends another start behind output (BerriAI/litellm#38153).
        delta.retry = self._spoken and (now != self._id or delta.model not in (None, model))
        self._id = now
        if counts is not None:
            self._input = counts
            # One to four tokens of output are counted here before any came: no count of the answer.
            delta.counts = UsageCounts(counts.input, None, None, counts.cached, counts.refused)
            delta.usage_running = True
        return delta

    def _read_end(self, said: _Event) -> Delta:
        end = said.delta if isinstance(said.delta, dict) else {}
        details = end.get("stop_details") or said.stop_details
        return self._close(said, end.get("stop_reason"), details, [])

    def _close(self, said: _Event, reason: Any, details: Any, pieces: list[shapes.Piece]) -> Delta:
        counts = _counts(said.usage)
        beside = () if counts is None else (EventClass.USAGE,)
        delta = shapes.gather(pieces, beside, reason=reason, signal="stop_reason")
        if delta.verdict is not None and isinstance(details, dict):
            delta.verdict.category = word(details.get("category"))
        self._stopped |= delta.finish_reason is not None
        if counts is not None:
            start = self._input or UsageCounts()
            counts.input = counts.input or start.input
            counts.cached = counts.cached or start.cached
            counts.refused += start.refused
            delta.usage, delta.counts = said.usage, counts
            delta.usage_running = not self._stopped
            self._total |= self._stopped and counts.output is not None
            self._so_far = delta
        return delta

    def _read_stop(self, said: _Event) -> Delta:
        delta = Delta(EventClass.DONE, done=True)
        if self._so_far is not None and not self._total:
            delta.usage, delta.counts = self._so_far.usage, self._so_far.counts
        invoked = said.invocation
        if isinstance(invoked, dict):
            delta.server_times = object_times(_INVOCATION, invoked)
            counts = shapes.counted(
                invoked.get("inputTokenCount"),
                invoked.get("outputTokenCount"),
                cached=invoked.get("cacheReadInputTokenCount"),
            )
            if counts is not None and not self._total:
                delta.also += (EventClass.USAGE,)
                delta.usage, delta.counts = invoked, counts
        return delta

    def _read_completion(self, said: _Event) -> Delta:
        text = shapes.text_of(said.completion)
        delta = shapes.gather(
            [(EventClass.CONTENT, text)] if text else (), reason=said.stop_reason, signal="stop_reason"
        )
        self._name(delta, said.model)
        return delta


def _blocks(blocks: Any) -> Iterator[shapes.Piece]:
    for block in blocks if isinstance(blocks, list) else ():
        if not isinstance(block, dict):
            continue
        kind = shapes.text_of(block.get("type"))
        if kind in _BLOCK_TEXTS:
            text = shapes.text_of(block.get(kind))
            if text:
                yield _BLOCK_TEXTS[kind], text
        elif kind.endswith(_CALLS) and block.get("name"):
            yield EventClass.TOOL_CALL, ""


def _counts(usage: Any) -> UsageCounts | None:
    if not isinstance(usage, dict):
        return None
    details, reasoning = usage.get("output_tokens_details"), None
    if isinstance(details, dict):
        reasoning = details.get("thinking_tokens", details.get("reasoning_tokens"))
    return shapes.counted(
        usage.get("input_tokens"), usage.get("output_tokens"), reasoning, usage.get("cache_read_input_tokens")
    )
