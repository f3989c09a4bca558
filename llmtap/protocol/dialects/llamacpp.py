"""Read llama.cpp's `/completion` as Deltas: a text, its token ids, the server's timings; no end marker.

Source: ggml-org/llama.cpp tools/server/README.md, server-task.cpp.
"""

from typing import Any, Final

import msgspec

from llmtap.protocol.delta import Delta, EventClass, TokenSource
from llmtap.protocol.dialects import shapes
from llmtap.protocol.dialects.openai_shapes import RunningCount, count, read_json, unknown
from llmtap.protocol.server_times import clock_ns, object_times
from llmtap.protocol.sse import SseEvent


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


_STOPPED: Final = (("stopped_eos", "eos"), ("stopped_word", "word"), ("stopped_limit", "limit"))
"""Fields in which older servers tell why an answer ended."""


class LlamaCpp(shapes.ObjectReader):
    name = "llamacpp.native"
    fields = shapes.Fields(_Event)

    __slots__ = ("_ids", "_predicted")

    def __init__(self) -> None:
        super().__init__()
        self._ids = False
        """Its events tell the tokens one by one: the count that runs along has one more at the end."""
        self._predicted = RunningCount()

    @staticmethod
    def claim(value: dict[str, Any], path: str) -> int:
        if isinstance(value.get("content"), str) and isinstance(value.get("stop"), bool):
            return 3 if "tokens_predicted" in value else 2
        return int("error" in value and path.endswith(("/completion", "/infill")))

    def _read(self, said: _Event, data: bytes, event: SseEvent) -> Delta:
        if isinstance(said.content, str) and event.event != b"error":
            return self._read_answer(said)
        if said.prompt_progress is not None and event.event != b"error":
            return Delta(EventClass.METADATA)
        return shapes.failure_in(read_json(data), event.event)

    def read_body(self, body: bytes) -> Delta:
        value = read_json(body)
        if isinstance(value, dict) and "content" not in value:
            return shapes.failure_in(value)
        deltas = [self._read_answer(a) for a in self.fields.answers(value) if isinstance(a.content, str)]
        return (
            shapes.merged(deltas, tuple(dict.fromkeys(i for d in deltas for i in d.choices)))
            if deltas
            else unknown()
        )

    def _read_answer(self, said: _Event) -> Delta:
        text = said.content
        index = said.index if type(said.index) is int else 0
        delta = shapes.gather(
            [(EventClass.CONTENT, text)] if text else (), choices=(index,) if index else shapes.FIRST
        )
        self._count(said, delta, index)
        if delta.tokens > 0 and not delta.output:
            delta.output, delta.choices = True, (index,)  # tokens that end no character yet
        if said.stop is True:
            self._close(said, delta)
        elif delta.output:
            delta.server_clock_ns = clock_ns(said.timings)
        self._name(delta, said.model)
        return delta

    def _count(self, said: _Event, delta: Delta, index: int) -> None:
        running = said.tokens_predicted
        if running is None and isinstance(said.timings, dict):
            running = said.timings.get("predicted_n")
        total, runs = count(running), self._predicted.runs(index) and not self._ids
        added = 0 if total is None else self._predicted.step(index, total)
        for found, source in (
            (said.tokens, TokenSource.TOKEN_IDS),
            (said.completion_probabilities, TokenSource.LOGPROBS),
        ):
            if isinstance(found, list) and found:
                self._ids = True
                delta.tokens, delta.token_source = len(found), source
                return
        if added and (runs or (delta.output and said.stop is not True)):
            delta.tokens, delta.token_source = added, TokenSource.RUNNING_USAGE

    def _close(self, said: _Event, delta: Delta) -> None:
        older = (name for field, name in _STOPPED if getattr(said, field) is True)
        delta.finish_reason = shapes.text_of(said.stop_type) or next(older, "stop")
        timings = said.timings if isinstance(said.timings, dict) else {}
        names = ("tokens_predicted", "tokens_evaluated")
        counts = shapes.counted(said.tokens_evaluated, said.tokens_predicted, cached=timings.get("cache_n"))
        shapes.add_counts(
            delta, counts, shapes.figures(timings) or {name: getattr(said, name) for name in names}
        )
        delta.usage_running = counts is not None and self._predicted.several
        # The mean of this object is its sum over its count, which are told as well.
        delta.server_times = tuple(t for t in object_times("timings", timings) if t.name != "mean_itl")
