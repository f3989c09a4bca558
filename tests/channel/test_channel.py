"""The tap against a meter on a real unix socket: bounded, and exact about what was lost."""

import asyncio
import errno
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llmtap.channel import Ledger, Tap, is_socket_replaceable
from llmtap.channel.frames import Closing, FrameKind, Hello
from tests.support.servers.peer import PATIENCE_S, wait_until
from tests.support.servers.proxy import FakeMeter
from tests.support.traffic.relay_status import relay_status

DONE = Closing(outcome="complete", status=200)


class Traffic:
    """Exchanges of a pretended relay."""

    def __init__(self, tap: Tap) -> None:
        self.tap = tap

    def open(self) -> tuple[int, bool]:
        return self.tap.open(1, b"GET / HTTP/1.1\r\n\r\n")

    def say(self, seq: int, data: bytes = b"data") -> bool:
        return self.tap.offer(FrameKind.RESPONSE_DATA, seq, 2, 0, data)

    def close(self, seq: int) -> None:
        self.tap.close_exchange(seq, 3, DONE)

    def whole(self, size: int = 100) -> int:
        seq, tapped = self.open()
        if tapped and self.say(seq, b"x" * size):
            self.close(seq)
        return seq

    def adds_up(self) -> bool:
        ledger = self.tap.ledger
        return ledger.opened == ledger.measured + sum(ledger.dropped.values()) + ledger.unsettled


@asynccontextmanager
async def channel(
    bytes_max: int = 1 << 20, *, meter: bool = True, on_word: Callable[[int], None] | None = None
) -> AsyncIterator[tuple[Traffic, FakeMeter]]:
    with tempfile.TemporaryDirectory(prefix="tap-") as folder:
        fake = FakeMeter(f"{folder}/tap.sock")
        if meter:
            await fake.start()
        hello = Hello(relay="r", pid=1, clock="mono", anchor_mono_ns=1, anchor_wall_ns=2)
        tap = Tap(asyncio.get_running_loop(), fake.path, bytes_max, lambda: hello, on_word)
        tap.connect()
        traffic = Traffic(tap)
        try:
            if meter:
                await wait_until(lambda: fake.hellos)
            yield traffic, fake
        finally:
            tap.close()
            fake.stop()
        assert traffic.adds_up()


async def test_frames_arrive_in_order_and_are_measured_when_acknowledged() -> None:
    async with channel() as (traffic, meter):
        seqs = [traffic.whole() for _ in range(50)]
        assert traffic.tap.ledger.measured == 0, "nothing is measured before the meter says so"
        await wait_until(lambda: traffic.tap.ledger.measured == 50)
        assert traffic.tap.pending_bytes == 0
        assert meter.hellos[0].relay == "r"
        assert [f.seq for f in meter.frames if f.kind is FrameKind.OPEN] == seqs
        for seq in seqs:
            assert meter.exchange(seq).kinds == [FrameKind.OPEN, FrameKind.RESPONSE_DATA, FrameKind.CLOSE]
            assert meter.exchange(seq).closing == DONE
        assert meter.batches == list(range(1, len(meter.batches) + 1))


async def test_a_slow_meter_costs_whole_exchanges_and_no_memory() -> None:
    bound = 64 << 10
    async with channel(bound) as (traffic, meter):
        meter.pause()
        ran = [traffic.open()[0] for _ in range(5)]
        refused = 0
        for i in range(3_000):
            # Those already running say something now and then; new ones keep coming.
            traffic.say(ran[i % 5], b"y" * 50)
            seq, tapped = traffic.open()
            if not tapped:
                refused += 1
            elif traffic.say(seq, b"x" * 500):
                traffic.close(seq)
            # One frame may pass the bound, and each exchange that is dropped says so in one more.
            assert traffic.tap.pending_bytes <= bound + 64_000
            assert traffic.adds_up()
            if i % 50 == 0:
                await asyncio.sleep(0)
        ledger = traffic.tap.ledger
        assert refused > 2_000
        assert set(ledger.dropped) == {"overflow"}
        assert ledger.dropped["overflow"] >= refused
        for seq in ran:
            traffic.close(seq)
        meter.resume()
        await wait_until(lambda: ledger.unsettled == 0)
        # Whatever reached the meter and is not whole has been taken back.
        for seq in {f.seq for f in meter.frames}:
            kinds = meter.exchange(seq).kinds
            assert kinds[0] is FrameKind.OPEN
            assert kinds[-1] in (FrameKind.CLOSE, FrameKind.DROP)
            assert kinds.count(FrameKind.DROP) + kinds.count(FrameKind.CLOSE) == 1
        closed = sum(f.kind is FrameKind.CLOSE for f in meter.frames)
        assert ledger.measured == closed
        assert traffic.whole() == ledger.opened
        await wait_until(lambda: ledger.measured == closed + 1)


