"""Outcomes of an exchange (`Outcome`, a closed set), and whether an HTTP status is an error of the client."""

from typing import Final

from llmtap.protocol.delta import EventClass, Reading, ReadingLimit, TokenSource, Word

__all__ = [
    "FAILED",
    "OWN_FAULTS",
    "UPSTREAM_FAILED",
    "EventClass",
    "Outcome",
    "Reading",
    "ReadingLimit",
    "TokenSource",
    "is_client_error",
]


class Outcome(Word):
    """End of an exchange, as seen from a place between client and gateway."""

    COMPLETE = "complete"
    REFUSED = "refused"
    CLIENT_CANCELLED = "client_cancelled"
    CLIENT_ERROR = "client_error"
    """The upstream refused the request as wrong, with a status for which `is_client_error` is true, or the
    relay refused it as malformed."""
    UPSTREAM_ERROR = "upstream_error"
    """The upstream answered with another status of 400 or above or with an error in its answer, broke its
    protocol, or could not be reached."""
    UPSTREAM_RESET = "upstream_reset"
    UPSTREAM_TIMEOUT = "upstream_timeout"
    TRUNCATED = "truncated"
    REJECTED = "rejected"
    """The relay refused the request because one of the relay's limits was reached."""
    TAP_ERROR = "tap_error"
    """The relay died, so the rest of the exchange is unknown."""


UPSTREAM_FAILED: Final = frozenset(
    {Outcome.UPSTREAM_ERROR, Outcome.UPSTREAM_RESET, Outcome.UPSTREAM_TIMEOUT, Outcome.TRUNCATED}
)
"""Outcomes that mean a failure of the upstream."""
OWN_FAULTS: Final = frozenset({Outcome.REJECTED, Outcome.TAP_ERROR})
"""Outcomes that mean a failure of llmtap."""
FAILED: Final = UPSTREAM_FAILED | OWN_FAULTS
"""Outcomes that are a failure of the upstream or of llmtap. A refusal, a disconnect of the client and an
error of the client are not failures."""
_NOT_SERVED: Final = frozenset({408, 425, 429})
"""Statuses from 400 to 499 that a correct request can get, so they are no errors of the client."""


def is_client_error(status: int | None) -> bool:
    """Return whether the status means that the request was wrong (RFC 9110 15.5): 4xx except 408, 425,
    429."""
    return status is not None and 400 <= status < 500 and status not in _NOT_SERVED
