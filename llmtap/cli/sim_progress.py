"""How far a sweep is: a bar where there is somebody to see it, else a line for each job that is done."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from llmtap.sim.tunnel.sweep import Attempt, Job
from llmtap.units import Duration, format_ns

__all__ = ["Lines", "Quiet", "watching"]


class Quiet:
    """Says nothing: for a run that is over soon, and whose output goes to a program."""

    def reading(self, done: int, of: int | None) -> None:
        pass

    def planned(self, jobs: Sequence[Job], kept: int) -> None:
        pass

    def under_way(self, job: Job, arrived: int) -> None:
        pass

    def ended(self, job: Job, attempt: Attempt) -> None:
        pass


class Lines(Quiet):
    """Lines on standard error."""

    def __init__(self) -> None:
        self._jobs = self._ended = 0

    def planned(self, jobs: Sequence[Job], kept: int) -> None:
        self._jobs, self._ended = len(jobs), 0
        if kept:
            _say(f"{kept:,} done before and taken from the results, {len(jobs):,} left")

    def ended(self, job: Job, attempt: Attempt) -> None:
        self._ended += 1
        what = f"{_label(job)} ({attempt.id})"
        how = f"{attempt.seconds:.2f} s" if attempt.error is None else f"failed: {attempt.error}"
        _say(f"{self._ended:,} of {self._jobs:,}: {what}: {how}")


class _Bar(Lines):
    """A bar, which goes by requests and not by jobs: some have a thousand times as many."""

    def __init__(self, bar: Any) -> None:
        super().__init__()
        self._bar = bar
        self._reading = bar.add_task("reading", total=None)
        self._task: Any = None
        self._done = self._doing = 0

    def reading(self, done: int, of: int | None) -> None:
        self._bar.update(self._reading, completed=done, total=of)

    def planned(self, jobs: Sequence[Job], kept: int) -> None:
        self._bar.update(self._reading, visible=False)
        if self._task is not None:
            self._bar.update(self._task, visible=False)
        self._jobs, self._ended, self._done = len(jobs), 0, 0
        total = sum(job.effort for job in jobs)
        self._task = self._bar.add_task(self._title(), total=total, visible=bool(jobs))
        if kept:
            self._bar.console.print(f"{kept:,} done before and taken from the results, {len(jobs):,} left")

    def under_way(self, job: Job, arrived: int) -> None:
        self._doing = job.effort * arrived // job.count
        self._show(job.scheduler)

    def ended(self, job: Job, attempt: Attempt) -> None:
        self._ended += 1
        self._done += job.effort
        self._doing = 0
        if attempt.error is not None:
            self._bar.console.print(f"{_label(job)} failed: {attempt.error}")
        self._show(job.scheduler)

    def _title(self) -> str:
        return f"{self._ended:,} of {self._jobs:,}"

    def _show(self, scheduler: str) -> None:
        self._bar.update(
            self._task, completed=self._done + self._doing, description=f"{self._title()} {scheduler}"
        )


@contextmanager
def watching(make: Callable[[], Quiet]) -> Iterator[Quiet]:
    """A bar on a terminal; elsewhere what `make` gives."""
    if not sys.stderr.isatty():
        yield make()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(stderr=True, highlight=False, markup=False)
    with Progress(*columns, console=console, transient=True) as bar:
        yield _Bar(bar)


def _label(job: Job) -> str:
    """What is not as it is by default, in words."""
    said = [job.scheduler, f"{job.count:,} requests"]
    said += [f"scale {job.scale:.4g}"] if job.scale != 1 else []
    said += [f"{job.servers} servers"] if job.servers != 1 else []
    for options in (job.readings, job.serving):
        for field in msgspec.structs.fields(options):
            value = getattr(options, field.name)
            if value != field.default:
                said.append(f"{field.name} {format_ns(value) if isinstance(value, Duration) else value}")
    return ", ".join(said)


def _say(text: str) -> None:
    print(f"llmtap: {text}", file=sys.stderr, flush=True)
