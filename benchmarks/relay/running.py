"""A target that runs: alone on its CPU, in a folder of its own, ready when it answers, gone afterwards."""

from __future__ import annotations

import ctypes
import http.client
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from instrument import TARGET_CPU, free_port
from targets import Ports, Target, environment

STOP_WITHIN_S = 8
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1  # from linux/prctl.h


class NotReady(Exception):
    """The target did not start or does not answer; holds the end of what it printed."""


@dataclass(frozen=True, slots=True)
class Running:
    target: Target
    url: str
    headers: list[str]
    pid: int | None  # None for the direct way
    upstream: str = ""
    admin: str = ""

    def arguments(self) -> list[str]:
        """What sse_load must know of this target."""
        chosen = ["--url", self.url]
        for header in self.headers:
            chosen += ["--header", header]
        if self.pid is not None:
            chosen += ["--pid", str(self.pid)]
        return chosen


def role_of(command: str) -> str:
    """What a process of a target does: relay carries bytes, watcher reads packets, meter analyses them,
    supervisor tends all.

    Only llmtap has more than relays.
    """
    for module, role in (("llmtap.meter", "meter"), ("llmtap.vantage.passive", "watcher")):
        if module in command:
            return role
    if "llmtap" in command and "llmtap.vantage.relay" not in command:
        return "supervisor"
    return "relay"


def _answers(port: int, headers: list[str]) -> bool:
    """Whether a completion comes through: a target may listen and yet be misconfigured."""
    fields = dict(header.split(": ", 1) for header in headers) | {"Content-Type": "application/json"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        body = '{"model":"sim-model","messages":[{"role":"user","content":"ready?"}]}'
        connection.request("POST", "/v1/chat/completions", body, fields)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _wait_until_ready(
    process: subprocess.Popen, target: Target, port: int, headers: list[str], log: Path
) -> None:
    give_up = time.monotonic() + target.ready_within_s
    while not _answers(port, headers):
        if process.poll() is not None or time.monotonic() > give_up:
            tail = log.read_text(errors="replace")[-1500:]
            raise NotReady(f"{target.name} does not answer (exit {process.poll()})\n{tail}")
        time.sleep(0.1)


def descendants(pid: int) -> list[int]:
    """The processes that `pid` started, and those that these started."""
    found = [pid]
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):  # gone while we looked
            continue
        if parent in found:
            found.append(int(status.parent.name))
    return found[1:]


def _move_meter(pid: int, cpu: int) -> None:
    """Puts a target's meter, with all its threads, onto another CPU than its relay."""
    for child in descendants(pid):
        command = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
        if role_of(command) == "meter":
            for thread in Path(f"/proc/{child}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {cpu})


def _scheduled_apart(pid: int) -> bool:
    """Whether some process of the target is in another autogroup than we and our spinner.

    The kernel gives every session (setsid) its own scheduling group, and groups share a CPU evenly, whatever
    is in them: there the spinner, for all its idle priority, would take half of the target's CPU.
    """
    try:
        groups = {Path(f"/proc/{one}/autogroup").read_text().split()[0] for one in (pid, *descendants(pid))}
        return groups != {Path("/proc/self/autogroup").read_text().split()[0]}
    except (OSError, IndexError):  # a kernel without autogroups, or a process gone while we looked
        return False


def _stop(process: subprocess.Popen) -> None:
    """Ends the target and whatever it started; all are in the process group we gave it, and in no other."""
    process.terminate()
    try:
        process.wait(timeout=STOP_WITHIN_S)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _onto_target_cpu() -> None:
    """Runs in the child before exec. The second call: a killed benchmark takes its target along."""
    os.sched_setaffinity(0, {TARGET_CPU})
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def running(target: Target, upstream: int, *, meter_cpu: int = TARGET_CPU) -> Iterator[Running]:
    """The target, started and answering. Raises NotReady."""
    if target.prepare is None:
        yield Running(target, f"http://127.0.0.1:{upstream}/v1/chat/completions", [], None)
        return

    folder = Path(tempfile.mkdtemp(prefix=f"relay-bench-{target.name}-"))
    log = folder / "output.txt"
    ports = Ports(upstream=upstream, listen=free_port(), admin=free_port())
    command = target.prepare(folder, ports)
    headers = target.headers(ports)
    with log.open("w") as output:
        process = subprocess.Popen(
            command.argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=folder,
            env=environment(command),
            process_group=0,  # and not a session of its own: see _scheduled_apart
            preexec_fn=_onto_target_cpu,
        )
    try:
        _wait_until_ready(process, target, ports.listen, headers, log)
        if meter_cpu != TARGET_CPU:
            _move_meter(process.pid, meter_cpu)
        if _scheduled_apart(process.pid):
            print(f"  ! {target.name} opened a session: it shares its CPU with the spinner", file=sys.stderr)
        there, behind, admin = (f"http://127.0.0.1:{p}" for p in (ports.listen, upstream, ports.admin))
        yield Running(target, f"{there}/v1/chat/completions", headers, process.pid, behind, admin)
    finally:
        _stop(process)
        shutil.rmtree(folder, ignore_errors=True)
