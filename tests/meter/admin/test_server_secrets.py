"""The admin token is told to nobody: not by answers, logs or URLs, and not by how long a comparison takes.

What acts is closed to other sites' pages, also what is still to be written.
"""

import hmac
import json
import logging

import pytest

from llmtap.errors import ConfigError
from llmtap.meter.admin import server as admin
from llmtap.meter.admin.openapi import ROUTES
from llmtap.meter.options import MeterOptions
from tests.meter.admin.serving import admin_port, pipeline
from tests.support.traffic.experiments import an_experiment

TOKEN = "s3cret-of-the-operator"
GUESS = "gu3ss-of-a-stranger"
PATHS = sorted({route.path.replace("{name}", "app.js") for route in ROUTES} - {"/api/v1/live"})
PLACES = (
    "/metrics",
    "/api/v1/summary",
    "/api/v1/exchanges",
    "/api/v1/streams",
    "/api/v1/experiment",
    "/none",
)
BAD = (f"/api/v1/summary?window={'x' * 9}", "/api/v1/exchanges?colour=red", "/none")


@pytest.mark.parametrize("where", ["token=", "access_token=", "authorization=Bearer%20"])
async def test_a_token_in_a_url_opens_nothing(where: str) -> None:
    async with admin_port(token=TOKEN) as (_, client):
        for path in PLACES:
            async with client.get(f"{path}?{where}{TOKEN}") as answer:
                assert answer.status == 401
                assert TOKEN not in await answer.text()


@pytest.mark.parametrize(
    "headers",
    [
        {"Cookie": f"token={TOKEN}; llmtap.token={TOKEN}"},
        {"X-Api-Key": TOKEN},
        {"Authorization": TOKEN},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": f"Bearer  {TOKEN}"},
        {"Authorization": f"Bearer {TOKEN[:-1]}"},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": "Bearer "},
        {"Proxy-Authorization": f"Bearer {TOKEN}"},
    ],
)
async def test_nothing_but_the_bearer_header_opens_anything(headers: dict[str, str]) -> None:
    async with admin_port(token=TOKEN) as (_, client):
        for path in PLACES:
            async with client.get(path, headers=headers) as answer:
                assert answer.status == 401, path
                assert "Set-Cookie" not in answer.headers


async def test_the_token_is_compared_whole_and_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare_digest(given: bytes, expected: bytes) -> bool:
        compared.append((given, expected))
        return hmac.compare_digest(given, expected)

    class Watched:
        """The module hmac as the admin port sees it."""

    Watched.compare_digest = staticmethod(compare_digest)  # type: ignore[attr-defined]
    monkeypatch.setattr(admin, "hmac", Watched)
    given = ("", "B", "Bearer ", f"Bearer {TOKEN[:3]}", f"Bearer {GUESS}", f"Bearer {TOKEN}")

    async with admin_port(token=TOKEN) as (_, client):
        for credential in given:
            async with client.get(
                "/metrics", headers={"Authorization": credential} if credential else {}
            ) as answer:
                assert answer.status == (200 if credential.endswith(TOKEN) else 401)
    # None is turned away by a shorter way: by its length, its first letter, its absence.
    assert compared == [(credential.strip().encode(), f"Bearer {TOKEN}".encode()) for credential in given]


async def test_answers_and_logs_hold_neither_the_token_nor_a_guess_of_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    asks = [{"Authorization": f"Bearer {GUESS}"}, {"Authorization": f"Bearer {TOKEN}"}, {"Cookie": GUESS}]

    async with admin_port(token=TOKEN) as (_, client):
        for headers in asks:
            for path in (*PATHS, *BAD):
                async with client.get(path, headers=headers) as answer:
                    result = await answer.text() + json.dumps(list(answer.headers.items()))
                    assert TOKEN not in result, path
                    assert GUESS not in result, path
            async with client.post("/api/v1/experiment", data=b"[", headers=headers) as answer:
                assert TOKEN not in await answer.text()
    for record in caplog.records:
        message = record.getMessage() + str(record.exc_info or "")
        assert TOKEN not in message
        assert GUESS not in message


def test_options_that_cannot_be_do_not_repeat_the_token() -> None:
    for wrong in ({"admin": "0.0.0.0:9464"}, {"admin": "nonsense"}, {"admin_tls_key": "k.pem"}):
        with pytest.raises(ConfigError) as failure:
            MeterOptions(admin_token=TOKEN, **wrong)
        assert TOKEN not in str(failure.value)
    with pytest.raises(ConfigError) as failure:
        MeterOptions(admin_token=TOKEN + "é")
    assert TOKEN not in str(failure.value)


ACTING = [(route.method, route.path) for route in ROUTES if route.method not in ("get", "head")]
STRANGERS = [
    {"Origin": "https://evil.test"},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Content-Type": "text/plain"},
    {"Content-Type": "application/x-www-form-urlencoded"},
    {"Content-Type": "multipart/form-data"},
]


@pytest.mark.parametrize("token", [None, TOKEN], ids=["open", "with a token"])
@pytest.mark.parametrize("headers", STRANGERS, ids=lambda headers: next(iter(headers.values())))
async def test_what_acts_is_closed_to_other_sites_and_to_forms(
    headers: dict[str, str], token: str | None
) -> None:
    """A form and a simple request of a page (Fetch, 2.2.2) carry no JSON, and always tell their origin."""
    assert ACTING, "there is something that acts"

    async with admin_port(pipeline(an_experiment(enabled=False)), token=token) as (tally, client):
        about = {"Content-Type": "application/json", **headers}
        if token is not None:
            about["Authorization"] = f"Bearer {token}"
        for method, path in ACTING:
            async with client.request(method, path, data=b'{"enabled": true}', headers=about) as answer:
                assert answer.status in (403, 415), (method, path)
                assert "Access-Control-Allow-Origin" not in answer.headers
        assert tally.experiments.state == "off"


async def test_no_page_of_another_origin_may_read_an_answer() -> None:
    async with admin_port(token=TOKEN) as (_, client):
        for path in PATHS:
            async with client.get(path, headers={"Origin": "https://evil.test"}) as answer:
                assert "Access-Control-Allow-Origin" not in answer.headers
            about = {"Origin": "https://evil.test", "Access-Control-Request-Method": "POST"}
            async with client.options(path, headers=about) as answer:
                assert answer.status in (401, 403, 405)
                assert "Access-Control-Allow-Origin" not in answer.headers
