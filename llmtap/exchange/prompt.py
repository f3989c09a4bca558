"""Parse prompts: from a request's body to messages, in one form for all endpoints, and parameters.

For the capture: the meter's recorder calls `read_prompt`; block hashes and sessions are made from the result.
`request.py` reads the fields that every exchange needs. A message is a role and parts: text, token ids, and
marks for what has no length (a picture). Reasoning that a client sends back stands apart, because clients
drop it between turns. Nothing raises. The text is for hashing and counting.

Source: each provider's reference.
"""

import re
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import groupby
from typing import Any, Final, TypeAlias

import msgspec

from llmtap.exchange.bounds import BOUNDS, looks_secret
from llmtap.exchange.exchange import RequestShape

MESSAGES_MAX: Final = 10_000
"""More messages than this fit no model's context; such a body is not read."""
PARTS_MAX: Final = 65_536
"""Parts of all messages of one body, at 2 us each. A list that exceeds the rest of it becomes one mark."""
ID_BYTES: Final = 4
"""What a token id counts as: 512 ids are then the same block as 2 KiB of text."""
_DEPTH_MAX: Final = 8
"""Of content within content; a tool's result in a message is at 2."""
_INT_MAX: Final = (1 << 31) - 1
_MARK_BYTES: Final = 16
_WORD_CHARS_MAX: Final = BOUNDS["asked.roles"].chars

Part: TypeAlias = "str | bytes | array[int]"
"""Text, a mark, or token ids (an array of type `I`)."""


@dataclass(slots=True)
class PromptMessage:
    role: str
    parts: list[Part] = field(default_factory=list)
    """No two texts stand side by side: how a client cut its text makes no difference."""
    thinking: str = ""
    result: bool = False

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def size(self) -> int:
        """Bytes of UTF-8, thinking included, and ID_BYTES for each token id."""
        size = _utf8_size(self.thinking)
        for part in self.parts:
            if isinstance(part, str):
                size += _utf8_size(part)
            elif isinstance(part, array):
                size += ID_BYTES * len(part)
        return size


@dataclass(slots=True)
class PromptShape:
    messages: list[PromptMessage]
    asked: RequestShape
    value: dict[str, Any]
    chat: bool
    tools: bytes = b""
    """Mark of the tools offered, which stand before everything in what a model reads; empty: none."""
    cut: bool = False


def read_prompt(body: bytes, endpoint: str | None) -> PromptShape | None:
    """Return the prompt in a request's decoded body, at most MESSAGES_MAX messages of it; None for what is no
    JSON object or holds no known prompt. Without an `endpoint`, or where the body has another form than it,
    the members decide."""
    if body.lstrip()[:1] != b"{":
        return None
    try:
        value = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return None
    asked = _parameters(value)
    reader = _Reader()
    messages: list[PromptMessage] = []
    chat = False
    for read, converses in _order(endpoint):
        messages = read(reader, value)
        if messages:
            chat = converses
            asked.images = reader.media
            break
    else:
        if endpoint is None:
            return None
    asked.roles = [message.role for message in messages]
    asked.sizes = array("q", [message.size for message in messages])
    tools = value.get("tools") or value.get("functions")
    return PromptShape(messages, asked, value, chat, _digest(tools) if tools else b"", reader.cut)


