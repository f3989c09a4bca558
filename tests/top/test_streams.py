"""Every token of a timeline is in the line that is drawn of it."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from llmtap.top.streams import LEVELS, SILENT, sparkline, streams_table
from llmtap.top.table import Table
from llmtap.top.view import Shown
from tests.support.fake_admin import a_stream


def test_each_part_of_the_time_has_a_level_by_the_largest() -> None:
    timeline = [[0.0, 1], [0.1, 1], [1.5, 8], [3.9, None]]
    assert sparkline(timeline, 4, 0.0, 4.0) == "▂█·▁"
    assert sparkline(timeline, 2, 2.0, 4.0) == "·█"
    assert sparkline([[4.0, 1]], 4, 0.0, 4.0) == "···█"


def test_nothing_to_draw_is_nothing_or_silence() -> None:
    assert sparkline([], 3, 0.0, 1.0) == SILENT * 3
    assert sparkline([[1, 1]], 3, 1.0, 1.0) == ""
    assert sparkline([None, [], ["x", 1], [0.5, "y"]], 2, 0.0, 1.0) == "·█"


@given(
    st.lists(st.tuples(st.floats(0, 100), st.integers(0, 50)).map(list), max_size=30),
    st.integers(1, 40),
    st.floats(0, 100),
    st.floats(0.1, 100),
)
def test_a_line_has_its_width_and_known_letters(
    timeline: list[Any], cells: int, since: float, length: float
) -> None:
    line = sparkline(timeline, cells, since, since + length)
    assert len(line) == cells
    assert set(line) <= set(LEVELS + SILENT)
    inside = any(since <= t <= since + length and n for t, n in timeline)
    assert inside == (line != SILENT * cells)


def table(told: dict[str, Any] | None, width: int = 80) -> Table:
    return streams_table(Shown({}, {"streams": told}), width)


def test_a_stream_is_a_line_with_what_is_known_of_it() -> None:
    silent = a_stream(2, ttft=None, since_last=None, model=None, timeline=[], age=0.5)
    told = {"count": 7, "window": 10.0, "streams": [a_stream(), silent]}
    first, second = table(told).rows
    assert [cell.text for cell in first.cells[:8]] == [
        "acme", "tiny", "2", "100", "3", "3", "50.0", "█····█·····█",
    ]  # fmt: skip
    assert [cell.text for cell in second.cells[:8]] == ["acme", "-", "0.5", "-", "3", "3", "-", "·" * 12]
    assert (
        table(told).notes[0].startswith("7 streams under way, the 2 newest below; tokens over the last 10 s")
    )


def test_a_long_stream_is_drawn_from_the_windows_begin() -> None:
    old = a_stream(age=100.0, timeline=[[91.0, 1], [99.0, 1]])
    [row] = table({"count": 1, "window": 10.0, "streams": [old]}).rows
    assert row.cells[7].text == "·█········█·"


def test_an_older_tap_is_told_of() -> None:
    assert "older" in table(None).notes[0]
    assert table(None).rows == []
