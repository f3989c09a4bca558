"""SIGUSR2 when something is wrong, or at a bad moment: the old ones stay at work, and no stream breaks."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

import llmtap
from tests.supervisor.test_faults import BODY, Held, streams, summary, under_way
from tests.supervisor.test_hot_restart import LIMIT_S, LONG_S, PATIENT, gone, restarted
from tests.supervisor.test_supervisor import READY_S, children_of, is_alive, proxy, until
from tests.support.own_program import OwnProgram
from tests.support.peer import play, wait_until
from tests.support.upstream import answers, upstream


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
