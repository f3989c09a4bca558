"""The elements of one JSON array, cut out of a file of any length as its bytes come.

Only brackets and strings are looked at: each element is handed on as it lies there, and whoever decodes it
finds what is wrong inside. What is held is one element, at most ELEMENT_BYTES_MAX of it.

Source: RFC 8259 (grammar; 8.1 on the byte order mark).
"""

import re
from collections.abc import Iterator
from typing import BinaryIO, Final

import msgspec

__all__ = ["ELEMENT_BYTES_MAX", "ElementSplitter", "ElementsError", "read_elements"]

ELEMENT_BYTES_MAX: Final = 256 << 20
"""A conversation of a book's length has 2 MB, a HAR entry of a long agent's context with pictures 50 MB."""
_READ_BYTES: Final = 1 << 18
_BOM: Final = b"\xef\xbb\xbf"

# Possessive, so that no input makes them try twice.
_PLAIN: Final = re.compile(rb'[^"{}\[\]]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^"{}\[\]]*+)*+', re.DOTALL)
"""Whole strings, and all that is no bracket."""
_SHALLOW: Final = re.compile(rb'[^"{}\[\],:]*+')
_IN_STRING: Final = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)


class ElementsError(ValueError):
    """The bytes are no such array. Says where: `byte 17`, `element 3`."""


