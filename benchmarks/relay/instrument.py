"""The two C programs, and where everything runs: compile, start, pin, ask.

The target has CPU 0 to itself. Server and client share CPU 1, at real-time priority where the system allows
it, so that neither waits for whatever else wants that CPU; the client comes first, because its recv() is the
stamp. A spinner of idle priority keeps both CPUs awake.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = HERE / "build"

TARGET_CPU = 0
INSTRUMENT_CPU = 1
SERVER_PRIORITY = 10
CLIENT_PRIORITY = 20

PROGRAMS = {
    "sse_server": ["sse_server.c", "deadlines.c", "histogram.c"],
    "sse_load": ["sse_load.c", "answer.c", "proctree.c", "deadlines.c", "histogram.c"],
    "idle_spin": ["idle_spin.c"],
}


def compile_all() -> None:
    """Compiles what is older than its sources, any header counting for every program."""
    BUILD.mkdir(exist_ok=True)
    headers = max(path.stat().st_mtime for path in HERE.glob("*.h"))
    for name, sources in PROGRAMS.items():
        program = BUILD / name
        newest = max(headers, *((HERE / source).stat().st_mtime for source in sources))
        if program.exists() and program.stat().st_mtime > newest:
            continue
        files = [str(HERE / source) for source in sources]
        flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra"]
        subprocess.run(["cc", *flags, "-o", str(program), *files, "-lm"], check=True)


def free_port() -> int:
    """A loopback port nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def real_time_allowed() -> bool:
    """Whether we may give a process SCHED_FIFO: tried on a child of ours."""
    child = subprocess.Popen(["sleep", "5"])
    try:
        os.sched_setscheduler(child.pid, os.SCHED_FIFO, os.sched_param(CLIENT_PRIORITY))
    except PermissionError:
        return False
    finally:
        child.kill()
        child.wait()
    return True


def _onto_instrument_cpu(priority: int | None) -> None:
    """Runs in the child before exec. Without real time it measures too, only with more noise."""
    os.sched_setaffinity(0, {INSTRUMENT_CPU})
    if priority:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(priority))


@contextmanager
def stopped_afterwards(process: subprocess.Popen[str]) -> Iterator[None]:
    """Ends a process we started, gently first."""
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def spinner() -> Iterator[None]:
    """Keeps both CPUs out of idle while it lasts."""
    process = subprocess.Popen([BUILD / "idle_spin", str(TARGET_CPU), str(INSTRUMENT_CPU)], text=True)
    with stopped_afterwards(process):
        yield


@contextmanager
def server(real_time: bool, *more: str) -> Iterator[int]:
    """The emulated gateway on a port of its own choice; gives the port. `more`: arguments of sse_server."""
    process = subprocess.Popen(
        [BUILD / "sse_server", "--port", "0", "--with-parent", *more],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: _onto_instrument_cpu(SERVER_PRIORITY if real_time else None),
    )
    with stopped_afterwards(process):
        assert process.stdout
        line = process.stdout.readline()
        yield int(json.loads(line)["listening"].rpartition(":")[2])


class LoadFailed(Exception):
    """The load generator gave no result: a mistake in how it was called, or it hung."""


def load(arguments: list[str], *, real_time: bool, within_s: float) -> dict:
    """Runs sse_load once and returns its JSON. `within_s` bounds a run that hangs."""
    done = subprocess.run(
        [BUILD / "sse_load", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        timeout=within_s,
        check=False,
        preexec_fn=lambda: _onto_instrument_cpu(CLIENT_PRIORITY if real_time else None),
    )
    if not done.stdout:
        raise LoadFailed(f"sse_load {' '.join(arguments)} ended with {done.returncode} and no result")
    return json.loads(done.stdout)
