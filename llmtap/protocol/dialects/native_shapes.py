"""What the dialects that are not OpenAI's chat have in common: lenient decoding, counts, and the Delta of
one piece or of many.

Source: shared/dialects/dialects.md sections 1, 4 and 5.
"""

from collections.abc import Iterable
from typing import Any, Final, Generic, TypeVar

import msgspec

from llmtap.protocol.delta import Delta, EventClass, UsageCounts, Verdict
from llmtap.protocol.dialects.openai_beside import read_failure
from llmtap.protocol.dialects.openai_shapes import BAD_JSON, read_counts, read_json, unknown
from llmtap.protocol.sse import SseEvent
from llmtap.protocol.verdicts import of_finish_reason

__all__ = [
    "FIRST",
    "ID_CHARS_MAX",
    "Fields",
    "Piece",
    "counted",
    "figures",
    "gather",
    "is_object",
    "kind_of",
    "piece",
    "text_of",
]

FIRST: Final = (0,)
"""The only choice of an answer that has no choices."""
ID_CHARS_MAX: Final = 128
"""Of an answer's id, as far as it is remembered."""
_WORD_CHARS_MAX: Final = 64

Piece = tuple[EventClass, str]
"""A class of output, and its text; a call's name or audio comes with none."""
Shape = TypeVar("Shape", bound=msgspec.Struct)


class Fields(Generic[Shape]):
    """Decodes the few fields of a JSON object that a Struct names and skips the rest at no cost.

    The Struct's fields are all Any with a default: what servers send is looked at before use, so that an odd
    type costs that field and nothing else.
    """

    __slots__ = ("_decode", "_names", "_shape")

    def __init__(self, shape: type[Shape]) -> None:
        self._shape = shape
        self._decode = msgspec.json.Decoder(shape).decode
        self._names = [(f.name, f.encode_name) for f in msgspec.structs.fields(shape)]

    def read(self, data: bytes) -> Shape | None:
        """The fields; None where `data` is no JSON object."""
        try:
            return self._decode(data)
        except BAD_JSON:
            value = read_json(data)
        return self.of(value)

    def of(self, value: Any) -> Shape | None:
        """The same of a decoded value."""
        if not isinstance(value, dict):
            return None
        return self._shape(**{name: value[key] for name, key in self._names if key in value})


def is_object(data: bytes | None) -> bool:
    """Whether an event's data may be a JSON object."""
    return data is not None and (data.startswith(b"{") or data.lstrip().startswith(b"{"))


def kind_of(kind: Any, event: SseEvent | None) -> str:
    """The type of an event: it names itself, or else its `event:` line does, which gateways may drop."""
    if isinstance(kind, str) and kind:
        return kind
    return event.event.decode("latin-1") if event is not None and event.event else ""


def failure_in(value: Any, name: bytes | None = None) -> Delta:
    """What JSON says that is none of a dialect's own: a failure, which may lie flat in an event of that type,
    or nothing that is understood. `name` is that of the event."""
    if isinstance(value, dict) and value.get("type") == "error":
        name = b"error"
    return read_failure(value, name) or unknown(name)


def text_of(value: Any) -> str:
    """The value if it is a text, else an empty one."""
    return value if isinstance(value, str) else ""


def counted(of_input: Any, of_output: Any, reasoning: Any = None, cached: Any = None) -> UsageCounts | None:
    """The counts; None where neither input nor output was counted."""
    counts = read_counts(of_input, of_output, reasoning, cached)
    return counts if counts.input or counts.output or counts.refused else None


def figures(value: dict[str, Any]) -> dict[str, Any]:
    """An object that serves as usage, without the lists and the texts that may stand beside its figures."""
    return {
        name: v
        for name, v in value.items()
        if not isinstance(v, list) and not (isinstance(v, str) and len(v) > _WORD_CHARS_MAX)
    }


def piece(kind: EventClass, text: str, choices: tuple[int, ...] = FIRST, *, audio: bool = False) -> Delta:
    """An event that carries one piece of output and nothing else."""
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
    """One Delta of all that an event, or a whole answer, says.

    Args:
        pieces: of output, in their order.
        beside: classes of what else it says.
        choices: which ones the pieces belong to.
        reason: why it ended, if it did; `signal` names the field that says so.
        verdict: what a guardrail said in other words; with it the class GUARDRAIL.
    """
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
            # dialects.md 7: a stop reason that says refusal is of that class, whoever it was.
            classes.add(EventClass.REFUSAL if reason == "refusal" else EventClass.GUARDRAIL)
    ranked = sorted(classes) or [EventClass.METADATA]
    first = ranked[0]
    content = "".join(texts.get(EventClass.CONTENT, ()))
    delta = Delta(first, also=tuple(ranked[1:]), finish_reason=reason, verdict=verdict)
    if texts:
        delta.output = True
        delta.choices = choices
        delta.text = "".join(texts.get(first, ()))
        delta.content = bool(content) and not content.isspace()
        delta.blank = bool(content) and not delta.content
        delta.reasoning = EventClass.REASONING in texts
        delta.tool_call = EventClass.TOOL_CALL in texts
        delta.refusal = EventClass.REFUSAL in texts
    return delta