async def test_half_the_bound_is_kept_for_those_already_running() -> None:
    async with channel(64 << 10) as (traffic, meter):
        meter.pause()
        first, tapped = traffic.open()
        assert tapped
        while traffic.open()[1]:
            pass
        assert traffic.say(first), "one that runs goes on where no new one may begin"
        meter.resume()
        traffic.close(first)
        await wait_until(lambda: FrameKind.CLOSE in meter.exchange(first).kinds)


async def test_a_killed_meter_is_counted_to_the_exchange_and_found_again() -> None:
    async with channel() as (traffic, meter):
        for _ in range(7):
            traffic.whole()
        await wait_until(lambda: traffic.tap.ledger.measured == 7)
        meter.acknowledges = False
        for _ in range(3):
            traffic.whole()  # delivered, never acknowledged
        running = [traffic.open()[0] for _ in range(2)]
        await wait_until(lambda: len(meter.exchange(running[1]).kinds) == 1)
        meter.stop()
        await wait_until(lambda: not traffic.tap.connected)
        assert traffic.tap.ledger.dropped == {"meter_lost": 5}
        for _ in range(4):
            traffic.whole()
        for seq in running:
            assert not traffic.say(seq), "half an exchange is of no use to the next meter"
            traffic.close(seq)
        assert traffic.tap.ledger.dropped == {"meter_lost": 5, "no_meter": 4}
        assert traffic.tap.pending_bytes == 0
        meter.acknowledges = True
        await meter.start()
        await wait_until(lambda: len(meter.hellos) == 2)
        seqs = [traffic.whole() for _ in range(6)]
        await wait_until(lambda: traffic.tap.ledger.measured == 13)
        assert all(meter.exchange(s).kinds[-1] is FrameKind.CLOSE for s in seqs)
        assert traffic.tap.ledger.dropped == {"meter_lost": 5, "no_meter": 4}
        assert traffic.tap.ledger.opened == 22


async def test_the_meters_death_is_noticed_while_sending_as_well() -> None:
    """The send may find out before the reader does: inside the very call that offers a frame."""
    async with channel(8 << 20) as (traffic, meter):
        meter.stop()
        await asyncio.sleep(0)
        dropped_in_offer = 0
        for _ in range(30):
            seq, tapped = traffic.open()
            for _ in range(20):
                if tapped and not traffic.say(seq, b"x" * 20_000):
                    dropped_in_offer += 1
                    break
            traffic.close(seq)
            assert traffic.adds_up()
        await wait_until(lambda: not traffic.tap.connected)
        assert traffic.tap.ledger.unsettled == 0
        assert traffic.tap.ledger.measured == 0
        assert sum(traffic.tap.ledger.dropped.values()) == 30
        assert set(traffic.tap.ledger.dropped) <= {"meter_lost", "no_meter"}


async def test_what_is_taken_back_counts_once_with_the_meter_gone_or_not() -> None:
    async with channel() as (traffic, meter):
        (kept, _), (lost, _) = traffic.open(), traffic.open()
        traffic.tap.drop(kept, 2, "middleware_error")
        traffic.tap.drop(kept, 2, "middleware_error")
        await wait_until(lambda: FrameKind.DROP in meter.exchange(kept).kinds)
        meter.stop()
        await wait_until(lambda: not traffic.tap.connected)
        traffic.tap.drop(lost, 3, "middleware_error")
        assert traffic.tap.ledger.dropped == {"middleware_error": 1, "meter_lost": 1}
        assert traffic.adds_up()


async def test_news_come_before_all_else_of_a_batch_but_the_hello() -> None:
    async with channel() as (traffic, meter):
        told = 0

        def news() -> tuple[int, int, int, int, bytes]:
            nonlocal told
            told += 1
            return (FrameKind.ANCHOR, 0, told, 0, b"{}")

        kinds: list[list[int]] = []
        take = meter.take

        def see(batch_no: int, rows: list[tuple[int, int, int, int, bytes]]) -> None:
            kinds.append([row[0] for row in rows])
            take(batch_no, rows)

        meter.take = see  # type: ignore[method-assign]
        traffic.tap._news = news
        seqs = [traffic.whole() for _ in range(3)]
        await wait_until(lambda: traffic.tap.ledger.measured == 3)
        assert meter.frames[0].kind is FrameKind.ANCHOR
        assert [f.t_ns for f in meter.frames if f.kind is FrameKind.ANCHOR] == list(range(1, told + 1))
        meter.stop()
        await wait_until(lambda: not traffic.tap.connected)
        await meter.start()
        await wait_until(lambda: len(meter.hellos) == 2)
        seqs.append(traffic.whole())
        await wait_until(lambda: traffic.tap.ledger.measured == 4)
        for seq in seqs:
            assert meter.exchange(seq).kinds[-1] is FrameKind.CLOSE, "and no acknowledgement got out of step"
        assert sum(batch[:2] == [FrameKind.HELLO, FrameKind.ANCHOR] for batch in kinds) == 1
        assert all(FrameKind.ANCHOR in batch[:2] for batch in kinds)


