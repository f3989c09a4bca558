"""Cut a body into SseEvents: server-sent events, NDJSON, AWS event streams, and streamed JSON arrays.

`exchange/answer.py` feeds the parsers with the payload of a body, cut at any place; the dialects read the
events. A *block* of server-sent events is a run of non-empty lines that ends with an empty line; comments
alone are a block, too. Only CR, LF and CR LF end a line. Some servers put a single newline between events: if
a data line that ends in `}` is followed by one that begins with `{` or `[`, the first ends an event, and from
then on each whole JSON line is an event. A wrong checksum ends the parsing of a binary stream
(`application/vnd.amazon.eventstream`). Messages of the type `PayloadPart` in such a stream (SageMaker) hold
pieces of the stream of a container, which has server-sent events or lines.

Source: WHATWG HTML, "Parsing an event stream"; ndjson.org; smithy.io amazon-eventstream;
botocore/eventstream.py, data/sagemaker-runtime; ai.google.dev streamGenerateContent; docs/dialects.md.
"""

import base64
import binascii
import json
import re
import struct
from typing import Final
from zlib import crc32

import msgspec

from llmtap.json_types import JsonObject
from llmtap.protocol.json_memory import bounded_decoder

EVENT_BYTES_MAX: Final = 16 << 20
"""Maximum size of an event; a longer event is skipped. Known events have up to 1 MB (audio, arguments)."""
_LINE_BYTES: Final = 48
"""Memory that a data line takes in addition to its bytes."""

_decode: Final = bounded_decoder()
BOM: Final = b"\xef\xbb\xbf"


class SseEvent(msgspec.Struct, gc=False):
    """One event of an answer, with its place in the body."""

    start: int
    """Offset of the event's first byte in the body."""
    end: int
    data: bytes | None
    """Data lines of the event, joined by LF; None if it has no data line."""
    event: bytes | None = None
    """Last `event:` field of the event; None if absent or empty."""
    comment: bool = False
    """Whether the event has only comments."""


