"""Decode the body of an answer, read by read, to Deltas: the meaning of each event (`protocol/delta.py`).

`observer.py` feeds `AnswerReader` with payload bytes, without HTTP framing. Content type and first bytes
decide the kind of body (event stream, lines, JSON, binary stream), except Gemini's streamed array, known by
the request's path, and WebSocket, which the caller names; a parser of `protocol/` cuts it, and the dialect
reads each event. If the kind is not known only the reads are timed.

Source: docs/dialects.md; RFC 6455.
"""

from enum import Enum
from typing import Final

from llmtap.exchange.bounds import Share
from llmtap.protocol.delta import Delta, EventClass
from llmtap.protocol.dialects.openai_shapes import read_json
from llmtap.protocol.dialects.registry import Undecided
from llmtap.protocol.repetition import Repetition, RepetitionFinder
from llmtap.protocol.sse import (
    EVENT_BYTES_MAX,
    ArrayParser,
    LineParser,
    MessageStreamParser,
    SseEvent,
    SseParser,
)
from llmtap.protocol.websocket import MessageParser, Opcode, WebSocketMessage

BODY_BYTES_MAX: Final = EVENT_BYTES_MAX
"""A JSON body is one event; a longer one is counted and not understood."""
_TYPE_BYTES_MAX: Final = 256
_PREFIX_BYTES: Final = 6
"""Enough to know an SSE field name at the start of a body of no telling type."""
_HELD_BYTES_MAX: Final = 4_096
"""White space before anything else; a body with more of it in one line is nothing we know."""
_FIRST_LINE_BYTES_MAX: Final = 65_536
"""Of a JSON body, where a line may tell that more of them follow."""
_PADDING: Final = b'"obfuscation":'
_MESSAGES: Final = b"application/vnd.amazon.eventstream"
_ARRAY_PATH: Final = ":streamGenerateContent"
"""Gemini streams a JSON array there, unless it is asked for an event stream."""
_LINES: Final = (b"ndjson", b"jsonl", b"jsonlines", b"json-lines")


_Lines = LineParser | ArrayParser | MessageStreamParser


class BodyKind(Enum):
    UNDECIDED = 0
    SSE = 1
    JSON = 2
    OPAQUE = 3
    NDJSON = 4
    """Lines of JSON, elements of an array, or binary messages: events that say so themselves."""
    MESSAGES = 5


