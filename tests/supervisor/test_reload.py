"""SIGHUP that changes relays alone: the meter stays, keeps what it counted, and is told what is new."""

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
from llmtap.meter.shutdown import GRACE_S
from tests.supervisor.own_program import OwnProgram
from tests.supervisor.test_faults import BODY, summary, under_way
from tests.supervisor.test_hot_restart import LIMIT_S, LONG_S, gone, restarted
from tests.supervisor.test_supervisor import READY_S, Proxy, is_alive, proxy, until
from tests.support.servers.live_proxy import port_free
from tests.support.servers.peer import play, wait_until
from tests.support.servers.upstream import answers, upstream


def configs_of(kept: Path) -> list[str]:
    """The fingerprint that each finished file tells, in the order of their beginning."""
    infos = [info_of(pq.read_schema(file)) for file in kept.glob("*.parquet")]
    return [info.config for info in sorted((i for i in infos if i), key=lambda info: info.began_ns)]


def test_the_meter_keeps_its_counts_and_goes_by_the_new_level_fingerprint_and_limit(tmp_path: Path) -> None:
    file, log, kept = tmp_path / "llmtap.toml", tmp_path / "log", tmp_path / "kept"

    def say(url: str, level: str, drain: str) -> None:
        file.write_text(
            f'[relay]\nupstream = "{url}"\ndrain_timeout = "{drain}"\n'
            f'[capture]\nto = "{kept}"\nrotate_every = "1s"\n'
            f'[log]\nlevel = "{level}"\n'
        )

    async def scenario() -> None:
        async with upstream() as up, upstream() as other:
            path, there = up.on(answers(b"here")), other.on(answers(b"there"))
            say(up.url, "warning", "1s")
            async with proxy(None, config=file, log=log, level=None) as tap:
                (meter,) = tap.meters()
                assert await tap.get(path) == b"here"
                await wait_until(lambda: len(configs_of(kept)) == 1, LONG_S)

                say(other.url, "info", "200s")
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
                await asyncio.sleep(1 + GRACE_S + 1)
                assert is_alive(meter)
                held.go.set()
                assert all(answer.whole for answer in await asyncio.gather(*asking))
                await gone([meter])

    play(scenario(), limit_s=LIMIT_S)


@contextlib.contextmanager
def few_files(pid: int, more: int | None) -> Iterator[None]:
    """Process `pid` can open so many more files than it has open now; None: not one, whatever it closes."""
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


def test_new_relays_that_fail_leave_the_old_ones_with_their_settings(tmp_path: Path) -> None:
    file, log = tmp_path / "llmtap.toml", tmp_path / "log"
    program = OwnProgram(tmp_path / "program")

    async def scenario() -> None:
        async with upstream() as up, upstream() as other:
            path, there = up.on(answers(b"here")), other.on(answers(b"there"))
            file.write_text(f'[relay]\nupstream = "{up.url}"\n')
            async with proxy(None, config=file, log=log, program=program.folder) as tap:
                family = tap.relays() + tap.meters()
                program.relays_fail()
                file.write_text(f'[relay]\nupstream = "{other.url}"\nworkers = 2\n')
                os.kill(tap.pid, signal.SIGHUP)
                await wait_until(lambda: b"event=reload_failed" in log.read_bytes(), LONG_S)
                await wait_until(lambda: tap.relays() + tap.meters() == family, LONG_S)
                assert await tap.get(path) == b"here"

                # Whoever dies comes back as it was.
                program.relays_work()
                (relay,) = tap.relays()
                os.kill(relay, signal.SIGKILL)
                await wait_until(lambda: tap.relays() and relay not in tap.relays(), READY_S)
                assert await asyncio.wait_for(tap.get(path), READY_S) == b"here"

                # And what was wrong can be put right.
                before = tap.relays()
                os.kill(tap.pid, signal.SIGHUP)
                await wait_until(lambda: len(set(tap.relays()) - set(before)) == 2, READY_S)
                await gone(before)
                for _ in range(4):
                    assert await asyncio.wait_for(tap.get(there), READY_S) == b"there"

    play(scenario(), limit_s=LIMIT_S)


