"""Read OpenAI's chat completions as Deltas: chunks of a stream, and whole answers.

`_read_usual` is a short path for chunks with one piece of one choice; `_read` reads all other chunks.
`InlineThinking` separates thinking that a server left in the content.

Source: openai/openai-openapi openapi.yaml; docs/dialects.md.
"""

import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from llmtap.json_types import JsonObject
from llmtap.protocol.delta import MODEL_CHARS_MAX, Delta, EventClass, TokenSource
from llmtap.protocol.dialects.openai_choices import BESIDE_NAMES, ChoicesReader, ChunkFields, is_bare
from llmtap.protocol.dialects.openai_shapes import (
    BAD_JSON,
    CHOICES_MAX,
    NOT_ENDED,
    Findings,
    Index,
    RunningCount,
    add_timings,
    is_object,
    read_json,
    read_non_object,
    read_usage,
    text_of,
)
from llmtap.protocol.json_memory import bounded_decoder
from llmtap.protocol.speakers import is_other_role
from llmtap.protocol.sse import SseEvent
from llmtap.protocol.verdicts import filters_verdict, refusal_verdict


class _Delta(msgspec.Struct, gc=False):
    """`delta` of a chunk, or `message` of a whole answer. The types of the fields are checked before use."""

    content: Any = None
    role: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    reasoning_text: Any = None
    thinking: Any = None
    reasoning_details: Any = None
    reasoning_steps: Any = None
    tool_calls: Any = None
    function_call: Any = None
    refusal: Any = None
    audio: Any = None
    token_id: Any = None
    extra_content: Any = None
    type: Any = None
    """Type of the content, which only Jina sends: `think` or `text`."""


class _Logprobs(msgspec.Struct, gc=False):
    """Log probabilities of a choice."""

    content: list[msgspec.Raw] | None = None
    refusal: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct, gc=False):
    """One choice of a chunk or of a whole answer."""

    delta: _Delta | None = None
    index: Index = 0
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[Any] | None = None
    """Ids of the generated tokens (vLLM), whose number is exact."""
    content_filter_results: Any = None
    message: _Delta | None = None
    usage: Any = None


class _Chunk(ChunkFields, gc=False):
    """A chunk, or a whole answer."""

    choices: list[_Choice] | None = None


_decode: Final = bounded_decoder(_Chunk)
_EMPTY_DELTA: Final = _Delta()
_CHOICE_0: Final = (0,)
_ROLE_TOO: Final = (EventClass.ROLE,)
_USAGE_TOO: Final = (EventClass.USAGE,)
_GEMINI: Final = "gemini"
_MODEL_PREFIX_CHARS: Final = 24
_ID_CHARS_MAX: Final = 128


_repeats: Final = re.compile(rb'"object":\s*"chat\.(reasoning|completion)\.done"').search
"""Matches chunks of Perplexity's concise streams that repeat the output of a stage, and add its usage."""


