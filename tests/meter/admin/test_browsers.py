"""Requests of browsers: by which names, and for the pages of which origins, the admin port answers."""

import asyncio
import json

import pytest
from aiohttp.test_utils import TestClient, TestServer

from llmtap.clock import ManualClock
from llmtap.meter.admin.openapi import ROUTES
from llmtap.meter.admin.server import admin_app
from llmtap.meter.options import MeterOptions
from llmtap.meter.pipeline.pipeline import ExchangePipeline

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


async def query(path: str, headers: dict[str, str], token: str | None = None) -> tuple[int, str]:
    async with TestClient(
        TestServer(admin_app(ExchangePipeline(MeterOptions(), ManualClock()), token))
    ) as client:
        answer = await client.get(path, headers=headers)
        return answer.status, await answer.text()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("extra", [{}, BROWSER, {"Origin": "http://evil.test:9464"}], ids=str)
def test_who_asks_by_a_strange_name_learns_nothing_but_what_to_do(path: str, extra: dict[str, str]) -> None:
    """A page's read of its own origin has neither field in Chromium, over plain http."""
    status, output = asyncio.run(query(path, {"Host": "evil.test:9464", **extra}))
    assert status == 403
    message = json.loads(output)["error"]["message"]
    assert "loopback host name" in message
    assert "meter.admin_token" in message
    assert "llmtap_" not in output


@pytest.mark.parametrize("host", STRANGE)
def test_a_strange_name_is_known_in_every_spelling(host: str) -> None:
    assert asyncio.run(query("/metrics", {"Host": host}))[0] == 403


@pytest.mark.parametrize("host", LOOPBACK)
@pytest.mark.parametrize("extra", [{}, BROWSER], ids=str)
def test_by_a_loopback_name_it_is_answered(host: str, extra: dict[str, str]) -> None:
    assert asyncio.run(query("/api/v1/summary", {"Host": host, **extra}))[0] == 200


def test_a_request_of_http_1_0_needs_no_name() -> None:
    async def run() -> bytes:
        async with TestServer(admin_app(ExchangePipeline(MeterOptions(), ManualClock()))) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"GET /healthz HTTP/1.0\r\n\r\n")
            answer = await asyncio.wait_for(reader.read(), 60)
            writer.close()
            return answer

    assert asyncio.run(run()).endswith(b"ok\n")


@pytest.mark.parametrize("host", (*LOOPBACK, *STRANGE))
def test_with_a_token_the_name_does_not_matter(host: str) -> None:
    assert asyncio.run(query("/healthz", {"Host": host}, "s3cret"))[0] == 200
    assert asyncio.run(query("/metrics", {"Host": host}, "s3cret"))[0] == 401
    headers = {"Host": host, "Authorization": "Bearer s3cret", **BROWSER}
    assert asyncio.run(query("/api/v1/summary", headers, "s3cret"))[0] == 200


OPENED = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
FETCHED = {"Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "empty"}
FOREIGN = {
    "fetch, cross-site": {"Sec-Fetch-Site": "cross-site", **FETCHED},
    "fetch, same-site": {"Sec-Fetch-Site": "same-site", **FETCHED},
    "fetch, a relation of a later standard": {"Sec-Fetch-Site": "elsewhere", **FETCHED},
    "image": {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"},
    "frame": {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"},
    "embed": {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "embed"},
    "WebSocket": {
        "Sec-Fetch-Site": "cross-site",
        "Sec-Fetch-Mode": "websocket",
        "Sec-Fetch-Dest": "websocket",
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Origin": "https://evil.test",
    },
    "EventSource of an old browser": {"Origin": "https://evil.test", "Accept": "text/event-stream"},
    "sandboxed frame": {"Origin": "null"},
    "another port": {"Origin": "http://localhost:1"},
    "mark without an origin's mark": {"Origin": "https://evil.test", "Sec-Fetch-Site": "same-origin"},
}
READ = sorted({route.path.replace("{name}", "app.js") for route in ROUTES if route.method == "get"})


@pytest.mark.parametrize("token", [None, "s3cret"])
@pytest.mark.parametrize("marks", FOREIGN.values(), ids=FOREIGN)
async def test_nothing_is_read_for_a_page_of_another_origin(marks: dict[str, str], token: str | None) -> None:
    tally = ExchangePipeline(MeterOptions(), ManualClock())
    headers = {"Host": "localhost:9464", "Authorization": f"Bearer {token}", **marks}
    async with TestClient(TestServer(admin_app(tally, token))) as client:
        for path in READ:
            for method in ("GET", "HEAD", "POST"):
                async with client.request(method, path, headers=headers) as answer:
                    assert (answer.status, answer.content_type) == (403, "application/json"), path
                    body = await answer.read()
                    assert method == "HEAD" or json.loads(body)["error"]["field"] is None
        assert tally.subscribers == 0


@pytest.mark.parametrize("path", READ)
def test_a_link_on_any_page_opens_the_dashboard_alone(path: str) -> None:
    for site in ("cross-site", "same-site"):
        marks = {"Host": "localhost:9464", "Sec-Fetch-Site": site, **OPENED}
        assert asyncio.run(query(path, marks))[0] == (200 if path == "/" else 403)


@pytest.mark.parametrize(
    "marks",
    [
        {},
        {"Sec-Fetch-Site": "none", **OPENED},
        {"Sec-Fetch-Site": "same-origin", **FETCHED},
        {"Origin": "http://localhost:9464"},
        {"Origin": "https://localhost:9464"},
        {"Referer": "https://evil.test/"},
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["/", "/metrics", "/healthz", "/api/v1/exchanges"])
def test_programs_and_the_dashboard_itself_are_answered(path: str, marks: dict[str, str]) -> None:
    assert asyncio.run(query(path, {"Host": "localhost:9464", **marks}))[0] == 200


@pytest.mark.parametrize("path", [*READ, "/none"])
async def test_no_answer_may_be_embedded_by_another_origin(path: str) -> None:
    async with (
        TestClient(TestServer(admin_app(ExchangePipeline(MeterOptions(), ManualClock())))) as client,
        client.get(path) as answer,
    ):
        assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert answer.headers["X-Frame-Options"] == "DENY"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
        assert answer.headers["Server"] == "llmtap"