def test_an_address_that_was_moved_to_in_vain_is_left_again(tmp_path: Path) -> None:
    file, log = tmp_path / "llmtap.toml", tmp_path / "log"
    program = OwnProgram(tmp_path / "program")

    async def scenario() -> None:
        async with upstream() as up:
            path = up.on(answers(b"here"))
            ports = port_free(), port_free()

            def say(port: int) -> None:
                file.write_text(f'[relay]\nupstream = "{up.url}"\nlisten = "127.0.0.1:{port}"\n')

            say(ports[0])
            async with proxy(None, config=file, log=log, program=program.folder, listen=ports[0]) as tap:
                program.relays_fail()
                say(ports[1])
                os.kill(tap.pid, signal.SIGHUP)
                await wait_until(lambda: b"event=reload_failed" in log.read_bytes(), LONG_S)
                moved = Proxy(tap.process, ports[1], tap.admin)
                assert await tap.get(path) == b"here"
                assert await moved.refuses()
                program.relays_work()
                before = tap.relays()
                os.kill(tap.pid, signal.SIGHUP)
                await gone(before)
                assert await asyncio.wait_for(moved.get(path), READY_S) == b"here"
                assert await tap.refuses()

    play(scenario(), limit_s=LIMIT_S)


def test_what_cannot_be_started_for_want_of_files_is_started_once_there_are_some(tmp_path: Path) -> None:
    file, log = tmp_path / "llmtap.toml", tmp_path / "log"

    async def scenario() -> None:
        async with upstream() as up:
            path = up.on(answers(b"here"))
            file.write_text(f'[relay]\nupstream = "{up.url}"\n')
            async with proxy(None, config=file, log=log) as tap:
                family = tap.relays() + tap.meters()
                with few_files(tap.pid, 3):  # a configuration can be read, and no child be given its pipes
                    os.kill(tap.pid, signal.SIGHUP)
                    await wait_until(lambda: b"event=reload_failed" in log.read_bytes(), LONG_S)
                    os.kill(tap.pid, signal.SIGUSR2)
                    await wait_until(lambda: b"event=restart_refused" in log.read_bytes(), LONG_S)
                    assert tap.relays() + tap.meters() == family
                    assert await tap.get(path) == b"here"
                with few_files(tap.pid, None):
                    for pid in family:
                        os.kill(pid, signal.SIGKILL)
                    for kind in (b"relay", b"meter"):
                        await wait_until(
                            lambda k=kind: log.read_bytes().count(b"event=%s_not_started" % k) > 1, LONG_S
                        )
                # Connections wait meanwhile.
                assert await asyncio.wait_for(tap.get(path), LONG_S) == b"here"
                await wait_until(lambda: len(tap.meters()) == 1, LONG_S)
                await tap.ready()
                before = tap.relays()
                os.kill(tap.pid, signal.SIGHUP)
                await gone(before)
                assert await asyncio.wait_for(tap.get(path), LONG_S) == b"here"

    play(scenario(), limit_s=LIMIT_S)


def test_a_relay_that_dies_during_a_reload_that_fails_comes_back_as_it_was(tmp_path: Path) -> None:
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

    async def scenario() -> None:
        async with upstream() as up, upstream() as other:
            path = up.on(answers(b"here"))
            assert other.on(answers(b"there")) == path
            ports = port_free(), port_free()
            file.write_text(f'[relay]\nupstream = "{up.url}"\nlisten = "127.0.0.1:{ports[0]}"\n')
            async with proxy(None, config=file, log=log, program=program.folder, listen=ports[0]) as tap:
                (relay,) = tap.relays()
                file.write_text(
                    f'[relay]\nupstream = "{other.url}"\nlisten = "127.0.0.1:{ports[1]}"\nworkers = 2\n'
                )
                os.kill(tap.pid, signal.SIGHUP)
                await wait_until(lambda: len(tap.relays()) == 3, READY_S)
                fresh = set(tap.relays()) - {relay}
                os.kill(relay, signal.SIGKILL)
                await wait_until(lambda: set(tap.relays()) - fresh - {relay}, READY_S)
                may_fail.touch()
                await wait_until(lambda: b"event=reload_failed" in log.read_bytes(), LONG_S)
                await wait_until(lambda: len(tap.relays()) == 1, LONG_S)
                for _ in range(4):
                    assert await asyncio.wait_for(tap.get(path), READY_S) == b"here"
                assert await Proxy(tap.process, ports[1], tap.admin).refuses()

    play(scenario(), limit_s=LIMIT_S)


