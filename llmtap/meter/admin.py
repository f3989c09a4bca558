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

from llmtap.meter import kept
from llmtap.meter.kept import BadQuery, Query
from llmtap.meter.tally import Tally
from llmtap.meter.windows import window_name

__all__ = ["admin_app"]

_OPEN_TO_ALL: Final = frozenset({"/healthz", "/readyz"})
"""Probes carry no token, and learn nothing but yes or no."""


def admin_app(tally: Tally, token: str | None = None) -> web.Application:
    """The application behind the admin port; with a token, everything but the probes asks for it."""
    api = _Admin(tally)
    app = web.Application(middlewares=[_guard(token)])
    app.router.add_get("/healthz", api.healthz)
    app.router.add_get("/readyz", api.readyz)
    app.router.add_get("/metrics", api.metrics)
    app.router.add_get("/api/v1/summary", api.summary)
    app.router.add_get("/api/v1/exchanges", api.exchanges)
    return app


class _Admin:
    def __init__(self, tally: Tally) -> None:
        self._tally = tally

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
        """The Summary of `?window=`: the rolling window (the default) or `all` since the start."""
        window = _window(request, window_name(self._tally.options.window))
        work = self._tally.summary(everything=window == "all")
        return _json(await asyncio.to_thread(lambda: msgspec.json.encode(work())))

    async def exchanges(self, request: web.Request) -> web.Response:
        """The newest exchanges that match, newest first."""
        query = Query.parse(_fields(request))
        found, cursor = self._tally.kept.find(query)
        return _json(await asyncio.to_thread(kept.to_json, found, cursor, events=query.events))


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


def _window(request: web.Request, rolling: str) -> str:
    fields = _fields(request)
    window = fields.pop("window", rolling)
    for field in fields:
        raise BadQuery(field, "no such field; known: window")
    if window not in (rolling, "all"):
        raise BadQuery("window", f"expected {rolling} or all, got {window!r}")
    return window


def _fields(request: web.Request) -> dict[str, str]:
    """The query, each field once."""
    fields: dict[str, str] = {}
    for field, value in request.query.items():
        if field in fields:
            raise BadQuery(field, "given more than once")
        fields[field] = value
    return fields


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
