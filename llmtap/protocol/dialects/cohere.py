"""Read Cohere's chat, version 2, as Deltas: named events of one message, and whole answers.

Its end counts tokens and billed tokens; the billed ones are used only where the others are missing.

Source: docs.cohere.com chat-stream.
"""

from collections.abc import Iterator
from typing import Any, Final

from llmtap.protocol.delta import Delta, EventClass, TokenSource, UsageCounts
from llmtap.protocol.dialects import shapes
from llmtap.protocol.dialects.openai_shapes import read_json, unknown
from llmtap.protocol.sse import SseEvent

_PIECES: Final = frozenset(
    {"content-start", "content-delta", "tool-plan-delta", "tool-call-start", "tool-call-delta"}
)
_EVENTS: Final = _PIECES | {
    "message-start", "message-end", "content-end", "tool-call-end", "citation-start", "citation-end",
}  # fmt: skip


class Cohere(shapes.ObjectReader):
    name = "cohere.v2"

    __slots__ = ()

    @staticmethod
    def claim(value: dict[str, Any], path: str) -> int:
        kind = value.get("type")
        if isinstance(kind, str) and kind in _EVENTS:
            return 3
        message, usage = value.get("message"), value.get("usage")
        if isinstance(message, dict) and "finish_reason" in value and "choices" not in value:
            return 3 if isinstance(usage, dict) and "billed_units" in usage else 2
        return int(("error" in value or isinstance(message, str)) and path.endswith("/v2/chat"))

    def _read(self, said: dict[str, Any], event: SseEvent) -> Delta:
        kind = shapes.kind_of(said, event)
        delta = said["delta"] if isinstance(said.get("delta"), dict) else {}
        if kind in _PIECES:
            return _read_pieces(delta.get("message"), said.get("logprobs"))
        if kind == "message-start":
            return Delta(EventClass.ROLE)
        if kind == "message-end":
            end = _close(delta, [], [EventClass.DONE])
            end.done = True
            return end
        if kind in _EVENTS or kind == "debug":
            return Delta(EventClass.METADATA)
        return shapes.failure_in(said, event.event)

    def read_body(self, body: bytes) -> Delta:
        value = read_json(body)
        if not isinstance(value, dict):
            return unknown()
        message = value.get("message")
        if isinstance(message, dict):
            return _close(value, list(_output(message)), [])
        if isinstance(message, str) and "error" not in value:
            return Delta(EventClass.ERROR, error_type="error", error_message=message)
        return shapes.failure_in(value)


def _read_pieces(message: Any, logprobs: Any) -> Delta:
    if not isinstance(message, dict):
        return Delta(EventClass.METADATA, parsed=False)
    calling = () if message.get("tool_calls") is None else (EventClass.TOOL_CALL,)
    out = shapes.gather(_output(message), calling)
    ids = logprobs.get("token_ids") if isinstance(logprobs, dict) else None
    if isinstance(ids, list) and ids:
        out.tokens, out.token_source = len(ids), TokenSource.TOKEN_IDS
    return out


def _output(message: dict[str, Any]) -> Iterator[shapes.Piece]:
    """The output in a message, or in what is added to one: there, its parts are no lists."""
    if plan := shapes.text_of(message.get("tool_plan")):
        yield EventClass.REASONING, plan
    content = message.get("content")
    for part in content if isinstance(content, list) else (content,):
        told = {"text": part} if isinstance(part, str) else part if isinstance(part, dict) else {}
        for key, kind in (("thinking", EventClass.REASONING), ("text", EventClass.CONTENT)):
            if text := shapes.text_of(told.get(key)):
                yield kind, text
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else (calls,):
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and (function.get("name") or function.get("arguments")):
            yield EventClass.TOOL_CALL, shapes.text_of(function.get("arguments"))


def _close(end: dict[str, Any], pieces: list[shapes.Piece], beside: list[EventClass]) -> Delta:
    usage, reason, error = end.get("usage"), end.get("finish_reason"), end.get("error")
    if error:
        beside.append(EventClass.ERROR)
    delta = shapes.gather(pieces, beside, reason=reason, counts=_counts(usage), usage=usage)
    if error or delta.error_type is not None:
        delta.error_type = shapes.text_of(reason) or "error"
        delta.error_message = shapes.text_of(error) or None
    return delta


def _counts(usage: Any) -> UsageCounts | None:
    if not isinstance(usage, dict):
        return None
    tokens = usage.get("tokens")
    if not isinstance(tokens, dict):
        tokens = usage.get("billed_units")
    tokens = tokens if isinstance(tokens, dict) else {}
    return shapes.counted(
        tokens.get("input_tokens"), tokens.get("output_tokens"), cached=usage.get("cached_tokens")
    )
