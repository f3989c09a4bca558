"""SGLang's own `/generate`: events that repeat the whole text so far, and count its tokens.

Unless the server was started to stream increments: then each event has its own text. The second event of an
answer tells which. Ends with `[DONE]`.

Source: sgl-project/sglang srt/entrypoints/http_server.py, srt/managers/tokenizer_manager.py;
shared/dialects/dialects.md section 3.5.
"""

from typing import Any, Final

import msgspec

from llmtap.protocol.delta import Delta, EventClass, TokenSource
from llmtap.protocol.dialects.native_shapes import (
    FIRST,
    Fields,
    counted,
    failure_in,
    figures,
    gather,
    is_object,
    text_of,
)
from llmtap.protocol.dialects.openai_shapes import (
    CHOICES_MAX,
    RunningCount,
    count,
    read_frame,
    read_json,
    sum_counts,
)
from llmtap.protocol.server_times import object_times
from llmtap.protocol.sse import SseEvent

__all__ = ["SGLang"]


class _Event(msgspec.Struct, gc=False):
    text: Any = None
    output_ids: Any = None
    meta_info: Any = None
    index: Any = None


_fields: Final = Fields(_Event)
_ABORTED: Final = "abort"


class SGLang:
    """Reads one answer."""

    name = "sglang.native"

    __slots__ = ("_cumulative", "_running", "_said")

    def __init__(self) -> None:
        self._cumulative: bool | None = None
        self._running = RunningCount()
        self._said: dict[int, tuple[int, int]] = {}
        """Length and hash of the text so far, by choice; the text itself is not kept."""

    @staticmethod
    def claim(value: dict[str, Any], path: str) -> int:
        """How sure a first JSON value makes us that the answer is ours; see `registry.py`."""
        if isinstance(value.get("meta_info"), dict):
            return 3 if "text" in value or "output_ids" in value else 2
        return int("error" in value and path.endswith("/generate"))

    def read_event(self, event: SseEvent) -> Delta:
        """What one event of a stream says. Never raises."""
        data = event.data
        if data is None or not is_object(data):
            return read_frame(event)
        said = _fields.read(data)
        if said is None or not isinstance(said.meta_info, dict):
            return failure_in(read_json(data), event.event)
        index = said.index if type(said.index) is int else 0
        text = self._new(index, text_of(said.text))
        return self._read(text, said.meta_info, index)

    def read_body(self, body: bytes) -> Delta:
        """What a whole JSON answer says: one, or a list of them. Never raises."""
        value = read_json(body)
        answers = [_fields.of(v) for v in (value[:CHOICES_MAX] if isinstance(value, list) else [value])]
        found = [a for a in answers if a is not None and isinstance(a.meta_info, dict)]
        if not found:
            return failure_in(value)
        deltas = [self._read(text_of(a.text), a.meta_info, i) for i, a in enumerate(found)]
        if len(deltas) == 1:
            deltas[0].tokens, deltas[0].token_source = -1, TokenSource.NONE
            return deltas[0]
        last = deltas[-1]
        pieces = ((d.event_class, d.text) for d in deltas if d.text)
        delta = gather(pieces, last.also, choices=tuple(range(len(deltas))))
        delta.finish_reason, delta.usage = last.finish_reason, last.usage
        counts = [d.counts for d in deltas if d.counts is not None]
        if counts:
            delta.counts = sum_counts(counts)
        return delta

    def _new(self, index: int, text: str) -> str:
        """What of an event's text is new."""
        length, mark = self._said.get(index, (0, 0))
        if self._cumulative is None and length:
            self._cumulative = len(text) >= length and hash(text[:length]) == mark
        if self._cumulative is False:
            return text
        if index in self._said or len(self._said) < CHOICES_MAX:
            # Once it is known to be repeated, its length is all that is needed.
            self._said[index] = (len(text), 0 if self._cumulative else hash(text))
        return text[length:]

    def _read(self, text: str, meta: dict[str, Any], index: int) -> Delta:
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
            if counts is not None:
                delta.usage, delta.counts = figures(meta), counts
                delta.also = (*delta.also, EventClass.USAGE)
                delta.usage_running = self._running.several
        return delta
