"""OpenAI's older completions: `text_completion` events and bodies, where a choice has a `text`.

Source: openai/openai-openapi openapi.yaml; shared/dialects/dialects.md section 3.2. With `echo` the
prompt comes back in the first chunk's text: it cannot be told from the answer, and only usage or token
ids count right then.
"""

from typing import Any

import msgspec

from llmtap.wire.delta import Delta, EventClass
from llmtap.wire.dialects.openai_shapes import (
    BAD_JSON,
    Findings,
    RunningCount,
    read_frame,
    read_json,
    unknown,
)
from llmtap.wire.sse import SseEvent

__all__ = ["OpenAICompletions"]


class _Logprobs(msgspec.Struct, gc=False):
    tokens: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct, gc=False):
    text: Any = None
    index: int = 0
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    model: str | None = None
    usage: dict[str, Any] | None = None
    error: Any = None
    object: str | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


class OpenAICompletions:
    """Reads one answer."""

    name = "openai.completions"

    __slots__ = ("_model", "_running")

    def __init__(self) -> None:
        self._model: str | None = None
        self._running = RunningCount()

    @staticmethod
    def claim(value: dict[str, Any], path: str) -> int:
        """How sure a first JSON value makes us that the answer is ours; see `registry.py`."""
        kind = value.get("object")
        if isinstance(kind, str) and kind.startswith("text_completion"):
            return 3
        choices = value.get("choices")
        if isinstance(choices, list):
            # Together repeats a chat delta as `text`: where both are, it is chat.
            if any(isinstance(c, dict) and "text" in c and "delta" not in c for c in choices):
                return 2
        elif "error" not in value:
            return 0
        return int(path.endswith("/completions") and not path.endswith("/chat/completions"))

    def read_event(self, event: SseEvent) -> Delta:
        """What one event of a stream says. Never raises."""
        data = event.data
        if data is None or not data.lstrip().startswith(b"{"):
            return read_frame(event)
        return self._read_json(data, event.event)

    def read_body(self, body: bytes) -> Delta:
        """What a whole JSON answer says. Never raises."""
        return self._read_json(body, None)

    def _read_json(self, data: bytes, name: bytes | None) -> Delta:
        try:
            chunk = _decode(data)
        except BAD_JSON:
            value = read_json(data)
            if not isinstance(value, dict):
                return unknown(name)
            chunk = _build(value)
        if name == b"ping":
            return Delta(EventClass.KEEPALIVE)
        findings = Findings()
        for choice in chunk.choices or ():
            findings.choice(
                choice.index,
                ids=len(choice.token_ids or ()),
                logprobs=0 if choice.logprobs is None else len(choice.logprobs.tokens or ()),
            )
            if choice.finish_reason is not None:
                findings.finish(choice.finish_reason)
            if isinstance(choice.text, str) and choice.text:
                findings.piece(choice.index, EventClass.CONTENT, choice.text)
        findings.usage(chunk.usage, self._running)
        if chunk.error or chunk.object == "error" or name == b"error":
            findings.error(chunk.error)
        if chunk.model and chunk.model != self._model:
            self._model = findings.delta.model = chunk.model
        delta = findings.ranked()
        delta.parsed = not (findings.empty and chunk.choices is None)
        return delta


def _build(value: dict[str, Any]) -> _Chunk:
    """The chunk in a JSON object that does not quite have its shape; what does not fit is left out."""
    choices, model, usage = value.get("choices"), value.get("model"), value.get("usage")
    kind = value.get("object")
    return _Chunk(
        [_build_choice(c) for c in choices if isinstance(c, dict)] if isinstance(choices, list) else None,
        model if isinstance(model, str) else None,
        usage if isinstance(usage, dict) else None,
        value.get("error"),
        kind if isinstance(kind, str) else None,
    )


def _build_choice(value: dict[str, Any]) -> _Choice:
    index, reason, ids = value.get("index"), value.get("finish_reason"), value.get("token_ids")
    return _Choice(
        value.get("text"),
        index if type(index) is int else 0,
        reason if isinstance(reason, str) else None,
        None,
        ids if isinstance(ids, list) else None,
    )
