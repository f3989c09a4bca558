"""Whatever names say: nothing in a table moves a cursor, and sorting loses no row."""

from hypothesis import given
from hypothesis import strategies as st

from llmtap.top.table import (
    Cell,
    Row,
    count_cell,
    figure_cell,
    filter_rows,
    ms_cell,
    name_cell,
    sort_rows,
    unique_rows,
    visible_text,
)

TEXT = st.text(max_size=200)


@given(TEXT, st.integers(2, 60))
def test_a_shown_text_is_printable_and_short(text: str, chars: int) -> None:
    result = visible_text(text, chars)
    assert result.isprintable()
    assert 1 <= len(result) <= chars
    if text.isprintable() and 0 < len(text) <= chars:
        assert result == text


def test_what_is_not_printable_is_spelt_out() -> None:
    assert visible_text("a\x1b[31mred\r\n", 40) == "a\\u001b[31mred\\u000d\\u000a"
    assert visible_text("\u202etxt") == "\\u202etxt"
    assert visible_text("x" * 50, 10) == "x" * 9 + "…"
    assert (visible_text(None), visible_text("")) == ("-", "-")


def row(key: str, value: float | str | None) -> Row:
    return Row(key, (Cell(key), Cell(str(value), value)))


def test_rows_are_ordered_and_those_without_a_value_are_last() -> None:
    rows = [row("a", 2.0), row("b", None), row("c", 10.0), row("d", 2.0)]
    assert [r.key for r in sort_rows(rows, 1, largest_first=True)] == ["c", "a", "d", "b"]
    assert [r.key for r in sort_rows(rows, 1, largest_first=False)] == ["a", "d", "c", "b"]
    names = [row("a", "beta"), row("b", "Alpha"), row("c", None)]
    assert [r.key for r in sort_rows(names, 1, largest_first=False)] == ["b", "a", "c"]


@given(st.lists(st.none() | st.floats(allow_nan=False) | TEXT, max_size=20), st.booleans())
def test_ordering_keeps_every_row(values: list[float | str | None], largest_first: bool) -> None:
    rows = [row(str(i), value) for i, value in enumerate(values)]
    assert sorted(r.key for r in sort_rows(rows, 1, largest_first=largest_first)) == sorted(
        r.key for r in rows
    )


def test_a_filter_looks_at_each_cell() -> None:
    rows = [row("Acme", 1.0), row("globex", 17.0)]
    assert [r.key for r in filter_rows(rows, "ACM")] == ["Acme"]
    assert [r.key for r in filter_rows(rows, "7.0")] == ["globex"]
    assert filter_rows(rows, "") == rows
    long = Row("m", (name_cell("x" * 60 + "-Instruct"),))
    assert filter_rows([long], "instruct") == [long]


def test_only_the_first_row_of_a_key_is_kept() -> None:
    rows = [row("a", 1.0), row("b", 2.0), row("a", 3.0)]
    assert unique_rows(rows) == rows[:2]


def test_cells_of_what_is_not_there_are_empty() -> None:
    assert count_cell(None) == ms_cell("x") == figure_cell(None, "p99") == Cell("-")
    assert figure_cell({"p99": 0.2, "marks": ["p99"]}, "p99") == Cell("200*", 0.2)
    assert ms_cell(0.0123) == Cell("12.3", 0.0123)
