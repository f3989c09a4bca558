"""Runs the jobs of a sweep that are not done yet, and keeps what comes of them.

The longest come first, so that at the end no process waits for one that began late.
"""

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from typing import Final, Protocol

from llmtap.sim.sweep.results import Results
from llmtap.sim.sweep.sweep import SweepAttempt, SweepJob
from llmtap.sim.sweep.workers import Traces, in_processes, in_turn, on_ray

__all__ = ["SweepListener", "Sweeper"]

_EFFORT_PER_PROCESS: Final = 200_000
"""A process takes a second to start; in that time this one runs so many requests that are not measured."""


class SweepListener(Protocol):
    """Whoever wants to know how far a sweep is."""

    def planned(self, jobs: Sequence[SweepJob], kept: int) -> None:
        """These will be run now; `kept` more were done before."""

    def under_way(self, job: SweepJob, arrived: int) -> None:
        """So many of its requests have arrived; only told of jobs in this process."""

    def ended(self, job: SweepJob, attempt: SweepAttempt) -> None:
        """One is done, or failed."""


class Sweeper:
    """Runs jobs once each, in as many rounds as it is asked to."""

    def __init__(
        self,
        traces: Traces,
        audience: SweepListener,
        *,
        results: Results | None = None,
        workers: int | None = None,
        ray: str | None = None,
    ) -> None:
        """`traces` may grow. `workers`: processes, or CPUs of a Ray of our own; None: as many as are worth
        it. `ray`: its address.
        """
        self.attempts: dict[str, SweepAttempt] = {}
        """By job."""
        self._traces = traces
        self._audience = audience
        self._results = results
        self._workers = workers
        self._ray = ray

    def run(self, jobs: Sequence[SweepJob]) -> Mapping[str, SweepAttempt]:
        """Runs those that were not run before, here or in the results, and gives the attempts by job."""
        kept = {} if self._results is None else self._results.done
        by_id = {job.id: job for job in jobs}
        known = {id for id in by_id if id in kept}
        self.attempts |= {id: kept[id] for id in known}
        left = [job for id, job in by_id.items() if id not in self.attempts]
        left.sort(key=lambda job: -job.effort)  # which is stable
        self._audience.planned(left, len(known))
        if left:
            with closing(self._stream(left)) as stream:
                for told in stream:
                    if self._results is not None:
                        self._results.add(told)
                    self.attempts[told.id] = told
                    self._audience.ended(by_id[told.id], told)
        return self.attempts

    def _stream(self, jobs: list[SweepJob]) -> Generator[SweepAttempt]:
        traces = {job.rows: self._traces[job.rows] for job in jobs}
        if self._ray is not None:
            return on_ray(jobs, traces, self._ray, workers=self._workers)
        workers = min(self._workers or _worthwhile(jobs), len(jobs))
        if workers > 1:
            return in_processes(jobs, traces, workers)
        return in_turn(jobs, traces, progress=self._audience.under_way)


def _worthwhile(jobs: Sequence[SweepJob]) -> int:
    effort = sum(job.effort for job in jobs)
    return max(1, min(len(os.sched_getaffinity(0)), effort // _EFFORT_PER_PROCESS))
