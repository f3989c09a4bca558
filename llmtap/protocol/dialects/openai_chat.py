"""Read OpenAI's chat completions as Deltas: chunks of a stream, and whole answers.

A chunk with one piece of one choice takes a short path (`_read_usual`); everything else goes through
`_read`.

Source: openai/openai-openapi openapi.yaml; docs/dialects.md.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from llmtap.protocol.delta import MODEL_CHARS_MAX, Delta, EventClass, TokenSource
from llmtap.protocol.dialects.openai_beside import (
    BESIDE_NAMES,
    ChoicesReader,
    ChunkFields,
    build_chunk,
    is_alone,
)
from llmtap.protocol.dialects.openai_shapes import (
    BAD_JSON,
    CHOICES_MAX,
    EVENT_CHOICES_MAX,
    NO_RAW,
    PIECES_MAX,
    Findings,
    Index,
    add_timings,
    is_object,
    read_frame,
    read_json,
    read_usage,
    to_raw,
)
from llmtap.protocol.inline_thinking import InlineThinking
from llmtap.protocol.sse import SseEvent
from llmtap.protocol.verdicts import of_refusal


class _Delta(msgspec.Struct, gc=False):
    """`delta` of a chunk, `message` of a whole answer. Any: looked at before use, never trusted."""

    content: Any = None
    role: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    reasoning_text: Any = None
    thinking: Any = None
    reasoning_details: msgspec.Raw = NO_RAW
    tool_calls: Any = None
    function_call: Any = None
    refusal: Any = None
    audio: Any = None
    token_id: Any = None
    extra_content: Any = None


class _Logprobs(msgspec.Struct, gc=False):
    content: list[msgspec.Raw] | None = None
    refusal: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct, gc=False):
    delta: _Delta | None = None
    index: Index = 0
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None
    content_filter_results: msgspec.Raw = NO_RAW
    message: _Delta | None = None
    usage: Any = None


class _Chunk(ChunkFields, gc=False):
    choices: list[_Choice] | None = None


class _Id(msgspec.Struct, gc=False):
    id: Any = None


_decode: Final = msgspec.json.Decoder(_Chunk).decode
_decode_id: Final = msgspec.json.Decoder(_Id).decode
_NOTHING: Final = _Delta()
_FIRST: Final = (0,)
_ROLE_TOO: Final = (EventClass.ROLE,)
_USAGE_TOO: Final = (EventClass.USAGE,)
_GEMINI: Final = "gemini"
_MODEL_PREFIX_CHARS: Final = 24
_ID_CHARS_MAX: Final = 128


class _Steps(msgspec.Struct, gc=False):
    reasoning_steps: list[Any] | None = None


class _StepsChoice(msgspec.Struct, gc=False):
    delta: _Steps | None = None


class _StepsChunk(msgspec.Struct, gc=False):
    choices: list[_StepsChoice] = []


_decode_steps: Final = msgspec.json.Decoder(_StepsChunk).decode
_repeats: Final = re.compile(rb'"object":\s*"chat\.(reasoning|completion)\.done"').search
"""Perplexity's concise streams: such a chunk repeats a stage, and adds its usage."""


