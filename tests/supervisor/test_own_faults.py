"""A mistake in the supervisor itself: it is told, and nobody is left without a keeper."""

import asyncio
import os
import signal
from pathlib import Path

from tests.supervisor.test_faults import BODY, under_way
from tests.supervisor.test_hot_restart import LIMIT_S, LONG_S
from tests.supervisor.test_supervisor import READY_S, is_alive, proxy, until
from tests.support.own_program import OwnProgram
from tests.support.peer import play, wait_until
from tests.support.upstream import answers, upstream


def test_a_keeper_that_fails_ends_the_proxy_after_its_streams(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = OwnProgram(tmp_path / "program")
    program.change("supervisor/supervisor.py", "    delay_s = BACKOFF_S[", "    delay_s = BACKOFS[")

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