class SseParser:
    """Splits one body into blocks; any cut of the bytes gives the same events. A block of more than
    `event_bytes_max` bytes is skipped and counted."""

    __slots__ = (
        "_after_cr",
        "_bom",
        "_cr_waits",
        "_crlf",
        "_data",
        "_data_bytes",
        "_event",
        "_event_bytes_max",
        "_has_comment",
        "_has_other_field",
        "_line_size",
        "_per_line",
        "_start",
        "_tail",
        "_too_long",
        "idle",
        "offset",
        "skipped",
    )

    def __init__(self, event_bytes_max: int = EVENT_BYTES_MAX) -> None:
        self.offset = 0
        """Number of bytes read so far."""
        self.skipped = 0
        """Number of blocks that were skipped."""
        self.idle = True
        """Whether no line or block has begun, and the previous line did not end in CR."""
        self._event_bytes_max = event_bytes_max
        self._bom = b""
        """First bytes of the body, while they can still become a byte order mark."""
        # State of the line that is being read.
        self._tail = bytearray()
        """Bytes of an unfinished line."""
        self._line_size = 0
        """Number of bytes of the line so far, including those that were dropped."""
        self._cr_waits = False
        """Whether the line has its CR and waits for its LF, because lines of this stream end in CR LF."""
        self._after_cr = False
        """Whether the previous line ended in CR. If the next byte is LF, it belongs to this line end."""
        self._crlf = False
        """Whether the previous line ended in CR LF."""
        self._per_line = False
        """Whether a single newline separates events (see the docstring of the module)."""
        # State of the block that is being read.
        self._start = -1
        """Offset of the block's first byte; -1: no block has begun."""
        self._data: list[bytes] = []
        """Values of the block's `data` lines."""
        self._data_bytes = 0
        self._event = b""
        """Value of the block's `event` line."""
        self._has_comment = False
        """Whether the block has a comment line."""
        self._has_other_field = False
        """Whether the block has a field other than `data`."""
        self._too_long = False
        """Whether the block is longer than allowed, so its content is dropped."""

    @property
    def kept_bytes(self) -> int:
        """Memory of the unfinished event."""
        return len(self._tail) + len(self._event) + self._data_bytes

    def drop(self) -> None:
        """Release the memory of the unfinished event, which is then skipped and counted."""
        if self._start >= 0:
            self._drop_content()

    def feed(self, data: bytes) -> list[SseEvent]:
        """Return the events that these bytes complete."""
        size = len(data)
        # Fast path for most reads of a token stream: one whole event with one data line.
        if (
            self.idle
            and data.find(b"\n") == size - 2
            and data.startswith(b"data: ")
            and data.endswith(b"\n\n")
            and data.find(b"\r") < 0
            and size <= self._event_bytes_max
        ):
            start = self.offset
            self.offset = end = start + size
            return [SseEvent(start, end, data[6:-2])]
        return self._scan(data) if size else []

    def close(self) -> list[SseEvent]:
        """Return the event that the end of the body completes: an event that lacks only its empty line.

        Browsers discard such an event, but clients that read line by line use it. The event is complete if
        its data is `[DONE]` or a JSON object.
        """
        out: list[SseEvent] = []
        end = self.offset
        if self._cr_waits:
            self._cr_waits = False
            self._end_line(b"", end - 1, end, out)
        tail = bytes(self._tail)
        if tail:
            self._read_field(tail, end - len(tail), end, out)
        data = b"\n".join(self._data).strip()
        if data == b"[DONE]" or (data.startswith(b"{") and _payload_object(data)):
            self._dispatch(end, out)
        self._tail.clear()
        self._line_size = 0
        self._reset()
        return out

    def _scan(self, data: bytes) -> list[SseEvent]:
        """Find the lines of new data, and return the events that they complete."""
        at = self.offset  # offset of `data` in the body
        self.offset += len(data)
        if at == len(self._bom) < len(BOM):
            first = self._bom + data
            if len(first) < len(BOM) and BOM.startswith(first):
                self._bom = first
                self.idle = False
                return []
            if first.startswith(BOM):
                data = first[len(BOM) :]
                at = len(BOM)
            else:
                data = first
                at = 0
            self._bom = BOM  # The check for a byte order mark is over.
        out: list[SseEvent] = []
        if self._cr_waits and data:
            self._cr_waits = False
            self._crlf = data[0] == 0x0A
            cr_at = at - 1
            if self._crlf:
                data = data[1:]
                at += 1
            self._end_line(b"", cr_at, at, out)
        elif self._after_cr and data:
            self._after_cr = False
            if data[0] == 0x0A:
                self._crlf = True
                data = data[1:]
                at += 1

        # splitlines() of bytes, unlike that of text, splits only at CR, LF and CR LF.
        for line in data.splitlines(keepends=True):
            start, at = at, at + len(line)
            if line.endswith(b"\r\n"):
                # A block ends after its LF if the previous line ended in CR LF, else after its CR. So its end
                # is the same wherever the reads cut the bytes.
                self._end_line(line[:-2], start, at if self._crlf else at - 1, out)
                self._crlf = True
            elif line.endswith(b"\n"):
                self._end_line(line[:-1], start, at, out)
                self._crlf = False
            elif not line.endswith(b"\r"):
                self._add_to_line(line, start)
            elif at == self.offset and self._crlf:
                self._add_to_line(line[:-1], start)
                self._cr_waits = True
            else:
                self._end_line(line[:-1], start, at, out)
                self._crlf = False
                self._after_cr = at == self.offset
        self.idle = not (
            self._start >= 0
            or self._line_size
            or self._after_cr
            or self._cr_waits
            or self._crlf
            or self._per_line
        )
        return out

    def _add_to_line(self, part: bytes, start: int) -> None:
        """Keep a part of a line whose end has not arrived."""
        if not part:
            return
        if self._start < 0:
            self._start = start
        self._line_size += len(part)
        if start + len(part) - self._start > self._event_bytes_max:
            self._drop_content()
        if not self._too_long:
            self._tail += part

    def _end_line(self, line: bytes, start: int, end: int, out: list[SseEvent]) -> None:
        """Read a complete line; an empty line ends the event, which is appended to `out`."""
        if self._line_size:
            start -= self._line_size
            self._tail += line
            line = bytes(self._tail)
            self._tail.clear()
            self._line_size = 0
        elif not line:
            if self._start >= 0:
                self._dispatch(end, out)
            return
        if self._start < 0:
            self._start = start
        if end - self._start > self._event_bytes_max:
            self._drop_content()
        if not self._too_long:
            self._read_field(line, start, end, out)

    def _read_field(self, line: bytes, start: int, end: int, out: list[SseEvent]) -> None:
        if line.startswith(b"data:"):
            value = line[6:] if line.startswith(b" ", 5) else line[5:]
            lines = self._data
            if lines and lines[-1].rstrip().endswith(b"}") and value.lstrip().startswith((b"{", b"[")):
                self._dispatch(start, out)
                self._start = start
                self._per_line = True
            lines.append(value)
            self._data_bytes += len(value) + _LINE_BYTES
            if self._per_line and len(lines) == 1:
                text = value.strip()
                if text == b"[DONE]" or (text.startswith(b"{") and text.endswith(b"}")):
                    self._dispatch(end, out)
        elif line.startswith(b":"):
            self._has_comment = True
        elif line == b"data":  # WHATWG HTML: a line without a colon is a field with an empty value.
            self._data.append(b"")
            self._data_bytes += _LINE_BYTES
        else:
            self._has_other_field = True
            if line.startswith(b"event:"):
                self._event = line[7:] if line.startswith(b" ", 6) else line[6:]
            elif line == b"event":
                self._event = b""
            elif line.startswith(b"error:"):
                # Not in the standard: llama.cpp sent errors in this field before ggml-org/llama.cpp#16109.
                self._event = b"error"
                self._data.append(line[7:] if line.startswith(b" ", 6) else line[6:])

    def _dispatch(self, end: int, out: list[SseEvent]) -> None:
        """End the block: add its event, unless it is too long."""
        if self._too_long or end - self._start > self._event_bytes_max:
            self.skipped += 1
        else:
            lines = self._data
            data = None if not lines else lines[0] if len(lines) == 1 else b"\n".join(lines)
            alone = self._has_comment and data is None and not self._has_other_field
            out.append(SseEvent(self._start, end, data, self._event or None, alone))
        self._reset()

    def _drop_content(self) -> None:
        """Forget the content of an event that is too long; only its end is still searched."""
        self._too_long = True
        self._tail.clear()
        self._data.clear()
        self._data_bytes = 0
        self._event = b""

    def _reset(self) -> None:
        self._start = -1
        self._data.clear()
        self._data_bytes = 0
        self._event = b""
        self._has_comment = self._has_other_field = self._too_long = False


