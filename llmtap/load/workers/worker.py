"""Program of a process that sends load (`python -m llmtap.load.workers.worker`), controlled through stdin.

It reads its setup and rows from a file and commands from the parent, sends the rows (`load/run.py`), and
reports progress and the final counts (`LoadTally`) through a pipe. Exchanges go to a file that the parent
reads after the run. The parent's side is `worker_handle.py` and `worker_pool.py`.
"""

import asyncio
import gc
import os
import pickle
import resource
import signal
import sys
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec
import uvloop

from llmtap.clock import SystemClock
from llmtap.exchange.exchange import Exchange
from llmtap.load.http import LoadSender
from llmtap.load.prompt_sender import PromptSender, check_target, make_prompt_sender
from llmtap.load.run import LoadRun, RowRequest, Schedule
from llmtap.load.sending import DeferredWork, parse_target, path_at, protocol_of
from llmtap.load.tally import LoadTally
from llmtap.load.workers.worker_handle import (
    Progress,
    WorkerDone,
    WorkerReady,
    WorkerScript,
    WorkerSetup,
    frame,
)
from llmtap.metrics.objectives import Objectives
from llmtap.metrics.statistics import percentile
from llmtap.metrics.summary import ENDED_WELL
from llmtap.net.listener import raise_file_limit
from llmtap.net.tls import client_context
from llmtap.units import decode_special
from llmtap.workload.requests import Requests

REPORT_S: Final = 0.25
"""Time between two progress messages."""
COLLECT_EACH: Final = 240
"""Number of progress messages between two garbage collections: one minute."""
SPILL_BYTES: Final = 1 << 20
LATEST: Final = 512
"""Number of latest values used for the percentiles in progress messages. These take 0.1 ms; percentiles of
all values would take 2 ms, in which nothing could be sent."""
CUT_DRAIN_NS: Final = 0
"""Time to wait for outstanding answers after the command `cut`."""

mono_ns = SystemClock.mono_ns


def main() -> int:
    # Ctrl-C, or the end of the terminal, signals the whole process group: only the parent must react to it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with open(int(sys.argv[1]), "rb") as file:
        file.seek(0)
        setup = msgspec.json.decode(file.readline(), type=WorkerSetup, dec_hook=decode_special)
        script = msgspec.msgpack.decode(file.read(), type=WorkerScript)
    raise_file_limit()
    gc.collect()
    gc.freeze()
    gc.disable()  # `_report_progress` collects garbage when there is time.
    uvloop.run(work(setup, script, sys.stdin.fileno(), sys.stdout.fileno()))
    return 0


async def work(setup: WorkerSetup, script: WorkerScript, commands_fd: int, reports_fd: int) -> None:
    """Run one load, controlled by the commands of `commands_fd`, and write the reports to `reports_fd`."""
    loop = asyncio.get_running_loop()
    sender = _make_sender(loop, setup)
    requests = Requests(
        _unpack_column(script.arrival_ns),
        after=_unpack_column(script.after),
        think_ns=_unpack_column(script.think_ns),
        joins=script.joins,
        tenants=script.tenants,
        labels=script.labels,
    )
    rows = _unpack_column(script.rows)
    load = setup.load
    schedule = Schedule(requests, rows, load.schedule.closed)
    slo = load.measuring.slo
    tally = LoadTally(Objectives.parse(slo) if slo else None, load.measuring.reader)
    tally.planned = len(rows)
    commands = _Commands(commands_fd)
    loop.add_reader(commands_fd, commands.read)
    store = _ExchangeStore(tally, requests, setup.spill_fd)
    deferred = sender.deferred
    run: LoadRun | None = None
    start_ns = await _open_connections(sender, setup.open, commands, reports_fd)
    if start_ns is not None:
        run = LoadRun(
            sender,
            schedule,
            _request_reader(setup, script, requests, sender),
            lambda row, x: deferred.add(partial(store.add, row, x)),
            load,
            start_ns=start_ns,
            check_endpoint=setup.check_endpoint,
        )
        commands.run = run
        report_task = loop.create_task(
            _report_progress(reports_fd, lambda: store.progress(sender, schedule, run), deferred)
        )
        try:
            await run.send_all()
        finally:
            report_task.cancel()
    loop.remove_reader(commands_fd)
    ended_ns = mono_ns()
    tally.dropped = schedule.dropped
    tally.summary.opened = sender.sent
    tally.retries.update(sender.retries)
    store.flush()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    stopped = commands.stop_reason if run is None else run.stopped
    done = WorkerDone(
        tally.to_bytes(),
        stopped,
        sender.connects,
        sender.reuses,
        int((usage.ru_utime + usage.ru_stime) * 1e9),
        usage.ru_maxrss * 1024,
        sender.lateness.meter.take_max(),
        ended_ns if start_ns is None else start_ns,
        ended_ns,
        store.spill_error,
    )
    if isinstance(sender, PromptSender):
        await sender.aclose()
    else:
        sender.close()
    _write_frame(reports_fd, frame(store.progress(sender, schedule, run)), wait=True)
    _write_frame(reports_fd, frame(done), wait=True)


