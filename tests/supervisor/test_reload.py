"""SIGHUP that changes relays alone, and reloads that fail: who stays, and what is tried again."""

import asyncio
import contextlib
import os
import re
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq

from llmtap.capture.schema import info_of
from tests.supervisor.own_program import OwnProgram
from tests.supervisor.running import (
    LONG_S,
    READY_S,
    Proxy,
    all_whole,
    gone,
    is_alive,
    proxy,
    replaced,
    restarted,
    under_way,
    until,
    write_config,
)
from tests.support.servers.live_proxy import port_free
from tests.support.servers.peer import scene, wait_until
from tests.support.servers.upstream import answers, upstream


def configs_of(kept: Path) -> list[str]:
    """Return the fingerprints that finished files name, in the order of their beginning."""
    infos = [info_of(pq.read_schema(file)) for file in kept.glob("*.parquet")]
    return [info.config for info in sorted((i for i in infos if i), key=lambda info: info.began_ns)]


@scene
async def test_the_meter_keeps_its_counts_and_goes_by_the_new_level_fingerprint_and_limit(
    tmp_path: Path,
) -> None:
    file, log, kept = tmp_path / "llmtap.toml", tmp_path / "log", tmp_path / "kept"
    program = OwnProgram(tmp_path / "program")
    program.change("meter/shutdown.py", "GRACE_S: Final = 5.0", "GRACE_S: Final = 0.3")
    capture = f'[capture]\nto = "{kept}"\nrotate_every = "1s"'
    async with upstream() as up, upstream() as other:
        path, there = up.on(answers(b"here")), other.on(answers(b"there"))
        write_config(file, up.url, 'drain_timeout = "300ms"', capture, '[log]\nlevel = "warning"')
        async with proxy(None, config=file, log=log, level=None, program=program.folder) as tap:
            (meter,) = tap.meters()
            assert await tap.get(path) == b"here"
            await wait_until(lambda: len(configs_of(kept)) == 1, LONG_S)

            write_config(file, other.url, 'drain_timeout = "200s"', capture, '[log]\nlevel = "info"')
            before = tap.relays()
            os.kill(tap.pid, signal.SIGHUP)
            await gone(before)
            assert await tap.get(there) == b"there"
            await tap.measured(2)
            assert tap.meters() == [meter]
            (changed,) = re.findall(r"event=meter_changed config=(\w+)", log.read_text())
            (reloaded,) = re.findall(r"event=reloaded config=(\w+)", log.read_text())
            await wait_until(lambda: len(configs_of(kept)) == 2, LONG_S)
            first, second = configs_of(kept)
            assert changed == reloaded == second != first

            # It waits for the relays of now as long as these were told that they may drain.
            held, asking = await under_way(tap, other, 3)
            before = tap.relays()
            os.kill(tap.pid, signal.SIGUSR2)
            await restarted(tap, before)
            await asyncio.sleep(1.2)  # twice the old limit and its grace
            assert is_alive(meter)
            held.go.set()
            assert all(answer.whole for answer in await asyncio.gather(*asking))
            await gone([meter])


@contextlib.contextmanager
def few_files(pid: int, more: int | None) -> Iterator[None]:
    """Process `pid` can open `more` files than it has open now; None: not one, whatever it closes."""
    limit = 3
    if more is not None:
        taken = {int(fd) for fd in os.listdir(f"/proc/{pid}/fd")}
        limit = [fd for fd in range(len(taken) + more + 1) if fd not in taken][more]
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@scene
async def test_new_relays_that_fail_leave_the_old_ones_with_their_settings_and_their_port(
    tmp_path: Path,
) -> None:
    file, log = tmp_path / "llmtap.toml", tmp_path / "log"
    program = OwnProgram(tmp_path / "program")
    async with upstream() as up, upstream() as other:
        path, there = up.on(answers(b"here")), other.on(answers(b"there"))
        ports = port_free(), port_free()
        listens = [f'listen = "127.0.0.1:{port}"' for port in ports]
        write_config(file, up.url, listens[0])
        async with proxy(None, config=file, log=log, program=program.folder, listen=ports[0]) as tap:
            moved = Proxy(tap.process, ports[1], tap.admin)
            family = tap.family()
            program.relays_fail()
            write_config(file, other.url, listens[1], "workers = 2")
            os.kill(tap.pid, signal.SIGHUP)
            await wait_until(lambda: b"event=reload_failed" in log.read_bytes(), LONG_S)
            await wait_until(lambda: tap.family() == family, LONG_S)
            assert await tap.get(path) == b"here"
            assert await moved.refuses()

            # A relay that dies comes back as it was.
            program.relays_work()
            before = tap.relays()
            os.kill(before[0], signal.SIGKILL)
            await replaced(tap.relays, before)
            assert await tap.get(path) == b"here"

            # And what was wrong can be put right.
            before = tap.relays()
            os.kill(tap.pid, signal.SIGHUP)
            await replaced(tap.relays, before, 2)
            for _ in range(4):
                assert await moved.get(there) == b"there"
            await until(tap.refuses)


