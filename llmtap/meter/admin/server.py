"""Admin port of the meter: HTTP server with `/metrics`, health checks, the JSON API, and access control.

`admin_app` makes the aiohttp application (`tls.py` has its TLS context). The data come from `views.py` and
the pipeline; the live feed adds its own route (`live_feed.py`). The dashboard's files are in `static/`;
`llmtap.report` has the script that draws charts. Work that takes long (merging windows, rendering metrics,
writing many exchanges) runs in a worker thread on a copy, so that neither frames nor `/healthz` wait for it.
"""

import asyncio
import gzip
import hmac
import io
import re
import ssl
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Final

import msgspec
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from llmtap.export.prometheus.exposition import format_name
from llmtap.meter.admin.connections import SLICE_BYTES, AdminConnections, AdminRunner, SharedWork
from llmtap.meter.admin.live_feed import LiveFeed
from llmtap.meter.admin.lost_clients import direct_lost_clients
from llmtap.meter.admin.openapi import add_openapi_route
from llmtap.meter.admin.views import PAIRS_DEFAULT, PAIRS_MAX, histograms_of, metrics_of, summary_of
from llmtap.meter.experiments import Experiments
from llmtap.meter.options import WINDOWS, is_loopback
from llmtap.meter.pipeline import exchanges as recent_api
from llmtap.meter.pipeline.exchanges import BadQuery, Query, read_fields, read_number
from llmtap.meter.pipeline.history import STEPS
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from llmtap.meter.pipeline.windows import BY, window_name
from llmtap.metrics.catalogue import Answers, Surface, shown_on
from llmtap.units import short_repr

_name_and_port = re.compile(r"(?:\[([^\[\]]*)\]|([^\[\]:]*))(?::[0-9]*)?").fullmatch


def refuse_rebinding() -> Middleware:
    """Return a middleware that refuses requests for host names other than loopback, against DNS rebinding.

    A request without `Host` passes: it is HTTP/1.0, which no browser sends.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        host = request.headers.get(hdrs.HOST)
        if host is not None and not _is_loopback(host):
            raise web.HTTPForbidden(
                reason="meter.admin_token is not set, so this port accepts only a loopback host name"
                " (localhost, 127.0.0.1, [::1]): use one of these names, or set meter.admin_token"
            )
        return await handler(request)

    return check


def refuse_cross_site() -> Middleware:
    """Return a middleware that refuses requests that a browser marks as sent by a page of another origin.

    Requests of programs have no such mark, and pass. The dashboard's page passes if a link opens it, but not
    if another page shows it in a frame.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if _is_cross_origin(request) and not _opens_dashboard(request):
            raise web.HTTPForbidden(
                reason="a page of another origin sent this request: only the dashboard's"
                " own page may use this API"
            )
        return await handler(request)

    return check


def _is_cross_origin(request: web.Request) -> bool:
    origin, host = request.headers.get(hdrs.ORIGIN), request.headers.get(hdrs.HOST)
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        return True
    # `same-site` is another origin: another port or subdomain. `none` is a typed address, or a bookmark.
    return request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")


def _opens_dashboard(request: web.Request) -> bool:
    """Return whether a user opens the page, for example by a link, and no script requests it."""
    return (
        request.method == hdrs.METH_GET
        and request.path == "/"
        and hdrs.ORIGIN not in request.headers
        and request.headers.get("Sec-Fetch-Mode") == "navigate"
        and request.headers.get("Sec-Fetch-Dest") == "document"
    )


def _is_loopback(host: str) -> bool:
    parts = _name_and_port(host)
    if parts is None:
        return False
    return is_loopback((parts[1] or parts[2] or "").lower())


BODY_BYTES_MAX: Final = 4_096
BODY_S: Final = 20.0
"""Time limit of reading the body of a request."""

FLUSH_S: Final = 30.0
"""Time limit of a flush, so that an unavailable store cannot block a request permanently."""
FLUSH_STEP_S: Final = 0.02
_FORM_TYPES: Final = frozenset({"text/plain", "application/x-www-form-urlencoded", "multipart/form-data"})
"""Content types that a page of another origin can send without a preflight request, so they are refused."""