class OpenAIChat(ChoicesReader):
    """Reader of chat completions."""

    name = "openai.chat"
    end_certain = True
    shape_certain = True
    """No other API has `delta` in `choices`."""
    names_read: Final = frozenset(_Chunk.__struct_encode_fields__)
    chunk_type = _Chunk
    decode = staticmethod(_decode)

    __slots__ = ("_id", "_no_thinking", "_repeat_match", "_thinking")

    def __init__(self) -> None:
        super().__init__()
        self._id = ""
        """Id of the answer; another id shows that a gateway began it again."""
        self._no_thinking: set[int] = set()
        """Indexes of the choices in whose content no (more) thinking can follow."""
        self._thinking: dict[int, InlineThinking] = {}
        """By choice: parser of thinking that is inside the content (`<think>`)."""
        self._repeat_match: re.Match[bytes] | None = None
        """Match of a chunk that repeats the previous output with usage; None: it repeats nothing."""

    @property
    def running_total(self) -> RunningCount:
        """Total of the running usage, which changes with each event."""
        return self._running_count

    @staticmethod
    def claim(value: JsonObject, path: str) -> int:
        """Return how certainly an object is of this dialect (`registry.Dialect.claim`)."""
        choices = value.get("choices")
        if isinstance(choices, list):
            if text_of(value.get("object")).startswith(("chat.completion", "chat.reasoning")):
                return 3
            if any(isinstance(c, dict) and ("delta" in c or "message" in c) for c in choices):
                return 2
        elif not any(name in value for name in BESIDE_NAMES):
            return 0
        return int(path.endswith("/chat/completions"))

    def read_event(self, event: SseEvent) -> Delta:
        """Return the Delta of an event, by the short path (`_read_usual`) if possible."""
        data = event.data
        if data is None or not (data.startswith(b"{") or is_object(data)):
            return read_non_object(event)
        try:
            chunk = _decode(data)
        except BAD_JSON:
            return self._read_json(data, event.event, streamed=True)
        choices = chunk.choices
        if choices is not None and len(choices) == 1 and chunk.model == self._model and is_bare(chunk):
            delta = self._read_usual(choices[0], chunk.usage)
            if delta is not None:
                if chunk.timings is not None:
                    add_timings(delta, chunk.timings, delta.choices, self._predicted_count)
                return delta
        return self._read(chunk, data, event.event, streamed=True)

    def _read_usual(self, choice: _Choice, usage: JsonObject | None) -> Delta | None:
        """Return the Delta of a chunk that certainly has one piece of one unfinished choice; else None."""
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
            or delta.reasoning_steps
            or (delta.role and is_other_role(delta.role))
            or (choice.content_filter_results and filters_verdict(choice.content_filter_results) is not None)
        ):
            return None
        index = choice.index
        text, calls = delta.content, delta.tool_calls
        thought = delta.reasoning_content or delta.reasoning
        where = (index,) if index else _CHOICE_0
        also = _ROLE_TOO if delta.role else ()
        if type(text) is str and text and not thought and not calls and index in self._no_thinking:
            blank = text.isspace()
            out = Delta(EventClass.CONTENT, 0, True, not blank, blank, False, text, where, also)
        elif type(thought) is str and thought and not text and not calls:
            out = Delta(EventClass.REASONING, 0, True, False, False, True, thought, where, also)
        elif type(calls) is list and len(calls) == 1 and not text and not thought:
            fragment = _arguments_fragment(calls[0])
            if fragment is None:
                return None
            out = Delta(EventClass.TOOL_CALL, 0, True, False, False, False, fragment, where, also)
            out.tool_call = True
        else:
            return None
        if usage is None:
            if self._running_count.is_running is None:
                return None
            if not choice.token_ids:
                out.repeatable = True
                return out
        elif not self._add_running_usage(out, index, usage):
            return None
        elif not choice.token_ids:
            out.repeatable = True
        if choice.token_ids:
            out.tokens, out.token_source = len(choice.token_ids), TokenSource.TOKEN_IDS
        return out

    def _add_running_usage(self, delta: Delta, index: int, usage: JsonObject) -> bool:
        """Add a running usage to a Delta. Return False if `usage` is not certainly a running count."""
        counts = read_usage(usage) if self._running_count.is_running and not delta.also else None
        if counts is None or not counts.output:
            return False
        added = self._running_count.growth(index, counts.output)
        if added:
            delta.tokens, delta.token_source = added, TokenSource.RUNNING_USAGE
        delta.also = _USAGE_TOO
        delta.usage, delta.counts, delta.usage_running = usage, counts, True
        return True

    def _before_choices(self, chunk: _Chunk, data: bytes) -> None:
        """Read what must be known before the choices of a chunk."""
        self._repeat_match = None if chunk.usage is None else _repeats(data)
        if self._running_count.is_running is None:  # This is the first chunk with choices.
            self._id = _id_of(data)
            if chunk.model is not None and _GEMINI in chunk.model[:_MODEL_PREFIX_CHARS]:
                # Gemini's usage does not count the text so far, so it is no running count.
                self._running_count.is_running = False

    def _after_choices(self, delta: Delta, chunk: _Chunk, data: bytes) -> None:
        """Complete the Delta of a chunk whose choices were read."""
        if self._repeat_match is not None:
            delta.usage_running = self._repeat_match[1] == b"reasoning"
            self._repeat_match = None
        if delta.event_class is EventClass.ROLE and self._no_thinking:
            # After content, a role with another model or id shows that the gateway has begun another attempt.
            was, self._id = self._id, _id_of(data) or self._id
            other = chunk.model and chunk.model[:MODEL_CHARS_MAX] != self._model
            delta.retry = bool(other or (was and was != self._id))

    def _read_choice(
        self, choice: _Choice, position: int, findings: Findings, *, streamed: bool, replaced: bool
    ) -> None:
        index = choice.index
        # Some servers send a piece in `delta` and in `message`: read only `delta` (dialects.md section 3).
        delta, field = choice.delta, "delta"
        if self._repeat_match is not None:
            delta = _EMPTY_DELTA
        elif delta is None and choice.message is not None:
            delta, field = choice.message, "message"
            if streamed and index in self._no_thinking:
                delta = _Delta(role=delta.role)
        alone = delta is None or not (delta.content or delta.reasoning_content or delta.tool_calls)
        delta = delta or _EMPTY_DELTA
        logprobs, results, reason = choice.logprobs, choice.content_filter_results, choice.finish_reason
        if reason and reason.lower() in NOT_ENDED:
            reason = None
        findings.add_choice(
            index,
            ids=len(choice.token_ids or ()) or int(delta.token_id is not None),
            logprobs=0 if logprobs is None else len(logprobs.content or ()) + len(logprobs.refusal or ()),
            role=bool(delta.role),
        )
        if reason:
            only = (streamed or findings.has_rails) and bool(delta.content) and index not in self._no_thinking
            replaced |= findings.add_finish(reason, results, only_text=only)
        if results is not None:
            findings.add_filter_results(results, alone=alone)
        if delta is not _EMPTY_DELTA:
            self._read_delta(delta, index, f"choices[{position}].{field}", findings, replaced=replaced)
        if (reason or not streamed) and index in self._thinking:
            self._add_content(index, *self._thinking.pop(index).close(), findings)

    def _read_delta(
        self, delta: _Delta, index: int, path: str, findings: Findings, *, replaced: bool
    ) -> None:
        if is_other_role(delta.role):
            return
        content, refusal, audio = delta.content, text_of(delta.refusal), delta.audio
        for step in delta.reasoning_steps if isinstance(delta.reasoning_steps, list) else ():
            # Of Perplexity's steps, only the thought is output, not the searches and their results.
            if thought := text_of(step.get("thought") if isinstance(step, dict) else None):
                findings.add_piece(index, EventClass.REASONING, thought)
                if findings.cut:
                    break
        if reasoning := text_of(_reasoning_text_of(delta)):
            findings.add_piece(index, EventClass.REASONING, reasoning)
        if content and not replaced:
            if isinstance(content, str):
                is_thought = delta.type == "think" or _is_thought(delta.extra_content)
                self._read_content(content, index, findings, thought=is_thought)
            elif isinstance(content, list):
                self._read_parts(content, index, path, findings)
        if refusal:
            findings.add_piece(index, EventClass.REFUSAL, refusal)
            signal = "message.refusal" if path.endswith("message") else "delta.refusal"
            findings.add_verdict(refusal_verdict(signal, path + ".refusal"), None)
        if isinstance(audio, dict) and (audio.get("transcript") or audio.get("data")):
            findings.add_piece(index, EventClass.CONTENT, text_of(audio.get("transcript")), audio=True)
        if delta.tool_calls or delta.function_call:
            for call in _called_functions(delta):
                name, arguments = call.get("name"), call.get("arguments") or call.get("input")
                output = bool(name or arguments)
                findings.add_piece(index, EventClass.TOOL_CALL, text_of(arguments), output=output)
                if findings.cut:
                    break

    def _read_content(self, text: str, index: int, findings: Findings, *, thought: bool) -> None:
        """Add a piece of content, which can include thinking. `thought`: the whole piece is thinking."""
        if index in self._no_thinking:
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
            if thinking.is_settled and not thought:
                self._end_thinking(index)
            if not (reasoning or content):
                findings.add_marker(index)
        self._add_content(index, reasoning, content, findings)

    def _add_content(self, index: int, reasoning: str, content: str, findings: Findings) -> None:
        if reasoning:
            findings.add_piece(index, EventClass.REASONING, reasoning)
        if content:
            findings.add_piece(index, EventClass.CONTENT, content)

    def _end_thinking(self, index: int) -> None:
        self._thinking.pop(index, None)
        if len(self._no_thinking) < CHOICES_MAX:
            self._no_thinking.add(index)

    def _read_parts(self, parts: list[Any], index: int, path: str, findings: Findings) -> None:
        """Add the parts of a content array: texts, refusals, and thinking (for Mistral an array of texts)."""
        for i, part in enumerate(parts):
            if findings.cut:
                break
            if not isinstance(part, dict):
                continue
            for kind, text in _part_outputs(part):
                findings.add_piece(index, kind, text)
                if kind is EventClass.CONTENT:
                    self._end_thinking(index)
                elif kind is EventClass.REFUSAL:
                    place = f"{path}.content[{i}].refusal"
                    findings.add_verdict(refusal_verdict("content.refusal", place), None)


