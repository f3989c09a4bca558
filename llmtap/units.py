"""Parse and format durations and sizes, convert them for msgspec and public JSON, and format shares.

Inside, a duration is an `int` of nanoseconds and a size an `int` of bytes. In config files and on the command
line a duration is a number of seconds or text (`"500ms"`, `"2m"`), a size a number of bytes or text
(`"64KiB"`). In public JSON a duration is in seconds. `Duration` and `Bytes` are the types of such fields;
`read_special` and the functions after it are the hooks with which msgspec converts them.
"""

import re
from typing import Final

NS_PER_S: Final = 1_000_000_000
NEVER: Final = (1 << 63) - 1
"""Time later than any other: the time of an event that is not planned."""
DURATION_S_MAX: Final = 1_000_000_000
"""Longest duration that is accepted, 31 years: as nanoseconds it fits into 63 bits."""
BYTES_MAX: Final = 1 << 63
"""Upper bound (exclusive) of a size that is accepted, 8 EiB: sizes fit into 63 bits."""
_SHOWN_CHARS_MAX: Final = 60
"""Maximum length of a value in an error message."""
SHARE_OF_MIN: Final = 1_000
"""Minimum number of items for a share in percent. Shares of fewer items are shown as counts (`1 of 10`)."""

_DURATION = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(ns|us|µs|ms|s|m|h|d)?\s*")
_NS_PER: Final = {
    "ns": 1,
    "us": 1_000,
    "µs": 1_000,
    "ms": 1_000_000,
    "s": NS_PER_S,
    "m": 60 * NS_PER_S,
    "h": 3_600 * NS_PER_S,
    "d": 86_400 * NS_PER_S,
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMG]i?)?B?\s*", re.IGNORECASE)
_BYTES_PER: Final = {
    "": 1,
    "k": 1_000,
    "m": 1_000_000,
    "g": 1_000_000_000,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
}


class Duration(int):
    """A duration in nanoseconds, as a type for config."""


class Bytes(int):
    """A size in bytes, as a type for config."""


def decode_special(kind: type, value: object) -> object:
    """Decode durations and sizes from another process of llmtap: plain ints in ns or bytes."""
    if kind in (Duration, Bytes) and isinstance(value, int):
        return kind(value)
    raise NotImplementedError(f"cannot decode a {kind.__name__}: expected Duration or Bytes")


def read_special(kind: type, value: object) -> object:
    """Decode durations and sizes from a user's text or number, with or without a unit."""
    if kind in (Duration, Bytes) and isinstance(value, kind):
        return value
    if kind is Duration:
        return Duration(parse_duration_ns(value))
    if kind is Bytes:
        return Bytes(parse_bytes(value))
    raise NotImplementedError(f"cannot decode a {kind.__name__}: expected Duration or Bytes")


def encode_special(value: object) -> object:
    """Encode durations and sizes as plain ints."""
    if isinstance(value, Duration | Bytes):
        return int(value)
    raise NotImplementedError(f"cannot encode a {type(value).__name__}: expected Duration or Bytes")


def encode_seconds(value: object) -> object:
    """Encode durations in seconds, for public JSON."""
    if isinstance(value, Duration):
        return to_seconds(value)
    raise NotImplementedError(f"cannot encode a {type(value).__name__}: expected Duration")


def short_repr(value: object) -> str:
    """Return a value for an error message: its `repr`, shortened."""
    if isinstance(value, str | bytes):
        value = value[: 2 * _SHOWN_CHARS_MAX]
    try:
        text = repr(value)
    except ValueError:  # Python refuses to format an integer of more than 4,300 digits.
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN_CHARS_MAX else f"{text[: _SHOWN_CHARS_MAX - 3]}..."


def parse_duration_ns(value: object) -> int:
    """Return the nanoseconds of a number of seconds or a text with a unit: `0.5`, `"500ms"`, `"2m"`.

    Raises ValueError if the value has another form, is negative, or is above DURATION_S_MAX.
    """
    if isinstance(value, str) and (m := _DURATION.fullmatch(value)):
        ns = float(m[1]) * _NS_PER[m[2] or "s"]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        # Check the bounds before the multiplication, whose result can be too large. This also refuses NaN.
        ns = value * NS_PER_S if 0 <= value <= DURATION_S_MAX else -1
    else:
        raise ValueError(f"expected a duration such as 30, 0.5 or '500ms', got {short_repr(value)}")
    if not 0 <= ns <= DURATION_S_MAX * NS_PER_S:
        raise ValueError(f"expected a duration from 0 to 1e9 s (31 years), got {short_repr(value)}")
    return round(ns)


def parse_bytes(value: object) -> int:
    """Return the bytes of a number or a text with a unit: `65536`, `"64KiB"`, `"1.5 MB"`.

    Raises ValueError if the value has another form, is negative, or is BYTES_MAX or more.
    """
    if isinstance(value, str) and (m := _SIZE.fullmatch(value)):
        n = float(m[1]) * _BYTES_PER[(m[2] or "").lower()]
    elif isinstance(value, int) and not isinstance(value, bool):
        n = value
    else:
        raise ValueError(f"expected a size such as 65536 or '64KiB', got {short_repr(value)}")
    if not 0 <= n < BYTES_MAX:
        raise ValueError(f"expected a size from 0 to under 8 EiB (2^63 bytes), got {short_repr(value)}")
    return round(n)


def to_seconds(ns: int | float) -> float:
    """Return nanoseconds as seconds, the unit of public JSON and metrics."""
    return ns / NS_PER_S


def format_ns(ns: int | float) -> str:
    """Return a duration with three significant digits and a suitable unit (`1.23 ms`)."""
    for unit, scale in (("s", NS_PER_S), ("ms", 1_000_000), ("us", 1_000)):
        # Compare with the rounded value, so that 999.6 us is shown as 1 ms and not as 1000 us.
        if abs(ns) >= 0.9995 * scale:
            shown = f"{ns / scale:.3g}"
            return f"{ns / scale:.0f} {unit}" if "e" in shown else f"{shown} {unit}"
    return f"{ns:.0f} ns"


def format_bytes(n: int | float) -> str:
    """Return a size in powers of 1024 (`6.4 KiB`)."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(n) >= scale:
            return f"{n / scale:.1f} {unit}"
    return f"{n:.0f} B"


def format_share(k: int, n: int) -> str:
    """Return `k` of `n` as counts (`1 of 10`) or, if `n` is at least SHARE_OF_MIN, as a share (`97.5 %`).

    A share has at most two decimals, fewer if `n` is small, and is 0 % or 100 % only if it is exact.
    """
    if n < SHARE_OF_MIN:
        return f"{k:,} of {n:,}"
    places = min(2, len(str(n)) - 3)
    text = f"{100 * k / n:.{places}f}"
    if 0 < k < n and float(text) in (0, 100):
        edge = 10.0**-places
        return f"under {edge:g} %" if k < n / 2 else f"over {100 - edge:g} %"
    return f"{text} %"
