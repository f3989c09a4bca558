"""Processes of a running proxy are killed, stopped and left alone: traffic passes, each exchange is counted.

The faults and when they are passed: shared/faults/capture_faults.md. What concerns files is in tests/proxy.
"""

import asyncio
import json
import os
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

from tests.supervisor.test_supervisor import READY_S, Proxy, is_alive, proxy, until
from tests.support.servers.live_proxy import port_free
from tests.support.servers.peer import chunk, play, wait_until
from tests.support.servers.raw_client import Answer, RawClient, request
from tests.support.servers.upstream import Call, Upstream, answers, upstream

LIMIT_S = 250.0
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
WORD = b'data: {"choices":[{"index":0,"delta":{"content":"word"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
BODY = WORD * 10 + DONE


class Held:
    """Streams of ten words that wait in their middle until told to go on."""

    def __init__(self) -> None:
        self.begun = 0
        self.go = asyncio.Event()

    async def __call__(self, call: Call) -> None:
        await call.body()
        await call.say(HEAD)
        for i in range(10):
            if i == 5:
                self.begun += 1
                await self.go.wait()
            await call.say(chunk(WORD))
        await call.say(chunk(DONE), b"0\r\n\r\n")


async def quick(call: Call) -> None:
    """The same without waiting."""
    await call.body()
    await call.say(HEAD, *[chunk(WORD)] * 10, chunk(DONE), b"0\r\n\r\n")


async def streams(tap: Proxy, path: str, n: int) -> "list[asyncio.Task[Answer]]":
    """So many streams, each on a connection of its own."""

    async def one() -> Answer:
        client = await tap.client()
        try:
            return await client.ask(request("POST", path, body=b'{"stream":true}'))
        finally:
            client.close()

    return [asyncio.create_task(one()) for _ in range(n)]


async def under_way(tap: Proxy, up: Upstream, n: int) -> "tuple[Held, list[asyncio.Task[Answer]]]":
    """So many streams, all waiting in their middle."""
    held = Held()
    asking = await streams(tap, up.on(held), n)
    await wait_until(lambda: held.begun == n, READY_S)
    return held, asking


async def summary(tap: Proxy) -> dict[str, Any]:
    told = await tap.told("/api/v1/summary?window=all")
    return {} if told is None else dict(json.loads(told))


async def counters(tap: Proxy, name: str) -> dict[str, float]:
    """Of a counter of the exposition: value by its labels, as written."""
    text = (await tap.told("/metrics") or b"").decode()
    return {labels: float(value) for labels, value in re.findall(rf"^{name}(\{{.*\}}) (\S+)$", text, re.M)}


def settled(told: dict[str, Any], opened: int) -> bool:
    """Every exchange has become one thing, and all relays together opened so many."""
    relays = told.get("relays", {}).values()
    return (
        sum(r.get("opened", 0) for r in relays) == opened
        and all("opened" in r for r in relays)
        and all(r["opened"] == r["measured"] + sum(r["dropped"].values()) + r["lost"] for r in relays)
    )


def test_a_killed_relay_costs_its_own_streams_and_they_end_as_tap_error() -> None:
    async def scenario() -> None:
        async with upstream() as up, proxy(up, "--workers", "2") as tap:
            await wait_until(lambda: len(tap.relays()) == 2, READY_S)
            held, asking = await under_way(tap, up, 40)

            async def all_seen() -> bool:
                told = json.loads(await tap.told("/api/v1/streams?limit=1000") or b"{}")
                return sum(s["events"] >= 5 for s in told.get("streams", ())) == 40

            await until(all_seen, READY_S)
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

            async def told() -> bool:
                return (await summary(tap)).get("outcomes") == {
                    "complete": len(whole),
                    "tap_error": len(cut),
                }

            await until(told, READY_S)
            answer = await tap.told("/api/v1/exchanges?outcome=tap_error&limit=100")
            assert answer is not None
            exchanges = json.loads(answer)["exchanges"]
            assert len(exchanges) == len(cut)
            for x in exchanges:
                assert x["timeline"]["first_token"] is not None, "all that had been seen is there"
                assert x["timeline"]["response_end"] is None

            async def counted() -> bool:
                return settled(await summary(tap), 40)

            await until(counted, READY_S)  # a relay that does not come back for 5 s is lost
            relays = (await summary(tap))["relays"].values()
            assert sum(r["lost"] for r in relays) == len(cut)
            assert sum(r["measured"] for r in relays) == len(whole)
            dropped = await counters(tap, "llmtap_tap_dropped_exchanges_total")
            assert [n for labels, n in dropped.items() if "relay_lost" in labels] == [len(cut)]
            assert await tap.get(up.on(answers(b"served again"))) == b"served again"

    play(scenario(), limit_s=LIMIT_S)


