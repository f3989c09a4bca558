"""Read Bedrock's ConverseStream and Converse, and the texts of InvokeModel, as Deltas.

InvokeModel's texts are those of Titan, Llama and Mistral. Nova streams the events of Converse; chunks of
other models are events of their own dialect. In each of them the action of a guardrail may stand at the top
of any event: `add_guardrail` reads it for all dialects.

Source: botocore data/bedrock-runtime/2023-09-30; docs.aws.amazon.com bedrock userguide, model-parameters.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from llmtap.protocol import verdicts
from llmtap.protocol.delta import Delta, EventClass, TokenSource, Verdict
from llmtap.protocol.dialects import shapes
from llmtap.protocol.dialects.openai_shapes import PIECES_MAX, RunningCount, count, read_json, unknown
from llmtap.protocol.server_times import object_times
from llmtap.protocol.sse import SseEvent


class _Event(msgspec.Struct, gc=False):
    delta: Any = None
    start: Any = None
    stop_reason: Any = msgspec.field(default=None, name="stopReason")
    output: Any = None
    usage: Any = None
    metrics: Any = None
    trace: Any = None
    invoked_trace: Any = msgspec.field(default=None, name="amazon-bedrock-trace")


_EVENTS: Final = frozenset(
    {"messageStart", "contentBlockStart", "contentBlockDelta", "contentBlockStop", "messageStop", "metadata"}
)
_COUNTS: Final = ("inputTokens", "outputTokens", "reasoningTokens", "cacheReadInputTokens")


class BedrockConverse(shapes.ObjectReader):
    name = "bedrock.converse"
    fields = shapes.Fields(_Event)

    __slots__ = ()

    @staticmethod
    def claim(value: dict[str, Any], path: str) -> int:
        if "messageStart" in value or ("stopReason" in value and isinstance(value.get("output"), dict)):
            return 3
        if path.endswith("/converse-stream"):
            return 4  # its events have no type of their own, and are alone on this path
        return int(path.endswith("/converse"))

    def _read(self, said: _Event, data: bytes, event: SseEvent) -> Delta:
        kind = shapes.kind_of(None, event)
        value = None if kind else read_json(data)
        if isinstance(value, dict) and (kind := _named(value)):
            said = self.fields.of(value[kind]) or said
        match kind:
            case "contentBlockDelta":
                pieces = list(_block(said.delta, arguments="input"))
                return (
                    shapes.piece(*pieces[0])
                    if len(pieces) == 1
                    else shapes.gather(pieces, _calling(said.delta))
                )
            case "contentBlockStart":
                return shapes.gather(_block(said.start, arguments=""), _calling(said.start))
            case "messageStart":
                return Delta(EventClass.ROLE)
            case "contentBlockStop":
                return Delta(EventClass.METADATA)
            case "messageStop":
                end = shapes.gather((), (EventClass.DONE,), reason=said.stop_reason, signal="stopReason")
                end.done = True
                return end
            case "metadata":
                return _read_end(said, verdict=_traced(said.trace))
        return shapes.failure_in(read_json(data), event.event)

    def read_body(self, body: bytes) -> Delta:
        value = read_json(body)
        said = self.fields.of(value)
        if said is None:
            return unknown()
        message = said.output.get("message") if isinstance(said.output, dict) else None
        if not isinstance(message, dict):
            return shapes.failure_in(value)
        blocks = message.get("content")
        pieces = [p for b in (blocks if isinstance(blocks, list) else [])[:PIECES_MAX] for p in _block(b)]
        # A text that was only masked is the answer, also if the stop reason names the guardrail.
        verdict = _traced(said.trace or said.invoked_trace) or verdicts.of_finish_reason(
            shapes.text_of(said.stop_reason), "stopReason"
        )
        if verdict is not None and verdict.substituted:
            pieces = []
        return _read_end(said, pieces, reason=said.stop_reason, verdict=verdict)


def _named(value: dict[str, Any]) -> str:
    return next((name for name in value if name in _EVENTS), "")


def _block(block: Any, *, arguments: str = "input") -> Iterator[shapes.Piece]:
    """Yield the output in a block of content, or in a piece of one; tool results and images are none."""
    if not isinstance(block, dict):
        return
    if text := shapes.text_of(block.get("text")):
        yield EventClass.CONTENT, text
    thought = block.get("reasoningContent")
    if isinstance(thought, dict):
        told = thought.get("reasoningText")
        if text := shapes.text_of((told if isinstance(told, dict) else thought).get("text")):
            yield EventClass.REASONING, text
    call = block.get("toolUse")
    if isinstance(call, dict) and (call.get("name") or call.get(arguments)):
        yield EventClass.TOOL_CALL, shapes.text_of(call.get(arguments))


def _calling(block: Any) -> tuple[EventClass, ...]:
    """Return the class of a piece of a call, which may be empty: its arguments begin so."""
    return (EventClass.TOOL_CALL,) if isinstance(block, dict) and "toolUse" in block else ()


def _traced(trace: Any) -> Verdict | None:
    """Return what a guardrail's trace says; None where nothing in it acted."""
    guardrail = trace.get("guardrail") if isinstance(trace, dict) else None
    phase, acted = verdicts.phase_of_trace(guardrail)
    if acted == "redacted":
        return Verdict("trace.guardrail", None, acted, phase or "output", path="trace.guardrail")
    if phase is None or acted is None:
        return None
    kind = verdicts.INPUT if phase == "input" else verdicts.OUTPUT
    return Verdict("trace.guardrail", kind, "replaced", phase, path="trace.guardrail", substituted=True)


