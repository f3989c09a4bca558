"""When a request that came to nothing is sent again: never, unless somebody asked for it.

A load that sends again what failed asks for more than its plan says, and hides that the server failed. So it
is off by default, each time is counted by its reason, and the exchange is that of the last attempt: its
latency counts from that one's submit, its corrected latency from the schedule, all waiting between the
attempts included.

Sent again is what brought no answer: a connection refused, one that was closed or reset before a byte of one,
and status 429 and 503. These two are asked again when their Retry-After says; where that is longer than
`wait_max_ns` they are not asked again, as to come sooner is what they asked us not to. A connection that was
closed without an answer may have been closed by a server that had begun to work: it may then work twice.

Source: RFC 9110 10.2.3 (Retry-After), 15.6.4; RFC 6585 4.
"""

from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Final

from llmtap.units import NS_PER_S

__all__ = ["STATUSES", "retry_after_ns", "wait_ns"]

STATUSES: Final = frozenset({429, 503})
FIRST_NS: Final = 100_000_000
"""Before the first retry, where the server does not say; doubled for each further one."""
_DIGITS_MAX: Final = 9
"""Of a number of seconds: 30 years."""


def retry_after_ns(value: bytes | None, now_wall_ns: int) -> int | None:
    """How long the field asks to wait: seconds, or a date; None where it is absent or says neither."""
    if value is None:
        return None
    text = value.strip(b" \t").decode("latin-1")
    if text.isascii() and text.isdigit():
        return int(text) * NS_PER_S if len(text) <= _DIGITS_MAX else None
    try:
        date = parsedate_to_datetime(text)
    except (ValueError, TypeError, OverflowError):  # numbers without end, of a year or of a zone
        return None
    if date.tzinfo is None:  # "-0000": of no known zone, and HTTP's dates are UTC
        date = date.replace(tzinfo=UTC)
    return max(0, int(date.timestamp()) * NS_PER_S - now_wall_ns)


def wait_ns(retries: int, asked_ns: int | None, wait_max_ns: int) -> int | None:
    """How long to wait before one more, after so many `retries`; None: don't.

    `asked_ns` is what the server asked for, if it did.
    """
    if asked_ns is not None:
        return asked_ns if asked_ns <= wait_max_ns else None
    return min(FIRST_NS << min(retries, 32), wait_max_ns)
