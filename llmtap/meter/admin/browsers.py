"""Refusal of requests that a browser sends for a page of another origin.

The admin port on loopback asks for no token, and every page that its user opens can send requests to it:
images, frames, forms, `fetch`, `EventSource`. The page cannot read the answers, but it could switch an
experiment, make the meter write large answers, and use up the subscriptions of `/api/v1/live`.

A page under a name that was made to point at 127.0.0.1 (DNS rebinding) has the origin of the admin port and
could read. Over plain http Chromium marks its requests with neither `Origin` nor `Sec-Fetch-Site`; only the
name in `Host` differs from a program's request.

`Referer` is not used: a page can leave it out (`referrerpolicy="no-referrer"`). So a browser without
`Sec-Fetch-Site` (Safari before 16.4) is refused only where it sends `Origin`; a token stops the rest.

Source: W3C Fetch Metadata Request Headers; Fetch standard, "Origin header".
"""

import re
from ipaddress import ip_address

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

__all__ = ["refuse_cross_site", "refuse_rebinding"]

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


def refuse_cross_site() -> Middleware:
    """Refuse what a browser marks as sent for a page of another origin, whatever the method and the path.

    The dashboard's page alone may be opened by a link on any page, but not be shown in a frame. Programs
    send no mark and pass.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if _is_cross_origin(request) and not _opens_dashboard(request):
            raise web.HTTPForbidden(
                reason="the browser sent this request for a page of another origin: only the dashboard's"
                " own page may use this API"
            )
        return await handler(request)

    return check


def _is_cross_origin(request: web.Request) -> bool:
    origin, host = request.headers.get(hdrs.ORIGIN), request.headers.get(hdrs.HOST)
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        return True
    # `same-site` is another port or subdomain: another origin. `none`: typed, or a bookmark.
    return request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")


def _opens_dashboard(request: web.Request) -> bool:
    return (
        request.method == hdrs.METH_GET
        and request.path == "/"
        and hdrs.ORIGIN not in request.headers
        and request.headers.get("Sec-Fetch-Mode") == "navigate"
        and request.headers.get("Sec-Fetch-Dest") == "document"
    )


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
