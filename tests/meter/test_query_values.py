"""Invariant: no value of a query parameter causes a 500; a refused value is 400 and names its parameter."""

from typing import Any
from urllib.parse import quote

import pytest
from aiohttp.test_utils import TestClient, TestServer
from yarl import URL

from llmtap.clock import ManualClock
from llmtap.meter.admin.openapi import ROUTES
from llmtap.meter.admin.server import admin_app
from llmtap.meter.options import MeterOptions
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from tests.support.traffic.streams import streamed

S = 1_000_000_000
DECODED = {
    "400 digits": "9" * 400,
    "400 digits of seconds": "9" * 400 + "s",
    "4 kB of digits": "1" * 4_000,
    "exponent": "1e999",
    "nan": "nan",
    "infinity": "inf",
    "negative": "-1",
    "sign": "+1",
    "empty": "",
    "hexadecimal": "0x10",
    "underscore": "1_000",
    "fraction": "1.5",
    "three parts": "1.2.3",
    "two points": "1..2",
    "NUL": "1\0",
    "line end": "1\r\nX: y",
    "blanks": " " * 2_000,
    "Arabic-Indic digit": "\N{ARABIC-INDIC DIGIT ONE}",
    "superscript digit": "\N{SUPERSCRIPT TWO}",
    "markup": "<script>",
    "array": "[1]",
}
ENCODED = {"no UTF-8": "%ff%fe", "surrogate": "%ed%a0%80", "cut escape": "%", "wrong escape": "%zz"}
VALUES = {name: quote(value, safe="") for name, value in DECODED.items()} | ENCODED
COMPARED = frozenset(
    {
        "id",
        "relay",
        "tenant",
        "model",
        "route",
        "arm",
        "label",
        "endpoint",
        "dialect",
        "method",
        "path",
        "request_id",
        "upstream_request_id",
        "trace_id",
        "pair_id",
        "content_type",
        "finish_reason",
        "clock",
        "service_tier",
        "service_tier_requested",
    }
)
"""Parameters whose value is compared and nothing else: each value is valid."""
VALID = {
    ("/api/v1/streams", "window"): {"fraction"},
    ("/api/v1/exchanges", "next"): {"fraction"},  # event 5 of exchange 1
    ("/api/v1/summary", "by"): {"empty"},
}
PARAMETERS = [(route.path, parameter.name) for route in ROUTES for parameter in route.query_parameters]


@pytest.mark.parametrize(("path", "parameter"), PARAMETERS, ids=str)
async def test_a_hostile_value_is_refused_under_the_name_of_its_parameter(path: str, parameter: str) -> None:
    async def answers(client: TestClient[Any, Any]) -> dict[str, tuple[int, str | None]]:
        found: dict[str, tuple[int, str | None]] = {}
        for name, value in VALUES.items():
            async with client.get(URL(f"{path}?{parameter}={value}", encoded=True)) as answer:
                field = None if answer.status == 200 else (await answer.json())["error"]["field"]
                found[name] = answer.status, field
        return found

    tally = ExchangePipeline(MeterOptions(), ManualClock(now_ns=S))
    tally.on_end(streamed(100, 140))
    async with TestClient(TestServer(admin_app(tally))) as client:
        valid = VALUES.keys() if parameter in COMPARED else VALID.get((path, parameter), set())
        assert await answers(client) == {
            name: (200, None) if name in valid else (400, parameter) for name in VALUES
        }


async def test_a_query_that_cannot_be_names_its_field() -> None:
    tally = ExchangePipeline(MeterOptions(), ManualClock(now_ns=S))
    async with TestClient(TestServer(admin_app(tally))) as client:
        for path, field in (
            ("exchanges?limit=0", "limit"),
            ("exchanges?limit=1001", "limit"),
            ("exchanges?outcome=fine", "outcome"),
            ("exchanges?status=1&status=2", "status"),
            ("exchanges?colour=red", "colour"),
            ("summary?window=2m", "window"),
            ("summary?by=tenant,colour", "by"),
            ("streams?limit=0", "limit"),
            ("streams?limit=1001", "limit"),
            ("streams?window=0", "window"),
            ("streams?window=61s", "window"),
            ("live?limit=5", "limit"),
            ("live?summary=2", "summary"),
        ):
            async with client.get(f"/api/v1/{path}") as answer:
                assert (answer.status, (await answer.json())["error"]["field"]) == (400, field), path