def _read_end(
    said: _Event, pieces: Sequence[shapes.Piece] = (), *, reason: Any = None, verdict: Verdict | None
) -> Delta:
    usage = said.usage if isinstance(said.usage, dict) else {}
    counts = shapes.counted(*(usage.get(name) for name in _COUNTS))
    beside = () if counts is None else (EventClass.USAGE,)
    delta = shapes.gather(pieces, beside, reason=reason, signal="stopReason", verdict=verdict)
    if counts is not None:
        delta.usage, delta.counts = usage, counts
    delta.server_times = object_times("metrics", said.metrics)
    return delta


class _Text(msgspec.Struct, gc=False):
    output_text: Any = msgspec.field(default=None, name="outputText")
    completion_reason: Any = msgspec.field(default=None, name="completionReason")
    input_count: Any = msgspec.field(default=None, name="inputTextTokenCount")
    output_count: Any = msgspec.field(default=None, name="totalOutputTextTokenCount")
    results: Any = None
    generation: Any = None
    stop_reason: Any = None
    prompt_token_count: Any = None
    generation_token_count: Any = None
    outputs: Any = None
    invocation: Any = msgspec.field(default=None, name="amazon-bedrock-invocationMetrics")


_METHODS: Final = ("/invoke", "/invoke-with-response-stream")
_TEXTS: Final = ("outputText", "generation", "outputs", "results")


