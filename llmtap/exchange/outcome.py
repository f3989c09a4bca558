"""How an exchange ended: the closed set. EventClass and TokenSource come from the room below."""

from enum import StrEnum

from llmtap.protocol.delta import EventClass, TokenSource

__all__ = ["EventClass", "Outcome", "TokenSource"]


class Outcome(StrEnum):
    """How an exchange ended, as seen from between client and gateway."""

    COMPLETE = "complete"
    REFUSED = "refused"
    CLIENT_CANCELLED = "client_cancelled"
    UPSTREAM_ERROR = "upstream_error"
    """It answered with a status of 400 or above or an error in its answer, broke its protocol, or could not
    be reached. So a 4xx is one, too: the outcome says that no answer to the question came, and `status`
    who is to blame (RFC 9110 15.5: the request). `rejected` is the relay's own word alone."""
    UPSTREAM_RESET = "upstream_reset"
    UPSTREAM_TIMEOUT = "upstream_timeout"
    TRUNCATED = "truncated"
    REJECTED = "rejected"
    """The relay itself refused it: a malformed or oversized request, or a limit reached."""
    TAP_ERROR = "tap_error"
    """The relay died: what had passed until then is known, and not what came of it."""