_encode = msgspec.json.Encoder(order="deterministic").encode


class _SwitchRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of the request that switches the experiment."""

    enabled: bool


def add_experiment_routes(app: web.Application, experiments: Experiments, answer_work: SharedWork) -> None:
    """Add the routes that show the experiment (GET) and switch it on or off (POST).

    The middlewares of `admin_app` have already checked the origin of each request, and its token; if no token
    is set, its `Host` must name loopback.
    """

    async def results(request: web.Request) -> web.Response:
        def prepare_work() -> Callable[[], bytes]:
            work = experiments.results()
            return lambda: _encode(work())

        return web.Response(
            body=await answer_work.get("experiment", prepare_work), content_type="application/json"
        )

    async def switch(request: web.Request) -> web.Response:
        if request.content_type != "application/json":
            kind = request.content_type
            raise web.HTTPUnsupportedMediaType(reason=f"expected Content-Type: application/json, got {kind}")
        if (n_bytes := request.content_length or 0) > BODY_BYTES_MAX:
            problem = f"the body has {n_bytes} bytes; the limit is {BODY_BYTES_MAX}"
            raise web.HTTPRequestEntityTooLarge(BODY_BYTES_MAX, n_bytes, reason=problem)
        try:
            async with asyncio.timeout(BODY_S):
                body = await request.read()
            wanted = msgspec.json.decode(body, type=_SwitchRequest)
        except TimeoutError:
            raise web.HTTPRequestTimeout(reason=f"the body must arrive within {BODY_S:g} s") from None
        except msgspec.MsgspecError as exc:
            raise BadQuery(
                "enabled", f'expected {{"enabled": true}} or {{"enabled": false}}: {exc}'
            ) from None
        if experiments.experiment is None:
            raise web.HTTPConflict(reason="no experiment is configured: set [experiment]")
        if wanted.enabled and experiments.state == "ended":
            raise web.HTTPConflict(reason="the experiment has ended: set experiment.until to a later time")
        experiments.switch(wanted.enabled)
        return await results(request)

    app.router.add_get("/api/v1/experiment", results)
    app.router.add_post("/api/v1/experiment", switch)


INDEX: Final = "index.html"
_TYPE_BY_SUFFIX: Final = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_PAGE_FILES: Final = {part.name: part for part in (files("llmtap.meter.admin") / "static").iterdir()} | {
    name: files("llmtap.report") / name for name in ("plot.css", "plot.js")
}
METRICS_MODULE: Final = "metrics.js"
"""Name of the JavaScript module that lists the metrics of an exchange; it is made from the catalogue."""
ASSETS: Final = frozenset({METRICS_MODULE, *_PAGE_FILES} - {INDEX})
_PAGE_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    hdrs.CACHE_CONTROL: "no-cache",
    hdrs.VARY: hdrs.ACCEPT_ENCODING,
}


def accepts_gzip(request: web.Request) -> bool:
    """Return whether the client accepts gzip; a weight of 0 means no (RFC 9110 12.5.3)."""
    for item in request.headers.get(hdrs.ACCEPT_ENCODING, "").lower().split(","):
        coding, _, weight = item.partition(";")
        if coding.strip() in ("gzip", "x-gzip"):
            return not re.fullmatch(r"\s*q=0(\.0*)?\s*", weight)
    return False


def _unzip_slices(zipped: bytes) -> Iterator[bytes]:
    """Yield a decompressed body in slices, so that a slow client keeps only compressed data in memory."""
    with gzip.GzipFile(fileobj=io.BytesIO(zipped)) as file:
        while part := file.read(SLICE_BYTES):
            yield part


async def _answer_page_file(request: web.Request) -> web.Response:
    """Answer with the dashboard (`/`) or one of its files. All parts of the page come from this port."""
    name = request.match_info.get("name", INDEX)
    if "name" in request.match_info and name not in ASSETS:
        raise web.HTTPNotFound(reason=f"the dashboard has no file {short_repr(name)}: open / instead")
    etag, zipped = await asyncio.to_thread(_read_page_file, name)
    # RFC 9110 8.8.1: the tag is weak, since it is the same with and without gzip.
    headers = {**_PAGE_HEADERS, hdrs.ETAG: f'W/"{etag}"'}
    if any(tag.value in (etag, "*") for tag in request.if_none_match or ()):
        return web.Response(status=304, headers=headers)
    if accepts_gzip(request):
        headers[hdrs.CONTENT_ENCODING], body = "gzip", zipped
    else:
        body = await asyncio.to_thread(gzip.decompress, zipped)
    kind = _TYPE_BY_SUFFIX[Path(name).suffix]
    return web.Response(body=body, headers=headers, content_type=kind, charset="utf-8")


@cache
def _read_page_file(name: str) -> tuple[str, bytes]:
    """Return the ETag and the compressed content of a file of the page."""
    content = metrics_module() if name == METRICS_MODULE else _PAGE_FILES[name].read_bytes()
    # With mtime=0, equal files give equal bytes.
    return sha256(content).hexdigest()[:32], gzip.compress(content, 6, mtime=0)


def metrics_module() -> bytes:
    """Return the dashboard's JavaScript module that lists the figures of an exchange."""
    rows = [
        {
            "name": one.name,
            "title": one.title,
            "unit": one.unit.value,
            "streams": one.answers is Answers.STREAMS,
        }
        for one in shown_on(Surface.FACTS)
    ]
    return b"export const METRICS = " + msgspec.json.encode(rows) + b";\n"


