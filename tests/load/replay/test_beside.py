"""What a replay asks beside its load: by a name of its own, once where there is nothing, trusting whom the
load trusts."""

import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiohttp import web

from llmtap.errors import ConfigError
from llmtap.load.options import ScheduleOptions
from llmtap.load.replay.options import USER_AGENT
from llmtap.load.replay.plan import make_plan
from tests.load.replay import support
from tests.support.servers.loading import events

N = 30
METRICS = "vllm:num_requests_running 1\n"
AskedOf = Counter[tuple[str, str, str | None]]
"""Method, path and User-Agent of requests."""


@asynccontextmanager
async def gateway(
    *, metrics: str | None = None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[str, AskedOf]]:
    """A server of a model, as one sees it through a relay; its URL, and what it was asked."""
    asked: AskedOf = Counter()

    async def answer(request: web.Request) -> web.Response:
        asked[request.method, request.path, request.headers.get("User-Agent")] += 1
        match request.path:
            case "/v1/models":
                return web.json_response({"object": "list", "data": [{"id": "m"}]})
            case "/metrics" if metrics is not None:
                return web.Response(text=metrics)
            case "/v1/chat/completions":
                await request.read()
                return web.Response(body=b"".join(events(3)), content_type="text/event-stream")
        return web.Response(status=404)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    sock = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, sock, ssl_context=tls).start()
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{sock.getsockname()[1]}", asked
    finally:
        await runner.cleanup()


async def replayed(url: str, **more: Any) -> dict[str, Any]:
    """For a second and a half."""
    plan = make_plan(ScheduleOptions(source="conversation", requests=N, rate=N / 1.5, arrivals="uniform"))
    return await support.replayed(plan, url, **more)


def beside(asked: AskedOf) -> dict[str, int]:
    """How often each path was asked by USER_AGENT."""
    return {path: n for (_, path, agent), n in asked.items() if agent == USER_AGENT}


async def test_what_is_no_load_has_a_name_and_asks_once_where_there_are_no_metrics() -> None:
    async with gateway() as (url, asked):
        result = await replayed(url, headers=[("user-agent", "load/1"), ("X-Team", "a")])
    assert beside(asked) == {"/v1/models": 1, "/metrics": 1}
    assert asked["POST", "/v1/chat/completions", "load/1"] == asked.total() - 2 == N
    scrape = result["system"]["summary"]["scrape"]
    assert (scrape["url"], scrape["gave_up"]) == (f"{url}/metrics", True)
    assert scrape["failures"] == {"status 404, expected 200": 1}
    assert result["outcomes"] == {"complete": N}


async def test_models_and_metrics_trust_whom_the_load_trusts(tmp_path: Path) -> None:
    ca, served = trustme.CA(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ca.issue_cert("127.0.0.1").configure_cert(served)
    place = tmp_path / "ca.pem"
    ca.cert_pem.write_to_path(place)
    async with gateway(metrics=METRICS, tls=served) as (url, asked):
        with pytest.raises(ConfigError) as refused:
            await replayed(url)
        assert (refused.value.place, asked.total()) == ("--target", 0)
        assert refused.value.problem.startswith(f"{url} cannot be reached: TLS: certificate not trusted (")
        assert "--ca" in (refused.value.hint or "")
        for more in ({"ca": str(place)}, {"insecure": True}):
            asked.clear()
            result = await replayed(url, **more)
            assert result["outcomes"] == {"complete": N}
            # The last scrape waits no longer than a second.
            assert result["system"]["summary"]["scrape"]["failures"] in ({}, {"no answer in time": 1})
            assert beside(asked).keys() == {"/v1/models", "/metrics"}
