"""Processes of a running proxy are killed, stopped and left alone: traffic passes, each exchange is counted.

Faults of files (full, read-only, removed) are in tests/proxy.
"""

import asyncio
import json
import os
import signal
import socket
from pathlib import Path

from tests.supervisor.running import (
    BODY,
    PATIENT,
    READY_S,
    Held,
    accounted,
    all_whole,
    counters,
    gone,
    is_alive,
    proxy,
    streams,
    summary,
    under_way,
)
from tests.support.servers.peer import wait_until
from tests.support.servers.raw_client import RawClient, request
from tests.support.servers.upstream import answers, upstream


async def test_a_killed_relay_costs_its_own_streams_and_they_end_as_tap_error() -> None:
    async with upstream() as up, proxy(up, workers=2) as tap:
        held, asking = await under_way(tap, up, 40)

        async def all_seen() -> bool:
            result = json.loads(await tap.read("/api/v1/streams?limit=1000") or b"{}")
            return sum(s["events"] >= 5 for s in result.get("streams", ())) == 40

        await wait_until(all_seen)
        before = tap.relays()
        os.kill(before[0], signal.SIGKILL)
        await wait_until(lambda: any(task.done() for task in asking), READY_S)
        await wait_until(lambda: len(tap.relays()) == 2 and before[0] not in tap.relays(), READY_S)
        held.go.set()
        ended = await asyncio.gather(*asking)
        whole = [x for x in ended if x.whole]
        cut = [x for x in ended if not x.whole]
        assert cut, "the dead one had streams"
        assert whole, "and so had the other"
        assert all(x.data == BODY for x in whole)
        outcomes = {"complete": len(whole), "tap_error": len(cut)}

        async def result() -> bool:
            return (await summary(tap)).get("outcomes") == outcomes

        await wait_until(result)
        exchanges = json.loads(await tap.read("/api/v1/exchanges?outcome=tap_error&limit=100") or b"")[
            "exchanges"
        ]
        assert len(exchanges) == len(cut)
        for x in exchanges:
            assert x["timeline"]["first_token"] is not None, "all that had been seen is there"
            assert x["timeline"]["response_end"] is None
        relays = (await accounted(tap, 40))["relays"].values()  # a relay away for 5 s is lost
        assert sum(r["lost"] for r in relays) == len(cut)
        assert sum(r["measured"] for r in relays) == len(whole)
        lost = await counters(tap, "llmtap_tap_lost_exchanges_total")
        assert sum(lost.values()) == len(cut)
        assert not await counters(tap, "llmtap_tap_dropped_exchanges_total"), "each is counted once"
        assert await tap.get(up.on(answers(b"served again"))) == b"served again"


def outcomes_of(log: Path) -> list[bool]:
    """Return for each exchange in the log whether it was complete."""
    lines = [line for line in log.read_text().splitlines() if "event=exchange id=" in line]
    return ["outcome=complete" in line for line in lines]


async def test_when_the_supervisor_is_killed_streams_end_measured_and_nobody_is_left(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with upstream() as up, proxy(up, workers=2, level="info", log=log) as tap:
        held, last = Held(), Held()
        asking = await streams(tap, up.on(held), 30)
        late = await streams(tap, up.on(last), 1)
        await wait_until(lambda: held.begun + last.begun == 31, READY_S)
        family = tap.family()
        assert len(family) == 3
        admin = await RawClient.connect(tap.admin)
        assert (await admin.ask(request("GET", "/readyz", host="localhost"))).status == 200
        os.kill(tap.pid, signal.SIGKILL)
        held.go.set()
        await all_whole(asking)

        async def measured() -> bool:
            answer = await admin.ask(request("GET", "/api/v1/summary?window=all", host="localhost"))
            return bool(json.loads(answer.data)["outcomes"].get("complete") == 30)

        await wait_until(measured)
        # Whoever starts the proxy anew finds its ports free while one stream still ends.
        await wait_until(lambda: free(tap.listen) and free(tap.admin), READY_S)
        last.go.set()
        await all_whole(late)
        admin.close()
        await gone(family)
    assert outcomes_of(log) == [True] * 31


def free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


async def test_sigterm_to_the_whole_family_at_once_measures_what_drains(tmp_path: Path) -> None:
    """An init system ends a service this way. Idle connections end at once, nobody is let in."""
    log = tmp_path / "log"
    async with upstream() as up, proxy(up, *PATIENT, level="info", log=log) as tap:
        held, asking = await under_way(tap, up, 10)
        idle = await tap.client()
        assert (await idle.get(up.on(answers()))).status == 200
        family = tap.family()
        for pid in [*family, tap.pid]:
            os.kill(pid, signal.SIGTERM)
        await idle.to_end()
        await wait_until(tap.refuses)
        held.go.set()
        await all_whole(asking)
        assert await tap.ended() == 0
        assert not any(is_alive(pid) for pid in family)
    assert outcomes_of(log) == [True] * 11
