"""A running capture is read with what is in its spool, each row once, whatever becomes of it meanwhile."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from llmtap.capture.read import reader
from llmtap.capture.read.reader import Capture, CaptureError, read
from llmtap.capture.schema import CaptureLedger, RelayCount
from llmtap.capture.store.finisher import ClosedSpool, Finisher
from llmtap.capture.store.parquet import LocalPlace
from llmtap.capture.store.rows import to_batch
from llmtap.capture.store.spool import SpoolWriter
from llmtap.capture.store.store import Store
from tests.support.storage import capture_rows
from tests.support.storage.stores import INFO, append, store
from tests.support.traffic.exchanges import streamed
from tests.support.waiting import block_until

NAME = "llmtap-20260101T000000000Z-c1-{:04d}-0000"


def seqs(capture: Capture) -> list[int]:
    found: list[int] = capture.table(["seq"])["seq"].to_pylist()
    return found


def batch(*numbers: int) -> pa.RecordBatch:
    made, failed = to_batch([streamed(n) for n in numbers], capture="c1", level="shape")
    assert not failed
    return made


def lay(folder: Path, number: int, *starts: int, ledger: CaptureLedger | None = None) -> Path:
    """A spool of three rows from each of these numbers on."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = SpoolWriter(folder / (NAME.format(number) + ".spool"), INFO)
    for start in starts:
        writer.append(capture_rows.batch(3, start, start=start), ledger)
    writer.close()
    return writer.path


def finish(spool: Path, folder: Path) -> Path:
    """What the finisher makes of a spool."""
    finisher = Finisher(LocalPlace(folder), spool.parent, lambda name, size: None)
    finisher.add(ClosedSpool(spool, spool.stat().st_size))
    finisher.start()
    assert finisher.close(30)
    assert not spool.exists()
    return folder / f"{spool.stem}.parquet"


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Store]:
    at = store(tmp_path / "cap")
    yield at
    at.close(30)


def test_a_running_capture_is_read_with_what_was_written_a_moment_ago(running: Store, tmp_path: Path) -> None:
    folder = tmp_path / "cap"
    with pytest.raises(CaptureError, match="has no Parquet file, and its spool is empty"):
        read(folder)
    append(running, batch(1, 2, 3), CaptureLedger({"run.0.1": RelayCount(4, unsettled=1)}, {}, "m"))
    capture = read(folder)
    assert seqs(capture) == [1, 2, 3]
    assert (len(capture), [file.spool for file in capture.files]) == (3, [True])
    assert repr(capture).startswith("<Capture 3 exchanges, 1 files (1 in the spool), ")
    assert capture.info.ledger.relays["run.0.1"] == RelayCount(4, unsettled=1)
    running.rotate()
    block_until(lambda: running.state().files == 1)
    append(running, batch(4, 5), CaptureLedger({"run.0.1": RelayCount(5)}, {}, "m"))
    capture = read(folder)
    assert [file.spool for file in capture.files] == [False, True]
    assert seqs(capture) == [1, 2, 3, 4, 5]
    assert [x.seq for x in capture.exchanges()] == [1, 2, 3, 4, 5]
    checked = capture.integrity()
    assert (checked.ok, checked.captures[0].present, checked.captures[0].missing) == (True, 5, 0)
    assert read(folder.as_uri()).table().equals(capture.table())


def test_a_spool_that_is_a_file_already_is_not_read_again(tmp_path: Path) -> None:
    spool = lay(tmp_path / ".spool", 1, 1, 4)
    kept = spool.read_bytes()
    finish(spool, tmp_path)
    spool.write_bytes(kept)  # a kill between the two
    assert seqs(read(tmp_path)) == [1, 2, 3, 4, 5, 6]
    assert [file.spool for file in read([tmp_path / ".spool", tmp_path]).files] == [False]


