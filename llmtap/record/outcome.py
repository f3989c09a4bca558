"""How an exchange ended: the closed set. EventClass and TokenSource come from the room below."""

from enum import StrEnum

from llmtap.wire.delta import EventClass, TokenSource

__all__ = ["EventClass", "Outcome", "TokenSource"]


class Outcome(StrEnum):
    """How an exchange ended, as seen from between client and gateway."""

    COMPLETE = "complete"
    REFUSED = "refused"
    CLIENT_CANCELLED = "client_cancelled"
    UPSTREAM_ERROR = "upstream_error"
    UPSTREAM_RESET = "upstream_reset"
    UPSTREAM_TIMEOUT = "upstream_timeout"
    TRUNCATED = "truncated"
    REJECTED = "rejected"
    """The relay itself refused it: a malformed or oversized request, or a limit reached."""
    TAP_ERROR = "tap_error"
    """The relay died: what had passed until then is known, and not what came of it."""
