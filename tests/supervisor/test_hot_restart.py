"""SIGUSR2: the program on disk takes the place of the running one, and no stream breaks.

The program is the one of this checkout, or a copy of its package that a test upgrades or spoils.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import llmtap
from tests.supervisor.own_program import OwnProgram
from tests.supervisor.test_experiment import everybody, switch, wait_until_all, write
from tests.supervisor.test_experiment import told as experiment
from tests.supervisor.test_faults import BODY, Held, settled, streams, summary, under_way
from tests.supervisor.test_ports import STARTER
from tests.supervisor.test_supervisor import CLEAN, READY_S, Proxy, children_of, is_alive, proxy, until
from tests.support.servers.peer import play, wait_until
from tests.support.servers.raw_client import RawClient
from tests.support.servers.upstream import answers, upstream

LIMIT_S = 250.0
LONG_S = 120.0
"""For a check, a new program, a new meter and new relays, on a machine that is busy."""

PATIENT = ("--set", "relay.drain_timeout=200s")
"""What is to drain whole does so on a machine that is busy, too."""


class Newcomers:
    """Clients that come, ask once, and go, one after the other, until told to stop."""

    def __init__(self, tap: Proxy, path: str) -> None:
        self._tap = tap
        self._path = path
        self.answered = 0
        self._over = False

    async def come(self) -> None:
        while not self._over:
            assert await self._tap.get(self._path) == b"here"
            self.answered += 1

    async def more(self, n: int) -> None:
        """Until so many more have been answered."""
        enough = self.answered + n
        await wait_until(lambda: self.answered >= enough, READY_S)

    def stop(self) -> None:
        self._over = True


@asynccontextmanager
async def newcomers(tap: Proxy, path: str) -> AsyncIterator[Newcomers]:
    """Some at a time. A connection refused, or cut, is an error at the end."""
    come = Newcomers(tap, path)
    tasks = [asyncio.create_task(come.come()) for _ in range(4)]
    try:
        yield come
    finally:
        come.stop()
        await asyncio.gather(*tasks)


async def restarted(tap: Proxy, before: list[int]) -> None:
    """Until relays that were not there before are ready, and known to a meter."""

    async def there() -> bool:
        if not set(tap.relays()) - set(before):
            return False
        told = (await summary(tap)).get("relays", {})
        fresh = {r["pid"] for r in told.values() if r["connected"] and "opened" in r} - set(before)
        return bool(fresh & set(tap.relays()))

    await until(there, LONG_S)


async def gone(pids: list[int], seconds: float = LONG_S) -> None:
    await wait_until(lambda: not any(is_alive(pid) for pid in pids), seconds)


def test_a_hot_restart_breaks_no_stream_refuses_nobody_and_keeps_every_exchange(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    asked = 0

    async def scenario() -> None:
        nonlocal asked
        async with (
            upstream() as up,
            proxy(up, *PATIENT, "--workers", "2", "--capture", str(kept), log=tmp_path / "log") as tap,
        ):
            await wait_until(lambda: len(tap.relays()) == 2, READY_S)
            relays, meters = tap.relays(), tap.meters()
            held, asking = await under_way(tap, up, 40)
            async with newcomers(tap, up.on(answers(b"here"))) as come:
                await come.more(20)
                os.kill(tap.pid, signal.SIGUSR2)
                await restarted(tap, relays)
                assert tap.process.returncode is None, "it is the same process"
                assert set(meters) < set(tap.meters()), "the old meter measures the old relays"
                assert all(is_alive(pid) for pid in relays), "which have streams to bring to their end"
                await come.more(20)
                held.go.set()
                for answer in await asyncio.gather(*asking):
                    assert answer.whole
                    assert answer.data == BODY
                await gone(relays + meters)
                await come.more(20)
            asked = 40 + come.answered
            assert len(tap.relays()) == 2
            assert len(tap.meters()) == 1

            async def counted() -> bool:
                return settled(await summary(tap), asked)

            await until(counted, READY_S)
            told = (await summary(tap))["relays"].values()
            assert sum(r["measured"] for r in told) == asked, "and none went unmeasured"
            os.kill(tap.pid, signal.SIGTERM)
            assert await tap.ended(READY_S) == 0

    play(scenario(), limit_s=LIMIT_S)
    capture = llmtap.read(kept)
    assert capture.table().num_rows == asked
    (found,) = capture.integrity().captures
    assert (found.missing, found.duplicates, found.not_kept, found.meters) == (0, 0, {}, 2)
    assert found.closed
    assert not list(kept.glob(".spool/aside-*")), "the old meter's own folder went with it"
    assert "event=restarted" not in (tmp_path / "log").read_text(), "that is no warning"


def test_the_drain_has_its_limit_across_the_change() -> None:
    async def scenario() -> None:
        async with upstream() as up, proxy(up, "--set", "relay.drain_timeout=300ms") as tap:
            held, asking = await under_way(tap, up, 3)
            before = tap.relays() + tap.meters()
            os.kill(tap.pid, signal.SIGUSR2)
            await gone(before)
            assert not any(answer.whole for answer in await asyncio.gather(*asking))
            assert await tap.get(up.on(answers(b"here"))) == b"here"
            held.go.set()

    play(scenario(), limit_s=LIMIT_S)


def test_nobody_is_left_over_when_the_supervisor_is_killed_after_a_change() -> None:
    async def scenario() -> None:
        async with upstream() as up, proxy(up, *PATIENT) as tap:
            held, asking = await under_way(tap, up, 3)
            before = tap.relays()
            os.kill(tap.pid, signal.SIGUSR2)
            await restarted(tap, before)
            family = children_of(tap.pid)
            assert len(family) == 4
            os.kill(tap.pid, signal.SIGKILL)
            held.go.set()
            assert all(answer.data == BODY for answer in await asyncio.gather(*asking))
            await gone(family)

    play(scenario(), limit_s=LIMIT_S)


def test_what_is_sent_to_the_whole_group_changes_the_program_and_nothing_else() -> None:
    async def scenario() -> None:
        async with upstream() as up, proxy(up, *PATIENT) as tap:
            held, asking = await under_way(tap, up, 3)
            before = tap.relays()
            for pid in [*children_of(tap.pid), tap.pid]:
                os.kill(pid, signal.SIGUSR2)
            await restarted(tap, before)
            held.go.set()
            assert all(answer.data == BODY for answer in await asyncio.gather(*asking))

    play(scenario(), limit_s=LIMIT_S)


def test_an_init_system_is_told_and_its_sockets_stay(tmp_path: Path) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        watcher = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        watcher.bind(str(tmp_path / "notify"))
        watcher.setblocking(False)
        clients, admin = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))

        async def told() -> bytes:
            return await asyncio.wait_for(loop.sock_recv(watcher, 500), LONG_S)

        with watcher, clients, admin:
            async with upstream() as up:
                path = up.on(answers(b"here"))
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-c", STARTER, f"{clients.fileno()},{admin.fileno()}",
                    sys.executable, "-m", "llmtap.cli", "proxy", "--upstream", up.url,
                    env=CLEAN | {"LISTEN_FDS": "2", "LISTEN_FDNAMES": "listen:admin",
                                 "NOTIFY_SOCKET": str(tmp_path / "notify")},
                    pass_fds=(clients.fileno(), admin.fileno()), cwd=Path(__file__).parents[2],
                )  # fmt: skip
                tap = Proxy(process, clients.getsockname()[1], admin.getsockname()[1])
                try:
                    assert (await told()).startswith(b"READY=1")
                    await tap.ready()
                    before = tap.relays()
                    os.kill(tap.pid, signal.SIGUSR2)
                    said = (await told()).split(b"\n")
                    assert said[0] == b"RELOADING=1"
                    assert said[1].startswith(b"MONOTONIC_USEC=")
                    assert (await told()).startswith(b"READY=1")
                    await restarted(tap, before)
                    await gone(before)
                    assert await tap.get(path) == b"here"
                    process.terminate()
                    assert await told() == b"STOPPING=1"
                    assert await tap.ended(LONG_S) == 0
                    # They are the init system's: whoever comes now waits for the next start.
                    waiting = await RawClient.connect(tap.listen)
                    waiting.close()
                finally:
                    if process.returncode is None:
                        with contextlib.suppress(ProcessLookupError):
                            process.kill()
                        await process.wait()

    play(scenario(), limit_s=LIMIT_S)


def test_an_experiment_that_was_switched_off_stays_off_and_arms_stay_the_same(tmp_path: Path) -> None:
    file = tmp_path / "llmtap.toml"

    async def scenario() -> None:
        async with upstream() as here, upstream() as there:
            path = here.on(answers(b"old"))
            assert there.on(answers(b"new")) == path
            write(file, here, there, enabled=True)
            async with proxy(None, config=file) as tap:
                await wait_until(lambda: len(tap.relays()) == 2, READY_S)
                dealt = await everybody(tap, path)
                assert set(dealt) == {b"old", b"new"}
                await switch(tap, False)
                before = tap.relays() + tap.meters()
                os.kill(tap.pid, signal.SIGUSR2)
                await restarted(tap, before)
                await gone(before)

                async def learnt() -> bool:
                    return bool((await experiment(tap))["state"] == "off")

                await until(learnt, READY_S)
                await wait_until_all(tap, path, [b"old"] * 24)
                await switch(tap, True)
                await wait_until_all(tap, path, dealt)

    play(scenario(), limit_s=LIMIT_S)


def test_an_upgrade_runs_and_a_broken_one_does_not(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = OwnProgram(tmp_path / "program")

    async def scenario() -> None:
        async with upstream() as up, proxy(up, *PATIENT, log=log, program=program.folder) as tap:

            async def version() -> bytes:
                told = await tap.told("/metrics") or b""
                return next((x for x in told.splitlines() if x.startswith(b"llmtap_build_info")), b"")

            assert f'version="{llmtap.__version__}"'.encode() in await version()
            path = up.on(answers(b"here"))
            program.change("__init__.py", f'"{llmtap.__version__}"', '"9.9.9-test"')
            held, asking = await under_way(tap, up, 5)
            relays = tap.relays()
            os.kill(tap.pid, signal.SIGUSR2)
            await restarted(tap, relays)
            held.go.set()
            assert all(answer.data == BODY for answer in await asyncio.gather(*asking))
            assert b'version="9.9.9-test"' in await version()
            await gone(relays)
            await wait_until(lambda: len(tap.meters()) == 1, LONG_S)

            relays, meters = tap.relays(), tap.meters()
            program.change("config.py", '"""', 'raise RuntimeError("half an upgrade")\n"""')
            os.kill(tap.pid, signal.SIGUSR2)
            await wait_until(lambda: b"half an upgrade" in log.read_bytes(), LONG_S)
            assert b"event=restart_refused" in log.read_bytes()
            assert tap.process.returncode is None
            assert (tap.relays(), tap.meters()) == (relays, meters)
            assert await tap.get(path) == b"here"

    play(scenario(), limit_s=LIMIT_S)


def test_a_wrong_configuration_is_refused_by_name_and_nothing_changes(tmp_path: Path) -> None:
    file, log = tmp_path / "llmtap.toml", tmp_path / "log"

    async def scenario() -> None:
        async with upstream() as up:
            path = up.on(answers(b"here"))
            file.write_text(f'[relay]\nupstream = "{up.url}"\n')
            async with proxy(None, config=file, log=log) as tap:
                family = tap.relays() + tap.meters()
                file.write_text("[relay]\nupstrem = 'x'\n")
                os.kill(tap.pid, signal.SIGUSR2)
                await wait_until(lambda: b"event=restart_refused" in log.read_bytes(), LONG_S)
                assert b"upstrem" in log.read_bytes()
                assert tap.relays() + tap.meters() == family
                assert await tap.get(path) == b"here"
                file.write_text(f'[relay]\nupstream = "{up.url}"\nworkers = 2\n')
                os.kill(tap.pid, signal.SIGUSR2)
                await restarted(tap, family)
                await wait_until(lambda: len(set(tap.relays()) - set(family)) == 2, READY_S)
                assert await tap.get(path) == b"here"

    play(scenario(), limit_s=LIMIT_S)


def test_new_relays_that_fail_leave_the_old_ones_at_work(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = OwnProgram(tmp_path / "program")

    async def scenario() -> None:
        async with upstream() as up, proxy(up, *PATIENT, log=log, program=program.folder) as tap:
            path = up.on(answers(b"here"))
            family = tap.relays() + tap.meters()
            held, asking = await under_way(tap, up, 5)
            program.relays_fail()
            os.kill(tap.pid, signal.SIGUSR2)
            await wait_until(lambda: b"event=restart_failed" in log.read_bytes(), LONG_S)
            await wait_until(lambda: tap.relays() + tap.meters() == family, LONG_S)
            assert await tap.get(path) == b"here"
            held.go.set()
            assert all(answer.data == BODY for answer in await asyncio.gather(*asking))
            await tap.measured(6)

            # The new supervisor looks after the old one's children.
            program.relays_work()
            (relay,) = tap.relays()
            os.kill(relay, signal.SIGKILL)
            assert await asyncio.wait_for(tap.get(path), READY_S) == b"here"
            (meter,) = tap.meters()
            os.kill(meter, signal.SIGKILL)
            await wait_until(lambda: tap.meters() and meter not in tap.meters(), READY_S)
            await tap.ready()

            # And what was wrong can be put right.
            before = tap.relays()
            os.kill(tap.pid, signal.SIGUSR2)
            await restarted(tap, before)
            await gone(before)
            assert await tap.get(path) == b"here"

    play(scenario(), limit_s=LIMIT_S)


def test_twice_while_streams_drain(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with upstream() as up, proxy(up, *PATIENT) as tap:
            asked, asking, held, families = 0, [], Held(), []
            for n in (10, 20):
                asking += await streams(tap, up.on(held), n)
                asked += n
                await wait_until(lambda asked=asked: held.begun == asked, READY_S)
                families += tap.relays() + tap.meters()
                before = tap.relays()
                os.kill(tap.pid, signal.SIGUSR2)
                os.kill(tap.pid, signal.SIGUSR2)  # said twice is said once, or done twice: both are right
                await restarted(tap, before)
            assert await tap.get(up.on(answers(b"here"))) == b"here"
            held.go.set()
            for answer in await asyncio.gather(*asking):
                assert answer.whole
                assert answer.data == BODY

            async def one_family_is_left() -> bool:
                return len(tap.relays()) == len(tap.meters()) == 1

            await until(one_family_is_left, LONG_S)

            async def counted() -> bool:
                told = (await summary(tap)).get("relays", {})
                return sum(r.get("measured", 0) for r in told.values()) == asked + 1

            await until(counted, READY_S)

    play(scenario(), limit_s=LIMIT_S)


@pytest.mark.parametrize("pause_s", [0.0, 0.8, 1.6])
def test_told_to_stop_in_the_middle_it_stops_and_streams_end_first(pause_s: float) -> None:
    async def scenario() -> None:
        async with upstream() as up, proxy(up, *PATIENT) as tap:
            held, asking = await under_way(tap, up, 10)
            family = children_of(tap.pid)
            os.kill(tap.pid, signal.SIGUSR2)
            await asyncio.sleep(pause_s)  # wherever that finds it
            os.kill(tap.pid, signal.SIGTERM)
            await asyncio.sleep(0.3)
            family += children_of(tap.pid)
            held.go.set()
            for answer in await asyncio.gather(*asking):
                assert answer.whole
                assert answer.data == BODY
            assert await tap.ended(LONG_S) == 0
            assert not any(is_alive(pid) for pid in family)

    play(scenario(), limit_s=LIMIT_S)
