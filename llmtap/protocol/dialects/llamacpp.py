"""llama.cpp's own `/completion`: a text and its token ids, and how fast it went; no end marker.

With `timings_per_token` every event tells the server's clock, and with `return_progress` there are events
while the prompt is read. Several prompts make a list of answers.

Source: ggml-org/llama.cpp tools/server/README.md, server-task.cpp; shared/dialects/dialects.md section 4.
"""

from typing import Any, Final

import msgspec

from llmtap.protocol.delta import MODEL_CHARS_MAX, Delta, EventClass, TokenSource
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
    RunningCount,
    count,
    read_frame,
    read_json,
    sum_counts,
    unknown,
)
from llmtap.protocol.server_times import clock_ns, object_times
from llmtap.protocol.sse import SseEvent

__all__ = ["LlamaCpp"]


class _Event(msgspec.Struct, gc=False):
    content: Any = None
    tokens: Any = None
    stop: Any = None
    index: Any = None
    completion_probabilities: Any = None
    timings: Any = None
    tokens_predicted: Any = None
    tokens_evaluated: Any = None
    prompt_progress: Any = None
    stop_type: Any = None
    stopped_eos: Any = None
    stopped_word: Any = None
    stopped_limit: Any = None
    model: Any = None


_fields: Final = Fields(_Event)
_BATCH_MAX: Final = 128
"""Answers in one list that are read."""
_STOPPED: Final = (("stopped_eos", "eos"), ("stopped_word", "word"), ("stopped_limit", "limit"))
"""How older servers say why."""


class LlamaCpp:
    """Reads one answer."""

    name = "llamacpp.native"

    __slots__ = ("_model", "_predicted")

    def __init__(self) -> None:
        self._model: str | None = None
        self._predicted = RunningCount()

    @staticmethod
    def claim(value: dict[str, Any], path: str) -> int:
        """How sure a first JSON value makes us that the answer is ours; see `registry.py`."""
        if isinstance(value.get("content"), str) and isinstance(value.get("stop"), bool):
            return 3 if "tokens_predicted" in value else 2
        return int("error" in value and path.endswith(("/completion", "/infill")))

    def read_event(self, event: SseEvent) -> Delta:
        """What one event of a stream says. Never raises."""
        data = event.data
        if data is None or not is_object(data):
            return read_frame(event)
        said = _fields.read(data)
        if said is None:
            return unknown(event.event)
        if not isinstance(said.content, str) or event.event == b"error":
            if said.prompt_progress is not None and event.event != b"error":
                return Delta(EventClass.METADATA)
            return failure_in(read_json(data), event.event)
        return self._read(said)

    def read_body(self, body: bytes) -> Delta:
        """What a whole JSON answer says: one, or a list of them. Never raises."""
        value = read_json(body)
        if isinstance(value, dict) and "content" not in value:
            return failure_in(value)
        answers = [_fields.of(v) for v in (value[:_BATCH_MAX] if isinstance(value, list) else [value])]
        deltas = [self._read(said) for said in answers if said is not None and isinstance(said.content, str)]
        if len(deltas) <= 1:
            return deltas[0] if deltas else unknown()
        last = deltas[-1]
        choices = tuple(dict.fromkeys(i for d in deltas for i in d.choices))
        delta = gather(((EventClass.CONTENT, d.text) for d in deltas if d.text), last.also, choices=choices)
        counts = [d.counts for d in deltas if d.counts is not None]
        delta.finish_reason, delta.usage, delta.model = last.finish_reason, last.usage, deltas[0].model
        if counts:
            delta.counts = sum_counts(counts)
        return delta

    def _read(self, said: _Event) -> Delta:
        text = said.content
        index = said.index if type(said.index) is int else 0
        delta = gather([(EventClass.CONTENT, text)] if text else (), choices=(index,) if index else FIRST)
        self._count(said, delta, index)
        if delta.tokens > 0 and not delta.output:
            delta.output, delta.choices = True, (index,)  # tokens that end no character yet
        if said.stop is True:
            self._close(said, delta)
        elif delta.output:
            delta.server_clock_ns = clock_ns(said.timings)
        if isinstance(said.model, str) and said.model and said.model != self._model:
            self._model = delta.model = said.model[:MODEL_CHARS_MAX]
        return delta

    def _count(self, said: _Event, delta: Delta, index: int) -> None:
        """The tokens of one event: dialects.md section 5."""
        running = said.tokens_predicted
        if running is None and isinstance(said.timings, dict):
            running = said.timings.get("predicted_n")
        total = count(running)
        added = 0 if total is None else self._predicted.step(index, total)
        for found, source in (
            (said.tokens, TokenSource.TOKEN_IDS),
            (said.completion_probabilities, TokenSource.LOGPROBS),
        ):
            if isinstance(found, list) and found:
                delta.tokens, delta.token_source = len(found), source
                return
        if added and delta.output and said.stop is not True:
            delta.tokens, delta.token_source = added, TokenSource.RUNNING_USAGE

    def _close(self, said: _Event, delta: Delta) -> None:
        """The last event of an answer."""
        older = (name for field, name in _STOPPED if getattr(said, field) is True)
        delta.finish_reason = text_of(said.stop_type) or next(older, "stop")
        timings = said.timings if isinstance(said.timings, dict) else {}
        counts = counted(said.tokens_evaluated, said.tokens_predicted, cached=timings.get("cache_n"))
        if counts is not None:
            names = ("tokens_predicted", "tokens_evaluated")
            delta.usage = figures(timings) or {name: getattr(said, name) for name in names}
            delta.counts = counts
            delta.also = (*delta.also, EventClass.USAGE)
            delta.usage_running = self._predicted.several
        # The mean of this object is its sum over its count, which are told as well.
        delta.server_times = tuple(t for t in object_times("timings", timings) if t.name != "mean_itl")
