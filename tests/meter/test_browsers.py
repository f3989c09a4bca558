"""Which requests of browsers the admin port answers."""

import asyncio

import pytest
from aiohttp.test_utils import TestClient, TestServer

from llmtap.clock import ManualClock
from llmtap.meter.admin import admin_app
from llmtap.meter.options import MeterOptions
from llmtap.meter.tally import Tally

LOOPBACK = ("127.0.0.1:9464", "localhost:9464", "[::1]:9464", "127.8.8.8", "localhost")
STRANGE = (
    "evil.test:9464",
    "evil.test",
    "10.0.0.7:1",
    "localhost.evil.test",
    "[::2]:1",
    "127.0.0.1.evil.test",
)
BROWSER = {"Sec-Fetch-Site": "same-origin"}


async def asked(path: str, headers: dict[str, str], token: str | None = None) -> tuple[int, str]:
    async with TestClient(TestServer(admin_app(Tally(MeterOptions(), ManualClock()), token))) as client:
        answer = await client.get(path, headers=headers)
        return answer.status, await answer.text()


@pytest.mark.parametrize("path", ["/", "/metrics", "/api/v1/summary", "/api/v1/experiment", "/healthz"])
@pytest.mark.parametrize("host", STRANGE)
def test_a_browser_that_asks_by_a_strange_name_learns_nothing(path: str, host: str) -> None:
    status, said = asyncio.run(asked(path, {"Host": host, **BROWSER}))
    assert status == 403
    assert "loopback address" in said
    assert "llmtap_" not in said


@pytest.mark.parametrize("host", LOOPBACK)
def test_by_a_loopback_name_it_is_answered(host: str) -> None:
    assert asyncio.run(asked("/api/v1/summary", {"Host": host, **BROWSER}))[0] == 200


@pytest.mark.parametrize("host", (*LOOPBACK, *STRANGE))
def test_programs_ask_by_any_name(host: str) -> None:
    """Prometheus behind a forwarded port, curl through a tunnel."""
    assert asyncio.run(asked("/metrics", {"Host": host}))[0] == 200


def test_an_origin_alone_tells_a_browser_too() -> None:
    headers = {"Host": "evil.test:9464", "Origin": "http://evil.test:9464"}
    assert asyncio.run(asked("/api/v1/summary", headers))[0] == 403


def test_with_a_token_the_name_does_not_matter() -> None:
    headers = {"Host": "tap.example", "Authorization": "Bearer s3cret", **BROWSER}
    assert asyncio.run(asked("/api/v1/summary", headers, "s3cret"))[0] == 200
