"""Detect from the first answers of a load that the target lacks the endpoint or rejects the key.

Such a load measures nothing: every request gets the same error. The first requests of a load or of its
warm-up are the check, so that llmtap sends no request of its own. If each of the first `FIRST` requests
(or of all requests, if there are fewer) is answered with a status of `OPTIONS`, the load stops, and
`endpoint_error` gives the message.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

from llmtap.errors import ConfigError
from llmtap.exchange.exchange import Exchange
from llmtap.exchange.outcome import Outcome

FIRST: Final = 8
"""Number of first requests that must all fail: a single 404 may concern the model of one request."""
NO_ENDPOINT: Final = "the first answers show that the target cannot answer such requests"
"""Value of `load.stopped` for a load that this check stopped."""
_KEY: Final = ("--api-key-env", "it names the variable of the key; or --header 'Authorization: Bearer KEY'")
_PATH_HINT: Final = (
    "does the server have this endpoint, and is the path of --target right? Some servers answer so for an"
    " unknown --model, too"
)
_PATH: Final = ("--endpoint", _PATH_HINT)
OPTIONS: Final[Mapping[int, tuple[str, str]]] = {
    HTTPStatus.UNAUTHORIZED: _KEY,
    HTTPStatus.FORBIDDEN: _KEY,
    HTTPStatus.NOT_FOUND: _PATH,
    HTTPStatus.METHOD_NOT_ALLOWED: _PATH,
    HTTPStatus.NOT_IMPLEMENTED: _PATH,
}
"""Wrong option and hint, by the status that every request of the load would get."""


def is_unanswerable(x: Exchange) -> bool:
    """Return whether the status shows a wrong target or key, and not a fault of this one request.

    A guardrail that refuses a request may answer with the same status: it does not count.
    """
    return x.status in OPTIONS and x.outcome is not Outcome.REFUSED


def endpoint_error(x: Exchange) -> ConfigError:
    """Return the error for a load of which all first requests got an answer such as `x`."""
    assert x.status is not None
    option, hint = OPTIONS[x.status]
    phrase = HTTPStatus(x.status).phrase
    return ConfigError(option, f"POST {x.path} was answered with status {x.status} ({phrase})", hint)
