"""Decode the body of an answer, read by read, to Deltas: the meaning of each event (`protocol/delta.py`).

`observer.py` feeds `AnswerReader` with payload bytes, without HTTP framing. The content type and the first
bytes show the kind of the body: event stream, lines, JSON or binary stream. Gemini's streamed array is known
by the request's path, and the caller names a WebSocket. A parser of `protocol/` cuts the body into events,
and the dialect reads each event. If the kind is unknown, only the reads are timed. Events that waited until
the dialect was known are returned later, with the time of their own read (`AnswerReader.take_late`).

Source: docs/dialects.md; RFC 6455.
"""

import re
from enum import Enum
from typing import Final

from llmtap.exchange.bounds import Share
from llmtap.protocol.delta import Delta, EventClass
from llmtap.protocol.dialects.chooser import DialectChooser, Released
from llmtap.protocol.dialects.openai_shapes import read_json
from llmtap.protocol.dialects.registry import BUILT_IN, Dialects
from llmtap.protocol.repetition import RepetitionFinder
from llmtap.protocol.sse import (
    BOM,
    EVENT_BYTES_MAX,
    ArrayParser,
    LineParser,
    MessageStreamParser,
    SseEvent,
    SseParser,
)
from llmtap.protocol.tiers import granted_tier
from llmtap.protocol.websocket import MessageParser, Opcode, WebSocketMessage

BODY_BYTES_MAX: Final = EVENT_BYTES_MAX
"""Maximum length of a JSON body, which is one event; a longer one is counted and not parsed."""
_TYPE_BYTES_MAX: Final = 256
_PREFIX_BYTES: Final = 6
"""Number of bytes that show whether a body without a known content type begins with an SSE field."""
_HELD_BYTES_MAX: Final = 4_096
"""Maximum white space at the start of a body. A body with more of it in one line is not parsed."""
_FIRST_LINE_BYTES_MAX: Final = 65_536
"""Number of first bytes of a JSON body in which a line end is searched: after it, more lines of JSON can
follow. A body without a line end in these bytes is one JSON value."""
_PADDING: Final = b'"obfuscation":'
_MESSAGES: Final = b"application/vnd.amazon.eventstream"
_ARRAY_PATH: Final = ":streamGenerateContent"
"""End of the path under which Gemini streams a JSON array, unless the request wants an event stream."""
_LINES: Final = (b"ndjson", b"jsonl", b"jsonlines", b"json-lines")


is_named_line: Final = re.compile(rb'[0-9a-z]:["{\[]').match
"""Finds lines of the Vercel AI SDK 4: a letter or digit names the event."""
_Lines = LineParser | ArrayParser | MessageStreamParser
_FRAMINGS: Final = {LineParser: "ndjson", ArrayParser: "json-array", MessageStreamParser: "eventstream"}


class BodyKind(Enum):
    """Kind of an answer's body, which decides how it is cut into events."""

    UNDECIDED = 0
    SSE = 1
    JSON = 2
    OPAQUE = 3
    """Unknown, or no longer parsed: only the reads are timed."""
    NDJSON = 4
    """Events without SSE fields: lines of JSON, elements of an array, or binary messages."""
    MESSAGES = 5
    """WebSocket messages of a tunnel."""


