"""`/api/v1/experiment`: the experiment's state and results, and the switch.

The switch changes what happens to traffic, and the admin port may be open on loopback without a token. So a
browser that some page has talked into sending the request must not succeed: the body has to be declared
as JSON (which no form can do), and the application's middlewares (`browsers`) refuse other origins and names.
"""

import asyncio
from typing import Final

import msgspec
from aiohttp import web

from llmtap.meter.experiments import Experiments
from llmtap.meter.pipeline.recent_exchanges import BadQuery

__all__ = ["add_experiment_routes"]

BODY_BYTES_MAX: Final = 4_096

_encode = msgspec.json.Encoder(order="deterministic").encode


class _Wish(msgspec.Struct, forbid_unknown_fields=True):
    enabled: bool


def add_experiment_routes(app: web.Application, experiments: Experiments) -> None:
    """GET and POST. The application's middlewares have checked origin, and token or loopback name."""

    async def results(request: web.Request) -> web.Response:
        work = experiments.results()
        body = await asyncio.to_thread(lambda: _encode(work()))
        return web.Response(body=body, content_type="application/json")

    async def switch(request: web.Request) -> web.Response:
        if request.content_type != "application/json":
            raise web.HTTPUnsupportedMediaType(reason="expected Content-Type: application/json")
        if (request.content_length or 0) > BODY_BYTES_MAX:
            raise web.HTTPRequestEntityTooLarge(BODY_BYTES_MAX, request.content_length or 0)
        try:
            wish = msgspec.json.decode(await request.read(), type=_Wish)
        except msgspec.MsgspecError as exc:
            raise BadQuery("enabled", f'expected {{"enabled": true}} or false: {exc}') from None
        if experiments.experiment is None:
            raise web.HTTPConflict(reason="no experiment is configured")
        if wish.enabled and experiments.state == "ended":
            raise web.HTTPConflict(reason="the experiment's end has come")
        experiments.switch(wish.enabled)
        return await results(request)

    app.router.add_get("/api/v1/experiment", results)
    app.router.add_post("/api/v1/experiment", switch)