def test_what_was_read_stays_the_same_when_its_spool_becomes_a_file(tmp_path: Path) -> None:
    spool = lay(tmp_path / ".spool", 1, 1, 4)
    capture = read(tmp_path)
    before = capture.table()
    writer = SpoolWriter(tmp_path / "again.spool", INFO)
    for start in (1, 4, 7):  # as if it had been written to until then
        writer.append(capture_rows.batch(3, start, start=start))
    writer.close()
    os.replace(writer.path, spool)
    finish(spool, tmp_path)
    assert capture.table().equals(before)
    assert seqs(capture) == [1, 2, 3, 4, 5, 6]
    assert len(seqs(read(tmp_path))) == 9


@pytest.mark.parametrize("when", ["first listed", "opened"])
def test_a_spool_that_becomes_a_file_while_it_is_looked_for_is_read_once(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is listed first: between the two listings, and between finding and opening."""
    spool = lay(tmp_path / ".spool", 1, 1, 4)
    name = "_entries_at" if when == "first listed" else "_open_spool"
    real = getattr(reader, name)
    finished: list[Path] = []

    def meanwhile(*args: Any, **options: Any) -> Any:
        if when == "opened" and not finished:
            finished.append(finish(spool, tmp_path))
        out = real(*args, **options)
        if not finished:
            finished.append(finish(spool, tmp_path))
        return out

    monkeypatch.setattr(reader, name, meanwhile)
    capture = read(tmp_path)
    assert seqs(capture) == [1, 2, 3, 4, 5, 6]
    assert [file.name for file in capture.files] == [str(path) for path in finished]


def test_a_spool_that_goes_for_good_is_named(tmp_path: Path) -> None:
    spool = lay(tmp_path / ".spool", 1, 1)
    capture = read(tmp_path)
    skipping = read(tmp_path, skip_broken=True)
    spool.unlink()
    with pytest.raises(CaptureError, match=r"-0001-0000\.spool: was moved"):
        seqs(capture)
    assert seqs(skipping) == []
    assert [name for name, _ in skipping.broken] == [str(spool)]


def test_spools_and_their_folder_may_be_named_themselves(tmp_path: Path) -> None:
    """As where `capture.spool` is set, or the capture goes to an object store."""
    elsewhere = tmp_path / "state" / "spool-1234"
    first, second = lay(elsewhere, 1, 1), lay(elsewhere, 2, 4)
    assert seqs(read(elsewhere)) == [1, 2, 3, 4, 5, 6]
    assert seqs(read(second)) == [4, 5, 6]
    (tmp_path / "cap").mkdir()
    kept = first.read_bytes()
    finish(first, tmp_path / "cap")
    first.write_bytes(kept)
    assert seqs(read([tmp_path / "cap", elsewhere])) == [1, 2, 3, 4, 5, 6]


def test_of_a_torn_spool_all_that_is_whole_is_read_and_the_rest_is_counted(tmp_path: Path) -> None:
    spool = lay(tmp_path / ".spool", 1, 1, 4)
    spool.write_bytes(spool.read_bytes()[:-3])
    capture = read(tmp_path)
    assert seqs(capture) == [1, 2, 3]
    assert capture.info.damaged["batches"] == 1


def test_while_spools_become_files_no_row_is_missed_or_there_twice(tmp_path: Path) -> None:
    lay(tmp_path / "cap" / ".spool", 0, 0)
    running = store(tmp_path / "cap")
    written, stop = [3], threading.Event()

    def write() -> None:
        try:
            for start in range(3, 123, 3):
                append(running, capture_rows.batch(3, 0, start=start, tokens=2))
                written[0] = start + 3
                running.rotate()
        finally:
            stop.set()

    thread = threading.Thread(target=write)
    thread.start()
    reads = 0
    while not stop.is_set() or not reads:
        least = written[0]
        capture = read(tmp_path / "cap")
        found = sorted(seqs(capture))
        assert found == list(range(len(found)))
        assert len(found) >= least
        assert len(found) == len(capture)
        reads += 1
    thread.join()
    running.close(30)
    assert sorted(seqs(read(tmp_path / "cap"))) == list(range(123))
