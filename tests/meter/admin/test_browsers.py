"""Requests of browsers: by which names, and for the pages of which origins, the admin port answers."""

import json
from typing import Any

import pytest

from llmtap.meter.admin.openapi import ROUTES
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from tests.meter.admin.serving import Client, play

LOOPBACK = ("127.0.0.1:9464", "LocalHost", "[::1]:9464", "[::1]", "127.8.8.8", "localhost:9464")
STRANGE = (
    "evil.test:9464", "10.0.0.7:1", "localhost.evil.test", "[::2]:1", "127.0.0.1.evil.test",
    "127.0.0.1@evil.test", "[::1].evil.test", "[::1", "0.0.0.0:9464", "2130706433", "",
)  # fmt: skip
BROWSER = {"Sec-Fetch-Site": "same-origin"}
TOKEN = {"Authorization": "Bearer s3cret"}
PATHS = ("/", "/metrics", "/api/v1/summary", "/api/v1/experiment", "/api/v1/live", "/healthz", "/none")
SERVED = sorted({route.path.replace("{name}", "app.js") for route in ROUTES})
OPENED = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
FETCHED = {"Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "empty"}


def statuses(asked: list[tuple[str, dict[str, str]]], token: str | None = None) -> list[int]:
    """The statuses of GET requests, each a path and its headers; the name is a loopback's by default."""
    found: list[int] = []

    async def scene(tally: ExchangePipeline, client: Client) -> None:
        for path, headers in asked:
            async with client.get(path, headers={"Host": "localhost:9464", **headers}) as answer:
                found.append(answer.status)

    play(scene, token=token)
    return found


def test_a_request_by_a_strange_name_is_told_what_to_do_and_nothing_else() -> None:
    """A page's read of its own origin has neither field in Chromium, over plain http."""

    async def scene(tally: ExchangePipeline, client: Client) -> None:
        for path in PATHS:
            for more in ({}, BROWSER, {"Origin": "http://evil.test:9464"}):
                async with client.get(path, headers={"Host": "evil.test:9464", **more}) as answer:
                    said = await answer.text()
                assert answer.status == 403, path
                message = json.loads(said)["error"]["message"]
                assert "loopback name" in message and "meter.admin_token" in message
                assert "llmtap_" not in said

    play(scene)


def test_names_are_known_in_every_spelling_and_do_not_matter_with_a_token() -> None:
    names = (*LOOPBACK, *STRANGE)
    plain = [("/metrics", {"Host": host}) for host in names]
    assert statuses(plain) == [200] * len(LOOPBACK) + [403] * len(STRANGE)
    assert statuses([("/healthz", {"Host": host}) for host in names], "s3cret") == [200] * len(names)
    assert statuses(plain, "s3cret") == [401] * len(names)
    trusted = [("/metrics", {"Host": host, **TOKEN, **BROWSER}) for host in names]
    assert statuses(trusted, "s3cret") == [200] * len(names)


FOREIGN = {
    "fetch, cross-site": {"Sec-Fetch-Site": "cross-site", **FETCHED},
    "fetch, same-site": {"Sec-Fetch-Site": "same-site", **FETCHED},
    "fetch, a relation of a later standard": {"Sec-Fetch-Site": "elsewhere", **FETCHED},
    "frame": {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"},
    "WebSocket": {
        "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "websocket", "Sec-Fetch-Dest": "websocket",
        "Connection": "Upgrade", "Upgrade": "websocket", "Origin": "https://evil.test",
    },
    "EventSource of an old browser": {"Origin": "https://evil.test", "Accept": "text/event-stream"},
    "sandboxed frame": {"Origin": "null"},
    "another port": {"Origin": "http://localhost:1"},
    "mark without an origin's mark": {"Origin": "https://evil.test", "Sec-Fetch-Site": "same-origin"},
}  # fmt: skip


@pytest.mark.parametrize("token", [None, "s3cret"])
@pytest.mark.parametrize("marks", FOREIGN.values(), ids=FOREIGN)
def test_nothing_is_read_or_done_for_a_page_of_another_origin(
    marks: dict[str, str], token: str | None
) -> None:
    async def scene(tally: ExchangePipeline, client: Client) -> None:
        about: dict[str, Any] = {"headers": {"Host": "localhost:9464", **TOKEN, **marks}}
        for path in SERVED:
            for method in ("GET", "HEAD", "POST"):
                async with client.request(method, path, **about) as answer:
                    assert (answer.status, answer.content_type) == (403, "application/json"), path
                    assert "Access-Control-Allow-Origin" not in answer.headers
                    body = await answer.read()
                    assert method == "HEAD" or json.loads(body)["error"]["field"] is None
        assert tally.subscribers == 0

    play(scene, token=token)


def test_a_link_on_any_page_opens_the_dashboard_alone() -> None:
    paths = sorted({route.path.replace("{name}", "app.js") for route in ROUTES if route.method == "get"})
    for site in ("cross-site", "same-site"):
        asked = [(path, {"Sec-Fetch-Site": site, **OPENED}) for path in paths]
        assert statuses(asked) == [200 if path == "/" else 403 for path in paths]


def test_programs_and_the_dashboard_itself_are_answered() -> None:
    marks: list[dict[str, str]] = [
        {}, {"Sec-Fetch-Site": "none", **OPENED}, {"Sec-Fetch-Site": "same-origin", **FETCHED},
        {"Origin": "http://localhost:9464"}, {"Origin": "https://localhost:9464"},
        {"Referer": "https://evil.test/"},
    ]  # fmt: skip
    asked = [(path, one) for path in ("/", "/metrics", "/api/v1/exchanges") for one in marks]
    assert statuses(asked) == [200] * len(asked)


def test_no_answer_may_be_embedded_by_another_origin() -> None:
    async def scene(tally: ExchangePipeline, client: Client) -> None:
        for path in (*SERVED, "/none"):
            async with client.get(path) as answer:
                fields = answer.headers
            assert "frame-ancestors 'none'" in fields["Content-Security-Policy"], path
            assert {
                "Cross-Origin-Resource-Policy": "same-origin", "X-Frame-Options": "DENY",
                "X-Content-Type-Options": "nosniff", "Server": "llmtap",
            }.items() <= dict(fields).items()  # fmt: skip

    play(scene)
