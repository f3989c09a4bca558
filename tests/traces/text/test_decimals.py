"""Text to whole units and back, without a float on the way."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.traces.format import FormatError
from llmtap.traces.text.decimals import checked_spelling, decimal_text, seconds_ns, spelling_of, units_of


@pytest.mark.parametrize(
    ("units", "places", "spelling", "text"),
    [
        (5_000, 3, "short", "5"),
        (5_250, 3, "short", "5.25"),
        (5_000, 3, "float", "5.0"),
        (5_250, 3, "float", "5.25"),
        (5_250, 3, "1", "5.2"),
        (5_250, 3, "6", "5.250000"),
        (5_999, 3, "0", "5"),
        (-250, 3, "float", "-0.25"),
        (7, 0, "short", "7"),
    ],
)
def test_each_spelling(units: int, places: int, spelling: str, text: str) -> None:
    assert decimal_text(units, places, spelling) == text


@given(st.integers(0, 10**19 - 1), st.sampled_from(["short", "float", "9"]))
def test_nanoseconds_survive_every_spelling_that_has_room(ns: int, spelling: str) -> None:
    text = decimal_text(ns, 9, spelling)
    assert seconds_ns([text]) == [ns]
    if ns < 1 << 63:
        assert units_of(Decimal(text), 9) == ns


@pytest.mark.parametrize(
    ("texts", "spelling"),
    [
        (["5", "45"], "short"),
        (["19440110.0", "19440161.0"], "float"),
        (["0.0", "0.25"], "float"),
        (["0.000", "1.250"], "3"),
        (["5", "", "5.25"], "short"),
        (["5.00", "5.2"], "short"),
        (["0.5", ""], "float"),
        ([], "short"),
    ],
)
def test_a_spelling_is_told_by_the_first_numbers(texts: list[str], spelling: str) -> None:
    assert spelling_of(texts) == spelling


@pytest.mark.parametrize("text", ["NaN", "Infinity", "1e30", "1e999999999", "9" * 10_000])
def test_what_fits_no_column_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no number of this size"):
        units_of(Decimal(text), 9)


def test_what_is_no_spelling_is_refused() -> None:
    with pytest.raises(FormatError, match="style timestamp=12"):
        checked_spelling("12", "timestamp")
