"""Read the native APIs of llama.cpp (`/completion`), Ollama and LM Studio (`/api/v1/chat`) as Deltas.

llama.cpp sends a text, its token ids and the server's timings, and no end marker. Ollama sends a JSON object
a line, with counts in the last. LM Studio sends named events from loading the model to the end.

Source: ggml-org/llama.cpp tools/server/README.md, server-task.cpp; ollama/ollama docs/api.md;
lmstudio-ai/docs#142; docs/dialects.md.
"""

from collections.abc import Iterator
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
        shapes.add_counts(delta, counts, shapes.figures(timings) or {name: said.get(name) for name in names})
        delta.usage_running = counts is not None and self._predicted.several
        # The mean of this object is its sum over its count, which are told as well.
        delta.server_times = tuple(t for t in object_times("timings", timings) if t.name != "mean_itl")


class Ollama(shapes.ObjectReader):
    name = "ollama.native"

    __slots__ = ()

    @staticmethod
    def claim(value: dict[str, Any], path: str) -> int:
        if isinstance(value.get("done"), bool):
            if isinstance(value.get("message"), dict) or isinstance(value.get("response"), str):
                return 3 if "created_at" in value else 2
            return int("model" in value and "created_at" in value)
        return int("error" in value and path.endswith(("/api/chat", "/api/generate")))

    def read_body(self, body: bytes) -> Delta:
        return self.read_event(SseEvent(0, len(body), body))

    def _read(self, said: dict[str, Any], event: SseEvent) -> Delta:
        message, text, done = said.get("message"), said.get("response"), said.get("done")
        if said.get("error") or (done is None and text is None and not isinstance(message, dict)):
            return shapes.failure_in(said)
        message = message if isinstance(message, dict) else said | {"content": text}
        pieces = list(_ollama_pieces(message))
        if done is True:
            delta = _close_ollama(said, pieces)
        elif len(pieces) == 1:
            delta = shapes.piece(*pieces[0])
        else:
            names_speaker = message.get("role") and not pieces
            delta = shapes.gather(pieces, (EventClass.ROLE,) if names_speaker else ())
        logprobs = said.get("logprobs")
        if isinstance(logprobs, list) and logprobs and delta.output:
            delta.tokens, delta.token_source = len(logprobs), TokenSource.LOGPROBS
        self._name(delta, said.get("model"))
        return delta


def _close_ollama(said: dict[str, Any], pieces: list[shapes.Piece]) -> Delta:
    told = {name: said[name] for name in ("prompt_eval_count", "eval_count") if said.get(name) is not None}
    counts = shapes.counted(told.get("prompt_eval_count"), told.get("eval_count"))
    delta = shapes.gather(
        pieces, (EventClass.DONE,), reason=said.get("done_reason"), counts=counts, usage=told
    )
    delta.done = True
    delta.server_times = object_times("", said)
    return delta


def _ollama_pieces(said: dict[str, Any]) -> Iterator[shapes.Piece]:
    for key, kind in (("thinking", EventClass.REASONING), ("content", EventClass.CONTENT)):
        if text := shapes.text_of(said.get(key)):
            yield kind, text
    calls = said.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and (function.get("name") or function.get("arguments")):
            # Arguments come as an object here, in one piece.
            yield EventClass.TOOL_CALL, shapes.text_of(function.get("arguments"))


_FAMILIES: Final = frozenset({"chat", "model_load", "prompt_processing", "reasoning", "tool_call", "message"})
_PARTS: Final = {"message": EventClass.CONTENT, "reasoning": EventClass.REASONING}
_CALLS: Final = ("tool_call.start", "tool_call.name", "tool_call.arguments")


class LmStudio(shapes.ObjectReader):
    name = "lmstudio.native"

    __slots__ = ()

    @staticmethod
    def claim(value: dict[str, Any], path: str) -> int:
        kind = value.get("type")
        if isinstance(kind, str) and "." in kind and kind.partition(".")[0] in _FAMILIES:
            return 3
        if isinstance(value.get("stats"), dict) and isinstance(value.get("output"), list):
            return 3 if "model_instance_id" in value else 2
        return int("error" in value and path.endswith("/api/v1/chat"))

    def _read(self, said: dict[str, Any], event: SseEvent) -> Delta:
        kind = shapes.kind_of(said, event)
        family, dot, step = kind.partition(".")
        if not dot:
            return shapes.failure_in(said, event.event)
        if step == "delta" and family in _PARTS:
            text = shapes.text_of(said.get("content"))
            return shapes.piece(_PARTS[family], text) if text else Delta(EventClass.METADATA)
        if kind == "message.start":
            delta = Delta(EventClass.ROLE)
        elif kind in _CALLS:
            arguments = shapes.text_of(said.get("arguments"))
            named = said.get("tool") or said.get("tool_name") or said.get("arguments")
            delta = shapes.gather(
                [(EventClass.TOOL_CALL, arguments)] if named else (), (EventClass.TOOL_CALL,)
            )
        elif kind == "chat.end":
            result = said.get("result")
            delta = self._close(result if isinstance(result, dict) else {}, [], EventClass.DONE)
            delta.done = True
        else:
            delta = Delta(EventClass.METADATA, parsed=family in _FAMILIES)
        self._name(delta, said.get("model_instance_id"))
        return delta

    def read_body(self, body: bytes) -> Delta:
        value = read_json(body)
        if not isinstance(value, dict) or not isinstance(value.get("output"), list):
            return shapes.failure_in(value)
        return self._close(value, list(_lmstudio_output(value["output"])))

    def _close(self, result: dict[str, Any], pieces: list[shapes.Piece], *beside: EventClass) -> Delta:
        stats = result["stats"] if isinstance(result.get("stats"), dict) else {}
        names = ("input_tokens", "total_output_tokens", "reasoning_output_tokens")
        delta = shapes.gather(pieces, beside, counts=shapes.counted(*map(stats.get, names)), usage=stats)
        delta.server_times = object_times("result.stats", stats)
        self._name(delta, result.get("model_instance_id"))
        return delta


def _lmstudio_output(items: list[Any]) -> Iterator[shapes.Piece]:
    for item in items:
        if isinstance(item, dict):
            kind, text = shapes.text_of(item.get("type")), shapes.text_of(item.get("content"))
            if kind in _PARTS and text:
                yield _PARTS[kind], text
            elif kind == "tool_call" and item.get("tool"):
                yield EventClass.TOOL_CALL, ""
