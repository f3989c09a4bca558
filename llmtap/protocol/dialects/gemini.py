"""Read Gemini's `generateContent` and `streamGenerateContent` as Deltas: parts of candidates, usage.

An event stream or the elements of one JSON array; no end marker. Thoughts are counted apart.

Source: ai.google.dev api generate-content; googleapis/python-genai google/genai/types.py.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Any, Final

from llmtap.protocol.delta import Delta, EventClass, UsageCounts
from llmtap.protocol.dialects import shapes
from llmtap.protocol.dialects.openai_shapes import EVENT_CHOICES_MAX, INDEX_MAX, PIECES_MAX, read_json
from llmtap.protocol.sse import SseEvent
from llmtap.protocol.verdicts import of_block_reason, of_finish_reason

_METHODS: Final = (":streamGenerateContent", ":generateContent")
_MEMBERS: Final = ("candidates", "promptFeedback", "usageMetadata")
_COUNTS: Final = ("promptTokenCount", "candidatesTokenCount", "thoughtsTokenCount", "cachedContentTokenCount")


class Gemini(shapes.ObjectReader):
    name = "gemini"

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

    def _read(self, said: dict[str, Any], event: SseEvent) -> Delta:
        if all(said.get(name) is None for name in _MEMBERS):
            return shapes.failure_in(said, event.event)
        return self._read_answer([said])

    def read_body(self, body: bytes) -> Delta:
        value = read_json(body)
        values = value[:EVENT_CHOICES_MAX] if isinstance(value, list) else [value]
        said = [v for v in values if isinstance(v, dict) and any(map(v.get, _MEMBERS))]
        return self._read_answer(said) if said else shapes.failure_in(value)

    def _read_answer(self, said: list[dict[str, Any]]) -> Delta:
        """Read an event, or all elements of a stream that was read as one value."""
        pieces: list[shapes.Piece] = []
        choices: list[int] = []
        reason, role, verdict = None, False, None
        lists = [one["candidates"] for one in said if isinstance(one.get("candidates"), list)]
        for candidate in list(chain.from_iterable(lists))[:EVENT_CHOICES_MAX]:
            if not isinstance(candidate, dict):
                continue
            content = candidate["content"] if isinstance(candidate.get("content"), dict) else {}
            role |= "role" in content
            reason = shapes.text_of(candidate.get("finishReason")) or reason
            verdict = verdict or of_finish_reason(reason or "", "finishReason")
            if found := list(_parts(content.get("parts"))):
                index = candidate.get("index")
                choices.append(index if type(index) is int and 0 <= index < INDEX_MAX else 0)
                pieces += found
        feedback = next((one["promptFeedback"] for one in said if one.get("promptFeedback")), None)
        verdict = of_block_reason(feedback, "promptFeedback") or verdict
        usage = next((one["usageMetadata"] for one in reversed(said) if one.get("usageMetadata")), None)
        usage = usage if isinstance(usage, dict) else {}
        counts = shapes.counted(*map(usage.get, _COUNTS))  # totals so far: the last one counts
        names_speaker = role and not (pieces or reason or self._spoken or (counts and counts.output))
        self._spoken |= bool(pieces)
        delta = shapes.gather(
            pieces, (EventClass.ROLE,) if names_speaker else (),
            choices=tuple(dict.fromkeys(choices)) or shapes.FIRST, reason=reason, signal="finishReason",
            verdict=verdict, counts=counts, usage=usage,
        )  # fmt: skip
        self._answered |= delta.content or delta.blank or delta.tool_call
        ended_unanswered = delta.finish_reason is not None and not self._answered
        if counts is not None and ended_unanswered and _only_thought(usage, counts):
            counts.output = 0
        self._name(delta, said[0].get("modelVersion"))
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
        blob = blob if isinstance(blob, dict) else {}
        if blob.get("data") and shapes.text_of(blob.get("mimeType")).startswith("audio/"):
            yield EventClass.CONTENT, ""
