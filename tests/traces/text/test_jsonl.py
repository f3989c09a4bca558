"""Whole blocks and single lines decode alike; an error has its line and field and no value."""

import io

import msgspec
import pytest

from llmtap.traces.format import FormatError
from llmtap.traces.text.jsonl import Count, JsonLines, first_objects


class Row(msgspec.Struct):
    n: Count
    text: str | None = None


def test_rows_have_their_lines_and_what_is_odd_is_counted() -> None:
    data = b'{"text": "a", "n": 1}\r\n\r\n{"n": 2, "other": 3, "more": 4}\n{"n": 3, "other": 5}'
    lines = JsonLines(io.BytesIO(data), Row)
    found = [(number, row.n) for rows, numbers in lines for row, number in zip(rows, numbers, strict=True)]
    assert found == [(1, 1), (3, 2), (4, 3)]
    assert lines.notes() == [
        "2 rows with a field 'other' that is not kept",
        "1 rows with a field 'more' that is not kept",
        "1 blank lines left out",
    ]
    assert lines.style == {"line_end": "crlf", "json": "spaced", "keys": "text,n", "end": "none"}


def test_two_objects_on_a_line_are_not_two_rows() -> None:
    with pytest.raises(FormatError, match=r"line 1: not JSON: trailing characters"):
        list(JsonLines(io.BytesIO(b'{"n": 1} {"n": 2}\n'), Row))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b'{"n": 1, "text": 4111111111111111}', "line 2: text: expected str | null, got int"),
        (b'{"n": 1000000000000000000}', "line 2: n: expected int <= 999999999999999999"),
        (b'{"n": true}', "line 2: n: expected int, got bool"),
        (b'{"text": "a"}', "line 2: n: is missing"),
        (b'{"n": 1, "text": "\xff"}', "line 2: not UTF-8"),
        (b'{"n": 1, ', "line 2: not JSON: input data was truncated"),
        (b"n", "line 2: not JSON: "),
    ],
)
def test_an_error_names_line_and_field(line: bytes, told: str) -> None:
    with pytest.raises(FormatError) as caught:
        list(JsonLines(io.BytesIO(b'{"n": 1}\n' + line + b"\n"), Row))
    assert str(caught.value).startswith(told)
    assert "4111" not in str(caught.value)


def test_the_first_objects_are_those_of_whole_lines() -> None:
    assert first_objects(b'{"a": 1}\n\n{"b": 2}\n{"c"') == [{"a": 1}, {"b": 2}]
    assert first_objects(b'{"a": 1}') == [{"a": 1}]
    assert first_objects(b'{"a": 1}\n[2]\n') == []
    assert first_objects(b"") == []
