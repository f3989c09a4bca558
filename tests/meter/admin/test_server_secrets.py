"""The admin token is told to nobody: not by answers, logs or URLs, and not by how long a comparison takes.

What acts is closed to other sites' pages, also what is still to be written.
"""

import hmac
import json
import logging

import pytest

from llmtap.meter.admin import server as admin
from llmtap.meter.admin.openapi import ROUTES
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from tests.meter.admin.serving import Client, play

TOKEN = "s3cret-of-the-operator"
GUESS = "gu3ss-of-a-stranger"
PATHS = sorted({route.path.replace("{name}", "app.js") for route in ROUTES} - {"/api/v1/live"})
PLACES = (
    "/metrics", "/api/v1/summary", "/api/v1/exchanges", "/api/v1/streams", "/api/v1/experiment", "/none",
)  # fmt: skip
BAD = (f"/api/v1/summary?window={'x' * 9}", "/api/v1/exchanges?colour=red", "/none")


WAYS: list[tuple[str, dict[str, str]]] = [
    *((f"?{where}{TOKEN}", {}) for where in ("token=", "access_token=", "authorization=Bearer%20")),
    *(("", {name: value}) for name, value in (
        ("Cookie", f"token={TOKEN}; llmtap.token={TOKEN}"), ("X-Api-Key", TOKEN), ("Authorization", TOKEN),
        ("Authorization", f"Basic {TOKEN}"), ("Authorization", f"Bearer  {TOKEN}"),
        ("Authorization", f"Bearer {TOKEN[:-1]}"), ("Authorization", f"Bearer {TOKEN}x"),
        ("Authorization", "Bearer "), ("Proxy-Authorization", f"Bearer {TOKEN}"),
    )),
]  # fmt: skip


def test_nothing_but_the_bearer_header_opens_anything() -> None:
    async def scene(tally: ExchangePipeline, client: Client) -> None:
        for path in PLACES:
            for query, headers in WAYS:
                async with client.get(path + query, headers=headers) as answer:
                    assert answer.status == 401, (path, query, headers)
                    assert TOKEN not in await answer.text() and "Set-Cookie" not in answer.headers

    play(scene, token=TOKEN)


def test_the_token_is_compared_whole_and_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare_digest(given: bytes, expected: bytes) -> bool:
        compared.append((given, expected))
        return hmac.compare_digest(given, expected)

    class Watched:
        """The module hmac as the admin port sees it."""

    Watched.compare_digest = staticmethod(compare_digest)  # type: ignore[attr-defined]
    monkeypatch.setattr(admin, "hmac", Watched)
    given = ("", "B", "Bearer ", f"Bearer {TOKEN[:3]}", f"Bearer {GUESS}", f"Bearer {TOKEN}")

    async def scene(tally: ExchangePipeline, client: Client) -> None:
        for told in given:
            async with client.get("/metrics", headers={"Authorization": told} if told else {}) as answer:
                assert answer.status == (200 if told.endswith(TOKEN) else 401)

    play(scene, token=TOKEN)
    # None is turned away by a shorter way: by its length, its first letter, its absence.
    assert compared == [(told.strip().encode(), f"Bearer {TOKEN}".encode()) for told in given]


def test_answers_and_logs_hold_neither_the_token_nor_a_guess_of_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    asks = [{"Authorization": f"Bearer {GUESS}"}, {"Authorization": f"Bearer {TOKEN}"}, {"Cookie": GUESS}]

    async def scene(tally: ExchangePipeline, client: Client) -> None:
        for headers in asks:
            for path in (*PATHS, *BAD):
                async with client.get(path, headers=headers) as answer:
                    told = await answer.text() + json.dumps(list(answer.headers.items()))
                    assert TOKEN not in told, path
                    assert GUESS not in told, path
            async with client.post("/api/v1/experiment", data=b"[", headers=headers) as answer:
                assert TOKEN not in await answer.text()

    play(scene, token=TOKEN)
    for record in caplog.records:
        said = record.getMessage() + str(record.exc_info or "")
        assert TOKEN not in said
        assert GUESS not in said