class _Reader:
    __slots__ = ("_room", "cut", "media")

    def __init__(self) -> None:
        self.media = 0
        self._room = PARTS_MAX
        self.cut = False

    def takes(self, n: int) -> bool:
        """Take room for `n` more parts; False if there is not enough left."""
        if n > self._room:
            self.cut = True
            return False
        self._room -= n
        return True

    def chat(self, value: dict[str, Any]) -> list[PromptMessage]:
        """`messages`, or Gemini's `contents`, with what Anthropic and others keep beside them."""
        messages = value.get("messages") or value.get("contents")
        if not isinstance(messages, list) or not messages or len(messages) > MESSAGES_MAX:
            return []
        return [*self._before(value), *(self._message(message) for message in messages)]

    def input(self, value: dict[str, Any]) -> list[PromptMessage]:
        """`input` of the Responses API, and LM Studio's, which has its form."""
        items = value.get("input")
        if isinstance(items, str):
            items = [{"role": "user", "content": items}]
        if not isinstance(items, list) or not items or len(items) > MESSAGES_MAX:
            return []
        return [*self._before(value), *(self._item(item) for item in items)]

    def _before(self, value: dict[str, Any]) -> Iterator[PromptMessage]:
        for key in ("system", "instructions", "system_prompt", "systemInstruction"):
            if found := value.get(key):
                yield self._made("system", found.get("parts", found) if isinstance(found, dict) else found)

    def completion(self, value: dict[str, Any], keys: tuple[str, ...]) -> list[PromptMessage]:
        """Text or token ids, one or several, in the first of these members."""
        found = next((value[key] for key in keys if value.get(key)), None)
        if found is None:
            return []
        several = isinstance(found, list) and (
            all(isinstance(one, str) for one in found) or all(isinstance(one, list | dict) for one in found)
        )
        if several and len(found) > MESSAGES_MAX:
            return []
        messages = [self._made("system", value["system"])] if value.get("system") else []
        if value.get("context"):  # Ollama's: the ids of the conversation until now
            messages.append(PromptMessage("context", self._ids_or_text(value["context"])))
        messages += [
            PromptMessage("prompt", self._ids_or_text(one)) for one in (found if several else [found])
        ]
        messages[-1].parts += self._all_media(_list(value.get("images")) or _list(value.get("image_data")))
        if isinstance(value.get("suffix"), str) and value["suffix"]:
            messages.append(PromptMessage("suffix", [value["suffix"]]))
        return messages

    def _ids_or_text(self, one: Any) -> list[Part]:
        if isinstance(one, str):
            return [one] if one else []
        if isinstance(one, dict):  # llama.cpp's, with pictures
            parts = self._ids_or_text(one.get("prompt_string") or one.get("prompt_token_ids"))
            return [*parts, *self._all_media(_list(one.get("multimodal_data")))]
        if isinstance(one, list) and one:
            try:
                return [array("I", one)]
            except (TypeError, OverflowError):
                return [b"value" + _digest(one)]
        return []

    def _message(self, message: Any) -> PromptMessage:
        if not isinstance(message, dict):
            return self._made("other", message)
        role = _word(message.get("role"))
        said = _Said(self)
        if message.get("name") and role != "tool":
            said.mark(b"name", message["name"])
        said.think(next((message[k] for k in _THINKING if isinstance(message.get(k), str)), None))
        if isinstance(message.get("tool_plan"), str):  # Cohere's word before its calls
            said.text(message["tool_plan"])
        content = message.get("content", message.get("parts"))
        said.content(content)
        if isinstance(message.get("refusal"), str):
            said.text(message["refusal"])
        said.parts += self._all_media(_list(message.get("images")))  # Ollama's
        if isinstance(message.get("audio"), dict):
            said.media(message["audio"])
        calls = _list(message.get("tool_calls"))
        if not self.takes(len(calls)):
            said.mark(b"value", calls)
            calls = []
        for call in calls:
            named = call.get("function") or call.get("custom") if isinstance(call, dict) else None
            said.call(named if isinstance(named, dict) else {"input": call})
        if isinstance(message.get("function_call"), dict):
            said.call(message["function_call"])
        return said.made(role, result=role in ("tool", "function") or _only_results(content))

    def _item(self, item: Any) -> PromptMessage:
        if not isinstance(item, dict):
            return self._made("user", item)
        kind = item.get("type")
        kind = kind if isinstance(kind, str) else "message"
        said = _Said(self)
        if kind == "message" or "role" in item:
            said.content(item.get("content"))
            return said.made(_word(item.get("role", "user")))
        if kind == "text" and isinstance(item.get("content"), str):  # LM Studio's
            said.text(item["content"])
            return said.made("user")
        if kind.endswith("_output"):
            said.content(item.get("output"))
            return said.made("tool", result=True)
        if kind.endswith("_call"):
            said.call(item)
            said.content(item.get("output"))  # of a call that the provider made itself
            return said.made("assistant")
        if kind == "reasoning":
            said.think(item.get("content") or item.get("summary"))
            return said.made("assistant")
        said.part(item, 0)
        return said.made("user" if said.parts and not kind.endswith("_reference") else "other")

    def _made(self, role: str, content: Any) -> PromptMessage:
        said = _Said(self)
        said.content(content)
        return said.made(role)

    def _all_media(self, values: list[Any]) -> list[Part]:
        return [*map(self._media, values)] if self.takes(len(values)) else [b"value" + _digest(values)]

    def _media(self, value: Any) -> bytes:
        self.media += 1
        return b"media" + _digest(value)


