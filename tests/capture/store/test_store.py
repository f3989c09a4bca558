import logging
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from llmtap.capture.schema import (
    VERSION,
    CaptureInfo,
    CaptureLedger,
    CaptureVersionError,
    RelayCount,
    info_of,
)
from llmtap.capture.store.finisher import Finisher
from llmtap.capture.store.spool import read_spool
from llmtap.capture.store.store import (
    Store,
    check_folders,
    spool_folder,
)
from llmtap.clock import ManualClock, SystemClock
from llmtap.errors import ConfigError
from tests.support.storage.stores import (
    INFO,
    NOTHING,
    append,
    fat,
    files_in,
    left_spool,
    no_room,
    numbers,
    options,
    store,
    thin,
)
from tests.support.waiting import block_until


def test_rows_become_a_file_that_says_whose_it_is(tmp_path):
    clock = ManualClock()
    at = store(tmp_path / "cap", clock)
    ledger = CaptureLedger({"r0": RelayCount(12, {"overflow": 2})}, {"memory": 1}, "m")
    append(at, thin(1), CaptureLedger({"r0": RelayCount(5)}))
    append(at, thin(6), ledger)
    assert (at.state().rows_written, numbers(tmp_path / "cap")) == (10, [])
    at.close(10)
    (path,) = files_in(tmp_path / "cap")
    assert path.name.startswith("llmtap-20231114T221320000Z-c1-0001-")
    assert numbers([path]) == list(range(1, 11))
    info = info_of(pq.read_schema(path))
    assert info == CaptureInfo(capture="c1", level="shape", began_ns=clock.wall_ns(), ledger=ledger)
    assert os.listdir(tmp_path / "cap" / ".spool") == ["llmtap.lock"]
    state = at.state()
    assert (state.files, state.files_waiting, state.spool_bytes, state.failures) == (1, 0, 0, 0)
    assert (state.problem, state.files_problem, state.recovered) == (None, None, 0)
    assert state.local_bytes == path.stat().st_size


def test_nobody_else_may_read_files_and_folders_that_we_made(tmp_path):
    at = store(tmp_path / "cap" / "deeper")
    append(at, thin(1))
    (spool,) = (tmp_path / "cap" / "deeper" / ".spool").glob("*.spool")
    assert stat.S_IMODE(spool.stat().st_mode) == 0o600
    at.close(10)
    (path,) = files_in(tmp_path / "cap" / "deeper")
    modes = {
        stat.S_IMODE(p.stat().st_mode) for p in (path.parent.parent, path.parent, path.parent / ".spool")
    }
    assert modes == {0o700}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_spool_becomes_a_file_by_size_and_by_age(tmp_path):
    clock = ManualClock()
    at = store(tmp_path, clock)
    sent = 0
    while at.state().files + at.state().files_waiting < 2:
        sent += 1
        append(at, fat(sent))
    assert 7 <= sent <= 14, "two of 64 KiB of rows of 10 to 20 KB"
    append(at, fat(sent + 1))
    clock.advance(options(tmp_path).rotate_every - 1)
    at.tick()
    assert at.state().spool_bytes > 0
    clock.advance(1)
    at.tick()
    block_until(lambda: at.state().files == 3)
    assert at.state().spool_bytes == 0
    assert numbers(tmp_path) == list(range(1, sent + 2))
    at.tick()
    at.close(10)
    assert len(files_in(tmp_path)) == 3


def test_names_are_sorted_by_time_and_never_used_twice(tmp_path):
    clock = ManualClock()
    names = []
    for run in range(2):
        at = store(tmp_path, clock)
        append(at, thin(10 * run))
        at.rotate()
        append(at, thin(10 * run + 5))
        at.close(10)
        names += [p.name for p in files_in(tmp_path) if p.name not in names]
        clock.advance(10_000_000)
    times = [name.split("-")[1] for name in names]
    assert (len(names), times) == (4, sorted(times))


