"""Run the jobs of a sweep in this process, in several processes, or on a Ray cluster, and store the results.

`SweepRunner.run` takes `SweepJob`s and returns a `SweepAttempt` (a summary or an error) for each; `sweep.py`
runs one job. If a job fails, or if its process dies, its attempt has an error. Each attempt is written and
synced to the results file (`Results`, JSON lines), if there is one; otherwise attempts are only in memory.
Jobs in the file are not run again unless they failed. When the file is opened, an incomplete last line is
removed.
"""

import fcntl
import multiprocessing
import os
import signal
import stat
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import msgspec

from llmtap.clock import SystemClock
from llmtap.errors import ConfigError
from llmtap.net.cluster import ray_cluster
from llmtap.sim.sweep.sweep import SweepAttempt, SweepJob, attempt
from llmtap.user_files import decode_json
from llmtap.workload.trace import Trace

_PLACE: Final = "--results"
_LINE_START: Final = b'{"id":'
"""Start of each line. A file with another start is no results file, and must not be truncated."""


class Results:
    """A results file on disk, locked while it is open: JSON lines, one for each attempt."""

    def __init__(self, path: Path) -> None:
        """Read the file, or create it. Raises ConfigError if it cannot be used as a results file."""
        self.path = path
        self.successes: dict[str, SweepAttempt] = {}
        """Attempts without an error, by the id of the job."""
        try:
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 (open until `close`)
        except OSError as exc:
            raise ConfigError(_PLACE, f"cannot open {path}: {exc.strerror}", "name another file") from None
        try:
            if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                raise ConfigError(
                    _PLACE,
                    f"{path} is not a regular file, so its results could not be read again",
                    "name another file",
                )
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except BlockingIOError:
            self._file.close()
            raise ConfigError(
                _PLACE, f"{path} is being written by another run", "name another file"
            ) from None
        except ConfigError:
            self._file.close()
            raise

    def add(self, attempt: SweepAttempt) -> None:
        """Write an attempt to the file. Raises ConfigError."""
        line = msgspec.json.encode(attempt) + b"\n"
        try:
            # A write can be partial. If the disk is full after a part of the line, `_read` removes this part
            # when the file is opened again.
            while line:
                line = line[self._file.write(line) :]
            os.fsync(self._file.fileno())
        except OSError as exc:
            raise ConfigError(
                _PLACE, f"cannot write {self.path}: {exc.strerror}", "check the free space"
            ) from None
        self._store(attempt)

    def close(self) -> None:
        self._file.close()

    def _read(self) -> None:
        """Read the results that an earlier, interrupted sweep has saved."""
        self._file.seek(0)
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:whole].split(b"\n")[:-1], 1):
            try:
                self._store(decode_json(line, SweepAttempt))
            except msgspec.DecodeError:
                raise ConfigError(
                    _PLACE,
                    f"{self.path}, line {number}: expected a result of llmtap sim run",
                    "name another file",
                ) from None
        if whole < len(data):
            if not whole and not _LINE_START.startswith(data[: len(_LINE_START)]):
                raise ConfigError(
                    _PLACE, f"{self.path} is not a results file of llmtap sim run", "name another file"
                )
            self._file.truncate(whole)

    def _store(self, attempt: SweepAttempt) -> None:
        """Keep a successful attempt, so that its job is not run again."""
        if attempt.summary is not None:
            self.successes[attempt.id] = attempt


Traces = Mapping[str, Trace]
"""Traces by digest (`SweepJob.rows`)."""

_PROCESS_DIED: Final = "the process of the job died: killed, or out of memory"
_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_in_turn(
    jobs: Sequence[SweepJob], traces: Traces, *, progress: Callable[[SweepJob, int], None] | None = None
) -> Generator[SweepAttempt]:
    """Run jobs in this process, one after the other."""
    for job in jobs:
        report = None if progress is None else partial(progress, job)
        yield attempt(job, traces[job.rows], SystemClock.mono_ns, report)


