"""A sending process: `python -m llmtap.load`, told what to do on stdin, ends when that pipe does.

It does nothing but send, read and count. Tables, progress and files are the parent's, in another process: a
terminal being painted may delay no request. Exchanges go to a file that the parent reads after the run.
"""

import asyncio
import gc
import os
import pickle
import resource
import signal
import sys
from array import array
from collections.abc import Callable
from typing import BinaryIO, Final

import msgspec
import uvloop

from llmtap.clock import SystemClock
from llmtap.load.messages import Done, Progress, Ready, Script, Setup, frame
from llmtap.load.run import Run
from llmtap.load.schedule import ClosedSchedule, OpenSchedule, Schedule
from llmtap.load.sender import Sender
from llmtap.load.tally import Tally
from llmtap.load.target import parse_target
from llmtap.metrics.objectives import Objectives
from llmtap.metrics.summary import ENDED_WELL
from llmtap.net.tls import client_context
from llmtap.record.exchange import Exchange
from llmtap.units import decode_special
from llmtap.workload.requests import Requests

__all__ = ["main", "work"]

TELL_S: Final = 0.25
SPILL_BYTES: Final = 1 << 20
"""Exchanges held back for one write."""
CUT_NS: Final = 0
PRIORITY: Final = 10
"""Of real time, where it was asked for; the kernel's own threads have more."""

mono_ns = SystemClock.mono_ns


def main() -> int:
    """Run one load."""
    # A terminal's Ctrl-C reaches the whole group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = sys.stdin.buffer.readline()  # no more than this is sent before we are ready
    if not line:
        return 0
    setup = msgspec.json.decode(line, type=Setup, dec_hook=decode_special)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    uvloop.run(work(setup, sys.stdin.fileno(), sys.stdout.fileno()))
    return 0


async def work(setup: Setup, commands_fd: int, reports_fd: int) -> None:
    """One load, by what `commands_fd` says, told on `reports_fd`."""
    loop = asyncio.get_running_loop()
    script = msgspec.msgpack.decode(_read_all(setup.script_fd), type=Script)
    headers = [(name.encode(), value.encode()) for name, value in setup.headers]
    target = parse_target(setup.url, setup.endpoint, headers)
    tls = client_context(setup.ca, setup.verify) if target.origin.tls else None
    sender = Sender(loop, target, setup.sender, tls=tls)
    requests = Requests(
        _column(script.arrival_ns), after=_column(script.after), think_ns=_column(script.think_ns),
        tenants=script.tenants,
    )  # fmt: skip
    rows = _column(script.rows)
    schedule: Schedule
    if setup.slots is None:
        schedule = OpenSchedule(requests, rows)
    else:
        schedule = ClosedSchedule(requests, rows, setup.slots)
    tally = Tally(Objectives.parse(setup.slo) if setup.slo else None)
    tally.planned = len(rows)
    realtime = setup.priority and _real_time()
    commands = _Commands(commands_fd)
    loop.add_reader(commands_fd, commands.read)
    keeper = _Keeper(tally, requests.tenants, setup.spill_fd)
    connections = await sender.open(setup.open) if setup.open else 0
    _tell(reports_fd, frame(Ready(connections)), wait=True)
    start_ns = await commands.start
    if start_ns is None:
        sender.close()
        return
    run = Run(
        sender, schedule, _bodies(setup.bodies_fd, script), keeper.keep, start_ns=start_ns,
        duration_ns=setup.duration_ns, drain_ns=setup.drain_ns,
        headers=_tenant_headers(setup.tenant_header, requests.tenants),
    )  # fmt: skip
    commands.stop = lambda why: run.stop(why)
    commands.cut = lambda why: run.stop(why, drain_ns=CUT_NS)

    async def tell() -> None:
        while True:
            await asyncio.sleep(TELL_S)
            _tell(reports_fd, frame(keeper.progress(sender, schedule)), wait=False)

    telling = loop.create_task(tell())
    if commands.ended is not None:
        run.stop(commands.ended, drain_ns=CUT_NS)
    try:
        await run.go()
    finally:
        telling.cancel()
        loop.remove_reader(commands_fd)
    ended_ns = mono_ns()
    tally.dropped = schedule.dropped
    tally.summary.opened = sender.sent
    keeper.close()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    done = Done(
        tally.to_bytes(), run.stopped, sender.pool.connects, sender.pool.reuses,
        int((usage.ru_utime + usage.ru_stime) * 1e9), usage.ru_maxrss * 1024, sender.lag.take_max(), start_ns,
        ended_ns, realtime,
    )  # fmt: skip
    sender.close()
    _tell(reports_fd, frame(keeper.progress(sender, schedule)), wait=True)
    _tell(reports_fd, frame(done), wait=True)


