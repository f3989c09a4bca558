"""What a browser sends because some page made it do so: another site's, or one under a name of its own.

The admin port on loopback asks for no token, and every page that its user opens can send requests there. A
page of another origin cannot read the answers, but could act; one whose name was made to point at 127.0.0.1
(DNS rebinding) is of the same origin to the browser and could read, too. Nothing tells such a read from a
program's (over plain http Chromium sends neither `Origin` nor `Sec-Fetch-Site` with it) but the name that it
asks by.
"""

import re
from ipaddress import ip_address

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

__all__ = ["refuse_rebinding", "refuse_strangers"]

_name_and_port = re.compile(r"(?:\[([^\[\]]*)\]|([^\[\]:]*))(?::[0-9]*)?").fullmatch


def refuse_rebinding() -> Middleware:
    """For a port without a token, which is on loopback: whoever asks does so by a loopback name, whatever it
    asks for. A request without `Host` is of HTTP/1.0, which no browser speaks."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        host = request.headers.get(hdrs.HOST)
        if host is not None and not _is_loopback(host):
            raise web.HTTPForbidden(
                reason="without a token this port answers only who asks by a loopback name (localhost,"
                " 127.0.0.1, [::1]): ask by one, or set meter.admin_token"
            )
        return await handler(request)

    return check


def refuse_strangers(request: web.Request) -> None:
    """For what acts. Raises HTTPForbidden where another origin's or another site's page asks."""
    origin = request.headers.get(hdrs.ORIGIN)
    if origin is not None and origin not in (f"http://{request.host}", f"https://{request.host}"):
        raise web.HTTPForbidden(reason="another origin's pages do not switch experiments")
    if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        raise web.HTTPForbidden(reason="another site's pages do not switch experiments")


def _is_loopback(host: str) -> bool:
    """Of the text of a `Host` field: a name or an address, with a port or without."""
    parts = _name_and_port(host)
    if parts is None:
        return False
    name = (parts[1] or parts[2] or "").lower()
    if name == "localhost":
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
