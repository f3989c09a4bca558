"""Whoever stops a sweep is told what is kept and how to go on, and nothing is left behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llmtap.cli.shared import Stopped, stoppable
from tests.cli.traces import HEADER
from tests.support.workloads.sweeps import children

JOBS = 8


@contextmanager
def sweeping(place: Path) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A sweep in processes of its own, of which some results are there and most are not."""
    command = command_for(place)
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        try:
            assert child.stderr is not None
            assert f" 1 of {JOBS}: " in child.stderr.readline()
            yield child, command
        finally:
            child.kill()


def command_for(place: Path) -> list[str]:
    path = place.parent / "long.csv"
    path.write_text(HEADER + "".join(f"{i},GPT-4,{i % 97},{i % 31},9,API log\n" for i in range(25_000)))
    sizes = ",".join(map(str, range(1, JOBS + 1)))
    return [
        sys.executable, "-P", "-m", "llmtap.cli", "sim", "run", str(path), "--scheduler", "static_fifo",
        "--vary", f"static_batch={sizes}", "--jobs", "2", "--results", str(place),
    ]  # fmt: skip


def check_said(said: str, place: Path) -> None:
    """What is kept and how to go on, and nothing but that and the lines of what was done: no traceback."""
    *lines, last = said.splitlines()
    assert all(f" of {JOBS}: " in line for line in lines), said
    kept = rf"(\d+) runs are in {place}: the same command continues from there"
    found = re.fullmatch(rf"llmtap: stopped; {kept}", last)
    assert found is not None, said
    # The last one may have been written and not yet counted.
    assert int(found[1]) in (len(done_in(place)), len(done_in(place)) - 1)


def wait_gone(pids: set[int]) -> None:
    deadline = time.monotonic() + 120
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, f"{pids} are still there"
        time.sleep(0.05)


def done_in(place: Path) -> list[str]:
    lines = [json.loads(line) for line in place.read_bytes().split(b"\n")[:-1]]
    assert all("summary" in line for line in lines)
    return [line["id"] for line in lines]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_what_was_stopped_goes_on_where_it_was_and_leaves_no_process(
    tmp_path: Path, how: signal.Signals
) -> None:
    place = tmp_path / "r.jsonl"
    with sweeping(place) as (child, command):
        workers = children(child.pid)
        assert len(workers) >= 2
        child.send_signal(how)
        said = child.communicate(timeout=200)[1]
        if how is signal.SIGKILL:
            assert child.returncode == -signal.SIGKILL
        else:
            assert child.returncode == 128 + how
            check_said(said, place)
        wait_gone(workers)
    before = done_in(place)
    assert 1 <= len(before) < JOBS
    again = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert again.returncode == 0
    assert f"{len(before)} done before and taken from the results, {JOBS - len(before)} left" in again.stderr
    after = done_in(place)
    assert after[: len(before)] == before
    assert len(after) == len(set(after)) == JOBS


@pytest.mark.parametrize(("how", "after_s"), [(signal.SIGINT, 0.0), (signal.SIGTERM, 0.2)])
def test_while_processes_start_the_whole_group_may_be_told(
    tmp_path: Path, how: signal.Signals, after_s: float
) -> None:
    """As Ctrl-C in a terminal does, around the time when the first worker is there and not listening yet."""
    place = tmp_path / "r.jsonl"
    with subprocess.Popen(
        command_for(place), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as child:
        try:
            deadline = time.monotonic() + 200
            # Python's tracker of semaphores is the first of them.
            while len(workers := children(child.pid)) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.002)
            time.sleep(after_s)
            os.killpg(child.pid, how)
            said = child.communicate(timeout=200)[1]
        finally:
            child.kill()
    assert child.returncode == 128 + how
    check_said(said, place)
    wait_gone(workers)


def test_who_was_started_deaf_stays_deaf() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        before = signal.signal(number, signal.SIG_IGN)
        try:
            with stoppable():
                signal.raise_signal(number)
            assert signal.getsignal(number) is signal.SIG_IGN
        finally:
            signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_stops_and_others_do_nothing(number: signal.Signals) -> None:
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        with stoppable():
            pass
        assert {each: signal.getsignal(each) for each in before} == before

        def inside() -> None:
            try:
                signal.raise_signal(number)
            except KeyboardInterrupt:
                raise KeyboardInterrupt from None  # as Ray does, without a word of which it was

        with pytest.raises(Stopped) as told, stoppable():
            inside()
        assert told.value.code == 128 + number
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
