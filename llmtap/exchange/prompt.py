"""Parse the prompt in a request's body: to messages, in one form for all endpoints, and parameters.

Only captures need the prompt: the meter's recorder calls `read_prompt`, and makes block hashes and sessions
from the result. (`request.py` reads the fields that every exchange needs.) A message is a role and parts:
text, token ids, and marks for parts without a length, such as pictures. Reasoning that a client sends back is
a separate field, because clients drop it between turns. No function raises an exception. The text is used
only for hashes and sizes.

Source: each provider's reference.
"""

import re
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import groupby
from typing import Any, Final, TypeAlias

import msgspec

from llmtap.exchange.bounds import BOUNDS
from llmtap.exchange.exchange import RequestShape
from llmtap.exchange.strings import looks_secret
from llmtap.json_types import JsonObject
from llmtap.protocol.json_memory import bounded_decoder

MESSAGES_MAX: Final = 10_000
"""Maximum number of messages of a body, more than any model's context can have. A body with more messages is
not parsed."""
PARTS_MAX: Final = 65_536
"""Maximum number of parts of all messages of a body: parsing takes 2 us for each part. A list that exceeds
the number becomes one mark."""
ID_BYTES: Final = 4
"""Number of bytes that a token id counts as, so that 512 ids make a block like 2 KiB of text."""
_DEPTH_MAX: Final = 8
"""Maximum depth of nested content; a tool's result in a message has depth 2."""
_INT_MAX: Final = (1 << 31) - 1
_MARK_BYTES: Final = 16
_WORD_CHARS_MAX: Final = BOUNDS["shape.roles"].chars

_decode: Final = bounded_decoder()

Part: TypeAlias = "str | bytes | array[int]"
"""Part of a message: text, token ids (an array of type `I`), or a mark (bytes, for a part without length)."""


@dataclass(slots=True)
class PromptMessage:
    """One message of a prompt."""

    role: str
    parts: list[Part] = field(default_factory=list)
    """Parts of the message. Adjacent texts are joined, so that the client's division of its text has no
    effect."""
    thinking: str = ""
    """Reasoning of the model that the client sends back."""
    result: bool = False
    """Whether the message is the result of a tool call."""

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def size(self) -> int:
        """Size in bytes: UTF-8 including thinking, and ID_BYTES for each token id."""
        size = _utf8_size(self.thinking)
        for part in self.parts:
            if isinstance(part, str):
                size += _utf8_size(part)
            elif isinstance(part, array):
                size += ID_BYTES * len(part)
        return size


@dataclass(slots=True)
class PromptShape:
    """Messages and parameters of a request."""

    messages: list[PromptMessage]
    shape: RequestShape
    """Numbers, sizes and parameters of the request, without text."""
    value: JsonObject
    """The request's body, as a JSON object."""
    chat: bool
    """Whether the prompt is a list of messages."""
    tools: bytes = b""
    """Digest of the offered tools, which precede the messages in the model's input; empty: no tools."""
    cut: bool = False
    """Whether parts were left out because of PARTS_MAX."""


def read_prompt(body: bytes, endpoint: str | None) -> PromptShape | None:
    """Return the prompt in a request's decoded body; None if the body is not a JSON object, or if neither the
    endpoint nor a prompt in the body is known. The kind of prompt that the endpoint usually has is tried
    first, then every other kind."""
    if body.lstrip()[:1] != b"{":
        return None
    try:
        value = _decode(body)
    except (ValueError, RecursionError):
        return None
    shape = _parameters(value)
    reader = _Reader()
    messages: list[PromptMessage] = []
    chat = False
    for read, converses in _readers_for(endpoint):
        messages = read(reader, value)
        if messages:
            chat = converses
            shape.images = reader.media_count
            break
    else:
        if endpoint is None:
            return None
    shape.roles = [message.role for message in messages]
    shape.sizes = array("q", [message.size for message in messages])
    tools = value.get("tools") or value.get("functions")
    return PromptShape(messages, shape, value, chat, _digest(tools) if tools else b"", reader.cut)


