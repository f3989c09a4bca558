"""Tenants, their classes and costs through a real proxy: from the configuration to the API and /metrics."""

from typing import Any

import pytest

from tests.support.servers.live_proxy import live_proxy
from tests.support.servers.peer import play
from tests.support.servers.raw_client import RawClient, request
from tests.support.servers.upstream import answers, upstream

KEY = "sk-live-secret-0123456789"
EVENTS = (
    b'data: {"model":"tiny","choices":[{"index":0,"delta":{"content":"Hi"}}]}\n\n'
    b'data: {"model":"tiny","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
    b'data: {"model":"tiny","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1}}\n\n'
    b"data: [DONE]\n\n"
)
BODY = b'{"model":"tiny","stream":true,"metadata":{"team":"blue"}}'


async def metrics(admin: int) -> str:
    client = await RawClient.connect(admin)
    try:
        answer = await client.ask(request("GET", "/metrics", "Connection: close", host="localhost"))
        return answer.data.decode()
    finally:
        client.close()


async def scene() -> None:
    async with upstream() as gateway:
        stream = answers(EVENTS, fields=b"Content-Type: text/event-stream\r\n")
        path = gateway.on(stream)
        refused = gateway.on(answers(b"{}", status=b"401 Unauthorized"))
        settings = (
            'tenants.rules=[{"header":"x-team"},{"body":"metadata.team"},{"api_key":true}]',
            'tenants.names={"red":"the reds"}', "tenants.salt=pepper",
            "slo.gold.objectives=ttft:30s", 'slo.gold.tenants=["the reds"]',
            "slo.rest.objectives=e2e:30s", "slo.rest.target=0.5",
            "cost.gpus=2", "cost.gpu_hour=3.6", "meter.uncertainty_limit=100s",
        )  # fmt: skip
        async with live_proxy(gateway.url, *settings) as proxy:
            client = await RawClient.connect(proxy.listen)
            await client.post(path, BODY, "x-team: red")
            await client.post(path, BODY)
            await client.post(path, b'{"model":"tiny"}', f"authorization: Bearer {KEY}")
            await client.post(refused, b"{}", "x-team: guess")
            client.close()
            await proxy.measured(4)
            check(await proxy.told("/api/v1/summary?window=10s&by=tenant,class,series"))
            told = await proxy.told("/api/v1/exchanges?certain=1")
            assert [x["tenant"] for x in told["exchanges"]][1:] == [key_of(told), "blue", "the reds"]
            assert [x["uncertain"] for x in told["exchanges"]] == [False] * 4
            text = await metrics(proxy.admin)
    for line in (
        'llmtap_slo_events_total{slo="gold",tenant="the reds"} 1.0',
        'llmtap_slo_good_total{slo="gold",tenant="the reds"} 1.0',
        'llmtap_slo_good_total{slo="rest",tenant="blue"} 1.0',
        'llmtap_slo_objective_seconds{objective="ttft",slo="gold"} 30.0',
        'llmtap_slo_burn_rate{slo="rest",window="5m"} 0.0',
    ):
        assert line in text
    for answer in (text, str(told)):
        assert KEY not in answer
        assert KEY[8:] not in answer


def key_of(told: Any) -> str:
    names = [x["tenant"] for x in told["exchanges"] if x["tenant"].startswith("key-")]
    assert len(names) == 1
    name: str = names[0]
    return name


def check(summary: Any) -> None:
    by = summary["by"]
    assert {name: part["n"] for name, part in by["tenant"].items() if not name.startswith("key-")} == {
        "the reds": 1, "blue": 1, "other": 1,
    }  # fmt: skip
    assert {name: part["n"] for name, part in by["class"].items()} == {"gold": 1, "rest": 3}
    assert by["tenant"]["the reds"]["goodput"]["attainment"] == 1.0
    rest = by["class"]["rest"]["goodput"]
    assert (rest["met"], rest["counted"], rest["broken"]) == (2, 2, {}), "a 401 is the client's"
    assert len(by["series"]) == 4
    assert summary["slo"]["gold"]["windows"]["1h"]["good"] == 1
    assert summary["cost"]["gpu_seconds"] == pytest.approx(2 * summary["window"]["seconds"])
    assert summary["cost"]["per_good_token"] == pytest.approx(summary["cost"]["spent"] / 3)
    assert summary["uncertain"] == {"n": 0, "included": True, "limit": 100.0}
    assert summary["window"]["lag_max"] >= 0


def test_tenants_classes_and_costs_from_end_to_end() -> None:
    play(scene(), 60.0)
