"""Numbers with a point, kept exactly: text to whole units and back.

A float would do for seconds since a trace's zero, but not for dates: 1.7e9 s leave it 240 ns. How a file
writes its numbers is a spelling: `short` (`5`, `5.25`), `float` (`5.0`, `5.25`), or the number of digits
after the point (`3`: `5.000`).
"""

import re
from collections.abc import Iterable
from decimal import Decimal
from typing import Final

from llmtap.traces.format import FormatError

__all__ = [
    "NUMBER_STYLE",
    "SECONDS",
    "checked_spelling",
    "decimal_text",
    "seconds_ns",
    "spelling_of",
    "units_of",
]

SECONDS: Final = (r"\d{1,10}(?:\.\d{1,9})?", "seconds, with at most nine digits after the point")
"""Pattern and words of a CSV's times: ten digits before the point are 300 years."""
NUMBER_STYLE: Final = "short (12, 12.5), float (12.0, 12.5), or how many digits behind the point, 0 to 9"
_UNITS_MAX: Final = 1 << 63


def seconds_ns(texts: Iterable[str]) -> list[int]:
    """Nanoseconds, of texts that fit SECONDS."""
    found = []
    for text in texts:
        whole, _, fraction = text.partition(".")
        found.append(int(whole) * 1_000_000_000 + (int(fraction.ljust(9, "0")) if fraction else 0))
    return found


def units_of(number: Decimal, places: int) -> int:
    """`number` in units of 10**-places, rounded to the nearest. Raises ValueError."""
    # The exponent first: 1e999999999 as a whole number would fill the memory.
    if not number.is_finite() or (number and number.adjusted() + places > 19):
        raise ValueError("is no number of this size")
    units = round(number.scaleb(places))
    if abs(units) >= _UNITS_MAX:
        raise ValueError("is no number of this size")
    return units


def decimal_text(units: int, places: int, spelling: str) -> str:
    """`units` of 10**-places as a number, spelled so; digits that a fixed spelling lacks are cut off."""
    whole, fraction = divmod(abs(units), 10**places)
    sign = "-" if units < 0 else ""
    digits = f"{fraction:0{places}}"
    if spelling == "short":
        return f"{sign}{whole}.{digits.rstrip('0')}" if fraction else f"{sign}{whole}"
    if spelling == "float":
        return f"{sign}{whole}.{digits.rstrip('0') or '0'}"
    n = int(spelling)
    return f"{sign}{whole}.{digits[:n].ljust(n, '0')}" if n else f"{sign}{whole}"


def spelling_of(texts: Iterable[str]) -> str:
    """How the numbers are written, by the first some of them."""
    fractions = [text.partition(".")[2] for text in texts if text]
    if not any(fractions):
        return "short"
    lengths = {len(fraction) for fraction in fractions}
    # `5.0` and `5.25` are as Python writes floats; `5.00` is not.
    as_float = all(fraction == (fraction.rstrip("0") or "0") for fraction in fractions)
    if as_float:
        return "float"
    return str(lengths.pop()) if len(lengths) == 1 else "short"


def checked_spelling(spelling: str, key: str) -> str:
    """Raises FormatError for what is none."""
    if spelling in ("short", "float") or re.fullmatch("[0-9]", spelling):
        return spelling
    raise FormatError(f"style {key}={spelling}: expected short, float or a number of digits up to 9")
