"""The keeper of the meter, without processes: what a meter goes by while settings change under it."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import pytest

from llmtap.config import Settings, load_settings
from llmtap.meter.setup import CAPTURE_END_LINE, HANDOVER_LINE, SETTINGS_LINE, Changeable, MeterSetup
from llmtap.supervisor import child
from llmtap.supervisor.child import Child, Kind
from llmtap.supervisor.ports import Ports
from llmtap.supervisor.run import ProxyRun
from llmtap.supervisor.supervisor import Supervisor, _Plan
from tests.support.servers.peer import play, wait_until


def settings_of(**more: str) -> Settings:
    named = {name.replace("__", "."): value for name, value in more.items()}
    fixed = {
        "relay.upstream": "http://gateway:80",
        "relay.listen": "127.0.0.1:0",
        "meter.admin": "127.0.0.1:0",
    }
    return load_settings(None, {}, fixed | named)


class FakeProcess:
    """Runs until a signal ends it, with that as its status."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        return await asyncio.shield(self.status)

    def send_signal(self, signal: int) -> None:
        if not self.status.done():
            self.status.set_result(-signal)


class Meters:
    """Takes the place of `Child.start`: once `may_start` is set, meters are ready, or `is_silent`."""

    def __init__(self) -> None:
        self.begun = 0
        self.may_start = asyncio.Event()
        self.is_silent = False
        self.setups: list[MeterSetup] = []
        self.processes: list[FakeProcess] = []
        self.stdin: list[int] = []
        """The end that a meter would read."""

    @property
    def of_meters(self) -> list[MeterSetup]:
        return [setup for setup in self.setups if isinstance(setup, MeterSetup)]

    async def start(self, kind: Kind, name: str, index: int, setup: MeterSetup, fds: Sequence[int]) -> Child:
        self.begun += 1
        await self.may_start.wait()
        self.setups.append(setup)
        process = FakeProcess(self.begun)
        self.processes.append(process)
        reading, writing = os.pipe()
        self.stdin.append(reading)
        meter = Child(kind, name, index, process, writing)
        meter._stdout = asyncio.StreamReader()
        if not self.is_silent:
            meter._stdout.feed_data(b"ready\n")
        return meter

    def close(self) -> None:
        for process in self.processes:
            process.send_signal(9)
        for fd in self.stdin:
            os.close(fd)


