"""The admin port: metrics, health, and the API, as JSON with stable names.

Whatever takes long (merging windows, rendering metrics, writing many exchanges) runs in a worker thread
on a copy, so that neither the frames nor `/healthz` wait for it.
"""

import asyncio
import gzip
import hmac
from typing import Final

import msgspec
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from llmtap.meter.admin.browsers import refuse_cross_site, refuse_rebinding
from llmtap.meter.admin.experiment_api import add_experiment_routes
from llmtap.meter.admin.openapi import add_openapi_route
from llmtap.meter.admin.page import PATHS, add_dashboard
from llmtap.meter.options import WINDOWS
from llmtap.meter.pipeline import recent_exchanges as kept
from llmtap.meter.pipeline.live_feed import LiveFeed
from llmtap.meter.pipeline.recent_exchanges import BadQuery, Query, read_fields
from llmtap.meter.pipeline.tally import Tally
from llmtap.meter.pipeline.windows import BY, BY_DEFAULT, window_name
from llmtap.units import shown

__all__ = ["admin_app"]

_OPEN_TO_ALL: Final = frozenset({"/healthz", "/readyz"}) | PATHS
"""Probes carry no token, and learn nothing but yes or no. The dashboard's page and its parts hold no data: it
asks for the token itself. Whole paths, so that no spelling of another path can pass for one of these."""

_HEADERS: Final = {
    "Content-Security-Policy": "frame-ancestors 'none'",
    "X-Frame-Options": "DENY",  # for browsers that do not know frame-ancestors
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Of every answer that sets no others: pages of other origins cannot embed it."""


def admin_app(tally: Tally, token: str | None = None) -> web.Application:
    """The application behind the admin port; with a token, everything but probes and page asks for it."""
    api = _Admin(tally)
    names = [refuse_rebinding()] if token is None else []
    app = web.Application(middlewares=[_guard(token), *names, refuse_cross_site()])
    app.on_response_prepare.append(_add_headers)
    app.router.add_get("/healthz", api.healthz)
    app.router.add_get("/readyz", api.readyz)
    app.router.add_get("/metrics", api.metrics)
    app.router.add_get("/api/v1/summary", api.summary)
    app.router.add_get("/api/v1/exchanges", api.exchanges)
    LiveFeed(tally).add_to(app)
    tally.streams.add_to(app)
    add_dashboard(app)
    add_openapi_route(app, token=token is not None)
    add_experiment_routes(app, tally.experiments)
    return app


class _Admin:
    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._exchanges_lock = asyncio.Lock()

    async def healthz(self, request: web.Request) -> web.Response:
        """The process runs and its loop turns."""
        return web.Response(text="ok\n")

    async def readyz(self, request: web.Request) -> web.Response:
        """A relay is connected and spoke lately: what passes now is measured."""
        if self._tally.relays.ready(self._tally.clock.mono_ns()):
            return web.Response(text="ready\n")
        return web.Response(status=503, text="no relay speaks to the meter\n")

    async def metrics(self, request: web.Request) -> web.Response:
        """The Prometheus exposition, as text or OpenMetrics, whichever is asked for."""
        frozen = self._tally.freeze()
        accept = request.headers.get(hdrs.ACCEPT, "")
        zipped = "gzip" in request.headers.get(hdrs.ACCEPT_ENCODING, "")

        def render() -> tuple[bytes, str]:
            body, content_type = frozen.render(accept)
            return (gzip.compress(body, 1) if zipped else body), content_type

        body, content_type = await asyncio.to_thread(render)
        headers = {hdrs.CONTENT_TYPE: content_type, hdrs.VARY: "Accept, Accept-Encoding"}
        if zipped:
            headers[hdrs.CONTENT_ENCODING] = "gzip"
        return web.Response(body=body, headers=headers)

    async def summary(self, request: web.Request) -> web.Response:
        """The Summary of `?window=`, split by `?by=`; `?certain=1`: of what was stamped well enough."""
        fields = read_fields(request.query.items())
        window = _window(fields.pop("window", self._tally.options.window_name))
        by = _by(fields.pop("by", ",".join(BY_DEFAULT)))
        certain = kept.read_flag("certain", fields.pop("certain", "0"))
        for field in fields:
            raise BadQuery(field, "no such field; known: window, by, certain")
        work = self._tally.summary(window, by, certain=certain)
        return _json(await asyncio.to_thread(lambda: msgspec.json.encode(work())))

    async def exchanges(self, request: web.Request) -> web.Response:
        """The newest exchanges that match, newest first."""
        query = Query.parse(read_fields(request.query.items()))
        async with self._exchanges_lock:  # one answer is encoded at a time
            found = self._tally.kept.find(query)
            return _json(await asyncio.to_thread(self._tally.kept.to_json, found, query))


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    # In place of the versions of Python and aiohttp, which nobody without a token is to learn.
    response.headers[hdrs.SERVER] = "llmtap"
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)


def _guard(token: str | None) -> Middleware:
    """Asks for the token, and turns what went wrong into JSON."""
    expected = None if token is None else f"Bearer {token}".encode()

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if expected is not None and request.path not in _OPEN_TO_ALL:
            given = request.headers.get(hdrs.AUTHORIZATION, "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(given, expected):
                return _problem(
                    401, "this admin port asks for `Authorization: Bearer TOKEN`", authenticate=True
                )
        try:
            return await handler(request)
        except BadQuery as error:
            return _problem(400, str(error), field=error.field)
        except web.HTTPException as error:
            return _problem(error.status, error.reason, allow=error.headers.get(hdrs.ALLOW))

    return guard


def _window(text: str) -> str:
    name = window_name(text)
    if name is None:
        raise BadQuery("window", f"expected {', '.join(WINDOWS)} or all, got {shown(text)}")
    return name


def _by(text: str) -> tuple[str, ...]:
    labels = tuple(label for label in text.split(",") if label not in ("", "none"))
    for label in labels:
        if label not in BY:
            raise BadQuery("by", f"expected some of {', '.join(BY)}, or none, got {label!r}")
    return labels


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _problem(
    status: int,
    message: str,
    *,
    field: str | None = None,
    authenticate: bool = False,
    allow: str | None = None,
) -> web.Response:
    """An error as JSON; `field` names the query parameter that is to blame."""
    headers = {}
    if authenticate:
        headers[hdrs.WWW_AUTHENTICATE] = "Bearer"
    if allow is not None:
        headers[hdrs.ALLOW] = allow
    body = msgspec.json.encode({"error": {"message": message, "field": field}})
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)
