"""An experiment on a running proxy: dealt by its relays, compared and switched by its meter."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

from llmtap.channel.experiment import Assigner
from tests.supervisor.test_supervisor import READY_S, Proxy, Slow, proxy, until
from tests.support.servers.peer import scene, wait_until
from tests.support.servers.raw_client import RawClient, request
from tests.support.servers.upstream import Upstream, answers, upstream

DEAL = Assigner("pepper", "experiment", [1, 1])
BY_ARM = [[t for t in range(50) if DEAL.arm(b"x-api-key\0%d" % t) == arm] for arm in (0, 1)]
TENANTS = [tenant for pair in zip(*BY_ARM, strict=False) for tenant in pair]
"""Old arm, new arm, old, new ..."""

TWO_UPSTREAMS = """
[relay]
upstream = "{here}"
workers = 2

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
    file.write_text(
        TWO_UPSTREAMS.format(here=here.url, there=there.url, enabled=str(enabled).lower(), more=more)
    )


async def told(tap: Proxy) -> dict[str, Any]:
    body = await tap.told("/api/v1/experiment")
    assert body is not None
    out: dict[str, Any] = json.loads(body)
    return out


async def switch(tap: Proxy, on: bool) -> None:
    client = await RawClient.connect(tap.admin)
    body = json.dumps({"enabled": on}).encode()
    raw = request(
        "POST",
        "/api/v1/experiment",
        "Content-Type: application/json",
        body=body,
        host=f"127.0.0.1:{tap.admin}",
    )
    answer = await client.ask(raw)
    assert (answer.status, json.loads(answer.data)["enabled"]) == (200, on)
    client.close()


async def ask(tap: Proxy, path: str, tenant: int) -> bytes:
    """One tenant asks, on a connection of its own, which may land on any relay."""
    client = await tap.client()
    try:
        answer = await client.post(path, b"{}", f"X-Api-Key: {tenant}")
        assert answer.status == 200
        return answer.data
    finally:
        client.close()


async def everybody(tap: Proxy, path: str) -> list[bytes]:
    return [await ask(tap, path, tenant) for tenant in TENANTS[:24]]


@scene
async def test_arms_stay_over_relays_restarts_and_reloads_and_go_off_and_on(tmp_path: Path) -> None:
    file, log = tmp_path / "llmtap.toml", tmp_path / "log"
    async with upstream() as here, upstream() as there:
        path = here.on(answers(b"old"))
        assert there.on(answers(b"new")) == path
        write(file, here, there, enabled=True)
        async with proxy(None, "--set", "log.level=info", config=file, log=log) as tap:
            await wait_until(lambda: len(tap.relays()) == 2, READY_S)
            dealt = await everybody(tap, path)
            assert dealt == [b"old", b"new"] * 12, "as whoever has the key can work out"
            for _ in range(3):
                assert await everybody(tap, path) == dealt, "sticky, whichever relay was asked"
            await tap.measured(96)
            out = await told(tap)
            units = {name: arm["units"] for name, arm in out["arms"].items()}
            assert units == {"old": dealt.count(b"old"), "new": dealt.count(b"new")}
            assert sum(arm["ended"] for arm in out["arms"].values()) == 96
            exchanges = json.loads(await tap.told("/api/v1/exchanges?limit=200") or b"")["exchanges"]
            assert {(x["arm"], x["route"]) for x in exchanges} == {
                ("old", None),
                ("new", f"upstream {there.url}"),
            }

            await switch(tap, False)
            await wait_until_all(tap, path, [b"old"] * 24)
            # Neither a new relay nor a new meter forgets what was switched.
            before, said = tap.relays()[0], log.stat().st_size
            os.kill(before, signal.SIGKILL)
            await wait_until(lambda: len(tap.relays()) == 2 and before not in tap.relays(), READY_S)
            dealt_first = await everybody(tap, path)
            # It waits for the meter's word, though not for long: a meter that gets no CPU comes too late.
            if b"experiment_not_briefed" not in log.read_bytes()[said:]:
                assert dealt_first == [b"old"] * 24
            await wait_until_all(tap, path, [b"old"] * 24)
            (meter,) = tap.meters()
            os.kill(meter, signal.SIGKILL)
            await wait_until(lambda: tap.meters() and meter not in tap.meters(), READY_S)
            await tap.ready()

            async def learnt() -> bool:
                return bool((await told(tap))["state"] == "off")

            await until(learnt, READY_S)
            assert await everybody(tap, path) == [b"old"] * 24
            await switch(tap, True)
            await wait_until_all(tap, path, dealt)

            # What the file says anew is the newer word.
            (meter,) = tap.meters()
            write(file, here, there, enabled=False)
            os.kill(tap.pid, signal.SIGHUP)
            await wait_until(lambda: tap.meters() and meter not in tap.meters(), READY_S)
            await tap.ready()
            await wait_until_all(tap, path, [b"old"] * 24)
            assert (await told(tap))["switched_by"] == "config"


async def wait_until_all(tap: Proxy, path: str, expected: list[bytes]) -> None:
    async def so() -> bool:
        return await everybody(tap, path) == expected

    await until(so, READY_S)


@scene
async def test_switching_and_reloading_under_traffic_fails_no_request(tmp_path: Path) -> None:
    file = tmp_path / "llmtap.toml"
    async with upstream() as here, upstream() as there:
        path = here.on(answers(b"old" * 500, chunks=5))
        assert there.on(answers(b"new" * 500, chunks=5)) == path
        write(file, here, there, enabled=False)
        async with proxy(None, config=file) as tap:
            stop = asyncio.Event()
            seen: list[bytes] = []

            async def load(tenant: int) -> None:
                while not stop.is_set():
                    seen.append((await ask(tap, path, tenant))[:3])

            asking = [asyncio.ensure_future(load(tenant)) for tenant in TENANTS[:6]]
            for on in (True, False, True):
                await switch(tap, on)
                n = len(seen)
                await wait_until(lambda old=n, on=on: len(seen) > old + 60 and (b"new" in seen[-30:]) is on)
            write(file, here, there, enabled=True, more='until = "1s"')
            (meter,) = tap.meters()
            os.kill(tap.pid, signal.SIGHUP)
            await wait_until(lambda: tap.meters() and meter not in tap.meters(), READY_S)
            n = len(seen)
            await wait_until(lambda: len(seen) > n + 60 and b"new" not in seen[-60:], READY_S)
            stop.set()
            await asyncio.gather(*asking)
            await tap.ready()

            async def ended() -> bool:
                return bool((await told(tap))["state"] == "ended")

            await until(ended, READY_S)


@scene
async def test_a_stream_under_way_ends_in_the_arm_it_began_in(tmp_path: Path) -> None:
    file = tmp_path / "llmtap.toml"
    async with upstream() as here, upstream() as there:
        paths = [up.on(Slow(60, 0.02)) for up in (here, there)]
        assert paths[0] == paths[1]
        write(file, here, there, enabled=True)
        async with proxy(None, config=file) as tap:
            clients = [await tap.client() for _ in range(8)]
            for tenant, client in zip(TENANTS, clients, strict=False):
                await client.send(request("POST", paths[0], f"X-Api-Key: {tenant}", body=b"{}"))
                await client.head()
            assert len(here.calls) == len(there.calls) == 4
            await switch(tap, False)
            for client in clients:
                assert (await client.chunked_payload()).data == b"hello" * 60
                client.close()
