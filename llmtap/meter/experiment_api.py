"""`/api/v1/experiment`: the experiment's state and results, and the switch.

The switch changes what happens to traffic, and the admin port may be open on loopback without a token. So a
browser that some page has talked into sending the request must not succeed: the body has to be declared
as JSON (which no form can do), a request that says it comes from another origin is refused, and without
a token the Host has to be a loopback name (against DNS rebinding).
"""

import asyncio
from ipaddress import ip_address
from typing import Final

import msgspec
from aiohttp import hdrs, web

from llmtap.meter.experiments import Experiments
from llmtap.meter.kept import BadQuery

__all__ = ["add_experiment_routes"]

BODY_BYTES_MAX: Final = 4_096

_encode = msgspec.json.Encoder(order="deterministic").encode


class _Wish(msgspec.Struct, forbid_unknown_fields=True):
    enabled: bool


def add_experiment_routes(app: web.Application, experiments: Experiments, token: str | None) -> None:
    """GET and POST. With a token, the application's guard has asked for it already."""

    async def results(request: web.Request) -> web.Response:
        work = experiments.results()
        body = await asyncio.to_thread(lambda: _encode(work()))
        return web.Response(body=body, content_type="application/json")

    async def switch(request: web.Request) -> web.Response:
        _refuse_strangers(request, token)
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


def _refuse_strangers(request: web.Request, token: str | None) -> None:
    origin = request.headers.get(hdrs.ORIGIN)
    if origin is not None and origin not in (f"http://{request.host}", f"https://{request.host}"):
        raise web.HTTPForbidden(reason="another origin's pages do not switch experiments")
    if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
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
