"""Small sweeps: a trace, jobs on it, and traces that nobody survives."""

import os
import signal
from array import array
from collections.abc import Collection
from pathlib import Path
from typing import Any

from llmtap.sim.sweep.sweep import SweepJob, digest_of
from llmtap.workload.requests import Requests
from llmtap.workload.trace import Trace

DEADLY, ENDLESS = "deadly", "endless"


def trace(rows: int = 40, gap_ns: int = 500_000_000) -> Trace:
    """Requests of some lengths, one every half second."""
    arrivals = array("q", [i * gap_ns for i in range(rows)])
    given, made = ([(i * step) % 97 + 1 for i in range(rows)] for step in (13, 7))
    return Trace(Requests(arrivals, array("q", given), array("q", made)), "test")


def job(of: Trace, **changed: Any) -> SweepJob:
    fields: dict[str, Any] = {
        "trace": "a.csv",
        "rows": digest_of(of),
        "count": len(of),
        "scale": 1.0,
        "scheduler": "static_fifo",
    }
    return SweepJob(**(fields | changed))


class Deadly:
    """A trace that ends the process which runs it, as the kernel does when memory is short."""

    rate_rps = None

    def requests_at(self, *, count: int, scale: float) -> Requests:
        os._exit(9)


class Endless:
    """A trace whose run never ends by itself."""

    rate_rps = None

    def requests_at(self, *, count: int, scale: float) -> Requests:
        while True:
            signal.pause()


def deadly_job() -> SweepJob:
    return SweepJob(trace="deadly.csv", rows=DEADLY, count=1, scale=1.0, scheduler="static_fifo")


def children(pid: int, without: Collection[int] = ()) -> set[int]:
    """Processes that it started and that are there, and theirs; not what has ended and was not waited for.

    Those in `without` are left out, with all that they start: the browser of other tests starts processes at
    any time.
    """
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            for child in map(int, task.read_text().split()):
                if child not in without and " Z " not in Path(f"/proc/{child}/stat").read_text():
                    found |= {child} | children(child, without)
        except OSError:  # it is gone
            continue
    return found