class Kept:
    """A supervisor of nothing but a meter."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.meters = Meters()
        monkeypatch.setattr(Child, "start", self.meters.start)
        settings = settings_of()
        self.supervisor = Supervisor(settings, settings_of, lambda clients, admin: None)
        self.supervisor._ports = Ports.open(settings, {}, os.getpid())
        self.supervisor._run = ProxyRun.begin(settings)
        self.supervisor._meter_keeper = asyncio.create_task(self.supervisor._keep_meter(None))

    @property
    def state(self) -> str:
        return self.supervisor._run.state_folder(self.supervisor._settings)

    async def replace(self, **more: str) -> bool:
        """Replace the meter and the relays, as a reload with these settings does."""
        settings = settings_of(**more)
        plan = _Plan(settings, self.supervisor._ports, self.supervisor._run)
        fresh = await self.supervisor._start_generation(plan, meter=True)
        if fresh is not None:
            self.supervisor._apply_plan(plan)
            self.supervisor._retire_generation(fresh)
        return fresh is not None

    def enforce(self, **more: str) -> None:
        self.supervisor._settings = settings_of(**more)
        self.supervisor._run.follow(self.supervisor._settings)

    async def close(self) -> None:
        self.supervisor._generation += 1  # relays that end now are not started again
        assert self.supervisor._meter_keeper is not None
        self.supervisor._meter_keeper.cancel()
        self.meters.close()
        await asyncio.gather(self.supervisor._meter_keeper, *self.supervisor._tasks, return_exceptions=True)
        self.supervisor._ports.close()
        os.rmdir(self.supervisor._run.folder)


def kept_meter(monkeypatch: pytest.MonkeyPatch, scene: Callable[[Kept], Awaitable[None]]) -> None:
    async def scenario() -> None:
        kept = Kept(monkeypatch)
        try:
            await scene(kept)
        finally:
            await kept.close()

    play(scenario())


def test_a_meter_that_waits_for_its_turn_is_told_what_is_in_force_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene(kept: Kept) -> None:
        kept.meters.may_start.set()
        async with kept.supervisor._start_lock:  # a reload starts its relays
            await asyncio.sleep(0)
            kept.enforce(cost__gpus="2")
        await wait_until(lambda: len(kept.meters.setups) == 1)
        assert kept.meters.setups[0].cost.gpus == 2

    kept_meter(monkeypatch, scene)


def test_a_meter_whose_capture_the_next_one_does_not_continue_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene(kept: Kept) -> None:
        kept.meters.may_start.set()
        await wait_until(lambda: kept.supervisor._meter is not None)
        lines = HANDOVER_LINE + kept.state.encode() + b"\n"
        assert await kept.replace(cost__gpus="2")
        assert os.read(kept.meters.stdin[0], 4_096) == lines, "it is the same capture"
        kept.supervisor._run.follow(settings_of(capture__level="none"))
        assert await kept.replace(cost__gpus="2", capture__level="none")
        assert os.read(kept.meters.stdin[1], 4_096) == CAPTURE_END_LINE + b"\n" + lines

    kept_meter(monkeypatch, scene)


def test_a_meter_that_was_being_started_is_replaced_and_its_end_is_no_crash(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(kept: Kept) -> None:
        await wait_until(lambda: kept.meters.begun == 1)
        replacing = asyncio.create_task(kept.replace(cost__gpus="2"))
        kept.meters.may_start.set()
        assert await replacing
        assert [setup.cost.gpus for setup in kept.meters.of_meters] == [0, 2]
        assert os.read(kept.meters.stdin[0], 4_096) == HANDOVER_LINE + kept.state.encode() + b"\n"
        kept.meters.processes[0].send_signal(15)
        await wait_until(lambda: not kept.supervisor._end_tasks)
        assert len(kept.meters.of_meters) == 2

    with caplog.at_level("INFO"):
        kept_meter(monkeypatch, scene)
    assert "event=meter_died" not in caplog.text


def test_a_meter_whose_successor_does_not_come_up_is_kept_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(kept: Kept) -> None:
        kept.meters.may_start.set()
        await wait_until(lambda: kept.supervisor._meter is not None and kept.supervisor._meter.is_ready)
        kept.meters.is_silent = True
        assert not await kept.replace(cost__gpus="2")
        kept.meters.is_silent = False
        kept.meters.processes[0].send_signal(9)
        await wait_until(lambda: len(kept.meters.of_meters) == 3)
        assert [setup.cost.gpus for setup in kept.meters.of_meters] == [0, 2, 0]

    monkeypatch.setattr(child, "READY_S", 0.1)
    with caplog.at_level("INFO"):
        kept_meter(monkeypatch, scene)
    assert "event=meter_died" in caplog.text


def test_what_a_running_meter_can_be_told_is_told_once_and_also_while_it_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene(kept: Kept) -> None:
        await wait_until(lambda: kept.meters.begun == 1)
        kept.enforce(relay__drain_timeout="300s")
        kept.meters.may_start.set()
        await wait_until(lambda: kept.supervisor._meter is not None)
        kept.supervisor._update_meter()
        (stdin,) = kept.meters.stdin
        (line,) = os.read(stdin, 4_096).splitlines()
        word = msgspec.json.decode(line.removeprefix(SETTINGS_LINE), type=Changeable)
        assert word.drain_s == 300.0
        assert word.config != kept.meters.setups[0].changeable.config

    kept_meter(monkeypatch, scene)


def test_a_meter_that_crashes_after_a_reload_while_it_was_away_has_crashed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(child, "BACKOFF_S", (0.0, 0.05))

    async def scene(kept: Kept) -> None:
        kept.meters.may_start.set()
        for n in (1, 2):
            await wait_until(
                lambda n=n: len(kept.meters.processes) == n and kept.supervisor._meter is not None
            )
            kept.meters.processes[-1].send_signal(9)
            await wait_until(lambda n=n: caplog.text.count("event=meter_died") == n)
            if n == 1:  # it is still away
                kept.enforce(cost__gpus="2")
                kept.supervisor._update_meter()
        await wait_until(lambda: len(kept.meters.setups) == 3)
        assert [setup.cost.gpus for setup in kept.meters.setups] == [0, 2, 2]

    kept_meter(monkeypatch, scene)