class _Said:
    __slots__ = ("_reader", "_thinking", "parts")

    def __init__(self, reader: _Reader) -> None:
        self._reader = reader
        self._thinking: list[str] = []
        self.parts: list[Part] = []

    def made(self, role: str, *, result: bool = False) -> PromptMessage:
        parts = self.parts
        if len(parts) > 1:
            parts = []
            for kind, run in groupby(self.parts, type):
                if kind is str:
                    parts.append("".join(run))  # type: ignore[arg-type]
                else:
                    parts.extend(run)
        return PromptMessage(role, parts, "".join(self._thinking), result)

    def text(self, text: str) -> None:
        if text:
            self.parts.append(text)

    def mark(self, kind: bytes, value: Any) -> None:
        self.parts.append(kind + _digest(value))

    def media(self, value: Any) -> None:
        # Where a cache may end moves from turn to turn, and the picture stays the same.
        if isinstance(value, dict) and "cache_control" in value:
            value = {k: v for k, v in value.items() if k != "cache_control"}
        self.parts.append(self._reader._media(value))

    def think(self, value: Any, depth: int = 0) -> None:
        if isinstance(value, str):
            self._thinking.append(value)
        elif isinstance(value, list) and depth < _DEPTH_MAX:
            for one in value:
                self.think(one.get("text") if isinstance(one, dict) else one, depth + 1)

    def call(self, function: dict[str, Any]) -> None:
        self.parts.append(b"call")
        if isinstance(function.get("name"), str):
            self.text(function["name"])
        for key in ("arguments", "input", "action", "args"):
            if key in function:
                self.parts.append(b"arguments")
                given = function[key]
                self.text(given if isinstance(given, str) else _json(given).decode("utf-8", "replace"))

    def content(self, value: Any, depth: int = 0) -> None:
        if isinstance(value, str):
            self.text(value)
        elif isinstance(value, list) and self._reader.takes(len(value)):
            for item in value:
                self.part(item, depth)
        elif isinstance(value, dict):
            self.part(value, depth)
        elif value is not None:
            self.mark(b"value", value)

    def part(self, item: Any, depth: int) -> None:
        """One part of a content; by its type, or, where it has none that is known, by what it holds."""
        if isinstance(item, str):
            self.text(item)
            return
        if not isinstance(item, dict) or depth >= _DEPTH_MAX:
            self.mark(b"value", item)
            return
        kind = item.get("type")
        kind = kind if isinstance(kind, str) else ""
        if kind.endswith("thinking") or kind in ("reasoning", "reasoning_text"):
            self.think(item.get("thinking") or item.get("text") or item.get("summary"))
        elif kind.endswith("tool_use"):
            self.call(item)
        elif not kind and isinstance(call := item.get("functionCall", item.get("toolUse")), dict):
            self.call(call)  # Gemini, Bedrock
        elif kind.endswith("tool_result"):
            self.parts.append(b"result")
            self.content(item.get("content"), depth + 1)
        elif _media_word(kind) or (not kind and any(map(_media_word, item))):
            self.media(item)
        elif isinstance(text := item.get("text", item.get("refusal")), str):
            self.text(text)
        elif "content" in item:
            self.parts.append(b"part")
            self.content(item["content"], depth + 1)
        else:
            self.mark(b"value", item)


_THINKING: Final = ("reasoning_content", "reasoning", "thinking")
_media_word = re.compile(r"image|audio|video|file|document|screenshot|inlineData").search