def run_in_processes(jobs: Sequence[SweepJob], traces: Traces, workers: int) -> Generator[SweepAttempt]:
    """Run jobs in processes of this machine. The processes end with this iterator, or with this process.

    If a process dies, each job that was running is run again, alone. If its process dies again, the job
    fails.
    """
    remaining = {job.id: job for job in jobs}
    while remaining:
        suspects: list[SweepJob] = []
        with _process_pool(traces, workers) as submit:
            for job, attempt_ in _attempts_as_completed(list(remaining.values()), submit, workers + 1):
                if attempt_ is None:
                    suspects.append(job)
                else:
                    del remaining[job.id]
                    yield attempt_
        for job in suspects:
            with _process_pool(traces, 1) as submit:
                [(_, attempt_)] = _attempts_as_completed([job], submit, 1)
            del remaining[job.id]
            yield attempt_ or SweepAttempt(job.id, job.to_dict(), error=_PROCESS_DIED)


def _attempts_as_completed(
    jobs: Sequence[SweepJob], submit: Callable[[SweepJob], "Future[SweepAttempt]"], running_max: int
) -> Iterator[tuple[SweepJob, SweepAttempt | None]]:
    """Run jobs, at most `running_max` at a time, and yield each with its attempt. If a process dies, yield
    each job that was running with None, and end."""
    waiting = iter(jobs)
    running: dict[Future[SweepAttempt], SweepJob] = {}
    broken = False
    while True:
        while not broken and len(running) < running_max and (job := next(waiting, None)) is not None:
            try:
                running[submit(job)] = job
            except BrokenProcessPool:
                broken = True
                yield job, None
        if not running:
            return
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            job = running.pop(future)
            try:
                attempt = future.result()
            except BrokenProcessPool:
                broken = True
                yield job, None
            else:
                yield job, attempt


