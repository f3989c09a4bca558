"""The state that outlives a meter: what the next one knows and leaves out, and files that are no use."""

import asyncio
import json
import logging
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llmtap.channel.experiment import Experiment
from llmtap.channel.frames import Hello
from llmtap.clock import ManualClock
from llmtap.export.sinks import SeriesKey
from llmtap.meter import experiments, slo, state_file
from llmtap.meter import state as module
from llmtap.meter.admin.views import summary_of
from llmtap.meter.options import MeterOptions
from llmtap.meter.pipeline import history, silences, windows
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from llmtap.meter.relays import RelayAccount
from llmtap.meter.state import MeterState
from llmtap.meter.state_file import FILE, FILE_BYTES_MAX, FORMAT, SavedState, read_state, write_state
from llmtap.metrics import experiment as metrics_experiment
from llmtap.metrics import step_change, summary
from llmtap.metrics.experiment import SavedFigure, SavedSample
from llmtap.metrics.silences import EDGES_NS, SilenceKind
from llmtap.metrics.slo import SloOptions
from llmtap.metrics.step_change import SavedDetector, StepChange
from tests.support.traffic.experiments import an_experiment
from tests.support.traffic.relay_status import relay_status
from tests.support.traffic.steps import rise
from tests.support.traffic.streams import streamed
from tests.support.waiting import PATIENCE_S, wait_until

S = 1_000_000_000
MINUTE = 60 * S
SLOS = {"gold": SloOptions(objectives="ttft:500ms", target=0.9, tenants=("a", "b"))}
GOOD, BAD = 100, 900


