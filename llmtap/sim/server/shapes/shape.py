"""Requests and answers of the simulated server independent of an API, and the base class of API writers.

`SimulatedRequest` is what a module of an API reads; `Answer` is what it writes; `Shape` is the interface that
turns an answer into bytes. Also helpers of these modules: decode a body, take the text of a message, write a
server-sent event.
"""

from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

CREATED: Final = 1_700_000_000
"""Date of every answer, so that equal requests get equal bytes."""
BROKEN: Final = "the engine broke down"


class BadRequest(ValueError):
    """The body of a request does not fit; the client gets this message."""

    code = "invalid_value"


@dataclass(slots=True)
class SimulatedRequest:
    model: str
    stream: bool
    prompts: tuple[str, ...]
    """One for each answer that is wanted, before `n`."""
    prompt_tokens: int | None = None
    """Where the prompt came as tokens; else they are counted."""
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    seed: int | None = None
    n: int = 1
    include_usage: bool = False
    continuous_usage: bool = False
    token_ids: bool = False


class CommonRequest(msgspec.Struct, kw_only=True):
    """Fields that the bodies of several APIs share; `min_tokens` and `ignore_eos` are vLLM's."""

    model: str = "sim"
    stream: bool | None = False
    max_tokens: int | None = None
    min_tokens: int | None = 0
    ignore_eos: bool | None = False
    seed: int | None = None

    def asked(self, *prompts: str, **more: Any) -> SimulatedRequest:
        """Return the request; `more` are fields of it."""
        return SimulatedRequest(**{
            "model": self.model, "stream": bool(self.stream), "prompts": prompts,
            "max_tokens": self.max_tokens, "min_tokens": self.min_tokens or 0,
            "ignore_eos": bool(self.ignore_eos), "seed": self.seed, "include_usage": True, **more,
        })  # fmt: skip


@dataclass(slots=True)
class Choice:
    """One of the texts that answer a request, a string for each token."""

    pieces: list[str]
    finish: str = "stop"
    refused: bool = False
    """The text is a refusal, and goes in the field for it where the API has one."""
    stop_text: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class Answer:
    """What a shape needs to know of an answer."""

    number: int
    asked: SimulatedRequest
    prompt_tokens: int
    choices: list[Choice]
    dialect: str = "openai"
    sent: list[int] = field(default_factory=list)
    prompt_ns: int = 0
    """Duration of the prompt, for APIs that report it at the end."""
    output_ns: int = 0
    cached_tokens: int | None = None
    """Prompt tokens found in the engine's prefix cache, once that is known; None without one."""

    def __post_init__(self) -> None:
        self.sent = [0] * len(self.choices)

    @property
    def output_tokens(self) -> int:
        return sum(len(choice.pieces) for choice in self.choices)


class Shape:
    """The bytes of one answer. Called in the order of a stream: opening, chunks, ending."""

    media_type = "text/event-stream"

    def __init__(self, answer: Answer, prefix: str) -> None:
        """`prefix` of the answer's id."""
        self.id = f"{prefix}{answer.number}"
        self._answer = answer
        self._asked = answer.asked
        self._choice = answer.choices[0]

    def opening(self) -> bytes:
        """Return what precedes the first token."""
        return b""

    def chunk(self, index: int, first: int, last: int, final: bool) -> bytes:
        """Return tokens `first` up to before `last` of choice `index`; if `final`, also how it ended."""
        raise NotImplementedError

    def ending(self) -> bytes:
        """Return what follows the last choice: usage, end marker."""
        raise NotImplementedError

    def keepalive(self) -> bytes:
        """Return what may be sent in silence; empty where the API has nothing for it."""
        return b""

    def failure(self) -> bytes:
        """Return the report of an engine failure in the middle of an answer."""
        return b""

    def whole(self) -> dict[str, Any]:
        """Return the answer that is not streamed, if the API has such answers."""
        raise NotImplementedError

    def _take(self, index: int, first: int, last: int) -> str:
        """Return the text of these tokens, and count them as sent."""
        answer = self._answer
        answer.sent[index] = last
        pieces = answer.choices[index].pieces
        return pieces[first] if last == first + 1 else "".join(pieces[first:last])

    @property
    def said(self) -> str:
        """The text of the first choice that was sent so far."""
        return "".join(self._choice.pieces[: self._answer.sent[0]])

    def _status(self) -> tuple[str, str | None]:
        """Return OpenAI's status of an answer that has ended, and why it is incomplete."""
        reasons = {"length": "max_output_tokens", "content_filter": "content_filter"}
        reason = reasons.get(self._choice.finish)
        return ("incomplete" if reason else "completed"), reason


def sse(event: dict[str, Any], kind: str = "") -> bytes:
    """Return a server-sent event, named `kind` if given."""
    name = b"event: " + kind.encode() + b"\n" if kind else b""
    return name + b"data: " + msgspec.json.encode(event) + b"\n\n"


def decode(body: bytes, kind: type[Any]) -> Any:
    """Return the body as `kind`. Raises BadRequest."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise BadRequest(f"the request body does not fit: {exc}") from None


def lines_of(stop: str | list[str] | None) -> tuple[str, ...]:
    return tuple(text for text in ([stop] if isinstance(stop, str) else stop or ()) if text)


def text_of(content: Any) -> str:
    """Return the text in the content of a message: a string, or parts of which some are text."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = (part.get("text") if isinstance(part, dict) else part for part in content)
        return "".join(text for text in texts if isinstance(text, str))
    return ""


class Message(msgspec.Struct):
    role: str = "user"
    content: Any = None
