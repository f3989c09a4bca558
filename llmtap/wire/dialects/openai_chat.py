"""OpenAI chat completions: `chat.completion.chunk` events and `chat.completion` bodies.

One chunk usually carries one piece of one choice, and that way is kept short: a typed decode that
skips what it does not know, a few comparisons, one Delta. Everything else goes through `_read`.

Source: openai/openai-openapi openapi.yaml; shared/dialects/dialects.md section 3.1. Fields of other
servers that cost nothing to know (reasoning, token ids, content in parts) are read here too.
"""

from collections.abc import Iterator
from typing import Any, Final

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

__all__ = ["OpenAIChat"]


class _Delta(msgspec.Struct, gc=False):
    """`delta` of a chunk, `message` of a whole answer. Any: looked at before use, never trusted."""

    content: Any = None
    role: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Any = None
    function_call: Any = None
    refusal: Any = None
    audio: Any = None
    token_id: Any = None


class _Logprobs(msgspec.Struct, gc=False):
    content: list[msgspec.Raw] | None = None
    refusal: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct, gc=False):
    delta: _Delta | None = None
    index: int = 0
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None
    message: _Delta | None = None


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    model: str | None = None
    usage: dict[str, Any] | None = None
    error: Any = None
    moderation: Any = None
    object: str | None = None
    # An error of older servers lies flat, with `object` "error".
    message: Any = None
    type: Any = None
    code: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode
_NOTHING: Final = _Delta()
_FIRST: Final = (0,)
_ROLE_TOO: Final = (EventClass.ROLE,)


class OpenAIChat:
    """Reads one answer."""

    name = "openai.chat"

    __slots__ = ("_model", "_running")

    def __init__(self) -> None:
        self._model: str | None = None
        self._running = RunningCount()

    @staticmethod
    def claim(value: dict[str, Any], path: str) -> int:
        """How sure a first JSON value makes us that the answer is ours; see `registry.py`."""
        kind = value.get("object")
        if isinstance(kind, str) and kind.startswith("chat.completion"):
            return 3
        choices = value.get("choices")
        if isinstance(choices, list):
            if any(isinstance(c, dict) and ("delta" in c or "message" in c) for c in choices):
                return 2
        elif "error" not in value:
            return 0
        return int(path.endswith("/chat/completions"))

    def read_event(self, event: SseEvent) -> Delta:
        """What one event of a stream says. Never raises."""
        data = event.data
        if data is None or not data.lstrip().startswith(b"{"):
            return read_frame(event)
        try:
            chunk = _decode(data)
        except BAD_JSON:
            return self._read_lenient(data, event.event)
        choices = chunk.choices
        if (
            choices is not None
            and len(choices) == 1
            and chunk.usage is None
            and chunk.error is None
            and chunk.moderation is None
            and chunk.model == self._model
            and self._running.running is not None
        ):
            choice = choices[0]
            delta = choice.delta
            if (
                delta is not None
                and choice.finish_reason is None
                and choice.logprobs is None
                and not choice.token_ids
                and not delta.tool_calls
                and not delta.function_call
                and not delta.refusal
                and not delta.audio
                and delta.token_id is None
            ):
                text = delta.content
                thought = delta.reasoning_content or delta.reasoning
                where = (choice.index,) if choice.index else _FIRST
                also = _ROLE_TOO if delta.role else ()
                if type(text) is str and text and not thought:
                    blank = text.isspace()
                    return Delta(EventClass.CONTENT, 0, True, not blank, blank, False, text, where, also)
                if type(thought) is str and thought and not text:
                    return Delta(EventClass.REASONING, 0, True, False, False, True, thought, where, also)
        return self._read(chunk, event.event)

    def read_body(self, body: bytes) -> Delta:
        """What a whole JSON answer says. Never raises."""
        try:
            return self._read(_decode(body), None)
        except BAD_JSON:
            return self._read_lenient(body, None)

    def _read_lenient(self, data: bytes, name: bytes | None) -> Delta:
        """For JSON that the typed decode refuses."""
        value = read_json(data)
        return self._read(_build(value), name) if isinstance(value, dict) else unknown(name)

    def _read(self, chunk: _Chunk, name: bytes | None) -> Delta:
        if name == b"ping":
            return Delta(EventClass.KEEPALIVE)
        findings = Findings()
        for choice in chunk.choices or ():
            self._read_choice(choice, findings)
        findings.usage(chunk.usage, self._running)
        if _flagged(chunk.moderation):
            findings.guardrail()
        if chunk.error or name == b"error":
            findings.error(chunk.error)
        elif chunk.object == "error":
            findings.error({"code": chunk.code, "type": chunk.type, "message": chunk.message})
        if chunk.model and chunk.model != self._model:
            self._model = findings.delta.model = chunk.model
        delta = findings.ranked()
        delta.parsed = not (findings.empty and chunk.choices is None and chunk.moderation is None)
        return delta

    def _read_choice(self, choice: _Choice, findings: Findings) -> None:
        # Where a choice says the same piece twice, `delta` is the one to read (dialects.md section 3).
        delta = choice.delta or choice.message or _NOTHING
        index = choice.index
        logprobs = choice.logprobs
        findings.choice(
            index,
            ids=len(choice.token_ids or ()) or int(delta.token_id is not None),
            logprobs=0 if logprobs is None else len(logprobs.content or ()) + len(logprobs.refusal or ()),
            role=bool(delta.role),
        )
        reason = choice.finish_reason
        if reason is not None:
            findings.finish(reason)
        # In a stream, text in the very block of the verdict stands in for the answer; it is not the answer.
        substitute = reason == "content_filter" and choice.message is None
        for kind, text in _texts(delta):
            if not (substitute and kind is EventClass.CONTENT):
                findings.piece(index, kind, text)
        audio = delta.audio
        if isinstance(audio, dict):
            transcript = audio.get("transcript")
            if transcript or audio.get("data"):
                spoken = transcript if isinstance(transcript, str) else ""
                findings.piece(index, EventClass.CONTENT, spoken, audio=True)
        for call in _calls(delta):
            name, arguments = call.get("name"), call.get("arguments")
            fragment = arguments if isinstance(arguments, str) else ""
            findings.piece(index, EventClass.TOOL_CALL, fragment, output=bool(name or arguments))


