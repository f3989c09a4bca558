"""Read answers of SGLang and of TGI to `/generate` as Deltas: one path, two dialects.

SGLang repeats the text so far in each event, or streams increments: then a text does not begin with the one
before. TGI sends one token an event; its last event repeats the whole text and counts the tokens, the
special one included.

Source: sgl-project/sglang srt/managers/tokenizer_manager.py; huggingface/text-generation-inference
router/src/server.rs.
"""

from typing import Any, Final

from llmtap.protocol.delta import Delta, EventClass, TokenSource, UsageCounts
from llmtap.protocol.dialects import openai_shapes, shapes
from llmtap.protocol.server_times import object_times
from llmtap.protocol.sse import SseEvent

_ABORTED: Final = "abort"
_COUNTS: Final = ("prompt_tokens", "completion_tokens", "reasoning_tokens", "cached_tokens")


class SGLang(shapes.ObjectReader):
    name = "sglang.native"

    __slots__ = ("_cumulative", "_running", "_said")

    def __init__(self) -> None:
        super().__init__()
        self._cumulative = True
        """Every text began with the one before it."""
        self._running = openai_shapes.RunningCount()
        self._said: dict[int, tuple[int, int]] = {}
        """Length and hash of the text so far, by choice; the text itself is not kept."""

    @staticmethod
    def claim(value: dict[str, Any], path: str) -> int:
        if isinstance(value.get("meta_info"), dict):
            return 3 if "text" in value or "output_ids" in value else 2
        return int("error" in value and path.endswith("/generate"))

    def _read(self, said: dict[str, Any], event: SseEvent) -> Delta:
        meta, index = said.get("meta_info"), said.get("index")
        if not isinstance(meta, dict):
            return shapes.failure_in(said, event.event)
        index = index if type(index) is int else 0
        return self._read_answer(self._new(index, shapes.text_of(said.get("text"))), meta, index)

    def read_body(self, body: bytes) -> Delta:
        value = openai_shapes.read_json(body)
        found = [a for a in shapes.answers(value) if isinstance(a.get("meta_info"), dict)]
        if not found:
            return shapes.failure_in(value)
        deltas = [
            self._read_answer(shapes.text_of(a.get("text")), a["meta_info"], i) for i, a in enumerate(found)
        ]
        delta = shapes.merged(deltas, tuple(range(len(deltas))))
        delta.tokens, delta.token_source = -1, TokenSource.NONE
        return delta

    def _new(self, index: int, text: str) -> str:
        length, mark = self._said.get(index, (0, 0))
        # An increment may begin like the text so far by chance; the next one hardly does.
        self._cumulative = self._cumulative and len(text) >= length and hash(text[:length]) == mark
        if not self._cumulative:
            return text
        if index in self._said or len(self._said) < openai_shapes.CHOICES_MAX:
            self._said[index] = (len(text), hash(text))
        return text[length:]

    def _read_answer(self, text: str, meta: dict[str, Any], index: int) -> Delta:
        total = openai_shapes.count(meta.get("completion_tokens"))
        added = 0 if total is None else self._running.step(index, total)
        finish = meta.get("finish_reason")
        ended: dict[str, Any] = finish if isinstance(finish, dict) else {"type": finish}
        reason = shapes.text_of(ended.get("type"))
        failed = reason == _ABORTED and bool(ended.get("message"))
        beside = (EventClass.ERROR,) if failed else ()
        choices = (index,) if index else shapes.FIRST
        delta = shapes.gather(
            [(EventClass.CONTENT, text)] if text else (), beside, choices=choices, reason=reason
        )
        if added:
            delta.output, delta.choices = True, choices
            delta.tokens, delta.token_source = added, TokenSource.RUNNING_USAGE
        if failed:
            kind = ended.get("err_type")
            delta.error_type = kind if isinstance(kind, str) else _ABORTED
            delta.error_message = shapes.text_of(ended.get("message"))
        if reason:
            delta.server_times = object_times("meta_info", meta)
            counts = shapes.counted(*map(meta.get, _COUNTS))
            shapes.add_counts(delta, counts, shapes.figures(meta))
            delta.usage_running = counts is not None and self._running.several
        return delta


class Tgi(shapes.ObjectReader):
    name = "tgi.native"

    __slots__ = ()

    @staticmethod
    def claim(value: dict[str, Any], path: str) -> int:
        if isinstance(value.get("token"), dict) or "generated_text" in value:
            return 3 if "generated_text" in value and "details" in value else 2
        named = "error_type" in value or path.endswith(("/generate_stream", "/generate"))
        return int("error" in value and named)

    def _read(self, said: dict[str, Any], event: SseEvent) -> Delta:
        token, details = said.get("token"), said.get("details")
        if said.get("error"):
            return _read_failure(said, event.event)
        if isinstance(token, dict):
            text = "" if token.get("special") is True else shapes.text_of(token.get("text"))
            if text:
                delta = shapes.piece(EventClass.CONTENT, text)
            else:
                # Generated all the same: a special token, or one that ends no character yet.
                delta = Delta(EventClass.METADATA, output=True, choices=shapes.FIRST)
            delta.tokens, delta.token_source = 1, TokenSource.TOKEN_IDS
        elif details is None and said.get("generated_text") is None:
            return openai_shapes.unknown(event.event)
        else:
            delta = Delta(EventClass.METADATA)
        if isinstance(details, dict):
            _add_details(delta, details)
        return delta

    def read_body(self, body: bytes) -> Delta:
        answers = shapes.answers(openai_shapes.read_json(body))
        if not answers:
            return openai_shapes.unknown()
        if answers[0].get("error"):
            return _read_failure(answers[0], None)
        texts = [shapes.text_of(a.get("generated_text")) for a in answers]
        choices = tuple(i for i, text in enumerate(texts) if text)
        delta = shapes.gather(((EventClass.CONTENT, t) for t in texts if t), choices=choices)
        delta.parsed = any(a.get("generated_text") is not None for a in answers)
        counts: list[UsageCounts] = []
        for details in (a["details"] for a in answers if isinstance(a.get("details"), dict)):
            delta.also = ()
            _add_details(delta, details)
            if delta.counts is not None:
                counts.append(delta.counts)
        if counts:
            delta.counts = openai_shapes.sum_counts(counts)
        return delta


def _add_details(delta: Delta, details: dict[str, Any]) -> None:
    delta.finish_reason = shapes.text_of(details.get("finish_reason")) or None
    of_input = details.get("input_length")
    if of_input is None and isinstance(prefill := details.get("prefill"), list) and prefill:
        of_input = len(prefill)
    shapes.add_counts(
        delta, shapes.counted(of_input, details.get("generated_tokens")), shapes.figures(details)
    )


def _read_failure(said: dict[str, Any], name: bytes | None) -> Delta:
    delta = shapes.failure_in(said, name)
    if isinstance(kind := said.get("error_type"), str) and delta.error_type == "error":
        delta.error_type = kind
    return delta
