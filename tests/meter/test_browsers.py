"""By which names the admin port may be asked."""

import asyncio
import json

import pytest
from aiohttp.test_utils import TestClient, TestServer

from llmtap.clock import ManualClock
from llmtap.meter.admin import admin_app
from llmtap.meter.options import MeterOptions
from llmtap.meter.tally import Tally

LOOPBACK = (
    "127.0.0.1:9464",
    "localhost:9464",
    "LocalHost",
    "[::1]:9464",
    "[::1]",
    "127.8.8.8",
    "localhost",
)
STRANGE = (
    "evil.test:9464",
    "evil.test",
    "10.0.0.7:1",
    "localhost.evil.test",
    "[::2]:1",
    "127.0.0.1.evil.test",
    "127.0.0.1@evil.test",
    "[::1].evil.test",
    "[::1",
    "0.0.0.0:9464",
    "2130706433",
    "",
)
BROWSER = {"Sec-Fetch-Site": "same-origin"}
PATHS = ("/", "/metrics", "/api/v1/summary", "/api/v1/experiment", "/api/v1/live", "/healthz", "/none")


async def asked(path: str, headers: dict[str, str], token: str | None = None) -> tuple[int, str]:
    async with TestClient(TestServer(admin_app(Tally(MeterOptions(), ManualClock()), token))) as client:
        answer = await client.get(path, headers=headers)
        return answer.status, await answer.text()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("told", [{}, BROWSER, {"Origin": "http://evil.test:9464"}], ids=str)
def test_who_asks_by_a_strange_name_learns_nothing_but_what_to_do(path: str, told: dict[str, str]) -> None:
    """A page's read of its own origin has neither field in Chromium, over plain http."""
    status, said = asyncio.run(asked(path, {"Host": "evil.test:9464", **told}))
    assert status == 403
    message = json.loads(said)["error"]["message"]
    assert "loopback name" in message
    assert "meter.admin_token" in message
    assert "llmtap_" not in said


@pytest.mark.parametrize("host", STRANGE)
def test_a_strange_name_is_known_in_every_spelling(host: str) -> None:
    assert asyncio.run(asked("/metrics", {"Host": host}))[0] == 403


@pytest.mark.parametrize("host", LOOPBACK)
@pytest.mark.parametrize("told", [{}, BROWSER], ids=str)
def test_by_a_loopback_name_it_is_answered(host: str, told: dict[str, str]) -> None:
    assert asyncio.run(asked("/api/v1/summary", {"Host": host, **told}))[0] == 200


def test_a_request_of_http_1_0_needs_no_name() -> None:
    async def run() -> bytes:
        async with TestServer(admin_app(Tally(MeterOptions(), ManualClock()))) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"GET /healthz HTTP/1.0\r\n\r\n")
            answer = await asyncio.wait_for(reader.read(), 60)
            writer.close()
            return answer

    assert asyncio.run(run()).endswith(b"ok\n")


@pytest.mark.parametrize("host", (*LOOPBACK, *STRANGE))
def test_with_a_token_the_name_does_not_matter(host: str) -> None:
    assert asyncio.run(asked("/healthz", {"Host": host}, "s3cret"))[0] == 200
    assert asyncio.run(asked("/metrics", {"Host": host}, "s3cret"))[0] == 401
    headers = {"Host": host, "Authorization": "Bearer s3cret", **BROWSER}
    assert asyncio.run(asked("/api/v1/summary", headers, "s3cret"))[0] == 200
