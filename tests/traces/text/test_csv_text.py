"""What is cut at once and what goes line by line is the same; quotes are for texts."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.traces.format import FormatError
from llmtap.traces.text.csv_text import COUNT, TEXT, CsvColumn, CsvReader, csv_header, quoted

COLUMNS = (CsvColumn("n", *COUNT), CsvColumn("text", *TEXT, required=False))


def table(data: str) -> list[tuple[int, str, str]]:
    """Line, number and text of each row."""
    return [
        row
        for block in CsvReader(io.BytesIO(data.encode()), COLUMNS)
        for row in zip(block.numbers, block.columns["n"], block.columns["text"], strict=True)
    ]


@given(st.lists(st.tuples(st.integers(0, 10**18 - 1), st.text("ab ,\"é'", max_size=4)), max_size=20))
def test_rows_with_and_without_quotes_are_read_alike(rows: list[tuple[int, str]]) -> None:
    data = "".join(f"{n},{quoted(text)}\n" for n, text in rows)
    bare = [(i, str(n), text) for i, (n, text) in enumerate(rows, 2)]
    assert table("n,text\n" + data) == bare
    # A blank line makes the whole block go line by line.
    assert table("n,text\n\n" + data) == [(i + 1, n, text) for i, n, text in bare]


def test_columns_are_found_by_name_and_others_left() -> None:
    reader = CsvReader(io.BytesIO(b"x,text,n\r\n1,a,2\r\n\r\n3,b,4"), COLUMNS)
    (first, second) = [block.columns for block in reader]
    assert (first, second) == ({"text": ["a"], "n": ["2"]}, {"text": ("b",), "n": ("4",)})
    assert reader.notes() == ["columns that are not kept: x", "1 blank lines left out"]
    assert reader.style == {"line_end": "crlf", "columns": "x,text,n", "end": "none"}


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"text\n", "line 1: n: the column is missing"),
        (b"n,n\n", "line 1: n: is there twice"),
        (b"n,text\n1,a,b\n", "line 2: expected 2 columns, got 3"),
        (b"n,text\n1,a\n\n\xff,b\n", "line 4: byte 1 is not UTF-8"),
        (b'n,text\n1,"a\nb"\n', "line 2: unexpected end of data"),
        ("n,text\n\u0661,a\n".encode(), "line 2: n: expected a whole number"),
        (b"n,text\n+1,a\n", "line 2: n: expected a whole number"),
        (b"n,text\n 1,a\n", "line 2: n: expected a whole number"),
        (b'n,text\n"1,a\n', "line 2: unexpected end of data"),
        (b"", "line 1: n: the column is missing"),
    ],
)
def test_an_error_names_line_and_column(data: bytes, told: str) -> None:
    with pytest.raises(FormatError) as caught:
        list(CsvReader(io.BytesIO(data), COLUMNS))
    assert str(caught.value).startswith(told)


def test_a_header_is_told_by_its_first_bytes() -> None:
    assert csv_header(b'\xef\xbb\xbfa,"b,c"\r\n1,2') == ["a", "b,c"]
    assert csv_header(b"\xff\xfe\n") == []


def test_a_text_with_line_breaks_stays_on_its_line() -> None:
    assert quoted('a,"b"\r\nc') == '"a,""b""  c"'
