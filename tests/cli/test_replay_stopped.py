"""A signal during `llmtap replay`: said on stderr, the second time at once; the report is written, and the
exit code is that of the signal."""

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llmtap.cli.progress import Answering, ProgressLines
from llmtap.load.replay.perform import ReplayStage
from llmtap.load.workers.worker_handle import Progress
from llmtap.sim.server.options import SimOptions
from llmtap.units import Duration
from tests.support.servers.peer import play
from tests.support.servers.sim_engine import Engine, engine

REPLAY = [sys.executable, "-P", "-m", "llmtap.cli", "replay"]
MS = 1_000_000
ROWS = 6


def progress(under_way: int) -> Progress:
    return Progress(9, under_way, 9 - under_way, 0, 5, 0, None, None, None, None, None)


def test_what_is_said_of_a_stop(capsys: pytest.CaptureFixture[str]) -> None:
    def said(*under_way: int) -> list[str]:
        lines = ProgressLines()
        for n in under_way:
            lines.sending(progress(n), 14)
            lines.stopping()
        return capsys.readouterr().err.splitlines()

    assert said(1_200) == ["llmtap: stopping: 1,200 answers in flight, signal again to cancel them"]
    one = "llmtap: stopping: 1 answer in flight, signal again to cancel them"
    assert said(1, 1, 1) == [one, "llmtap: cancelling 1 answer"]
    assert said(0, 0) == ["llmtap: stopping"]


class Played:
    """A replay that is as far as it is said to be."""

    def __init__(self) -> None:
        self.stage = ReplayStage.PREPARING
        self.stops = 0

    def stop(self) -> None:
        self.stops += 1


def test_what_a_signal_does_is_decided_by_how_far_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    async def work() -> tuple[list[bool], int]:
        one = Played()
        answering = Answering(one, ProgressLines(), asyncio.get_running_loop())  # type: ignore[arg-type]
        seen = [answering()]
        one.stage = ReplayStage.SENDING
        seen += [answering(), answering()]
        assert one.stops == 0, "in the loop's own time"
        await asyncio.sleep(0)
        assert one.stops == 2
        one.stage = ReplayStage.TELLING
        seen += [answering(), answering(), answering()]
        await asyncio.sleep(0)
        return seen, one.stops

    assert play(work(), 60) == ([False, True, True, True, False, False], 2)
    err = capfd.readouterr().err
    assert err.count("signal again to stop before the report is written\n") == 1


async def running(e: Engine) -> float:
    found = await e.metrics()
    return sum(value for name, value in found.items() if name.startswith("vllm:num_requests_running"))


async def replayed(
    place: Path, options: SimOptions, act: Callable[[asyncio.subprocess.Process], None], times: int
) -> tuple[int | None, str]:
    """All requests are sent at once, for answers of two tokens. `act` when all are under way, and again when
    that was heard."""
    trace = place.with_name("trace.csv")
    rows = ["2026-01-01 00:00:00.0000000,9,2"] * ROWS
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, ""]))
    async with engine(options) as e:
        process = await asyncio.create_subprocess_exec(
            *REPLAY, str(trace), "--arrivals", "at-once", "--target", e.url, "--json", str(place),
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stderr is not None
        said = b""
        try:
            while await running(e) < ROWS:
                assert process.returncode is None
                await asyncio.sleep(0.05)
            await asyncio.sleep(1)  # the sender tells how it stands each quarter of a second
            for _ in range(times):
                act(process)
                said += await asyncio.wait_for(process.stderr.readline(), 120)
            said += await asyncio.wait_for(process.stderr.read(), 120)
            await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    return process.returncode, said.decode()


def test_the_second_time_answers_are_cut(tmp_path: Path) -> None:
    """They would take a minute."""
    place = tmp_path / "result.json"
    slow = SimOptions(ttft=Duration(1 * MS), itl=Duration(60_000 * MS), tokens=2)
    code, said = play(replayed(place, slow, lambda p: p.send_signal(signal.SIGTERM), 2), 280)
    assert said.startswith(f"llmtap: stopping: {ROWS} answers in flight, signal again to cancel them\n"), said
    assert f"llmtap: cancelling {ROWS} answers\n" in said
    result = json.loads(place.read_text())
    assert result["outcomes"] == {"client_cancelled": ROWS}
    assert result["load"]["stopped"] == "somebody stopped it"
    assert code == 128 + signal.SIGTERM


def test_once_the_load_is_over_its_report_is_written_first(tmp_path: Path) -> None:
    place = tmp_path / "result.json"

    async def work() -> tuple[int | None, str]:
        async with engine() as e:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-c", TELLING, str(int(signal.SIGINT)), "conversation",
                "--requests", str(ROWS), "--arrivals", "at-once", "--target", e.url, "--json", str(place),
                stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            _, err = await asyncio.wait_for(process.communicate(), 250)
            return process.returncode, err.decode()

    code, said = play(work(), 280)
    assert code == 128 + signal.SIGINT, said
    assert said.count("signal again to stop before the report is written\n") == 1
    result = json.loads(place.read_text())
    assert result["outcomes"] == {"complete": ROWS}
    assert result["load"]["stopped"] is None, "nothing of the load was"


TELLING = """
import os, sys
from llmtap.load.replay import perform

number, made = int(sys.argv.pop(1)), perform.result_of

def result_of(*args, **more):
    os.kill(os.getpid(), number)
    return made(*args, **more)

perform.result_of = result_of
from llmtap.cli.main import main
sys.argv.insert(1, "replay")
main()
"""