class OpenAIChat(ChoicesReader):
    name = "openai.chat"
    names_read: Final = frozenset(_Chunk.__struct_encode_fields__)

    __slots__ = ("_id", "_plain", "_repeated", "_said", "_thinking", "_thoughts")

    def __init__(self) -> None:
        super().__init__()
        self._id: Any = None
        self._plain: set[int] = set()
        """Choices that have begun to speak and are past any thinking inside their content."""
        self._thinking: dict[int, InlineThinking] = {}
        self._said: dict[int, int] = {}
        """Characters of the `message` of choices that never had a `delta`."""
        self._repeated: re.Match[bytes] | None = None
        self._thoughts: list[list[str]] = []
        """Of the chunk's `reasoning_steps` (Perplexity), by the position of their choice."""

    @staticmethod
    def claim(value: dict[str, Any], path: str) -> int:
        kind = value.get("object")
        if isinstance(kind, str) and kind.startswith(("chat.completion", "chat.reasoning")):
            return 3
        choices = value.get("choices")
        if isinstance(choices, list):
            if any(isinstance(c, dict) and ("delta" in c or "message" in c) for c in choices):
                return 2
        elif not any(name in value for name in BESIDE_NAMES):
            return 0
        return int(path.endswith("/chat/completions"))

    def read_event(self, event: SseEvent) -> Delta:
        data = event.data
        if data is None or not (data.startswith(b"{") or is_object(data)):
            return read_frame(event)
        try:
            chunk = _decode(data)
        except BAD_JSON:
            return self._read_json(data, event.event, streamed=True)
        choices = chunk.choices
        if choices is not None and len(choices) == 1 and chunk.model == self._model and is_alone(chunk):
            delta = self._read_usual(choices[0], chunk.usage)
            if delta is not None:
                if chunk.timings is not None:
                    add_timings(delta, chunk.timings, delta.choices, self._predicted)
                return delta
        return self._read(chunk, data, event.event, streamed=True)

    def _read_usual(self, choice: _Choice, usage: dict[str, Any] | None) -> Delta | None:
        """A chunk with one piece of one choice that goes on; None if it is, or may be, anything else."""
        delta = choice.delta
        if (
            delta is None
            or choice.finish_reason
            or choice.logprobs is not None
            or delta.refusal
            or delta.audio
            or delta.token_id is not None
            or delta.extra_content is not None
            or delta.function_call
            or (choice.content_filter_results is not NO_RAW and _any_true(choice.content_filter_results))
        ):
            return None
        index = choice.index
        text, calls = delta.content, delta.tool_calls
        thought = delta.reasoning_content or delta.reasoning
        where = (index,) if index else _FIRST
        also = _ROLE_TOO if delta.role else ()
        if type(text) is str and text and not thought and not calls and index in self._plain:
            blank = text.isspace()
            out = Delta(EventClass.CONTENT, 0, True, not blank, blank, False, text, where, also)
        elif type(thought) is str and thought and not text and not calls:
            out = Delta(EventClass.REASONING, 0, True, False, False, True, thought, where, also)
        elif type(calls) is list and len(calls) == 1 and not text and not thought:
            fragment = _fragment(calls[0])
            if fragment is None:
                return None
            out = Delta(EventClass.TOOL_CALL, 0, True, False, False, False, fragment, where, also)
            out.tool_call = True
        else:
            return None
        if usage is None:
            if self._running.running is None:
                return None
            if not choice.token_ids:
                out.repeatable = True
                return out
        elif not self._count(out, index, usage):
            return None
        if choice.token_ids:
            out.tokens, out.token_source = len(choice.token_ids), TokenSource.TOKEN_IDS
        return out

    def _count(self, delta: Delta, index: int, usage: dict[str, Any]) -> bool:
        """Adds a usage that runs along with the output; False if this one may not."""
        counts = read_usage(usage) if self._running.running and not delta.also else None
        if counts is None or not counts.output:
            return False
        added = self._running.step(index, counts.output)
        if added:
            delta.tokens, delta.token_source = added, TokenSource.RUNNING_USAGE
        delta.also = _USAGE_TOO
        delta.usage, delta.counts, delta.usage_running = usage, counts, True
        return True

    def _decoded(self, data: bytes) -> _Chunk | None:
        try:
            return _decode(data)
        except BAD_JSON:
            return build_chunk(read_json(data), _Chunk, _Choice, _parts)

    def _begin(self, chunk: _Chunk, data: bytes) -> None:
        self._repeated = None if chunk.usage is None else _repeats(data)
        self._thoughts = _thoughts(data) if b'"reasoning_steps"' in data and self._repeated is None else []
        if self._running.running is None:  # the first choice of the answer
            self._id = _id_of(data)
            if chunk.model is not None and _GEMINI in chunk.model[:_MODEL_PREFIX_CHARS]:
                self._running.running = False  # its totals run along, but not with the text

    def _end(self, delta: Delta, chunk: _Chunk, data: bytes) -> None:
        if self._repeated is not None:
            delta.usage_running = self._repeated[1] == b"reasoning"
            self._repeated = None
        if delta.event_class is EventClass.ROLE and self._plain:
            delta.retry = self._again(data, chunk.model)

    def _again(self, data: bytes, model: str | None) -> bool:
        """Whether a role in the middle is that of another attempt: by another model, or with another id."""
        was, self._id = self._id, _id_of(data) or self._id
        return bool((model and model[:MODEL_CHARS_MAX] != self._model) or (was and was != self._id))

    def _read_choice(
        self, choice: _Choice, position: int, findings: Findings, *, streamed: bool, replaced: bool
    ) -> None:
        index = choice.index
        # Where a choice says the same piece twice, `delta` is the one to read (dialects.md section 3).
        delta, field = choice.delta, "delta"
        if self._repeated is not None:
            delta = _NOTHING
        elif delta is None and choice.message is not None:
            delta, field = choice.message, "message"
            if streamed:
                delta = self._unsaid(index, delta)
        alone = delta is None or not (delta.content or delta.reasoning_content or delta.tool_calls)
        delta = delta or _NOTHING
        logprobs = choice.logprobs
        findings.choice(
            index,
            ids=len(choice.token_ids or ()) or int(delta.token_id is not None),
            logprobs=0 if logprobs is None else len(logprobs.content or ()) + len(logprobs.refusal or ()),
            role=bool(delta.role),
        )
        filters = choice.content_filter_results
        results = None if filters is NO_RAW or not _any_true(filters) else read_json(bytes(filters))
        reason = choice.finish_reason
        if reason:
            verdict = findings.finish(reason, results)
            only = streamed or findings.railed
            if verdict is not None and only and delta.content and index not in self._plain:
                # The only text, in the very block of the verdict, stands in for the answer.
                replaced = verdict.substituted = True
                verdict.action = "replaced"
        if results is not None:
            findings.filtered(results, alone=alone)
        for thought in self._thoughts[position] if position < len(self._thoughts) else ():
            findings.piece(index, EventClass.REASONING, thought)
        if delta is not _NOTHING:
            self._read_delta(delta, index, f"choices[{position}].{field}", findings, replaced=replaced)
        if (reason or not streamed) and index in self._thinking:
            self._add_content(index, *self._thinking.pop(index).close(), findings)

    def _unsaid(self, index: int, message: _Delta) -> _Delta:
        """What is new in the `message` of a stream, where it holds all that was said so far (Perplexity)."""
        content = message.content
        if not isinstance(content, str) or (index in self._plain and index not in self._said):
            return _Delta(role=message.role)  # with a delta on the other chunks it is a repetition
        said = self._said.get(index, 0)
        if index in self._said or len(self._said) < CHOICES_MAX:
            self._said[index] = len(content)
        return _Delta(content=content[said:], role=message.role)

    def _read_delta(
        self, delta: _Delta, index: int, path: str, findings: Findings, *, replaced: bool
    ) -> None:
        reasoning, content, refusal = _reasoning(delta), delta.content, delta.refusal
        if isinstance(reasoning, str) and reasoning:
            findings.piece(index, EventClass.REASONING, reasoning)
        if content and not replaced:
            if isinstance(content, str):
                self._read_content(content, index, findings, thought=_is_thought(delta.extra_content))
            elif isinstance(content, list):
                self._read_parts(content, index, path, findings)
        if isinstance(refusal, str) and refusal:
            findings.piece(index, EventClass.REFUSAL, refusal)
            signal = "message.refusal" if path.endswith("message") else "delta.refusal"
            findings.verdict(of_refusal(signal, path + ".refusal"), None)
        audio = delta.audio
        if isinstance(audio, dict):
            transcript = audio.get("transcript")
            if transcript or audio.get("data"):
                spoken = transcript if isinstance(transcript, str) else ""
                findings.piece(index, EventClass.CONTENT, spoken, audio=True)
        if delta.tool_calls or delta.function_call:
            for call in _calls(delta):
                name, arguments = call.get("name"), call.get("arguments") or call.get("input")
                fragment = arguments if isinstance(arguments, str) else ""
                findings.piece(index, EventClass.TOOL_CALL, fragment, output=bool(name or arguments))
                if findings.cut:
                    break

    def _read_content(self, text: str, index: int, findings: Findings, *, thought: bool) -> None:
        """A piece of content, which may be thinking that nobody took out."""
        if index in self._plain:
            thinking = None
            reasoning, content = "", text
        else:
            thinking = self._thinking.get(index)
            if thinking is None:
                thinking = InlineThinking()
                if len(self._thinking) < CHOICES_MAX:
                    self._thinking[index] = thinking
            reasoning, content = thinking.feed(text)
        if thought:
            reasoning, content = reasoning + content, ""
        if thinking is not None:
            if thinking.settled and not thought:
                self._settle(index)
            if not (reasoning or content):
                findings.marker(index)
        self._add_content(index, reasoning, content, findings)

    def _add_content(self, index: int, reasoning: str, content: str, findings: Findings) -> None:
        if reasoning:
            findings.piece(index, EventClass.REASONING, reasoning)
        if content:
            findings.piece(index, EventClass.CONTENT, content)

    def _settle(self, index: int) -> None:
        self._thinking.pop(index, None)
        if len(self._plain) < CHOICES_MAX:
            self._plain.add(index)

    def _read_parts(self, parts: list[Any], index: int, path: str, findings: Findings) -> None:
        """A content array: texts, thinking, which is an array of texts again (Mistral), and refusals."""
        for i, part in enumerate(parts):
            if findings.cut:
                break
            if not isinstance(part, dict):
                continue
            for kind, text in _part(part):
                findings.piece(index, kind, text)
                if kind is EventClass.CONTENT:
                    self._settle(index)
                elif kind is EventClass.REFUSAL:
                    findings.verdict(of_refusal("content.refusal", f"{path}.content[{i}].refusal"), None)


