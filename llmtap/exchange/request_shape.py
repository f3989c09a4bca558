"""What an exchange asked for, as far as a capture keeps it: the shape of the request, whose turn it was, and,
only where an operator allowed it, what was said.

These are filled in by `capture/`; live measuring needs none of them.
"""

from array import array
from dataclasses import dataclass, field

__all__ = ["CapturedText", "RequestShape", "Turn"]


@dataclass(slots=True)
class RequestShape:
    """The shape of a request: no word of it."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    tools: int | None = None
    """Tools offered."""
    images: int | None = None
    """Pictures, sounds and files in the prompt: they count no bytes below."""
    response_format: str | None = None
    """`text`, `json_object`, `json_schema`, or another single word."""
    roles: list[str] = field(default_factory=list)
    """Of each message, in order; a completion's prompt is one message of the role `prompt`."""
    sizes: "array[int]" = field(default_factory=lambda: array("q"))
    """Of each message: bytes of UTF-8, and four for each token id where a prompt is given as ids."""
    blocks: "array[int]" = field(default_factory=lambda: array("q"))
    """Chained hashes of the prompt's blocks: two prompts begin alike as far as their leading ids agree."""
    block_size: int | None = None
    block_unit: str | None = None
    """`tokens` or `bytes`; both None where nothing was hashed."""
    tokens: int | None = None
    """Of the prompt, by the configured tokenizer."""


@dataclass(slots=True)
class Turn:
    """The place of an exchange in its conversation."""

    session: str
    source: str
    """`explicit`: the request named its conversation. `prefix`: its messages go on from an earlier one's."""
    number: int
    """From 0."""
    parent: str | None = None
    """Id of the exchange before, where it was seen."""
    think_ns: int | None = None
    """From the end of the previous answer to this arrival: what a person, or a tool, took."""
    by: str | None = None
    """`human`, or `tool` where the last message is the result of a call (an agent's loop)."""


@dataclass(slots=True)
class CapturedText:
    """What was said, redacted. Only at the level `full`."""

    request_body: str | None = None
    response_text: str | None = None
    redactions: int = 0