def test_a_kill_between_the_file_and_the_end_of_its_spool_leaves_each_row_once(tmp_path):
    path = left_spool(tmp_path, "llmtap-20230101T000000000Z-c0-0001-0001.spool", [thin(1)])
    saved = path.read_bytes()
    store(tmp_path).close(10)
    assert not path.exists()
    path.write_bytes(saved)
    (tmp_path / f".{path.stem}.parquet.tmp").write_bytes(b"half a file")
    store(tmp_path).close(10)
    assert not path.exists()
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == [f"{path.stem}.parquet"]
    assert numbers(tmp_path) == [1, 2, 3, 4, 5]


def test_a_damaged_spool_gives_what_is_whole_and_its_file_says_what_is_not(tmp_path):
    path = left_spool(tmp_path, "llmtap-20230101T000000000Z-c0-0001-0001.spool", [thin(1), thin(6)])
    path.write_bytes(path.read_bytes()[:-7])
    at = store(tmp_path)
    at.close(10)
    (file,) = files_in(tmp_path)
    assert numbers([file]) == list(range(1, 6))
    assert info_of(pq.read_schema(file)).damaged.get("batches", 0) == 1 == at.state().damaged
    assert (at.state().recovered, path.exists()) == (5, False)


def test_a_spool_of_a_newer_tap_stays_and_the_others_are_finished(tmp_path, caplog):
    newer = left_spool(
        tmp_path,
        "llmtap-20230101T000000000Z-c0-0001-0001.spool",
        [thin(1)],
        CaptureInfo(schema_version=VERSION + 1),
    )
    left_spool(tmp_path, "llmtap-20230102T000000000Z-c0-0001-0001.spool", [thin(6)])
    before = newer.read_bytes()
    at = store(tmp_path)
    at.close(10)
    assert newer.read_bytes() == before
    assert numbers(tmp_path) == [6, 7, 8, 9, 10]
    assert at.state().files_waiting == 1
    assert at.state().spool_bytes == len(before)
    with pytest.raises(CaptureVersionError):
        read_spool(newer)
    assert f"event=capture_spool_left spool={newer}" in caplog.text


def test_a_ledger_without_rows_is_kept_where_it_tells_of_exchanges(tmp_path):
    nobody = thin(1, 0)
    at = store(tmp_path)
    append(at, nobody, CaptureLedger(meter="m"))
    at.rotate()
    block_until(lambda: at.state().files_waiting == 0)
    assert files_in(tmp_path) == [], "no exchange, nothing to tell"
    told = CaptureLedger({"r0": RelayCount(7, {"no_meter": 7})}, meter="m")
    append(at, nobody, told)
    at.rotate()
    append(at, nobody, told)
    at.close(10)
    (file,) = files_in(tmp_path)
    assert info_of(pq.read_schema(file)).ledger == told
    assert numbers([file]) == []


@pytest.mark.parametrize("policy, syncs", [("batch", 3 + 1), ("rotate", 1), ("never", 0)])
def test_the_disk_is_asked_as_often_as_the_policy_says(tmp_path, monkeypatch, policy, syncs):
    asked = []
    real = os.fdatasync

    def counted(fd):
        asked.append(fd)
        real(fd)

    at = store(tmp_path, fsync=policy)
    monkeypatch.setattr(os, "fdatasync", counted)
    for start in (1, 6, 11):
        append(at, thin(start))
    at.rotate()
    assert len(asked) == syncs
    at.close(10)
    assert numbers(tmp_path) == list(range(1, 16))


# ---------------------------------------------------------------- two taps, and bad folders at the start


def test_a_second_store_on_the_same_spool_is_told_and_may_follow(tmp_path):
    first = store(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    second = Store(options(tmp_path), INFO, SystemClock())
    for refused in (second.open, lambda: check_folders(options(tmp_path))):
        with pytest.raises(
            ConfigError, match=r"capture\.to: another llmtap process writes its capture into .*\.spool"
        ):
            refused()
    assert sorted(tmp_path.rglob("*")) == before
    append(first, thin(1))
    first.close(10)
    check_folders(options(tmp_path))
    second.open()
    append(second, thin(6))
    second.close(10)
    assert numbers(tmp_path) == list(range(1, 11))


def test_a_supervisor_may_look_at_settings_anew_while_its_own_meter_captures(tmp_path):
    imports = "import sys; from tests.support.storage.stores import store; "
    code = imports + "store(sys.argv[1]); print(flush=True); sys.stdin.read()"
    meter = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).resolve().parents[3],
    )
    try:
        assert meter.stdout.readline() == b"\n"
        check_folders(options(tmp_path))
        with pytest.raises(ConfigError, match="another llmtap process writes"):
            store(tmp_path)
    finally:
        meter.communicate(timeout=120)
    assert meter.returncode == 0
    store(tmp_path).close(10)