def _make_sender(loop: asyncio.AbstractEventLoop, setup: WorkerSetup) -> LoadSender | PromptSender:
    load, url = setup.load, setup.load.target.url
    tls = client_context(load.target.ca, not load.target.insecure) if check_target(setup) else None
    if protocol_of(url) != "http":
        return make_prompt_sender(loop, setup, tls)
    target = parse_target(url, setup.endpoint, setup.headers)
    return LoadSender(loop, target, load.sending, load.bodies, name=setup.name, tls=tls)


async def _open_connections(
    sender: LoadSender | PromptSender, connections: int, commands: "_Commands", reports_fd: int
) -> int | None:
    """Open connections, report that this process is ready, and return the run's start; None if cancelled."""
    opening = asyncio.ensure_future(sender.open(connections))
    await asyncio.wait((opening, commands.start_ns), return_when=asyncio.FIRST_COMPLETED)
    if not opening.done():
        opening.cancel()  # This also cancels the attempts to connect.
        return None
    _write_frame(reports_fd, frame(WorkerReady(opening.result())), wait=True)
    return await commands.start_ns


async def _report_progress(reports_fd: int, progress: Callable[[], Progress], deferred: DeferredWork) -> None:
    """Report progress, and collect garbage when there is time.

    Python itself would collect when many answers end at the same time, and sending would stop for 20 ms with
    500 requests in flight.
    """
    reports = 0
    while True:
        await asyncio.sleep(REPORT_S)
        _write_frame(reports_fd, frame(progress()), wait=False)
        reports += 1
        if reports % COLLECT_EACH == 0:
            deferred.add(_collect_garbage)


def _collect_garbage() -> None:
    gc.collect()


