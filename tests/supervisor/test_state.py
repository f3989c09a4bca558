"""Burn rates of a proxy under load that is reloaded, upgraded, killed and started again."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.supervisor.running import (
    LONG_S,
    Proxy,
    accounted,
    gone,
    proxy,
    replaced,
    restarted,
    settled,
    summary,
    write_config,
)
from tests.support.servers.peer import play
from tests.support.servers.raw_client import request
from tests.support.servers.upstream import Upstream, answers, upstream
from tests.support.waiting import wait_until

TARGET = 0.99


def write(file: Path, up: Upstream, folder: Path, *, other: str, tenants: int) -> None:
    write_config(
        file,
        up.url,
        'drain_timeout = "60s"',
        "[meter]",
        f"state = '{folder}'",
        "[slo.all]",
        'objectives = "e2e:300s"',
        f"target = {TARGET}",
        "[slo.other]",
        f'objectives = "{other}"',
        'tenants = ["nobody"]',
        "[tenants]",
        f"max = {tenants}",
    )


class Load:
    """Numbers of requests so far, and of those that the upstream failed."""

    def __init__(self) -> None:
        self.sent = self.failed = 0

    @property
    def burn_rate(self) -> float:
        return self.failed / self.sent / (1 - TARGET)

    @asynccontextmanager
    async def on(self, tap: Proxy, up: Upstream) -> AsyncIterator[None]:
        """Two clients, of whose requests every third fails. One refused or cut is an error at the end."""
        here, failing = up.on(answers(b"here")), up.on(answers(b"no", status=b"500 Broken"))
        over = asyncio.Event()

        async def client(number: int) -> None:
            while not over.is_set():
                number += 1
                status = 500 if number % 3 == 0 else 200
                self.sent += 1
                self.failed += status == 500
                one = await tap.client()
                path = failing if status == 500 else here
                assert (await one.ask(request("POST", path, body=b"{}"))).status == status
                one.close()
                await asyncio.sleep(0.02)

        tasks = [asyncio.create_task(client(n)) for n in range(2)]
        try:
            yield
        finally:
            over.set()
            await asyncio.gather(*tasks)

    async def more(self, n: int) -> None:
        enough = self.sent + n
        await wait_until(lambda: self.sent >= enough, LONG_S)


async def window(tap: Proxy) -> dict[str, Any]:
    """Return the hour of the class of all tenants."""
    found: dict[str, Any] = (await summary(tap))["slo"]["all"]["windows"]["1h"]
    return found


def test_burn_rates_outlive_a_reload_an_upgrade_a_crash_and_a_restart(tmp_path: Path) -> None:
    play(a_day_of_an_operator(tmp_path), 4 * LONG_S)


async def a_day_of_an_operator(tmp_path: Path) -> None:
    file, log, folder = tmp_path / "llmtap.toml", tmp_path / "log", tmp_path / "state"
    load = Load()
    async with upstream() as up:
        write(file, up, folder, other="e2e:1s", tenants=100)
        async with proxy(None, config=file, log=log) as tap:

            async def all_counted() -> None:
                await accounted(tap, load.sent)
                await wait_until(lambda: counted_is(tap, load.sent), LONG_S)
                hour = await window(tap)
                assert hour["burn_rate"] == pytest.approx(load.burn_rate)
                relays = (await summary(tap))["relays"].values()
                assert sum(relay["measured"] for relay in relays) == load.sent, "none went unmeasured"

            # A reload that changes tenants and another class, which a new meter is needed for.
            async with load.on(tap, up):
                await load.more(20)
                before = tap.family()
                write(file, up, folder, other="e2e:2s", tenants=200)
                os.kill(tap.pid, signal.SIGHUP)
                await restarted(tap, before)
                await gone(before)
                await load.more(20)
            await all_counted()
            # A new program.
            async with load.on(tap, up):
                await load.more(20)
                before = tap.family()
                os.kill(tap.pid, signal.SIGUSR2)
                await restarted(tap, before)
                await gone(before)
                await load.more(20)
            await all_counted()
            assert b"level=" not in log.read_bytes(), "nothing of this is a warning"
            # A crash of the meter: what was written is there, such as all that came before a reload.
            before = tap.family()
            write(file, up, folder, other="e2e:3s", tenants=300)
            os.kill(tap.pid, signal.SIGHUP)
            await restarted(tap, before)
            await gone(before)
            await all_counted()
            known, sent = await window(tap), load.sent
            meters = tap.meters()
            async with load.on(tap, up):
                await load.more(20)
                os.kill(meters[0], signal.SIGKILL)
                await replaced(tap.meters, meters)
                await tap.ready()
                hour = await window(tap)
                assert known["counted"] <= hour["counted"] <= load.sent
                assert known["counted"] - known["good"] <= hour["counted"] - hour["good"] <= load.failed
                await load.more(20)
            assert b"llmtap_meter_crashes_total 1.0" in (await tap.read("/metrics") or b"")

            async def all_settled() -> bool:
                """The relay of after the reload knows of each of its exchanges what became of it."""
                relays = (await summary(tap))["relays"].items()
                here = {"relays": {name: relay for name, relay in relays if relay["connected"]}}
                return settled(here, load.sent - sent)

            await wait_until(all_settled, LONG_S)
            known = await window(tap)
            os.kill(tap.pid, signal.SIGTERM)
            assert await tap.ended() == 0
        # Another proxy, as under systemd or Kubernetes.
        async with proxy(None, config=file, log=log) as tap:
            hour = await window(tap)
            assert (hour["counted"], hour["good"]) == (known["counted"], known["good"])
            assert hour["burn_rate"] == known["burn_rate"]
            assert b"llmtap_meter_crashes_total 1.0" in (await tap.read("/metrics") or b"")


async def counted_is(tap: Proxy, n: int) -> bool:
    return bool((await window(tap))["counted"] == n)


def test_without_a_state_folder_a_reload_keeps_the_figures_and_a_restart_does_not(tmp_path: Path) -> None:
    play(without_a_folder(tmp_path), 4 * LONG_S)


async def without_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "llmtap.toml"
    async with upstream() as up:
        path = up.on(answers(b"here"))
        write_config(file, up.url, "[tenants]", "max = 100")
        async with proxy(None, config=file) as tap:
            for _ in range(5):
                await tap.get(path)
            await tap.measured(5)
            before = tap.family()
            write_config(file, up.url, "[tenants]", "max = 200")
            os.kill(tap.pid, signal.SIGHUP)
            await restarted(tap, before)
            await gone(before)
            assert (await summary(tap))["n"] == 5
            os.kill(tap.pid, signal.SIGTERM)
            assert await tap.ended() == 0
        async with proxy(None, config=file) as tap:
            assert (await summary(tap))["n"] == 0