async def test_drain_waits_for_the_meters_word() -> None:
    async with channel() as (traffic, meter):
        for _ in range(20):
            traffic.whole()
        await traffic.tap.drain(PATIENCE_S)
        assert traffic.tap.ledger.measured == 20
        meter.acknowledges = False
        traffic.whole()
        # A meter that says nothing is not waited for.
        await asyncio.wait_for(traffic.tap.drain(0.05), PATIENCE_S)
        assert traffic.tap.ledger.unsettled == 1


async def test_close_delivers_what_has_gathered() -> None:
    async with channel() as (traffic, meter):
        seq = traffic.whole()
        traffic.tap.close()
        await wait_until(lambda: FrameKind.CLOSE in meter.exchange(seq).kinds)
        await asyncio.sleep(0.25)
        assert len(meter.hellos) == 1, "who has hung up does not call again"


async def test_status_is_sent_to_a_meter_that_listens_and_kept_from_one_that_does_not() -> None:
    async with channel(64 << 10) as (traffic, meter):
        traffic.tap.status(relay_status(opened=4))
        await wait_until(lambda: meter.statuses)
        assert meter.statuses[0].opened == 4
        meter.pause()
        for _ in range(2_000):
            traffic.tap.status(relay_status())
        assert traffic.tap.pending_bytes < (64 << 10) + 2_000


async def test_without_a_file_descriptor_it_looks_for_the_meter_again() -> None:
    none_left = OSError(errno.EMFILE, "Too many open files")
    made = [none_left, socket.socket(socket.AF_UNIX)]
    with mock.patch("llmtap.channel.socket.socket", side_effect=made) as make:
        async with channel() as (_, meter):
            assert make.call_count == 2
            assert len(meter.hellos) == 1


@pytest.mark.parametrize(("mode", "found"), [(0o755, False), (0o775, True), (0o757, True), (0o1777, False)])
def test_a_socket_is_replaceable_where_others_may_rename_files(
    tmp_path: Path, mode: int, found: bool
) -> None:
    tmp_path.chmod(mode)
    assert is_socket_replaceable(str(tmp_path / "tap.sock")) is found


def total(ledger: Ledger) -> int:
    return ledger.measured + sum(ledger.dropped.values()) + ledger.unsettled


class LedgerModel(RuleBasedStateMachine):
    """The ledger beside a model that keeps one word per exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.fate: dict[int, str] = {}
        self.waiting: dict[int, int] = {}
        self.batch_no = 0

    def of(self, fate: str) -> list[int]:
        return [seq for seq, f in self.fate.items() if f == fate]

    @rule(measured=st.booleans(), reason=st.sampled_from(["no_meter", "overflow"]))
    def open(self, measured: bool, reason: str) -> None:
        seq = self.ledger.open()
        assert seq == len(self.fate) + 1
        if measured:
            self.ledger.begin(seq)
            self.fate[seq] = "live"
        else:
            self.ledger.drop(seq, reason)
            self.fate[seq] = reason

    @precondition(lambda self: self.of("live"))
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.of("live")))
        self.ledger.close(seq, self.batch_no + 1)
        self.fate[seq] = "closed"
        self.waiting[seq] = self.batch_no + 1

    @precondition(lambda self: self.of("live"))
    @rule(data=st.data())
    def overflow(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.of("live")))
        self.ledger.drop(seq, "overflow")
        self.fate[seq] = "overflow"

    @rule()
    def flush(self) -> None:
        self.batch_no += 1

    @rule(behind=st.integers(0, 3))
    def acknowledge(self, behind: int) -> None:
        upto = max(0, self.batch_no - behind)
        self.ledger.acknowledge(upto)
        for seq in [s for s, n in self.waiting.items() if n <= upto]:
            del self.waiting[seq]
            self.fate[seq] = "measured"

    @rule()
    def lose_meter(self) -> None:
        self.ledger.lose_meter()
        self.waiting.clear()
        for seq, fate in self.fate.items():
            if fate in ("live", "closed"):
                self.fate[seq] = "meter_lost"

    @invariant()
    def adds_up(self) -> None:
        ledger = self.ledger
        assert ledger.opened == total(ledger) == len(self.fate)
        assert ledger.measured == len(self.of("measured"))
        assert ledger.unsettled == len(self.of("live")) + len(self.of("closed"))
        assert ledger.live == set(self.of("live"))
        assert {
            k: n for k in ("no_meter", "overflow", "meter_lost") if (n := len(self.of(k)))
        } == ledger.dropped


TestLedger = LedgerModel.TestCase
