"""Read the native API of llama.cpp (`/completion`) as Deltas. Its events have a text, token ids and the
timings of the server; there is no end mark.

Source: ggml-org/llama.cpp tools/server/README.md, server-task.cpp; docs/dialects.md.
"""

from typing import Final

from llmtap.json_types import JsonObject
from llmtap.protocol.delta import Delta, EventClass, TokenSource
from llmtap.protocol.dialects import shapes
from llmtap.protocol.dialects.openai_shapes import RunningCount, read_count, read_json, unknown_delta
from llmtap.protocol.server_times import clock_ns, object_times
from llmtap.protocol.sse import SseEvent

_STOPPED: Final = {"stopped_eos": "eos", "stopped_word": "word", "stopped_limit": "limit"}
"""Fields in which older servers report why an answer ended, with the finish reason that each field means."""


class LlamaCpp(shapes.ObjectReader):
    """Reader of the own API of llama.cpp's server (`/completion`)."""

    name = "llamacpp.native"
    end_certain = True

    __slots__ = ("_lists_tokens", "_predicted_count")

    def __init__(self) -> None:
        super().__init__()
        self._lists_tokens = False
        """Whether events list their tokens: then ignore the running count, which ends one too high."""
        self._predicted_count = RunningCount()
        """Number of output tokens so far, by the counts in events."""

    @staticmethod
    def claim(value: JsonObject, path: str) -> int:
        """Return how certainly an object is of this dialect (`registry.Dialect.claim`)."""
        if isinstance(value.get("content"), str) and isinstance(value.get("stop"), bool):
            return 3 if "tokens_predicted" in value else 2
        return int("error" in value and path.endswith(("/completion", "/infill")))

    def _read(self, value: JsonObject, event: SseEvent) -> Delta:
        if event.event != b"error":
            if isinstance(value.get("content"), str):
                return self._read_answer(value)
            if value.get("prompt_progress") is not None:
                return Delta(EventClass.METADATA)
        return shapes.failure_in(value, event.event)

    def read_body(self, body: bytes) -> Delta:
        value = read_json(body)
        if isinstance(value, dict) and "content" not in value:
            return shapes.failure_in(value)
        answers = [a for a in shapes.answers(value) if isinstance(a.get("content"), str)]
        if not answers:
            return unknown_delta()
        deltas = list(map(self._read_answer, answers))
        return shapes.merge_deltas(deltas, tuple(dict.fromkeys(i for d in deltas for i in d.choices)))

    def _read_answer(self, value: JsonObject) -> Delta:
        text, index = value["content"], value.get("index")
        index = index if type(index) is int else 0
        choices = (index,) if index else shapes.CHOICE_0
        delta = shapes.gather([(EventClass.CONTENT, text)] if text else (), choices=choices)
        timings = value["timings"] if isinstance(value.get("timings"), dict) else {}
        self._add_tokens(value, timings, delta, index)
        if delta.tokens > 0 and not delta.output:
            # The tokens of the event do not complete a character yet, but they are output.
            delta.output, delta.choices = True, (index,)
        if value.get("stop") is True:
            self._read_end(value, timings, delta)
        elif delta.output:
            delta.server_clock_ns = clock_ns(timings)
        self._set_model(delta, value.get("model"))
        return delta

    def _add_tokens(self, value: JsonObject, timings: JsonObject, delta: Delta, index: int) -> None:
        predicted = value.get("tokens_predicted")
        total = read_count(timings.get("predicted_n") if predicted is None else predicted)
        runs = self._predicted_count.has_count(index) and not self._lists_tokens
        added = 0 if total is None else self._predicted_count.growth(index, total)
        for name, source in (
            ("tokens", TokenSource.TOKEN_IDS),
            ("completion_probabilities", TokenSource.LOGPROBS),
        ):
            items = value.get(name)
            if isinstance(items, list) and items:
                self._lists_tokens = True
                delta.tokens, delta.token_source = len(items), source
                return
        if added and (runs or (delta.output and value.get("stop") is not True)):
            delta.tokens, delta.token_source = added, TokenSource.RUNNING_USAGE

    def _read_end(self, value: JsonObject, timings: JsonObject, delta: Delta) -> None:
        """Read reason, counts and times of the last event."""
        older = (name for field, name in _STOPPED.items() if value.get(field) is True)
        delta.finish_reason = shapes.text_of(value.get("stop_type")) or next(older, "stop")
        counts = shapes.counts_of(
            value.get("tokens_evaluated"), value.get("tokens_predicted"), cached=timings.get("cache_n")
        )
        names = ("tokens_predicted", "tokens_evaluated")
        shapes.add_counts(delta, counts, timings or {name: value.get(name) for name in names})
        delta.usage_running = counts is not None and self._predicted_count.has_several_choices
        # Leave out the mean, because the durations and counts from which it is computed are reported, too.
        delta.server_times = tuple(t for t in object_times("timings", timings) if t.name != "mean_itl")
