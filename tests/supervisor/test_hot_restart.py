"""SIGUSR2: the program on disk takes the place of the running one, and no stream breaks.

The program is the one of this checkout, or a copy of its package that a test upgrades or spoils.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import llmtap
from tests.supervisor.own_program import OwnProgram
from tests.supervisor.running import (
    LONG_S,
    PATIENT,
    READY_S,
    Proxy,
    accounted,
    all_whole,
    children_of,
    gone,
    is_alive,
    proxy,
    replaced,
    restarted,
    under_way,
)
from tests.support.servers.live_proxy import port_free
from tests.support.servers.peer import wait_until
from tests.support.servers.raw_client import RawClient
from tests.support.servers.upstream import answers, upstream

STREAMS = 100


class Newcomers:
    """Number of requests of clients that come, ask once, and go, one after the other."""

    def __init__(self) -> None:
        self.answered = 0

    async def more(self, n: int) -> None:
        """Wait until so many more have been answered."""
        enough = self.answered + n
        await wait_until(lambda: self.answered >= enough, READY_S)


@asynccontextmanager
async def newcomers(tap: Proxy, path: str) -> AsyncIterator[Newcomers]:
    """Four clients at a time. A connection refused, or cut, is an error at the end."""
    come, over = Newcomers(), asyncio.Event()

    async def client() -> None:
        while not over.is_set():
            assert await tap.get(path) == b"here"
            come.answered += 1
            await asyncio.sleep(0.02)

    tasks = [asyncio.create_task(client()) for _ in range(4)]
    try:
        yield come
    finally:
        over.set()
        await asyncio.gather(*tasks)


async def test_a_hot_restart_breaks_no_stream_refuses_nobody_and_keeps_every_exchange(tmp_path: Path) -> None:
    kept, log = tmp_path / "kept", tmp_path / "log"
    async with upstream() as up, proxy(up, *PATIENT, "--capture", str(kept), log=log, workers=2) as tap:
        relays, meters = tap.relays(), tap.meters()
        held, asking = await under_way(tap, up, STREAMS)
        async with newcomers(tap, up.on(answers(b"here"))) as come:
            await come.more(20)
            os.kill(tap.pid, signal.SIGUSR2)
            await restarted(tap, relays)
            assert tap.process.returncode is None, "it is the same process"
            assert set(meters) < set(tap.meters()), "the old meter measures the old relays"
            assert all(is_alive(pid) for pid in relays), "which have streams to bring to their end"
            await come.more(20)
            held.go.set()
            await all_whole(asking)
            await gone(relays + meters)
            await come.more(20)
        request = STREAMS + come.answered
        assert len(tap.relays()) == 2
        assert len(tap.meters()) == 1
        result = (await accounted(tap, request))["relays"].values()
        assert sum(r["measured"] for r in result) == request, "and none went unmeasured"
        os.kill(tap.pid, signal.SIGTERM)
        assert await tap.ended() == 0
    capture = llmtap.read(kept)
    assert capture.table().num_rows == request
    (found,) = capture.integrity().captures
    assert (found.missing, found.duplicates, found.not_kept, found.meters) == (0, 0, {}, 2)
    assert found.closed
    assert not list(kept.glob(".spool/aside-*")), "the old meter's own folder went with it"
    assert "event=restarted" not in log.read_text(), "that is no warning"


@pytest.mark.parametrize("change", ["", 'level = "none"'])
async def test_a_capture_is_closed_if_a_hot_restart_changes_it_or_no_exchange_follows(
    tmp_path: Path, change: str
) -> None:
    kept, config = tmp_path / "kept", tmp_path / "llmtap.toml"
    config.write_text(f'[capture]\nto = "{kept}"\n')
    async with upstream() as up, proxy(up, *PATIENT, config=config) as tap:
        before = tap.relays() + tap.meters()
        client = await RawClient.connect(tap.listen)
        await client.get(up.on(answers(b"here")))
        client.close()
        await accounted(tap, 1)
        config.write_text(f'[capture]\nto = "{kept}"\n{change}\n')
        os.kill(tap.pid, signal.SIGUSR2)
        await restarted(tap, before)
        await gone(before)
        os.kill(tap.pid, signal.SIGTERM)
        assert await tap.ended() == 0
    (capture,) = llmtap.read(kept).integrity().captures
    assert (capture.present, capture.closed) == (1, True)


async def test_the_relay_behind_a_gateway_is_replaced_and_keeps_its_port() -> None:
    port = port_free()
    async with upstream() as up:
        pair = ("--set", f"pair.upstream={up.url}", "--set", f"pair.listen=127.0.0.1:{port}")
        async with proxy(up, *PATIENT, *pair) as tap:
            path = up.on(answers(b"here"))
            before = tap.relays()
            assert len(before) == 2
            os.kill(tap.pid, signal.SIGUSR2)
            await restarted(tap, before)
            await gone(before)
            assert len(tap.relays()) == 2
            for at in (tap.listen, port):
                client = await RawClient.connect(at)
                assert (await client.get(path)).data == b"here"
                client.close()
            os.kill(tap.pid, signal.SIGTERM)
            assert await tap.ended() == 0


async def test_a_port_that_a_hot_restart_moves_is_reported_at_its_new_address(tmp_path: Path) -> None:
    log, config, ports = tmp_path / "log", tmp_path / "llmtap.toml", (port_free(), port_free())
    config.write_text(f'[relay]\nlisten = "127.0.0.1:{ports[0]}"\n')
    async with (
        upstream() as up,
        proxy(up, *PATIENT, config=config, log=log, listen=ports[0], level="info") as tap,
    ):
        config.write_text(f'[relay]\nlisten = "127.0.0.1:{ports[1]}"\n')
        os.kill(tap.pid, signal.SIGUSR2)
        await wait_until(lambda: log.read_text().count("event=start ") == 2, LONG_S)
        path = up.on(answers(b"here"))
        client = await RawClient.connect(ports[1])
        assert (await client.get(path)).data == b"here"
        client.close()
        os.kill(tap.pid, signal.SIGTERM)
        assert await tap.ended() == 0
    starts = [line for line in log.read_text().splitlines() if "event=start " in line]
    assert [f"listen=127.0.0.1:{port} " in line for port, line in zip(ports, starts, strict=True)] == [
        True,
        True,
    ]


async def test_after_a_failed_hot_restart_a_relay_that_dies_keeps_its_side_and_port(tmp_path: Path) -> None:
    log, config, port = tmp_path / "log", tmp_path / "llmtap.toml", port_free()
    program = OwnProgram(tmp_path / "program")
    async with upstream() as up:
        config.write_text(f'[pair]\nupstream = "{up.url}"\nlisten = "127.0.0.1:{port}"\n')
        async with proxy(up, *PATIENT, config=config, log=log, program=program.folder) as tap:
            path = up.on(answers(b"here"))
            before = tap.relays()
            config.write_text("")
            program.relays_fail()
            os.kill(tap.pid, signal.SIGUSR2)
            await wait_until(lambda: b"event=restart_failed" in log.read_bytes(), LONG_S)
            program.relays_work()
            for pid in before:
                os.kill(pid, signal.SIGKILL)
            await replaced(tap.relays, before, 2)
            for at in (tap.listen, port):
                client = await RawClient.connect(at)
                assert (await client.get(path)).data == b"here"
                client.close()
            os.kill(tap.pid, signal.SIGTERM)
            assert await tap.ended() == 0


async def test_a_signal_to_the_whole_group_changes_the_program_and_nobody_outlives_the_supervisor() -> None:
    async with upstream() as up, proxy(up, *PATIENT) as tap:
        held, asking = await under_way(tap, up, 3)
        before = tap.relays()
        for pid in [*children_of(tap.pid), tap.pid]:
            os.kill(pid, signal.SIGUSR2)
        await restarted(tap, before)
        family = children_of(tap.pid)
        assert len(family) == 4
        os.kill(tap.pid, signal.SIGKILL)
        held.go.set()
        await all_whole(asking)
        await gone(family)


async def test_an_upgrade_runs_and_a_broken_one_does_not(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = OwnProgram(tmp_path / "program")
    async with upstream() as up, proxy(up, *PATIENT, log=log, program=program.folder) as tap:

        async def version() -> bytes:
            result = await tap.read("/metrics") or b""
            return next((x for x in result.splitlines() if x.startswith(b"llmtap_build_info")), b"")

        assert f'version="{llmtap.__version__}"'.encode() in await version()
        program.change("version.py", f'"{llmtap.__version__}"', '"9.9.9-test"')
        before = tap.family()
        os.kill(tap.pid, signal.SIGUSR2)
        await restarted(tap, before)
        await gone(before)
        assert b'version="9.9.9-test"' in await version()

        family = tap.family()
        program.change("config.py", '"""', 'raise RuntimeError("half an upgrade")\n"""')
        os.kill(tap.pid, signal.SIGUSR2)
        await wait_until(lambda: b"half an upgrade" in log.read_bytes(), LONG_S)
        assert b"event=restart_refused" in log.read_bytes()
        assert tap.process.returncode is None
        assert tap.family() == family
        assert await tap.get(up.on(answers(b"here"))) == b"here"


@pytest.mark.parametrize("pause_s", [0.0, 0.8])
async def test_told_to_stop_in_the_middle_it_stops_and_streams_end_first(pause_s: float) -> None:
    async with upstream() as up, proxy(up, *PATIENT) as tap:
        held, asking = await under_way(tap, up, 10)
        family = children_of(tap.pid)
        os.kill(tap.pid, signal.SIGUSR2)
        await asyncio.sleep(pause_s)  # wherever that finds it
        os.kill(tap.pid, signal.SIGTERM)
        await asyncio.sleep(0.3)
        family += children_of(tap.pid)
        held.go.set()
        await all_whole(asking)
        assert await tap.ended(LONG_S) == 0
        assert not any(is_alive(pid) for pid in family)
