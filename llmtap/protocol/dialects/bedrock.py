"""Read Bedrock's ConverseStream and Converse, and the texts of InvokeModel, as Deltas.

InvokeModel's texts are those of Titan, Llama and Mistral. Nova streams the events of Converse; chunks of
other models are events of their own dialect. In each of them the action of a guardrail may stand at the top
of any event: `add_guardrail` reads it for all dialects.

Source: botocore data/bedrock-runtime/2023-09-30; docs.aws.amazon.com bedrock userguide, model-parameters.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from llmtap.protocol import verdicts
from llmtap.protocol.delta import Delta, EventClass, TokenSource, Verdict
from llmtap.protocol.dialects import shapes
from llmtap.protocol.dialects.openai_shapes import PIECES_MAX, RunningCount, count, read_json, unknown
from llmtap.protocol.server_times import object_times
from llmtap.protocol.sse import SseEvent

_EVENTS: Final = frozenset(
    {"messageStart", "contentBlockStart", "contentBlockDelta", "contentBlockStop", "messageStop", "metadata"}
)
_COUNTS: Final = ("inputTokens", "outputTokens", "reasoningTokens", "cacheReadInputTokens")


class BedrockConverse(shapes.ObjectReader):
    name = "bedrock.converse"

    __slots__ = ()

    @staticmethod
    def claim(value: dict[str, Any], path: str) -> int:
        if "messageStart" in value or ("stopReason" in value and isinstance(value.get("output"), dict)):
            return 3
        if path.endswith("/converse-stream"):
            return 4  # its events have no type of their own, and are alone on this path
        return int(path.endswith("/converse"))

    def _read(self, said: dict[str, Any], event: SseEvent) -> Delta:
        kind = (event.event or b"").decode("latin-1")
        if not kind and (kind := next((name for name in said if name in _EVENTS), "")):
            said = said[kind] if isinstance(said[kind], dict) else said
        match kind:
            case "contentBlockDelta":
                pieces = list(_block(said.get("delta")))
                if len(pieces) == 1:
                    return shapes.piece(*pieces[0])
                return shapes.gather(pieces, _calling(said.get("delta")))
            case "contentBlockStart":
                return shapes.gather(_block(said.get("start"), arguments=""), _calling(said.get("start")))
            case "messageStart":
                return Delta(EventClass.ROLE)
            case "contentBlockStop":
                return Delta(EventClass.METADATA)
            case "messageStop":
                reason = said.get("stopReason")
                end = shapes.gather((), (EventClass.DONE,), reason=reason, signal="stopReason")
                end.done = True
                return end
            case "metadata":
                return _read_end(said, verdict=_traced(said.get("trace")))
        return shapes.failure_in(said, event.event)

    def read_body(self, body: bytes) -> Delta:
        value = read_json(body)
        if not isinstance(value, dict):
            return unknown()
        output, reason = value.get("output"), value.get("stopReason")
        message = output.get("message") if isinstance(output, dict) else None
        if not isinstance(message, dict):
            return shapes.failure_in(value)
        blocks = message.get("content")
        pieces = [p for b in (blocks if isinstance(blocks, list) else [])[:PIECES_MAX] for p in _block(b)]
        # A text that was only masked is the answer, also if the stop reason names the guardrail.
        verdict = _traced(
            value.get("trace") or value.get("amazon-bedrock-trace")
        ) or verdicts.of_finish_reason(shapes.text_of(reason), "stopReason")
        if verdict is not None and verdict.substituted:
            pieces = []
        return _read_end(value, pieces, reason=reason, verdict=verdict)


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
    said: dict[str, Any], pieces: Sequence[shapes.Piece] = (), *, reason: Any = None, verdict: Verdict | None
) -> Delta:
    usage = said["usage"] if isinstance(said.get("usage"), dict) else {}
    counts = shapes.counted(*map(usage.get, _COUNTS))
    delta = shapes.gather(
        pieces, reason=reason, signal="stopReason", verdict=verdict, counts=counts, usage=usage
    )
    delta.server_times = object_times("metrics", said.get("metrics"))
    return delta


_INVOCATION: Final = "amazon-bedrock-invocationMetrics"
_METHODS: Final = ("/invoke", "/invoke-with-response-stream")
_TEXTS: Final = ("outputText", "generation", "outputs", "results")


class BedrockText(shapes.ObjectReader):
    name = "bedrock.invoke"

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

    def _read(self, said: dict[str, Any], event: SseEvent) -> Delta:
        parts = said.get("outputs") or said.get("results")
        part = parts[0] if isinstance(parts, list) and parts and isinstance(parts[0], dict) else {}
        if all(said.get(name) is None for name in _TEXTS):
            return shapes.failure_in(said, event.event)
        everything = part | {name: v for name, v in said.items() if v is not None}
        text = shapes.text_of(_first(everything, ("outputText", "generation", "text")))
        reason = _first(everything, ("completionReason", "stop_reason"))
        delta = shapes.gather(
            [(EventClass.CONTENT, text)] if text else [], reason=reason, signal="stop_reason"
        )
        added = self._running.step(0, count(said.get("generation_token_count")) or 0)
        if added:
            delta.output, delta.choices = True, shapes.FIRST
            delta.tokens, delta.token_source = added, TokenSource.RUNNING_USAGE
        self._input |= _told(said, ("inputTextTokenCount", "prompt_token_count"))
        output = _told(everything, ("totalOutputTextTokenCount", "generation_token_count", "tokenCount"))
        invoked = said[_INVOCATION] if isinstance(said.get(_INVOCATION), dict) else {}
        counts = shapes.counted(
            invoked.get("inputTokenCount", next(iter(self._input.values()), None)),
            invoked.get("outputTokenCount", next(iter(output.values()), None)),
        )
        if counts is not None and counts.output:
            shapes.add_counts(delta, counts, invoked or self._input | output)
        delta.usage_running = reason is None
        delta.server_times = object_times(_INVOCATION, invoked)
        return delta

    def read_body(self, body: bytes) -> Delta:
        return self.read_event(SseEvent(0, len(body), body))


def _told(said: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: said[name] for name in names if said.get(name)}


def _first(said: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next(iter(_told(said, names).values()), None)


GUARDRAIL_ACTION: Final = b'"amazon-bedrock-guardrailAction"'
"""In the bytes of every event for which `add_guardrail` has something to do."""
_GENERATED: Final = frozenset({EventClass.CONTENT, EventClass.TOOL_CALL, EventClass.REASONING})


def add_guardrail(delta: Delta, data: bytes) -> None:
    """Add the action of a guardrail to the Delta of the event, or body, that has it. It says more than a
    finish reason does, unless nobody knows what was assessed. A text in the same event stands in place of the
    answer and is no output."""
    said = read_json(data)
    if not isinstance(said, dict):
        return
    action, trace = said.get("amazon-bedrock-guardrailAction"), said.get("amazon-bedrock-trace")
    verdict = verdicts.of_guardrail_action(action, trace)
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
