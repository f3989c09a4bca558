"""Requests and answers of the simulated server, and the APIs of Anthropic and Ollama.

The `read_` functions of an API parse a body into a `SimulatedRequest`; a `Shape` turns an `Answer` into
bytes. The APIs of OpenAI are in `openai.py`.

A stream of Anthropic has content blocks, each with events for its start, its pieces and its end; `ping`
events are the keep-alive. A stream of Ollama has a line of JSON for each piece; the last line has the counts,
and the durations in ns. Ollama streams unless the request has `"stream": false`. It has no keep-alive. It has
no finish reason for a refusal, so a refusal ends with `stop`.

Source: anthropics/anthropic-sdk-python types; ollama/ollama docs/api.md; docs/dialects.md.
"""

from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from llmtap.json_types import JsonObject

CREATED: Final = 1_700_000_000
"""Creation date of every answer (seconds since 1970). It is fixed, so that equal requests get equal bytes."""
BROKEN: Final = "the engine broke down"
"""Error message of the fault `error`."""


class BadRequest(ValueError):
    """A request is invalid; the message is sent to the client."""

    code = "invalid_value"


@dataclass(slots=True)
class SimulatedRequest:
    """A request of any API."""

    model: str
    stream: bool
    prompts: tuple[str, ...]
    """Prompts, for each of which the answer has `n` choices."""
    prompt_tokens: int | None = None
    """Total number of tokens, if the prompts were given as token ids; None: count the tokens of the texts."""
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    """Whether the answer continues until `max_tokens`."""
    stop: tuple[str, ...] = ()
    seed: int | None = None
    n: int = 1
    include_usage: bool = False
    """Whether a stream ends with the usage; `continuous_usage`: whether every chunk has the usage so far."""
    continuous_usage: bool = False
    """Whether every chunk has the usage so far."""
    token_ids: bool = False
    """Whether the chunks have the ids of their tokens (vLLM)."""
    use_prefix_cache: bool = True
    """Whether the engine is allowed to take blocks of the prompt from its prefix cache, if it has a cache."""


class CommonRequest(msgspec.Struct, kw_only=True):
    """Fields that the bodies of several APIs have; `min_tokens` and `ignore_eos` are extensions of vLLM."""

    model: str = "sim"
    stream: bool | None = False
    max_tokens: int | None = None
    min_tokens: int | None = 0
    ignore_eos: bool | None = False
    seed: int | None = None

    def to_request(self, *prompts: str, **more: Any) -> SimulatedRequest:
        """Return the request with these prompts. `more`: further fields of the `SimulatedRequest`."""
        return SimulatedRequest(
            **{
                "model": self.model,
                "stream": bool(self.stream),
                "prompts": prompts,
                "max_tokens": self.max_tokens,
                "min_tokens": self.min_tokens or 0,
                "ignore_eos": bool(self.ignore_eos),
                "seed": self.seed,
                "include_usage": True,
                **more,
            }
        )


@dataclass(slots=True)
class Choice:
    """One of the texts (choices) of an answer."""

    pieces: list[str]
    """Text of each token."""
    finish: str = "stop"
    """Finish reason, as in OpenAI's API."""
    refused: bool = False
    """Whether the text is a refusal that is sent in the API's field for refusals, if the API has one."""
    stop_text: str | None = None
    """Stop string that ended the text; None: no stop string ended it."""

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class Answer:
    """Content of an answer, from which a `Shape` makes the bytes."""

    number: int
    """Number of the request on this server, for the ids in the answer."""
    request: SimulatedRequest
    prompt_tokens: int
    choices: list[Choice]
    dialect: str = "openai"
    """`openai` or `vllm`: dialect of chat completions and completions."""
    sent_tokens: list[int] = field(default_factory=list)
    """Number of tokens sent so far, of each choice."""
    prompt_ns: int = 0
    """Time from the request to the first token, for APIs that report it at the end."""
    output_ns: int = 0
    """Time from the first to the last token, for the same APIs."""
    cached_tokens: int | None = None
    """Number of prompt tokens found in the engine's prefix cache; None: no cache, or not known yet."""

    def __post_init__(self) -> None:
        self.sent_tokens = [0] * len(self.choices)

    @property
    def output_tokens(self) -> int:
        return sum(len(choice.pieces) for choice in self.choices)


