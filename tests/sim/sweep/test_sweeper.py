"""Invariant: a job is run once, whoever asks for it how often."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from llmtap.sim.sweep.runner import Results, SweepRunner
from llmtap.sim.sweep.sweep import SweepAttempt, SweepJob
from tests.support.sweeps import job, trace

TRACE = trace()
JOB = job(TRACE)
TRACES = {JOB.rows: TRACE}


class Audience:
    def __init__(self) -> None:
        self.heard: list[object] = []

    def planned(self, jobs: Sequence[SweepJob], kept: int) -> None:
        self.heard.append(([job.count for job in jobs], kept))

    def under_way(self, job: SweepJob, arrived: int) -> None:
        self.heard.append((job.count, arrived))

    def ended(self, job: SweepJob, attempt: SweepAttempt) -> None:
        assert attempt.id == job.id
        self.heard.append(job.count)


def test_the_longest_come_first_and_each_once() -> None:
    audience = Audience()
    sweeper = SweepRunner(TRACES, audience)
    jobs = [replace(JOB, count=n) for n in (5, 20, 5, 10)]
    told = sweeper.run(jobs)
    assert audience.heard == [([20, 10, 5], 0), 20, 10, 5]
    assert {one.summary["n"] for one in told.values() if one.summary} == {5, 10, 20}
    sweeper.run([jobs[0], replace(JOB, count=7)])
    assert audience.heard[4:] == [([7], 0), 7]
    assert len(sweeper.attempts) == 4


def test_what_is_in_the_results_is_taken_from_there(tmp_path: Path) -> None:
    jobs = [replace(JOB, count=n) for n in (5, 10)]
    failing = replace(JOB, scheduler="continuous_batching", servers=2)
    first = Results(tmp_path / "r.jsonl")
    SweepRunner(TRACES, Audience(), results=first).run([jobs[0], failing])
    first.close()
    audience = Audience()
    again = Results(tmp_path / "r.jsonl")
    told = SweepRunner(TRACES, audience, results=again).run([*jobs, failing])
    again.close()
    # What failed is tried again.
    assert audience.heard == [([40, 10], 1), 40, 10]
    assert [told[j.id].error is None for j in (*jobs, failing)] == [True, True, False]
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == 4
