"""The parent's side of a run: as many sending processes as wanted, one schedule, one start.

Rows are dealt to the processes by conversation, in turn: a row's time depends on the plan alone, so that any
number of processes sends the same schedule. All open their connections first and start at one moment of the
clock that they share.
"""

import asyncio
import contextlib
import pickle
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import BinaryIO, Final

import msgspec

from llmtap.clock import SystemClock
from llmtap.errors import ConfigError, LlmtapError
from llmtap.load.messages import Done, Frames, Progress, Ready, Script, Setup
from llmtap.load.tally import Tally
from llmtap.load.target import parse_target
from llmtap.metrics.objectives import Objectives
from llmtap.net.tls import client_context
from llmtap.record.exchange import Exchange
from llmtap.units import encode_special
from llmtap.workload.requests import Requests

__all__ = ["Crew", "Outcome", "dealt"]

START_NS: Final = 100_000_000
"""From the word to the start: time for all to hear it."""
STOPPED: Final = "somebody stopped it"
_READ_BYTES: Final = 1 << 18
_COUNTS: Final = ("sent", "under_way", "ended", "failed", "left", "tokens", "skipped", "retries")
_WORST: Final = tuple(name for name in Progress.__struct_fields__ if name.endswith("_ns"))

mono_ns = SystemClock.mono_ns


@dataclass(slots=True)
class Outcome:
    """What came of a run."""

    tally: Tally
    began_ns: int
    ended_ns: int
    done: list[Done] = field(default_factory=list)
    """Of each process that reported."""
    lost: list[int] = field(default_factory=list)
    """Of each that did not: its exit status (a signal's number below 0)."""
    lost_rows: int = 0
    """Rows those had: which of them were sent is not known, but for the exchanges they had put aside."""
    stopped: str | None = None
    """Why it ended early."""


def dealt(requests: Requests, hands: int) -> list[list[int]]:
    """The rows of each process: conversations in turn, whole, in the order of their arrivals."""
    after = requests.after
    if not after:
        return [list(range(hand, len(requests), hands)) for hand in range(hands)]
    out: list[list[int]] = [[] for _ in range(hands)]
    hand_of: list[int] = []
    begun = 0
    for row, before in enumerate(after):
        if before < 0:
            hand_of.append(begun % hands)
            begun += 1
        else:
            hand_of.append(hand_of[before])
        out[hand_of[row]].append(row)
    return out


