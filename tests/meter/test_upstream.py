"""The upstream's own metrics, read by the meter."""

import asyncio
from contextlib import suppress

from llmtap.meter.admin.views import upstream_values
from llmtap.meter.relays import UpstreamLoad
from llmtap.sim.server.options import SimOptions
from llmtap.units import Duration
from tests.support.servers.peer import scene, wait_until
from tests.support.servers.sim_engine import CHAT, ask_chat, engine


@scene
async def test_load_and_tokens_of_the_upstream_are_read_and_forgotten_when_it_is_gone() -> None:
    async with engine(SimOptions(ttft=Duration(0), itl=Duration(0), tokens=7)) as served:
        assert (await served.answer(CHAT, ask_chat()))[0] == 200
        load = UpstreamLoad(f"{served.url}/metrics")
        reading = asyncio.create_task(load.run())
        await wait_until(lambda: bool(load.values))
        values = upstream_values(load)
        assert values["upstream_output_tokens"] == 7
        assert values["upstream_running_requests"] == values["upstream_waiting_requests"] == 0
        assert load.to_dict()["problem"] is None
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading
    reading = asyncio.create_task(load.run())
    await wait_until(lambda: load.failures == 1)
    reading.cancel()
    assert load.to_dict() == {"values": {}, "failures": 1, "problem": load.problem}
    assert load.problem
    assert upstream_values(load) == {"upstream_scrape_failures": 1}
    assert upstream_values(None) == {}
