"""Start the sending processes of a run, assign rows to them, and merge their results.

`WorkerPool.run` returns a `LoadResult` with the merged counts; after the run `exchanges` yields the Exchange
of each row that ended. A process that dies is not restarted: its rows are counted as lost.
`replay/perform.py` and `load/warmup.py` use it. Conversations are assigned to the processes in turn. The time
of a row depends on the plan alone, so any number of processes sends the same schedule. Times of hosts with
another clock are converted to the clock of this process (`HostClock`).
"""

import asyncio
import pickle
import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import BinaryIO, Final

import msgspec

from llmtap.clock import Clock, SystemClock
from llmtap.errors import ConfigError, LlmtapError
from llmtap.exchange.exchange import Exchange
from llmtap.load.prompt_sender import check_target
from llmtap.load.stop_conditions import QueueGrowth
from llmtap.load.tally import LoadTally
from llmtap.load.workers.ray_worker import RayMember
from llmtap.load.workers.worker_handle import (
    FrameDecoder,
    HostClock,
    LocalMember,
    Progress,
    WorkerDone,
    WorkerReady,
    WorkerScript,
    WorkerSetup,
)
from llmtap.metrics.objectives import Objectives
from llmtap.net.tls import client_context
from llmtap.workload.requests import Requests

Member = LocalMember | RayMember
STOPPED: Final = "somebody stopped it"
_SUMMED_FIELDS: Final = ("sent", "under_way", "ended", "failed", "left", "tokens", "retries", "waiting")
_MAXIMUM_FIELDS: Final = tuple(name for name in Progress.__struct_fields__ if name.endswith("_ns"))


@dataclass(slots=True)
class LoadResult:
    """Merged counts of all sending processes, and the report of each."""

    tally: LoadTally
    """Counts of all processes together."""
    began_ns: int
    ended_ns: int
    reports: list[WorkerDone] = field(default_factory=list)
    clocks: list[HostClock] = field(default_factory=list)
    """Offset of each process's clock."""
    lost_statuses: list[int | None] = field(default_factory=list)
    """Exit status of each lost process (negative for a signal); None if the host was lost."""
    lost_rows: int = 0
    """Number of rows of lost processes. Of these, only rows with a stored exchange are known to be sent."""
    stopped: str | None = None
    """Reason why the load ended early; None if it did not."""
    stop_condition: str | None = None
    """The condition of `--stop-when` that was met."""


def assign_rows(requests: Requests, processes: int) -> list[list[int]]:
    """Return the rows of each process, by arrival. Whole conversations go to the processes in turn."""
    after = requests.after
    if not after:
        return [list(range(process, len(requests), processes)) for process in range(processes)]
    out: list[list[int]] = [[] for _ in range(processes)]
    process_of: list[int] = []
    conversations = 0
    for row, previous in enumerate(after):
        if previous < 0:
            process_of.append(conversations % processes)
            conversations += 1
        else:
            process_of.append(process_of[previous])
        out[process_of[row]].append(row)
    return out


