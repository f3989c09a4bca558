"""The switch over HTTP: easy for who runs the tap, closed to a page in somebody's browser."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from llmtap.channel.experiment import Experiment, switch_word
from llmtap.clock import ManualClock
from llmtap.meter.admin.server import admin_app
from llmtap.meter.options import MeterOptions
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from tests.support.experiments import an_experiment
from tests.support.streams import streamed

Client = TestClient[Any, Any]
PATH = "/api/v1/experiment"


def play(
    scene: Callable[[ExchangePipeline, Client], Awaitable[None]],
    experiment: Experiment | None = None,
    token: str | None = None,
) -> None:
    tally = ExchangePipeline(MeterOptions(), ManualClock(now_ns=1), experiment)

    async def run() -> None:
        async with TestClient(TestServer(admin_app(tally, token))) as client:
            await scene(tally, client)

    asyncio.run(run())


async def post(client: Client, data: bytes = b'{"enabled": true}', **headers: str) -> tuple[int, Any]:
    named = {"Content-Type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
    async with client.post(PATH, data=data, headers=named) as answer:
        assert answer.content_type == "application/json"
        return answer.status, json.loads(await answer.read())


def test_what_runs_can_be_read_and_switched() -> None:
    experiment = an_experiment(enabled=False)

    async def scene(tally: ExchangePipeline, client: Client) -> None:
        words: list[int] = []
        tally.experiments.join(0, words.append)
        x = streamed(100, 140)
        x.arm, x.unit = "control", "ab"
        tally.ended(x)
        async with client.get(PATH) as answer:
            out = await answer.json()
        assert (out["name"], out["state"], out["enabled"]) == ("test", "off", False)
        assert out["arms"]["control"]["metrics"]["ttft"]["mean"] == 0.1
        status, out = await post(client)
        assert (status, out["state"], out["switched_by"]) == (200, "running", "api")
        assert (await post(client, b'{"enabled": false}'))[1]["state"] == "off"
        assert words == [switch_word(experiment.id, on) for on in (False, True, False)]

    play(scene, experiment)


def test_without_an_experiment_there_is_nothing_to_switch() -> None:
    async def scene(tally: ExchangePipeline, client: Client) -> None:
        async with client.get(PATH) as answer:
            assert await answer.json() == {"state": "none"}
        status, out = await post(client)
        assert status == 409
        assert "no experiment" in out["error"]["message"]

    play(scene)


def test_what_is_over_is_not_begun_again() -> None:
    async def scene(tally: ExchangePipeline, client: Client) -> None:
        assert (await post(client))[0] == 409
        assert (await post(client, b'{"enabled": false}'))[0] == 200

    play(scene, an_experiment(until="1s"))


@pytest.mark.parametrize(
    ("headers", "data", "status"),
    [
        ({"Content_Type": "text/plain"}, b'{"enabled": true}', 415),
        ({"Content_Type": "application/x-www-form-urlencoded"}, b"enabled=true", 415),
        ({"Origin": "https://evil.test"}, b'{"enabled": true}', 403),
        ({"Origin": "null"}, b'{"enabled": true}', 403),
        ({"Sec_Fetch_Site": "cross-site"}, b'{"enabled": true}', 403),
        ({"Sec_Fetch_Site": "same-site"}, b'{"enabled": true}', 403),
        ({"Host": "rebound.test"}, b'{"enabled": true}', 403),
        ({"Host": "127.0.0.1.evil.test:9464"}, b'{"enabled": true}', 403),
        ({}, b"", 400),
        ({}, b"[]", 400),
        ({}, b'{"enabled": "yes"}', 400),
        ({}, b'{"enabled": true, "name": "x"}', 400),
        ({}, b'{"enabled": true}' + b" " * 5_000, 413),
    ],
)
def test_who_may_not_switch_is_told_so_and_nothing_changes(
    headers: dict[str, str], data: bytes, status: int
) -> None:
    async def scene(tally: ExchangePipeline, client: Client) -> None:
        found, out = await post(client, data, **headers)
        assert found == status
        assert out["error"]["message"]
        assert tally.experiments.state == "off"

    play(scene, an_experiment(enabled=False))


@pytest.mark.parametrize("host", ["localhost:9464", "127.0.0.1", "127.8.8.8:1", "[::1]:9464"])
def test_a_loopback_name_is_fine(host: str) -> None:
    async def scene(tally: ExchangePipeline, client: Client) -> None:
        assert (await post(client, Host=host))[0] == 200
        assert (await post(client, Host=host, Origin=f"http://{host}", Sec_Fetch_Site="same-origin"))[
            0
        ] == 200

    play(scene, an_experiment(enabled=False))


def test_with_a_token_the_token_is_asked_for() -> None:
    async def scene(tally: ExchangePipeline, client: Client) -> None:
        assert (await post(client))[0] == 401
        async with client.get(PATH) as answer:
            assert answer.status == 401
        assert tally.experiments.state == "off"
        assert (await post(client, Authorization="Bearer s3cret", Host="tap.example"))[0] == 200
        assert (
            await post(client, Authorization="Bearer s3cret", Host="tap.example", Origin="https://evil.test")
        )[0] == 403

    play(scene, an_experiment(enabled=False), token="s3cret")
