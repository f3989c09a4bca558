"""Whatever happens to a spool, what comes out of it is what went in, batch by batch, or is counted."""

import errno
import fcntl
import os
import random
import stat
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtap.capture.schema import (
    SCHEMA,
    VERSION,
    CaptureInfo,
    CaptureLedger,
    RelayCount,
)
from llmtap.capture.store import spool as spools
from llmtap.capture.store.spool import LOCK_FILE, SpoolWriter, read_spool, recover_aside_spools
from tests.support.storage import capture_rows

_INFO = CaptureInfo(capture="c1", level="shape", config="f00d")
_SIZES = (3, 1, 7, 2, 5)


def _write(path, sizes=_SIZES, *, notes=()):
    """A spool of batches of these sizes; the batches, and where each frame ends (the head's end first)."""
    writer = SpoolWriter(path, _INFO)
    ends, batches, start = [writer.size_bytes], [], 1
    for i, n in enumerate(sizes):
        batch = capture_rows.batch(n, seed=i, start=start, tokens=4)
        start += n
        writer.append(batch, notes[i] if i < len(notes) else None)
        batches.append(batch)
        ends.append(writer.size_bytes)
    writer.close()
    assert path.stat().st_size == ends[-1]
    return batches, ends


def _read(path):
    contents = read_spool(path)
    batches = list(contents.batches())
    assert sum(b.num_rows for b in batches) == contents.rows
    return contents, batches


def test_what_is_written_is_read_with_what_the_spool_says_of_itself(tmp_path):
    path = tmp_path / "a.spool"
    last = CaptureLedger({"r0": RelayCount(18, {"overflow": 2})}, {"disk_full": 1}, "m1")
    written, _ = _write(path, notes=[CaptureLedger({"r0": RelayCount(3)}), None, last])
    contents, batches = _read(path)
    assert batches == written
    assert contents.info == _INFO
    assert contents.ledger == last
    assert (contents.rows, contents.notes, contents.damaged) == (sum(_SIZES), 2, {})
    assert all(b.schema.equals(SCHEMA) for b in batches)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_spool_is_never_written_over(tmp_path):
    path = tmp_path / "a.spool"
    _write(path)
    with pytest.raises(FileExistsError):
        SpoolWriter(path, _INFO)


def test_a_spool_torn_at_any_byte_gives_all_batches_before_the_tear(tmp_path):
    path, torn = tmp_path / "a.spool", tmp_path / "torn.spool"
    written, ends = _write(path)
    data = path.read_bytes()
    rng = random.Random(5)
    cuts = {end + d for end in ends[1:] for d in (-1, 0, 1, 5, 27)} | set(
        rng.sample(range(ends[0], len(data)), 60)
    )
    for cut in sorted(c for c in cuts if c <= len(data)):
        torn.write_bytes(data[:cut])
        contents, batches = _read(torn)
        whole = sum(end <= cut for end in ends[1:])
        assert batches == written[:whole], cut
        left = cut - max(end for end in ends if end <= cut)
        assert contents.damaged == ({"batches": 1, "bytes": left} if left else {}), cut


@pytest.mark.parametrize("at", range(len(_SIZES)))
def test_a_flipped_bit_costs_its_batch_only_and_the_gap_is_counted(tmp_path, at):
    path = tmp_path / "a.spool"
    written, ends = _write(path)
    data = bytearray(path.read_bytes())
    begin, end = ends[at], ends[at + 1]
    for place in (begin, begin + 4, begin + 16, begin + 25, (begin + end) // 2, end - 1):
        broken = bytearray(data)
        broken[place] ^= 0x10
        path.write_bytes(broken)
        contents, batches = _read(path)
        assert batches == written[:at] + written[at + 1 :], place
        assert contents.damaged == {"batches": 1, "bytes": end - begin}, place


def test_several_batches_lost_in_one_stretch_are_each_counted(tmp_path):
    path = tmp_path / "a.spool"
    written, ends = _write(path)
    data = bytearray(path.read_bytes())
    data[ends[1] : ends[4]] = bytes(ends[4] - ends[1])
    path.write_bytes(data)
    contents, batches = _read(path)
    assert batches == [written[0], written[4]]
    assert contents.damaged == {"batches": 3, "bytes": ends[4] - ends[1]}


def test_without_its_head_a_spool_of_this_version_still_gives_its_rows(tmp_path):
    path = tmp_path / "a.spool"
    written, ends = _write(path)
    data = bytearray(path.read_bytes())
    data[ends[0] // 2] ^= 1
    path.write_bytes(data)
    contents, batches = _read(path)
    assert batches == written
    assert contents.info.level == "full", "which covers every level that a row may have"
    assert contents.damaged == {"batches": 0, "bytes": ends[0]}


@settings(max_examples=40)
@given(data=st.data())
def test_any_damage_leaves_only_batches_that_were_written(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp()
    path, broken = folder / "whole.spool", folder / "broken.spool"
    if not path.exists():
        _write(path)
    whole = bytearray(path.read_bytes())
    allowed = [b.to_pylist() for b in read_spool(path).batches()]
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "insert", "zero"])):
            case "flip":
                whole[at] ^= 1 << data.draw(st.integers(0, 7))
            case "cut":
                del whole[at : at + data.draw(st.integers(1, 3_000))]
            case "insert":
                whole[at:at] = data.draw(st.binary(max_size=200))
            case "zero":
                whole[at : at + 4_096] = bytes(min(4_096, len(whole) - at))
        if not whole:
            return
    broken.write_bytes(whole)
    for batch in read_spool(broken).batches():
        assert batch.to_pylist() in allowed