def _id_of(data: bytes) -> str:
    value = read_json(data)
    return text_of(value.get("id"))[:_ID_CHARS_MAX] if isinstance(value, dict) else ""


def _is_thought(extra: Any) -> bool:
    """Return whether the extra fields of Gemini's API mark the content as thinking."""
    google = extra.get("google") if isinstance(extra, dict) else None
    return isinstance(google, dict) and google.get("thought") is True


def _reasoning_text_of(delta: _Delta) -> Any:
    """Return the thinking in a delta, which servers put into different fields."""
    thinking = delta.reasoning_content or delta.reasoning or delta.reasoning_text or delta.thinking
    if thinking or not isinstance(delta.reasoning_details, list):
        return thinking
    parts = (d.get("text") or d.get("summary") for d in delta.reasoning_details if isinstance(d, dict))
    return "".join(map(text_of, parts))


def _part_outputs(part: JsonObject) -> Iterator[tuple[EventClass, str]]:
    """Yield the texts of a content part with their classes, such as thinking."""
    thinking = part.get("thinking")
    for inner in thinking if isinstance(thinking, list) else ({"text": thinking},):
        if thought := text_of(inner.get("text") if isinstance(inner, dict) else None):
            yield EventClass.REASONING, thought
    for key, kind in (("text", EventClass.CONTENT), ("refusal", EventClass.REFUSAL)):
        if text := text_of(part.get(key)):
            yield kind, text


