"""The parent's side of a run: as many sending processes as wanted, one schedule, one start.

Rows are dealt to the processes by conversation, in turn: a row's time depends on the plan alone, so that any
number of processes sends the same schedule. All open their connections first and start at one moment of the
clock that they share.
"""

import asyncio
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
from llmtap.errors import LlmtapError
from llmtap.load.messages import Done, Frames, Progress, Ready, Script, Setup
from llmtap.load.tally import Tally
from llmtap.metrics.objectives import Objectives
from llmtap.record.exchange import Exchange
from llmtap.units import encode_special
from llmtap.workload.requests import Requests

__all__ = ["Crew", "Outcome", "dealt"]

START_NS: Final = 100_000_000
"""From the word to the start: time for all to hear it."""
_READ_BYTES: Final = 1 << 18

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
    """Of each that did not: its exit status."""
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
        self._hands = [rows for rows in dealt(requests, processes) if rows]
        self._files = ExitStack()
        self._spills: list[BinaryIO] = []
        self._keep = keep
        self._procs: list[asyncio.subprocess.Process] = []
        self._cutting = False

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, *exc: object) -> None:
        self._files.close()

    async def run(self, progress: Callable[[Progress], None] | None = None) -> Outcome:
        """Start them, wait for all to be over. `progress` is told the sums of all."""
        setup, requests = self._setup, self._requests
        told: list[Progress | None] = [None] * len(self._hands)
        ready = [asyncio.get_running_loop().create_future() for _ in self._hands]
        tasks = []
        for i, rows in enumerate(self._hands):
            share = len(self._hands)
            own = msgspec.structs.replace(
                setup,
                sender=msgspec.structs.replace(setup.sender, name=f"{setup.sender.name}{i}"),
                slots=None if setup.slots is None else _share(setup.slots, i, share),
                open=_share(setup.open, i, share),
            )
            proc, spill = await self._spawn(own, requests, rows)
            self._procs.append(proc)
            if spill is not None:
                self._spills.append(spill)
            tasks.append(asyncio.ensure_future(self._listen(i, proc, ready[i], told, progress)))
        try:
            await asyncio.gather(*ready)
            began_ns = mono_ns() + START_NS
            self._say(f"go {began_ns}")
            reports = await asyncio.gather(*tasks)
        finally:
            for proc in self._procs:
                if proc.returncode is None:
                    proc.kill()
                await proc.wait()
        tally = Tally(Objectives.parse(setup.slo) if setup.slo else None)
        out = Outcome(tally, began_ns, began_ns)
        for proc, done in zip(self._procs, reports, strict=True):
            if done is None:
                out.lost.append(proc.returncode or 0)
                continue
            tally.merge_bytes(done.tally)
            out.done.append(done)
            out.ended_ns = max(out.ended_ns, done.ended_ns)
            out.stopped = out.stopped or done.stopped
        return out

    def stop(self) -> None:
        """Send no more, and let answers end; the second time, don't wait for them."""
        self._say("cut" if self._cutting else "stop")
        self._cutting = True

    def exchanges(self) -> Iterator[tuple[int, Exchange]]:
        """Row and exchange of all that ended, by process, in the order of their ends; after the run."""
        for spill in self._spills:
            spill.seek(0)
            while True:
                try:
                    yield pickle.load(spill)
                except EOFError:
                    break

    def _say(self, words: str) -> None:
        for proc in self._procs:
            if proc.stdin is not None and proc.returncode is None:
                proc.stdin.write(words.encode() + b"\n")

    async def _spawn(
        self, setup: Setup, requests: Requests, rows: Sequence[int]
    ) -> tuple[asyncio.subprocess.Process, BinaryIO | None]:
        script = Script(
            array("q", rows).tobytes(), requests.arrival_ns.tobytes(), requests.after.tobytes(),
            requests.think_ns.tobytes(), requests.tenants, *self._bodies,
        )  # fmt: skip
        spill: BinaryIO | None = None
        if self._keep:
            spill = self._files.enter_context(tempfile.TemporaryFile())
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
        assert proc.stdin is not None
        proc.stdin.write(msgspec.json.encode(own, enc_hook=encode_special) + b"\n")
        return proc, spill

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
        while data := await proc.stdout.read(_READ_BYTES):
            for message in frames.feed(data):
                match message:
                    case Ready():
                        ready.set_result(message.connections)
                    case Progress():
                        told[i] = message
                        if progress is not None:
                            progress(_sum([p for p in told if p is not None]))
                    case Done():
                        done = message
        await proc.wait()
        if not ready.done():
            ready.set_exception(
                LlmtapError(f"a sending process ended at once, with status {proc.returncode}")
            )
        return done


def _share(whole: int, i: int, shares: int) -> int:
    each, more = divmod(whole, shares)
    return each + (i < more)


def _sum(parts: Sequence[Progress]) -> Progress:
    """Counts are added; of percentiles, which can't be, the worst."""

    def worst(name: str) -> float | None:
        return max((v for p in parts if (v := getattr(p, name)) is not None), default=None)

    counts = (
        sum(getattr(p, n) for p in parts) for n in ("sent", "under_way", "ended", "failed", "left", "tokens")
    )
    return Progress(*counts, *(worst(n) for n in Progress.__struct_fields__[6:]))
