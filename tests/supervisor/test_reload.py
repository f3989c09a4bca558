"""SIGHUP that changes relays alone: the meter stays, keeps what it counted, and is told what is new."""

import asyncio
import os
import re
import signal
from pathlib import Path

import pyarrow.parquet as pq

from llmtap.capture.schema import info_of
from llmtap.meter.shutdown import GRACE_S
from tests.supervisor.test_faults import under_way
from tests.supervisor.test_hot_restart import LIMIT_S, LONG_S, gone, restarted
from tests.supervisor.test_supervisor import is_alive, proxy
from tests.support.peer import play, wait_until
from tests.support.upstream import answers, upstream


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