class ElementSplitter:
    """Cuts the array at `path` (keys of nested objects; none: the file is the array) into its elements."""

    __slots__ = (
        "_buffer", "_depth", "_done", "_element_start", "_fresh", "_in_string", "_key", "_matched", "_offset",
        "_path", "_pos", "_seeking", "_string_start", "_text", "count",
    )  # fmt: skip

    def __init__(self, path: tuple[str, ...] = ()) -> None:
        self.count = 0
        """Elements handed out."""
        self._path = path
        self._buffer = bytearray()
        self._offset = 0  # of the buffer's first byte in the file
        self._pos = 0  # what lies before it in the buffer was looked at
        self._in_string = False
        self._depth = 0  # open brackets; inside the array, those of the element
        self._seeking = True
        self._done = False
        self._fresh = True  # nothing of the file was looked at yet
        self._element_start = 0
        # While the array is looked for: how much of the path is open around us, and the last key read there.
        self._matched = 0
        self._string_start = 0
        self._text: bytes | None = None
        self._key: str | None = None

    def feed(self, data: bytes) -> list[bytes]:
        """The elements that these bytes complete. Raises ElementsError."""
        self._buffer += data
        if self._fresh:
            if len(self._buffer) < len(_BOM) and _BOM.startswith(self._buffer):
                return []
            self._fresh = False
            if self._buffer.startswith(_BOM):
                self._drop(len(_BOM))
        out: list[bytes] = []
        if self._seeking:
            self._seek()
        if not self._seeking and not self._done:
            self._cut(out)
        self._forget()
        self.count += len(out)
        return out

    def close(self) -> None:
        """The file is over. Raises ElementsError where the array is not."""
        if self._seeking:
            raise ElementsError(f"there is no JSON array{self._place()}")
        if not self._done:
            raise ElementsError(f"the file ends inside element {self.count}: it was cut off")

    # The way to the array.

    def _seek(self) -> None:
        buffer = self._buffer
        while self._pos < len(buffer):
            if self._in_string:
                if not self._end_string():
                    return
                here = self._depth == self._matched + 1
                self._text = bytes(buffer[self._string_start : self._pos]) if here else None
                continue
            at = self._pos
            match = _SHALLOW.match(buffer, at)
            assert match is not None
            end = match.end()
            if self._depth == 0 and buffer[at:end].strip():
                raise ElementsError(f"byte {self._offset + at} begins no JSON {self._wanted()}")
            if end == len(buffer):
                self._pos = end
                return
            self._pos = end + 1
            match buffer[end]:
                case 0x22:  # "
                    self._in_string, self._string_start = True, end
                case 0x3A:  # :
                    if self._depth == self._matched + 1:
                        self._key = _key_of(self._text)
                case 0x2C:  # ,
                    self._key = None if self._depth == self._matched + 1 else self._key
                case 0x5B if self._is_next(len(self._path)):  # [
                    self._seeking = False
                    self._depth, self._element_start = 0, self._pos
                    return
                case 0x7B if self._depth == 0 or self._is_next(self._matched + 1):  # {
                    if self._depth > 0:
                        self._matched += 1
                    elif not self._path:
                        raise ElementsError("the file is a JSON object where an array was expected")
                    self._depth += 1
                    self._key = None
                case 0x7B | 0x5B:
                    self._depth += 1
                case _:
                    if self._depth == self._matched + 1 and self._matched > 0:
                        self._matched -= 1
                        self._key = None
                    self._depth -= 1
                    if self._depth <= 0:
                        raise ElementsError(f"there is no JSON array{self._place()}")

    def _is_next(self, keys: int) -> bool:
        """Whether a value that begins here is the one at the first so many keys of the path."""
        if not self._path:
            return self._depth == 0
        here = self._depth == self._matched + 1 and self._matched + 1 == keys <= len(self._path)
        return here and self._key == self._path[self._matched]

    def _wanted(self) -> str:
        return "object" if self._path else "array"

    def _place(self) -> str:
        return f" at {'.'.join(self._path)}" if self._path else ""

    # Inside the array.

    def _cut(self, out: list[bytes]) -> None:
        buffer = self._buffer
        while self._pos < len(buffer):
            if self._in_string:
                if not self._end_string():
                    return
                continue
            # Between elements commas count, inside an element only its brackets.
            match = (_PLAIN if self._depth else _SHALLOW).match(buffer, self._pos)
            assert match is not None
            end = match.end()
            if end == len(buffer):
                self._pos = end
                return
            self._pos = end + 1
            match buffer[end]:
                case 0x22:
                    self._in_string = True
                case 0x7B | 0x5B:
                    self._depth += 1
                case 0x2C if self._depth == 0:
                    self._hand_out(end, out)
                case 0x7D | 0x5D if self._depth > 0:
                    self._depth -= 1
                case 0x5D:
                    if self.count + len(out) or buffer[self._element_start : end].strip():
                        self._hand_out(end, out)
                    self._done = True
                    return
                case 0x7D:
                    raise ElementsError(f"byte {self._offset + end} closes an object that was not opened")

    def _hand_out(self, end: int, out: list[bytes]) -> None:
        element = bytes(self._buffer[self._element_start : end]).strip()
        if not element:
            raise ElementsError(f"byte {self._offset + end}: element {self.count + len(out)} is empty")
        out.append(element)
        self._element_start = end + 1

    # The buffer.

    def _end_string(self) -> bool:
        """Whether the string that we are in ends in the buffer; goes as far as it can."""
        match = _IN_STRING.match(self._buffer, self._pos)
        assert match is not None
        self._pos = match.end()
        if self._pos == len(self._buffer) or self._buffer[self._pos] != 0x22:
            return False  # or the second half of an escape is still to come
        self._pos += 1
        self._in_string = False
        return True

    def _forget(self) -> None:
        """Drops what is not needed any more."""
        if self._done:
            rest = self._buffer[self._pos :]
            if not self._path and rest.strip():
                raise ElementsError(f"byte {self._offset + self._pos}: there is more behind the array")
            keep = len(self._buffer)
            self._pos = keep
        elif not self._seeking:
            keep = self._element_start
        else:
            # A string may be a key; inside a value that is not ours it can go at once.
            named = self._in_string and self._depth == self._matched + 1
            keep = self._string_start if named else self._pos
        self._drop(keep)
        if len(self._buffer) > ELEMENT_BYTES_MAX:
            raise ElementsError(
                f"element {self.count} at byte {self._offset} is longer than {ELEMENT_BYTES_MAX >> 20} MiB"
            )

    def _drop(self, n: int) -> None:
        del self._buffer[:n]
        self._offset += n
        self._pos = max(0, self._pos - n)
        self._string_start -= n
        self._element_start -= n


def read_elements(file: BinaryIO, path: tuple[str, ...] = ()) -> Iterator[bytes]:
    """The elements of the array at `path` in `file`, one by one. Raises ElementsError."""
    splitter = ElementSplitter(path)
    while data := file.read(_READ_BYTES):
        yield from splitter.feed(data)
    splitter.close()


def _key_of(text: bytes | None) -> str | None:
    try:
        return None if text is None else msgspec.json.decode(text, type=str)
    except ValueError:
        return None
