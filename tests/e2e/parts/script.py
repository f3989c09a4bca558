"""What the scripts of this folder share: their places, one run at a time, phases, and how a run ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from parts.servers import Failure

HERE = Path(__file__).resolve().parents[1]
PROGRAMS = HERE / "programs"
"""Programs that other interpreters run: those of the gateway, the engine, Node, and containers."""
REPOSITORY = HERE.parents[1]
ROOT = REPOSITORY / ".e2e"
LOGS = ROOT / "logs"
LLMTAP = REPOSITORY / ".venv/bin/llmtap"
TOGETHER = "LLMTAP_E2E_TOGETHER"
"""Environment variable: the process is a part of `together.py`, which holds the lock."""
COMPLAINTS_MAX = 30  # printed; the number of all of them stands below


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    print(f"[e2e] {name}", flush=True)
    start = time.monotonic()
    yield
    print(f"[e2e] {name}: {time.monotonic() - start:.1f} s", flush=True)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """One run at a time in one checkout: two would measure each other, and share the files. Makes LOGS."""
    LOGS.mkdir(parents=True, exist_ok=True)
    if TOGETHER in os.environ:
        yield
        return
    with (ROOT / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Failure(f"another run is under way: it holds {ROOT / 'lock'}") from None
        yield


def give_up(number: int, _frame: object) -> None:
    """For `signal.signal`: what was started is ended on the way out."""
    late = ": it took too long" if number == signal.SIGALRM else ""
    raise Failure(f"stopped by {signal.Signals(number).name}{late}")


def carry_out(name: str, work: Callable[[], list[str]], *, limit_s: int = 0) -> int:
    """Does `work` alone, and says what it found wrong. Returns the exit code.

    `limit_s` is for all of it; 0 where `work` sets alarms of its own.
    """
    for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, give_up)
    signal.alarm(limit_s)
    start = time.monotonic()
    try:
        with alone():
            wrong = work()
    except Failure as failure:
        wrong = [str(failure)]
    print(f"\n[e2e] {name}: {time.monotonic() - start:.0f} s", flush=True)
    for complaint in wrong[:COMPLAINTS_MAX]:
        print(f"[e2e] WRONG: {complaint}", flush=True)
    print(f"[e2e] {name}: {f'failed, {len(wrong)} wrong' if wrong else 'ok'}", flush=True)
    return 1 if wrong else 0
