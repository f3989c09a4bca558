"""The wait of an exchange beside those of the last hour, as the admin API reports it."""

from typing import Any

from llmtap.clock import ManualClock
from llmtap.exchange.exchange import Exchange
from llmtap.meter.options import MeterOptions
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from llmtap.metrics.phases import PHASES, STREAMS_NEEDED
from tests.meter.admin.serving import admin_port
from tests.support.traffic.exchanges import streamed

S = 1_000_000_000
MS = 1_000_000


def pipeline() -> ExchangePipeline:
    return ExchangePipeline(MeterOptions(), ManualClock(now_ns=S))


def ended(tally: ExchangePipeline, *exchanges: Exchange) -> None:
    for x in exchanges:
        tally.on_open()
        tally.on_end(x)


def slow(seq: int) -> Exchange:
    """The usual exchange, except that the head comes 2 s later."""
    x = streamed(seq)
    for name in ("head", "first_byte", "first_any", "first_token", "first_content"):
        setattr(x.timeline, f"{name}_ns", getattr(x.timeline, f"{name}_ns") + 2 * S)
    return x


async def answered(tally: ExchangePipeline, seq: int) -> dict[str, Any]:
    async with (
        admin_port(tally) as (_, client),
        client.get("/api/v1/first_token", params={"id": f"run.0.1-{seq}"}) as response,
    ):
        assert response.status == 200
        document: dict[str, Any] = (await response.json())["first_token"]
        return document


async def test_the_slow_part_is_named_with_the_number_of_streams() -> None:
    tally = pipeline()
    ended(tally, *(streamed(i) for i in range(1, STREAMS_NEEDED + 1)), slow(999))
    answer = await answered(tally, 999)
    assert [part["name"] for part in answer["parts"]] == [phase.name for phase in PHASES]
    assert [part["name"] for part in answer["parts"] if part["unusual"]] == ["head"]
    assert (answer["n"], answer["n_needed"], answer["same_model"]) == (
        STREAMS_NEEDED + 1,
        STREAMS_NEEDED,
        True,
    )
    assert answer["waited"] == 2.1
    assert "'response head' took 2,089 ms" in answer["sentence"]
    assert f"{STREAMS_NEEDED + 1} streams" in answer["sentence"]
    assert not any(part["unusual"] for part in (await answered(tally, 1))["parts"])


async def test_streams_of_other_models_and_of_the_hour_before_are_not_compared() -> None:
    tally = pipeline()
    clock = tally.clock
    assert isinstance(clock, ManualClock)
    ended(tally, *(streamed(i) for i in range(1, 10)))
    clock.advance(1_800 * S)
    ended(tally, *(streamed(i) for i in range(10, 15)), streamed(20, model="big"))
    assert (await answered(tally, 14))["n"] == 14
    assert (await answered(tally, 20))["n"] == 1
    clock.advance(2_000 * S)
    assert (await answered(tally, 14))["n"] == 5
    clock.advance(3_600 * S)
    last = await answered(tally, 14)
    assert (last["n"], last["same_model"]) == (0, False)
    assert last["parts"][0]["median"] is None


async def test_an_exchange_that_is_not_kept_and_an_invalid_query() -> None:
    async with admin_port(pipeline()) as (_, client):
        async with client.get("/api/v1/first_token?id=nobody") as response:
            assert (response.status, await response.json()) == (200, {"first_token": None})
        for query, field in (("", "id"), ("?id=a&window=1h", "window")):
            async with client.get(f"/api/v1/first_token{query}") as response:
                assert response.status == 400
                assert (await response.json())["error"]["field"] == field
