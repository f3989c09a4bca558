"""An experiment on a running proxy: dealt by its relays, compared and switched by its meter."""

import json
import os
import signal
from pathlib import Path
from typing import Any

from llmtap.channel.experiment import Assigner
from tests.supervisor.running import (
    READY_S,
    Proxy,
    gone,
    proxy,
    replaced,
    restarted,
)
from tests.support.servers.peer import wait_until
from tests.support.servers.raw_client import RawClient, request
from tests.support.servers.upstream import Upstream, answers, upstream

DEAL = Assigner("pepper", "experiment", [1, 1])
BY_ARM = [[t for t in range(50) if DEAL.assign(b"x-api-key\0%d" % t)[0] == arm] for arm in (0, 1)]
TENANTS = [tenant for pair in zip(*BY_ARM, strict=False) for tenant in pair]
"""Old arm, new arm, old, new ..."""
DEALT = [b"old", b"new"] * 6
OLD = [b"old"] * 12

TWO_UPSTREAMS = """
[relay]
upstream = "{here}"
workers = 2
drain_timeout = "5s"

[experiment]
enabled = {enabled}
key = "pepper"
unit = "tenant"
{more}
[[experiment.arms]]
name = "old"

[[experiment.arms]]
name = "new"
upstream = "{there}"
"""


def write(file: Path, here: Upstream, there: Upstream, *, enabled: bool, more: str = "") -> None:
    text = TWO_UPSTREAMS.format(here=here.url, there=there.url, enabled=str(enabled).lower(), more=more)
    file.write_text(text)


async def result(tap: Proxy) -> dict[str, Any]:
    out: dict[str, Any] = json.loads(await tap.read("/api/v1/experiment") or b"{}")
    return out


async def until_state(tap: Proxy, state: str) -> None:
    async def so() -> bool:
        return (await result(tap)).get("state") == state

    await wait_until(so)


async def switch(tap: Proxy, on: bool) -> None:
    client = await RawClient.connect(tap.admin)
    body, host = json.dumps({"enabled": on}).encode(), f"127.0.0.1:{tap.admin}"
    raw = request("POST", "/api/v1/experiment", "Content-Type: application/json", body=body, host=host)
    answer = await client.ask(raw)
    assert (answer.status, json.loads(answer.data)["enabled"]) == (200, on)
    client.close()


async def ask(tap: Proxy, path: str, tenant: int) -> bytes:
    """Ask for one tenant, on its own connection, which may land on any relay."""
    client = await tap.client()
    try:
        answer = await client.post(path, b"{}", f"X-Api-Key: {tenant}")
        assert answer.status == 200
        return answer.data
    finally:
        client.close()


async def everybody(tap: Proxy, path: str) -> list[bytes]:
    return [await ask(tap, path, tenant) for tenant in TENANTS[: len(DEALT)]]


async def wait_until_all(tap: Proxy, path: str, expected: list[bytes]) -> None:
    async def so() -> bool:
        return await everybody(tap, path) == expected

    await wait_until(so)


async def test_arms_stay_over_relays_restarts_and_reloads_and_go_off_and_on(tmp_path: Path) -> None:
    file, log = tmp_path / "llmtap.toml", tmp_path / "log"
    async with upstream() as here, upstream() as there:
        path = here.on(answers(b"old"))
        assert there.on(answers(b"new")) == path
        write(file, here, there, enabled=True)
        async with proxy(None, config=file, log=log, level="info", workers=2) as tap:
            for _ in range(4):
                assert await everybody(tap, path) == DEALT, "as whoever has the key can work out"
            await tap.measured(48)
            out = await result(tap)
            assert {name: arm["units"] for name, arm in out["arms"].items()} == {"old": 6, "new": 6}
            assert sum(arm["ended"] for arm in out["arms"].values()) == 48
            exchanges = json.loads(await tap.read("/api/v1/exchanges?limit=200") or b"")["exchanges"]
            arms = {(x["arm"], x["route"]) for x in exchanges}
            assert arms == {("old", None), ("new", f"upstream {there.url}")}

            await switch(tap, False)
            await wait_until_all(tap, path, OLD)
            # Neither a new relay nor a new meter forgets what was switched.
            before, message = tap.relays()[0], log.stat().st_size
            os.kill(before, signal.SIGKILL)
            await wait_until(lambda: len(tap.relays()) == 2 and before not in tap.relays(), READY_S)
            dealt_first = await everybody(tap, path)
            # It waits for the meter's word, though not for long: a meter that gets no CPU comes too late.
            if b"experiment_not_briefed" not in log.read_bytes()[message:]:
                assert dealt_first == OLD
            await wait_until_all(tap, path, OLD)
            meters = tap.meters()
            os.kill(meters[0], signal.SIGKILL)
            await replaced(tap.meters, meters)
            await tap.ready()
            await until_state(tap, "off")
            assert await everybody(tap, path) == OLD
            # Nor does a new program, whose arms are the same.
            family = tap.family()
            os.kill(tap.pid, signal.SIGUSR2)
            await restarted(tap, family)
            await gone(family)
            await until_state(tap, "off")
            await wait_until_all(tap, path, OLD)
            await switch(tap, True)
            await wait_until_all(tap, path, DEALT)

            # What the file says anew is the newer word.
            meters = tap.meters()
            write(file, here, there, enabled=False)
            os.kill(tap.pid, signal.SIGHUP)
            await replaced(tap.meters, meters)
            await tap.ready()
            await wait_until_all(tap, path, OLD)
            assert (await result(tap))["switched_by"] == "config"
