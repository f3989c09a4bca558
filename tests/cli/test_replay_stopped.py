"""Ctrl-C during `llmtap replay`: said on stderr, the second time at once, and the report is written."""

import asyncio
import json
import signal
import sys
from pathlib import Path

import pytest

from llmtap.cli.replay_progress import Lines
from llmtap.load.messages import Progress
from llmtap.sim.gateway.options import SimOptions
from llmtap.units import Duration
from tests.support.peer import play
from tests.support.sim_engine import Engine, engine

REPLAY = [sys.executable, "-P", "-m", "llmtap.cli", "replay"]
MS = 1_000_000
ROWS = 6


def progress(under_way: int) -> Progress:
    return Progress(9, under_way, 9 - under_way, 0, 5, 0, None, None, None, None, None)


def test_what_is_said_of_a_stop(capsys: pytest.CaptureFixture[str]) -> None:
    def said(*under_way: int) -> list[str]:
        lines = Lines()
        for n in under_way:
            lines.sending(progress(n), 14)
            lines.stopping()
        return capsys.readouterr().err.splitlines()

    assert said(1_200) == ["llmtap: stopping: 1,200 answers under way, again to cut them"]
    one = "llmtap: stopping: 1 answer under way, again to cut them"
    assert said(1, 1, 1) == [one, "llmtap: cutting 1 answer"]
    assert said(0, 0) == ["llmtap: stopping"]


async def running(e: Engine) -> float:
    found = await e.metrics()
    return sum(value for name, value in found.items() if name.startswith("vllm:num_requests_running"))


async def replayed_and_stopped(place: Path, signals: int) -> tuple[int | None, str]:
    """Answers take a minute; a stop comes when all are under way, and again when the first one was heard."""
    slow = SimOptions(ttft=Duration(1 * MS), itl=Duration(60_000 * MS), tokens=2)
    async with engine(slow) as e:
        process = await asyncio.create_subprocess_exec(
            *REPLAY, "conversation", "--arrivals", "at-once", "--requests", str(ROWS), "--target", e.url,
            "--json", str(place), stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stderr is not None
        said = b""
        try:
            while await running(e) < ROWS:
                assert process.returncode is None
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.6)  # the sender tells how it stands each quarter of a second
            for _ in range(signals):
                process.send_signal(signal.SIGINT)
                said += await asyncio.wait_for(process.stderr.readline(), 20)
            said += await asyncio.wait_for(process.stderr.read(), 20)
            await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    return process.returncode, said.decode()


def test_the_first_and_the_second_ctrl_c(tmp_path: Path) -> None:
    place = tmp_path / "result.json"
    code, said = play(replayed_and_stopped(place, 2), 120)
    assert said.startswith(f"llmtap: stopping: {ROWS} answers under way, again to cut them\n"), said
    assert f"llmtap: cutting {ROWS} answers\n" in said
    result = json.loads(place.read_text())
    assert result["outcomes"] == {"client_cancelled": ROWS}
    assert code in (1, 130)