@pytest.fixture(autouse=True)
def patient_meters(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, a disk may take longer than a meter waits for it."""
    monkeypatch.setattr(module, "DISK_S", PATIENCE_S)


class Meter:
    """A meter without process: its pipeline, and its state in a folder."""

    def __init__(
        self,
        folder: Path,
        clock: ManualClock,
        *,
        slos: dict[str, SloOptions] = SLOS,
        experiment: Experiment | None = None,
    ) -> None:
        self.pipeline = ExchangePipeline(MeterOptions(), clock, experiment, slos=slos)
        self.state = MeterState(str(folder), self.pipeline)

    def measure(self, n: int, ttft_ms: int = GOOD, tenant: str = "a", **about: Any) -> None:
        for _ in range(n):
            x = streamed(ttft_ms, ttft_ms + 40, tenant=tenant)
            for name, value in about.items():
                setattr(x, name, value)
            self.pipeline.on_open()
            self.pipeline.on_end(x)

    def stop_turns(self) -> None:
        """Leave the regular reads and writes to the test."""
        self.state._stop_periodic_task()

    async def turn(self) -> None:
        """Do one round of the regular reads and writes."""
        await self.state._turn()

    async def write(self) -> None:
        await self.state._write()

    def die(self) -> None:
        """End without a last write, as a process that is killed."""
        self.state._stop_periodic_task()
        self.state._unlock()

    def burn_rates(self) -> dict[tuple[str, str], float]:
        return self.pipeline.slos.freeze().burn_rates()

    def summary(self, window: str = "all") -> dict[str, Any]:
        out: dict[str, Any] = json.loads(msgspec.json.encode(summary_of(self.pipeline, window)()))
        return out

    def experiment(self) -> dict[str, Any]:
        out: dict[str, Any] = json.loads(msgspec.json.encode(self.pipeline.experiments.results()()))
        return out


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def leave(folder: Path, clock: ManualClock, *, crash: bool = False, **about: Any) -> Meter:
    """A meter that measured 20 exchanges in ten minutes, 4 of them bad, and is gone."""
    meter = Meter(folder, clock, **about)
    await meter.state.start(takes_over=False)
    for i in range(20):
        clock.advance(MINUTE // 2)
        meter.measure(1, BAD if i < 4 else GOOD, "a" if i % 2 else "b")
    if crash:
        await meter.write()
        meter.die()
    else:
        await meter.state.close()
    return meter


async def come(folder: Path, clock: ManualClock, **about: Any) -> Meter:
    meter = Meter(folder, clock, **about)
    await meter.state.start(takes_over=False)
    meter.stop_turns()
    return meter


def rebooted(clock: ManualClock, down_ns: int) -> ManualClock:
    """Another monotonic clock, this long after the other one."""
    mono_ns = 7 * S
    return ManualClock(mono_ns, clock.wall_ns() + down_ns - mono_ns)


async def test_the_next_meter_has_windows_burn_rates_and_history(tmp_path: Path) -> None:
    clock = ManualClock(now_ns=1_000 * S)
    old = await leave(tmp_path, clock)
    new = await come(tmp_path, clock)
    assert new.burn_rates() == old.burn_rates()
    assert new.burn_rates()["gold", "1h"] == pytest.approx(2.0)
    for window in ("1m", "5m", "1h", "all"):
        assert new.summary(window) == old.summary(window), window
    assert new.pipeline.windows.rates() == old.pipeline.windows.rates()
    for step in ("10s", "5m"):
        assert new.pipeline.history.to_dict(step)() == old.pipeline.history.to_dict(step)()
    assert not new.pipeline.errors
    assert new.pipeline.slos.freeze().total == {}, "a counter begins at 0"
    new.measure(5, BAD)
    assert new.burn_rates()["gold", "1h"] == pytest.approx(9 / 25 / 0.1)
    assert new.summary("1h")["n"] == 25


async def test_the_next_meter_has_steps_of_ttft_and_silences(tmp_path: Path) -> None:
    clock = ManualClock()
    old = Meter(tmp_path, clock)
    await old.state.start(takes_over=False)
    rise(old.pipeline.steps, clock)
    old.measure(30, model="tiny")
    await old.state.close()
    new = await come(tmp_path, clock)
    assert new.pipeline.steps.to_dict() == old.pipeline.steps.to_dict()
    assert new.pipeline.steps.ratios()["tiny"] == pytest.approx(1.6, rel=0.05)
    past, before = (meter.pipeline.silences._counts_by_model["tiny"].to_dict() for meter in (new, old))
    assert past == before
    assert past["streams"] == 30
    new.measure(5, model="tiny")
    assert new.pipeline.silences._counts_by_model["tiny"].streams == 35
    assert not new.pipeline.errors


async def test_after_a_reboot_the_windows_know_how_long_nothing_was_measured(tmp_path: Path) -> None:
    old = await leave(tmp_path, clock := ManualClock(now_ns=90_000 * S))
    new = await come(tmp_path, rebooted(clock, 30 * MINUTE))
    assert new.summary("5m")["n"] == 0
    hour = new.summary("1h")
    assert (hour["n"], hour["window"]["seconds"]) == (20, pytest.approx(40 * 60, abs=1))
    assert hour["metrics"] == old.summary("1h")["metrics"]
    assert new.burn_rates() == {key: rate for key, rate in old.burn_rates().items() if key[1] in ("1h", "6h")}
    rates = new.pipeline.history.to_dict("5m")()["figures"]["achieved_rps"]  # type: ignore[index]
    assert rates[-5:] == (None,) * 5, "nothing is known of the time between"


async def test_a_changed_class_is_left_out_and_the_others_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slos = {**SLOS, "silver": SloOptions(objectives="ttft:50ms", target=0.9)}

    with caplog.at_level(logging.INFO):
        clock = ManualClock(now_ns=1_000 * S)
        meter = Meter(tmp_path, clock, slos=slos)
        await meter.state.start(takes_over=False)
        meter.measure(10)
        meter.measure(10, tenant="x")
        await meter.state.close()
        new = await come(
            tmp_path, clock, slos={**slos, "gold": SloOptions(objectives="ttft:90ms", tenants=("a",))}
        )
        hour = new.pipeline.slos.freeze().windows()["1h"]
        assert {key: count.counted for key, count in hour.items()} == {("silver", "x"): 10}
        result = new.summary("1h")
        assert result["n"] == 20, "latencies do not depend on objectives"
        assert {text: count["counted"] for text, count in result["goodput"]["by"].items()} == {
            "ttft:50ms": 10
        }
        assert new.pipeline.windows.rates()["1h"].goodput_rps is None
    assert "event=state_left_out" in caplog.text
    assert "burn rates of slo.gold (it was changed or removed)" in caplog.text
    assert "slo.silver" not in caplog.text


async def test_an_experiment_goes_on_with_all_it_knows_and_a_changed_one_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arms = {"name": "a"}, {"name": "b", "headers": {"X": "y"}}
    experiment = an_experiment(*arms, unit="tenant")

    def feed(meter: Meter, begin: int, end: int) -> None:
        for i in range(begin, end):
            arm, unit = "ab"[i % 2], f"{i % 40:016x}"
            meter.pipeline.experiments.on_assignment(arm, unit, False)
            meter.measure(1, 100 + i % 7, arm=arm, unit=unit)

    with caplog.at_level(logging.INFO):
        clock = ManualClock(now_ns=1_000 * S)
        whole = Meter(tmp_path / "whole", clock, experiment=experiment)
        feed(whole, 0, 200)
        half = Meter(tmp_path, clock, experiment=experiment)
        await half.state.start(takes_over=False)
        feed(half, 0, 100)
        half.pipeline.experiments.switch(False)
        await half.state.close()
        new = await come(tmp_path, clock, experiment=experiment)
        assert (new.experiment()["enabled"], new.experiment()["switched_by"]) == (False, "api")
        feed(new, 100, 200)
        await new.state.close()
        same = {"enabled": True, "state": "running", "switched_by": "config", "since": None}
        assert new.experiment() | same == whole.experiment() | same
        assert new.experiment()["sample_ratio"]["units"] == {"a": 20, "b": 20}
        other = await come(tmp_path, clock, experiment=an_experiment(*arms, unit="tenant", name="other"))
        assert other.experiment()["arms"]["a"]["assigned"] == 0
        assert other.summary()["n"] == 200
    assert f"experiment {experiment.name} (it was changed or removed" in caplog.text


async def test_a_crash_loses_what_came_after_the_last_write_and_is_counted(tmp_path: Path) -> None:
    clock = ManualClock(now_ns=1_000 * S)
    old = await leave(tmp_path, clock, crash=True)
    rates = old.burn_rates()
    old.measure(3, BAD)
    new = await come(tmp_path, clock)
    assert new.burn_rates() == rates
    assert new.pipeline.crashes == 1
    await new.state.close()
    assert (await come(tmp_path, clock)).pipeline.crashes == 1, "that one ended as it should"


async def test_rates_leave_out_the_time_that_a_crash_lost(tmp_path: Path) -> None:
    for crash in (False, True):
        clock = ManualClock(now_ns=1_000 * S)
        old = await leave(tmp_path / str(crash), clock, crash=crash)
        seconds = old.summary("1h")["window"]["seconds"]
        clock.advance(40 * S)
        new = await come(tmp_path / str(crash), clock)
        after = new.summary("1h")["window"]["seconds"]
        assert after == pytest.approx(seconds + (0 if crash else 40), abs=1)


async def test_it_is_written_every_minute_and_when_the_experiment_is_switched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TURN_S", 0.01)

    clock = ManualClock(now_ns=1_000 * S)
    meter = Meter(
        tmp_path, clock, experiment=an_experiment({"name": "a"}, {"name": "b", "headers": {"X": "y"}})
    )
    await meter.state.start(takes_over=False)

    async def written() -> int:
        await wait_until((tmp_path / FILE).exists)
        saved = read_state(tmp_path / FILE)
        assert saved is not None
        (tmp_path / FILE).unlink()
        return saved.mono_ns

    assert await written() == clock.now_ns, "at the start, so that a crash can be seen"
    meter.measure(1)
    await asyncio.sleep(0.1)
    assert not (tmp_path / FILE).exists()
    for _ in range(2):
        clock.advance(MINUTE)
        assert await written() == clock.now_ns
    meter.pipeline.experiments.switch(False)
    assert await written() == clock.now_ns
    await meter.state.close()


async def test_only_its_owner_can_read_it(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "state"

    await leave(folder, ManualClock())
    assert names_in(folder) == ["meter.lock", FILE]
    for path, mode in ((folder, 0o700), (folder / FILE, 0o600), (folder / "meter.lock", 0o600)):
        assert stat.S_IMODE(os.stat(path).st_mode) == mode


# ---------------------------------------------------------------- one meter replaces another


async def test_a_meter_that_is_replaced_sends_what_it_still_measures(tmp_path: Path) -> None:
    clock = ManualClock(now_ns=1_000 * S)
    old, new = Meter(tmp_path, clock), Meter(tmp_path, clock)
    await old.state.start(takes_over=False)
    book, theirs = old.pipeline.relays, new.pipeline.relays
    epoch = book.join(Hello(relay="old", pid=7, clock="mono", anchor_mono_ns=0, anchor_wall_ns=0))
    old.measure(10, BAD)
    book.update("old", relay_status(opened=11, measured=10, unsettled=1), clock.mono_ns())
    await new.state.start(takes_over=True)
    new.stop_turns()
    await new.turn()
    assert new.state._lock_fd is None, "the old one has the folder"
    new.measure(1)

    await old.state.hand_over(str(tmp_path))
    await new.turn()
    assert new.state.is_read
    assert new.summary()["n"] == 11
    (relay,) = theirs.states(clock.mono_ns())
    assert (relay.name, relay.connected, relay.measured_elsewhere) == ("old", True, True)
    clock.advance(S)
    old.measure(1)
    book.update("old", relay_status(opened=11, measured=11), clock.mono_ns())
    book.leave("old", epoch, 0, clock.mono_ns())
    await old.state.close()
    await new.turn()
    assert new.summary()["n"] == 12
    assert new.burn_rates()["gold", "5m"] == pytest.approx(10 / 12 / 0.1)
    (relay,) = theirs.states(clock.mono_ns())
    assert relay.status is not None
    assert (relay.connected, relay.status.measured) == (False, 11)
    assert (old.pipeline.errors, new.pipeline.errors) == ({}, {})
    await new.state.close()
    assert names_in(tmp_path) == ["meter.lock", FILE], "what was read is removed"
    assert (await come(tmp_path, clock)).summary()["n"] == 12, "each exchange once"


async def test_a_new_meter_that_dies_before_it_wrote_loses_nothing_and_counts_nothing_twice(
    tmp_path: Path,
) -> None:
    clock = ManualClock(now_ns=1_000 * S)
    old = Meter(tmp_path, clock)
    await old.state.start(takes_over=False)
    old.measure(10)
    await old.write()
    await old.state.hand_over(str(tmp_path))
    for _ in range(2):  # it reads, and dies
        new = await come(tmp_path, clock)
        assert new.summary()["n"] == 10
        new.die()
    await new.write()
    new.state._lock()
    await new.write()
    old.measure(5)
    await old.state.close()
    name = names_in(tmp_path)[-1]
    await new.state._absorb_new_files()
    kept = (tmp_path / name).read_bytes()
    await new.write()
    (tmp_path / name).write_bytes(kept)  # it dies between the write and the removal
    new.die()
    assert (await come(tmp_path, clock)).summary()["n"] == 15


async def test_a_meter_that_is_killed_in_its_handover_leaves_each_exchange_once(tmp_path: Path) -> None:
    clock = ManualClock(now_ns=1_000 * S)
    await leave(tmp_path, clock)
    old = await come(tmp_path, clock)
    old.measure(10)
    await old.write()
    kept = (tmp_path / FILE).read_bytes()
    old.measure(1)
    clock.advance(S)
    await old.state.hand_over(str(tmp_path))
    (tmp_path / FILE).write_bytes(kept)  # it is killed between the write and the removal
    rest = tmp_path / names_in(tmp_path)[-1]
    saved = rest.read_bytes()
    new = await come(tmp_path, clock)
    assert new.summary()["n"] == 31
    new.measure(1)
    await new.write()
    assert names_in(tmp_path) == ["meter.lock", FILE]
    new.die()
    rest.write_bytes(saved)  # the other one is killed there, too
    third = await come(tmp_path, clock)
    assert third.summary()["n"] == 32, "what meter.state contains is not added"
    third.die()
    state = read_state(tmp_path / FILE)
    assert state is not None
    # Later. The removal of the older file was lost with the machine's power.
    state.absorbed, state.wall_ns = [], state.wall_ns + 1
    write_state(tmp_path / FILE, state)
    assert (await come(tmp_path, clock)).summary()["n"] == 32 + 31, "no figure of the newer file is lost"


async def test_meters_that_replace_each_other_soon_count_each_exchange_once(tmp_path: Path) -> None:
    clock = ManualClock(now_ns=1_000 * S)
    meters = [Meter(tmp_path, clock) for _ in range(4)]
    await meters[0].state.start(takes_over=False)
    for old, new in pairwise(meters):
        old.measure(10)
        await new.state.start(takes_over=True)
        await old.state.hand_over(str(tmp_path))
        old.measure(1)  # it is still at work when the next one is replaced
        await new.turn()
    for old in meters[:-1]:
        await old.state.close()
    await meters[-1].state.close()
    assert meters[-1].summary()["n"] == 33
    assert names_in(tmp_path) == ["meter.lock", FILE]
    assert [meter.pipeline.errors for meter in meters] == [{}] * 4


async def test_a_meter_without_the_folder_leaves_nothing_in_it(tmp_path: Path) -> None:
    clock = ManualClock(now_ns=1_000 * S)
    owner, stranger = Meter(tmp_path, clock), Meter(tmp_path, clock)
    await owner.state.start(takes_over=False)
    await stranger.state.start(takes_over=False)
    stranger.measure(5)
    await stranger.state.hand_over(str(tmp_path))
    await stranger.state.close()
    assert stranger.pipeline.errors == {"state_not_written": 1}
    await owner.state.close()
    assert owner.summary()["n"] == 0


async def test_two_meters_never_share_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock(now_ns=1_000 * S)
    one = Meter(tmp_path, clock)
    await one.state.start(takes_over=False)
    one.measure(10)
    await one.write()
    two = await come(tmp_path, clock)
    assert two.summary()["n"] == 0
    clock.advance(MINUTE)
    await two.turn()
    assert two.pipeline.errors == {"state_not_written": 1}
    await one.state.close()
    await two.turn()
    assert two.summary()["n"] == 10
    assert f"{tmp_path}: another meter uses the folder. Hint: " in caplog.text


# ---------------------------------------------------------------- files and folders that are no use

GOOD_HEAD = b"llmtap state %d\n" % FORMAT
BROKEN = [
    (b"", "the file is not a state file of llmtap"),
    (b"[relay]\n", "the file is not a state file of llmtap"),
    (b"llmtap state 0\nxyz", "another version of llmtap wrote the file (format 0, expected 4)"),
    (b"llmtap state 99\n", "another version of llmtap wrote the file (format 99, expected 4)"),
    (GOOD_HEAD, "the file is damaged: its checksum is wrong"),
    (GOOD_HEAD + b"x" * 1_000, "the file is damaged: its checksum is wrong"),
]


@pytest.mark.parametrize(("data", "problem"), BROKEN)
async def test_a_file_that_cannot_be_read_is_put_aside(
    tmp_path: Path, data: bytes, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE).write_bytes(data)
    meter = await come(tmp_path, ManualClock())
    assert meter.pipeline.errors == {"state_not_read": 1}
    meter.measure(1)
    await meter.state.close()
    assert (tmp_path / f"{FILE}.bad").read_bytes() == data
    assert (await come(tmp_path, ManualClock())).summary()["n"] == 1
    assert f"{tmp_path / FILE}: {problem}. Hint: the meter continues without it" in caplog.text


async def test_any_flipped_byte_and_any_cut_is_noticed(tmp_path: Path) -> None:
    clock = ManualClock(now_ns=1_000 * S)
    await leave(tmp_path, clock)
    whole = (tmp_path / FILE).read_bytes()
    for at in range(0, len(whole), max(1, len(whole) // 40)):
        for data in (whole[:at], whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]):
            (tmp_path / FILE).write_bytes(data)
            meter = await come(tmp_path, clock)
            assert meter.summary()["n"] == 0
            assert meter.pipeline.errors == {"state_not_read": 1}
            meter.die()


async def test_an_old_file_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await leave(tmp_path, clock := ManualClock(now_ns=1_000 * S))
    clock.advance(6 * 60 * MINUTE)
    meter = await come(tmp_path, clock)
    meter.die()
    assert meter.summary()["n"] == 20, "just young enough"
    clock.advance(MINUTE)
    assert (await come(tmp_path, clock)).summary()["n"] == 0
    assert "event=state_not_read" in caplog.text
    assert "error='the file is too old' age_hours=6.0 age_hours_max=6" in caplog.text


async def test_a_part_that_cannot_be_decoded_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await leave(tmp_path, clock := ManualClock(now_ns=1_000 * S))
    saved = read_state(tmp_path / FILE)
    assert saved is not None
    saved.parts["windows"] = b"\xc1"
    del saved.parts["history"]
    write_state(tmp_path / FILE, saved)
    meter = await come(tmp_path, clock)
    assert meter.summary()["n"] == 0
    assert meter.burn_rates()["gold", "1h"] == pytest.approx(2.0)
    assert meter.pipeline.errors == {"state_not_read": 2}
    assert "the part 'windows' cannot be decoded" in caplog.text


@contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def fsync(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield


async def test_a_full_disk_is_counted_and_the_last_good_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock(now_ns=1_000 * S)
    meter = await leave(tmp_path, clock)
    meter = await come(tmp_path, clock)
    meter.measure(5)
    with full_disk(monkeypatch):
        await meter.write()
        await meter.write()
    assert meter.pipeline.errors == {"state_not_written": 2}
    assert names_in(tmp_path) == ["meter.lock", FILE]
    meter.measure(5)
    assert meter.summary()["n"] == 30
    await meter.state.close()
    assert (await come(tmp_path, clock)).summary()["n"] == 30
    assert f"{tmp_path / FILE}: No space left on device. Hint: check meter.state" in caplog.text


async def test_a_full_disk_at_the_handover_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock(now_ns=1_000 * S)
    old = Meter(tmp_path, clock)
    await old.state.start(takes_over=False)
    old.measure(10, BAD)
    with full_disk(monkeypatch):
        await old.state.hand_over(str(tmp_path))
    old.measure(5)
    await old.state.close()
    new = await come(tmp_path, clock)
    assert new.summary()["n"] == 15
    assert new.burn_rates()["gold", "1h"] == pytest.approx(10 / 15 / 0.1)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("a mistake")])
async def test_a_handover_that_fails_at_first_keeps_the_units_of_the_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    experiment = an_experiment({"name": "a"}, {"name": "b", "headers": {"X": "y"}}, unit="tenant")

    def feed(meter: Meter, unit: int) -> None:
        meter.pipeline.experiments.on_assignment("a", f"{unit:016x}", False)
        meter.measure(1, arm="a", unit=f"{unit:016x}")

    writes = []

    def fail(*_: object) -> None:
        writes.append(1)
        raise error

    clock = ManualClock(now_ns=1_000 * S)
    old = Meter(tmp_path, clock, experiment=experiment)
    await old.state.start(takes_over=False)
    for unit in range(20):
        feed(old, unit)
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_state", fail)
        await old.state.hand_over(str(tmp_path))
        for _ in range(3):
            await old.turn()
        assert len(writes) == 1, "it is not tried again at once"
        clock.advance(module.RETRY_NS)
        await old.turn()
        assert len(writes) == 2
    assert old.pipeline.errors == {"state_not_written": 2}
    clock.advance(module.RETRY_NS)
    await old.turn()
    new = await come(tmp_path, clock, experiment=experiment)
    for unit in range(20):
        feed(new, unit)
    result = new.experiment()["arms"]["a"]
    assert (result["ended"], result["units"], result["metrics"]["ttft"]["units"]) == (40, 20, 20)
    await old.state.close()


async def test_a_switch_while_the_meter_is_replaced_counts(tmp_path: Path) -> None:
    experiment = an_experiment({"name": "a"}, {"name": "b", "headers": {"X": "y"}})

    clock = ManualClock(now_ns=1_000 * S)
    old, new = (Meter(tmp_path, clock, experiment=experiment) for _ in range(2))
    await old.state.start(takes_over=False)
    old.pipeline.experiments.switch(False)
    await old.write()
    clock.advance(S)
    await new.state.start(takes_over=True)
    assert not new.experiment()["enabled"]
    old.pipeline.experiments.switch(True)
    await old.state.hand_over(str(tmp_path))
    await new.turn()
    assert new.experiment()["enabled"], "the later switch counts"
    clock.advance(S)
    new.pipeline.experiments.switch(False)
    old.measure(1)
    await old.state.close()
    await new.turn()
    assert not new.experiment()["enabled"], "the switch of the old meter is older"
    await new.state.close()


@pytest.mark.parametrize("place", ["file/state", "/proc/llmtap"])
async def test_a_folder_that_cannot_be_made_is_counted_and_nothing_else(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()

    clock = ManualClock(now_ns=1_000 * S)
    meter = await come(tmp_path / place, clock)
    meter.measure(3)
    clock.advance(MINUTE)
    await meter.turn()
    await meter.state.close()
    assert meter.summary()["n"] == 3
    assert set(meter.pipeline.errors) == {"state_not_read", "state_not_written"}


async def test_the_reason_for_which_a_folder_is_not_used_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()

    await (await come(tmp_path / "file" / "state", ManualClock())).state.close()
    assert "kind=state_not_written" in caplog.text
    assert "another meter" not in caplog.text


@pytest.mark.parametrize("mode", [0o770, 0o702])
async def test_a_folder_that_others_can_write_is_refused(
    tmp_path: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "state"

    clock = ManualClock(now_ns=1_000 * S)
    await leave(folder, clock)
    folder.chmod(mode)
    before = (folder / FILE).read_bytes()
    meter = await come(folder, clock)
    meter.measure(1)
    await meter.turn()
    await meter.state.close()
    assert meter.summary()["n"] == 1, "it measures without the file"
    assert meter.pipeline.errors == {"state_not_read": 1, "state_not_written": 1}
    assert (folder / FILE).read_bytes() == before
    owner = Meter(tmp_path / "other", clock)
    await owner.state.start(takes_over=False)
    await owner.state.hand_over(str(folder))
    assert owner.pipeline.errors == {"state_not_written": 1}
    assert names_in(folder) == ["meter.lock", FILE], "no figures are written there"
    folder.chmod(0o700)
    assert (await come(folder, clock)).summary()["n"] == 20
    await owner.state.close()
    assert (
        f"{folder}: other users can write to the folder (mode {mode:04o}). Hint: chmod 700 {folder}"
    ) in caplog.text


async def test_a_folder_or_file_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await leave(tmp_path, clock := ManualClock(now_ns=1_000 * S))
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12_345)
        assert (await come(tmp_path, clock)).pipeline.errors == {"state_not_read": 1}
        patch.setattr(module, "check_folder", lambda folder: None)
        meter = await come(tmp_path, clock)
        assert meter.pipeline.errors == {"state_not_read": 1}
        assert meter.summary()["n"] == 0
    assert f"user {os.getuid()} owns the folder, and the meter runs as user 12345. Hint: " in caplog.text
    assert f"user {os.getuid()} owns the file, and the meter runs as user 12345" in caplog.text


def plant_fifo(path: Path) -> None:
    os.mkfifo(path)


def plant_large_file(path: Path) -> None:
    path.touch()
    os.truncate(path, FILE_BYTES_MAX + 1)


def plant_folder(path: Path) -> None:
    (path / "full").mkdir(parents=True)


def plant_link(path: Path) -> None:
    write_state(path.parent / "elsewhere", SavedState("", 0, 0, {}, ended=True))
    path.symlink_to(path.parent / "elsewhere")


@pytest.mark.parametrize("name", [FILE, "rest-x-0.state"])
@pytest.mark.parametrize("plant", [plant_fifo, plant_large_file, plant_folder, plant_link])
async def test_only_a_regular_file_of_limited_size_is_read(
    tmp_path: Path, name: str, plant: Callable[[Path], None]
) -> None:
    plant(tmp_path / name)
    clock = ManualClock(now_ns=1_000 * S)
    meter = await come(tmp_path, clock)
    meter.measure(1)
    await meter.turn()
    await meter.state.close()
    assert meter.pipeline.errors == {"state_not_read": 1}
    assert (await come(tmp_path, clock)).summary()["n"] == 1


async def test_the_lock_is_not_made_behind_a_link(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    (folder / "meter.lock").symlink_to(tmp_path / "elsewhere")

    meter = await come(folder, ManualClock())
    assert meter.pipeline.errors == {"state_not_read": 1}
    assert not (tmp_path / "elsewhere").exists()


async def test_a_state_above_the_limit_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_file, "FILE_BYTES_MAX", 1_000)

    meter = await leave(tmp_path, ManualClock(now_ns=1_000 * S))
    assert meter.pipeline.errors == {"state_not_written": 1}
    assert names_in(tmp_path) == ["meter.lock"]


async def test_a_folder_that_is_removed_is_made_again_and_locked(tmp_path: Path) -> None:
    folder = tmp_path / "state"

    clock = ManualClock(now_ns=1_000 * S)
    meter = await come(folder, clock)
    meter.measure(5)
    await meter.write()
    shutil.rmtree(folder)
    await meter.write()
    assert names_in(folder) == ["meter.lock", FILE]
    assert not (await come(folder, clock)).state.is_read
    assert meter.pipeline.errors == {}
    await meter.state.close()
    assert (await come(folder, clock)).summary()["n"] == 5


async def test_incomplete_files_of_meters_that_were_killed_are_removed(tmp_path: Path) -> None:
    for name, age_s in ((f"{FILE}.7.new", 700), ("rest-x-0.state.8.new", 700), ("rest-y-0.state.9.new", 0)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)

    await come(tmp_path, ManualClock())
    assert names_in(tmp_path) == ["meter.lock", "rest-y-0.state.9.new"], "this one may be at work"


async def test_a_disk_that_hangs_delays_neither_the_start_nor_the_handover_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def hang(path: Path) -> SavedState | None:
        answers.wait(60)
        return read_state(path)

    def hang_too(path: Path, saved: SavedState) -> None:
        answers.wait(60)
        write_state(path, saved)

    try:
        clock = ManualClock(now_ns=1_000 * S)
        await leave(tmp_path, clock)
        monkeypatch.setattr(module, "DISK_S", 0.05)
        monkeypatch.setattr(module, "read_state", hang)
        monkeypatch.setattr(module, "write_state", hang_too)
        meter = Meter(tmp_path, clock)
        await meter.state.start(takes_over=False)
        assert meter.pipeline.errors == {"state_not_read": 1}
        assert meter.summary()["n"] == 0
        meter.measure(1)
        answers.set()
        await wait_until(lambda: meter.state.is_read)
        assert meter.summary()["n"] == 21, "the figures come when the disk answers"
        answers.clear()
        await meter.state.hand_over(str(tmp_path))
        await meter.state.close()
        assert meter.pipeline.errors == {"state_not_read": 1, "state_not_written": 2}
        monkeypatch.setattr(module, "DISK_S", PATIENCE_S)
        answers.set()
        await asyncio.wait(meter.state._late_tasks)
        assert (await come(tmp_path, clock)).summary()["n"] == 21
    finally:
        answers.set()


LAYOUT = "2a336d664568a961"
"""Digest of the fields of all that a file contains."""


def test_a_change_of_the_layout_needs_another_format() -> None:
    structs = (
        SavedState,
        RelayAccount,
        windows._SavedWindows,
        windows._SavedSlice,
        summary._Packed,
        slo._SavedSlos,
        history._SavedLevel,
        history._SavedStep,
        experiments._SavedExperiment,
        experiments._SavedArm,
        SavedSample,
        SavedFigure,
        silences._SavedSilences,
        SavedDetector,
        StepChange,
        step_change._Day,
    )
    fields = [
        (one.__name__, [f"{name}: {type_}" for name, type_ in one.__annotations__.items()]) for one in structs
    ]
    names = [
        SeriesKey._fields,
        slo.SloCount._fields,
        summary._COUNTERS,
        history._SUM_FIELDS,
        history.FIGURES,
        list(history.STEPS.values()),
        windows.LEVELS,
        slo._LEVELS,
        experiments._COUNTS,
        experiments._COUNTERS,
        metrics_experiment._SUMS,
        list(SilenceKind),
        EDGES_NS,
    ]
    digest = blake2b(repr((FORMAT, fields, names)).encode(), digest_size=8).hexdigest()
    assert digest == LAYOUT, "increase FORMAT, so that no version reads another one's file, and set LAYOUT"
