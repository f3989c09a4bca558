"""Texts that users see and that no command prints: what the admin port serves, and reference tables."""

import asyncio
import json
import os
import re
from collections.abc import Iterator
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from aiohttp.test_utils import TestClient, TestServer
from google.protobuf.json_format import MessageToDict
from rich.console import Console, Group

from llmtap.capture.read.reader import read
from llmtap.capture.schema import SCHEMA
from llmtap.capture.store.rows import exchanges_of
from llmtap.channel.frames import Hello
from llmtap.clock import ManualClock
from llmtap.exchange.exchange import Exchange
from llmtap.export.opentelemetry.exporter import OtlpExporter
from llmtap.export.options import OtlpOptions
from llmtap.export.sinks import SeriesKey
from llmtap.meter.admin.openapi import openapi_document
from llmtap.meter.admin.server import admin_app
from llmtap.meter.options import MeterOptions
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from llmtap.metrics.latency import measure
from llmtap.metrics.slo import SloOptions
from llmtap.top.plain import render_once
from llmtap.top.views import Documents
from tests.docs.documents import hook
from tests.support.servers.fake_admin import recorded
from tests.support.servers.otlp_receiver import GUARD_S, OtlpReceiver
from tests.support.traffic.experiments import an_experiment
from tests.support.traffic.relay_status import relay_status

_ARMS: Final = ({"name": "control"}, {"name": "candidate", "headers": {"X-Arm": "b"}})
_UNSTABLE: Final = frozenset(
    {
        "traceId",
        "spanId",
        "bucketCounts",
        "explicitBounds",
        "host.name",
        "service.instance.id",
        "telemetry.sdk.version",
    }
)
_TOP_COLUMNS: Final = 160
_OWN_USE: Final = re.compile(r"^(llmtap_meter_(?:cpu_seconds_total|rss_bytes)) .*")
_ROOT: Final = Path(__file__).parents[2]
_S: Final = 1_000_000_000
_PATHS: Final = (
    "/api/v1/summary?window=all",
    "/api/v1/summary?window=1m&by=class&certain=1",
    "/api/v1/exchanges?limit=3&events=1",
    "/api/v1/experiment",
    "/api/v1/summary?window=never",
    "/nowhere",
)


def openapi() -> str:
    """The document of the admin API."""
    return json.dumps(openapi_document(token=True), indent=1)


def capture_columns() -> str:
    """The names and types of a capture's columns."""
    return "\n".join(f"{field.name:24} {field.type}" for field in SCHEMA)


def options() -> str:
    """The reference page of all keys of the configuration, with types and defaults."""
    page: str = hook("generate").options_page()
    return page


def admin_api() -> str:
    """What a meter serves after the exchanges of the saved capture."""
    clock = ManualClock()
    slos = {"gold": SloOptions(objectives="ttft:120ms tpot:50ms", target=0.95, tenants=("acme",))}
    tally = ExchangePipeline(MeterOptions(), clock, an_experiment(*_ARMS), slos=slos)
    clock.advance(_S)
    tally.relays.join(Hello(relay="run.0.1", pid=1, clock="mono", anchor_mono_ns=0, anchor_wall_ns=0))
    tally.on_status("run.0.1", relay_status(opened=42, measured=40, dropped={"overflow": 1}, unsettled=1))
    for x in _exchanges():
        clock.advance(_S // 10)
        tally.on_open()
        tally.on_end(x)
    return asyncio.run(_served(tally))


def top() -> str:
    """What `llmtap top --once` prints after these exchanges."""
    out = StringIO()
    documents = recorded(_exchanges(), experiment=an_experiment(*_ARMS))
    console = Console(file=out, width=_TOP_COLUMNS, highlight=False, no_color=True)
    console.print(
        Group(*render_once("http://tap", Documents(documents["summary"], documents), _TOP_COLUMNS)),
        soft_wrap=True,
    )
    return out.getvalue()


def telemetry() -> str:
    """What goes out by OTLP for three of these exchanges: spans, and metrics without their buckets."""
    parts = []
    for version in ("0.1.0", "off"):
        # All spans leave at the end, in one batch.
        with OtlpReceiver() as receiver, patch.dict(os.environ, OTEL_BSP_SCHEDULE_DELAY="600000"):
            options = OtlpOptions(endpoint=receiver.endpoint, semconv=version)
            clock, servers = ManualClock(now_ns=_S), {"": ("gateway.example", 443)}
            exporter = OtlpExporter(options, clock, "1.2.3", servers)
            for x in islice(_exchanges(), 5, 8):
                exporter.on_end(x, measure(x), SeriesKey(x.tenant, ""), None)
            exporter.close(GUARD_S)
            sent = [MessageToDict(one) for one in (*receiver.traces, *receiver.metrics)]
        parts.append(f"semconv {version}\n" + json.dumps(_stable(sent), indent=1))
    return "\n".join(parts)


def _stable(value: Any) -> Any:
    """The value without what differs from run to run; attributes as an object."""
    if isinstance(value, list):
        if value and all(isinstance(one, dict) and one.keys() == {"key", "value"} for one in value):
            named = {one["key"]: next(iter(one["value"].values())) for one in value}
            return {name: one for name, one in named.items() if name not in _UNSTABLE}
        return [_stable(one) for one in value]
    if isinstance(value, dict):
        return {key: _stable(one) for key, one in value.items() if key not in _UNSTABLE}
    return value


def _exchanges() -> Iterator[Exchange]:
    """The exchanges of the saved capture."""
    for batch in read([str(_ROOT / "tests" / "data" / "capture")]).batches():
        yield from exchanges_of(batch)


async def _served(tally: ExchangePipeline) -> str:
    parts = []
    async with TestClient(TestServer(admin_app(tally))) as client:
        for path in _PATHS:
            async with client.get(path) as answer:
                body = json.dumps(await answer.json(), indent=1)
                parts.append(f"GET {path}\n{answer.status} {answer.content_type}\n{body}\n")
        async with client.get("/metrics") as answer:
            lines = (_OWN_USE.sub(r"\1 (measured)", line) for line in (await answer.text()).splitlines())
            parts.append("\n".join(line for line in lines if "_bucket{" not in line))
    return "\n".join(parts)