class _Reader:
    """Reader of the messages in one body."""

    __slots__ = ("_parts_left", "cut", "media_count")

    def __init__(self) -> None:
        self.media_count = 0
        """Number of images and other media."""
        self._parts_left = PARTS_MAX
        """Number of parts that may still be read."""
        self.cut = False
        """Whether parts were left out because of PARTS_MAX, so that the shape is incomplete."""

    def count_parts(self, n: int) -> bool:
        """Count `n` more parts. Return False if the number of parts then exceeds PARTS_MAX."""
        if n > self._parts_left:
            self.cut = True
            return False
        self._parts_left -= n
        return True

    def read_chat(self, value: JsonObject) -> list[PromptMessage]:
        """Read `messages`, or Gemini's `contents`, and a system prompt beside them, as in Anthropic's API."""
        messages = value.get("messages") or value.get("contents")
        if not isinstance(messages, list) or not messages or len(messages) > MESSAGES_MAX:
            return []
        return [*self._system_prompts(value), *(self._read_message(message) for message in messages)]

    def read_input(self, value: JsonObject) -> list[PromptMessage]:
        """Read `input` of the Responses API, or of LM Studio, which has the same format."""
        items = value.get("input")
        if isinstance(items, str):
            items = [{"role": "user", "content": items}]
        if not isinstance(items, list) or not items or len(items) > MESSAGES_MAX:
            return []
        return [*self._system_prompts(value), *(self._read_item(item) for item in items)]

    def _system_prompts(self, value: JsonObject) -> Iterator[PromptMessage]:
        """Yield the instructions that a request has outside its messages."""
        for key in ("system", "instructions", "system_prompt", "systemInstruction"):
            if system := value.get(key):
                content = system.get("parts", system) if isinstance(system, dict) else system
                yield self._message_of("system", content)

    def read_completion(self, value: JsonObject, keys: tuple[str, ...]) -> list[PromptMessage]:
        """Read one or several prompts, texts or token ids, from the first of the members `keys`."""
        content = next((value[key] for key in keys if value.get(key)), None)
        if content is None:
            return []
        several = isinstance(content, list) and (
            all(isinstance(one, str) for one in content)
            or all(isinstance(one, list | dict) for one in content)
        )
        if several and len(content) > MESSAGES_MAX:
            return []
        messages = [self._message_of("system", value["system"])] if value.get("system") else []
        if value.get("context"):  # Ollama: token ids of the conversation so far
            messages.append(PromptMessage("context", self._ids_or_text(value["context"])))
        messages += [
            PromptMessage("prompt", self._ids_or_text(one)) for one in (content if several else [content])
        ]
        images = _as_list(value.get("images")) or _as_list(value.get("image_data"))
        messages[-1].parts += self._hashes_of_media(images)
        if isinstance(value.get("suffix"), str) and value["suffix"]:
            messages.append(PromptMessage("suffix", [value["suffix"]]))
        return messages

    def _ids_or_text(self, value: Any) -> list[Part]:
        """Return the parts of a prompt that is a text or a list of token ids."""
        if isinstance(value, str):
            return [value] if value else []
        if isinstance(value, dict):  # llama.cpp: a prompt with pictures
            parts = self._ids_or_text(value.get("prompt_string") or value.get("prompt_token_ids"))
            return [*parts, *self._hashes_of_media(_as_list(value.get("multimodal_data")))]
        if isinstance(value, list) and value:
            try:
                return [array("I", value)]
            except (TypeError, OverflowError):
                return [b"value" + _digest(value)]
        return []

    def _read_message(self, message: Any) -> PromptMessage:
        if not isinstance(message, dict):
            return self._message_of("other", message)
        role = _role_word(message.get("role"))
        builder = _MessageBuilder(self)
        if message.get("name") and role != "tool":
            builder.add_mark(b"name", message["name"])
        builder.add_thinking(next((message[k] for k in _THINKING if isinstance(message.get(k), str)), None))
        if isinstance(message.get("tool_plan"), str):  # Cohere: text before the tool calls
            builder.add_text(message["tool_plan"])
        content = message.get("content", message.get("parts"))
        builder.add_content(content)
        if isinstance(message.get("refusal"), str):
            builder.add_text(message["refusal"])
        builder.parts += self._hashes_of_media(_as_list(message.get("images")))  # in Ollama's messages
        if isinstance(message.get("audio"), dict):
            builder.add_media(message["audio"])
        calls = _as_list(message.get("tool_calls"))
        if not self.count_parts(len(calls)):
            builder.add_mark(b"value", calls)
            calls = []
        for call in calls:
            function = call.get("function") or call.get("custom") if isinstance(call, dict) else None
            builder.add_call(function if isinstance(function, dict) else {"input": call})
        if isinstance(message.get("function_call"), dict):
            builder.add_call(message["function_call"])
        return builder.build(role, result=role in ("tool", "function") or _only_results(content))

    def _read_item(self, item: Any) -> PromptMessage:
        if not isinstance(item, dict):
            return self._message_of("user", item)
        kind = item.get("type")
        kind = kind if isinstance(kind, str) else "message"
        builder = _MessageBuilder(self)
        if kind == "message" or "role" in item:
            builder.add_content(item.get("content"))
            return builder.build(_role_word(item.get("role", "user")))
        if kind == "text" and isinstance(item.get("content"), str):  # an item of LM Studio
            builder.add_text(item["content"])
            return builder.build("user")
        if kind.endswith("_output"):
            builder.add_content(item.get("output"))
            return builder.build("tool", result=True)
        if kind.endswith("_call"):
            builder.add_call(item)
            builder.add_content(item.get("output"))  # result of a call that the provider made itself
            return builder.build("assistant")
        if kind == "reasoning":
            builder.add_thinking(item.get("content") or item.get("summary"))
            return builder.build("assistant")
        builder.add_part(item, 0)
        return builder.build("user" if builder.parts and not kind.endswith("_reference") else "other")

    def _message_of(self, role: str, content: Any) -> PromptMessage:
        builder = _MessageBuilder(self)
        builder.add_content(content)
        return builder.build(role)

    def _hashes_of_media(self, values: list[Any]) -> list[Part]:
        if not self.count_parts(len(values)):
            return [b"value" + _digest(values)]
        return [*map(self.hash_of_media, values)]

    def hash_of_media(self, value: Any) -> bytes:
        """Count a picture, sound or file, and return its mark."""
        self.media_count += 1
        return b"media" + _digest(value)