class AnswerReader:
    """Reader of one body.

    Args:
        path: path of the request.
        share: memory for a JSON body is taken from it.
        failed: the status is an error, so a body of any format counts as an error.
    """

    __slots__ = (
        "_body",
        "_body_bytes",
        "_content_type",
        "_first_line_bytes",
        "_first_line_ns",
        "_had_output",
        "_held_bytes",
        "_is_error",
        "_is_one_value",
        "_keeps_body",
        "_lines",
        "_messages",
        "_parser",
        "_path",
        "_share",
        "_taken_bytes",
        "broken",
        "dialect",
        "kind",
        "late",
        "padded",
        "repetition_finder",
        "tier",
    )

    def __init__(
        self,
        content_type: bytes | None,
        path: str,
        share: Share | None = None,
        *,
        failed: bool = False,
        dialects: Dialects = BUILT_IN,
    ) -> None:
        self.kind = BodyKind.UNDECIDED
        """Kind of the body, which the first bytes decide unless the content type did."""
        self.dialect = DialectChooser(path, dialects)
        self._path = path
        self._is_error = failed
        """Whether the answer has an error status, so its body is an error report."""
        self._content_type = (content_type or b"").partition(b";")[0][:_TYPE_BYTES_MAX].strip().lower()
        self._parser = SseParser()
        self.repetition_finder = RepetitionFinder()
        """Finds the event that the next reads possibly repeat (`RepetitionFinder.repetition`). The caller can
        log repetitions of this event without feeding them, because the parser is between two events before
        and after each of them."""
        self._lines: _Lines | None = None
        """Parser of a body whose events are lines; None: another kind of body."""
        self._messages: MessageParser | None = None
        """Parser of a body of binary messages; None: another kind of body."""
        self._held_bytes = b""  # bytes read while the kind of the body is undecided
        self._share = Share() if share is None else share
        """Memory limit for the body, shared by all exchanges."""
        self._taken_bytes = 0  # memory from `_share` for events that wait until the dialect is known
        self.late: list[tuple[int, Delta]] = []
        """Events of earlier reads whose meaning is known only now, with the time of their read, in order.
        They precede all events that the last call returned."""
        self._body = bytearray()  # JSON body so far
        self._keeps_body = True  # False after the memory limit was reached
        self._body_bytes = 0  # size of the JSON body so far, also if it is not kept
        self._is_one_value = False  # whether the first line shows one JSON value, not JSON Lines
        self.broken: str | None = None
        """Reason why the messages of a tunnel could not be read."""
        self._first_line_bytes = 0  # length of the body's first line, if it is a JSON object
        self._first_line_ns = 0  # time of the read that ended the first line
        self.padded: bool | None = None
        """Whether the first event with text has random padding (OpenAI's `obfuscation`); None before that
        event."""
        self.tier: str | None = None
        """Service tier that the answer names."""
        self._had_output = False  # whether an event with output has been searched for the tier

    @classmethod
    def of_tunnel(cls, path: str, dialects: Dialects = BUILT_IN, *, deflates: bool = False) -> "AnswerReader":
        """Return a reader of WebSocket messages from the upstream. `deflates`: they can be compressed."""
        reader = cls(None, path, dialects=dialects)
        reader.kind = BodyKind.MESSAGES
        reader._messages = MessageParser("upstream", masked=False, deflates=deflates)
        return reader

    @classmethod
    def of_response(cls, path: str, dialects: Dialects = BUILT_IN) -> "AnswerReader":
        """Return a reader of one response of a WebSocket session, which is fed with whole messages."""
        reader = cls(None, path, dialects=dialects)
        reader.kind = BodyKind.NDJSON
        return reader

    @property
    def kept_bytes(self) -> int:
        """Memory of an unfinished event. A JSON body is not included: `_share` already counts it."""
        if self.kind is BodyKind.SSE:
            parser = self._parser
            return 0 if parser.idle else parser.kept_bytes
        part = self._lines if self._messages is None else self._messages
        return len(self._held_bytes) if part is None else part.kept_bytes

    def drop_part(self) -> None:
        """Release the memory of the unfinished event, which is skipped and counted."""
        part = self._lines if self._messages is None else self._messages
        (self._parser if part is None else part).drop()

    @property
    def skipped(self) -> int:
        """Number of events that were too long and were not read."""
        return self._parser.skipped + (self._lines.skipped if self._lines is not None else 0)

    @property
    def framing(self) -> str:
        """Kind of events in the body: `sse`, `ndjson`, `json-array`, `eventstream`, `json` or `opaque`."""
        if self._lines is not None:
            return _FRAMINGS[type(self._lines)]
        return {BodyKind.SSE: "sse", BodyKind.JSON: "json"}.get(self.kind, "opaque")

    @property
    def streamed(self) -> bool:
        """Whether the body is a stream of events or lines, or its content type announced one. False for
        tunnels, because the bytes of a tunnel are not only the answer to its opening request."""
        announced = self.kind in (BodyKind.OPAQUE, BodyKind.UNDECIDED) and (
            self._content_type in (b"text/event-stream", _MESSAGES) or self._content_type.endswith(_LINES)
        )
        return announced or self.kind in (BodyKind.SSE, BodyKind.NDJSON)

    def feed(self, payload: bytes, t_ns: int = 0) -> list[Delta]:
        """Return the events that `payload` (one byte at least), read at `t_ns`, completes. Never raises."""
        if self.kind is BodyKind.SSE:
            out: list[Delta] = []
            parser, dialect = self._parser, self.dialect
            for event in parser.feed(payload):
                if dialect.open:
                    self._offer_to_dialects(event, t_ns, out)
                    continue
                delta = dialect.read_event(event)
                delta.size = event.end - event.start
                out.append(delta)
                if delta.text and self.padded is None:
                    self.padded = event.data is not None and _PADDING in event.data
                if not delta.repeatable:
                    # Expect no repetition: this event has possibly changed the state of the dialect's reader,
                    # so that the reader would read the repeated event differently.
                    self.repetition_finder.repetition = None
                    self._look_for_tier(event.data, delta)
            if len(out) == 1 and (delta := out[0]).repeatable and parser.idle and delta.size == len(payload):
                self.repetition_finder.search(payload, delta, parser.offset, dialect)
            return out
        if self.kind is BodyKind.JSON:
            return self._add_to_body(payload, t_ns)
        if self.kind is BodyKind.OPAQUE:
            return [Delta(EventClass.METADATA, len(payload), parsed=False)]
        if self._lines is not None:
            return self._read_lines(self._lines, payload, t_ns)
        if self._messages is not None:
            return self._read_messages(self._messages, payload, t_ns)
        return self._decide(payload, t_ns)

    def take_late(self) -> list[tuple[int, Delta]]:
        """Return the events of `late`, and empty this list."""
        late, self.late = self.late, []
        return late

    @property
    def idle(self) -> bool:
        """Whether the parser is between two SSE events, with no part of another one read."""
        return self._parser.idle

    def advance_offset(self, payload_bytes: int) -> None:
        """Count payload bytes of repeated events that were not fed, so that later offsets are right."""
        self._parser.offset += payload_bytes

    def close(self, *, whole: bool, t_ns: int = 0) -> list[Delta]:
        """Return the events that the end of the body completes; `t_ns`: time of the last read; `whole`: the
        body is complete by its HTTP framing."""
        out = self._close(whole, t_ns)
        if self.dialect.open:
            self._release(self.dialect.conclude(), t_ns, out)
        return out

    def _close(self, whole: bool, t_ns: int) -> list[Delta]:
        """Read what is left at the end of the body. `whole`: the body is complete."""
        if self.kind is BodyKind.UNDECIDED:
            held_bytes, self._held_bytes = self._held_bytes, b""
            if not held_bytes.strip():
                return []
            self.kind = BodyKind.SSE if self._content_type == b"text/event-stream" else BodyKind.OPAQUE
            return self.feed(held_bytes, t_ns) + self._close(whole, t_ns)
        if self.kind is BodyKind.SSE:
            return self._read_events(self._parser.close(), t_ns)
        if self.kind is BodyKind.NDJSON and self._lines is not None:
            events = self._lines.close()
            if not isinstance(self._lines, MessageStreamParser):
                events = [e for e in events if read_json(e.data or b"") is not None]
            return self._read_events(events, t_ns)
        if self.kind is not BodyKind.JSON or not self._body_bytes:
            return []
        if not self._keeps_body:
            delta = Delta(EventClass.METADATA, parsed=False)
        else:
            delta = self.dialect.read_body(bytes(self._body))
            self._look_for_tier(bytes(self._body), delta)
            if not (whole or delta.parsed):
                return []  # the body was cut off, and a part of a JSON value cannot be read
            if self._is_error and not delta.parsed:
                delta = Delta(EventClass.ERROR)
        delta.size = self._body_bytes
        self._release_body()
        self._body_bytes = 0
        return [delta]

    def give_up(self) -> None:
        """Stop parsing: the rest of the body is only timed."""
        self._release(self.dialect.conclude(), None, [])
        self.kind = BodyKind.OPAQUE
        self.repetition_finder.repetition = None
        self._held_bytes = b""
        self._lines = self._messages = None
        self._parser.drop()
        self._release_body()

    def _offer_to_dialects(self, event: SseEvent, t_ns: int, out: list[Delta]) -> None:
        """Pass an event to the chooser of the dialect; called while the dialect is unknown."""
        self._release(self.dialect.offer(event, event.end - event.start, t_ns), t_ns, out)

    def _release(self, released: list[Released], t_ns: int | None, out: list[Delta]) -> None:
        """Add events whose meaning is known now to `out` if they are of the read at `t_ns`, or to `late`."""
        if self.dialect.kept_bytes != self._taken_bytes and not self._take_memory():
            released += self.dialect.conclude(whole=False)
            self._take_memory()
        for delta, event, at_ns in released:
            if event is not None:
                self._look_for_tier(event.data, delta)
            if delta.text and self.padded is None and event is not None:
                self.padded = event.data is not None and _PADDING in event.data
            if at_ns == t_ns:
                out.append(delta)
            else:
                self.late.append((at_ns, delta))

    def _take_memory(self) -> bool:
        """Take memory for the events that wait until the dialect is known. Return False if there is none."""
        more = self.dialect.kept_bytes - self._taken_bytes
        if more > 0 and not self._share.take(more):
            return False
        if more < 0:
            self._share.give(-more)
        self._taken_bytes += more
        return True

    def _add_to_body(self, payload: bytes, t_ns: int) -> list[Delta]:
        """Store bytes of a JSON body. If they prove to be the first of several lines, read them as lines."""
        self._body_bytes += len(payload)
        if not self._keeps_body:
            return []
        if self._body_bytes > BODY_BYTES_MAX or not self._share.take(len(payload)):
            self._keeps_body = False
            self._release_body()
            return []
        self._body += payload
        if self._is_one_value:
            return []
        if self._first_line_bytes == 0:
            newline = self._body.find(b"\n", max(0, self._body_bytes - len(payload)))
            if newline < 0:
                self._is_one_value = self._body_bytes > _FIRST_LINE_BYTES_MAX
                return []
            value = read_json(bytes(self._body[:newline]))
            self._is_one_value = not isinstance(value, dict)
            # Ollama streams lines, but a gateway can declare their content type as JSON. Then "done": false
            # in the first line shows that more lines follow.
            if self._is_one_value or value.get("done") is False:
                return [] if self._is_one_value else self._begin_kept_lines(t_ns)
            self._first_line_bytes, self._first_line_ns = newline + 1, t_ns
        more = self._body[self._first_line_bytes :].lstrip()
        if more.startswith(b"{"):
            return self._begin_kept_lines(t_ns)
        self._is_one_value = bool(more) or self._body_bytes - self._first_line_bytes > _HELD_BYTES_MAX
        return []

    def _begin_kept_lines(self, t_ns: int) -> list[Delta]:
        """Read the JSON body as lines. The first line keeps the time of the read that ended it."""
        body = bytes(self._body)
        self._release_body()
        self._body_bytes = 0
        parser = LineParser()
        first, self._first_line_bytes = body[: self._first_line_bytes], 0
        if first:
            at_ns = self._first_line_ns
            self.late += [(at_ns, delta) for delta in self._begin_lines(first, parser, at_ns)]
        return self._begin_lines(body[len(first) :], parser, t_ns)

    def _release_body(self) -> None:
        """Free the kept body and return its memory to the shared limit."""
        self._share.give(len(self._body))
        self._body.clear()

    def _begin_lines(self, payload: bytes, parser: _Lines, t_ns: int) -> list[Delta]:
        """Decide that the body consists of lines or messages, which `parser` splits."""
        self.kind = BodyKind.NDJSON
        self._lines = parser
        return self.feed(payload, t_ns)

    def _read_lines(self, parser: _Lines, payload: bytes, t_ns: int) -> list[Delta]:
        out = self._read_events(parser.feed(payload), t_ns)
        if isinstance(parser, MessageStreamParser) and parser.broken:
            self.give_up()
            out.append(Delta(EventClass.METADATA, parsed=False))
        return out

    def _read_events(self, events: list[SseEvent], t_ns: int) -> list[Delta]:
        """Read events with the dialect; while it is not chosen, offer them to all candidates."""
        out: list[Delta] = []
        for event in events:
            if self.dialect.open:
                self._offer_to_dialects(event, t_ns, out)
                continue
            delta = self.dialect.read_event(event)
            delta.size = event.end - event.start
            self._look_for_tier(event.data, delta)
            out.append(delta)
        return out

    def _read_messages(self, parser: MessageParser, payload: bytes, t_ns: int) -> list[Delta]:
        out: list[Delta] = []
        for message in parser.feed(payload):
            out += self.read_message(message, t_ns)
        if parser.broken is not None:
            self.broken = parser.broken
            self.give_up()
            if not out:
                return self.feed(payload, t_ns)
        return out

    def read_message(self, message: WebSocketMessage, t_ns: int = 0) -> list[Delta]:
        """Read a WebSocket message as one event."""
        payload, out = message.payload, list[Delta]()
        if message.opcode is Opcode.TEXT and payload is not None:
            event = SseEvent(0, message.size, payload)
            if self.dialect.open:
                self._offer_to_dialects(event, t_ns, out)
                return out
            delta = self.dialect.read_event(event)
            if delta.text and self.padded is None:
                self.padded = _PADDING in payload
            delta.size = message.size
            self._look_for_tier(payload, delta)
            return [delta]
        if message.opcode in (Opcode.PING, Opcode.PONG):
            delta = Delta(EventClass.KEEPALIVE, message.size)
        else:
            delta = Delta(EventClass.METADATA, message.size, parsed=message.opcode is Opcode.CLOSE)
        if self.dialect.open:
            self._release(self.dialect.offer_known(delta, t_ns), t_ns, out)
            return out
        return [delta]

    def _look_for_tier(self, data: bytes | None, delta: Delta) -> None:
        """Store the service tier that an event names.

        A later tier replaces an earlier one, because `auto` is followed by the granted tier. Of the events
        with output, only the first is searched, because later ones repeat its tier.
        """
        if data is None or (delta.output and self._had_output):
            return
        self._had_output = self._had_output or delta.output
        self.tier = granted_tier(data) or self.tier

    def _decide(self, payload: bytes, t_ns: int) -> list[Delta]:
        """Determine the kind of the body from its content type and first bytes, and read these bytes."""
        if self._content_type == _MESSAGES:
            return self._begin_lines(payload, MessageStreamParser(), t_ns)
        is_json = self._content_type == b"application/json" or self._content_type.endswith(b"+json")
        out: list[Delta] = []
        held_bytes = self._held_bytes + payload
        text = held_bytes.lstrip()
        has_bom = text.startswith(BOM)
        text = text.removeprefix(BOM)
        if is_json:
            # DeepSeek sends blank lines before the JSON while the request waits: count each as a keep-alive.
            blank = held_bytes[: len(held_bytes) - len(text)]
            ended = blank.splitlines(keepends=True)
            rest = b"" if not ended or ended[-1].endswith(b"\n") else ended.pop()
            out += [Delta(EventClass.KEEPALIVE, len(line)) for line in ended]
            held_bytes = rest + text
        is_sse = self._content_type == b"text/event-stream"
        if text.startswith((b"{", b"[")):
            lines = self._content_type.endswith(_LINES)
            array = text.startswith(b"[") and self._path.endswith(_ARRAY_PATH) and not self._is_error
            if lines or array:
                self._held_bytes = b""
                return out + self._begin_lines(
                    text if has_bom else held_bytes, LineParser() if lines else ArrayParser(), t_ns
                )
            self.kind = BodyKind.JSON
            if has_bom:
                # RFC 8259 8.1: ignore the byte order mark, but count it as part of the body's one event.
                held_bytes = text
                self._body_bytes += len(BOM)
        elif is_named_line(text) and self._content_type == b"text/plain":
            self._held_bytes = b""
            return out + self._begin_lines(held_bytes, LineParser(named=True), t_ns)
        elif (text and is_sse) or text.startswith((b"data:", b"event:", b"id:", b"retry:", b":")):
            self.kind = BodyKind.SSE
        elif len(text) < _PREFIX_BYTES and len(held_bytes) <= _HELD_BYTES_MAX:
            self._held_bytes = held_bytes
            return out
        else:
            self.kind = BodyKind.SSE if is_sse else BodyKind.OPAQUE
        self._held_bytes = b""
        return out + self.feed(held_bytes, t_ns)