@scene
async def test_a_relay_that_dies_during_a_reload_that_fails_comes_back_as_it_was(tmp_path: Path) -> None:
    file, log, may_fail = tmp_path / "llmtap.toml", tmp_path / "log", tmp_path / "may_fail"
    program = OwnProgram(tmp_path / "program")
    # The second of the new relays fails once it is told to, the first one works.
    program.change(
        "vantage/relay/relay.py",
        "    set_up(setup.log)\n",
        "    set_up(setup.log)\n"
        "    if setup.name.split('.')[1] == '1':\n"
        "        import os, time\n"
        f"        while not os.path.exists({str(may_fail)!r}): time.sleep(0.05)\n"
        "        raise SystemExit(3)\n",
    )
    async with upstream() as up, upstream() as other:
        path = up.on(answers(b"here"))
        assert other.on(answers(b"there")) == path
        write_config(file, up.url)
        async with proxy(None, config=file, log=log, program=program.folder) as tap:
            (relay,) = tap.relays()
            write_config(file, other.url, "workers = 2")
            os.kill(tap.pid, signal.SIGHUP)
            await wait_until(lambda: len(tap.relays()) == 3, READY_S)
            fresh = set(tap.relays()) - {relay}
            os.kill(relay, signal.SIGKILL)
            await wait_until(lambda: set(tap.relays()) - fresh - {relay}, READY_S)
            may_fail.touch()
            await wait_until(lambda: b"event=reload_failed" in log.read_bytes(), LONG_S)
            await wait_until(lambda: len(tap.relays()) == 1, LONG_S)
            for _ in range(4):
                assert await tap.get(path) == b"here"


@scene
async def test_what_cannot_be_started_for_want_of_files_is_started_once_there_are_some(
    tmp_path: Path,
) -> None:
    file, log = tmp_path / "llmtap.toml", tmp_path / "log"
    async with upstream() as up:
        path = up.on(answers(b"here"))
        write_config(file, up.url)
        async with proxy(None, config=file, log=log) as tap:
            family = tap.family()
            with few_files(tap.pid, 3):  # a configuration can be read, and no child be given its pipes
                os.kill(tap.pid, signal.SIGHUP)
                await wait_until(lambda: b"event=reload_failed" in log.read_bytes(), LONG_S)
                os.kill(tap.pid, signal.SIGUSR2)
                await wait_until(lambda: b"event=restart_refused" in log.read_bytes(), LONG_S)
                assert tap.family() == family
                assert await tap.get(path) == b"here"
            with few_files(tap.pid, None):
                for pid in family:
                    os.kill(pid, signal.SIGKILL)
                for kind in (b"relay", b"meter"):
                    await wait_until(
                        lambda k=kind: log.read_bytes().count(b"event=%s_not_started" % k) > 1, LONG_S
                    )
            # Connections wait meanwhile.
            assert await tap.get(path) == b"here"
            await wait_until(lambda: len(tap.meters()) == 1, LONG_S)
            await tap.ready()
            before = tap.relays()
            os.kill(tap.pid, signal.SIGHUP)
            await gone(before)
            assert await tap.get(path) == b"here"


@scene
async def test_a_keeper_that_fails_ends_the_proxy_after_its_streams(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = OwnProgram(tmp_path / "program")
    program.change("supervisor/child.py", "    return BACKOFF_S[", "    return BACKOFS[")
    async with upstream() as up, proxy(up, log=log, program=program.folder) as tap:
        held, asking = await under_way(tap, up, 5)
        family = tap.family()
        os.kill(tap.meters()[0], signal.SIGKILL)
        await until(tap.refuses)
        held.go.set()
        await all_whole(asking)
        assert await tap.ended() == 1
        assert not any(is_alive(pid) for pid in family)
    said = log.read_text()
    assert said.count("event=supervisor_failed") == 1
    assert "Traceback" in said
    assert "NameError" in said
    assert "never retrieved" not in said
