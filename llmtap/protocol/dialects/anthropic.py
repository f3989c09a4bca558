"""Read streams and whole messages of Anthropic's Messages API as Deltas.

The number of input tokens comes at the start, often only there, and without cached tokens. There is no
`[DONE]`.

Source: anthropics/anthropic-sdk-python types; docs.anthropic.com messages-streaming.
"""

from collections.abc import Iterator
from typing import Any, Final

from llmtap.json_types import JsonObject
from llmtap.protocol.delta import Delta, EventClass, UsageCounts
from llmtap.protocol.dialects import shapes
from llmtap.protocol.dialects.openai_shapes import read_json, unknown_delta
from llmtap.protocol.server_times import object_times
from llmtap.protocol.sse import SseEvent
from llmtap.protocol.verdicts import as_word

_EVENTS: Final = frozenset(
    {
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    }
)
_TEXTS: Final = {
    "text": EventClass.CONTENT,
    "thinking": EventClass.REASONING,
    "partial_json": EventClass.TOOL_CALL,
}
_CALLS: Final = "tool_use"
"""Suffix of the types of content blocks that call a tool: `tool_use`, `server_tool_use`, `mcp_tool_use`."""
_GUARDRAIL: Final = "amazon-bedrock-guardrailAction"
_INVOCATION: Final = "amazon-bedrock-invocationMetrics"


