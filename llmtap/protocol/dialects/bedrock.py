"""Read the texts of Bedrock's InvokeModel, and the reports of Bedrock's guardrails in answers of any dialect.

The class here reads InvokeModel's answers of Titan, Llama and Mistral. Nova sends the events of Converse,
whose dialect is a table; other models send events of their own dialects. In all these dialects, any event can
have the action of a guardrail at its top, and the last event a trace of the guardrail: `add_guardrail` reads
action and trace.

Source: botocore data/bedrock-runtime/2023-09-30; docs.aws.amazon.com bedrock userguide, model-parameters.
"""

from typing import Any, Final

from llmtap.json_types import JsonObject
from llmtap.protocol import verdicts
from llmtap.protocol.delta import Delta, EventClass, TokenSource, Verdict
from llmtap.protocol.dialects import shapes
from llmtap.protocol.dialects.openai_shapes import RunningCount, read_count, read_json
from llmtap.protocol.server_times import object_times
from llmtap.protocol.sse import SseEvent


def _trace_verdict(trace: Any) -> Verdict | None:
    """Return the verdict in the trace of a guardrail; None if the guardrail did not act."""
    guardrail = trace.get("guardrail") if isinstance(trace, dict) else None
    phase, acted = verdicts.phase_of_trace(guardrail)
    if acted == "redacted":
        return Verdict("trace.guardrail", None, acted, phase or "output", path="trace.guardrail")
    if phase is None or acted is None:
        return None
    kind = verdicts.INPUT if phase == "input" else verdicts.OUTPUT
    return Verdict("trace.guardrail", kind, "replaced", phase, path="trace.guardrail", substituted=True)


_INVOCATION: Final = "amazon-bedrock-invocationMetrics"
_METHODS: Final = ("/invoke", "/invoke-with-response-stream")
_TEXTS: Final = ("outputText", "generation", "outputs", "results")


class BedrockText(shapes.ObjectReader):
    """Reader of the text models of Amazon Bedrock."""

    name = "bedrock.invoke"
    claim_max = 4
    end_certain = True

    __slots__ = ("_input_members", "_running_count")

    def __init__(self) -> None:
        super().__init__()
        self._input_members: JsonObject = {}
        """Member with the number of prompt tokens, stored because only the first event has it."""
        self._running_count = RunningCount()
        """Number of output tokens so far, by the counts in events."""

    @staticmethod
    def claim(value: JsonObject, path: str) -> int:
        """Return how certainly an object is of this dialect (`registry.Dialect.claim`)."""
        if path.endswith(_METHODS) and any(name in value for name in _TEXTS):
            return 4
        return 2 if "completionReason" in value or "generation_token_count" in value else 0

    def _read(self, value: JsonObject, event: SseEvent) -> Delta:
        parts = value.get("outputs") or value.get("results")
        part = parts[0] if isinstance(parts, list) and parts and isinstance(parts[0], dict) else {}
        if all(value.get(name) is None for name in _TEXTS):
            return shapes.failure_in(value, event.event)
        everything = part | {name: v for name, v in value.items() if v is not None}
        text = shapes.text_of(_first_member(everything, ("outputText", "generation", "text")))
        reason = _first_member(everything, ("completionReason", "stop_reason"))
        delta = shapes.gather(
            [(EventClass.CONTENT, text)] if text else [], reason=reason, signal="stop_reason"
        )
        added = self._running_count.growth(0, read_count(value.get("generation_token_count")) or 0)
        if added:
            delta.output, delta.choices = True, shapes.CHOICE_0
            delta.tokens, delta.token_source = added, TokenSource.RUNNING_USAGE
        self._input_members |= _present_members(value, ("inputTextTokenCount", "prompt_token_count"))
        output = _present_members(
            everything, ("totalOutputTextTokenCount", "generation_token_count", "tokenCount")
        )
        invoked = value[_INVOCATION] if isinstance(value.get(_INVOCATION), dict) else {}
        counts = shapes.counts_of(
            invoked.get("inputTokenCount", next(iter(self._input_members.values()), None)),
            invoked.get("outputTokenCount", next(iter(output.values()), None)),
        )
        if counts is not None and counts.output:
            shapes.add_counts(delta, counts, invoked or self._input_members | output)
        delta.usage_running = reason is None
        delta.server_times = object_times(_INVOCATION, invoked)
        return delta

    def read_body(self, body: bytes) -> Delta:
        return self.read_event(SseEvent(0, len(body), body))


def _present_members(value: JsonObject, names: tuple[str, ...]) -> JsonObject:
    return {name: value[name] for name in names if value.get(name)}


def _first_member(value: JsonObject, names: tuple[str, ...]) -> Any:
    return next(iter(_present_members(value, names).values()), None)


GUARDRAIL_ACTION: Final = b"guardrail"
"""Bytes that every event with the action of a guardrail contains. Events without these bytes are not passed
to `add_guardrail`, which decodes its event a second time."""
_GENERATED: Final = frozenset({EventClass.CONTENT, EventClass.TOOL_CALL, EventClass.REASONING})


def add_guardrail(delta: Delta, data: bytes) -> None:
    """Add the verdict of a guardrail's action or trace in an event or body (`data`) to its Delta.

    This verdict replaces that of a finish reason, unless it does not show whether the guardrail assessed
    input or output. If the guardrail replaced the answer, the text of the event is no output.
    """
    root = read_json(data)
    if not isinstance(root, dict):
        return
    action, trace = root.get("amazon-bedrock-guardrailAction"), root.get("amazon-bedrock-trace")
    verdict = verdicts.guardrail_action_verdict(action, trace)
    if verdict is None:
        end = root["metadata"] if isinstance(root.get("metadata"), dict) else root
        verdict = _trace_verdict(end.get("trace") or (trace if "stopReason" in root else None))
    if verdict is None and "stopReason" in root and delta.verdict is not None:
        verdict = delta.verdict if delta.verdict.substituted else None
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
        # The text of a Delta with the class GUARDRAIL must be content (`Delta.text`). This event has no
        # content, so its text is that of reasoning or of a call: remove it.
        delta.text = ""
    delta.event_class, delta.also = EventClass.GUARDRAIL, tuple(c for c in kept if c < EventClass.METADATA)