_PUBLIC_PATHS: Final = frozenset({"/healthz", "/readyz", "/", *(f"/assets/{name}" for name in ASSETS)})
"""Paths that need no token: probes answer only yes or no, and the dashboard's files have no data. A path must
be equal to one of these, so that other spellings of a path do not match."""

_HEADERS: Final = {
    "Content-Security-Policy": "frame-ancestors 'none'",
    "X-Frame-Options": "DENY",  # for browsers that do not know frame-ancestors
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Header fields of each answer, unless it sets them itself. With them, no other origin can embed it."""


CONNECTIONS: Final = web.AppKey("connections", AdminConnections)


def admin_app(pipeline: ExchangePipeline, token: str | None = None) -> web.Application:
    """Return the application. With a `token`, all paths except probes and dashboard files require it."""
    api = _Admin(pipeline)
    names = [refuse_rebinding()] if token is None else []
    lost = direct_lost_clients(
        pipeline.relays.listen_url,
        lambda request: token is None and _is_loopback(request.headers.get(hdrs.HOST, "")),
    )
    app = web.Application(
        middlewares=[api.connections.middleware, lost, _token_guard(token), *names, refuse_cross_site()]
    )
    app[CONNECTIONS] = api.connections
    app.on_response_prepare.append(_add_headers)
    app.router.add_get("/healthz", api.healthz)
    app.router.add_get("/readyz", api.readyz)
    app.router.add_get("/metrics", api.metrics)
    app.router.add_get("/api/v1/summary", api.summary)
    app.router.add_get("/api/v1/histograms", api.histograms)
    app.router.add_get("/api/v1/history", api.history)
    app.router.add_get("/api/v1/exchanges", api.exchanges)
    app.router.add_get("/api/v1/pairs", api.pairs)
    app.router.add_post("/api/v1/capture/flush", api.flush)
    LiveFeed(pipeline).add_to(app)
    pipeline.streams.add_to(app)
    pipeline.usual_phases.add_to(app)
    pipeline.silences.add_to(app)
    app.router.add_get("/", _answer_page_file)
    app.router.add_get("/assets/{name}", _answer_page_file)
    add_openapi_route(app, token=token is not None)
    add_experiment_routes(app, pipeline.experiments, api.answer_work)
    return app


def admin_runner(app: web.Application, tls: ssl.SSLContext | None = None) -> AdminRunner:
    """Return the runner of an application of `admin_app`, for `AdminSite`s."""
    return AdminRunner(app, app[CONNECTIONS], tls)


class _Admin:
    """Handlers of the routes."""

    def __init__(self, pipeline: ExchangePipeline) -> None:
        self._pipeline = pipeline
        self.connections = AdminConnections(pipeline.admin_limits)
        self._scrape_work = SharedWork()
        """Shares the text of `/metrics` between scrapes at the same time."""
        self.answer_work = SharedWork()
        """Shares JSON answers between equal requests at the same time."""

    async def healthz(self, request: web.Request) -> web.Response:
        """Answer that the process runs."""
        return web.Response(text="ok\n")

    async def readyz(self, request: web.Request) -> web.Response:
        """Answer whether a relay accepts requests."""
        if self._pipeline.relays.has_ready_relay(self._pipeline.clock.mono_ns()):
            return web.Response(text="ready\n")
        reason = "no relay reports to the meter, or the upstream that it needs accepts no connection\n"
        return web.Response(status=503, text=reason)

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        """Answer with all metrics. Keep only the compressed text, because 2,000 series have 66 MB of text."""
        accept = request.headers.get(hdrs.ACCEPT, "")

        def prepare_work() -> Callable[[], tuple[bytes, int, str]]:
            frozen = metrics_of(self._pipeline)

            def render() -> tuple[bytes, int, str]:
                body, content_type = frozen.render(accept)
                return gzip.compress(body, 1), len(body), content_type

            return render

        await self._pipeline.silences.refresh()
        native = self._pipeline.options.native_histograms
        zipped, size, content_type = await self._scrape_work.get(
            format_name(accept, native=native), prepare_work
        )
        headers: dict[str, str] = {hdrs.CONTENT_TYPE: content_type, hdrs.VARY: "Accept, Accept-Encoding"}
        if accepts_gzip(request):
            headers[hdrs.CONTENT_ENCODING] = "gzip"
            return web.Response(body=zipped, headers=headers)
        return await self.connections.send(request, headers, zipped, _unzip_slices(zipped), size)

    async def summary(self, request: web.Request) -> web.Response:
        """Answer with the Summary of `?window=`, split by `?by=`. `?certain=1` omits uncertain exchanges."""
        window, certain, by = self._read_window(request, "by")
        labels = _series_labels(",".join(BY) if by is None else by)

        def prepare_work() -> Callable[[], bytes]:
            work = summary_of(self._pipeline, window, labels, certain=certain)
            return lambda: msgspec.json.encode(work())

        return _json_response(await self.answer_work.get(("summary", window, labels, certain), prepare_work))

    async def histograms(self, request: web.Request) -> web.Response:
        """Answer with HdrHistograms of latencies by series, in `?window=`; `?certain=1` as in `summary`."""
        window, certain, _ = self._read_window(request)

        def prepare_work() -> Callable[[], bytes]:
            work = histograms_of(self._pipeline, window, certain=certain)
            return lambda: msgspec.json.encode(work())

        return _json_response(await self.answer_work.get(("histograms", window, certain), prepare_work))

    def _read_window(self, request: web.Request, more: str | None = None) -> tuple[str, bool, str | None]:
        """Return the query parameters `window`, `certain` and `more` (None if absent). Raises BadQuery."""
        fields = read_fields(request.query.items())
        window = _window_name(fields.pop("window", self._pipeline.options.window_name))
        certain = recent_api.read_flag("certain", fields.pop("certain", "0"))
        other = None if more is None else fields.pop(more, None)
        for field in fields:
            raise BadQuery(
                field, f"is an unknown field; known fields: window, {f'{more}, ' if more else ''}certain"
            )
        return window, certain, other

    async def exchanges(self, request: web.Request) -> web.Response:
        """Answer with the newest exchanges that match the filters of the query."""
        fields = read_fields(request.query.items())
        key = ("exchanges", *sorted(fields.items()))
        query = Query.parse(fields)
        recent = self._pipeline.recent_exchanges

        def prepare_work() -> Callable[[], bytes]:
            matches = recent.find(query)
            return lambda: recent.to_json(matches, query)

        return _json_response(await self.answer_work.get(key, prepare_work))

    async def history(self, request: web.Request) -> web.Response:
        """Answer with the key figures of all complete steps of the length `?step=`."""
        fields = read_fields(request.query.items())
        step = fields.pop("step", next(iter(STEPS)))
        if fields:
            raise BadQuery(next(iter(fields)), "is an unknown field; known field: step")
        if step not in STEPS:
            raise BadQuery("step", f"expected {' or '.join(STEPS)}, got {short_repr(step)}")

        def prepare_work() -> Callable[[], bytes]:
            work = self._pipeline.history.to_dict(step)
            return lambda: msgspec.json.encode(work())

        return _json_response(await self.answer_work.get(("history", step), prepare_work))

    async def pairs(self, request: web.Request) -> web.Response:
        """Answer with the figures of pairs on both sides of a gateway, and the newest `?limit=` pairs."""
        fields = read_fields(request.query.items())
        limit = read_number("limit", fields.pop("limit", str(PAIRS_DEFAULT)), PAIRS_MAX)
        if fields:
            raise BadQuery(next(iter(fields)), "is an unknown field; known field: limit")
        pairs = self._pipeline.pairs
        if pairs is None:
            raise web.HTTPNotFound(reason="no exchanges are paired: set pair.upstream")

        def prepare_work() -> Callable[[], bytes]:
            work = pairs.summarise(limit)
            return lambda: msgspec.json.encode(work())

        return _json_response(await self.answer_work.get(("pairs", limit), prepare_work))

    async def flush(self, request: web.Request) -> web.Response:
        """Request that files are made of the exchanges captured so far, and wait at most FLUSH_S for them."""
        if request.content_type in _FORM_TYPES:
            raise web.HTTPUnsupportedMediaType(
                reason=f"expected a POST without a body, got content of type {request.content_type}"
            )
        recorder = self._pipeline.recorder
        if recorder is None:
            raise web.HTTPConflict(reason="no capture is configured: set capture.to")
        recorder.flush()
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                while recorder.is_flushing:
                    await asyncio.sleep(FLUSH_STEP_S)
        return _json_response(msgspec.json.encode(recorder.state().to_dict()))


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    # Replace aiohttp's `Server` field, which shows the versions of Python and aiohttp without a token.
    response.headers[hdrs.SERVER] = "llmtap"
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)


def _token_guard(token: str | None) -> Middleware:
    """Return a middleware that checks the token and answers errors as JSON."""
    expected = None if token is None else f"Bearer {token}".encode()

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if expected is not None and request.path not in _PUBLIC_PATHS:
            received = request.headers.get(hdrs.AUTHORIZATION, "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(received, expected):
                return _problem_response(
                    401, "this admin port requires `Authorization: Bearer TOKEN`", authenticate=True
                )
        try:
            return await handler(request)
        except BadQuery as error:
            return _problem_response(400, str(error), field=error.field)
        except web.HTTPException as error:
            return _problem_response(error.status, error.reason, allow=error.headers.get(hdrs.ALLOW))

    return guard


def _window_name(text: str) -> str:
    name = window_name(text)
    if name is None:
        raise BadQuery("window", f"expected {', '.join(WINDOWS)} or all, got {short_repr(text)}")
    return name


def _series_labels(text: str) -> tuple[str, ...]:
    labels = tuple(label for label in text.split(",") if label not in ("", "none"))
    for label in labels:
        if label not in BY:
            raise BadQuery("by", f"expected none, or labels of {', '.join(BY)}, got {label!r}")
    return labels


def _json_response(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _problem_response(
    status: int,
    message: str,
    *,
    field: str | None = None,
    authenticate: bool = False,
    allow: str | None = None,
) -> web.Response:
    headers = {}
    if authenticate:
        headers[hdrs.WWW_AUTHENTICATE] = "Bearer"
    if allow is not None:
        headers[hdrs.ALLOW] = allow
    body = msgspec.json.encode({"error": {"message": message, "field": field}})
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)