_Read = Callable[[_Reader, dict[str, Any]], list[PromptMessage]]


def _completion(*keys: str) -> tuple[_Read, bool]:
    return lambda reader, value: reader.completion(value, keys), False


_CHAT: Final[tuple[_Read, bool]] = (_Reader.chat, True)
_INPUT: Final[tuple[_Read, bool]] = (_Reader.input, True)
_PROMPT: Final = _completion("prompt", "inputs")
_BY_WHAT_IS_THERE: Final = (_CHAT, _PROMPT, _INPUT)
_FIRST: Final = {
    **dict.fromkeys(
        ("completions", "llamacpp.completion", "ollama.generate", "tgi.generate_stream"), _PROMPT
    ),
    # SGLang's own endpoint shares its path with those of TGI and vLLM.
    "generate": _completion("prompt", "inputs", "text", "input_ids", "token_ids"),
    "responses": _INPUT, "lmstudio.chat": _INPUT, "embeddings": _completion("input", "inputs"),
}  # fmt: skip
"""What an endpoint has first; the rest begin with `messages`."""


def _order(endpoint: str | None) -> Iterable[tuple[_Read, bool]]:
    first = _FIRST.get(endpoint or "")
    return _BY_WHAT_IS_THERE if first is None else (first, *_BY_WHAT_IS_THERE)


def _parameters(value: dict[str, Any]) -> RequestShape:
    # Ollama, TGI and SGLang keep theirs one step down.
    places = [value, *(_dict(value.get(key)) for key in ("options", "parameters", "sampling_params"))]
    tools = value.get("tools", value.get("functions"))
    return RequestShape(
        max_tokens=_whole(places, "max_completion_tokens", "max_tokens", "max_output_tokens",
                          "max_new_tokens", "num_predict", "n_predict"),
        temperature=_real(places, "temperature"),
        top_p=_real(places, "top_p", "p"),
        n=_whole(places, "n"),
        tools=len(tools) if isinstance(tools, list) else None,
        response_format=_response_format(value),
    )  # fmt: skip


def _response_format(value: dict[str, Any]) -> str | None:
    for asked in (
        value.get("response_format"),
        _dict(value.get("text")).get("format"),  # Responses
        _dict(value.get("output_config")).get("format"),  # Anthropic
        _dict(value.get("parameters")).get("grammar"),  # TGI
    ):
        if isinstance(asked, dict) and asked.get("type"):
            return _word(asked["type"])
    asked = value.get("format")  # Ollama: a word, or the schema itself
    if isinstance(asked, dict):
        return "json_schema"
    return _word(asked) if isinstance(asked, str) and asked else None


def _whole(places: list[dict[str, Any]], *names: str) -> int | None:
    """The first that is a number of something; -1, which some read as no limit, is none."""
    for number in _found(places, names):
        if 0 <= number <= _INT_MAX and number == int(number):
            return int(number)
    return None


def _real(places: list[dict[str, Any]], *names: str) -> float | None:
    return next((float(number) for number in _found(places, names) if abs(number) < _INT_MAX), None)


def _found(places: list[dict[str, Any]], names: tuple[str, ...]) -> Iterator[int | float]:
    for name in names:
        for place in places:
            number = place.get(name)
            if isinstance(number, int | float) and not isinstance(number, bool):
                yield number


def _word(value: Any) -> str:
    """A role or a format's name, if it is one: what clients put there must not carry text."""
    return value if isinstance(value, str) and _is_word(value) and not looks_secret(value) else "other"


_is_word = re.compile(rf"[A-Za-z0-9_.-]{{1,{_WORD_CHARS_MAX}}}", re.ASCII).fullmatch


def _only_results(content: Any) -> bool:
    """Whether it is what Anthropic calls a user's message when a tool has answered."""
    return isinstance(content, list) and bool(content) and all(
        isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"].endswith("tool_result")
        for part in content
    )  # fmt: skip


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _json(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (ValueError, RecursionError):
        return b"?"  # deeper than a body that was decoded can be


def _digest(value: Any) -> bytes:
    return blake2b(_json(value), digest_size=_MARK_BYTES).digest()


def _utf8_size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
