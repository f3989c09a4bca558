"""JSON Lines, one object a line, decoded straight into typed rows.

A block of lines is decoded at once. Where that fails, or where the lines are not one object each, the block
goes line by line: that is where blank lines are left out, fields that the format does not know are counted,
and an error learns its line and field. `style` tells the order of the keys and whether there are spaces after
commas and colons (`json`: `spaced`, as Python writes, or `compact`).

Source: RFC 8259; jsonlines.org.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, BinaryIO, Final, Generic, TypeVar

import msgspec

from llmtap.traces.format import FormatError
from llmtap.traces.text.lines import LINE_BYTES_MAX, LineBlock, LineReader

__all__ = ["BODY_BYTES_MAX", "COUNT_MAX", "Count", "Id", "JsonLines", "first_objects", "told"]

COUNT_MAX: Final = 10**18 - 1
"""What fits 64 bits with room to add."""
BODY_BYTES_MAX: Final = 64 << 20
"""A line that holds a request's body: a long conversation with pictures has 20 MB."""

Count = Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]
Id = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]

T = TypeVar("T", bound=msgspec.Struct)
_WHERE: Final = re.compile(r"(.*?)(?: - at `\$\.?(.*)`)?", re.DOTALL)
_FIRST_OBJECTS: Final = 50
_UNKNOWN_NAMES_MAX: Final = 20
"""More names than that are a file of another format."""


class JsonLines(Generic[T]):
    """The rows of a file, block by block, with the line of each."""

    __slots__ = ("_lenient", "_reader", "_strict", "blank", "style", "unknown")

    def __init__(self, stream: BinaryIO, row: type[T], *, line_bytes_max: int = LINE_BYTES_MAX) -> None:
        self._reader = LineReader(stream, line_bytes_max=line_bytes_max)
        self.style = self._reader.style
        """Shared with the reader of lines, which completes it."""
        self._lenient = msgspec.json.Decoder(row)
        exact = msgspec.defstruct(row.__name__, [], bases=(row,), forbid_unknown_fields=True)
        self._strict: msgspec.json.Decoder[T] = msgspec.json.Decoder(exact)
        self.blank = 0
        """Blank lines, left out."""
        self.unknown: dict[str, int] = {}
        """Fields that the format has no place for, by name."""
        first = self._reader.peek()
        self.style["json"] = "spaced" if b'": ' in first else "compact"
        try:
            first_fields = _object(first)
        except RecursionError as exc:
            raise told(exc, 1) from None
        if first_fields:
            self.style["keys"] = ",".join(first_fields)

    def __iter__(self) -> Iterator[tuple[list[T], Sequence[int]]]:
        for block in self._reader:
            try:
                rows = self._strict.decode_lines(block.data)
            except (ValueError, RecursionError):  # msgspec's errors, and UnicodeDecodeError
                rows = []
            numbers: Sequence[int] = range(block.first, block.first + len(block))
            if len(rows) != len(numbers):
                rows, numbers = self._by_line(block)
            if rows:
                yield rows, numbers

    def _by_line(self, block: LineBlock) -> tuple[list[T], list[int]]:
        rows: list[T] = []
        numbers: list[int] = []
        for number, line in enumerate(block.lines(), block.first):
            if not line.strip():
                self.blank += 1
                continue
            try:
                row = self._strict.decode(line)
            except (ValueError, RecursionError):
                row = self._row(line, number)
            rows.append(row)
            numbers.append(number)
        return rows, numbers

    def _row(self, line: bytes, number: int) -> T:
        try:
            row = self._lenient.decode(line)
        except (ValueError, RecursionError) as exc:
            raise told(exc, number) from None
        known = {f.encode_name for f in msgspec.structs.fields(row)}
        for name in _object(line):
            if name not in known and (name in self.unknown or len(self.unknown) < _UNKNOWN_NAMES_MAX):
                self.unknown[name] = self.unknown.get(name, 0) + 1
        return row

    def notes(self) -> list[str]:
        """What was odd."""
        notes = [f"{n} rows with a field {name!r} that is not kept" for name, n in self.unknown.items()]
        if self.blank:
            notes.append(f"{self.blank} blank lines left out")
        return notes


def told(exc: ValueError | RecursionError, number: int) -> FormatError:
    """A decoder's error with line and field, never with a value: it may be somebody's text."""
    if isinstance(exc, UnicodeDecodeError):
        return FormatError(f"line {number}: not UTF-8")
    if isinstance(exc, RecursionError):
        return FormatError(f"line {number}: nested too deeply")
    match = _WHERE.fullmatch(str(exc))
    assert match is not None
    what, field = match[1].replace("`", ""), match[2]
    if missing := re.fullmatch(r"Object missing required field (.*)", what):
        return FormatError(f"line {number}: {f'{field}.' if field else ''}{missing[1]}: is missing")
    what = what[:1].lower() + what[1:]
    if not isinstance(exc, msgspec.ValidationError):
        what = f"not JSON: {what.removeprefix('jSON is malformed: ')}"
    return FormatError(f"line {number}: {f'{field}: ' if field else ''}{what}")


def first_objects(head: bytes) -> list[dict[str, object]]:
    """The objects in the first lines of a file, none where one of them is something else; for sniffing.

    Raises FormatError for a line that no format could read: it is nested too deeply.
    """
    lines = head.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if len(lines) > 1:
        del lines[-1]  # cut off, or empty
    objects = []
    for number, line in enumerate(lines[:_FIRST_OBJECTS], 1):
        if line.strip():
            try:
                objects.append(_object(line))
            except RecursionError as exc:
                raise told(exc, number) from None
    return objects if all(objects) else []


def _object(line: bytes) -> dict[str, object]:
    try:
        decoded = msgspec.json.decode(line)
    except ValueError:
        return {}
    return decoded if isinstance(decoded, dict) else {}
