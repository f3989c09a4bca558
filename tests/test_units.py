"""Invariant: a quantity that is written comes back as the same number; what is none is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.units import (
    format_ns,
    format_share,
    parse_bytes,
    parse_duration_ns,
    to_seconds,
)

S = 1_000_000_000


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        (30, 30 * S),
        (0, 0),
        (0.5, S // 2),
        (1e-9, 1),
        ("30", 30 * S),
        ("0.5", S // 2),
        ("500ms", S // 2),
        ("2m", 120 * S),
        ("1h", 3_600 * S),
        ("1d", 86_400 * S),
        ("1.5s", 3 * S // 2),
        ("250us", 250_000),
        ("250µs", 250_000),
        ("7ns", 7),
        (" 10 s ", 10 * S),
        ("0s", 0),
        ("0.1s", S // 10),
        ("4.35s", 4_350_000_000),
    ],
)
def test_a_duration(text: object, ns: int) -> None:
    assert parse_duration_ns(text) == ns


@pytest.mark.parametrize(
    "text",
    [
        "",
        "s",
        "-1s",
        "+1s",
        "1 s s",
        "1e3",
        "1_000",
        "1,5s",
        "1min",
        "1S",
        ".5s",
        "5.",
        "0x10",
        "inf",
        "nan",
        "\N{ARABIC-INDIC DIGIT ONE}s",
        "9" * 400,
        "1000000001",
        "11575d",
        10**400,
        -1,
        -0.5,
        float("inf"),
        float("nan"),
        True,
        False,
        None,
        [1],
        b"1s",
        1e10,
    ],
)
def test_no_duration(text: object) -> None:
    with pytest.raises(ValueError, match="expected a duration"):
        parse_duration_ns(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (65_536, 65_536),
        (0, 0),
        ("0", 0),
        ("65536", 65_536),
        ("64KiB", 65_536),
        ("64 KiB", 65_536),
        ("64kib", 65_536),
        ("64K", 64_000),
        ("64kB", 64_000),
        ("1.5 MB", 1_500_000),
        ("32MiB", 32 << 20),
        ("1GiB", 1 << 30),
        ("2G", 2_000_000_000),
        ("10B", 10),
        (" 7 ", 7),
    ],
)
def test_a_size(text: object, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "B",
        "-1",
        "1e3",
        "1TB",
        "1 K i B",
        "KiB",
        -1,
        1.5,
        True,
        None,
        [],
        b"1",
        "9" * 400,
        1 << 63,
        "8589934592GiB",
    ],
)
def test_no_size(text: object) -> None:
    with pytest.raises(ValueError, match="expected a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 ns"),
        (1, "1 ns"),
        (999, "999 ns"),
        (1_000, "1 us"),
        (1_230, "1.23 us"),
        (1_234_567, "1.23 ms"),
        (12_345_678, "12.3 ms"),
        (123_456_789, "123 ms"),
        (1_500_000_000, "1.5 s"),
        (61 * S, "61 s"),
        (12_345 * S, "12345 s"),
        (-1_500_000, "-1.5 ms"),
    ],
)
def test_a_duration_for_people(ns: int, text: str) -> None:
    assert format_ns(ns) == text


@given(st.integers(0, 10**18))
def test_nanoseconds_written_out_are_read_back(ns: int) -> None:
    assert parse_duration_ns(f"{ns}ns") == pytest.approx(ns, rel=1e-15)
    assert to_seconds(ns) == ns / S


@pytest.mark.parametrize(
    ("k", "n", "text"),
    [
        (1, 10, "1 of 10"),
        (0, 0, "0 of 0"),
        (999, 999, "999 of 999"),
        (998, 1_000, "99.8 %"),
        (1, 3_000, "under 0.1 %"),
        (2_999, 3_000, "over 99.9 %"),
        (0, 1_000, "0.0 %"),
        (1_000, 1_000, "100.0 %"),
        (9_751, 10_000, "97.51 %"),
        (1, 10_000_000, "under 0.01 %"),
        (1_200, 1_000, "120.0 %"),
    ],
)
def test_a_share_is_told_as_counts_or_no_finer_than_one(k: int, n: int, text: str) -> None:
    assert format_share(k, n) == text