class _MessageBuilder:
    """Collects the parts of one message."""

    __slots__ = ("_reader", "_thinking", "parts")

    def __init__(self, reader: _Reader) -> None:
        self._reader = reader
        self._thinking: list[str] = []
        """Texts of earlier reasoning, which the prompt has in a separate place."""
        self.parts: list[Part] = []

    def build(self, role: str, *, result: bool = False) -> PromptMessage:
        parts = self.parts
        if len(parts) > 1:
            parts = []
            for kind, run in groupby(self.parts, type):
                if kind is str:
                    parts.append("".join(run))  # type: ignore[arg-type]
                else:
                    parts.extend(run)
        return PromptMessage(role, parts, "".join(self._thinking), result)

    def add_text(self, text: str) -> None:
        if text:
            self.parts.append(text)

    def add_mark(self, kind: bytes, value: Any) -> None:
        """Add the hash of a value, so that only equal values are equal parts."""
        self.parts.append(kind + _digest(value))

    def add_media(self, value: Any) -> None:
        # Remove `cache_control`: clients move it from turn to turn, but the digest of the same picture must
        # stay the same.
        if isinstance(value, dict) and "cache_control" in value:
            value = {k: v for k, v in value.items() if k != "cache_control"}
        self.parts.append(self._reader.hash_of_media(value))

    def add_thinking(self, value: Any, depth: int = 0) -> None:
        if isinstance(value, str):
            self._thinking.append(value)
        elif isinstance(value, list) and depth < _DEPTH_MAX:
            for item in value:
                self.add_thinking(item.get("text") if isinstance(item, dict) else item, depth + 1)

    def add_call(self, function: JsonObject) -> None:
        """Add a tool call: the name and the arguments of its function."""
        self.parts.append(b"call")
        if isinstance(function.get("name"), str):
            self.add_text(function["name"])
        for key in ("arguments", "input", "action", "args"):
            if key in function:
                self.parts.append(b"arguments")
                arguments = function[key]
                if not isinstance(arguments, str):
                    arguments = _encode_json(arguments).decode("utf-8", "replace")
                self.add_text(arguments)

    def add_content(self, value: Any, depth: int = 0) -> None:
        if isinstance(value, str):
            self.add_text(value)
        elif isinstance(value, list) and self._reader.count_parts(len(value)):
            for item in value:
                self.add_part(item, depth)
        elif isinstance(value, dict):
            self.add_part(value, depth)
        elif value is not None:
            self.add_mark(b"value", value)

    def add_part(self, item: Any, depth: int) -> None:
        """Add one part of a content, by its type or, without a known type, by its members."""
        if isinstance(item, str):
            self.add_text(item)
            return
        if not isinstance(item, dict) or depth >= _DEPTH_MAX:
            self.add_mark(b"value", item)
            return
        kind = item.get("type")
        kind = kind if isinstance(kind, str) else ""
        if kind.endswith("thinking") or kind in ("reasoning", "reasoning_text"):
            self.add_thinking(item.get("thinking") or item.get("text") or item.get("summary"))
        elif kind.endswith("tool_use"):
            self.add_call(item)
        elif not kind and isinstance(call := item.get("functionCall", item.get("toolUse")), dict):
            self.add_call(call)  # a tool call of Gemini or Bedrock
        elif kind.endswith("tool_result"):
            self.parts.append(b"result")
            self.add_content(item.get("content"), depth + 1)
        elif _media_word(kind) or (not kind and any(map(_media_word, item))):
            self.add_media(item)
        elif isinstance(text := item.get("text", item.get("refusal")), str):
            self.add_text(text)
        elif "content" in item:
            self.parts.append(b"part")
            self.add_content(item["content"], depth + 1)
        else:
            self.add_mark(b"value", item)


_THINKING: Final = ("reasoning_content", "reasoning", "thinking")
_media_word = re.compile(r"image|audio|video|file|document|screenshot|inlineData").search

