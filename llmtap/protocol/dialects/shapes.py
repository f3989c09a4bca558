"""Shared code of all dialects but OpenAI's chat and completions: decode JSON events, build their Delta.

`ObjectReader` is the base of their readers, those of OpenAI's Responses and Realtime included. `Fields`
decodes leniently: a field of a wrong type costs that field alone. `gather` puts the pieces of output of one
event together.

Source: docs/dialects.md.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec

from llmtap.protocol.delta import MODEL_CHARS_MAX, Delta, EventClass, UsageCounts, Verdict
from llmtap.protocol.dialects import openai_shapes
from llmtap.protocol.dialects.openai_beside import read_failure
from llmtap.protocol.sse import SseEvent
from llmtap.protocol.verdicts import FAILED, of_finish_reason, reason_kind

FIRST: Final = (0,)
ID_CHARS_MAX: Final = 128
_WORD_CHARS_MAX: Final = 64

Piece = tuple[EventClass, str]
"""A class of output, and its text; a call's name or audio has an empty text."""
Shape = TypeVar("Shape", bound=msgspec.Struct)


class Fields(Generic[Shape]):
    """Decoder of the fields of a JSON object that a Struct names. All are Any with a default: an odd type
    costs that field and nothing else."""

    __slots__ = ("_decode", "_names", "_shape")

    def __init__(self, shape: type[Shape]) -> None:
        self._shape = shape
        self._decode = msgspec.json.Decoder(shape).decode
        self._names = [(f.name, f.encode_name) for f in msgspec.structs.fields(shape)]

    def read(self, data: bytes) -> Shape | None:
        try:
            return self._decode(data)
        except openai_shapes.BAD_JSON:
            value = openai_shapes.read_json(data)
        return self.of(value)

    def of(self, value: Any) -> Shape | None:
        if not isinstance(value, dict):
            return None
        return self._shape(**{name: value[key] for name, key in self._names if key in value})

    def answers(self, value: Any) -> list[Shape]:
        """Return the fields of each answer in a body: one object, or a list of them for several prompts."""
        values = value[: openai_shapes.CHOICES_MAX] if isinstance(value, list) else [value]
        return [said for v in values if (said := self.of(v)) is not None]


class ObjectReader:
    __slots__ = ("_model",)
    fields: Fields[Any]

    def __init__(self) -> None:
        self._model: str | None = None

    def read_event(self, event: SseEvent) -> Delta:
        data = event.data
        if data is None or not openai_shapes.is_object(data):
            return openai_shapes.read_frame(event)
        said = self.fields.read(data)
        return openai_shapes.unknown(event.event) if said is None else self._read(said, data, event)

    def _read(self, said: Any, data: bytes, event: SseEvent) -> Delta:
        raise NotImplementedError

    def _name(self, delta: Delta, model: Any) -> None:
        name = model[:MODEL_CHARS_MAX] if isinstance(model, str) else ""
        if name and name != self._model:
            self._model = delta.model = name


def kind_of(kind: Any, event: SseEvent | None) -> str:
    """Return the type of an event: its own, else that of its `event:` line, which gateways may drop."""
    if isinstance(kind, str) and kind:
        return kind
    return event.event.decode("latin-1") if event is not None and event.event else ""


def failure_in(value: Any, name: bytes | None = None) -> Delta:
    """Return what JSON outside the dialect says: a failure, which may be flat in an event of type `error`, or
    an event that is not understood. `name` is that of the event."""
    if isinstance(value, dict) and value.get("type") == "error":
        name = b"error"
    return read_failure(value, name) or openai_shapes.unknown(name)


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else ""


def counted(of_input: Any, of_output: Any, reasoning: Any = None, cached: Any = None) -> UsageCounts | None:
    counts = openai_shapes.read_counts(of_input, of_output, reasoning, cached)
    return counts if counts.input or counts.output or counts.refused else None


def add_counts(delta: Delta, counts: UsageCounts | None, usage: dict[str, Any]) -> None:
    if counts is not None:
        delta.counts, delta.usage = counts, usage
        delta.also = (*delta.also, EventClass.USAGE)


def figures(value: dict[str, Any]) -> dict[str, Any]:
    """Return an object that serves as usage, without its lists and long texts."""
    return {
        name: v
        for name, v in value.items()
        if not isinstance(v, list) and not (isinstance(v, str) and len(v) > _WORD_CHARS_MAX)
    }


def piece(kind: EventClass, text: str, choices: tuple[int, ...] = FIRST, *, audio: bool = False) -> Delta:
    """Return the Delta of an event that carries one piece of output and nothing else."""
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
    choices: tuple[int, ...] = FIRST,
    reason: Any = None,
    signal: str = "finish_reason",
    verdict: Verdict | None = None,
) -> Delta:
    """Return one Delta of everything that an event, or a whole answer, says. `beside` are classes other than
    those of the pieces, `signal` names the field of `reason`, `verdict` adds the class GUARDRAIL."""
    texts: dict[EventClass, list[str]] = {}
    for kind, text in pieces:
        texts.setdefault(kind, []).append(text)
    classes = {*texts, *beside}
    reason = text_of(reason) or None
    if verdict is not None:
        classes.add(EventClass.GUARDRAIL)
    elif reason is not None:
        verdict = of_finish_reason(reason, signal)
        if verdict is not None:
            # dialects.md 7: a stop reason that says refusal is of that class, whoever refused.
            classes.add(EventClass.REFUSAL if reason == "refusal" else EventClass.GUARDRAIL)
    failed = reason is not None and reason_kind(reason) in FAILED
    if failed:
        classes.add(EventClass.ERROR)
    ranked = sorted(classes) or [EventClass.METADATA]
    first = ranked[0]
    content = "".join(texts.get(EventClass.CONTENT, ()))
    delta = Delta(first, also=tuple(ranked[1:]), finish_reason=reason, verdict=verdict)
    delta.error_type = reason if failed else None
    if texts:
        delta.output = True
        delta.choices = choices
        delta.text = content if first <= EventClass.ERROR else "".join(texts.get(first, ()))
        spoken = texts.get(EventClass.CONTENT, ())
        delta.content = bool(spoken) and ("" in spoken or not content.isspace())  # audio has no text
        delta.blank = bool(spoken) and not delta.content
        delta.reasoning = EventClass.REASONING in texts
        delta.tool_call = EventClass.TOOL_CALL in texts
        delta.refusal = EventClass.REFUSAL in texts
    return delta


def merged(deltas: Sequence[Delta], choices: tuple[int, ...]) -> Delta:
    """Return one Delta of the answers to one prompt or several; the end is that of the last one."""
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    delta = gather(((EventClass.CONTENT, d.text) for d in deltas if d.text), last.also, choices=choices)
    delta.finish_reason, delta.usage, delta.model = last.finish_reason, last.usage, deltas[0].model
    counts = [d.counts for d in deltas if d.counts is not None]
    if counts:
        delta.counts = openai_shapes.sum_counts(counts)
    return delta
