"""OpenAPI description of the admin API (`/api/v1/openapi.json`): table of routes, and the document.

`add_openapi_route` serves the document. `server.py`, `live_feed.py`, `pipeline/exchanges.py` and
`pipeline/silences.py` handle the described requests. The schemas of answers are in `schemas.py`. Source:
OpenAPI 3.1.0, whose schemas are JSON Schema 2020-12.
"""

from collections.abc import Callable
from typing import Any, Final

import msgspec
from aiohttp import web

from llmtap.exchange.exchange import BACK, FRONT
from llmtap.exchange.outcome import Outcome, Reading
from llmtap.meter.admin.schemas import COUNT, FLAG, SCHEMAS, TEXT, Schema, reference
from llmtap.meter.admin.views import PAIRS_DEFAULT, PAIRS_MAX
from llmtap.meter.options import WINDOWS
from llmtap.meter.pipeline import exchanges as recent_api
from llmtap.meter.pipeline import silences as silences_api
from llmtap.meter.pipeline.history import STEPS
from llmtap.meter.pipeline.windows import BY
from llmtap.version import __version__

JSON: Final = "application/json"


class Parameter(msgspec.Struct, frozen=True):
    """A query or path parameter of a route."""

    name: str
    text: str
    schema: Schema = msgspec.field(default_factory=lambda: TEXT)


class ApiRoute(msgspec.Struct, frozen=True, kw_only=True):
    """Declaration of a route of the admin API."""

    path: str
    name: str
    text: str
    answers: dict[str, Schema]
    """By content type: schema of the response with status 200."""
    method: str = "get"
    query_parameters: tuple[Parameter, ...] = ()
    path_parameters: tuple[Parameter, ...] = ()
    body: Schema | None = None
    errors: dict[int, str] = {}
    """By status: description of the response. Without 200 (see `answers`) and 401, which all routes share."""
    is_public: bool = False
    """Whether the route is public, as health checks are: it needs no token, and its errors are not JSON."""


_EVENTS: Final = Parameter("events", "1: with the list of events", FLAG)
_FILTER_SCHEMAS: Final[dict[Callable[[str, str], object], Schema]] = {
    recent_api.read_text: TEXT,
    recent_api.read_count: COUNT,
    recent_api.read_flag: FLAG,
    recent_api.read_outcome: {"type": "string", "enum": [o.value for o in Outcome]},
    recent_api.read_side: {"type": "string", "enum": [FRONT, BACK]},
    recent_api.read_reading: {"type": "string", "enum": [r.value for r in Reading]},
}
_FILTERS: Final = tuple(
    Parameter(name, f"only exchanges with this {name}", _FILTER_SCHEMAS[read])
    for name, read in recent_api.FILTERS.items()
)
_CERTAIN: Final = Parameter("certain", "1: without exchanges flagged `uncertain`", FLAG)
_REFUSED: Final = Parameter(
    "refused", "1: only requests that a model or a guardrail refused, also those that only a text shows", FLAG
)
_FORBIDDEN: Final = "The request is from a page of another origin."
_FOREIGN_HOST: Final = "Or no token is set, and `Host` does not name loopback."
_BAD_QUERY: Final = {400: "Invalid query parameter, named by `field`."}