class _Commands:
    """The parent's lines; its end is a `cut`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = b""
        self.start: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self.stop: Callable[[str], None] | None = None
        self.cut: Callable[[str], None] | None = None
        self.ended: str | None = None

    def read(self) -> None:
        data = os.read(self._fd, 4096)
        if not data:
            asyncio.get_running_loop().remove_reader(self._fd)
            self._obey("cut", "its parent is gone")
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            word, _, rest = line.decode().partition(" ")
            if word == "go":
                self.start.set_result(int(rest))
            else:
                self._obey(word, "somebody stopped it")

    def _obey(self, word: str, why: str) -> None:
        self.ended = why
        if not self.start.done():
            self.start.set_result(None)
        act = self.stop if word == "stop" else self.cut
        if act is not None:
            act(why)


class _Keeper:
    """Counts exchanges, and puts them aside for the parent."""

    def __init__(self, tally: Tally, tenants: list[str], spill_fd: int | None) -> None:
        self._tally = tally
        self._tenants = tenants
        self._file: BinaryIO | None = None if spill_fd is None else open(spill_fd, "wb", SPILL_BYTES)  # noqa: SIM115
        self._failed = 0
        self._tokens = 0

    def keep(self, row: int, x: Exchange) -> None:
        if self._tenants:
            x.tenant = self._tenants[row]
        self._tally.add(x)
        self._tokens += x.tokens.output or 0
        if x.outcome not in ENDED_WELL:
            self._failed += 1
        if self._file is not None:
            pickle.dump((row, x), self._file, pickle.HIGHEST_PROTOCOL)

    def progress(self, sender: Sender, schedule: Schedule) -> Progress:
        tally = self._tally
        ttft = tally.summary.histogram("ttft").percentiles((0.5, 0.99))
        tbc = tally.summary.histogram("tbc").percentiles((0.5, 0.99))
        return Progress(
            sender.sent, len(sender.calls), tally.summary.n, self._failed, schedule.left, self._tokens,
            tally.lateness.percentile(0.99), *ttft, *tbc,
        )  # fmt: skip

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _bodies(fd: int, script: Script) -> Callable[[int], bytes]:
    begins, ends = _column(script.body_begins), _column(script.body_ends)
    return lambda row: os.pread(fd, ends[row] - begins[row], begins[row])


def _tenant_headers(
    name: str | None, tenants: list[str]
) -> Callable[[int], list[tuple[bytes, bytes]]] | None:
    if name is None or not tenants:
        return None
    encoded = name.encode()
    return lambda row: [(encoded, tenants[row].encode())] if tenants[row] else []


def _column(packed: bytes) -> "array[int]":
    column = array("q")
    column.frombytes(packed)
    return column


def _read_all(fd: int) -> bytes:
    pieces = []
    at = 0
    while piece := os.pread(fd, 1 << 20, at):
        pieces.append(piece)
        at += len(piece)
    return b"".join(pieces)


def _tell(fd: int, data: bytes, *, wait: bool) -> None:
    """Write a frame: all of it, or, without waiting, nothing where the pipe is full."""
    os.set_blocking(fd, wait)
    try:
        while data:
            data = data[os.write(fd, data) :]
    except BlockingIOError:
        return
    except BrokenPipeError:
        return  # the parent is gone: stdin says so, too


def _real_time() -> bool:
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
    except OSError:
        return False
    return True
