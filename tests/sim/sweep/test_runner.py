"""Invariant: what was written down is never lost, and what is no result is never overwritten."""

import multiprocessing
import os
import resource
import signal
import socket
import threading
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from llmtap.errors import ConfigError
from llmtap.sim.sweep.runner import (
    Results,
    SweepRunner,
    _defer_signals,
    run_in_processes,
    run_in_turn,
    run_on_ray,
)
from llmtap.sim.sweep.sweep import SweepAttempt, SweepJob
from tests.support.workloads.sweeps import DEADLY, ENDLESS, Deadly, Endless, children, deadly_job, job, trace

ONE = SweepAttempt("1", {"trace": "a"}, 0.5, {"n": 1})
TWO = SweepAttempt("2", {"trace": "a"}, 0.5, {"n": 2})
FAILED = SweepAttempt("3", {"trace": "a"}, 0.5, error="no")


def written(path: Path, *attempts: SweepAttempt) -> bytes:
    results = Results(path)
    for one in attempts:
        results.add(one)
    results.close()
    return path.read_bytes()


def test_results_are_there_again(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    assert written(path, ONE, FAILED, TWO).count(b"\n") == 3
    again = Results(path)
    assert again.successes == {"1": ONE, "2": TWO}
    again.close()


def test_wherever_a_line_was_torn_it_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    whole = written(path, ONE, TWO)
    first = whole.index(b"\n") + 1
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        torn = Results(path)
        kept = 1 if end >= first else 0
        assert len(torn.successes) == kept
        torn.add(TWO)
        torn.close()
        assert path.read_bytes() == whole[: first * kept] + whole[first:]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"timestamp,model\n1,2\n", "line 1: expected a result of llmtap sim run"),
        (b'{"id":"1"}\n[]\n', "line 2: expected a result of llmtap sim run"),
        (b'{"id":"1"}\n{"id":2}\n{"id', "line 2: expected a result of llmtap sim run"),
        (b"my only copy", "is not a results file"),
    ],
)
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=problem) as failure:
        Results(path)
    assert failure.value.place == "--results"
    assert path.read_bytes() == content


def test_only_one_run_at_a_time_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    first = Results(path)
    with pytest.raises(ConfigError, match="is being written by another run"):
        Results(path)
    first.close()
    Results(path).close()


def test_a_disk_that_takes_no_more_is_said_and_costs_only_the_last(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    whole = written(path, ONE)
    results = Results(path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 10, limits[1]))
    try:
        with pytest.raises(ConfigError, match=r"cannot write .*: File too large"):
            results.add(TWO)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        results.close()
    assert len(path.read_bytes()) == len(whole) + 10
    assert written(path, TWO) == written(tmp_path / "again.jsonl", ONE, TWO)


FORTY = trace()
FORTY_JOB = job(FORTY)
ONE_TRACE = {FORTY_JOB.rows: FORTY}


class Audience:
    def __init__(self) -> None:
        self.calls: list[object] = []

    def on_planned(self, jobs: Sequence[SweepJob], done_before: int) -> None:
        self.calls.append(([job.count for job in jobs], done_before))

    def on_progress(self, job: SweepJob, arrived: int) -> None:
        self.calls.append((job.count, arrived))

    def on_ended(self, job: SweepJob, attempt: SweepAttempt) -> None:
        assert attempt.id == job.id
        self.calls.append(job.count)


def test_the_longest_come_first_and_each_once() -> None:
    audience = Audience()
    runner = SweepRunner(ONE_TRACE, audience)
    jobs = [replace(FORTY_JOB, count=n) for n in (5, 20, 5, 10)]
    answer = runner.run(jobs)
    assert audience.calls == [([20, 10, 5], 0), 20, 10, 5]
    assert {one.summary["n"] for one in answer.values() if one.summary} == {5, 10, 20}
    runner.run([jobs[0], replace(FORTY_JOB, count=7)])
    assert audience.calls[4:] == [([7], 0), 7]
    assert len(runner.attempts) == 4


def test_what_is_in_the_results_is_taken_from_there(tmp_path: Path) -> None:
    jobs = [replace(FORTY_JOB, count=n) for n in (5, 10)]
    failing = replace(FORTY_JOB, version="of another version")
    first = Results(tmp_path / "r.jsonl")
    SweepRunner(ONE_TRACE, Audience(), results=first).run([jobs[0], failing])
    first.close()
    audience = Audience()
    again = Results(tmp_path / "r.jsonl")
    answer = SweepRunner(ONE_TRACE, audience, results=again).run([*jobs, failing])
    again.close()
    # What failed is tried again.
    assert audience.calls == [([40, 10], 1), 40, 10]
    assert [answer[j.id].error is None for j in (*jobs, failing)] == [True, True, False]
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == 4


SHORT, LONG = trace(30), trace(60)
JOBS: list[SweepJob] = [
    job(of, scheduler=scheduler, servers=servers, seed=7)
    for of in (LONG, SHORT)
    for scheduler in ("static_fifo", "multi_bin_dynamic")
    for servers in (1, 3)
]
FAILS = job(SHORT, version="of another version")
needs_ray = pytest.mark.skipif(
    # Not imported here: what it reads when it is imported, `run_on_ray` sets before.
    find_spec("ray") is None,
    reason="Ray is not installed: make setup",
)
LISTENING = "0A"
TRACES: dict[str, Any] = {job(of).rows: of for of in (SHORT, LONG)}


