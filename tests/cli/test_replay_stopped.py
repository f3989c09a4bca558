"""A signal during `llmtap replay`: said on stderr, the second time at once; the report is written, and the
exit code is that of the signal."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from llmtap.cli.progress import ProgressLines, ReplaySignals
from llmtap.cli.shared import ReceivedSignals
from llmtap.load.replay.perform import ReplayStage
from llmtap.load.workers.worker_handle import Progress
from llmtap.sim.server.options import SimOptions
from llmtap.units import Duration
from tests.cli.traces import FREQUENT_PROGRESS
from tests.support.servers.peer import play
from tests.support.servers.sim_engine import engine

REPLAY = [sys.executable, "-P", "-c", FREQUENT_PROGRESS, "replay"]
MS = 1_000_000
ROWS = 6


def progress(under_way: int) -> Progress:
    return Progress(9, under_way, 9 - under_way, 0, 5, 0, None, None, None, None, None)


def test_what_is_said_of_a_stop(capsys: pytest.CaptureFixture[str]) -> None:
    def message(*under_way: int) -> list[str]:
        lines = ProgressLines()
        for n in under_way:
            lines.on_sending(progress(n), 14)
            lines.report_stop()
        return capsys.readouterr().err.splitlines()

    assert message(1_200) == ["llmtap: stopping: 1,200 answers in flight, signal again to cancel them"]
    one = "llmtap: stopping: 1 answer in flight, signal again to cancel them"
    assert message(1, 1, 1) == [one, "llmtap: cancelling 1 answer"]
    assert message(0, 0) == ["llmtap: stopping"]


def test_after_sighup_writes_to_the_terminal_that_is_gone_do_not_fail() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        with pytest.raises(BrokenPipeError):
            os.write(writer, b"x")
        signals = ReceivedSignals(terminal_fds=(writer,))
        signals.add(signal.SIGHUP)
        assert os.write(writer, b"x") == 1
        assert signals.exit_code == 129
    finally:
        os.close(writer)


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
        answering = ReplaySignals(one, ProgressLines(), asyncio.get_running_loop())  # type: ignore[arg-type]
        seen = [answering()]
        one.stage = ReplayStage.SENDING
        seen += [answering(), answering()]
        assert one.stops == 0, "in the loop's own time"
        await asyncio.sleep(0)
        assert one.stops == 2
        one.stage = ReplayStage.REPORTING
        seen += [answering(), answering(), answering()]
        await asyncio.sleep(0)
        return seen, one.stops

    assert play(work(), 60) == ([False, True, True, True, False, False], 2)
    err = capfd.readouterr().err
    assert err.count("signal again to stop before the report is written\n") == 1


async def replayed(
    place: Path,
    options: SimOptions,
    act: Callable[[asyncio.subprocess.Process], None],
    replies: Sequence[str],
) -> tuple[int | None, str]:
    """Send all requests at once, for answers of two tokens. Call `act` when all are in flight, and after
    each of `replies` but the last. A reply is the beginning of a line on stderr."""
    trace = place.with_name("trace.csv")
    rows = ["2026-01-01 00:00:00.0000000,9,2"] * ROWS
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, ""]))
    async with engine(options) as e:
        process = await asyncio.create_subprocess_exec(
            *REPLAY,
            str(trace),
            "--arrivals",
            "at-once",
            "--target",
            e.url,
            "--json",
            str(place),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        lines: list[str] = []

        async def read_until(beginning: str) -> None:
            while not lines or not lines[-1].startswith(beginning):
                lines.append((await process.stderr.readline()).decode())
                assert lines[-1], "".join(lines)

        try:
            await read_until(f"llmtap: sent {ROWS} of {ROWS}, in flight {ROWS}")
            for reply in replies:
                act(process)
                await read_until(reply)
            lines.append((await process.stderr.read()).decode())
            await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    return process.returncode, "".join(lines)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_second_time_answers_are_cut(tmp_path: Path, number: signal.Signals) -> None:
    """They would take longer than the test."""
    place = tmp_path / "result.json"
    slow = SimOptions(ttft=Duration(1 * MS), itl=Duration(500_000 * MS), tokens=2)
    replies = (
        f"llmtap: stopping: {ROWS} answers in flight, signal again to cancel them\n",
        f"llmtap: cancelling {ROWS} answers\n",
    )
    code, _ = play(replayed(place, slow, lambda p: p.send_signal(number), replies), 280)
    result = json.loads(place.read_text())
    assert result["outcomes"] == {"client_cancelled": ROWS}
    assert result["load"]["stopped"] == "somebody stopped it"
    assert code == 128 + number


def test_once_the_load_is_over_its_report_is_written_first(tmp_path: Path) -> None:
    place = tmp_path / "result.json"

    async def work() -> tuple[int | None, str]:
        async with engine() as e:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-c",
                TELLING,
                str(int(signal.SIGINT)),
                "conversation",
                "--requests",
                str(ROWS),
                "--arrivals",
                "at-once",
                "--target",
                e.url,
                "--json",
                str(place),
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
            )
            _, err = await asyncio.wait_for(process.communicate(), 250)
            return process.returncode, err.decode()

    code, message = play(work(), 280)
    assert code == 128 + signal.SIGINT, message
    assert message.count("signal again to stop before the report is written\n") == 1
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
