"""A sending process from within: what it reads, what it says, and that nobody's silence holds it up."""

import asyncio
import fcntl
import os
import tempfile
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
    Done,
    Frames,
    Progress,
    WorkerReady,
    WorkerScript,
    WorkerSetup,
    frame,
)
from tests.support.servers.loading import bodies, streamed_answer
from tests.support.servers.peer import scene, wait_until
from tests.support.servers.upstream import Call, says, upstream

ANSWER = says(*streamed_answer(2))
Messages = list[WorkerReady | Progress | Done]


@contextmanager
def told_what(
    setup: WorkerSetup, begins: "array[int]", ends: "array[int]", arrivals_ns: list[int]
) -> Iterator[WorkerSetup]:
    """The setup with the script of a lone process."""
    n = len(arrivals_ns)
    script = WorkerScript(
        array("q", range(n)).tobytes(),
        array("q", arrivals_ns).tobytes(),
        b"",
        b"",
        [],
        begins.tobytes(),
        ends.tobytes(),
    )
    with tempfile.TemporaryFile() as file:
        file.write(msgspec.msgpack.encode(script))
        file.flush()
        yield msgspec.structs.replace(setup, script_fd=file.fileno())


class Pipes:
    """Both pipes of a sending process, from its parent's side."""

    def __init__(self) -> None:
        self.commands, self._say = os.pipe()
        self._hear, self.reports = os.pipe()
        self._frames = Frames()
        self.heard: Messages = []

    def say(self, line: str) -> None:
        os.write(self._say, line.encode() + b"\n")

    def end(self) -> None:
        os.close(self._say)
        self._say = -1

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

    def of(self, kind: type) -> list[WorkerReady | Progress | Done]:
        return [message for message in self.hear() if isinstance(message, kind)]

    def done(self) -> Done:
        (done,) = self.of(Done)
        assert isinstance(done, Done)
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
def worker_for(url: str, arrivals_ns: list[int], *, open: int = 0) -> Iterator[tuple[WorkerSetup, Pipes]]:
    """The setup of a lone process that sends at these times, and its pipes."""
    both = Pipes()
    with bodies(url, len(arrivals_ns), open=open) as (setup, begins, ends):
        try:
            with told_what(setup, begins, ends, arrivals_ns) as told:
                yield told, both
        finally:
            both.close()


@scene
async def test_a_parent_that_does_not_read_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "TELL_S", 0.002)
    n, go = 50, asyncio.Event()

    async def last_is_held(call: Call) -> str | None:
        if b"row-%d" % (n - 1) in await call.body():
            await go.wait()
        await call.say(*streamed_answer(2))
        return None

    async with upstream() as server:
        with worker_for(server.url + server.on(last_is_held), [4_000_000 * row for row in range(n)]) as (
            told,
            parent,
        ):
            parent.say(f"go {SystemClock.mono_ns()}")
            working = asyncio.ensure_future(work(told, parent.commands, parent.reports))
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
            tally = LoadTally()
            tally.merge_bytes((await reading).tally)
            assert tally.summary.n == n


def _until_done(parent: Pipes) -> Done:
    while True:
        for message in parent.of(Done):
            assert isinstance(message, Done)
            return message


@pytest.mark.parametrize("words", [["stop enough"], ["cut enough"], ["stop enough", "go 5"]])
def test_called_off_before_the_start(words: list[str]) -> None:
    @scene
    async def play() -> None:
        async with upstream() as server:
            with worker_for(server.url, [0, 0]) as (told, parent):
                said = "".join(f"{word}\n" for word in words[:1]).encode()
                for word in words[1:]:
                    parent.say(word)
                await work(told, parent.commands, parent.reports, said)
                done = parent.done()
                assert done.stopped == "enough"
                assert not server.calls

    play()


@scene
async def test_the_end_of_its_parent_is_a_cut() -> None:
    async with upstream() as server:

        async def held(call: Call) -> None:
            await call.body()
            await call.left()

        with worker_for(server.url + server.on(held), [0, 3_600_000_000_000]) as (told, parent):
            parent.say(f"go {SystemClock.mono_ns()}")
            working = asyncio.ensure_future(work(told, parent.commands, parent.reports))
            await wait_until(lambda: server.calls)
            parent.end()
            await working
            done = parent.done()
            assert done.stopped == "its parent is gone"


@scene
async def test_a_disk_that_is_full_loses_records_and_no_counts() -> None:
    async with upstream() as server:
        with worker_for(server.url + server.on(ANSWER), [0] * 5) as (told, parent):
            parent.say(f"go {SystemClock.mono_ns()}")
            full = os.open("/dev/full", os.O_WRONLY)
            try:
                await work(msgspec.structs.replace(told, spill_fd=full), parent.commands, parent.reports)
            finally:
                os.close(full)
            done = parent.done()
            assert done.spill_error == "No space left on device"
            tally = LoadTally()
            tally.merge_bytes(done.tally)
            assert tally.summary.n == 5