class LineParser:
    """Splits one body into lines (NDJSON). The last line can lack its line end; an empty line is a
    keep-alive. A line of more than `line_bytes_max` bytes is skipped and counted. `named`: each line has the
    name of its event, a colon, and JSON."""

    __slots__ = ("_has_names", "_is_dropped", "_line_bytes_max", "_size", "_tail", "offset", "skipped")

    def __init__(self, line_bytes_max: int = EVENT_BYTES_MAX, *, named: bool = False) -> None:
        self._has_names = named
        """Whether each line begins with the name of its event."""
        self.offset = 0
        """Number of bytes read so far."""
        self.skipped = 0
        """Number of lines that were too long."""
        self._line_bytes_max = line_bytes_max
        self._tail = bytearray()
        """Bytes of an unfinished line."""
        self._size = 0
        """Number of bytes of the unfinished line, including those that were dropped."""
        self._is_dropped = False
        """Whether the unfinished line is ignored up to its end."""

    @property
    def kept_bytes(self) -> int:
        return len(self._tail)

    def drop(self) -> None:
        """Release the memory of the unfinished line, which is then skipped and counted."""
        self._is_dropped = self._size > 0
        self._tail.clear()

    def feed(self, data: bytes) -> list[SseEvent]:
        out: list[SseEvent] = []
        begin = 0
        while (newline := data.find(b"\n", begin)) >= 0:
            self._add_to_line(data[begin : newline + 1])
            begin = newline + 1
            self._end_line(out)
        self._add_to_line(data[begin:])
        return out

    def close(self) -> list[SseEvent]:
        out: list[SseEvent] = []
        if self._size:
            self._end_line(out)
        return out

    def _add_to_line(self, part: bytes) -> None:
        self.offset += len(part)
        self._size += len(part)
        if self._size > self._line_bytes_max or self._is_dropped:
            self._tail.clear()
        else:
            self._tail += part

    def _end_line(self, out: list[SseEvent]) -> None:
        if self._size > self._line_bytes_max or self._is_dropped:
            self.skipped += 1
        else:
            line, name = bytes(self._tail).rstrip(b"\r\n"), None
            if self._has_names and line:
                name, _, line = line.partition(b":")
            out.append(SseEvent(self.offset - self._size, self.offset, line, name))
        self._tail.clear()
        self._size = 0
        self._is_dropped = False


_PRELUDE_BYTES: Final = 12
_MESSAGE_BYTES_MIN: Final = 16
_HEADERS_BYTES_MAX: Final = 128 << 10
_FIXED_SIZES: Final = {0: 0, 1: 0, 2: 1, 3: 2, 4: 4, 5: 8, 8: 8, 9: 16}
_SIZED_KINDS: Final = (6, 7)