def answer(attempts: list[SweepAttempt]) -> dict[str, tuple[Any, ...]]:
    """By job, without what a clock said."""
    found = {one.id: (one.job, one.summary, one.error) for one in attempts}
    assert len(found) == len(attempts)
    return found


def test_processes_and_this_one_agree() -> None:
    before = children(os.getpid())
    here = answer(list(run_in_turn([*JOBS, FAILS], TRACES)))
    there = answer(list(run_in_processes([*JOBS, FAILS], TRACES, 2)))
    assert there == here
    assert [error is None for _, _, error in here.values()] == [True] * len(JOBS) + [False]
    assert not multiprocessing.active_children()
    # The tracker that Python keeps beside spawned processes stays until this process ends.
    assert len(children(os.getpid(), before)) <= 1


def test_a_job_that_its_process_dies_of_is_found_and_the_others_go_on() -> None:
    jobs = [JOBS[0], deadly_job(), *JOBS[1:]]
    attempts = answer(list(run_in_processes(jobs, TRACES | {DEADLY: Deadly()}, 2)))
    assert attempts.pop(deadly_job().id)[2] == "the process of the job died: killed, or out of memory"
    assert attempts == answer(list(run_in_turn(JOBS, TRACES)))


def test_who_stops_listening_leaves_no_process_behind() -> None:
    endless = [replace(JOBS[0], rows=ENDLESS, seed=seed) for seed in range(500)]
    stream = run_in_processes([JOBS[0], *endless], TRACES | {ENDLESS: Endless()}, 2)
    assert next(stream).id == JOBS[0].id
    assert len(multiprocessing.active_children()) == 2
    stream.close()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_until_a_process_was_sent_what_it_needs(number: signal.Signals) -> None:
    """Also one that another thread takes, whatever the mask of this one is."""
    answer: list[int] = []
    before = signal.signal(number, lambda number, _: answer.append(number))
    try:
        with _defer_signals():
            other = threading.Thread(target=signal.raise_signal, args=(number,))
            other.start()
            other.join()
            assert answer == []
        assert answer == [number]
        signal.raise_signal(number)
        assert answer == [number] * 2
        signal.signal(number, signal.SIG_IGN)
        with _defer_signals():
            assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def alive(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def addresses(pids: set[int]) -> set[tuple[str, int]]:
    """Where these processes listen, by the kernel's own tables."""
    ours = set()
    for pid in pids:
        for handle in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                ours.add(os.readlink(handle))
            except OSError:  # closed meanwhile
                continue
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and f"socket:[{fields[9]}]" in ours:
                host, _, port = fields[1].partition(":")
                # Words of 32 bits in the machine's order.
                packed = b"".join(bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8))
                found.add((socket.inet_ntop(family, packed).removeprefix("::ffff:"), int(port, 16)))
    return found


@needs_ray
@pytest.mark.ray
@pytest.mark.timeout(900)  # Ray takes 6 s to start, a minute on a busy machine, and may wait for another
@pytest.mark.filterwarnings("default")
def test_ray_agrees_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    # As where Ray was imported before. Its token stays as an earlier test made it: Ray reads it once.
    monkeypatch.setattr("ray._private.ray_constants.ENABLE_RAY_CLUSTER", True)
    before = children(os.getpid())
    jobs = [*JOBS[:3], FAILS, deadly_job(), *JOBS[3:]]
    stream = run_on_ray(jobs, TRACES | {DEADLY: Deadly()}, "local", workers=2)
    try:
        first = next(stream)
    except ConfigError as exc:
        if "did not start on this machine" not in exc.problem:
            raise
        pytest.skip(f"no time for Ray here: {exc}")
    started = children(os.getpid(), before)
    assert len(started) > 3  # its own, and two workers
    listening = addresses(started)
    assert listening
    assert {host for host, _ in listening} == {"127.0.0.1"}
    attempts = answer([first, *(next(stream) for _ in jobs[1:])])
    # On a busy machine, workers may not run before Ray gives up waiting.
    for pid in children(os.getpid(), before):
        if Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[1] != str(os.getpid()):
            os.kill(pid, signal.SIGSTOP)
    assert next(stream, None) is None
    died = attempts.pop(deadly_job().id)[2]
    assert died.startswith("the process of the job died")
    assert attempts == answer(list(run_in_turn([*JOBS, FAILS], TRACES)))
    left = children(os.getpid(), before)
    assert {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left} == {}
    assert not any(map(alive, started))


@needs_ray
@pytest.mark.filterwarnings("default")
def test_without_a_cluster_at_the_address_that_is_said() -> None:
    with pytest.raises(ConfigError, match=r"no Ray cluster answers at 127\.0\.0\.1:1"):
        next(run_on_ray(JOBS, TRACES, "127.0.0.1:1"))
    with pytest.raises(ConfigError, match="expected auto, local, HOST:PORT"):
        next(run_on_ray(JOBS, TRACES, "somewhere"))
