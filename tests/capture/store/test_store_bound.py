"""Limit of spools and local files together: what is deleted, and what is reported."""

import logging
import shutil

import pyarrow.parquet as pq

from llmtap.capture.schema import (
    VERSION,
    CaptureInfo,
    CaptureLedger,
    info_of,
)
from llmtap.capture.store.spool import read_spool
from llmtap.capture.store.store import (
    FOLDER_CHECK_NS,
    NOTES_BYTES,
    NOTES_SPOOL_BYTES,
)
from llmtap.clock import ManualClock
from llmtap.units import Bytes
from tests.support.storage.stores import (
    NOTHING,
    append,
    fat,
    files_in,
    left_spool,
    numbers,
    options,
    store,
    thin,
)
from tests.support.waiting import block_until


def test_at_the_bound_oldest_files_go_and_capture_goes_on(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    bound = 512 << 10
    (tmp_path / "llmtap-mine.parquet").write_bytes(b"not made by a capture")
    at = store(tmp_path, total_bytes=Bytes(bound), when_full="oldest")
    for seq in range(1, 81):
        # While all of it is spools that are yet to become files, there is nothing to delete.
        block_until(lambda seq=seq: at.append(fat(seq), NOTHING))
        assert at.state().local_bytes <= bound
    at.close(10)
    state = at.state()
    assert state.files_deleted > 0
    assert caplog.text.count("event=capture_deleted") == state.files_deleted
    kept = numbers(p for p in files_in(tmp_path) if p.name != "llmtap-mine.parquet")
    assert kept == list(range(kept[0], 81)), "the newest, without a gap"
    assert len(kept) > 20
    assert state.rows_deleted == 80 - len(kept), "what was deleted is counted in rows, too"
    assert (tmp_path / "llmtap-mine.parquet").exists()


def test_at_the_bound_capture_may_pause_until_somebody_makes_room(tmp_path):
    clock = ManualClock()
    bound = 256 << 10
    at = store(tmp_path, clock, total_bytes=Bytes(bound))
    seq = 1
    while True:
        if at.append(fat(seq), NOTHING):
            seq += 1
        else:
            block_until(lambda: at.state().files_waiting == 0)
            clock.advance(1_000_000_000)
            if not at.append(fat(seq), NOTHING):
                break
            seq += 1
    state = at.state()
    assert (state.problem, state.files_deleted) == ("total_bytes", 0)
    assert bound - NOTES_BYTES - 40_000 <= state.local_bytes <= bound, "counted before it is taken"
    oldest, *_ = files_in(tmp_path)
    shutil.move(oldest, tmp_path / ".spool" / "elsewhere")
    assert not at.append(fat(seq), NOTHING), "nobody looks before a second has passed"
    clock.advance(1_000_000_000)
    append(at, fat(seq))
    assert at.problem is None
    at.close(10)
    assert numbers([*files_in(tmp_path), tmp_path / ".spool" / "elsewhere"]) == list(range(1, seq + 1))


def _ledgers(folder):
    """The last word of each file and each spool, in the order of their names."""
    found = {p.stem: info_of(pq.read_schema(p)).ledger for p in files_in(folder)}
    found |= {p.stem: read_spool(p).ledger for p in (folder / ".spool").glob("*.spool")}
    return [found[name] for name in sorted(found)]


def _fill(at):
    """Rows until the bound on the total keeps them away; the number that was not taken."""
    seq = 1
    while True:
        block_until(lambda: at.state().files_waiting == 0)
        if not at.append(fat(seq), NOTHING) and at.state().files_waiting == 0:
            return seq
        seq += at.problem is None


def test_a_paused_capture_tells_what_it_lost_and_stays_below_its_bound(tmp_path):
    clock = ManualClock()
    bound = 256 << 10
    at = store(tmp_path, clock, total_bytes=Bytes(bound))
    _fill(at)
    for lost in range(1, 201):
        assert at.append(thin(0, 0), CaptureLedger(dropped={"total_bytes": lost}, meter="m"))
        assert at.problem == "total_bytes", "that a ledger has room says nothing of rows"
        if lost % 20 == 0:
            assert _ledgers(tmp_path)[-1].dropped == {"total_bytes": lost}
        clock.advance(options(tmp_path).rotate_every // 100)
        at.tick()
        assert at.state().local_bytes <= bound
        assert at.state().files_waiting == 0, "ledgers alone make no files while it is paused"
    assert sum(p.stat().st_size for p in (tmp_path / ".spool").iterdir()) < 2 * NOTES_SPOOL_BYTES
    at.close(10)
    assert _ledgers(tmp_path)[-1].dropped == {"total_bytes": 200}
    assert at.state().local_bytes <= bound
    assert sum(p.stat().st_size for p in tmp_path.rglob("*.parquet")) == at.state().local_bytes


def test_what_is_deleted_is_known_as_soon_as_it_is_gone(tmp_path):
    at = store(tmp_path, total_bytes=Bytes(256 << 10), when_full="oldest")
    for seq in range(1, 41):
        block_until(lambda seq=seq: at.append(fat(seq), CaptureLedger(meter="m")))
        block_until(lambda: at.state().files_waiting == 0)
        deleted = at.state().rows_deleted
        assert _ledgers(tmp_path)[-1].dropped == ({"deleted": deleted} if deleted else {})
    assert deleted > 0
    at.close(10)


def test_files_that_somebody_takes_away_are_not_counted_for_long(tmp_path):
    clock = ManualClock()
    newer = CaptureInfo(schema_version=VERSION + 1)
    left = left_spool(tmp_path, "llmtap-20230101T000000000Z-c0-0001-0001.spool", [thin(1)], newer)
    at = store(tmp_path, clock)
    append(at, thin(1))
    at.rotate()
    block_until(lambda: at.state().files == 1)
    assert at.state().local_bytes == left.stat().st_size + files_in(tmp_path)[0].stat().st_size
    shutil.rmtree(tmp_path)
    clock.advance(FOLDER_CHECK_NS - 1)
    at.tick()
    assert at.state().local_bytes > 0
    clock.advance(1)
    at.tick()
    state = at.state()
    assert (state.local_bytes, state.spool_bytes, state.files_waiting) == (0, 0, 0)
    at.close(10)