class Anthropic(shapes.ObjectReader):
    """Reader of Anthropic's Messages API."""

    name = "anthropic"
    end_certain = True
    names_read: Final = frozenset({"type", "delta", "error", _GUARDRAIL})

    __slots__ = ("_has_output", "_has_stopped", "_has_total", "_id", "_last_message_delta", "_start_counts")

    def __init__(self) -> None:
        super().__init__()
        self._id = ""
        """Id of the message; another id shows that a gateway began the answer again."""
        self._start_counts = UsageCounts()
        """Counts of the first event: prompt tokens, which the end does not always repeat."""
        self._last_message_delta: Delta | None = None
        """The latest `message_delta` with counts, which are the total if no stop reason follows."""
        self._has_output = False
        """Whether an event has had output."""
        self._has_stopped = False
        """Whether an event has had a finish reason."""
        self._has_total = False
        """Whether an event has had the usage of the whole answer."""

    @staticmethod
    def claim(value: JsonObject, path: str) -> int:
        """Return how certainly an object is of this dialect (`registry.Dialect.claim`)."""
        kind = shapes.text_of(value.get("type"))
        if kind in _EVENTS or (kind == "message" and isinstance(value.get("content"), list)):
            return 3
        return int((kind in ("ping", "error") or "error" in value) and path.endswith("/messages"))

    def _read(self, value: JsonObject, event: SseEvent) -> Delta:
        match shapes.kind_of(value, event):
            case "content_block_delta":
                delta = self._read_delta(value.get("delta"))
                delta.repeatable &= value.get(_GUARDRAIL) is None
                return delta
            case "content_block_start":
                block = value.get("content_block")
                pieces = list(_block_pieces([block]))
                self._has_output |= bool(pieces)
                delta = shapes.gather(pieces)
                delta.parsed = isinstance(block, dict)
                return delta
            case "content_block_stop":
                return Delta(EventClass.METADATA)
            case "message_start":
                return self._read_start(value.get("message"))
            case "message_delta":
                end = value["delta"] if isinstance(value.get("delta"), dict) else {}
                details = end.get("stop_details") or value.get("stop_details")
                return self._read_end(value.get("usage"), end.get("stop_reason"), details, [])
            case "message_stop":
                return self._read_stop(value.get(_INVOCATION))
        return shapes.failure_in(value, event.event)

    def read_body(self, body: bytes) -> Delta:
        value = read_json(body)
        if not isinstance(value, dict):
            return unknown_delta()
        content = value.get("content")
        if value.get("type") != "message" and not isinstance(content, list):
            return shapes.failure_in(value)
        reason, details = value.get("stop_reason"), value.get("stop_details")
        delta = self._read_end(value.get("usage"), reason, details, list(_block_pieces(content)))
        self._set_model(delta, value.get("model"))
        return delta

    def _read_delta(self, delta: Any) -> Delta:
        """Read the `delta` of a `content_block_delta`."""
        if not isinstance(delta, dict):
            return unknown_delta()
        key = next((key for key in _TEXTS if isinstance(delta.get(key), str)), None)
        if key is None or delta.get("type") == "compaction_delta":
            return Delta(EventClass.METADATA)
        kind, text = _TEXTS[key], delta[key]
        if not text:
            # An empty piece of arguments shows that a call begins. Other empty pieces have no meaning.
            return Delta(kind if kind is EventClass.TOOL_CALL else EventClass.METADATA)
        self._has_output = True
        piece = shapes.piece(kind, text)
        piece.repeatable = True
        return piece

    def _read_start(self, message: Any) -> Delta:
        """Read the `message` of a `message_start`."""
        if not isinstance(message, dict):
            return Delta(EventClass.ROLE)
        counts = _counts(message.get("usage"))
        if counts is not None:
            self._start_counts = counts
            # `message_start` reports one to four output tokens before there is any output: drop them.
            counts = UsageCounts(counts.input, None, None, counts.cached, counts.refused)
        delta = shapes.gather((), (EventClass.ROLE,), counts=counts)
        delta.usage_running = counts is not None
        now, model = shapes.text_of(message.get("id"))[: shapes.ID_CHARS_MAX], self._model
        self._set_model(delta, message.get("model"))
        # To restart an answer, a gateway sends another `message_start` (BerriAI/litellm#38153).
        delta.retry = self._has_output and (now != self._id or delta.model not in (None, model))
        self._id = now
        return delta

    def _read_end(self, usage: Any, reason: Any, details: Any, pieces: list[shapes.Piece]) -> Delta:
        """Read reason and usage at the end of a stream, or of a whole answer with its pieces."""
        counts = _counts(usage)
        delta = shapes.gather(pieces, reason=reason, signal="stop_reason", counts=counts, usage=usage)
        if delta.verdict is not None and isinstance(details, dict):
            delta.verdict.category = as_word(details.get("category"))
        self._has_stopped |= delta.finish_reason is not None
        if counts is not None:
            counts.input = counts.input or self._start_counts.input
            counts.cached = counts.cached or self._start_counts.cached
            counts.refused += self._start_counts.refused
            delta.usage_running = not self._has_stopped
            self._has_total |= self._has_stopped and counts.output is not None
            self._last_message_delta = delta
        return delta

    def _read_stop(self, invoked: Any) -> Delta:
        delta = Delta(EventClass.DONE, done=True)
        if self._last_message_delta is not None and not self._has_total:
            delta.usage, delta.counts = self._last_message_delta.usage, self._last_message_delta.counts
        delta.server_times = object_times(_INVOCATION, invoked)
        if isinstance(invoked, dict) and not self._has_total:
            names = ("inputTokenCount", "outputTokenCount", "", "cacheReadInputTokenCount")
            shapes.add_counts(delta, shapes.counts_of(*map(invoked.get, names)), invoked)
        return delta


def _block_pieces(blocks: Any) -> Iterator[shapes.Piece]:
    for block in blocks if isinstance(blocks, list) else ():
        if not isinstance(block, dict):
            continue
        kind = shapes.text_of(block.get("type"))
        if kind in ("text", "thinking"):
            if text := shapes.text_of(block.get(kind)):
                yield _TEXTS[kind], text
        elif kind.endswith(_CALLS) and block.get("name"):
            yield EventClass.TOOL_CALL, ""


def _counts(usage: Any) -> UsageCounts | None:
    if not isinstance(usage, dict):
        return None
    details = usage.get("output_tokens_details")
    members = details if isinstance(details, dict) else {}
    return shapes.counts_of(
        usage.get("input_tokens"),
        usage.get("output_tokens"),
        members.get("thinking_tokens", members.get("reasoning_tokens")),
        usage.get("cache_read_input_tokens"),
    )
