"""Parse binary event streams (`application/vnd.amazon.eventstream`), and JSON arrays that are streamed.

`exchange/answer.py` feeds the two parsers with bytes cut at any place; both return SseEvents, as `sse.py`
does. A wrong checksum ends the parsing of a binary stream.

Source: smithy.io amazon-eventstream; botocore/eventstream.py; ai.google.dev streamGenerateContent.
"""

import base64
import binascii
import json
import re
import struct
from typing import Final
from zlib import crc32

import msgspec

from llmtap.protocol.sse import EVENT_BYTES_MAX, SseEvent

_PRELUDE: Final = 12
_LEAST: Final = 16
_HEADERS_MAX: Final = 128 << 10
_FIXED: Final = {0: 0, 1: 0, 2: 1, 3: 2, 4: 4, 5: 8, 8: 8, 9: 16}
_SIZED: Final = (6, 7)


class _Part(msgspec.Struct, gc=False):
    bytes: str | None = None


_decode_part: Final = msgspec.json.Decoder(_Part).decode


def is_message_stream(data: bytes) -> bool:
    if len(data) < _PRELUDE:
        return False
    total, headers, checksum = struct.unpack_from("!III", data)
    return bool(total >= headers + _LEAST and crc32(data[:8]) == checksum)


class MessageStreamParser:
    __slots__ = ("_buffer", "broken", "offset", "skipped")

    def __init__(self) -> None:
        self.offset = 0
        self.skipped = 0
        """Messages whose headers or payload could not be read."""
        self.broken = False
        """A checksum or a length was wrong: nothing more is read."""
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[SseEvent]:
        out: list[SseEvent] = []
        buffer = self._buffer
        buffer += data
        at = 0
        while not self.broken and len(buffer) - at >= _PRELUDE:
            total, headers, checksum = struct.unpack_from("!III", buffer, at)
            if (
                crc32(buffer[at : at + 8]) != checksum
                or headers > _HEADERS_MAX
                or not headers + _LEAST <= total <= EVENT_BYTES_MAX
            ):
                self.broken = True
            elif len(buffer) - at < total:
                break
            else:
                message = bytes(buffer[at : at + total])
                if crc32(message[:-4]) != int.from_bytes(message[-4:], "big"):
                    self.broken = True
                    break
                out.append(self._event(message, headers))
                at += total
        del buffer[:at]
        if self.broken:
            buffer.clear()
        return out

    def close(self) -> list[SseEvent]:
        return []

    def _event(self, message: bytes, headers: int) -> SseEvent:
        start, self.offset = self.offset, self.offset + len(message)
        names = _headers(message[_PRELUDE : _PRELUDE + headers])
        payload = message[_PRELUDE + headers : -4]
        if names is None:
            self.skipped += 1
            return SseEvent(start, self.offset, payload)
        kind = names.get(b":event-type") or None
        failed = names.get(b":exception-type") or names.get(b":error-code")
        if failed:
            return SseEvent(start, self.offset, _failure(failed, names, payload), b"error")
        if kind != b"chunk":
            return SseEvent(start, self.offset, payload or b"{}", kind)
        try:
            part = base64.b64decode(_decode_part(payload).bytes or "", validate=True)
        except (ValueError, binascii.Error):
            self.skipped += 1
            part = payload
        return SseEvent(start, self.offset, part)  # an event of the model's own dialect


def _headers(data: bytes) -> dict[bytes, bytes] | None:
    out: dict[bytes, bytes] = {}
    at = 0
    try:
        while at < len(data):
            size = data[at]
            name, kind = data[at + 1 : at + 1 + size], data[at + 1 + size]
            at += 2 + size
            if kind in _SIZED:
                size = int.from_bytes(data[at : at + 2], "big")
                at += 2
            else:
                size = _FIXED[kind]
            out[name] = data[at : at + size]
            at += size
    except (IndexError, KeyError):
        return None
    return out if at == len(data) else None


def _failure(kind: bytes, names: dict[bytes, bytes], payload: bytes) -> bytes:
    try:
        value = msgspec.json.decode(payload)
    except ValueError:
        value = None
    message = value.get("message") if isinstance(value, dict) else None
    told = (
        message if isinstance(message, str) else names.get(b":error-message", b"").decode("utf-8", "replace")
    )
    return json.dumps({"error": {"type": kind.decode("latin-1"), "message": told}}).encode()


_outside: Final = re.compile(rb'["{}\[\]]').search
_inside: Final = re.compile(rb'["\\]').search


class ArrayParser:
    """Splits a JSON array into its elements (objects), each reported when its last byte came. Any cut of
    the bytes gives the same ones."""

    __slots__ = ("_begun", "_buffer", "_depth", "_text", "offset", "skipped")

    def __init__(self) -> None:
        self.offset = 0
        self.skipped = 0
        self._buffer = bytearray()
        self._begun = -1  # where in the buffer the element begins
        self._depth = 0
        self._text = 0  # 0 outside a string, 1 inside, 2 behind its backslash

    def feed(self, data: bytes) -> list[SseEvent]:
        out: list[SseEvent] = []
        buffer = self._buffer
        at = len(buffer)
        buffer += data
        while at < len(buffer):
            if self._text == 2:
                self._text, at = 1, at + 1
                continue
            found = (_inside if self._text else _outside)(buffer, at)
            if found is None:
                break
            at, mark = found.end(), found[0]
            if mark == b'"':
                self._text ^= 1
            elif mark == b"\\":
                self._text = 2
            elif mark in b"{[":
                self._depth += 1
                if self._depth == 2 and mark == b"{":
                    self._begun = at - 1
            else:
                self._depth -= 1
                if self._depth == 1 and self._begun >= 0:
                    start, self.offset = self.offset, self.offset + at
                    out.append(SseEvent(start, self.offset, bytes(buffer[self._begun : at])))
                    del buffer[:at]
                    at, self._begun = 0, -1
        if len(buffer) > EVENT_BYTES_MAX:
            # Nothing of it is kept; its depth goes on being counted.
            self.skipped += self._begun >= 0
            self.offset += len(buffer)
            buffer.clear()
            self._begun = -1
        return out

    def close(self) -> list[SseEvent]:
        return []