def _texts(delta: _Delta) -> Iterator[tuple[EventClass, str]]:
    """The texts of a delta, none of them empty."""
    reasoning = delta.reasoning_content or delta.reasoning
    if isinstance(reasoning, str) and reasoning:
        yield EventClass.REASONING, reasoning
    content = delta.content
    if isinstance(content, str):
        if content:
            yield EventClass.CONTENT, content
    elif isinstance(content, list):
        for part in content:
            yield from _part(part)
    if isinstance(delta.refusal, str) and delta.refusal:
        yield EventClass.REFUSAL, delta.refusal


def _part(part: Any) -> Iterator[tuple[EventClass, str]]:
    """One part of a content array: text, or thinking, which is an array of texts again (Mistral)."""
    if not isinstance(part, dict):
        return
    thinking = part.get("thinking")
    if isinstance(thinking, list):
        for inner in thinking:
            thought = inner.get("text") if isinstance(inner, dict) else None
            if isinstance(thought, str) and thought:
                yield EventClass.REASONING, thought
    text = part.get("text")
    if isinstance(text, str) and text:
        yield EventClass.CONTENT, text


def _calls(delta: _Delta) -> Iterator[dict[str, Any]]:
    """The functions, as far as this delta names them, of its calls."""
    if isinstance(delta.tool_calls, list):
        for call in delta.tool_calls:
            if isinstance(call, dict):
                function = call.get("function") or call.get("custom")
                yield function if isinstance(function, dict) else {}
    if isinstance(delta.function_call, dict):
        yield delta.function_call


def _flagged(moderation: Any) -> bool:
    """Whether any result of any part of a `moderation` object is flagged."""
    if not isinstance(moderation, dict):
        return False
    for part in moderation.values():
        results = part.get("results") if isinstance(part, dict) else None
        if isinstance(results, list) and any(
            isinstance(r, dict) and r.get("flagged") is True for r in results
        ):
            return True
    return False


def _build(value: dict[str, Any]) -> _Chunk:
    """The chunk in a JSON object that does not quite have its shape; what does not fit is left out."""
    get = value.get
    choices, model, usage, kind = get("choices"), get("model"), get("usage"), get("object")
    return _Chunk(
        [_build_choice(c) for c in choices if isinstance(c, dict)] if isinstance(choices, list) else None,
        model if isinstance(model, str) else None,
        usage if isinstance(usage, dict) else None,
        get("error"),
        get("moderation"),
        kind if isinstance(kind, str) else None,
        get("message"),
        get("type"),
        get("code"),
    )


def _build_choice(value: dict[str, Any]) -> _Choice:
    get = value.get
    index, reason, ids = get("index"), get("finish_reason"), get("token_ids")
    delta, message = (
        _Delta(**{name: part.get(name) for name in _Delta.__struct_fields__})
        if isinstance(part, dict)
        else None
        for part in (get("delta"), get("message"))
    )
    return _Choice(
        delta,
        index if type(index) is int else 0,
        reason if isinstance(reason, str) else None,
        None,
        ids if isinstance(ids, list) else None,
        message,
    )