def is_message_stream(data: bytes) -> bool:
    if len(data) < _PRELUDE_BYTES:
        return False
    total, headers, checksum = struct.unpack_from("!III", data)
    return bool(total >= headers + _MESSAGE_BYTES_MIN and crc32(data[:8]) == checksum)


_PART_NAME: Final = b"PayloadPart"
_SSE_FIELDS: Final = (b"data:", b"event:", b"id:", b"retry:", b":")


class MessageStreamParser:
    """Splits a body of binary messages of Amazon's event streams."""

    __slots__ = ("_buffer", "_first_payloads", "_part_parser", "_skipped", "broken", "offset")

    def __init__(self) -> None:
        self.offset = 0
        """Number of bytes of whole messages so far."""
        self._skipped = 0
        """Number of messages that were too long."""
        self._part_parser: SseParser | LineParser | None = None
        """Parser of the stream in the payloads of PayloadPart; None until its format is known."""
        self._first_payloads: bytes | None = b""
        """Payloads of PayloadPart until the format of their stream is known; then None."""
        self.broken = False
        """Whether a checksum or a length was wrong, so that the rest of the stream is not parsed."""
        self._buffer = bytearray()

    @property
    def skipped(self) -> int:
        """Number of messages with invalid headers or payload, and of skipped events in payloads."""
        return self._skipped + (0 if self._part_parser is None else self._part_parser.skipped)

    @property
    def kept_bytes(self) -> int:
        parts = 0 if self._part_parser is None else self._part_parser.kept_bytes
        return len(self._buffer) + len(self._first_payloads or b"") + parts

    def drop(self) -> None:
        """Release the memory of the unfinished message, and stop parsing: messages have no start mark."""
        self.broken = True
        self._buffer.clear()
        self._first_payloads = None
        if self._part_parser is not None:
            self._part_parser.drop()

    def feed(self, data: bytes) -> list[SseEvent]:
        """Return the events of the messages that these bytes complete. An invalid message ends parsing."""
        out: list[SseEvent] = []
        buffer = self._buffer
        buffer += data
        at = 0
        while not self.broken and len(buffer) - at >= _PRELUDE_BYTES:
            total, headers, checksum = struct.unpack_from("!III", buffer, at)
            if (
                crc32(buffer[at : at + 8]) != checksum
                or headers > _HEADERS_BYTES_MAX
                or not headers + _MESSAGE_BYTES_MIN <= total <= EVENT_BYTES_MAX
            ):
                self.broken = True
            elif len(buffer) - at < total:
                break
            else:
                message = bytes(buffer[at : at + total])
                if crc32(message[:-4]) != int.from_bytes(message[-4:], "big"):
                    self.broken = True
                    break
                out += self._events(message, headers)
                at += total
        del buffer[:at]
        if self.broken:
            buffer.clear()
        return out

    def close(self) -> list[SseEvent]:
        parts = self._part_parser
        events = [] if parts is None else parts.close()
        if not isinstance(parts, SseParser):
            events = [event for event in events if _payload_object(event.data or b"")]
        return self._set_places(events)

    def _set_places(self, events: list[SseEvent]) -> list[SseEvent]:
        """Set the offsets of the events in the body, and return them. An event ends at the end of the message
        that completed it, and its size stays the same."""
        for event in events:
            event.start, event.end = self.offset - (event.end - event.start), self.offset
        return events

    def _events(self, message: bytes, headers: int) -> list[SseEvent]:
        """Return the events of one message."""
        start, self.offset = self.offset, self.offset + len(message)
        names = _message_headers(message[_PRELUDE_BYTES : _PRELUDE_BYTES + headers])
        payload = message[_PRELUDE_BYTES + headers : -4]
        if names is None:
            self._skipped += 1
            return [SseEvent(start, self.offset, payload)]
        if names.get(b":event-type") != _PART_NAME:
            return [self._event(names, payload, start)]
        if self._first_payloads is not None:
            # The format is not known yet. A complete JSON object is an event, even without a line end.
            payload, self._first_payloads = (self._first_payloads + payload).lstrip(), b""
            if payload.startswith(_SSE_FIELDS):
                self._part_parser, self._first_payloads = SseParser(), None
            elif payload.startswith(b"{") and _payload_object(payload):
                return [SseEvent(start, self.offset, payload.rstrip())]
            elif payload.startswith((b"{", b"[")):
                self._part_parser, self._first_payloads = LineParser(), None
            elif any(field.startswith(payload) for field in _SSE_FIELDS):
                self._first_payloads = payload
                return []
        if self._part_parser is None:
            return [SseEvent(start, self.offset, payload or b"{}", _PART_NAME)]
        return self._set_places(self._part_parser.feed(payload))

    def _event(self, names: dict[bytes, bytes], payload: bytes, start: int) -> SseEvent:
        kind = names.get(b":event-type") or None
        failed = names.get(b":exception-type") or names.get(b":error-code")
        if failed:
            return SseEvent(start, self.offset, _failure_payload(failed, names, payload), b"error")
        if kind != b"chunk":
            return SseEvent(start, self.offset, payload or b"{}", kind)
        try:
            encoded = msgspec.convert(_decode(payload), JsonObject).get("bytes")
            part = base64.b64decode(msgspec.convert(encoded, str | None) or "", validate=True)
        except (ValueError, TypeError, RecursionError, binascii.Error):
            self._skipped += 1
            part = payload
        # `part` is one event in the dialect of the model, or the payload itself if it could not be decoded.
        return SseEvent(start, self.offset, part)


