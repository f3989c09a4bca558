"""Plain CSV with a header: columns found by name, digits kept as they are written.

The common case, a file without quotes, is cut by one regular expression a block: it checks every field and
costs a microsecond or two a row. Otherwise the block goes line by line, which is where blank
lines are left out, quotes taken off, and where an error learns its line and column.

Source: RFC 4180; a line break inside quotes, which it allows, is refused: no trace has one.
"""

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Final

from llmtap.traces.format import FormatError
from llmtap.traces.text.lines import LineBlock, LineReader, clipped

__all__ = ["COUNT", "TEXT", "CsvBlock", "CsvColumn", "CsvReader", "csv_header", "quoted"]


@dataclass(frozen=True, slots=True)
class CsvColumn:
    """A column that a format knows."""

    name: str
    pattern: str
    """Of a field, as a regular expression without groups."""
    wanted: str
    """In words, for errors."""
    required: bool = True


COUNT: Final = (r"\d{1,18}", "a whole number of at most 18 digits")
"""Pattern and words of a count: what fits 64 bits with room to add."""
TEXT: Final = (r'[^,"\r\n]*', "text without line breaks")
_OTHER: Final = r'[^,"\r\n]*'


@dataclass(frozen=True, slots=True)
class CsvBlock:
    """Some rows, by column."""

    rows: int
    columns: dict[str, Sequence[str]]
    """Of the known columns those that the file has."""
    numbers: Sequence[int]
    """Line of each row, for errors."""


class CsvReader:
    """The rows of a file as blocks of columns. Raises FormatError, the missing columns' at once."""

    __slots__ = ("_by_name", "_order", "_pattern", "_reader", "_text", "blank", "header", "style", "unknown")

    def __init__(self, stream: BinaryIO, columns: Sequence[CsvColumn]) -> None:
        self._reader = LineReader(stream)
        self.style = self._reader.style
        """Shared with the reader of lines, which completes it."""
        self.header = _fields(_decoded(self._reader.line(), 1), 1)
        self.style["columns"] = ",".join(self.header)
        self._by_name = {c.name: c for c in columns}
        self.unknown = [name for name in self.header if name not in self._by_name]
        self.blank = 0
        """Blank lines, left out."""
        for c in columns:
            if self.header.count(c.name) > 1:
                raise FormatError(f"line 1: {c.name}: is there twice")
            if c.required and c.name not in self.header:
                raise FormatError(f"line 1: {c.name}: the column is missing")
        self._order = [name for name in self.header if name in self._by_name]
        fields = [
            f"({self._by_name[name].pattern})" if name in self._by_name else _OTHER for name in self.header
        ]
        self._pattern = re.compile(rf"^{','.join(fields)}\r?$", re.ASCII | re.MULTILINE)
        # A text may be quoted, and then hold more than the pattern of a bare field allows.
        self._text = {c.name for c in columns if c.pattern == TEXT[0]}

    def __iter__(self) -> Iterator[CsvBlock]:
        for block in self._reader:
            if found := self._at_once(block) or self._by_line(block):
                yield found

    def _at_once(self, block: LineBlock) -> CsvBlock | None:
        try:
            rows = self._pattern.findall(block.data.decode())
        except UnicodeDecodeError:
            return None
        if len(rows) != len(block):
            return None
        columns = [rows] if len(self._order) == 1 else list(zip(*rows, strict=True))
        numbers = range(block.first, block.first + len(rows))
        return CsvBlock(len(rows), dict(zip(self._order, columns, strict=True)), numbers)

    def _by_line(self, block: LineBlock) -> CsvBlock | None:
        numbers: list[int] = []
        columns: dict[str, list[str]] = {name: [] for name in self._order}
        for number, line in enumerate(block.lines(), block.first):
            if not line.strip():
                self.blank += 1
                continue
            fields = _fields(_decoded(line, number), number)
            if len(fields) != len(self.header):
                raise FormatError(f"line {number}: expected {len(self.header)} columns, got {len(fields)}")
            numbers.append(number)
            for name, value in zip(self.header, fields, strict=True):
                if (column := self._by_name.get(name)) is None:
                    continue
                if name not in self._text and not re.fullmatch(column.pattern, value, re.ASCII):
                    raise FormatError(
                        f"line {number}: {name}: expected {column.wanted}, got {clipped(value)}"
                    )
                columns[name].append(value)
        return CsvBlock(len(numbers), {**columns}, numbers) if numbers else None

    def notes(self) -> list[str]:
        """What was odd."""
        notes = []
        if self.unknown:
            notes.append(f"columns that are not kept: {', '.join(self.unknown)}")
        if self.blank:
            notes.append(f"{self.blank} blank lines left out")
        return notes


def csv_header(head: bytes) -> list[str]:
    """The column names in the first bytes of a file; for sniffing."""
    line = head.removeprefix(b"\xef\xbb\xbf").partition(b"\n")[0]
    try:
        return _fields(line.decode().rstrip("\r"), 1)
    except (UnicodeDecodeError, FormatError):
        return []


def quoted(value: str) -> str:
    """A text as a field, in quotes where it needs them; line breaks, which nobody expects, become spaces."""
    value = value.replace("\r", " ").replace("\n", " ")
    return '"' + value.replace('"', '""') + '"' if '"' in value or "," in value else value


def _decoded(line: bytes, number: int) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as exc:
        raise FormatError(f"line {number}: byte {exc.start + 1} is not UTF-8") from None


def _fields(line: str, number: int) -> list[str]:
    if '"' not in line:
        return line.split(",")
    try:
        fields: list[str] = next(csv.reader([line], strict=True))
    except csv.Error as exc:
        raise FormatError(f"line {number}: {exc}") from None
    return fields