def _id_of(data: bytes) -> str | None:
    try:
        found = _decode_id(data).id
    except BAD_JSON:
        return None
    return found[:_ID_CHARS_MAX] if isinstance(found, str) and found else None


def _thoughts(data: bytes) -> list[list[str]]:
    """Return the thoughts in Perplexity's reasoning steps; what a step searched and found is no output."""
    try:
        choices = _decode_steps(data).choices
    except BAD_JSON:
        return []
    steps = [(c.delta and c.delta.reasoning_steps) or [] for c in choices[:EVENT_CHOICES_MAX]]
    return [
        [
            text
            for s in part[:PIECES_MAX]
            if isinstance(s, dict) and isinstance(text := s.get("thought"), str) and text
        ]
        for part in steps
    ]


def _any_true(results: msgspec.Raw) -> bool:
    """Whether a filter's results may hold a true one: mostly all are false, and need no decoding."""
    return b"true" in bytes(results)


def _is_thought(extra: Any) -> bool:
    google = extra.get("google") if isinstance(extra, dict) else None
    return isinstance(google, dict) and google.get("thought") is True


def _reasoning(delta: _Delta) -> Any:
    """Return the thinking beside the content, in whichever field a server puts it."""
    found = delta.reasoning_content or delta.reasoning or delta.reasoning_text or delta.thinking
    if found or delta.reasoning_details is NO_RAW:
        return found
    details = read_json(bytes(delta.reasoning_details))
    parts = (
        (d.get("text") or d.get("summary") for d in details if isinstance(d, dict))
        if isinstance(details, list)
        else ()
    )
    return "".join(part for part in parts if isinstance(part, str))


