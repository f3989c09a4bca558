"""What every API asks for and is answered, in words of our own, and the seam that each API's file fills."""

from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgspec

__all__ = ["Answer", "BadRequest", "Choice", "Shape", "SimulatedRequest", "decode", "lines_of", "text_of"]

CREATED: Final = 1_700_000_000
"""Date of every answer, so that equal requests get equal bytes."""


class BadRequest(ValueError):
    """The body of a request does not fit; the client is told this sentence."""


@dataclass(slots=True)
class SimulatedRequest:
    """A request, whatever API it came by."""

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


@dataclass(slots=True)
class Choice:
    """One of the texts that answer a request, a string for each token."""

    pieces: list[str]
    finish: str = "stop"
    """`stop`, `length` or `content_filter`."""
    refused: bool = False
    """The text is a refusal, and goes in the field for it where the API has one."""
    stop_text: str | None = None
    """The stop string that ended it."""

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class Answer:
    """All that a shape needs to know of an answer."""

    number: int
    asked: SimulatedRequest
    prompt_tokens: int
    choices: list[Choice]
    dialect: str = "openai"
    sent: list[int] = field(default_factory=list)
    """Tokens of each choice that were sent so far."""
    prompt_ns: int = 0
    """What the prompt took, for those who tell at the end."""
    output_ns: int = 0
    cached_tokens: int | None = None
    """Tokens of the prompt that the engine's prefix cache had, once that is known; None without one."""

    def __post_init__(self) -> None:
        self.sent = [0] * len(self.choices)

    @property
    def output_tokens(self) -> int:
        return sum(len(choice.pieces) for choice in self.choices)


class Shape(Protocol):
    """The bytes of one answer. Called in the order of a stream: opening, chunks, ending."""

    media_type: str
    id: str

    def opening(self) -> bytes:
        """What stands before the first token."""
        ...

    def chunk(self, index: int, first: int, last: int, final: bool) -> bytes:
        """Tokens `first` up to before `last` of choice `index`; if `final`, also how it ended."""
        ...

    def ending(self) -> bytes:
        """What stands behind the last choice: usage, end marker."""
        ...

    def keepalive(self) -> bytes:
        """What may be sent in silence; empty where the API has nothing for it."""
        ...

    def failure(self) -> bytes:
        """The engine breaks down midway."""
        ...

    def whole(self) -> dict[str, Any]:
        """The answer that is not streamed."""
        ...


def decode(body: bytes, kind: type[Any]) -> Any:
    """The body as `kind`. Raises BadRequest."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise BadRequest(f"the request body does not fit: {exc}") from None


def lines_of(stop: str | list[str] | None) -> tuple[str, ...]:
    """Stop strings, however many were given."""
    return tuple(text for text in ([stop] if isinstance(stop, str) else stop or ()) if text)


def text_of(content: Any) -> str:
    """The text in the content of a message: a string, or parts of which some are text."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = (part.get("text") if isinstance(part, dict) else part for part in content)
        return "".join(text for text in texts if isinstance(text, str))
    return ""