class Shape:
    """Writes the bytes of one answer: of a stream by `opening`, then several `chunk`s, then `ending`."""

    media_type = "text/event-stream"

    def __init__(self, answer: Answer, prefix: str) -> None:
        """`prefix`: start of the answer's id."""
        self.id = f"{prefix}{answer.number}"
        self._answer = answer
        self._request = answer.request
        self._choice = answer.choices[0]

    def opening(self) -> bytes:
        """Return the bytes before the first token."""
        return b""

    def chunk(self, index: int, first: int, last: int, final: bool) -> bytes:
        """Return the bytes of the tokens `first` to `last` - 1 of a choice; if `final`, also its end."""
        raise NotImplementedError

    def ending(self) -> bytes:
        """Return the bytes after the last choice has ended: usage and end marker."""
        raise NotImplementedError

    def keepalive(self) -> bytes:
        """Return the bytes of a keep-alive; empty if the API has none."""
        return b""

    def failure(self) -> bytes:
        """Return the bytes that report a failure of the engine in the middle of a stream."""
        return b""

    def full_answer(self) -> JsonObject:
        """Return the answer as one object, for requests without streaming."""
        raise NotImplementedError

    def _take(self, index: int, first: int, last: int) -> str:
        """Return the text of the tokens `first` to `last` - 1 of a choice, and count them as sent."""
        answer = self._answer
        answer.sent_tokens[index] = last
        pieces = answer.choices[index].pieces
        return pieces[first] if last == first + 1 else "".join(pieces[first:last])

    @property
    def sent_text(self) -> str:
        """Text of the first choice that has been sent so far."""
        return "".join(self._choice.pieces[: self._answer.sent_tokens[0]])

    def _status(self) -> tuple[str, str | None]:
        """Return OpenAI's status of a finished answer, and the reason if it is incomplete."""
        reasons = {"length": "max_output_tokens", "content_filter": "content_filter"}
        reason = reasons.get(self._choice.finish)
        return ("incomplete" if reason else "completed"), reason


def sse(event: JsonObject, kind: str = "") -> bytes:
    """Return the bytes of a server-sent event. `kind`: name of the event; empty: no name."""
    name = b"event: " + kind.encode() + b"\n" if kind else b""
    return name + b"data: " + msgspec.json.encode(event) + b"\n\n"


def decode(body: bytes, kind: type[Any]) -> Any:
    """Parse a JSON body as an object of the type `kind`. Raises BadRequest."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise BadRequest(f"invalid request body: {exc}") from None


def stop_texts(stop: str | list[str] | None) -> tuple[str, ...]:
    return tuple(text for text in ([stop] if isinstance(stop, str) else stop or ()) if text)


def text_of(content: Any) -> str:
    """Return the text of a message's content, which is a string or a list of parts, some of them texts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = (part.get("text") if isinstance(part, dict) else part for part in content)
        return "".join(text for text in texts if isinstance(text, str))
    return ""


class Message(msgspec.Struct):
    """One message of a prompt."""

    role: str = "user"
    content: Any = None


# ---------------------------------------------------------------- Anthropic's API


class _AnthropicRequest(CommonRequest, kw_only=True):
    """Body of a request to Anthropic's Messages API."""

    messages: list[Message]
    system: Any = None
    stop_sequences: list[str] | None = None


def read_messages(body: bytes) -> SimulatedRequest:
    """Parse the body of a request to Anthropic's Messages API. Raises BadRequest."""
    r: _AnthropicRequest = decode(body, _AnthropicRequest)
    texts = [text_of(r.system), *(text_of(m.content) for m in r.messages)]
    return r.to_request("\n".join(filter(None, texts)), stop=stop_texts(r.stop_sequences))


