"""SGLang's own `/generate`: events that repeat the whole text so far, and count its tokens.

A server started to stream increments sends in each event its own text only: the first text that does not
begin with the one before it tells. The stream ends with `[DONE]`.

Source: sgl-project/sglang srt/entrypoints/http_server.py, srt/managers/tokenizer_manager.py;
shared/dialects/dialects.md section 3.5.
"""

from typing import Any, Final

import msgspec

from llmtap.protocol.delta import Delta, EventClass, TokenSource
from llmtap.protocol.dialects.native_shapes import (
    FIRST,
    Fields,
    ObjectReader,
    add_counts,
    counted,
    failure_in,
    figures,
    gather,
    merged,
    text_of,
)
from llmtap.protocol.dialects.openai_shapes import CHOICES_MAX, RunningCount, count, read_json
from llmtap.protocol.server_times import object_times
from llmtap.protocol.sse import SseEvent

__all__ = ["SGLang"]


class _Event(msgspec.Struct, gc=False):
    text: Any = None
    output_ids: Any = None
    meta_info: Any = None
    index: Any = None


_ABORTED: Final = "abort"


class SGLang(ObjectReader):
    """Reads one answer."""

    name = "sglang.native"
    fields = Fields(_Event)

    __slots__ = ("_cumulative", "_running", "_said")

    def __init__(self) -> None:
        super().__init__()
        self._cumulative = True
        """Every text began with the one before it."""
        self._running = RunningCount()
        self._said: dict[int, tuple[int, int]] = {}
        """Length and hash of the text so far, by choice; the text itself is not kept."""

    @staticmethod
    def claim(value: dict[str, Any], path: str) -> int:
        if isinstance(value.get("meta_info"), dict):
            return 3 if "text" in value or "output_ids" in value else 2
        return int("error" in value and path.endswith("/generate"))

    def _read(self, said: _Event, data: bytes, event: SseEvent) -> Delta:
        if not isinstance(said.meta_info, dict):
            return failure_in(read_json(data), event.event)
        index = said.index if type(said.index) is int else 0
        return self._read_answer(self._new(index, text_of(said.text)), said.meta_info, index)

    def read_body(self, body: bytes) -> Delta:
        value = read_json(body)
        found = [a for a in self.fields.answers(value) if isinstance(a.meta_info, dict)]
        if not found:
            return failure_in(value)
        deltas = [self._read_answer(text_of(a.text), a.meta_info, i) for i, a in enumerate(found)]
        delta = merged(deltas, tuple(range(len(deltas))))
        delta.tokens, delta.token_source = -1, TokenSource.NONE
        return delta

    def _new(self, index: int, text: str) -> str:
        length, mark = self._said.get(index, (0, 0))
        # An increment may begin like the text so far by chance; the next one hardly does.
        self._cumulative = self._cumulative and len(text) >= length and hash(text[:length]) == mark
        if not self._cumulative:
            return text
        if index in self._said or len(self._said) < CHOICES_MAX:
            self._said[index] = (len(text), hash(text))
        return text[length:]

    def _read_answer(self, text: str, meta: dict[str, Any], index: int) -> Delta:
        total = count(meta.get("completion_tokens"))
        added = 0 if total is None else self._running.step(index, total)
        finish = meta.get("finish_reason")
        ended: dict[str, Any] = finish if isinstance(finish, dict) else {"type": finish}
        reason = text_of(ended.get("type"))
        failed = reason == _ABORTED and bool(ended.get("message"))
        beside = (EventClass.ERROR,) if failed else ()
        choices = (index,) if index else FIRST
        delta = gather([(EventClass.CONTENT, text)] if text else (), beside, choices=choices, reason=reason)
        if added:
            delta.output, delta.choices = True, choices
            delta.tokens, delta.token_source = added, TokenSource.RUNNING_USAGE
        if failed:
            kind = ended.get("err_type")
            delta.error_type = kind if isinstance(kind, str) else _ABORTED
            delta.error_message = text_of(ended.get("message"))
        if reason:
            delta.server_times = object_times("meta_info", meta)
            counts = counted(
                meta.get("prompt_tokens"), meta.get("completion_tokens"), meta.get("reasoning_tokens"),
                meta.get("cached_tokens"),
            )  # fmt: skip
            add_counts(delta, counts, figures(meta))
            delta.usage_running = counts is not None and self._running.several
        return delta