class WorkerPool:
    """Sending processes and their files. Use as a context manager."""

    def __init__(
        self,
        setup: WorkerSetup,
        requests: Requests,
        bodies: "tuple[array[int], array[int]]",
        *,
        processes: int = 1,
        paths: Sequence[str] = (),
        keep: bool = False,
        create_member: Callable[[], Member] = LocalMember,
        clock: Clock | None = None,
    ) -> None:
        """`setup`: its slots and connections are divided among all processes. `bodies`: begin and end of each
        row's body in the file. `paths`: path of each row, "" for the path of the endpoint; empty if all rows
        have this path. `keep`: store the exchanges, not only the counts. `create_member`: function that
        creates a process. `clock`: clock of the times in results."""
        self._setup = setup
        self._requests = requests
        self._paths = list(paths)
        begins, ends = bodies
        self._bodies = (begins.tobytes(), ends.tobytes())
        """Begin and end of each row's body in the file of bodies, packed."""
        # Use at most one process per slot: a process without a slot would never send.
        processes_used = min(processes, setup.load.schedule.closed or processes)
        self._assigned_rows = [rows for rows in assign_rows(requests, processes_used) if rows]
        """Rows of each process."""
        self._members = [create_member() for _ in self._assigned_rows]
        """Sending processes on this host or on a cluster."""
        self._clock = SystemClock() if clock is None else clock
        self._files = ExitStack()
        """Closes all files at the end."""
        self._stores_exchanges = keep
        """Whether processes store exchanges for a capture or comparison."""
        self._spills: list[BinaryIO] = [
            self._files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 (`__exit__` closes it)
            for _ in (self._assigned_rows if keep else ())
        ]
        """Files with the finished exchanges, one of each process."""
        self._started_members: list[Member] = []
        self._commands: list[str] = []
        """Commands so far, which a process that starts later also gets."""
        self._stop_reason: str | None = None
        """Reason of the first `stop`; None if it was not called. A second call sets `_cut_event`."""
        self._cut_event = asyncio.Event()
        """Set when the processes must end at once."""
        self._met_condition: str | None = None
        """Condition because of which the pool itself called `stop`."""

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *exc: object) -> None:
        self._files.close()

    async def run(self, progress: Callable[[Progress], None] | None = None) -> LoadResult:
        """Start all processes and wait for their end. `progress`: function called with the sums of all.

        Raises ConfigError for an invalid target, header or certificate, LlmtapError if no process starts.
        """
        _check_setup(self._setup)
        sums: list[Progress | None] = [None] * len(self._assigned_rows)
        growth = QueueGrowth() if self._setup.load.sending.stop_when.saturated else None

        def on_progress(i: int, part: Progress) -> None:
            sums[i] = part
            if part.give_up_reason is not None and self._stop_reason is None:
                # The whole load ends if one process gives up, for example after too many errors.
                self._met_condition = part.give_up_reason
                self.stop(part.give_up_reason)
            total = _sum_progress([p for p in sums if p is not None])
            # Judge the sums only after all processes have reported: each first report makes the sums jump.
            if growth is not None and self._stop_reason is None and None not in sums:
                self._met_condition = growth.add(self._clock.mono_ns(), total.sent, total.waiting)
                if self._met_condition is not None:
                    self.stop(self._met_condition)
            if progress is not None:
                progress(total)

        loop = asyncio.get_running_loop()
        ready: list[asyncio.Future[None]] = [loop.create_future() for _ in self._assigned_rows]
        serve_tasks = [
            loop.create_task(self._serve_process(i, r, partial(on_progress, i))) for i, r in enumerate(ready)
        ]
        try:
            await asyncio.gather(*ready)
            began_ns = self._clock.mono_ns() + max((m.lead_ns for m in self._members), default=0)
            for member in self._started_members:
                member.send_command(f"go {member.clock.to_host_ns(began_ns)}")
            reports = await asyncio.gather(*serve_tasks)
        finally:
            for task in serve_tasks:
                task.cancel()
            await asyncio.gather(*serve_tasks, return_exceptions=True)
            await asyncio.gather(*(member.kill() for member in self._members))
            for future in ready:
                future.cancel()
        return self._result_of(began_ns, reports)

    @property
    def pids(self) -> list[int]:
        return [member.pid for member in self._members if member.pid is not None]

    def stop(self, reason: str = STOPPED) -> None:
        """Send no more requests and wait for the answers in flight. A second call ends the run at once."""
        command = f"{'stop' if self._stop_reason is None else 'cut'} {reason}"
        if self._stop_reason is not None:
            self._cut_event.set()
        self._stop_reason = self._stop_reason or reason
        self._commands.append(command)
        for member in self._started_members:
            member.send_command(command)

    def exchanges(self) -> Iterator[tuple[int, Exchange]]:
        """After the run, yield row and exchange of each request that ended, process by process.

        Exchanges that a lost process had not stored are missing.
        """
        for member, spill in zip(self._members, self._spills, strict=self._stores_exchanges):
            spill.seek(0)
            while True:
                try:
                    row, x = pickle.load(spill)
                except (EOFError, pickle.UnpicklingError):
                    break  # This is the end of the file, or a record that the lost process did not finish.
                yield row, member.clock.convert(x)

    def _setup_of(self, i: int) -> WorkerSetup:
        setup, n = self._setup, len(self._assigned_rows)
        schedule = setup.load.schedule
        closed = None if schedule.closed is None else _share_of(schedule.closed, i, n)
        schedule = msgspec.structs.replace(schedule, closed=closed)
        load = msgspec.structs.replace(setup.load, schedule=schedule)
        return msgspec.structs.replace(
            setup, load=load, name=f"{setup.name}{i}", open=_share_of(setup.open, i, n)
        )

    async def _serve_process(
        self, i: int, ready: "asyncio.Future[None]", on_progress: Callable[[Progress], None]
    ) -> "WorkerDone | LostWorker | None":
        """Start a worker process and read its frames until it ends. None: it was not started."""
        member = self._members[i]
        try:
            if not await self._start_process(i, member):
                ready.set_result(None)
                return None
            done: WorkerDone | None = None
            opened = 0
            frames = FrameDecoder()
            while data := await member.read():
                for message in frames.feed(data):
                    match message:
                        case WorkerReady():
                            opened = message.connections
                            ready.set_result(None)
                        case Progress():
                            on_progress(message)
                        case WorkerDone():
                            done = msgspec.structs.replace(message, opened_before=opened)
            status = await member.wait_end()
        except Exception as exc:
            if ready.done():
                raise
            ready.set_exception(exc)
            return None
        if not ready.done():
            if done is not None:
                ready.set_result(None)  # The run was cancelled before this process was ready.
            else:
                how = "because its machine was lost" if status is None else f"with status {status}"
                ready.set_exception(
                    LlmtapError(f"a sending process ended right after its start, {how}; see stderr")
                )
        return LostWorker(status) if done is None else done

    async def _start_process(self, i: int, member: Member) -> bool:
        """Start a worker and send it its rows. Return whether it started."""
        requests, rows = self._requests, self._assigned_rows[i]
        script = WorkerScript(
            array("q", rows).tobytes(),
            requests.arrival_ns.tobytes(),
            requests.after.tobytes(),
            requests.think_ns.tobytes(),
            requests.tenants,
            *self._bodies,
            requests.joins,
            self._paths,
            requests.labels,
        )
        spill = self._spills[i] if self._stores_exchanges else None
        starting = asyncio.ensure_future(member.start(self._setup_of(i), script, spill))
        cutting = asyncio.ensure_future(self._cut_event.wait())
        try:
            await asyncio.wait((starting, cutting), return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                return False
            starting.result()
        finally:
            for task in (starting, cutting):
                task.cancel()
            await asyncio.gather(starting, cutting, return_exceptions=True)
        for command in self._commands:
            member.send_command(command)
        self._started_members.append(member)
        return True

    def _result_of(self, began_ns: int, reports: "Sequence[WorkerDone | LostWorker | None]") -> LoadResult:
        """Join the results of the workers."""
        setup = self._setup
        measuring = setup.load.measuring
        objectives = Objectives.parse(measuring.slo) if measuring.slo else None
        tally = LoadTally(objectives, measuring.reader)
        out = LoadResult(
            tally, began_ns, began_ns, stopped=self._met_condition, stop_condition=self._met_condition
        )
        for member, rows, report in zip(self._members, self._assigned_rows, reports, strict=True):
            match report:
                case None:
                    tally.planned += len(rows)
                    out.stopped = out.stopped or self._stop_reason
                case LostWorker():
                    out.lost_statuses.append(report.status)
                    out.lost_rows += len(rows)
                    tally.planned += len(rows)
                case WorkerDone():
                    clock = member.clock
                    done = msgspec.structs.replace(
                        report,
                        began_ns=clock.to_local_ns(report.began_ns),
                        ended_ns=clock.to_local_ns(report.ended_ns),
                        spill_error=report.spill_error or member.spill_error,
                    )
                    tally.merge_bytes(done.tally, clock.to_local_ns)
                    out.reports.append(done)
                    out.clocks.append(clock)
                    out.ended_ns = max(out.ended_ns, done.ended_ns)
                    out.stopped = out.stopped or done.stopped
        return out


@dataclass(frozen=True, slots=True)
class LostWorker:
    """Stands for a sending process that ended without its last report."""

    status: int | None
    """Exit status of the lost process (negative for a signal); None if the host was lost."""


def _check_setup(setup: WorkerSetup) -> None:
    """Raise here the ConfigErrors that every sending process would raise, before any process starts."""
    if check_target(setup):
        try:
            client_context(setup.load.target.ca, not setup.load.target.insecure)
        except ConfigError as exc:
            raise ConfigError("--ca", exc.problem, exc.hint) from None
    if setup.load.measuring.slo:
        Objectives.parse(setup.load.measuring.slo)


def _share_of(whole: int, i: int, shares: int) -> int:
    """Return the part of `whole` for share `i`; the first shares take the rest of the division."""
    each, more = divmod(whole, shares)
    return each + (i < more)


def _sum_progress(parts: Sequence[Progress]) -> Progress:
    """Return the progress of all processes: the sum of each count, and the largest of each percentile."""
    total = msgspec.structs.replace(parts[0])
    for part in parts[1:]:
        for name in _SUMMED_FIELDS:
            setattr(total, name, getattr(total, name) + getattr(part, name))
        for name in _MAXIMUM_FIELDS:
            values = [v for v in (getattr(total, name), getattr(part, name)) if v is not None]
            setattr(total, name, max(values, default=None))
        total.give_up_reason = total.give_up_reason or part.give_up_reason
    return total