class Crew:
    """Sending processes, and the files they share with us. Use as a context manager."""

    def __init__(
        self,
        setup: Setup,
        requests: Requests,
        body_begins: "array[int]",
        body_ends: "array[int]",
        *,
        processes: int = 1,
        keep: bool = False,
    ) -> None:
        """`setup` names the file of bodies; slots and connections in it are those of all processes together.

        `keep`: exchanges are wanted, not only their counts.
        """
        self._setup = setup
        self._requests = requests
        self._bodies = (body_begins.tobytes(), body_ends.tobytes())
        # A process without a slot would never send.
        hands = min(processes, setup.slots or processes, setup.limit_in_flight or processes)
        self._hands = [rows for rows in dealt(requests, hands) if rows]
        self._files = ExitStack()
        self._spills: list[BinaryIO] = []
        self._keep = keep
        self._procs: list[asyncio.subprocess.Process] = []
        self._said: list[str] = []
        self._stopping = False
        self._why: str | None = None
        """Why one of them stopped by itself, and with it all."""

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, *exc: object) -> None:
        self._files.close()

    async def run(self, progress: Callable[[Progress], None] | None = None) -> Outcome:
        """Start them, wait for all to be over. `progress` is told the sums of all.

        Raises ConfigError for a target, a header or a certificate that cannot be used, LlmtapError when a
        process ended before it was ready.
        """
        _check(self._setup)
        told: list[Progress | None] = [None] * len(self._hands)
        ready: list[asyncio.Future[int]] = [
            asyncio.get_running_loop().create_future() for _ in self._hands
        ]  # fmt: skip
        listening: list[asyncio.Task[Done | None]] = []
        try:
            for i, rows in enumerate(self._hands):
                proc = await self._spawn(self._setup_of(i), self._requests, rows)
                listener = self._listen(i, proc, ready[i], told, progress)
                listening.append(asyncio.ensure_future(listener))
            await asyncio.gather(*ready)
            began_ns = mono_ns() + START_NS
            self._say(f"go {began_ns}")
            reports = await asyncio.gather(*listening)
        finally:
            for proc in self._procs:
                if proc.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        proc.kill()
                await proc.wait()
            await asyncio.gather(*listening, return_exceptions=True)
            for future in ready:
                future.cancel()
        return self._outcome(began_ns, reports)

    @property
    def pids(self) -> list[int]:
        """Of the sending processes, once they were started."""
        return [proc.pid for proc in self._procs]

    def stop(self, why: str = STOPPED) -> None:
        """Send no more, and let answers end; the second time, don't wait for them."""
        self._say(f"{'cut' if self._stopping else 'stop'} {why}")
        self._stopping = True

    def _setup_of(self, i: int) -> Setup:
        """The share of process `i`."""
        setup, hands = self._setup, len(self._hands)
        return msgspec.structs.replace(
            setup,
            sender=msgspec.structs.replace(setup.sender, name=f"{setup.sender.name}{i}"),
            slots=None if setup.slots is None else _share(setup.slots, i, hands),
            limit_in_flight=None
            if setup.limit_in_flight is None
            else _share(setup.limit_in_flight, i, hands),
            open=_share(setup.open, i, hands),
        )

    def _outcome(self, began_ns: int, reports: Sequence[Done | None]) -> Outcome:
        setup = self._setup
        tally = Tally(Objectives.parse(setup.slo) if setup.slo else None)
        out = Outcome(tally, began_ns, began_ns, stopped=self._why)
        for proc, rows, done in zip(self._procs, self._hands, reports, strict=True):
            if done is None:
                out.lost.append(proc.returncode or 0)
                out.lost_rows += len(rows)
                tally.planned += len(rows)
                continue
            tally.merge_bytes(done.tally)
            out.done.append(done)
            out.ended_ns = max(out.ended_ns, done.ended_ns)
            out.stopped = out.stopped or done.stopped
        return out

    def exchanges(self) -> Iterator[tuple[int, Exchange]]:
        """Row and exchange of all that ended, by process, in the order of their ends; after the run.

        Of a process that was lost, those that it had put aside.
        """
        for spill in self._spills:
            spill.seek(0)
            while True:
                try:
                    yield pickle.load(spill)
                except (EOFError, pickle.UnpicklingError):
                    break  # the end, or what was being written when the process was lost

    def _say(self, words: str) -> None:
        self._said.append(words)
        for proc in self._procs:
            _tell(proc, words)

    async def _spawn(
        self, setup: Setup, requests: Requests, rows: Sequence[int]
    ) -> asyncio.subprocess.Process:
        script = Script(
            array("q", rows).tobytes(), requests.arrival_ns.tobytes(), requests.after.tobytes(),
            requests.think_ns.tobytes(), requests.tenants, *self._bodies,
        )  # fmt: skip
        spill: BinaryIO | None = None
        if self._keep:
            spill = self._files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 (`__exit__` closes it)
            self._spills.append(spill)
        with tempfile.TemporaryFile() as file:
            file.write(msgspec.msgpack.encode(script))
            file.flush()
            own = msgspec.structs.replace(
                setup, script_fd=file.fileno(), spill_fd=None if spill is None else spill.fileno()
            )
            fds = [file.fileno(), setup.bodies_fd, *([] if spill is None else [spill.fileno()])]
            proc = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "llmtap.load", stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE, pass_fds=fds,
            )  # fmt: skip
        self._procs.append(proc)
        _tell(proc, msgspec.json.encode(own, enc_hook=encode_special).decode())
        for words in self._said:
            _tell(proc, words)
        return proc

    async def _listen(
        self,
        i: int,
        proc: asyncio.subprocess.Process,
        ready: "asyncio.Future[int]",
        told: list[Progress | None],
        progress: Callable[[Progress], None] | None,
    ) -> Done | None:
        frames = Frames()
        done: Done | None = None
        assert proc.stdout is not None
        try:
            while data := await proc.stdout.read(_READ_BYTES):
                for message in frames.feed(data):
                    match message:
                        case Ready():
                            ready.set_result(message.connections)
                        case Progress():
                            told[i] = message
                            self._heed(message)
                            if progress is not None:
                                progress(_sum([p for p in told if p is not None]))
                        case Done():
                            done = message
            await proc.wait()
        finally:
            if not ready.done():
                if done is not None:
                    ready.set_result(0)  # it was called off before
                else:
                    ready.set_exception(
                        LlmtapError(f"a sending process ended at once, with status {proc.returncode}")
                    )
        return done

    def _heed(self, message: Progress) -> None:
        """Where one gives up, all do."""
        if message.gave_up is not None and not self._stopping:
            self._why = message.gave_up
            self.stop(message.gave_up)


def _check(setup: Setup) -> None:
    """Raises the ConfigErrors that every sending process would raise."""
    headers = [(name.encode(), value.encode()) for name, value in setup.headers]
    target = parse_target(setup.url, setup.endpoint, headers)
    if target.origin.tls:
        try:
            client_context(setup.ca, setup.verify)
        except ConfigError as exc:
            raise ConfigError("--ca", exc.problem, exc.hint) from None
    if setup.slo:
        Objectives.parse(setup.slo)
    limit = setup.limit_in_flight
    if limit is not None and (limit < 1 or setup.slots is not None):
        raise ConfigError("--limit-in-flight", "it is at least 1, and only an open loop has one")


def _tell(proc: asyncio.subprocess.Process, words: str) -> None:
    if proc.stdin is not None and not proc.stdin.is_closing():
        proc.stdin.write(words.encode() + b"\n")


def _share(whole: int, i: int, shares: int) -> int:
    each, more = divmod(whole, shares)
    return each + (i < more)


def _sum(parts: Sequence[Progress]) -> Progress:
    """Counts are added; of percentiles, which can't be, the worst."""
    total = msgspec.structs.replace(parts[0])
    for part in parts[1:]:
        for name in _COUNTS:
            setattr(total, name, getattr(total, name) + getattr(part, name))
        for name in _WORST:
            values = [v for v in (getattr(total, name), getattr(part, name)) if v is not None]
            setattr(total, name, max(values, default=None))
        total.gave_up = total.gave_up or part.gave_up
    return total