ROUTES: Final = (
    ApiRoute(
        path="/",
        name="dashboard",
        text="The dashboard, a page that uses this API.",
        answers={"text/html": TEXT},
        is_public=True,
    ),
    ApiRoute(
        path="/assets/{name}",
        name="asset",
        text="A file of the page.",
        answers=dict.fromkeys(("image/svg+xml", "text/css", "text/javascript"), TEXT),
        is_public=True,
        path_parameters=(Parameter("name", "the file"),),
        errors={404: "There is no such file."},
    ),
    ApiRoute(
        path="/healthz",
        name="health",
        text="The process runs and its loop turns.",
        answers={"text/plain": TEXT},
        is_public=True,
    ),
    ApiRoute(
        path="/readyz",
        name="readiness",
        text="A relay is connected and has reported lately.",
        answers={"text/plain": TEXT},
        is_public=True,
        errors={503: "No relay reports to the meter, or its upstream is not reachable."},
    ),
    ApiRoute(
        path="/metrics",
        name="metrics",
        text="The Prometheus exposition, as Accept asks for it.",
        answers={
            "text/plain": TEXT,
            "application/openmetrics-text": TEXT,
            "application/vnd.google.protobuf": TEXT,
        },
    ),
    ApiRoute(
        path="/api/v1/summary",
        name="summary",
        text="All metrics of a window.",
        answers={JSON: reference("Summary")},
        errors=_BAD_QUERY,
        query_parameters=(
            Parameter("window", "or all since the start", {**TEXT, "enum": [*WINDOWS, "all"]}),
            Parameter("by", f"some of {', '.join(BY)}; all where not given; or none"),
            _CERTAIN,
        ),
    ),
    ApiRoute(
        path="/api/v1/histograms",
        name="histograms",
        text="The latencies of each tenant, model, arm and class in HdrHistogram's V2 encoding.",
        answers={JSON: reference("Histograms")},
        errors=_BAD_QUERY,
        query_parameters=(
            Parameter("window", "or all since the start", {**TEXT, "enum": [*WINDOWS, "all"]}),
            _CERTAIN,
        ),
    ),
    ApiRoute(
        path="/api/v1/history",
        name="history",
        text="Key figures of all traffic in steps, for charts: of the last hour, or of the last 24 hours.",
        answers={JSON: reference("History")},
        errors=_BAD_QUERY,
        query_parameters=(
            Parameter(
                "step",
                "length of a step",
                {**TEXT, "enum": [*STEPS], "default": next(iter(STEPS))},
            ),
        ),
    ),
    ApiRoute(
        path="/api/v1/exchanges",
        name="exchanges",
        text=(
            "The newest exchanges that match, newest first. An answer ends after `limit` exchanges or about"
            f" {recent_api.PAGE_BYTES_MAX >> 20} MiB; `next` leads to the rest."
        ),
        answers={JSON: reference("Exchanges")},
        errors=_BAD_QUERY,
        query_parameters=(
            Parameter(
                "limit",
                "maximum number of exchanges",
                {
                    **COUNT,
                    "minimum": 1,
                    "maximum": recent_api.LIMIT_MAX,
                    "default": recent_api.LIMIT_DEFAULT,
                },
            ),
            _EVENTS,
            Parameter("next", "cursor from an earlier answer"),
            _CERTAIN,
            _REFUSED,
            *_FILTERS,
        ),
    ),
    ApiRoute(
        path="/api/v1/first_token",
        name="firstToken",
        text=(
            "The parts of the wait of an exchange for its first token, and which of them is unusual beside"
            " the streams of the last hour."
        ),
        answers={JSON: reference("FirstTokenAnswer")},
        errors=_BAD_QUERY,
        query_parameters=(Parameter("id", "the id of the exchange"),),
    ),
    ApiRoute(
        path="/api/v1/pairs",
        name="pairs",
        text=(
            "What a gateway does between the relays on both sides: counts since the meter's start, and the"
            " figures of the recent pairs."
        ),
        answers={JSON: reference("Pairs")},
        errors={**_BAD_QUERY, 404: "No exchanges are paired: `pair.upstream` is not set."},
        query_parameters=(
            Parameter(
                "limit",
                "maximum number of single pairs, the newest first",
                {**COUNT, "minimum": 1, "maximum": PAIRS_MAX, "default": PAIRS_DEFAULT},
            ),
        ),
    ),
    ApiRoute(
        path="/api/v1/capture/flush",
        method="post",
        name="flushCapture",
        text=(
            "Makes Parquet files of the exchanges captured so far. Answers with the state of the capture;"
            " where `waiting` or `files_waiting` is not 0, the place does not take files now."
        ),
        answers={JSON: {"type": "object"}},
        errors={409: "Nothing is captured.", 415: "The body is a form."},
    ),
    ApiRoute(
        path="/api/v1/streams",
        name="streams",
        text="The running exchanges, newest first.",
        answers={JSON: reference("Streams")},
        errors=_BAD_QUERY,
        query_parameters=(
            Parameter(
                "limit",
                "maximum number of streams",
                {
                    **COUNT,
                    "minimum": 1,
                    "maximum": recent_api.STREAMS_MAX,
                    "default": recent_api.STREAMS_DEFAULT,
                },
            ),
            Parameter(
                "window", f"length of timelines, up to {recent_api.WINDOW_MAX_S}s", {**TEXT, "default": "10s"}
            ),
            Parameter("id", "only the stream with this id"),
        ),
    ),
    ApiRoute(
        path="/api/v1/silences",
        name="silences",
        text=(
            "Streams without a token for `meter.silence_threshold` or longer, the longest silence first, and"
            " how many streams went on after such silences."
        ),
        answers={JSON: reference("Silences")},
        errors=_BAD_QUERY,
        query_parameters=(
            Parameter(
                "limit",
                "maximum number of streams",
                {
                    **COUNT,
                    "minimum": 1,
                    "maximum": silences_api.STREAMS_MAX,
                    "default": silences_api.STREAMS_DEFAULT,
                },
            ),
        ),
    ),
    ApiRoute(
        path="/api/v1/live",
        name="live",
        text=(
            "Server-sent events: `exchange` (an Exchange) for each that ends and matches, `summary` (a"
            " LiveSummary of all traffic) every second, `missed` (a Missed) when the subscriber was too slow."
        ),
        answers={"text/event-stream": TEXT},
        errors={**_BAD_QUERY, 503: "Too many subscribers."},
        query_parameters=(
            _EVENTS,
            Parameter("summary", "0: no summaries", FLAG),
            Parameter("exchanges", "0: no exchanges", FLAG),
            _CERTAIN,
            _REFUSED,
            *_FILTERS,
        ),
    ),
    ApiRoute(
        path="/api/v1/experiment",
        name="experiment",
        text="State and results of the configured experiment.",
        answers={JSON: reference("Experiment")},
    ),
    ApiRoute(
        path="/api/v1/experiment",
        method="post",
        name="switchExperiment",
        text="Switches the experiment on or off; answers as GET does.",
        answers={JSON: reference("Experiment")},
        body={
            "type": "object",
            "properties": {"enabled": FLAG},
            "required": ["enabled"],
            "additionalProperties": False,
        },
        errors={
            400: "The body is invalid.",
            409: "No experiment is configured, or it has ended.",
            413: "The body is too long.",
            415: "The body is not declared as JSON.",
        },
    ),
    ApiRoute(
        path="/api/v1/openapi.json", name="openapi", text="This document.", answers={JSON: {"type": "object"}}
    ),
)