def test_a_meter_that_crashes_after_a_reload_while_it_was_away_has_crashed(tmp_path: Path) -> None:
    file, log = tmp_path / "llmtap.toml", tmp_path / "log"
    program = OwnProgram(tmp_path / "program")
    program.change("supervisor/child.py", "0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0", "3.0, 3.0")

    async def scenario() -> None:
        async with upstream() as up:
            file.write_text(f'[relay]\nupstream = "{up.url}"\n')
            async with proxy(None, config=file, log=log, program=program.folder, level="info") as tap:
                for n in (1, 2):
                    (meter,) = tap.meters()
                    os.kill(meter, signal.SIGKILL)
                    await wait_until(lambda n=n: log.read_bytes().count(b"event=meter_died") == n, READY_S)
                    if n == 1:
                        file.write_text(
                            f'[relay]\nupstream = "{up.url}"\n[slo.chat]\nobjectives = "ttft:1s"\n'
                        )
                        os.kill(tap.pid, signal.SIGHUP)
                        await wait_until(lambda: b"event=reloaded" in log.read_bytes(), READY_S)
                        assert not tap.meters(), "it is still away"
                    await wait_until(lambda: len(tap.meters()) == 1, READY_S)
                    await tap.ready()
                assert b"event=meter_renewed" not in log.read_bytes()
                assert "chat" in (await summary(tap))["slo"]

    play(scenario(), limit_s=LIMIT_S)


def test_a_keeper_that_fails_ends_the_proxy_after_its_streams(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = OwnProgram(tmp_path / "program")
    program.change("supervisor/child.py", "    return BACKOFF_S[", "    return BACKOFS[")

    async def scenario() -> None:
        async with upstream() as up, proxy(up, log=log, program=program.folder) as tap:
            held, asking = await under_way(tap, up, 5)
            family = tap.relays() + tap.meters()
            os.kill(tap.meters()[0], signal.SIGKILL)
            await until(tap.refuses, READY_S)
            held.go.set()
            for answer in await asyncio.gather(*asking):
                assert answer.whole
                assert answer.data == BODY
            assert await tap.ended() == 1
            assert not any(is_alive(pid) for pid in family)

    play(scenario(), limit_s=LIMIT_S)
    said = log.read_text()
    assert said.count("event=supervisor_failed") == 1
    assert "Traceback" in said
    assert "NameError" in said
    assert "never retrieved" not in said


def test_a_mistake_while_a_configuration_is_checked_refuses_it(tmp_path: Path) -> None:
    file, log = tmp_path / "llmtap.toml", tmp_path / "log"
    program = OwnProgram(tmp_path / "program")
    program.change(
        "supervisor/checks.py",
        "    relay = settings.relay\n",
        "    relay = settings.relay\n    assert not relay.via, 'a mistake'\n",
    )

    async def scenario() -> None:
        async with upstream() as up:
            path = up.on(answers(b"here"))
            file.write_text(f'[relay]\nupstream = "{up.url}"\n')
            async with proxy(None, config=file, log=log, program=program.folder) as tap:
                family = tap.relays() + tap.meters()
                file.write_text(f'[relay]\nupstream = "{up.url}"\nvia = true\n')
                os.kill(tap.pid, signal.SIGHUP)
                await wait_until(lambda: b"event=reload_refused" in log.read_bytes(), LONG_S)
                assert tap.relays() + tap.meters() == family
                assert await tap.get(path) == b"here"
                file.write_text(f'[relay]\nupstream = "{up.url}"\n')
                os.kill(tap.pid, signal.SIGHUP)
                await wait_until(lambda: tap.relays() and family[0] not in tap.relays(), READY_S)
                assert await asyncio.wait_for(tap.get(path), READY_S) == b"here"

    play(scenario(), limit_s=LIMIT_S)
    assert "AssertionError: a mistake" in log.read_text()