@pytest.mark.parametrize("key", ["to", "spool"])
def test_a_folder_that_cannot_be_is_told_at_the_start_by_key_path_and_reason(tmp_path, key):
    (tmp_path / "file").touch()
    bad = str(tmp_path / "file" / "in")
    chosen = options(tmp_path / "ok", spool=bad) if key == "spool" else options(bad)
    for refused in (lambda: check_folders(chosen), Store(chosen, INFO, SystemClock()).open):
        with pytest.raises(ConfigError) as caught:
            refused()
        assert caught.value.place == f"capture.{key}"
        assert bad in caught.value.problem
        assert "Not a directory" in caught.value.problem


def test_the_spool_of_a_remote_place_is_in_the_users_state_whatever_its_keys(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folders = [spool_folder(options(f"s3://{keys}bucket/p")) for keys in ("", "a:b@", "c:d@")]
    assert folders[1] == folders[2]
    assert folders[1].parent == tmp_path / "llmtap"
    assert folders[1].name.startswith("spool-")
    assert spool_folder(options("s3://bucket/other")) != folders[0]
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert spool_folder(options("s3://bucket/p")).parent == tmp_path / "home" / ".local" / "state" / "llmtap"


# ---------------------------------------------------------------- folders that vanish


def test_a_folder_removed_while_its_spool_is_written_costs_nothing(tmp_path, caplog):
    folder = tmp_path / "cap"
    at = store(folder)
    append(at, thin(1))
    shutil.rmtree(folder)
    append(at, thin(6))
    assert "event=capture_spool_restored" in caplog.text
    with pytest.raises(ConfigError, match="another llmtap"):
        store(folder)
    at.close(10)
    assert numbers(folder) == list(range(1, 11))


def test_a_folder_that_cannot_be_made_again_is_as_a_full_disk(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    folder = tmp_path / "cap"
    at = store(folder)
    append(at, thin(1))
    shutil.rmtree(folder)
    folder.touch()
    for _ in range(3):
        assert not at.append(thin(6), NOTHING)
        assert at.problem == at.state().problem == "folder"
    assert caplog.text.count("event=capture_paused problem=folder") == 1
    folder.unlink()
    append(at, thin(6))
    assert at.problem is None
    assert caplog.text.count("event=capture_resumed after=folder") == 1
    at.close(10)
    assert numbers(folder) == list(range(1, 11))
    assert at.state().rows_written == 10


# ---------------------------------------------------------------- what is said


def test_a_capture_in_full_that_redacts_nothing_is_warned_of(tmp_path, caplog):
    store(tmp_path / "a", level="full", full_tenants=("acme", "b*")).close(10)
    assert "capture_unredacted" not in caplog.text
    store(tmp_path / "b", level="full", full_tenants=("acme", "b*"), redact=()).close(10)
    assert "event=capture_unredacted tenants='acme,b*'" in caplog.text


# ---------------------------------------------------------------- the end


def test_what_is_not_finished_in_time_is_found_at_the_next_start(tmp_path, monkeypatch, caplog):
    at = store(tmp_path)
    append(at, thin(1))
    with monkeypatch.context() as failing:
        failing.setattr(Finisher, "_make_file", no_room)
        at.close(10)
    assert f"event=capture_files_left spools=1 spool={tmp_path}/.spool reason=" in caplog.text
    assert at.state().files_waiting == 1
    assert at.state().failures >= 1
    assert "No space" in at.state().files_problem
    assert files_in(tmp_path) == []
    after = store(tmp_path)
    after.close(10)
    assert numbers(tmp_path) == [1, 2, 3, 4, 5]
    assert after.state().recovered == 5