def test_a_meter_killed_under_two_hundred_streams_is_counted_to_the_exchange() -> None:
    async def scenario() -> None:
        async with upstream() as up, proxy(up) as tap:
            held, asking = await under_way(tap, up, 200)
            (before,) = tap.meters()
            os.kill(before, signal.SIGKILL)
            await wait_until(lambda: tap.meters() and before not in tap.meters(), READY_S)
            held.go.set()
            for answer in await asyncio.gather(*asking):
                assert answer.whole
                assert answer.data == BODY
            await tap.ready()
            assert await tap.get(up.on(answers(b"after"))) == b"after"

            async def counted() -> bool:
                return settled(await summary(tap), 201)

            await until(counted, READY_S)
            (relay,) = (await summary(tap))["relays"].values()
            lost = relay["dropped"]
            assert lost.pop("no_meter", 0) <= 1, "the last one, where it came before the new meter"
            assert lost == {"meter_lost": 200}

    play(scenario(), limit_s=LIMIT_S)


def test_a_stopped_meter_costs_whole_exchanges_and_its_bound_of_memory() -> None:
    bound = 1 << 20

    async def scenario() -> None:
        async with upstream() as up, proxy(up, "--set", f"relay.tap_bytes={bound}") as tap:
            path = up.on(answers(b"d" * 50_000, chunks=20))
            client = await tap.client()
            for _ in range(60):  # what the relay takes once, buffers and code, is no growth
                assert (await client.get(path)).data == b"d" * 50_000

            async def warm() -> bool:
                return settled(await summary(tap), 60)

            await until(warm, READY_S)
            (relay,) = tap.relays()
            rss_before = rss_bytes(relay)
            (meter,) = tap.meters()
            os.kill(meter, signal.SIGSTOP)
            try:
                began = time.monotonic()
                n = 60
                while time.monotonic() - began < 3 or n < 400:
                    assert (await client.get(path)).data == b"d" * 50_000
                    n += 1
                grown = rss_bytes(relay) - rss_before
            finally:
                os.kill(meter, signal.SIGCONT)
            assert grown < 4 * bound, (
                "the rows, their batches, and the allocator's share; not 20 MB of bodies"
            )

            async def counted() -> bool:
                return settled(await summary(tap), n)

            await until(counted, READY_S)
            told = await summary(tap)
            (about,) = told["relays"].values()
            assert set(about["dropped"]) == {"overflow"}
            assert about["measured"] == told["n"] == told["outcomes"]["complete"] < n
            assert (await client.get(path)).data == b"d" * 50_000
            await tap.measured(told["n"] + 1)
            client.close()

    play(scenario(), limit_s=LIMIT_S)


def rss_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def exchange_lines(log: Path) -> list[str]:
    return [line for line in log.read_text().splitlines() if "event=exchange id=" in line]


