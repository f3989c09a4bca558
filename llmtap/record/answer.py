"""The body of an answer, decoded: payload bytes to Deltas.

Whether it is an event stream or one JSON value is told by the content type and by the first byte, never
by what the request asked for: errors come as JSON where a stream was wanted, and the other way round.
A body that is neither is timed by its reads.

Source: shared/dialects/dialects.md sections 1 (units) and 8 (HTTP layer).
"""

from enum import Enum
from typing import Final

from llmtap.wire.delta import Delta, EventClass
from llmtap.wire.dialects.registry import Undecided
from llmtap.wire.sse import EVENT_BYTES_MAX, SseParser

__all__ = ["AnswerReader", "BodyKind"]

BODY_BYTES_MAX: Final = EVENT_BYTES_MAX
"""A JSON body is one event; a longer one is counted and not understood."""
_PREFIX_BYTES: Final = 6
"""Enough to know an SSE field name at the start of a body of no telling type."""
_HELD_BYTES_MAX: Final = 4_096
"""White space before anything else; a body with more of it in one line is nothing we know."""


class BodyKind(Enum):
    """What a body turned out to be."""

    UNDECIDED = 0
    SSE = 1
    JSON = 2
    OPAQUE = 3


class AnswerReader:
    """Reads one body.

    Args:
        content_type: of the response, or None.
        path: of the request, for the choice of dialect.
    """

    __slots__ = ("_body", "_held", "_parser", "_size", "_type", "dialect", "kind")

    def __init__(self, content_type: bytes | None, path: str) -> None:
        self.kind = BodyKind.UNDECIDED
        self.dialect = Undecided(path)
        self._type = (content_type or b"").partition(b";")[0].strip().lower()
        self._parser = SseParser()
        self._held = b""  # while undecided
        self._body = bytearray()  # of JSON
        self._size = 0

    @property
    def skipped(self) -> int:
        """Events that were too long to be kept."""
        return self._parser.skipped

    @property
    def streamed(self) -> bool:
        """It is an event stream, or was to be one when its reader gave up."""
        given_up = self.kind is BodyKind.OPAQUE and self._type == b"text/event-stream"
        return given_up or self.kind is BodyKind.SSE

    def feed(self, payload: bytes) -> list[Delta]:
        """What these bytes, at least one, complete. Never raises."""
        if self.kind is BodyKind.SSE:
            out = []
            read_event = self.dialect.read_event
            for event in self._parser.feed(payload):
                delta = read_event(event)
                delta.size = event.end - event.start
                out.append(delta)
            return out
        if self.kind is BodyKind.JSON:
            self._keep(payload)
            return []
        if self.kind is BodyKind.OPAQUE:
            return [Delta(EventClass.METADATA, len(payload), parsed=False)]
        return self._decide(payload)

    def close(self, *, whole: bool) -> list[Delta]:
        """What the end of the body completes; `whole` says whether HTTP calls it complete."""
        if self.kind is BodyKind.UNDECIDED:
            held, self._held = self._held, b""
            if not held.strip():
                return []
            self.kind = BodyKind.SSE if self._type == b"text/event-stream" else BodyKind.OPAQUE
            return self.feed(held) + self.close(whole=whole)
        if self.kind is BodyKind.SSE:
            out = []
            for event in self._parser.close():
                delta = self.dialect.read_event(event)
                delta.size = event.end - event.start
                out.append(delta)
            return out
        if self.kind is not BodyKind.JSON or not self._size:
            return []
        if self._size > BODY_BYTES_MAX:
            delta = Delta(EventClass.METADATA, parsed=False)
        else:
            delta = self.dialect.read_body(bytes(self._body))
            if not (whole or delta.parsed):
                return []  # the part of a value that was cut off says nothing
        delta.size = self._size
        self._body.clear()
        self._size = 0
        return [delta]

    def give_up(self) -> None:
        """Understand nothing more of this body: from here on, time its reads."""
        self.kind = BodyKind.OPAQUE
        self._held = b""
        self._body.clear()

    def _keep(self, payload: bytes) -> None:
        self._size += len(payload)
        if self._size > BODY_BYTES_MAX:
            self._body.clear()
        else:
            self._body += payload

    def _decide(self, payload: bytes) -> list[Delta]:
        """As `feed`, as long as the kind of the body is open."""
        is_json = self._type == b"application/json" or self._type.endswith(b"+json")
        out: list[Delta] = []
        held = self._held + payload
        text = held.lstrip()
        if is_json:
            # DeepSeek sends blank lines before the JSON while it waits: each is a keep-alive.
            blank = held[: len(held) - len(text)]
            lines = blank.splitlines(keepends=True)
            rest = b"" if not lines or lines[-1].endswith(b"\n") else lines.pop()
            out += [Delta(EventClass.KEEPALIVE, len(line)) for line in lines]
            held = rest + text
        is_sse = self._type == b"text/event-stream"
        if text.startswith((b"{", b"[")) and not self._type.endswith(b"ndjson"):
            self.kind = BodyKind.JSON
        elif (text and is_sse) or text.startswith((b"data:", b"event:", b"id:", b"retry:", b":")):
            self.kind = BodyKind.SSE
        elif len(text) < _PREFIX_BYTES and len(held) <= _HELD_BYTES_MAX:
            self._held = held
            return out
        else:
            self.kind = BodyKind.SSE if is_sse else BodyKind.OPAQUE
        self._held = b""
        return out + self.feed(held)
