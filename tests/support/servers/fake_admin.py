"""An admin port that serves recorded documents and can be told to fail; the documents are made by the meter's
own code."""

import json
import socket
import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

from llmtap.channel.experiment import Experiment
from llmtap.channel.frames import Hello
from llmtap.clock import ManualClock
from llmtap.exchange.exchange import Exchange
from llmtap.meter.admin.views import summary_of
from llmtap.meter.options import MeterOptions
from llmtap.meter.pipeline.exchanges import Query
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from llmtap.meter.pipeline.windows import BY
from llmtap.metrics.slo import SloOptions
from tests.support.traffic.relay_status import relay_status

S = 1_000_000_000


def recorded(
    exchanges: Iterable[Exchange] = (), *, experiment: Experiment | None = None, relay: bool = True
) -> dict[str, Any]:
    """By path what a meter answers after these exchanges; `events` has each exchange by its id."""
    tally = ExchangePipeline(
        MeterOptions(),
        ManualClock(now_ns=S),
        experiment,
        slos={"default": SloOptions(objectives="ttft:500ms tpot:50ms")},
    )
    if relay:
        tally.relays.join(Hello(relay="r0", pid=17, clock="kernel", anchor_mono_ns=0, anchor_wall_ns=0))
        status = relay_status(
            opened=9,
            measured=7,
            dropped={"overflow": 2},
            lag_ns_max=3_000_000,
            upstreams={"http://gw:8000": False},
            upstreams_tried_ns={"http://gw:8000": S},
        )
        tally.on_status("r0", status)
    for x in exchanges:
        tally.on_open()
        if x.arm is not None:
            tally.experiments.on_assignment(x.arm, x.unit or "0", True)
        tally.on_end(x)
    tally.clock.advance(S)  # type: ignore[attr-defined]
    found = tally.recent_exchanges.find(Query())
    with_events = json.loads(tally.recent_exchanges.to_json(found, Query(events=True)))
    documents = {
        "summary": summary_of(tally, "1m", BY)(),
        "exchanges": json.loads(tally.recent_exchanges.to_json(found, Query())),
        "experiment": tally.experiments.results()(),
        "streams": {"count": 0, "window": 10.0, "streams": []},
        "silences": {
            "threshold": 5.0,
            "running": 0,
            "not_judged": 0,
            "count": 0,
            "groups": [],
            "streams": [],
        },
        "events": {x["id"]: x for x in with_events["exchanges"]},
        "first_tokens": {x.id: tally.usual_phases.describe(x)() for _, x, _ in found},
    }
    copied: dict[str, Any] = json.loads(msgspec.json.encode(documents))
    return copied


def a_stream(seq: int = 1, **told: Any) -> dict[str, Any]:
    """One under way, as `/api/v1/streams` tells it."""
    return {
        "id": f"r0-{seq}",
        "tenant": "acme",
        "model": "tiny",
        "route": None,
        "arm": None,
        "endpoint": "chat.completions",
        "dialect": "openai.chat",
        "stream": True,
        "age": 2.0,
        "ttft": 0.1,
        "events": 3,
        "tokens": 3,
        "since_last": 0.05,
        "timeline": [[0.1, 1], [0.9, 1], [1.95, 1]],
        **told,
    }


def a_silent_stream(seq: int = 1, **about: Any) -> dict[str, Any]:
    """A stream that waits for its next token, as `/api/v1/silences` shows it."""
    past = {
        "silence": 30.0,
        "n": 240,
        "resumed": 3,
        "until": 90.0,
        "share": 0.0125,
        "low": 0.004,
        "high": 0.0382,
    }
    return {
        "id": f"r0-{seq}",
        "kind": "next_token",
        "tenant": "acme",
        "model": "tiny",
        "upstream": "http://gw:8000",
        "arm": None,
        "age": 40.5,
        "silent": 31.25,
        "since_read": 0.4,
        "tokens": 17,
        "past": past,
        **about,
    }


class FakeAdmin:
    """Serves `documents`; a path that is not among them is 404. `status` refuses everything with it."""

    def __init__(self, documents: dict[str, Any]) -> None:
        self.documents = documents
        self.status: int | None = None
        self.body: bytes | None = None
        """Instead of a document."""
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.headers: list[dict[str, str]] = []
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        """Listen; again at the same port after `stop`."""
        app = web.Application()
        app.router.add_get("/api/v1/{path}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
        await self._runner.setup()
        sock = socket.create_server(("127.0.0.1", self.port))
        self.port = sock.getsockname()[1]
        await web.SockSite(self._runner, sock, ssl_context=tls).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _answer(self, request: web.Request) -> web.Response:
        path, query = request.match_info["path"], dict(request.query)
        self.asked.append((path, query))
        self.headers.append(dict(request.headers))
        if self.status is not None:
            body = self.body or b'{"error": {"message": "said so", "field": null}}'
            return web.Response(status=self.status, body=body, content_type="application/json")
        if self.body is not None:
            return web.Response(body=self.body, content_type="application/json")
        document = self.documents.get(path)
        if path == "first_token" and "first_tokens" in self.documents:
            document = {"first_token": self.documents["first_tokens"].get(query.get("id"))}
        if document is None:
            return web.Response(status=404, text="{}")
        if path == "summary" and "window" in document:
            document = {**document, "window": {**document["window"], "name": query.get("window", "1m")}}
        if path == "exchanges" and "id" in query:
            one = self.documents["events"].get(query["id"])
            document = {"exchanges": [] if one is None else [one], "next": None}
        return web.json_response(document)


@asynccontextmanager
async def fake_admin(documents: dict[str, Any]) -> AsyncIterator[FakeAdmin]:
    admin = FakeAdmin(documents)
    await admin.start()
    try:
        yield admin
    finally:
        await admin.stop()