def test_when_the_supervisor_is_killed_streams_end_measured_and_nobody_is_left(tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def scenario() -> None:
        async with upstream() as up, proxy(up, "--workers", "2", "--set", "log.level=info", log=log) as tap:
            await wait_until(lambda: len(tap.relays()) == 2, READY_S)
            held, last = Held(), Held()
            asking = await streams(tap, up.on(held), 30)
            late = await streams(tap, up.on(last), 1)
            await wait_until(lambda: held.begun + last.begun == 31, READY_S)
            admin = await RawClient.connect(tap.admin)
            assert (await admin.ask(request("GET", "/readyz", host="localhost"))).status == 200
            family = tap.relays() + tap.meters()
            assert len(family) == 3
            os.kill(tap.pid, signal.SIGKILL)
            held.go.set()
            for answer in await asyncio.gather(*asking):
                assert answer.whole
                assert answer.data == BODY

            async def measured() -> bool:
                answer = await admin.ask(request("GET", "/api/v1/summary?window=all", host="localhost"))
                return bool(json.loads(answer.data)["outcomes"].get("complete") == 30)

            await until(measured, READY_S)
            # Whoever starts the proxy anew finds its ports free while one stream still ends.
            await wait_until(lambda: free(tap.listen) and free(tap.admin), READY_S)
            last.go.set()
            (answer,) = await asyncio.gather(*late)
            assert answer.whole
            admin.close()
            await wait_until(lambda: not any(is_alive(p) for p in family), READY_S)

    play(scenario(), limit_s=LIMIT_S)
    ended = exchange_lines(log)
    assert len(ended) == 31
    assert all("outcome=complete" in line for line in ended)


def free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def test_sigterm_to_the_whole_family_at_once_measures_what_drains(tmp_path: Path) -> None:
    """As an init system ends a service: every process is told at the same time."""
    log = tmp_path / "log"

    async def scenario() -> None:
        async with upstream() as up, proxy(up, "--set", "log.level=info", log=log) as tap:
            held, asking = await under_way(tap, up, 10)
            family = tap.relays() + tap.meters()
            for pid in [*family, tap.pid]:
                os.kill(pid, signal.SIGTERM)
            await until(tap.refuses, READY_S)
            held.go.set()
            assert all(answer.whole for answer in await asyncio.gather(*asking))
            assert await tap.ended() == 0
            assert not any(is_alive(pid) for pid in family)

    play(scenario(), limit_s=LIMIT_S)
    assert sum("outcome=complete" in line for line in exchange_lines(log)) == 10


def test_a_reload_renews_the_meter_at_once_although_relays_stay(tmp_path: Path) -> None:
    file = tmp_path / "llmtap.toml"

    async def scenario() -> None:
        async with upstream() as up:
            file.write_text(f'[relay]\nupstream = "{up.url}"\n')
            async with proxy(None, config=file) as tap:
                (before,) = tap.meters()
                held, asking = await under_way(tap, up, 5)
                file.write_text(f'[relay]\nupstream = "{up.url}"\n[slo.chat]\nobjectives = "ttft:1s"\n')
                os.kill(tap.pid, signal.SIGHUP)
                await wait_until(lambda: tap.meters() and before not in tap.meters(), READY_S)
                held.go.set()
                assert all(answer.whole for answer in await asyncio.gather(*asking))

    play(scenario(), limit_s=LIMIT_S)


def test_a_relay_held_for_300_ms_says_so_in_lag_and_in_what_it_measured() -> None:
    held_s = 0.35

    async def scenario() -> None:
        async with upstream() as up, proxy(up) as tap:
            held = Held()
            quiet = await streams(tap, up.on(quick), 1)
            assert (await quiet[0]).whole
            await tap.measured(1)
            (before,) = json.loads(await tap.told("/api/v1/exchanges") or b"")["exchanges"]
            asking = await streams(tap, up.on(held), 3)
            await wait_until(lambda: held.begun == 3, READY_S)
            await asyncio.sleep(0.6)  # a status has told the lag until now
            (relay,) = tap.relays()
            os.kill(relay, signal.SIGSTOP)
            held.go.set()
            await asyncio.sleep(held_s)
            os.kill(relay, signal.SIGCONT)
            assert all(answer.whole for answer in await asyncio.gather(*asking))
            await tap.measured(4)
            answer = await tap.told("/api/v1/exchanges?uncertain=1")
            assert answer is not None
            uncertain = json.loads(answer)["exchanges"]
            assert len(uncertain) >= 3
            # On a busy machine the one before may have been held as well.
            those_held = [x for x in uncertain if x["id"] != before["id"]]
            assert [x["uncertainty"] >= 0.3 for x in those_held] == [True] * 3
            certain = await tap.told("/api/v1/summary?window=all&certain=1")
            assert certain is not None
            assert json.loads(certain)["n"] == 4 - len(uncertain), "figures can leave them out"

            async def shown() -> bool:
                lags = await counters(tap, "llmtap_tap_loop_lag_seconds_bucket")
                beyond = {labels: n for labels, n in lags.items() if 'le="0.2"' in labels or "+Inf" in labels}
                return len(set(beyond.values())) > 1

            await until(shown, READY_S)

    play(scenario(), limit_s=LIMIT_S)


def test_scrapes_without_end_and_a_collector_that_is_away_touch_no_traffic() -> None:
    spans, n = 20, 120

    async def scenario(up: Upstream, tap: Proxy) -> None:
        path = up.on(quick)
        over = asyncio.Event()
        scrapes = 0

        async def scrape() -> None:
            nonlocal scrapes
            client = await RawClient.connect(tap.admin)
            while not over.is_set():
                answer = await client.ask(request("GET", "/metrics", host="localhost"))
                assert answer.status == 200
                scrapes += 1
                await asyncio.sleep(0.1)
            client.close()

        scraping = asyncio.create_task(scrape())
        for _ in range(n // 10):
            for answer in await asyncio.gather(*await streams(tap, path, 10)):
                assert answer.whole
                assert answer.data == BODY
        await wait_until(lambda: scrapes > 10, READY_S)
        over.set()
        await scraping

        async def accounted() -> bool:
            queued = sum((await counters(tap, "llmtap_export_queued_spans")).values())
            dropped = sum((await counters(tap, "llmtap_export_dropped_total")).values())
            sent = sum((await counters(tap, "llmtap_export_sent_total")).values())
            assert queued <= spans
            return sent == 0 and queued + dropped == n and dropped >= n - spans

        await until(accounted, READY_S)

    async def run() -> None:
        away = port_free()
        settings = [f"otlp.endpoint=http://127.0.0.1:{away}", f"otlp.queue_max={spans}", "otlp.timeout=1s"]
        args = [arg for setting in settings for arg in ("--set", setting)]
        async with upstream() as up, proxy(up, *args) as tap:
            await scenario(up, tap)

    play(run(), limit_s=LIMIT_S)