_Read = Callable[[_Reader, JsonObject], list[PromptMessage]]


def _completion_reader(*keys: str) -> tuple[_Read, bool]:
    return lambda reader, value: reader.read_completion(value, keys), False


_CHAT: Final[tuple[_Read, bool]] = (_Reader.read_chat, True)
_INPUT: Final[tuple[_Read, bool]] = (_Reader.read_input, True)
_PROMPT: Final = _completion_reader("prompt", "inputs")
_BY_MEMBERS: Final = (_CHAT, _PROMPT, _INPUT)
_FIRST: Final = {
    **dict.fromkeys(
        ("completions", "llamacpp.completion", "ollama.generate", "tgi.generate_stream"), _PROMPT
    ),
    # SGLang, TGI and vLLM all have an endpoint `/generate`, so look for the members of all three.
    "generate": _completion_reader("prompt", "inputs", "text", "input_ids", "token_ids"),
    "responses": _INPUT,
    "lmstudio.chat": _INPUT,
    "embeddings": _completion_reader("input", "inputs"),
}
"""Kind of prompt that is tried first, by endpoint; for other endpoints, `messages` is tried first."""


def _readers_for(endpoint: str | None) -> Iterable[tuple[_Read, bool]]:
    """Return the functions that can read the prompt, the one for the endpoint first."""
    first = _FIRST.get(endpoint or "")
    return _BY_MEMBERS if first is None else (first, *_BY_MEMBERS)


def _parameters(value: JsonObject) -> RequestShape:
    # Ollama, TGI and SGLang have their parameters in an inner object.
    places = [value, *(_as_object(value.get(key)) for key in ("options", "parameters", "sampling_params"))]
    tools = value.get("tools", value.get("functions"))
    return RequestShape(
        max_tokens=_first_count(
            places,
            "max_completion_tokens",
            "max_tokens",
            "max_output_tokens",
            "max_new_tokens",
            "num_predict",
            "n_predict",
        ),
        temperature=_first_number(places, "temperature"),
        top_p=_first_number(places, "top_p", "p"),
        n=_first_count(places, "n"),
        tools=len(tools) if isinstance(tools, list) else None,
        response_format=_response_format(value),
    )


def _response_format(value: JsonObject) -> str | None:
    """Return the form of output that a request demands, such as `json_schema`; None: any."""
    for wanted in (
        value.get("response_format"),
        _as_object(value.get("text")).get("format"),  # in the Responses API
        _as_object(value.get("output_config")).get("format"),  # in Anthropic's API
        _as_object(value.get("parameters")).get("grammar"),  # in TGI's API
    ):
        if isinstance(wanted, dict) and wanted.get("type"):
            return _role_word(wanted["type"])
    wanted = value.get("format")  # Ollama: "json", or the schema itself
    if isinstance(wanted, dict):
        return "json_schema"
    return _role_word(wanted) if isinstance(wanted, str) and wanted else None


def _first_count(places: list[JsonObject], *names: str) -> int | None:
    """Return the first count among the members `names`. Skip -1, which means "no limit" to some servers."""
    for number in _numbers_at(places, names):
        if 0 <= number <= _INT_MAX and number == int(number):
            return int(number)
    return None


def _first_number(places: list[JsonObject], *names: str) -> float | None:
    return next((float(number) for number in _numbers_at(places, names) if abs(number) < _INT_MAX), None)


def _numbers_at(places: list[JsonObject], names: tuple[str, ...]) -> Iterator[int | float]:
    for name in names:
        for place in places:
            number = place.get(name)
            if isinstance(number, int | float) and not isinstance(number, bool):
                yield number


def _role_word(value: Any) -> str:
    """Return the name of a role or format; `other` if it is not a word, because it could be private text."""
    if not isinstance(value, str) or not _is_word(value) or looks_secret(value):
        return "other"
    return sys.intern(value)  # save memory: one object for all messages


_is_word = re.compile(rf"[A-Za-z0-9_.-]{{1,{_WORD_CHARS_MAX}}}", re.ASCII).fullmatch


def _only_results(content: Any) -> bool:
    """Return whether all parts are tool results: Anthropic sends these in messages with the role `user`."""
    return (
        isinstance(content, list)
        and bool(content)
        and all(
            isinstance(part, dict)
            and isinstance(part.get("type"), str)
            and part["type"].endswith("tool_result")
            for part in content
        )
    )


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _as_object(value: Any) -> JsonObject:
    return value if isinstance(value, dict) else {}


def _encode_json(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (ValueError, RecursionError):
        return b"?"  # safeguard: the decoder of the body already refuses values nested so deeply


def _digest(value: Any) -> bytes:
    return blake2b(_encode_json(value), digest_size=_MARK_BYTES).digest()


def _utf8_size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
