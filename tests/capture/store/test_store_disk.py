"""A disk of 8 MB that fills up, and one that turns read-only: nothing that was taken is lost."""

import shutil
import subprocess

import pyarrow.parquet as pq
import pytest

from llmtap.capture.schema import CaptureLedger
from llmtap.capture.store import finisher
from llmtap.capture.store.store import check_folders
from llmtap.errors import ConfigError
from llmtap.units import Bytes
from tests.support.storage.stores import NOTHING, append, fat, numbers, options, store, thin
from tests.support.waiting import block_until

pytestmark = pytest.mark.machine
_MIB = 1 << 20


@pytest.fixture
def disk(tmp_path):
    """A file system of 8 MB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if shutil.which("mount") is None:
        pytest.skip("needs the program mount")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"needs root, to mount a tmpfs: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def _mode(disk, mode):
    subprocess.run(["mount", "-o", f"remount,{mode}", disk], check=True)


def _fill(path):
    """Take all the room there is."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue


def _whole(folder):
    """Every file that readers would find can be read."""
    for path in folder.glob("*.parquet"):
        pq.read_table(path)


@pytest.mark.parametrize("spool_open", [True, False], ids=["amid a spool", "between spools"])
def test_a_disk_that_others_fill_pauses_capture_until_there_is_room(disk, monkeypatch, spool_open):
    monkeypatch.setattr(finisher, "BACK_OFF_S_MAX", 0.1)
    folder = disk / "cap"
    at = store(folder)
    append(at, thin(1))
    if not spool_open:
        at.rotate()
        block_until(lambda: at.state().files == 1)
    _fill(disk / "filler")
    for _ in range(3):
        assert not at.append(fat(6), NOTHING)
        assert at.problem == "disk_full"
    assert not at.append(fat(6, n=0), CaptureLedger(meter="m")), "there is really no room"
    at.rotate()
    _whole(folder)
    (disk / "filler").unlink()
    append(at, fat(6))
    assert at.problem is None
    append(at, fat(7))
    at.close(10)
    _whole(folder)
    assert numbers(folder) == list(range(1, 8))
    assert at.state().rows_written == 7


def test_a_disk_that_we_fill_pauses_capture_and_every_row_taken_is_in_the_files(disk, tmp_path, monkeypatch):
    monkeypatch.setattr(finisher, "BACK_OFF_S_MAX", 0.1)
    folder, elsewhere = disk / "cap", tmp_path / "elsewhere"
    elsewhere.mkdir()
    at = store(folder, rotate_bytes=Bytes(_MIB))
    seq = 1
    for _ in range(2):
        while at.append(fat(seq, size=200_000), NOTHING):
            seq += 1
        assert at.problem == "disk_full"
        for lost in range(100):
            append(at, fat(seq, n=0), CaptureLedger(dropped={"disk_full": lost}))
            assert at.problem == "disk_full", "that a ledger has room says nothing of rows"
        _whole(folder)
        for path in sorted(folder.glob("*.parquet"))[:3]:
            shutil.move(path, elsewhere)
    assert seq > 80, "8 MB and three files more, at 100 KB a row"
    block_until(lambda: at.append(fat(seq, size=200_000), NOTHING))
    at.close(10)
    _whole(folder)
    assert numbers([*folder.glob("*.parquet"), *elsewhere.iterdir()]) == list(range(1, seq + 1))
    assert at.state().files_waiting == 0


def test_a_full_disk_at_the_start_is_no_error_of_the_user(disk):
    (disk / "cap" / ".spool").mkdir(parents=True)
    _fill(disk / "filler")
    check_folders(options(disk / "cap"))
    at = store(disk / "cap")
    assert not at.append(thin(1), NOTHING)
    assert at.problem == "disk_full"
    (disk / "filler").unlink()
    append(at, thin(1))
    at.close(10)
    assert numbers(disk / "cap") == [1, 2, 3, 4, 5]


def test_a_read_only_folder_is_told_at_the_start(disk):
    _mode(disk, "ro")
    for refused in (lambda: check_folders(options(disk / "cap")), lambda: store(disk / "cap")):
        with pytest.raises(ConfigError, match="Read-only file system") as caught:
            refused()
        assert caught.value.place == "capture.to"
        assert str(disk / "cap") in caught.value.problem