class _Commands:
    """Reads the commands of the parent: `go`, `stop`, and `cut` (stop at once), like the end of the pipe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._unread_bytes = b""
        self.start_ns: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        """Start time of the run; None if the run was cancelled before its start."""
        self.run: LoadRun | None = None
        """Load that the commands control; None before `go`."""
        self.stop_reason: str | None = None
        """Reason of the first command to stop; None: none came."""

    def read(self) -> None:
        """Carry out the commands of the parent, one on each line."""
        data = os.read(self._fd, 4096)
        if not data:
            asyncio.get_running_loop().remove_reader(self._fd)
            self._run_command("cut", "the parent process has ended")
        *lines, self._unread_bytes = (self._unread_bytes + data).split(b"\n")
        for line in lines:
            word, _, rest = line.decode().partition(" ")
            if word != "go":
                self._run_command(word, rest)
            elif not self.start_ns.done():
                self.start_ns.set_result(int(rest))

    def _run_command(self, word: str, reason: str) -> None:
        self.stop_reason = self.stop_reason or reason
        if self.run is not None:
            self.run.stop(reason, drain_ns=CUT_DRAIN_NS if word == "cut" else None)
        elif not self.start_ns.done():
            self.start_ns.set_result(None)


class _ExchangeStore:
    """Counts exchanges and stores them in a file for the parent."""

    def __init__(self, tally: LoadTally, requests: Requests, spill_fd: int | None) -> None:
        self._tally = tally
        """Counts of all exchanges."""
        self._tenants, self._labels = requests.tenants, requests.labels
        """By row: tenant and label of its request; empty if the load has none."""
        self._fd = spill_fd
        self._buffer = bytearray()
        """Encoded exchanges that are not written yet."""
        self._failed_count = 0
        self._token_count = 0
        self._latest_times = {name: deque[int](maxlen=LATEST) for name in ("late", "ttft", "tbc")}
        """Latest latencies by name, for the percentiles of the progress."""
        self.spill_error: str | None = None

    def add(self, row: int, x: Exchange) -> None:
        if self._tenants:
            x.tenant = self._tenants[row]
        if self._labels:
            x.label = self._labels[row]
        m = self._tally.add(x)
        self._token_count += x.tokens.output or 0
        if x.dispatch_late_ns is not None:
            self._latest_times["late"].append(x.dispatch_late_ns)
        if m.ttft_ns is not None and x.stream:
            self._latest_times["ttft"].append(m.ttft_ns)
        if m.tbc_ns:
            self._latest_times["tbc"].extend(m.tbc_ns)
        if x.outcome not in ENDED_WELL:
            self._failed_count += 1
        if self._fd is not None:
            self._buffer += pickle.dumps((row, x), pickle.HIGHEST_PROTOCOL)
            if len(self._buffer) >= SPILL_BYTES:
                self.flush()

    def flush(self) -> None:
        try:
            while self._buffer and self._fd is not None:
                del self._buffer[: os.write(self._fd, self._buffer)]
        except OSError as exc:
            self._fd = None
            self.spill_error = exc.strerror
            self._buffer.clear()

    def progress(
        self, sender: LoadSender | PromptSender, schedule: Schedule, run: LoadRun | None
    ) -> Progress:
        tally = self._tally
        late, ttft, tbc = map(sorted, self._latest_times.values())
        return Progress(
            sender.sent,
            len(sender.calls),
            tally.summary.n,
            self._failed_count,
            schedule.rows_left,
            self._token_count,
            percentile(late, 0.99),
            percentile(ttft, 0.5),
            percentile(ttft, 0.99),
            percentile(tbc, 0.5),
            percentile(tbc, 0.99),
            sender.retries.total(),
            None if run is None else run.give_up_reason,
            sum(not call.has_token for call in sender.calls),
        )


def _request_reader(
    setup: WorkerSetup, script: WorkerScript, requests: Requests, sender: LoadSender | PromptSender
) -> Callable[[int], RowRequest]:
    """Return a function that reads the request of a row."""
    fd, begins, ends = setup.bodies_fd, _unpack_column(script.body_begins), _unpack_column(script.body_ends)
    headers, paths = _row_headers(setup, requests), _row_paths(sender, script.paths)

    def request(row: int) -> RowRequest:
        body = os.pread(fd, ends[row] - begins[row], begins[row])
        return RowRequest(body, headers(row), paths[row] if paths else b"")

    return request


def _row_paths(sender: LoadSender | PromptSender, paths: list[str]) -> list[bytes]:
    """Return the path of each row; empty: that of the target."""
    if isinstance(sender, PromptSender):
        return []
    origin = sender.target.origin
    known = {path: path_at(origin, path) if path else b"" for path in set(paths)}
    return [known[path] for path in paths]


def _row_headers(setup: WorkerSetup, requests: Requests) -> Callable[[int], list[tuple[bytes, bytes]]]:
    load = setup.load
    prefix = load.sending.request_ids.encode()
    columns: list[tuple[bytes, Sequence[str | None]]] = [
        (name.encode(), values)
        for name, values in (
            (load.target.tenant_header, requests.tenants),
            (load.target.label_header, requests.labels),
        )
        if name and values
    ]

    def headers(row: int) -> list[tuple[bytes, bytes]]:
        fields = [(b"X-Request-Id", b"%b-%d" % (prefix, row))]
        fields += [(name, value.encode()) for name, values in columns if (value := values[row])]
        return fields

    return headers


def _unpack_column(packed: bytes) -> "array[int]":
    column = array("q")
    column.frombytes(packed)
    return column


def _write_frame(fd: int, data: bytes, *, wait: bool) -> None:
    """Write a frame to a pipe. If the pipe is full: wait if `wait`, otherwise drop the frame."""
    os.set_blocking(fd, wait)
    try:
        while data:
            data = data[os.write(fd, data) :]
    except BlockingIOError:
        return
    except BrokenPipeError:
        return  # The parent has ended. This also ends stdin, which stops the run.


if __name__ == "__main__":
    sys.exit(main())
