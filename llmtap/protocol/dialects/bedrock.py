"""Bedrock's ConverseStream and Converse: events of one message, and whole ones.

The messages of `application/vnd.amazon.eventstream` name the event; `protocol/event_stream.py` passes that
name on. InvokeModelWithResponseStream carries the events of the model's own dialect instead.

Source: botocore data/bedrock-runtime/2023-09-30 (ConverseStreamOutput, ConverseResponse).
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from llmtap.protocol.delta import Delta, EventClass, Verdict
from llmtap.protocol.dialects.native_shapes import (
    Fields,
    ObjectReader,
    Piece,
    counted,
    failure_in,
    gather,
    kind_of,
    piece,
    text_of,
)
from llmtap.protocol.dialects.openai_shapes import PIECES_MAX, read_json, unknown
from llmtap.protocol.server_times import object_times
from llmtap.protocol.sse import SseEvent
from llmtap.protocol.verdicts import INPUT, OUTPUT, of_finish_reason, phase_of_trace

__all__ = ["BedrockConverse"]


class _Event(msgspec.Struct, gc=False):
    delta: Any = None
    start: Any = None
    stop_reason: Any = msgspec.field(default=None, name="stopReason")
    output: Any = None
    usage: Any = None
    metrics: Any = None
    trace: Any = None


_EVENTS: Final = frozenset(
    {"messageStart", "contentBlockStart", "contentBlockDelta", "contentBlockStop", "messageStop", "metadata"}
)
_COUNTS: Final = ("inputTokens", "outputTokens", "reasoningTokens", "cacheReadInputTokens")


class BedrockConverse(ObjectReader):
    """Reads one answer."""

    name = "bedrock.converse"
    fields = Fields(_Event)

    __slots__ = ()

    @staticmethod
    def claim(value: dict[str, Any], path: str) -> int:
        if "stopReason" in value and isinstance(value.get("output"), dict):
            return 3
        if path.endswith("/converse-stream"):
            return 4  # its events have no type of their own, and are alone on this path
        return int(path.endswith("/converse"))

    def _read(self, said: _Event, data: bytes, event: SseEvent) -> Delta:
        match kind_of(None, event):
            case "contentBlockDelta":
                pieces = list(_block(said.delta, arguments="input"))
                return piece(*pieces[0]) if len(pieces) == 1 else gather(pieces)
            case "contentBlockStart":
                return gather(_block(said.start, arguments=""))
            case "messageStart":
                return Delta(EventClass.ROLE)
            case "contentBlockStop":
                return Delta(EventClass.METADATA)
            case "messageStop":
                end = gather((), (EventClass.DONE,), reason=said.stop_reason, signal="stopReason")
                end.done = True
                return end
            case "metadata":
                return _read_end(said, verdict=_traced(said.trace))
        return failure_in(read_json(data), event.event)

    def read_body(self, body: bytes) -> Delta:
        value = read_json(body)
        said = self.fields.of(value)
        if said is None:
            return unknown()
        message = said.output.get("message") if isinstance(said.output, dict) else None
        if not isinstance(message, dict):
            return failure_in(value)
        blocks = message.get("content")
        pieces = [p for b in (blocks if isinstance(blocks, list) else [])[:PIECES_MAX] for p in _block(b)]
        verdict = of_finish_reason(text_of(said.stop_reason), "stopReason")
        if verdict is not None and verdict.substituted:
            verdict, pieces = _traced(said.trace) or verdict, []
        return _read_end(said, pieces, reason=said.stop_reason, verdict=verdict)


def _block(block: Any, *, arguments: str = "input") -> Iterator[Piece]:
    """Yield the output in a block of content, or in a piece of one; tool results and images are none."""
    if not isinstance(block, dict):
        return
    if text := text_of(block.get("text")):
        yield EventClass.CONTENT, text
    thought = block.get("reasoningContent")
    if isinstance(thought, dict):
        told = thought.get("reasoningText")
        if text := text_of((told if isinstance(told, dict) else thought).get("text")):
            yield EventClass.REASONING, text
    call = block.get("toolUse")
    if isinstance(call, dict) and (call.get("name") or call.get(arguments)):
        yield EventClass.TOOL_CALL, text_of(call.get(arguments))


def _traced(trace: Any) -> Verdict | None:
    """Return what a guardrail's trace says; None where nothing in it acted."""
    guardrail = trace.get("guardrail") if isinstance(trace, dict) else None
    phase, acted = phase_of_trace(guardrail)
    if phase is None or not acted:
        return None
    kind = INPUT if phase == "input" else OUTPUT
    return Verdict("trace.guardrail", kind, "replaced", phase, path="trace.guardrail", substituted=True)


def _read_end(
    said: _Event, pieces: Sequence[Piece] = (), *, reason: Any = None, verdict: Verdict | None
) -> Delta:
    usage = said.usage if isinstance(said.usage, dict) else {}
    counts = counted(*(usage.get(name) for name in _COUNTS))
    beside = () if counts is None else (EventClass.USAGE,)
    delta = gather(pieces, beside, reason=reason, signal="stopReason", verdict=verdict)
    if counts is not None:
        delta.usage, delta.counts = usage, counts
    delta.server_times = object_times("metrics", said.metrics)
    return delta