class BedrockText(shapes.ObjectReader):
    name = "bedrock.invoke"
    fields = shapes.Fields(_Text)

    __slots__ = ("_input", "_running")

    def __init__(self) -> None:
        super().__init__()
        self._input: dict[str, Any] = {}
        """Tokens of the prompt, which only the first event counts."""
        self._running = RunningCount()

    @staticmethod
    def claim(value: dict[str, Any], path: str) -> int:
        if path.endswith(_METHODS) and any(name in value for name in _TEXTS):
            return 4
        return 2 if "completionReason" in value or "generation_token_count" in value else 0

    def _read(self, said: _Text, data: bytes, event: SseEvent) -> Delta:
        parts = said.outputs or said.results
        part = parts[0] if isinstance(parts, list) and parts and isinstance(parts[0], dict) else {}
        if said.output_text is None and said.generation is None and parts is None:
            return shapes.failure_in(read_json(data), event.event)
        text = shapes.text_of(
            said.output_text or said.generation or part.get("text") or part.get("outputText")
        )
        pieces = [(EventClass.CONTENT, text)] if text else []
        told = (
            said.completion_reason,
            said.stop_reason,
            part.get("stop_reason"),
            part.get("completionReason"),
        )
        reason = next((r for r in told if r), None)
        delta = shapes.gather(pieces, reason=reason, signal="stop_reason")
        added = self._running.step(0, count(said.generation_token_count) or 0)
        if added:
            delta.output, delta.choices = True, shapes.FIRST
            delta.tokens, delta.token_source = added, TokenSource.RUNNING_USAGE
        invoked = said.invocation if isinstance(said.invocation, dict) else {}
        of_input = {
            "inputTextTokenCount": said.input_count, "prompt_token_count": said.prompt_token_count,
        }  # fmt: skip
        of_output = {
            "totalOutputTextTokenCount": said.output_count,
            "generation_token_count": said.generation_token_count, "tokenCount": part.get("tokenCount"),
        }  # fmt: skip
        self._input |= _told(of_input)
        counts = shapes.counted(
            invoked.get("inputTokenCount", _first(self._input)),
            invoked.get("outputTokenCount", _first(of_output)),
        )
        if counts is not None and counts.output:
            shapes.add_counts(delta, counts, invoked or self._input | _told(of_output))
        delta.usage_running = reason is None
        delta.server_times = object_times("amazon-bedrock-invocationMetrics", said.invocation)
        return delta

    def read_body(self, body: bytes) -> Delta:
        return self.read_event(SseEvent(0, len(body), body))


def _told(counts: dict[str, Any]) -> dict[str, Any]:
    return {name: n for name, n in counts.items() if n}


def _first(counts: dict[str, Any]) -> Any:
    return next((n for n in counts.values() if n), None)


class _Guarded(msgspec.Struct, gc=False):
    action: Any = msgspec.field(default=None, name="amazon-bedrock-guardrailAction")
    trace: Any = msgspec.field(default=None, name="amazon-bedrock-trace")


GUARDRAIL_ACTION: Final = b'"amazon-bedrock-guardrailAction"'
"""In the bytes of every event for which `add_guardrail` has something to do."""
_guarded: Final = shapes.Fields(_Guarded)
_GENERATED: Final = frozenset({EventClass.CONTENT, EventClass.TOOL_CALL, EventClass.REASONING})


def add_guardrail(delta: Delta, data: bytes) -> None:
    """Add the action of a guardrail to the Delta of the event, or body, that has it. It says more than a
    finish reason does, unless nobody knows what was assessed. A text in the same event stands in place of the
    answer and is no output."""
    said = _guarded.read(data)
    verdict = None if said is None else verdicts.of_guardrail_action(said.action, said.trace)
    if verdict is None:
        return
    standing = delta.verdict
    acts = verdict.confidence == "high" and verdict.action not in verdicts.PASSED_ON
    if standing is None or acts or standing.confidence != "high" or standing.action in verdicts.PASSED_ON:
        delta.verdict = verdict
    kept = [c for c in (delta.event_class, *delta.also) if c is not EventClass.GUARDRAIL]
    if verdict.substituted:
        kept = [c for c in kept if c not in _GENERATED]
        delta.output = delta.content = delta.blank = delta.reasoning = delta.tool_call = False
        delta.text, delta.choices, delta.tokens, delta.token_source = "", (), -1, TokenSource.NONE
    elif delta.event_class > EventClass.CONTENT:
        delta.text = ""  # beside a guardrail the text is the content
    delta.event_class, delta.also = EventClass.GUARDRAIL, tuple(c for c in kept if c < EventClass.METADATA)
