"""Read Ollama's `/api/chat` and `/api/generate` as Deltas: a JSON object a line, counts in the last.

Source: ollama/ollama docs/api.md.
"""

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from llmtap.protocol.delta import Delta, EventClass, TokenSource
from llmtap.protocol.dialects import shapes
from llmtap.protocol.dialects.openai_shapes import read_json, unknown
from llmtap.protocol.server_times import object_times
from llmtap.protocol.sse import SseEvent


class _Line(msgspec.Struct, gc=False):
    message: Any = None
    response: Any = None
    thinking: Any = None
    tool_calls: Any = None
    done: Any = None
    done_reason: Any = None
    error: Any = None
    model: Any = None
    logprobs: Any = None
    prompt_eval_count: Any = None
    eval_count: Any = None
    total_duration: Any = None
    load_duration: Any = None
    prompt_eval_duration: Any = None
    eval_duration: Any = None


_COUNTS: Final = ("prompt_eval_count", "eval_count")
_DURATIONS: Final = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


class Ollama(shapes.ObjectReader):
    name = "ollama.native"
    fields = shapes.Fields(_Line)

    __slots__ = ()

    @staticmethod
    def claim(value: dict[str, Any], path: str) -> int:
        if isinstance(value.get("done"), bool):
            if isinstance(value.get("message"), dict) or isinstance(value.get("response"), str):
                return 3 if "created_at" in value else 2
            return int("model" in value and "created_at" in value)
        return int("error" in value and path.endswith(("/api/chat", "/api/generate")))

    def read_body(self, body: bytes) -> Delta:
        said = self.fields.read(body)
        return unknown() if said is None else self._read(said, body)

    def _read(self, said: _Line, data: bytes, event: SseEvent | None = None) -> Delta:
        message = said.message
        if said.error or (said.done is None and said.response is None and not isinstance(message, dict)):
            return shapes.failure_in(read_json(data))
        if isinstance(message, dict):
            pieces = list(_pieces(message.get("content"), message.get("thinking"), message.get("tool_calls")))
        else:
            message = {}
            pieces = list(_pieces(said.response, said.thinking, said.tool_calls))
        if said.done is True:
            delta = _close(said, pieces)
        elif len(pieces) == 1:
            delta = shapes.piece(*pieces[0])
        else:
            delta = shapes.gather(pieces, (EventClass.ROLE,) if message.get("role") and not pieces else ())
        if isinstance(said.logprobs, list) and said.logprobs and delta.output:
            delta.tokens, delta.token_source = len(said.logprobs), TokenSource.LOGPROBS
        self._name(delta, said.model)
        return delta


def _close(said: _Line, pieces: list[shapes.Piece]) -> Delta:
    counts = shapes.counted(said.prompt_eval_count, said.eval_count)
    beside = (EventClass.DONE,) if counts is None else (EventClass.DONE, EventClass.USAGE)
    delta = shapes.gather(pieces, beside, reason=said.done_reason)
    delta.done = True
    if counts is not None:
        delta.usage, delta.counts = _told(said, _COUNTS), counts
    delta.server_times = object_times("", _told(said, _DURATIONS))
    return delta


def _told(said: _Line, names: tuple[str, ...]) -> dict[str, Any]:
    values = ((name, getattr(said, name)) for name in names)
    return {name: value for name, value in values if value is not None}


def _pieces(content: Any, thinking: Any, calls: Any) -> Iterator[shapes.Piece]:
    if isinstance(thinking, str) and thinking:
        yield EventClass.REASONING, thinking
    if isinstance(content, str) and content:
        yield EventClass.CONTENT, content
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and (function.get("name") or function.get("arguments")):
            # Arguments come as an object here, in one piece.
            yield EventClass.TOOL_CALL, shapes.text_of(function.get("arguments"))
