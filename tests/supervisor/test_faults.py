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
    replaced,
    streams,
    summary,
    under_way,
    until,
)
from tests.support.servers.live_proxy import port_free
from tests.support.servers.peer import scene, wait_until
from tests.support.servers.raw_client import RawClient, request
from tests.support.servers.upstream import answers, upstream


@scene
async def test_a_killed_relay_costs_its_own_streams_and_they_end_as_tap_error() -> None:
    async with upstream() as up, proxy(up, workers=2) as tap:
        held, asking = await under_way(tap, up, 40)

        async def all_seen() -> bool:
            told = json.loads(await tap.told("/api/v1/streams?limit=1000") or b"{}")
            return sum(s["events"] >= 5 for s in told.get("streams", ())) == 40

        await until(all_seen)
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

        async def told() -> bool:
            return (await summary(tap)).get("outcomes") == outcomes

        await until(told)
        exchanges = json.loads(await tap.told("/api/v1/exchanges?outcome=tap_error&limit=100") or b"")[
            "exchanges"
        ]
        assert len(exchanges) == len(cut)
        for x in exchanges:
            assert x["timeline"]["first_token"] is not None, "all that had been seen is there"
            assert x["timeline"]["response_end"] is None
        relays = (await accounted(tap, 40))["relays"].values()  # a relay away for 5 s is lost
        assert sum(r["lost"] for r in relays) == len(cut)
        assert sum(r["measured"] for r in relays) == len(whole)
        dropped = await counters(tap, "llmtap_tap_dropped_exchanges_total")
        assert [n for labels, n in dropped.items() if "relay_lost" in labels] == [len(cut)]
        assert await tap.get(up.on(answers(b"served again"))) == b"served again"


@scene
async def test_a_meter_killed_under_two_hundred_streams_is_counted_to_the_exchange() -> None:
    async with upstream() as up, proxy(up) as tap:
        held, asking = await under_way(tap, up, 200)
        before = tap.meters()
        os.kill(before[0], signal.SIGKILL)
        await replaced(tap.meters, before)
        held.go.set()
        await all_whole(asking)
        await tap.ready()
        assert await tap.get(up.on(answers(b"after"))) == b"after"
        (relay,) = (await accounted(tap, 201))["relays"].values()
        lost = relay["dropped"]
        assert lost.pop("no_meter", 0) <= 1, "the last one, where it came before the new meter"
        assert lost == {"meter_lost": 200}


@scene
async def test_a_stopped_meter_costs_whole_exchanges_and_its_bound_of_memory() -> None:
    """A relay holds at most `tap_bytes` of frames in rows and batches, and packs at most that much anew.

    To this the cyclic garbage collector adds what it has not yet collected: at most 1 KiB per exchange.
    The bodies of these exchanges are 20 MB.
    """
    bound, before, n = 1 << 20, 60, 400
    async with upstream() as up, proxy(up, "--set", f"relay.tap_bytes={bound}") as tap:
        path = up.on(answers(b"d" * 50_000, chunks=20))
        client = await tap.client()

        async def ask(times: int) -> None:
            for _ in range(times):
                assert (await client.get(path)).data == b"d" * 50_000

        await ask(before)  # buffers and code that the relay takes once are no growth
        await accounted(tap, before)
        (relay,), (meter,) = tap.relays(), tap.meters()
        rss_before = rss_bytes(relay)
        os.kill(meter, signal.SIGSTOP)
        try:
            await ask(n)
            grown = rss_bytes(relay) - rss_before
        finally:
            os.kill(meter, signal.SIGCONT)
        assert grown < 2 * bound + n * 1024
        told = await accounted(tap, before + n)
        (about,) = told["relays"].values()
        assert set(about["dropped"]) == {"overflow"}
        assert about["measured"] == told["n"] == told["outcomes"]["complete"] < before + n
        await ask(1)
        await tap.measured(told["n"] + 1)
        client.close()


def rss_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def outcomes_of(log: Path) -> list[bool]:
    """Return for each exchange in the log whether it was complete."""
    lines = [line for line in log.read_text().splitlines() if "event=exchange id=" in line]
    return ["outcome=complete" in line for line in lines]


@scene
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

        await until(measured)
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


@scene
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
        await until(tap.refuses)
        held.go.set()
        await all_whole(asking)
        assert await tap.ended() == 0
        assert not any(is_alive(pid) for pid in family)
    assert outcomes_of(log) == [True] * 11


@scene
async def test_a_relay_held_for_300_ms_says_so_in_lag_and_in_what_it_measured() -> None:
    async with upstream() as up, proxy(up) as tap:
        quiet = Held()
        quiet.go.set()
        await all_whole(await streams(tap, up.on(quiet), 1))
        await tap.measured(1)
        (before,) = json.loads(await tap.told("/api/v1/exchanges") or b"")["exchanges"]
        held, asking = await under_way(tap, up, 3)
        await asyncio.sleep(0.6)  # a status has told the lag until now
        (relay,) = tap.relays()
        os.kill(relay, signal.SIGSTOP)
        held.go.set()
        await asyncio.sleep(0.35)
        os.kill(relay, signal.SIGCONT)
        await all_whole(asking)
        await tap.measured(4)
        uncertain = json.loads(await tap.told("/api/v1/exchanges?uncertain=1") or b"")["exchanges"]
        # On a busy machine the one before may have been held as well.
        those_held = [x for x in uncertain if x["id"] != before["id"]]
        assert [x["uncertainty"] >= 0.3 for x in those_held] == [True] * 3
        certain = json.loads(await tap.told("/api/v1/summary?window=all&certain=1") or b"")
        assert certain["n"] == 4 - len(uncertain), "figures can leave them out"

        async def shown() -> bool:
            lags = await counters(tap, "llmtap_tap_loop_lag_seconds_bucket")
            beyond = {labels: n for labels, n in lags.items() if 'le="0.2"' in labels or "+Inf" in labels}
            return len(set(beyond.values())) > 1

        await until(shown)


@scene
async def test_scrapes_without_end_and_a_collector_that_is_away_touch_no_traffic() -> None:
    spans, n = 20, 120
    settings = (f"otlp.endpoint=http://127.0.0.1:{port_free()}", f"otlp.queue_max={spans}", "otlp.timeout=1s")
    args = [arg for setting in settings for arg in ("--set", setting)]
    async with upstream() as up, proxy(up, *args) as tap:
        quick = Held()
        quick.go.set()
        over = asyncio.Event()
        scrapes = 0

        async def scrape() -> None:
            nonlocal scrapes
            client = await RawClient.connect(tap.admin)
            while not over.is_set():
                assert (await client.ask(request("GET", "/metrics", host="localhost"))).status == 200
                scrapes += 1
                await asyncio.sleep(0.05)
            client.close()

        scraping = asyncio.create_task(scrape())
        for _ in range(n // 10):
            await all_whole(await streams(tap, up.on(quick), 10))
        await wait_until(lambda: scrapes > 10, READY_S)
        over.set()
        await scraping

        async def counted() -> bool:
            queued, dropped, sent = [
                sum((await counters(tap, f"llmtap_export_{name}")).values())
                for name in ("queued_spans", "dropped_total", "sent_total")
            ]
            assert queued <= spans
            return sent == 0 and queued + dropped == n and dropped >= n - spans

        await until(counted)