def openapi_document(*, token: bool = False) -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method] = _operation_schema(route, token=token)
    components: dict[str, Any] = {"schemas": SCHEMAS}
    if token:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "llmtap admin API",
            "version": __version__,
            "description": "Measurements of llmtap. Durations are seconds; null: unknown or not applicable.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": components,
    }


def _operation_schema(route: ApiRoute, *, token: bool) -> dict[str, Any]:
    content = {kind: {"schema": schema} for kind, schema in route.answers.items()}
    responses: dict[str, Any] = {"200": {"description": route.text, "content": content}}
    error: dict[str, Any] = {} if route.is_public else {"content": {JSON: {"schema": reference("Error")}}}
    responses["403"] = {"description": _FORBIDDEN if token else f"{_FORBIDDEN} {_FOREIGN_HOST}", **error}
    for status, text in sorted(route.errors.items()):
        responses[str(status)] = {"description": text, **error}
    out: dict[str, Any] = {"operationId": route.name, "summary": route.text, "responses": responses}
    if route.query_parameters or route.path_parameters:
        out["parameters"] = [
            *({**_parameter_schema(p), "in": "path", "required": True} for p in route.path_parameters),
            *({**_parameter_schema(p), "in": "query"} for p in route.query_parameters),
        ]
    if route.body is not None:
        out["requestBody"] = {"required": True, "content": {JSON: {"schema": route.body}}}
    if token and not route.is_public:
        out["security"] = [{"token": []}]
        responses["401"] = {"description": "The token is missing or wrong.", **error}
    return out


def _parameter_schema(parameter: Parameter) -> dict[str, Any]:
    return {"name": parameter.name, "description": parameter.text, "schema": parameter.schema}


def add_openapi_route(app: web.Application, *, token: bool) -> None:
    body = msgspec.json.encode(openapi_document(token=token))

    async def openapi(request: web.Request) -> web.Response:
        return web.Response(body=body, content_type=JSON)

    app.router.add_get("/api/v1/openapi.json", openapi)
