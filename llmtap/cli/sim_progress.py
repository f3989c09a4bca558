"""How far a sweep is: a bar where there is somebody to see it, else a line for each job that is done.

A job is called by its scheduler, its size, all that the sweep varies, and what else is not as it is by
default; loads as they were asked for, and values as the table has them.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from llmtap.report.sweep import setting_text
from llmtap.report.values import number
from llmtap.sim.model_options import ModelOptions
from llmtap.sim.schedulers.registry import options_read
from llmtap.sim.serving import Serving, settled
from llmtap.sim.sweep.sweep import SweepAttempt, SweepJob
from llmtap.units import encode_seconds

__all__ = ["Quiet", "SweepLabels", "SweepLines", "watching"]

_AT_ONCE_RPS: Final = 1e9
"""More than one a nanosecond."""


class SweepLabels:
    """What jobs of a sweep are called."""

    def __init__(
        self, axes: Mapping[str, Sequence[Any]], rate_of: Callable[[SweepJob], float | None]
    ) -> None:
        """`rate_of`: at how many requests a second a job's arrive; None where all do at once."""
        self._varied = {name for name, values in axes.items() if len(values) > 1}
        self._rate_of = rate_of if axes.keys() & {"rate", "share"} else None

    def of(self, job: SweepJob) -> str:
        said = [job.scheduler, f"{job.count:,} requests"]
        if self._rate_of is not None:
            rate_rps = self._rate_of(job)
            at_once = rate_rps is None or rate_rps >= _AT_ONCE_RPS
            said.append("all at once" if at_once else f"{number(rate_rps)} req/s")
        elif job.scale != 1 or "scale" in self._varied:
            said.append(f"scale {number(job.scale)}")
        if job.servers != 1 or "servers" in self._varied:
            said.append(f"{job.servers} server{'' if job.servers == 1 else 's'}")
        if job.seed is not None and (job.seed != 42 or "seed" in self._varied):
            said.append(f"seed {job.seed}")
        reads = options_read(job.scheduler, job.readings, job.serving)
        usual = (ModelOptions(), settled(Serving(), job.scheduler))
        for options, default in zip((job.readings, job.serving), usual, strict=True):
            values, unset = (msgspec.to_builtins(one, enc_hook=encode_seconds) for one in (options, default))
            said += [
                setting_text(name, value)
                for name, value in values.items()
                if name in reads and (value != unset[name] or name in self._varied)
            ]
        return ", ".join(said)


class Quiet:
    """Says nothing: for a run that is over soon, and whose output goes to a program."""

    def reading(self, done: int, of: int | None) -> None:
        pass

    def planned(self, jobs: Sequence[SweepJob], kept: int) -> None:
        pass

    def under_way(self, job: SweepJob, arrived: int) -> None:
        pass

    def ended(self, job: SweepJob, attempt: SweepAttempt) -> None:
        pass


class SweepLines(Quiet):
    """Lines on standard error."""

    def __init__(self, labels: SweepLabels) -> None:
        self._label = labels.of
        self._jobs = self._ended = 0

    def planned(self, jobs: Sequence[SweepJob], kept: int) -> None:
        self._jobs, self._ended = len(jobs), 0
        if kept:
            _say(f"{kept:,} done before and taken from the results, {len(jobs):,} left")

    def ended(self, job: SweepJob, attempt: SweepAttempt) -> None:
        self._ended += 1
        what = f"{self._label(job)} ({attempt.id})"
        how = f"{attempt.seconds:.2f} s" if attempt.error is None else f"failed: {attempt.error}"
        _say(f"{self._ended:,} of {self._jobs:,}: {what}: {how}")


class _Bar(SweepLines):
    """A bar, which goes by requests and not by jobs: some have a thousand times as many."""

    def __init__(self, labels: SweepLabels, bar: Any) -> None:
        super().__init__(labels)
        self._bar = bar
        self._reading = bar.add_task("reading", total=None)
        self._task: Any = None
        self._done = self._doing = 0

    def reading(self, done: int, of: int | None) -> None:
        self._bar.update(self._reading, completed=done, total=of)

    def planned(self, jobs: Sequence[SweepJob], kept: int) -> None:
        self._bar.update(self._reading, visible=False)
        if self._task is not None:
            self._bar.update(self._task, visible=False)
        self._jobs, self._ended, self._done = len(jobs), 0, 0
        total = sum(job.effort for job in jobs)
        self._task = self._bar.add_task(self._title(), total=total, visible=bool(jobs))
        if kept:
            self._bar.console.print(f"{kept:,} done before and taken from the results, {len(jobs):,} left")

    def under_way(self, job: SweepJob, arrived: int) -> None:
        self._doing = job.effort * arrived // job.count
        self._show(job.scheduler)

    def ended(self, job: SweepJob, attempt: SweepAttempt) -> None:
        self._ended += 1
        self._done += job.effort
        self._doing = 0
        if attempt.error is not None:
            self._bar.console.print(f"{self._label(job)} failed: {attempt.error}")
        self._show(job.scheduler)

    def _title(self) -> str:
        return f"{self._ended:,} of {self._jobs:,}"

    def _show(self, scheduler: str) -> None:
        self._bar.update(
            self._task, completed=self._done + self._doing, description=f"{self._title()} {scheduler}"
        )


@contextmanager
def watching(labels: SweepLabels, *, loud: bool) -> Iterator[Quiet]:
    """A bar on a terminal; elsewhere lines, or nothing where it is not to be `loud`."""
    if not sys.stderr.isatty():
        yield SweepLines(labels) if loud else Quiet()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(stderr=True, highlight=False, markup=False)
    with Progress(*columns, console=console, transient=True) as bar:
        yield _Bar(labels, bar)


def _say(text: str) -> None:
    print(f"llmtap: {text}", file=sys.stderr, flush=True)