def _arguments_fragment(call: Any) -> str | None:
    """Return the arguments in a piece of a call: "" if it has only the name, None in an unusual form."""
    function = call.get("function") if type(call) is dict else None
    if type(function) is not dict:
        return None
    arguments = function.get("arguments")
    return arguments if type(arguments) is str and (arguments or function.get("name")) else None


def _called_functions(delta: _Delta) -> Iterator[JsonObject]:
    """Yield the function of each call in a delta; {} for a call without a function."""
    if isinstance(delta.tool_calls, list):
        for call in delta.tool_calls:
            if isinstance(call, dict):
                function = call.get("function") or call.get("custom")
                yield function if isinstance(function, dict) else {}
    if isinstance(delta.function_call, dict):
        yield delta.function_call


_OPENING: Final = ("<think>", "<thought>", "<thinking>")


class InlineThinking:
    """Separates thinking (`<think>...</think>` at the start) from the content of one choice. Servers without
    a reasoning parser (llama.cpp, MLX) and Gemini's OpenAI-compatible API send it. Markers are no text,
    except after the start of the content. A possible beginning of a marker is stored until the next piece."""

    __slots__ = ("_end_marker", "_held_text", "is_settled")

    def __init__(self) -> None:
        self.is_settled = False
        """Whether the rest of the choice is content."""
        self._end_marker = ""
        """Marker that ends the current thinking; empty outside thinking."""
        self._held_text = ""
        """Text that is possibly the beginning of a marker."""

    def feed(self, text: str) -> tuple[str, str]:
        """Return the thinking and the content in the next piece: `(reasoning, content)`."""
        if self.is_settled:
            return "", text
        text = self._held_text + text
        self._held_text = ""
        if self._end_marker:
            return self._split_at_end_marker(text)
        rest = text.lstrip()
        if not rest:
            return "", text
        blank = text[: len(text) - len(rest)]
        for marker in _OPENING:
            if rest.startswith(marker):
                self._end_marker = f"</{marker[1:]}"
                reasoning, content = self._split_at_end_marker(rest[len(marker) :])
                return reasoning, blank + content
        if any(marker.startswith(rest) for marker in _OPENING):
            self._held_text = rest
            return "", blank
        self.is_settled = True
        return "", text

    def close(self) -> tuple[str, str]:
        """Return `(reasoning, content)` of the stored text at the end: an unfinished marker is text."""
        held, self._held_text = self._held_text, ""
        return (held, "") if self._end_marker else ("", held)

    def _split_at_end_marker(self, text: str) -> tuple[str, str]:
        """Return the text before and after the end of thinking; hold back a part of the marker."""
        closing = self._end_marker
        at = text.find(closing)
        if at >= 0:
            self.is_settled = True
            return text[:at], text[at + len(closing) :]
        # Hold back the longest end of the text that can begin the marker: the next text can complete it.
        for size in range(min(len(closing) - 1, len(text)), 0, -1):
            if text.endswith(closing[:size]):
                self._held_text = text[-size:]
                return text[:-size], ""
        return text, ""
