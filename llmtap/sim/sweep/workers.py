"""Who runs the jobs of a sweep: this process, processes of this machine, or a Ray cluster.

Each takes jobs and gives attempts as they end, in whatever order that is. Workers are sent the traces once,
when they start. A job that fails is an attempt with an error, also where its process dies of it.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from typing import Final

from llmtap.clock import SystemClock
from llmtap.net.cluster import ray_cluster
from llmtap.sim.sweep.sweep import SweepAttempt, SweepJob, attempt
from llmtap.workload.trace import Trace

__all__ = ["Traces", "in_processes", "in_turn", "on_ray"]

Traces = Mapping[str, Trace]
"""By the digest that jobs ask for them with."""

_DIED: Final = "its process died: killed, or out of memory"
_STOPPING: Final = (signal.SIGINT, signal.SIGTERM)


def in_turn(
    jobs: Sequence[SweepJob], traces: Traces, *, progress: Callable[[SweepJob, int], None] | None = None
) -> Generator[SweepAttempt]:
    """In this process. `progress` is told how many requests of the job under way have arrived."""
    for job in jobs:
        told = None if progress is None else partial(progress, job)
        yield attempt(job, traces[job.rows], SystemClock.mono_ns, told)


def in_processes(jobs: Sequence[SweepJob], traces: Traces, workers: int) -> Generator[SweepAttempt]:
    """In so many processes of this machine, which end when this iterator is closed or this process dies.

    Where a process dies, nobody can say which of the jobs under way it died of. They are run again, each in a
    process of its own, and the one that dies again is the one.
    """
    left = {job.id: job for job in jobs}
    while left:
        suspects: list[SweepJob] = []
        with _pool(traces, workers) as submit:
            for job, told in _as_they_end(list(left.values()), submit, workers + 1):
                if told is None:
                    suspects.append(job)
                else:
                    del left[job.id]
                    yield told
        for job in suspects:
            with _pool(traces, 1) as submit:
                [(_, told)] = _as_they_end([job], submit, 1)
            del left[job.id]
            yield told or SweepAttempt(job.id, job.to_dict(), error=_DIED)


def _as_they_end(
    jobs: Sequence[SweepJob], submit: Callable[[SweepJob], "Future[SweepAttempt]"], most: int
) -> Iterator[tuple[SweepJob, SweepAttempt | None]]:
    """Hands out jobs, `most` at a time. None for those that were out when a process died; then it ends."""
    waiting = iter(jobs)
    running: dict[Future[SweepAttempt], SweepJob] = {}
    broken = False
    while True:
        while not broken and len(running) < most and (job := next(waiting, None)) is not None:
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
                told = future.result()
            except BrokenProcessPool:
                broken = True
                yield job, None
            else:
                yield job, told


@contextmanager
def _pool(traces: Traces, workers: int) -> Iterator[Callable[[SweepJob], "Future[SweepAttempt]"]]:
    others = set(multiprocessing.active_children())
    # A fork would copy whatever threads hold, Arrow's among them.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(traces,))

    def submit(job: SweepJob) -> "Future[SweepAttempt]":
        # Which starts processes. They inherit the mask, and so are deaf to signals from the first moment on.
        with _signals_later():
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
            try:
                return pool.submit(_attempt, job)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        yield submit
    except BaseException:
        # Interrupted: what is under way is not waited for, nor asked: it may not be listening yet.
        for child in set(multiprocessing.active_children()) - others:
            child.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _signals_later() -> Iterator[None]:
    """Until its end no handler of SIGINT and SIGTERM runs: a process that is sent half of what it needs to
    begin says so in a traceback. The mask of this thread is not enough: another (Arrow's, say) takes a signal
    as well, and Python runs its handler here."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in _STOPPING}
    before = {number: handler for number, handler in before.items() if callable(handler)}
    for number in before:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for taken in came:
            signal.raise_signal(taken)


_traces: Traces = {}
"""Of a worker process."""


def _begin(traces: Traces) -> None:
    """What a worker process does first."""
    global _traces
    _traces = traces
    # Ctrl-C reaches the whole group; the parent decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _attempt(job: SweepJob) -> SweepAttempt:
    return attempt(job, _traces[job.rows], SystemClock.mono_ns)


def on_ray(
    jobs: Sequence[SweepJob], traces: Traces, address: str, *, workers: int | None = None
) -> Generator[SweepAttempt]:
    """On the Ray cluster at this address (`auto`, `host:6379`, `ray://host:10001`), whose nodes have llmtap;
    `local` starts one of `workers` CPUs on this machine, on its loopback only, and ends it afterwards.

    Raises ConfigError where there is no Ray, or none at that address.
    """
    with ray_cluster(address, workers) as ray:
        kept = {digest: ray.put(trace) for digest, trace in traces.items()}
        task = ray.remote(max_retries=1)(_attempt_on_ray)
        running = {task.options(name=job.name).remote(job, kept[job.rows]): job for job in jobs}
        # Who stops listening cancels nothing: all ends with this driver, and Ray 2.60 aborts it where a task
        # that was cancelled by force comes to its end all the same.
        while running:
            for ref in ray.wait(list(running), num_returns=1)[0]:
                job = running.pop(ref)
                try:
                    told: SweepAttempt = ray.get(ref)
                except ray.exceptions.RayTaskError as exc:
                    # Ours never raise: this is a node without llmtap, or with another.
                    told = SweepAttempt(job.id, job.to_dict(), error=str(exc).strip().splitlines()[-1])
                except ray.exceptions.RayError as exc:
                    told = SweepAttempt(
                        job.id, job.to_dict(), error=f"{_DIED} ({str(exc).strip().splitlines()[0]})"
                    )
                yield told


def _attempt_on_ray(job: SweepJob, trace: Trace) -> SweepAttempt:
    return attempt(job, trace, SystemClock.mono_ns)
