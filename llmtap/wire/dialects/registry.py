"""Which dialect an answer speaks: told by the answer itself, with the request's path to break a tie.

Nothing is configured, because one gateway speaks several dialects and knows it better than its operator.
"""

from typing import Any, Final, Protocol

from llmtap.wire.delta import Delta, EventClass
from llmtap.wire.dialects.openai_chat import OpenAIChat
from llmtap.wire.dialects.openai_completions import OpenAICompletions
from llmtap.wire.dialects.openai_shapes import read_error, read_frame, read_json, unknown
from llmtap.wire.sse import SseEvent

__all__ = ["Dialect", "Undecided", "choose"]


class Dialect(Protocol):
    """Reads one answer; it may remember what earlier events said. Nothing in it raises at bad bytes."""

    @property
    def name(self) -> str | None:
        """As reported in `dialect`; None while nobody knows."""
        ...

    def read_event(self, event: SseEvent) -> Delta:
        """What one event of a stream says."""
        ...

    def read_body(self, body: bytes) -> Delta:
        """What a whole JSON answer says."""
        ...


DIALECTS: Final[tuple[type[OpenAIChat] | type[OpenAICompletions], ...]] = (OpenAIChat, OpenAICompletions)
"""`claim(value, path)` of each says how sure a first JSON object makes it that the answer is its own:
3 the answer names itself, 2 its shape fits, 1 only the path speaks for it, 0 not ours."""


def choose(value: Any, path: str) -> Dialect | None:
    """The dialect surest of `value`, the first JSON of an answer to `path`; the earlier one of equals."""
    if not isinstance(value, dict):
        return None
    best = max(DIALECTS, key=lambda dialect: dialect.claim(value, path))
    return best() if best.claim(value, path) else None


class Undecided:
    """Reads an answer until its first JSON tells the dialect, and from there lets that one read.

    An answer of a dialect nobody knows stays undecided: its events count for timing, and as unparsed.
    """

    __slots__ = ("_path", "chosen")

    def __init__(self, path: str) -> None:
        self._path = path
        self.chosen: Dialect | None = None

    @property
    def name(self) -> str | None:
        return None if self.chosen is None else self.chosen.name

    def read_event(self, event: SseEvent) -> Delta:
        if self.chosen is not None:
            return self.chosen.read_event(event)
        data = event.data
        if data is None or not data.lstrip().startswith(b"{"):
            return read_frame(event)
        value = read_json(data)
        self.chosen = choose(value, self._path)
        if self.chosen is not None:
            return self.chosen.read_event(event)
        return _read_unknown(value, event.event)

    def read_body(self, body: bytes) -> Delta:
        value = read_json(body)
        self.chosen = choose(value, self._path)
        return _read_unknown(value, None) if self.chosen is None else self.chosen.read_body(body)


def _read_unknown(value: Any, name: bytes | None) -> Delta:
    """JSON of no dialect we know; an `error` member is an error in all of them."""
    if name == b"ping":
        return Delta(EventClass.KEEPALIVE)
    if isinstance(value, dict) and value.get("error"):
        kind, message = read_error(value["error"])
        return Delta(EventClass.ERROR, error_type=kind, error_message=message)
    return unknown(name)
