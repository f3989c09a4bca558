"""Text files of lines: read in blocks of whole lines with their numbers, and written back the way they were.

What has several spellings is a style, in `CaptureInfo.style`: `line_end` (`lf`, `crlf`), `bom` (`utf-8` where
the file begins with a mark) and `end` (`none` where nothing ends the last line). The last is known only once
the file is through: the reader adds it to the style then, and a writer looks it up last.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO, Final

from llmtap.capture.schema import CaptureInfo
from llmtap.traces.format import FormatError, WriteOptions

__all__ = ["LINE_BYTES_MAX", "LINE_STYLES", "LineBlock", "LineReader", "LineWriter", "Style", "clipped"]

LINE_BYTES_MAX: Final = 4 << 20
"""Of a trace without text: a prompt of ten million tokens has 20,000 block ids, some 200 KB."""
_READ_BYTES: Final = 1 << 19
"""Some 10,000 rows of a CSV, 1,000 of a trace with block ids."""
_BOM: Final = b"\xef\xbb\xbf"
_SHOWN_CHARS: Final = 40
LINE_STYLES: Final = {
    "line_end": "lf or crlf",
    "bom": "utf-8: begin with a byte order mark; none",
    "end": "newline or none: what is behind the last line",
}
"""Of every format of lines."""


@dataclass(frozen=True, slots=True)
class LineBlock:
    """Whole lines of a file."""

    first: int
    """Number of the first, from 1."""
    data: bytes
    """With their ends, which the file's last line may lack."""

    def lines(self) -> list[bytes]:
        """Without their ends."""
        lines = self.data.split(b"\n")
        if not lines[-1]:
            del lines[-1]
        return [line[:-1] if line.endswith(b"\r") else line for line in lines]

    def __len__(self) -> int:
        n = self.data.count(b"\n")
        return n if self.data.endswith(b"\n") else n + 1


class LineReader:
    """Blocks of whole lines; `style` tells how the file spells its lines, `end` once it is through."""

    __slots__ = ("_ended", "_line_bytes_max", "_number", "_rest", "_stream", "style")

    def __init__(self, stream: BinaryIO, *, line_bytes_max: int = LINE_BYTES_MAX) -> None:
        self._stream = stream
        self._line_bytes_max = line_bytes_max
        self._number = 1
        self._rest = b""
        self._ended = False
        self.style: dict[str, str] = {"line_end": "lf"}
        while not self._ended and b"\n" not in self._rest:
            self._more()
        if self._rest.startswith(_BOM):
            self._rest = self._rest[len(_BOM) :]
            self.style["bom"] = "utf-8"
        first, newline, _ = self._rest.partition(b"\n")
        if newline and first.endswith(b"\r"):
            self.style["line_end"] = "crlf"

    def peek(self) -> bytes:
        """The first line, not taken."""
        return self._rest.partition(b"\n")[0].rstrip(b"\r")

    def line(self) -> bytes:
        """Takes the next line; empty at the end of the file."""
        while not self._ended and b"\n" not in self._rest:
            self._more()
        line, newline, self._rest = self._rest.partition(b"\n")
        if self._ended and not self._rest:
            self._note_end(bool(newline) or not line)
        self._number += 1
        return line.rstrip(b"\r")

    def __iter__(self) -> Iterator[LineBlock]:
        while True:
            cut = self._rest.rfind(b"\n") + 1
            if cut:
                block = LineBlock(self._number, self._rest[:cut])
                self._rest = self._rest[cut:]
                self._number += len(block)
                if self._ended and not self._rest:
                    self._note_end(True)
                yield block
            elif self._ended:
                break
            else:
                self._more()
        if self._rest:
            self._note_end(False)
            yield LineBlock(self._number, self._rest)
            self._rest = b""

    def _more(self) -> None:
        data = self._stream.read(_READ_BYTES)
        self._ended = not data
        if len(self._rest) > self._line_bytes_max and b"\n" not in self._rest:
            raise FormatError(f"line {self._number}: longer than {self._line_bytes_max >> 20} MiB")
        self._rest += data

    def _note_end(self, ended: bool) -> None:
        if not ended:
            self.style["end"] = "none"


class Style:
    """How to spell: what the caller wishes, else what the source did if it was of the same format."""

    __slots__ = ("_own", "_wished")

    def __init__(self, name: str, info: CaptureInfo, options: WriteOptions) -> None:
        self._wished: Mapping[str, str] = options.style
        # The very mapping: a reader completes it when its last row is through.
        self._own: Mapping[str, str] = info.style if info.source == name else {}

    def get(self, key: str, default: str) -> str:
        return self._wished.get(key, self._own.get(key, default))

    def choice(self, key: str, default: str, allowed: tuple[str, ...]) -> str:
        """One of a closed set. Raises FormatError."""
        value = self.get(key, default)
        if value not in allowed:
            raise FormatError(f"style {key}={value}: expected one of {', '.join(allowed)}")
        return value


class LineWriter:
    """Writes lines, the end of each just before the next: whether the last has one is decided last."""

    __slots__ = ("_any", "_end", "_out", "_style")

    def __init__(self, out: BinaryIO, style: Style) -> None:
        self._out = out
        self._style = style
        self._end = "\r\n" if style.choice("line_end", "lf", ("lf", "crlf")) == "crlf" else "\n"
        self._any = False
        if style.get("bom", "none") == "utf-8":
            out.write(_BOM)

    def add(self, lines: Iterable[str]) -> None:
        text = self._end.join(lines)
        if not text:
            return
        self._out.write((self._end + text if self._any else text).encode())
        self._any = True

    def close(self) -> None:
        if self._any and self._style.choice("end", "newline", ("newline", "none")) == "newline":
            self._out.write(self._end.encode())


def clipped(value: str) -> str:
    """A value for an error: quoted, and not longer than a line."""
    if len(value) <= _SHOWN_CHARS:
        return f'"{value}"'
    return f'"{value[:_SHOWN_CHARS]}..." ({len(value)} characters)'
