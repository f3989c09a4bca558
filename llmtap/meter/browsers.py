"""What a browser sends because some page made it do so: another site's, or one under a name of its own.

The admin port on loopback asks for no token, and every page that its user opens can send requests there. A
page of another origin cannot read the answers, but could act; one whose name was made to point at 127.0.0.1
(DNS rebinding) is of the same origin to the browser and could read, too. Programs send no `Sec-Fetch-Site`.
"""

from ipaddress import ip_address
from typing import Final

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

__all__ = ["refuse_rebinding", "refuse_strangers"]

_FETCH_SITE: Final = "Sec-Fetch-Site"


def refuse_rebinding() -> Middleware:
    """For a port without a token: a browser has to ask by a loopback name, whatever it asks for."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        is_browser = _FETCH_SITE in request.headers or hdrs.ORIGIN in request.headers
        if is_browser and not _is_loopback(request.host):
            raise web.HTTPForbidden(reason="without a token, a browser asks by a loopback address")
        return await handler(request)

    return check


def refuse_strangers(request: web.Request, token: str | None) -> None:
    """For what acts. Raises HTTPForbidden where another origin, another site, or without a token another name
    than a loopback one asks."""
    origin = request.headers.get(hdrs.ORIGIN)
    if origin is not None and origin not in (f"http://{request.host}", f"https://{request.host}"):
        raise web.HTTPForbidden(reason="another origin's pages do not switch experiments")
    if request.headers.get(_FETCH_SITE, "none") not in ("none", "same-origin"):
        raise web.HTTPForbidden(reason="another site's pages do not switch experiments")
    if token is None and not _is_loopback(request.host):
        raise web.HTTPForbidden(reason="without a token, ask by a loopback address")


def _is_loopback(host: str) -> bool:
    name = host[1 : host.find("]")] if host.startswith("[") else host.partition(":")[0]
    if name == "localhost":
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