def _message_headers(data: bytes) -> dict[bytes, bytes] | None:
    out: dict[bytes, bytes] = {}
    at = 0
    try:
        while at < len(data):
            size = data[at]
            name, kind = data[at + 1 : at + 1 + size], data[at + 1 + size]
            at += 2 + size
            if kind in _SIZED_KINDS:
                size = int.from_bytes(data[at : at + 2], "big")
                at += 2
            else:
                size = _FIXED_SIZES[kind]
            out[name] = data[at : at + size]
            at += size
    except (IndexError, KeyError):
        return None
    return out if at == len(data) else None


def _payload_object(payload: bytes) -> JsonObject:
    try:
        value = _decode(payload)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {}


def _failure_payload(kind: bytes, names: dict[bytes, bytes], payload: bytes) -> bytes:
    """Return an AWS exception in the form of a usual JSON error."""
    message = _payload_object(payload).get("message")
    if not isinstance(message, str):
        message = names.get(b":error-message", b"").decode("utf-8", "replace")
    return json.dumps({"error": {"type": kind.decode("latin-1"), "message": message}}).encode()


_find_structure: Final = re.compile(rb'["{}\[\]]').search
_find_string_end: Final = re.compile(rb'["\\]').search


class ArrayParser:
    """Splits a JSON array of objects into its elements, each as soon as its last byte has come. Any cut of
    the bytes gives the same elements."""

    __slots__ = ("_buffer", "_depth", "_element_start", "_string_state", "offset", "skipped")

    def __init__(self) -> None:
        self.offset = 0
        """Offset of the first byte in `_buffer`."""
        self.skipped = 0
        """Number of elements that were too long."""
        self._buffer = bytearray()
        self._element_start = -1
        """Offset in the buffer at which the element begins; -1 between elements."""
        self._depth = 0
        """Number of open brackets: 1 between elements, 2 inside an element."""
        self._string_state = 0
        """0 outside a string, 1 inside a string, 2 after a backslash in a string."""

    @property
    def kept_bytes(self) -> int:
        return len(self._buffer)

    def drop(self) -> None:
        """Release the memory of the unfinished element, which is then skipped and counted. The parser
        continues to count brackets, so that it finds the next element."""
        self.skipped += self._element_start >= 0
        self.offset += len(self._buffer)
        self._buffer.clear()
        self._element_start = -1

    def feed(self, data: bytes) -> list[SseEvent]:
        """Return the elements of the array that these bytes complete."""
        out: list[SseEvent] = []
        buffer = self._buffer
        at = len(buffer)
        buffer += data
        while at < len(buffer):
            if self._string_state == 2:
                self._string_state, at = 1, at + 1
                continue
            match = (_find_string_end if self._string_state else _find_structure)(buffer, at)
            if match is None:
                break
            at, mark = match.end(), match[0]
            if mark == b'"':
                self._string_state ^= 1
            elif mark == b"\\":
                self._string_state = 2
            elif mark in b"{[":
                self._depth += 1
                if self._depth == 2 and mark == b"{":
                    self._element_start = at - 1
            else:
                self._depth -= 1
                if self._depth == 1 and self._element_start >= 0:
                    start, self.offset = self.offset, self.offset + at
                    out.append(SseEvent(start, self.offset, bytes(buffer[self._element_start : at])))
                    del buffer[:at]
                    at, self._element_start = 0, -1
        if len(buffer) > EVENT_BYTES_MAX:
            self.drop()
        return out

    def close(self) -> list[SseEvent]:
        return []
