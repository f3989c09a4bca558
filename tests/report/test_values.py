"""Numbers, times and units as reports write them."""

import pytest

from llmtap.report.capture import _duration
from llmtap.report.summary import series_value
from llmtap.report.values import milliseconds, number


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.0, "0"), (0.000012345, "0.0123"), (0.00012345, "0.123"), (0.0012345, "1.23"),
     (0.0099951, "10.0"), (0.012345, "12.3"), (0.12345, "123"), (1.2345, "1,234"), (0.0009996, "1.00"),
     (-0.05, "-50.0")],
)  # fmt: skip
def test_milliseconds_have_three_significant_digits(seconds: float | None, text: str) -> None:
    assert milliseconds(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0"), (0.0, "0"), (12, "12"), (1_234_567, "1,234,567"), (26.0, "26"),
     (0.1722254, "0.1722"), (0.000012345, "0.00001234"), (12_345.6, "12,346"), (99_999.5, "100,000"),
     (-0.05, "-0.05"), (float("inf"), "-"), (float("nan"), "-")],
)  # fmt: skip
def test_numbers_have_four_digits_and_no_powers_of_ten(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(None, "cpus", "-"), (0, "cpus", "0.00"), (0.004, "share", "0.4%"), (0, "requests", "0"),
     (1_234.5, "tokens", "1,234"), (1536, "bytes", "1.5 KiB"), (0.0004, "joules", "0.0004")],
)  # fmt: skip
def test_values(value: float | None, unit: str, text: str) -> None:
    assert series_value(value, unit) == text


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(None, "-"), (0.0, "0 ms"), (0.01234, "12.3 ms"), (1.0, "1 s"), (119.6, "120 s"), (125, "2 min"),
     (3_600 * 3 + 60 * 20, "3 h 20 min"), (86_400 * 14 + 3_600, "14 d 1 h")],
)  # fmt: skip
def test_durations_are_for_people(seconds: float | None, said: str) -> None:
    assert _duration(seconds) == said