def anthropic_error(status: int, code: str, message: str) -> JsonObject:
    kinds = {429: "rate_limit_error", 500: "api_error", 503: "overloaded_error"}
    kind = kinds.get(status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


class AnthropicShape(Shape):
    """Writes the answer of Anthropic's Messages API."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer, "msg_sim")

    def _event(self, kind: str, **fields: Any) -> bytes:
        return sse({"type": kind, **fields}, kind)

    def _message(self, content: list[Any], finish: JsonObject, output_tokens: int) -> JsonObject:
        usage = {
            "input_tokens": self._answer.prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": output_tokens,
        }
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": content,
            **finish,
            "usage": usage,
        }

    def _finish_fields(self) -> JsonObject:
        choice = self._choice
        reason = {"stop": "end_turn", "length": "max_tokens", "content_filter": "refusal"}[choice.finish]
        if choice.refused:
            reason = "refusal"
        if choice.stop_text is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": choice.stop_text}

    def opening(self) -> bytes:
        nothing = {"stop_reason": None, "stop_sequence": None}
        message = self._message([], nothing, min(1, len(self._choice.pieces)))
        event = self._event("message_start", message=message)
        if not self._choice.pieces:
            return event
        return event + self._event("content_block_start", index=0, content_block={"type": "text", "text": ""})

    def chunk(self, index: int, first: int, last: int, final: bool) -> bytes:
        text = self._take(index, first, last)
        events = b""
        if last > first:
            delta = {"type": "text_delta", "text": text}
            events = self._event("content_block_delta", index=0, delta=delta)
        if final and self._choice.pieces:
            events += self._event("content_block_stop", index=0)
        return events

    def ending(self) -> bytes:
        usage = {"output_tokens": self._answer.sent_tokens[0]}
        return self._event("message_delta", delta=self._finish_fields(), usage=usage) + self._event(
            "message_stop"
        )

    def keepalive(self) -> bytes:
        return self._event("ping")

    def failure(self) -> bytes:
        return self._event("error", error={"type": "api_error", "message": BROKEN})

    def full_answer(self) -> JsonObject:
        content = [{"type": "text", "text": self._choice.text}] if self._choice.pieces else []
        return self._message(content, self._finish_fields(), len(self._choice.pieces))


# ---------------------------------------------------------------- Ollama's API

_CREATED_AT: Final = "2023-11-14T22:13:20Z"


class _OllamaOptions(CommonRequest, kw_only=True):
    """Field `options` of a request to Ollama's API."""

    num_predict: int | None = None
    stop: str | list[str] | None = None


class _OllamaRequest(msgspec.Struct):
    """Body of a request to Ollama's API."""

    model: str = "sim"
    messages: list[Message] | None = None
    prompt: str | None = None
    system: str | None = None
    stream: bool | None = True
    options: _OllamaOptions | None = None

    def to_request(self, prompt: str) -> SimulatedRequest:
        o = self.options or _OllamaOptions()
        # Ollama's value for no limit is -1.
        limit = o.num_predict if o.num_predict is not None and o.num_predict >= 0 else None
        return o.to_request(
            prompt,
            model=self.model,
            stream=self.stream is not False,
            max_tokens=limit,
            stop=stop_texts(o.stop),
        )


def read_ollama_chat(body: bytes) -> SimulatedRequest:
    """Parse the body of a request to `/api/chat`. Raises BadRequest."""
    r: _OllamaRequest = decode(body, _OllamaRequest)
    return r.to_request("\n".join(text_of(m.content) for m in r.messages or ()))


def read_ollama_generate(body: bytes) -> SimulatedRequest:
    """Parse the body of a request to `/api/generate`. Raises BadRequest."""
    r: _OllamaRequest = decode(body, _OllamaRequest)
    return r.to_request("\n".join(filter(None, (r.system, r.prompt))))


def ollama_error(status: int, code: str, message: str) -> JsonObject:
    return {"error": message}


class OllamaChat(Shape):
    """Writes the answer of `/api/chat`: lines of JSON."""

    media_type = "application/x-ndjson"

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer, "ollama-sim")

    def _content(self, text: str) -> JsonObject:
        return {"message": {"role": "assistant", "content": text}}

    def _line(self, text: str, **more: Any) -> JsonObject:
        head = {"model": self._request.model, "created_at": _CREATED_AT, **self._content(text)}
        return {**head, "done": bool(more), **more}

    def _last_line(self, text: str) -> JsonObject:
        """Return the line that ends the answer, with its counts and times."""
        a = self._answer
        return self._line(
            text,
            done_reason="length" if self._choice.finish == "length" else "stop",
            total_duration=a.prompt_ns + a.output_ns,
            load_duration=0,
            prompt_eval_count=a.prompt_tokens,
            prompt_eval_duration=a.prompt_ns,
            eval_count=a.sent_tokens[0],
            eval_duration=a.output_ns,
        )

    def chunk(self, index: int, first: int, last: int, final: bool) -> bytes:
        text = self._take(index, first, last)
        return msgspec.json.encode(self._line(text)) + b"\n" if last > first else b""

    def ending(self) -> bytes:
        return msgspec.json.encode(self._last_line("")) + b"\n"

    def failure(self) -> bytes:
        return msgspec.json.encode(ollama_error(500, "", BROKEN)) + b"\n"

    def full_answer(self) -> JsonObject:
        self._answer.sent_tokens[0] = len(self._choice.pieces)
        return self._last_line(self._choice.text)


class OllamaGenerate(OllamaChat):
    """Writes the answer of `/api/generate`, which has its text in the field `response`."""

    def _content(self, text: str) -> JsonObject:
        return {"response": text}
