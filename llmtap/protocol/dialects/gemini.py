"""Read Gemini's `generateContent` and `streamGenerateContent` as Deltas: parts of candidates, usage.

An event stream or the elements of one JSON array; no end marker. Thoughts are counted apart.

Source: ai.google.dev api generate-content; googleapis/python-genai google/genai/types.py.
"""

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from llmtap.protocol.delta import Delta, EventClass, UsageCounts
from llmtap.protocol.dialects import shapes
from llmtap.protocol.dialects.openai_shapes import EVENT_CHOICES_MAX, INDEX_MAX, PIECES_MAX, read_json
from llmtap.protocol.sse import SseEvent
from llmtap.protocol.verdicts import of_block_reason, of_finish_reason


class _Event(msgspec.Struct, gc=False):
    candidates: Any = None
    prompt_feedback: Any = msgspec.field(default=None, name="promptFeedback")
    usage: Any = msgspec.field(default=None, name="usageMetadata")
    model: Any = msgspec.field(default=None, name="modelVersion")


_METHODS: Final = (":streamGenerateContent", ":generateContent")
_COUNTS: Final = ("promptTokenCount", "candidatesTokenCount", "thoughtsTokenCount", "cachedContentTokenCount")


class Gemini(shapes.ObjectReader):
    name = "gemini"
    fields = shapes.Fields(_Event)

    __slots__ = ("_answered", "_spoken")

    def __init__(self) -> None:
        super().__init__()
        self._answered = False
        self._spoken = False

    @staticmethod
    def claim(value: dict[str, Any], path: str) -> int:
        ours = path.endswith(_METHODS)
        if isinstance(value.get("candidates"), list) or isinstance(value.get("usageMetadata"), dict):
            return 3
        if "promptFeedback" in value and "choices" not in value:
            return 3 if ours else 2
        return int(ours)

    def _read(self, said: _Event, data: bytes, event: SseEvent) -> Delta:
        if said.candidates is None and said.prompt_feedback is None and said.usage is None:
            return shapes.failure_in(read_json(data), event.event)
        return self._read_answer(said)

    def read_body(self, body: bytes) -> Delta:
        value = read_json(body)
        values = value[:EVENT_CHOICES_MAX] if isinstance(value, list) else [value]
        answers = (a for v in values if (a := self.fields.of(v)) is not None)
        said = [a for a in answers if a.candidates or a.prompt_feedback or a.usage]
        if not said:
            return shapes.failure_in(value)
        # The elements of a stream that was read as one value.
        lists = [a.candidates for a in said if isinstance(a.candidates, list)]
        whole = _Event(
            [candidate for candidates in lists for candidate in candidates],
            next((a.prompt_feedback for a in said if a.prompt_feedback), None),
            next((a.usage for a in reversed(said) if a.usage), None),
            said[0].model,
        )
        return self._read_answer(whole)

    def _read_answer(self, said: _Event) -> Delta:
        pieces: list[shapes.Piece] = []
        choices: list[int] = []
        reason, role, verdict = None, False, None
        candidates = said.candidates if isinstance(said.candidates, list) else []
        for candidate in candidates[:EVENT_CHOICES_MAX]:
            if not isinstance(candidate, dict):
                continue
            content = candidate.get("content")
            parts = content.get("parts") if isinstance(content, dict) else None
            found = list(_parts(parts))
            role |= isinstance(content, dict) and "role" in content
            reason = shapes.text_of(candidate.get("finishReason")) or reason
            verdict = verdict or of_finish_reason(reason or "", "finishReason")
            if found:
                index = candidate.get("index")
                choices.append(index if type(index) is int and 0 <= index < INDEX_MAX else 0)
                pieces += found
        verdict = of_block_reason(said.prompt_feedback, "promptFeedback") or verdict
        usage = said.usage if isinstance(said.usage, dict) else {}
        counts = shapes.counted(*(usage.get(name) for name in _COUNTS))
        beside = [EventClass.USAGE] if counts is not None else []
        if role and not (pieces or reason or self._spoken or (counts and counts.output)):
            beside.append(EventClass.ROLE)
        self._spoken |= bool(pieces)
        delta = shapes.gather(
            pieces,
            beside,
            choices=tuple(dict.fromkeys(choices)) or shapes.FIRST,
            reason=reason,
            signal="finishReason",
            verdict=verdict,
        )
        self._answered |= delta.content or delta.blank or delta.tool_call
        if counts is not None:
            if delta.finish_reason is not None and not self._answered and _only_thought(usage, counts):
                counts.output = 0
            delta.usage, delta.counts = usage, counts  # totals so far: the last one counts
        self._name(delta, said.model)
        return delta


def _only_thought(usage: dict[str, Any], counts: UsageCounts) -> bool:
    """Return whether the total leaves no room for an answer, whose count is then missing."""
    if counts.output is not None or not counts.reasoning:
        return False
    return (counts.input or 0) + counts.reasoning == usage.get("totalTokenCount")


def _parts(parts: Any) -> Iterator[shapes.Piece]:
    """Yield the output in the parts of a content; what a tool returned, and images, are none."""
    for part in parts[:PIECES_MAX] if isinstance(parts, list) else ():
        if not isinstance(part, dict):
            continue
        text, blob = shapes.text_of(part.get("text")), part.get("inlineData")
        call, code = part.get("functionCall"), part.get("executableCode")
        if text:
            yield EventClass.REASONING if part.get("thought") is True else EventClass.CONTENT, text
        if isinstance(call, dict) and (call.get("name") or call.get("args") or call.get("partialArgs")):
            yield EventClass.TOOL_CALL, ""
        if isinstance(code, dict) and code.get("code"):
            yield EventClass.TOOL_CALL, shapes.text_of(code["code"])
        if (
            isinstance(blob, dict)
            and shapes.text_of(blob.get("mimeType")).startswith("audio/")
            and blob.get("data")
        ):
            yield EventClass.CONTENT, ""
