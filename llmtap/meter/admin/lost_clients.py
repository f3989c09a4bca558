"""Answer clients of model APIs that send their requests to the admin port instead of the proxy's port.

The answer has status 404 and the form of OpenAI's errors, so that the client's SDK shows its text: what this
port is, and the address of the proxy. It needs no token, since such a client has the key of another server.
"""

from collections.abc import Callable
from typing import Final

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from yarl import URL

from llmtap.exchange.request import endpoint_of
from llmtap.net.listener import ADMIN_PORT, ERROR_FIELD

_WILDCARDS: Final = frozenset({"0.0.0.0", "::"})


def direct_lost_clients(
    relay_url: Callable[[], str | None], can_see_address: Callable[[web.Request], bool]
) -> Middleware:
    """Return a middleware that answers requests for models before other checks, such as that of the token.

    Args:
        relay_url: returns the URL where clients connect; None if it is unknown.
        can_see_address: returns whether the sender of a request is allowed to learn this URL.
    """

    @web.middleware
    async def answer_lost_client(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not is_for_models(request.path):
            return await handler(request)
        address = relay_url() if can_see_address(request) else None
        return _answer(None if address is None else _reachable_url(address, request.url.host))

    return answer_lost_client


def is_for_models(path: str) -> bool:
    """Return whether a path belongs to a model API. The admin port has no such path."""
    return path.startswith("/v1/") or endpoint_of(path) is not None


def _answer(address: str | None) -> web.Response:
    """Return the error for a client that took the admin port for the proxy. `address`: of the proxy."""
    where = "" if address is None else f": {address}"
    message = (
        "this is the admin port of llmtap, which shows measurements. Send requests for models to the address"
        f" of its proxy{where} (relay.listen)"
    )
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": ADMIN_PORT}
    return web.Response(
        status=404,
        body=msgspec.json.encode({"error": error}),
        content_type="application/json",
        headers={ERROR_FIELD: ADMIN_PORT},
    )


def _reachable_url(address: str, host: str | None) -> str:
    """Return the URL of the proxy for a client: instead of 0.0.0.0, it has the host that the client used."""
    url = URL(address)
    return str(url.with_host(host) if host and url.host in _WILDCARDS else url).rstrip("/")
