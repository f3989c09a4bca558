"""Lines, JSON Lines, CSV tables and decimal numbers: exact values, and the place of an error."""

import io
from decimal import Decimal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.traces.format import FormatError
from llmtap.traces.text import (
    COUNT,
    SECONDS,
    TEXT,
    CsvColumn,
    TokenCount,
    csv_header,
    decimal_text,
    first_objects,
    json_rows,
    number_ns,
    read_csv,
    read_lines,
    write_csv,
)


def test_lines_are_numbered_as_an_editor_does() -> None:
    data = b"\xef\xbb\xbfa\r\n\n  \n b \nc"
    assert list(read_lines(io.BytesIO(data))) == [(1, b"a"), (4, b"b"), (5, b"c")]
    with pytest.raises(FormatError, match="line 2: is longer than 1 MiB"):
        list(read_lines(io.BytesIO(b"a\n" + b"x" * 3_000_000), 1 << 20))


@pytest.mark.parametrize(
    ("units", "places", "point", "text"),
    [(5_000, 3, False, "5"), (5_250, 3, False, "5.25"), (5_000, 3, True, "5.0"), (250, 3, True, "0.25")],
)
def test_a_number_has_the_digits_that_it_needs(units: int, places: int, point: bool, text: str) -> None:
    assert decimal_text(units, places, point=point) == text


@given(st.integers(0, (1 << 63) - 1), st.booleans())
def test_nanoseconds_survive(ns: int, point: bool) -> None:
    assert number_ns(Decimal(decimal_text(ns, 9, point=point)), 9, 1, "t") == ns


@pytest.mark.parametrize("text", ["NaN", "Infinity", "1e999999999", "9" * 10_000])
def test_a_number_that_fits_no_column_is_refused(text: str) -> None:
    with pytest.raises(FormatError, match="line 1: t: expected a finite number"):
        number_ns(Decimal(text), 9, 1, "t")


class Row(msgspec.Struct):
    n: TokenCount
    text: str | None = None


def test_rows_have_their_lines_and_unknown_fields_are_counted() -> None:
    data = b'{"text": "a", "n": 1}\r\n\r\n{"n": 2, "other": 3, "more": 4}\n{"n": 3, "other": 5}'
    notes: list[str] = []
    found = [(number, row.n) for row, number in json_rows(io.BytesIO(data), Row, notes)]
    assert found == [(1, 1), (3, 2), (4, 3)]
    assert notes == [
        "2 rows with a field 'other' that is not kept",
        "1 rows with a field 'more' that is not kept",
    ]


@pytest.mark.parametrize(
    ("line", "result"),
    [
        (b'{"n": 1, "text": 4111111111111111}', "line 2: text: expected str | null, got int"),
        (b'{"n": 1000000000000000000}', "line 2: n: expected int <= 999999999999999999"),
        (b'{"text": "a"}', "line 2: n: is missing"),
        (b'{"n": 1, "text": "\xff"}', "line 2: is not UTF-8"),
        (b'{"n": 1, ', "line 2: is not valid JSON: input data was truncated"),
        (b'{"n": 1} {"n": 2}', "line 2: is not valid JSON: trailing characters"),
        (b'{"n": 1, "x": ' + b"[" * 100_000, "line 2: has more levels of lists"),
    ],
)
def test_an_error_of_json_names_line_and_field(line: bytes, result: str) -> None:
    with pytest.raises(FormatError) as caught:
        list(json_rows(io.BytesIO(b'{"n": 1}\n' + line + b"\n"), Row, []))
    assert str(caught.value).startswith(result)
    assert "4111" not in str(caught.value)


def test_the_first_objects_are_those_of_whole_lines() -> None:
    assert first_objects(b'{"a": 1}\n\n{"b": 2}\n{"c"') == [{"a": 1}, {"b": 2}]
    assert first_objects(b'{"a": 1}\n[2]\n') == []
    assert first_objects(b"") == []


COLUMNS = (
    CsvColumn("n", COUNT, "n"),
    CsvColumn("text", TEXT, "text", required=False),
    CsvColumn("t", SECONDS, "t", required=False, allows_empty=True),
)
Rows = list[tuple[object, ...]]


def table(data: bytes, notes: list[str] | None = None) -> Rows:
    found: Rows = []
    for n, columns in read_csv(io.BytesIO(data), COLUMNS, [] if notes is None else notes):
        part = list(zip(*(column.to_pylist() for column in columns.values()), strict=True))
        assert len(part) == n
        found += part
    return found


TEXTS = st.none() | st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0"), min_size=1, max_size=4)


@given(st.lists(st.tuples(st.integers(0, 10**18 - 1), TEXTS, st.none() | st.integers(0, (1 << 63) - 1))))
def test_a_table_survives(rows: list[tuple[int, str | None, int | None]]) -> None:
    out = io.BytesIO()
    columns = zip(*rows, strict=True) if rows else ([], [], [])
    write_csv(out, COLUMNS, [dict(zip(("n", "text", "t"), map(list, columns), strict=True))])
    assert table(out.getvalue()) == rows
    assert table(out.getvalue().replace(b"\n", b"\r\n\r\n")) == rows


def test_columns_are_found_by_name_in_blocks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmtap.traces.text._BLOCK_BYTES", 3)
    notes: list[str] = []
    assert table(b'x,text,n\r\n1,a,2\r\n\r\n3,"b,""c",4', notes) == [(2, "a"), (4, 'b,"c')]
    assert notes == ["columns that are not kept: x"]
    with pytest.raises(FormatError, match="line 5: n: expected a whole number"):
        table(b"n\n1\n\n333\nx\n")


@pytest.mark.parametrize(
    ("data", "result"),
    [
        (b"text\n", "line 1: n: the column is missing"),
        (b"n,n\n", "line 1: n: the column occurs twice"),
        (b"n,text\n1,a,b\n", "line 2: expected 2 columns, got 3"),
        (b"n,text\n1,a\n\n\xff,b\n", "line 4: byte 1 is not UTF-8"),
        (b'n,text\n1,"a\nb"\n', "line 2: is not valid CSV: unexpected end of data"),
        ("n,text\n\u0661,a\n".encode(), "line 2: n: expected a whole number"),
        (b"n,text\n 1,a\n", "line 2: n: expected a whole number"),
        (b"n,t\n1,1.0000000001\n", "line 2: t: expected seconds, with at most nine digits after"),
    ],
)
def test_an_error_of_a_table_names_line_and_column(data: bytes, result: str) -> None:
    with pytest.raises(FormatError) as caught:
        table(data)
    assert str(caught.value).startswith(result)


def test_a_header_is_told_by_its_first_bytes() -> None:
    assert csv_header(b'\xef\xbb\xbfa,"b,c"\r\n1,2') == {"a", "b,c"}
    assert csv_header(b"\xff\xfe\n") == set()


def test_a_text_with_line_breaks_stays_on_its_line() -> None:
    out = io.BytesIO()
    write_csv(out, COLUMNS[1:2], [{"text": ['a,"b"\r\nc']}])
    assert out.getvalue() == b'text\n"a,""b""  c"\n'
