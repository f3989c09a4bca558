"""A sending process from within: what it reads, what it says, and that nobody's silence holds it up."""

import asyncio
import fcntl
import os
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from llmtap.clock import SystemClock
from llmtap.load.tally import LoadTally
from llmtap.load.workers import worker
from llmtap.load.workers.worker import work
from llmtap.load.workers.worker_handle import (
    FrameDecoder,
    Progress,
    WorkerDone,
    WorkerReady,
    WorkerScript,
    WorkerSetup,
    frame,
)
from tests.support.servers.loading import bodies, streamed_answer
from tests.support.servers.peer import wait_until
from tests.support.servers.upstream import Call, says, upstream
from tests.support.waiting import block_until

ANSWER = says(*streamed_answer(2))
Messages = list[WorkerReady | Progress | WorkerDone]


class Pipes:
    """Both pipes of a sending process, from its parent's side."""

    def __init__(self) -> None:
        self.commands, self._say = os.pipe()
        self._hear, self.reports = os.pipe()
        self._frames = FrameDecoder()
        self.heard: Messages = []

    def say(self, line: str) -> None:
        os.write(self._say, line.encode() + b"\n")

    def hear(self) -> Messages:
        """All there is by now."""
        os.set_blocking(self._hear, False)
        while True:
            try:
                data = os.read(self._hear, 1 << 16)
            except BlockingIOError:
                break
            if not data:
                break
            self.heard += self._frames.feed(data)
        return self.heard

    def of(self, kind: type) -> Messages:
        return [message for message in self.hear() if isinstance(message, kind)]

    def done(self) -> WorkerDone:
        (done,) = self.of(WorkerDone)
        assert isinstance(done, WorkerDone)
        return done

    def fill(self) -> int:
        """Fill the pipe to us with messages; how many it took."""
        fcntl.fcntl(self.reports, fcntl.F_SETPIPE_SZ, 4096)
        os.set_blocking(self.reports, False)
        n, data = 0, frame(Progress(*[-1] * 6, *[None] * 5))
        try:
            while True:
                assert os.write(self.reports, data) == len(data)
                n += 1
        except BlockingIOError:
            return n

    def close(self) -> None:
        for fd in (self.commands, self._say, self._hear, self.reports):
            if fd >= 0:
                os.close(fd)


@contextmanager
def worker_for(url: str, arrivals_ns: list[int]) -> Iterator[tuple[WorkerSetup, WorkerScript, Pipes]]:
    """The setup and script of a lone process that sends at these times, and its pipes."""
    both, n = Pipes(), len(arrivals_ns)
    with bodies(url, n) as (setup, begins, ends):
        rows, times = array("q", range(n)).tobytes(), array("q", arrivals_ns).tobytes()
        script = WorkerScript(rows, times, b"", b"", [], begins.tobytes(), ends.tobytes())
        try:
            yield setup, script, both
        finally:
            both.close()


async def test_a_parent_that_does_not_read_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "REPORT_S", 0.002)
    n, go = 50, asyncio.Event()

    async def last_is_held(call: Call) -> str | None:
        if b"row-%d" % (n - 1) in await call.body():
            await go.wait()
        await call.say(*streamed_answer(2))
        return None

    async with upstream() as server:
        with worker_for(server.url + server.on(last_is_held), [4_000_000 * row for row in range(n)]) as (
            told,
            script,
            parent,
        ):
            parent.say(f"go {SystemClock.mono_ns()}")
            working = asyncio.ensure_future(work(told, script, parent.commands, parent.reports))
            await wait_until(lambda: parent.of(WorkerReady))
            filled = parent.fill()
            assert filled > 10
            await wait_until(lambda: len(server.calls) == n)
            await asyncio.sleep(0.02)  # and more of its own are lost meanwhile
            mine = [message for message in parent.of(Progress) if message.sent == -1]
            assert len(mine) == filled, "all are whole"
            reading = asyncio.get_running_loop().run_in_executor(None, _until_done, parent)
            go.set()
            await working
            await reading
            assert counted(parent.done()) == n


def _until_done(parent: Pipes) -> None:
    block_until(lambda: parent.of(WorkerDone))


def counted(done: WorkerDone) -> int:
    tally = LoadTally()
    tally.merge_bytes(done.tally)
    return tally.summary.n


@pytest.mark.parametrize("words", [["stop enough"], ["cut enough"], ["stop enough", "go 5"]])
async def test_called_off_before_the_start(words: list[str]) -> None:
    async with upstream() as server:
        with worker_for(server.url, [0, 0]) as (told, script, parent):
            for word in words:
                parent.say(word)
            await work(told, script, parent.commands, parent.reports)
            assert parent.done().stopped == "enough"
            assert not server.calls


async def test_a_disk_that_is_full_loses_records_and_no_counts() -> None:
    async with upstream() as server:
        with worker_for(server.url + server.on(ANSWER), [0] * 5) as (told, script, parent):
            parent.say(f"go {SystemClock.mono_ns()}")
            full = os.open("/dev/full", os.O_WRONLY)
            try:
                told = msgspec.structs.replace(told, spill_fd=full)
                await work(told, script, parent.commands, parent.reports)
            finally:
                os.close(full)
            done = parent.done()
            assert (done.spill_error, counted(done)) == ("No space left on device", 5)