_OLD = pa.schema([("id", pa.string()), ("tenant", pa.string()), ("status", pa.int32())])


def test_a_spool_of_an_older_version_is_migrated(tmp_path):
    path = tmp_path / "old.spool"
    old = CaptureInfo(capture="c0", schema_version=VERSION - 1)
    writer = SpoolWriter(path, old, schema=_OLD)
    writer.append(
        pa.RecordBatch.from_pydict({"id": ["a", "b"], "tenant": ["t", None], "status": [200, 429]}, _OLD)
    )
    writer.close()

    contents = read_spool(path)
    (batch,) = contents.batches()
    assert contents.info == old
    assert batch.schema.equals(SCHEMA)
    assert batch.select(["id", "tenant", "status"]).to_pylist() == [
        {"id": "a", "tenant": "t", "status": 200},
        {"id": "b", "tenant": None, "status": 429},
    ]
    assert batch.column("model").null_count == 2


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("where", ["pwrite", "fdatasync"])
def test_a_failed_write_leaves_the_file_as_it_was_and_may_be_tried_again(tmp_path, monkeypatch, code, where):
    path = tmp_path / "a.spool"
    writer = SpoolWriter(path, _INFO)
    first, second = capture_rows.batch(2, seed=1, tokens=4), capture_rows.batch(3, seed=2, start=3, tokens=4)
    writer.append(first)
    end = writer.size_bytes
    real = os.pwrite
    calls = []

    def short(fd, data, at):
        """Takes 100 bytes, then has no room: as disks fill."""
        calls.append(at)
        if len(calls) > 1:
            raise OSError(code, os.strerror(code))
        return real(fd, bytes(data[:100]), at)

    def unsure(fd):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as broken:
        broken.setattr(spools.os, where, short if where == "pwrite" else unsure)
        with pytest.raises(OSError, match=os.strerror(code)):
            writer.append(second, CaptureLedger(meter="m"), sync=True)
    assert path.stat().st_size == end == writer.size_bytes
    assert (writer.rows, writer.batches, writer.notes) == (2, 1, 0)
    writer.append(second, sync=True)
    writer.close()
    contents, batches = _read(path)
    assert batches == [first, second]
    assert contents.damaged == {}


def laid(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in (LOCK_FILE, *names):
        (folder / name).write_text(name)
    return folder


def test_what_the_dead_left_is_taken_back_and_the_living_keep_theirs(tmp_path: Path) -> None:
    dead = laid(tmp_path / "aside-1", "llmtap-1.spool", "llmtap-2.spool")
    living = laid(tmp_path / "aside-2", "llmtap-3.spool")
    odd = laid(tmp_path / "aside-3", "llmtap-4.spool", "of-somebody-else")
    held = os.open(living / LOCK_FILE, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        recover_aside_spools(tmp_path)
        assert {path.name for path in tmp_path.glob("*.spool")} == {
            "llmtap-1.spool",
            "llmtap-2.spool",
            "llmtap-4.spool",
        }
        assert not dead.exists()
        assert (living / "llmtap-3.spool").exists()
        assert {path.name for path in odd.iterdir()} == {LOCK_FILE, "of-somebody-else"}
    finally:
        os.close(held)
    recover_aside_spools(tmp_path)
    assert (tmp_path / "llmtap-3.spool").read_text() == "llmtap-3.spool"
    assert not living.exists()