@contextmanager
def _process_pool(traces: Traces, workers: int) -> Iterator[Callable[[SweepJob], "Future[SweepAttempt]"]]:
    """Yield a function that submits a job to a pool of processes."""
    others = set(multiprocessing.active_children())
    # Do not fork: a fork copies locks in the state in which threads, such as Arrow's, hold them.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_prepare_worker, initargs=(traces,))

    def submit(job: SweepJob) -> "Future[SweepAttempt]":
        # `submit` starts processes, which inherit this signal mask: no signal reaches them before they are
        # ready.
        with _defer_signals():
            previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
            try:
                return pool.submit(_run_job, job)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)

    try:
        yield submit
    except BaseException:
        # This process is interrupted. Kill the child processes: some of them possibly do not handle signals
        # yet.
        for child in set(multiprocessing.active_children()) - others:
            child.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _defer_signals() -> Iterator[None]:
    """Defer _STOP_SIGNALS, so that no process starts with only a part of its initial data.

    A signal mask of this thread is not enough: another thread can receive the signal, and Python then runs
    the handler in this thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    deferred_signals: list[int] = []
    handlers = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in handlers:
        signal.signal(number, lambda number, _: deferred_signals.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for signal_number in deferred_signals:
            signal.raise_signal(signal_number)


_traces: Traces = {}
"""Traces of a worker process, which `_prepare_worker` sets."""


def _prepare_worker(traces: Traces) -> None:
    global _traces
    _traces = traces
    # Ctrl-C reaches all processes of the group. Ignore it: the parent decides when a worker process ends.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when its parent ends. This runs in a thread."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run_job(job: SweepJob, trace: Trace | None = None) -> SweepAttempt:
    return attempt(job, _traces[job.rows] if trace is None else trace, SystemClock.mono_ns)


def run_on_ray(
    jobs: Sequence[SweepJob], traces: Traces, address: str, *, workers: int | None = None
) -> Generator[SweepAttempt]:
    """Run jobs on the Ray cluster at an address: `auto`, `host:6379` or `ray://host:10001`.

    The address `local` starts a cluster with `workers` CPUs on loopback. Raises ConfigError if Ray or the
    cluster is missing.
    """
    with ray_cluster(address, workers) as ray:
        stored = {digest: ray.put(trace) for digest, trace in traces.items()}
        task = ray.remote(max_retries=1)(_run_job)
        running = {task.options(name=job.name).remote(job, stored[job.rows]): job for job in jobs}
        # Do not cancel tasks when the iterator is closed. They end with this process anyway. If a task that
        # was cancelled by force completes nevertheless, Ray 2.60 aborts this process.
        while running:
            for ref in ray.wait(list(running), num_returns=1)[0]:
                job = running.pop(ref)
                try:
                    attempt: SweepAttempt = ray.get(ref)
                except ray.exceptions.RayTaskError as exc:
                    # `_run_job` never raises an exception, so a node has no llmtap, or another version of it.
                    attempt = SweepAttempt(job.id, job.to_dict(), error=str(exc).strip().splitlines()[-1])
                except ray.exceptions.RayError as exc:
                    attempt = SweepAttempt(
                        job.id, job.to_dict(), error=f"{_PROCESS_DIED} ({str(exc).strip().splitlines()[0]})"
                    )
                yield attempt


_EFFORT_PER_PROCESS: Final = 200_000
"""Number of unmeasured requests that one process simulates in a second, the time to start a process."""


class SweepListener(Protocol):
    """Listener for the progress of a sweep."""

    def on_planned(self, jobs: Sequence[SweepJob], done_before: int) -> None:
        """Receive the jobs that will be run. `done_before`: number of jobs that already have a result."""

    def on_progress(self, job: SweepJob, arrived: int) -> None:
        """Receive the number of arrivals so far of a job that runs in this process."""

    def on_ended(self, job: SweepJob, attempt: SweepAttempt) -> None:
        """Receive the result or the error of a job."""


class SweepRunner:
    """Runs the jobs of a sweep, each once. The longest jobs start first, so that processes end together."""

    def __init__(
        self,
        traces: Traces,
        listener: SweepListener,
        *,
        results: Results | None = None,
        workers: int | None = None,
        ray: str | None = None,
    ) -> None:
        """`traces`: traces by digest; the caller can add traces between runs. `workers`: number of processes,
        or of CPUs of a local Ray; None: as many as are useful. `ray`: address of a cluster."""
        self.attempts: dict[str, SweepAttempt] = {}
        """Results and errors of the jobs that were run so far, by the id of the job."""
        self._traces = traces
        """By source: requests of its trace."""
        self._listener = listener
        self._results = results
        """Results file, from which earlier results are read; None: without a file."""
        self._workers = workers
        """Number of processes; None: as many as are useful."""
        self._ray = ray
        """Ray cluster that runs the jobs; None: they run on this host."""

    def run(self, jobs: Sequence[SweepJob]) -> Mapping[str, SweepAttempt]:
        """Run the jobs without an attempt here or a result in the results file. Return all attempts by id."""
        stored = {} if self._results is None else self._results.successes
        by_id = {job.id: job for job in jobs}
        stored_ids = {id for id in by_id if id in stored}
        self.attempts |= {id: stored[id] for id in stored_ids}
        remaining = [job for id, job in by_id.items() if id not in self.attempts]
        remaining.sort(key=lambda job: -job.effort)  # The sort is stable, so equal efforts stay in order.
        self._listener.on_planned(remaining, len(stored_ids))
        if remaining:
            with closing(self._stream(remaining)) as stream:
                for attempt in stream:
                    if self._results is not None:
                        self._results.add(attempt)
                    self.attempts[attempt.id] = attempt
                    self._listener.on_ended(by_id[attempt.id], attempt)
        return self.attempts

    def _stream(self, jobs: list[SweepJob]) -> Generator[SweepAttempt]:
        """Yield the results of jobs as they end, from Ray, other processes or this one."""
        traces = {job.rows: self._traces[job.rows] for job in jobs}
        if self._ray is not None:
            return run_on_ray(jobs, traces, self._ray, workers=self._workers)
        workers = min(self._workers or _useful_workers(jobs), len(jobs))
        if workers > 1:
            return run_in_processes(jobs, traces, workers)
        return run_in_turn(jobs, traces, progress=self._listener.on_progress)


def _useful_workers(jobs: Sequence[SweepJob]) -> int:
    """Return the number of processes that shortens the sweep: a process takes time to start."""
    effort = sum(job.effort for job in jobs)
    return max(1, min(len(os.sched_getaffinity(0)), effort // _EFFORT_PER_PROCESS))
