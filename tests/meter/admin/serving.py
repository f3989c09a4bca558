"""An admin port on loopback for one test."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp.test_utils import TestClient, TestServer

from llmtap.clock import ManualClock
from llmtap.meter.admin.server import admin_app
from llmtap.meter.options import MeterOptions
from llmtap.meter.pipeline.pipeline import ExchangePipeline

S = 1_000_000_000
Client = TestClient[Any, Any]


def pipeline(*args: Any, **about: Any) -> ExchangePipeline:
    return ExchangePipeline(MeterOptions(), ManualClock(now_ns=S), *args, **about)


@asynccontextmanager
async def admin_port(
    tally: ExchangePipeline | None = None, *, token: str | None = None
) -> AsyncIterator[tuple[ExchangePipeline, Client]]:
    tally = tally or pipeline()
    async with TestClient(TestServer(admin_app(tally, token))) as client:
        yield tally, client