def _part(part: dict[str, Any]) -> Iterator[tuple[EventClass, str]]:
    thinking = part.get("thinking")
    if isinstance(thinking, list):
        for inner in thinking:
            thought = inner.get("text") if isinstance(inner, dict) else None
            if isinstance(thought, str) and thought:
                yield EventClass.REASONING, thought
    elif isinstance(thinking, str) and thinking:
        yield EventClass.REASONING, thinking
    for key, kind in (("text", EventClass.CONTENT), ("refusal", EventClass.REFUSAL)):
        text = part.get(key)
        if isinstance(text, str) and text:
            yield kind, text


def _fragment(call: Any) -> str | None:
    """The arguments in the usual piece of a call, or "" beside its name; None if it is no usual one."""
    function = call.get("function") if type(call) is dict else None
    if type(function) is not dict:
        return None
    arguments = function.get("arguments")
    return arguments if type(arguments) is str and (arguments or function.get("name")) else None


def _calls(delta: _Delta) -> Iterator[dict[str, Any]]:
    """The functions, as far as this delta names them, of its calls."""
    if isinstance(delta.tool_calls, list):
        for call in delta.tool_calls:
            if isinstance(call, dict):
                function = call.get("function") or call.get("custom")
                yield function if isinstance(function, dict) else {}
    if isinstance(delta.function_call, dict):
        yield delta.function_call


def _parts(get: Callable[[str], Any]) -> dict[str, Any]:
    """Return the fields of a choice that only chat has, for `build_chunk`."""
    out: dict[str, Any] = {
        "content_filter_results": to_raw(get("content_filter_results")), "usage": get("usage"),
    }  # fmt: skip
    for name in ("delta", "message"):
        part = get(name)
        if isinstance(part, dict):
            fields: dict[str, Any] = {field: part.get(field) for field in _Delta.__struct_fields__}
            out[name] = _Delta(**fields | {"reasoning_details": to_raw(fields["reasoning_details"])})
    return out
