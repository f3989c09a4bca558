"""Detect from the first answers of a load that the target lacks the endpoint or rejects the key.

Such a load measures nothing: every request gets the same error. The check reads the answers to the first
requests of the load or of its warm-up, so llmtap sends no additional request. If each of the first `FIRST`
requests (or of all requests, if there are fewer) is answered with a status of `OPTION_BY_STATUS`, the load
stops, and `endpoint_error` returns the error.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

from llmtap.errors import ConfigError
from llmtap.exchange.exchange import Exchange
from llmtap.exchange.outcome import Outcome

FIRST: Final = 8
"""Number of first requests: if all fail, the load stops. One 404 can concern only the model of a request."""
NO_ENDPOINT: Final = "the first answers show that the target cannot answer such requests"
"""Value of `load.stopped` for a load that this check stopped."""
_KEY: Final = ("--api-key-env", "name the variable of a valid key, or use --header with Authorization")
_PATH_HINT: Final = (
    "check whether the server has this endpoint, and the path of --target; some servers also answer with this"
    " status if --model is unknown"
)
_PATH: Final = ("--endpoint", _PATH_HINT)
OPTION_BY_STATUS: Final[Mapping[int, tuple[str, str]]] = {
    HTTPStatus.UNAUTHORIZED: _KEY,
    HTTPStatus.FORBIDDEN: _KEY,
    HTTPStatus.NOT_FOUND: _PATH,
    HTTPStatus.METHOD_NOT_ALLOWED: _PATH,
    HTTPStatus.NOT_IMPLEMENTED: _PATH,
}
"""Option that is probably wrong, and a hint, by the status that each of the first requests got."""


def is_unanswerable(x: Exchange) -> bool:
    """Return whether the status shows a wrong target or key, and not a fault of this one request.

    A guardrail can refuse a request with the same status. Such a refusal does not count.
    """
    return x.status in OPTION_BY_STATUS and x.outcome is not Outcome.REFUSED


def endpoint_error(x: Exchange) -> ConfigError:
    """Return the error for a load whose first requests all failed with answers such as `x`."""
    assert x.status is not None
    option, hint = OPTION_BY_STATUS[x.status]
    phrase = HTTPStatus(x.status).phrase
    return ConfigError(option, f"POST {x.path} was answered with status {x.status} ({phrase})", hint)
