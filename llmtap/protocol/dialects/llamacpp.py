"""Read the native API of llama.cpp (`/completion`) as Deltas: a text, its token ids, the server's timings,
and no end marker.

Source: ggml-org/llama.cpp tools/server/README.md, server-task.cpp; docs/dialects.md.
"""

from typing import Any, Final

from llmtap.protocol.delta import Delta, EventClass, TokenSource
from llmtap.protocol.dialects import shapes
from llmtap.protocol.dialects.openai_shapes import RunningCount, count, read_json, unknown
from llmtap.protocol.server_times import clock_ns, object_times
from llmtap.protocol.sse import SseEvent

_STOPPED: Final = {"stopped_eos": "eos", "stopped_word": "word", "stopped_limit": "limit"}
"""Fields in which older servers tell why an answer ended."""


class LlamaCpp(shapes.ObjectReader):
    name = "llamacpp.native"
    end_certain = True

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

    def _read(self, said: dict[str, Any], event: SseEvent) -> Delta:
        if event.event != b"error":
            if isinstance(said.get("content"), str):
                return self._read_answer(said)
            if said.get("prompt_progress") is not None:
                return Delta(EventClass.METADATA)
        return shapes.failure_in(said, event.event)

    def read_body(self, body: bytes) -> Delta:
        value = read_json(body)
        if isinstance(value, dict) and "content" not in value:
            return shapes.failure_in(value)
        answers = [a for a in shapes.answers(value) if isinstance(a.get("content"), str)]
        if not answers:
            return unknown()
        deltas = list(map(self._read_answer, answers))
        return shapes.merged(deltas, tuple(dict.fromkeys(i for d in deltas for i in d.choices)))

    def _read_answer(self, said: dict[str, Any]) -> Delta:
        text, index = said["content"], said.get("index")
        index = index if type(index) is int else 0
        choices = (index,) if index else shapes.FIRST
        delta = shapes.gather([(EventClass.CONTENT, text)] if text else (), choices=choices)
        timings = said["timings"] if isinstance(said.get("timings"), dict) else {}
        self._count(said, timings, delta, index)
        if delta.tokens > 0 and not delta.output:
            delta.output, delta.choices = True, (index,)  # tokens that end no character yet
        if said.get("stop") is True:
            self._close(said, timings, delta)
        elif delta.output:
            delta.server_clock_ns = clock_ns(timings)
        self._name(delta, said.get("model"))
        return delta

    def _count(self, said: dict[str, Any], timings: dict[str, Any], delta: Delta, index: int) -> None:
        told = said.get("tokens_predicted")
        total = count(timings.get("predicted_n") if told is None else told)
        runs = self._predicted.runs(index) and not self._ids
        added = 0 if total is None else self._predicted.step(index, total)
        for name, source in (
            ("tokens", TokenSource.TOKEN_IDS), ("completion_probabilities", TokenSource.LOGPROBS),
        ):  # fmt: skip
            found = said.get(name)
            if isinstance(found, list) and found:
                self._ids = True
                delta.tokens, delta.token_source = len(found), source
                return
        if added and (runs or (delta.output and said.get("stop") is not True)):
            delta.tokens, delta.token_source = added, TokenSource.RUNNING_USAGE

    def _close(self, said: dict[str, Any], timings: dict[str, Any], delta: Delta) -> None:
        older = (name for field, name in _STOPPED.items() if said.get(field) is True)
        delta.finish_reason = shapes.text_of(said.get("stop_type")) or next(older, "stop")
        counts = shapes.counted(
            said.get("tokens_evaluated"), said.get("tokens_predicted"), cached=timings.get("cache_n")
        )
        names = ("tokens_predicted", "tokens_evaluated")
        shapes.add_counts(delta, counts, timings or {name: said.get(name) for name in names})
        delta.usage_running = counts is not None and self._predicted.several
        # The mean of this object is its sum over its count, which are told as well.
        delta.server_times = tuple(t for t in object_times("timings", timings) if t.name != "mean_itl")