class AnswerReader:
    """Reader of one body. `path` is that of the request; `share` is where room for a JSON body is taken; the
    body of an error status (`failed`) is an error in whatever shape."""

    __slots__ = (
        "_body", "_failed", "_held", "_keeps", "_lines", "_messages", "_one_value", "_parser", "_path",
        "_repeats", "_share", "_size", "_type", "dialect", "kind", "padded",
    )  # fmt: skip

    def __init__(
        self, content_type: bytes | None, path: str, share: Share | None = None, *, failed: bool = False
    ) -> None:
        self.kind = BodyKind.UNDECIDED
        self.dialect = Undecided(path)
        self._path = path
        self._failed = failed
        self._type = (content_type or b"").partition(b";")[0][:_TYPE_BYTES_MAX].strip().lower()
        self._parser = SseParser()
        self._repeats = RepetitionFinder()
        self._lines: _Lines | None = None
        self._messages: MessageParser | None = None
        self._held = b""  # while undecided
        self._share = Share() if share is None else share
        self._body = bytearray()  # of JSON
        self._keeps = True  # there is room for it
        self._size = 0
        self._one_value = False  # its first line told that no more of them follow
        self.padded: bool | None = None
        """The first event with a text has random padding (OpenAI's `obfuscation`); None until it came."""

    @classmethod
    def of_tunnel(cls, path: str) -> "AnswerReader":
        reader = cls(None, path)
        reader.kind = BodyKind.MESSAGES
        reader._messages = MessageParser("upstream", masked=False)
        return reader

    @classmethod
    def of_response(cls, path: str) -> "AnswerReader":
        reader = cls(None, path)
        reader.kind = BodyKind.NDJSON
        return reader

    @property
    def skipped(self) -> int:
        return self._parser.skipped + (self._lines.skipped if self._lines is not None else 0)

    @property
    def streamed(self) -> bool:
        """Whether it is a stream of events or lines, or was announced as one. A tunnel is none: what comes
        down it need not answer the request that opened it."""
        announced = self.kind in (BodyKind.OPAQUE, BodyKind.UNDECIDED) and (
            self._type in (b"text/event-stream", _MESSAGES) or self._type.endswith(_LINES)
        )
        return announced or self.kind in (BodyKind.SSE, BodyKind.NDJSON)

    def feed(self, payload: bytes) -> list[Delta]:
        """What these bytes, at least one, complete. Never raises."""
        if self.kind is BodyKind.SSE:
            out = []
            parser, read_event = self._parser, self.dialect.read_event
            for event in parser.feed(payload):
                delta = read_event(event)
                delta.size = event.end - event.start
                out.append(delta)
                if delta.text and self.padded is None:
                    self.padded = event.data is not None and _PADDING in event.data
                if not delta.repeatable:
                    self._repeats.repetition = None  # its reader may have changed its mind
            if len(out) == 1 and delta.repeatable and parser.idle and delta.size == len(payload):
                self._repeats.look(payload, delta, parser.offset, self.dialect)
            return out
        if self.kind is BodyKind.JSON:
            return self._keep(payload)
        if self.kind is BodyKind.OPAQUE:
            return [Delta(EventClass.METADATA, len(payload), parsed=False)]
        if self._lines is not None:
            return self._read_lines(self._lines, payload)
        if self._messages is not None:
            return self._read_messages(self._messages, payload)
        return self._decide(payload)

    @property
    def repetition(self) -> Repetition | None:
        """The event that may come again, or None. While nothing else comes it need not be fed: the parser is
        between two events and would stay there."""
        return self._repeats.repetition if self._parser.idle else None

    @property
    def idle(self) -> bool:
        """False if a part of a further SSE event has been read."""
        return self._parser.idle

    def passed(self, payload_bytes: int) -> None:
        self._parser.offset += payload_bytes

    def close(self, *, whole: bool) -> list[Delta]:
        """What the end of the body completes; `whole` says whether HTTP calls it complete."""
        if self.kind is BodyKind.UNDECIDED:
            held, self._held = self._held, b""
            if not held.strip():
                return []
            self.kind = BodyKind.SSE if self._type == b"text/event-stream" else BodyKind.OPAQUE
            return self.feed(held) + self.close(whole=whole)
        if self.kind is BodyKind.SSE:
            return [self._read_line(event) for event in self._parser.close()]
        if self.kind is BodyKind.NDJSON and self._lines is not None:
            lines = self._lines.close()
            return [self._read_line(line) for line in lines if read_json(line.data or b"") is not None]
        if self.kind is not BodyKind.JSON or not self._size:
            return []
        if not self._keeps:
            delta = Delta(EventClass.METADATA, parsed=False)
        else:
            delta = self.dialect.read_body(bytes(self._body))
            if not (whole or delta.parsed):
                return []  # the part of a value that was cut off says nothing
            if self._failed and not delta.parsed:
                delta = Delta(EventClass.ERROR)
        delta.size = self._size
        self._let_go()
        self._size = 0
        return [delta]

    def give_up(self) -> None:
        self.kind = BodyKind.OPAQUE
        self._repeats.repetition = None
        self._held = b""
        self._lines = self._messages = None
        self._let_go()

    def _keep(self, payload: bytes) -> list[Delta]:
        """The next bytes of a JSON body, which may turn out to be the first of several lines."""
        self._size += len(payload)
        if not self._keeps:
            return []
        if self._size > BODY_BYTES_MAX or not self._share.take(len(payload)):
            self._keeps = False
            self._let_go()
            return []
        self._body += payload
        if self._one_value:
            return []
        newline = self._body.find(b"\n", max(0, self._size - len(payload)))
        if newline < 0:
            self._one_value = self._size > _FIRST_LINE_BYTES_MAX
            return []
        # Ollama behind a gateway that names another type: its lines say themselves that they go on.
        value = read_json(bytes(self._body[:newline]))
        if not (isinstance(value, dict) and value.get("done") is False):
            self._one_value = True
            return []
        body = bytes(self._body)
        self._let_go()
        self._size = 0
        return self._begin_lines(body, LineParser())

    def _let_go(self) -> None:
        self._share.give(len(self._body))
        self._body.clear()

    def _begin_lines(self, payload: bytes, parser: _Lines) -> list[Delta]:
        self.kind = BodyKind.NDJSON
        self._lines = parser
        return self.feed(payload)

    def _read_lines(self, parser: _Lines, payload: bytes) -> list[Delta]:
        out = [self._read_line(line) for line in parser.feed(payload)]
        if isinstance(parser, MessageStreamParser) and parser.broken:
            self.give_up()
            out.append(Delta(EventClass.METADATA, parsed=False))
        return out

    def _read_line(self, line: SseEvent) -> Delta:
        delta = self.dialect.read_event(line)
        delta.size = line.end - line.start
        return delta

    def _read_messages(self, parser: MessageParser, payload: bytes) -> list[Delta]:
        out = [self.read_message(message) for message in parser.feed(payload)]
        if parser.broken is not None:
            self.give_up()
            if not out:
                return self.feed(payload)
        return out

    def read_message(self, message: WebSocketMessage) -> Delta:
        payload = message.payload
        if message.opcode in (Opcode.PING, Opcode.PONG):
            delta = Delta(EventClass.KEEPALIVE)
        elif message.opcode is Opcode.CLOSE:
            delta = Delta(EventClass.METADATA)
        elif payload is None or message.opcode is Opcode.BINARY:
            delta = Delta(EventClass.METADATA, parsed=False)
        else:
            delta = self.dialect.read_event(SseEvent(0, len(payload), payload))
            if delta.text and self.padded is None:
                self.padded = _PADDING in payload
        delta.size = message.size
        return delta

    def _decide(self, payload: bytes) -> list[Delta]:
        if self._type == _MESSAGES:
            return self._begin_lines(payload, MessageStreamParser())
        is_json = self._type == b"application/json" or self._type.endswith(b"+json")
        out: list[Delta] = []
        held = self._held + payload
        text = held.lstrip()
        if is_json:
            # DeepSeek sends blank lines before the JSON while it waits: each is a keep-alive.
            blank = held[: len(held) - len(text)]
            ended = blank.splitlines(keepends=True)
            rest = b"" if not ended or ended[-1].endswith(b"\n") else ended.pop()
            out += [Delta(EventClass.KEEPALIVE, len(line)) for line in ended]
            held = rest + text
        is_sse = self._type == b"text/event-stream"
        if text.startswith((b"{", b"[")):
            lines = self._type.endswith(_LINES)
            array = text.startswith(b"[") and self._path.endswith(_ARRAY_PATH) and not self._failed
            if lines or array:
                self._held = b""
                return out + self._begin_lines(held, LineParser() if lines else ArrayParser())
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
