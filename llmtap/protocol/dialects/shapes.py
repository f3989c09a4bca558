"""Common code of all dialects except OpenAI's chat and completions: decode JSON events, build Deltas.

`ObjectReader` is the base of the readers of these dialects, including OpenAI's Responses and Realtime.
`gather` builds the Delta of an event with several pieces of output.

Source: docs/dialects.md.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from llmtap.json_types import JsonObject
from llmtap.protocol.delta import MODEL_CHARS_MAX, Delta, EventClass, UsageCounts, Verdict
from llmtap.protocol.dialects import openai_shapes
from llmtap.protocol.dialects.openai_choices import failure_of, is_flat_error
from llmtap.protocol.dialects.openai_shapes import text_of as text_of
from llmtap.protocol.sse import SseEvent
from llmtap.protocol.verdicts import error_verdict

CHOICE_0: Final = (0,)
ID_CHARS_MAX: Final = 128

Piece = tuple[EventClass, str]
"""Class and text of a piece of output. The name of a call, and audio, have an empty text."""


class ObjectReader:
    """Base of readers of JSON objects. `_read` gets the object of an event, with values of any type."""

    __slots__ = ("_model",)

    def __init__(self) -> None:
        self._model: str | None = None

    def read_event(self, event: SseEvent) -> Delta:
        data = event.data
        if data is None or not openai_shapes.is_object(data):
            return openai_shapes.read_non_object(event)
        value = openai_shapes.read_json(data)
        return self._read(value, event) if type(value) is dict else openai_shapes.unknown_delta(event.event)

    def _read(self, value: JsonObject, event: SseEvent) -> Delta:
        raise NotImplementedError

    def _set_model(self, delta: Delta, model: Any) -> None:
        name = text_of(model)[:MODEL_CHARS_MAX]
        if name and name != self._model:
            self._model = delta.model = name


def answers(value: Any) -> list[JsonObject]:
    """Return the answers in a body, which is one object, or a list of objects for several prompts."""
    values = value[: openai_shapes.CHOICES_MAX] if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, dict)]


def kind_of(value: JsonObject, event: SseEvent) -> str:
    """Return the type of an event: its `type`, else its `event:` line, which some gateways drop."""
    return text_of(value.get("type")) or (event.event or b"").decode("latin-1")


def failure_in(value: Any, name: bytes | None = None) -> Delta:
    """Return the Delta of JSON that is no event of the dialect: a failure, a ping, or an event that is not
    understood. A failure is an object with a member `error`, a list with such an object, or an object that is
    marked as an error by its event name, its type, or the code of a guardrail."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]  # Google's services send their errors in a list.
    if not isinstance(value, dict):
        return Delta(EventClass.KEEPALIVE) if name == b"ping" else openai_shapes.unknown_delta(name)
    if name == b"ping" or value.get("type") == "ping":
        return Delta(EventClass.KEEPALIVE)
    name = b"error" if value.get("type") == "error" else name
    error, verdict = failure_of(value, name), error_verdict(value)
    is_marked = name == b"error" or value.get("object") == "error" or verdict is not None
    if error is None or (is_flat_error(value) and not is_marked):
        return openai_shapes.unknown_delta(name)
    findings = openai_shapes.Findings()
    findings.add_error(error, verdict)
    delta = findings.to_delta()
    if delta.error_type == "error" and isinstance(value.get("error_type"), str):
        delta.error_type = value["error_type"]
    return delta


def counts_of(of_input: Any, of_output: Any, reasoning: Any = None, cached: Any = None) -> UsageCounts | None:
    """Return the token counts of a usage; None if all of them are zero or missing, and none is invalid."""
    counts = openai_shapes.read_counts(of_input, of_output, reasoning, cached)
    return counts if counts.input or counts.output or counts.refused else None


def add_counts(delta: Delta, counts: UsageCounts | None, usage: JsonObject) -> None:
    if counts is not None:
        delta.counts, delta.usage = counts, usage
        delta.also = (*delta.also, EventClass.USAGE)


def piece(kind: EventClass, text: str, choices: tuple[int, ...] = CHOICE_0, *, audio: bool = False) -> Delta:
    """Return the Delta of an event that carries only one piece of output."""
    if kind is EventClass.CONTENT:
        blank = not audio and text.isspace()
        return Delta(kind, 0, True, not blank, blank, False, text, choices)
    delta = Delta(kind, 0, True, False, False, kind is EventClass.REASONING, text, choices)
    delta.tool_call = kind is EventClass.TOOL_CALL
    delta.refusal = kind is EventClass.REFUSAL
    return delta


def gather(
    pieces: Iterable[Piece] = (),
    beside: Iterable[EventClass] = (),
    *,
    choices: tuple[int, ...] = CHOICE_0,
    reason: Any = None,
    signal: str = "finish_reason",
    verdict: Verdict | None = None,
    counts: UsageCounts | None = None,
    usage: Any = None,
) -> Delta:
    """Return the Delta of an event, or of a whole answer, from all that was read of it.

    `beside`: further classes of the event. `reason`: finish reason; `signal`: name of its field. `verdict`
    adds the class GUARDRAIL, and `counts`, which were read from `usage`, add the class USAGE.
    """
    findings = openai_shapes.Findings()
    for kind, text in pieces:
        findings.add_piece(0, kind, text, audio=not text)  # A piece without text is audio or a call's name.
    findings.add_classes(*beside)
    findings.add_verdict(verdict)
    if reason := text_of(reason):
        findings.add_finish(reason, signal=signal, judged=verdict is None)
    if counts is not None:
        findings.add_classes(EventClass.USAGE)
        findings.delta.counts, findings.delta.usage = counts, usage
    delta = findings.to_delta()
    if delta.output:
        delta.choices = choices
    return delta


def merge_deltas(deltas: Sequence[Delta], choices: tuple[int, ...]) -> Delta:
    """Return one Delta for the answers to one or several prompts, with the end of the last answer."""
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    delta = gather(((EventClass.CONTENT, d.text) for d in deltas if d.text), last.also, choices=choices)
    delta.finish_reason, delta.usage, delta.model = last.finish_reason, last.usage, deltas[0].model
    counts = [d.counts for d in deltas if d.counts is not None]
    if counts:
        delta.counts = openai_shapes.sum_counts(counts)
    return delta
