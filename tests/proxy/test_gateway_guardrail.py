"""A guardrail in a gateway, measured by an experiment and by the pairs of one proxy at the same time.

The experiment selects the requests that the guardrail checks. So one run measures what the guardrail costs in
two ways: by the difference of the arms, and by the pairs.
"""

import asyncio
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

import pytest

from llmtap.exchange.exchange import FRONT
from llmtap.sim.server.options import MS, SimOptions
from llmtap.units import Duration
from tests.proxy.capturing import chat_body
from tests.support.servers.live_proxy import LiveProxy, live_proxy, port_free
from tests.support.servers.peer import chunk, play
from tests.support.servers.raw_client import RawClient, request
from tests.support.servers.sim_engine import engine
from tests.support.servers.upstream import Call, Script, upstream
from tests.support.waiting import wait_until

pytestmark = pytest.mark.realtime

CHAT: Final = "/v1/chat/completions"
N, AT_ONCE = 160, 8
HOLD, GAP_MS, INPUT_MS, OUTPUT_MS = 8, 20, 40, 20
TOKENS: Final = 3 * HOLD
STAGES_MS: Final = {"request": INPUT_MS, "block_wait": (HOLD - 1) * GAP_MS, "block_check": OUTPUT_MS}
"""Stages of the guardrail: check of the prompt, wait for a block, check of the block."""
WITHIN_MS: Final = 5
CONFIG: Final = f"""
[experiment]
enabled = true

[[experiment.arms]]
name = "plain"

[[experiment.arms]]
name = "guarded"

[experiment.arms.headers]
x-sim-input-filter = "{INPUT_MS}ms"
x-sim-output-hold = "{HOLD}"
x-sim-output-filter = "{OUTPUT_MS}ms"
"""
TOKEN: Final = re.compile(rb'"content": ?"[^"]')
PAIRED_S: Final = 60.0


@dataclass(slots=True)
class Guardrail:
    """A gateway with the guardrail of the simulated engine, which the same header fields configure."""

    port: int
    late_ms: dict[str, list[float]] = field(default_factory=lambda: {"request": [], "block_check": []})
    """Time that each of its own waits took longer than planned."""

    def script(self) -> Script:
        async def script(call: Call) -> str | None:
            body = await call.body()
            guarded = call.head.get("x-sim-output-hold") is not None
            if guarded:
                await self._wait("request", INPUT_MS)
            client = await RawClient.connect(self.port)
            await client.send(request("POST", CHAT, body=body))
            head = await client.head()
            await call.say(head.raw)
            waiting: list[bytes] = []
            while data := await client.chunk():
                waiting.append(data)
                is_full = sum(len(TOKEN.findall(data)) for data in waiting) >= HOLD
                if is_full or not guarded or b"[DONE]" in data:
                    if guarded:
                        await self._wait("block_check", OUTPUT_MS)
                    await call.say(chunk(b"".join(waiting)))
                    waiting.clear()
            await call.say(b"0\r\n\r\n")
            client.close()
            return None

        return script

    async def _wait(self, stage: str, ms: int) -> None:
        begun_ns = time.monotonic_ns()
        await asyncio.sleep(ms / 1e3)
        self.late_ms[stage].append((time.monotonic_ns() - begun_ns) / 1e6 - ms)


async def run(config: Path) -> tuple[Guardrail, dict[str, Any], list[dict[str, Any]]]:
    """Return the guardrail, the result of the experiment, and the exchanges of the front."""
    guardrail = Guardrail(port_free())
    options = SimOptions(ttft=Duration(50 * MS), itl=Duration(GAP_MS * MS), tokens=TOKENS)
    async with engine(options) as simulated, upstream() as between:
        between.at(CHAT, guardrail.script())
        pair = (f"pair.upstream={simulated.url}", f"pair.listen=127.0.0.1:{guardrail.port}")
        async with live_proxy(between.url, *pair, config=config) as proxy:
            gate = asyncio.Semaphore(AT_ONCE)
            await asyncio.gather(*(ask(proxy, gate, i) for i in range(N)))
            await wait_until(lambda: all_paired(proxy), PAIRED_S)
            result = await proxy.told("/api/v1/experiment")
            exchanges = (await proxy.told("/api/v1/exchanges?limit=1000&side=front"))["exchanges"]
        assert not between.errors
    return guardrail, result, exchanges


async def ask(proxy: LiveProxy, gate: asyncio.Semaphore, number: int) -> None:
    async with gate:
        client = await RawClient.connect(proxy.listen)
        answer = await client.post(CHAT, chat_body(f"question {number}"))
        assert answer.status == 200 and answer.whole
        client.close()


async def all_paired(proxy: LiveProxy) -> bool:
    pairs = await proxy.told("/api/v1/pairs")
    return bool(pairs and pairs["counts"]["pairs"] == N)


def test_stages_are_those_of_the_guardrail_and_the_arms_differ_by_what_the_pairs_show(tmp_path: Path) -> None:
    config = tmp_path / "llmtap.toml"
    config.write_text(CONFIG)
    guardrail, experiment, exchanges = play(run(config))
    assert len(exchanges) == N and {x["side"] for x in exchanges} == {FRONT}
    by_arm = {
        arm: [x["pair"]["figures"] for x in exchanges if x["arm"] == arm] for arm in ("plain", "guarded")
    }
    for stage, planned_ms in STAGES_MS.items():
        late_ms = median(guardrail.late_ms.get(stage, [0.0]))
        assert abs(median_ms(by_arm["guarded"], stage)["value"] - late_ms - planned_ms) <= WITHIN_MS, stage
    guarded, plain = (median_ms(by_arm[arm], "ttft") for arm in ("guarded", "plain"))
    by_pairs_ms = guarded["low"] - plain["high"], guarded["high"] - plain["low"]
    ttft = experiment["differences"]["guarded"]["ttft"]["p50"]
    by_arms_ms = [seconds * 1e3 for seconds in ttft["interval"]]
    assert by_arms_ms[0] > 0, "the experiment does not find the guardrail"
    assert by_pairs_ms[0] <= by_arms_ms[1] and by_arms_ms[0] <= by_pairs_ms[1]


def median_ms(pairs: list[dict[str, Any]], name: str) -> dict[str, float]:
    """The medians of a figure and of the ends of its range."""
    values = [pair[name][0] for pair in pairs]
    return {key: median(value[key] for value in values) * 1e3 for key in ("value", "low", "high")}
