"""What counts for the bound, and goes at it: our files, by name, and nothing else in the folder."""

import os

import pytest

from llmtap.capture.store.finisher import LocalFiles

OLD, NEW = (f"llmtap-2023010{day}T000000000Z-c1-0001-00ff.parquet" for day in (1, 2))
OTHERS = ("llmtap-mine.parquet", f".{OLD}.tmp", "other.parquet", OLD.replace(".parquet", ".json"))


@pytest.fixture
def folder(tmp_path):
    for name in (NEW, OLD, *OTHERS):
        (tmp_path / name).write_bytes(b"12345")
    return tmp_path


def test_only_what_we_may_have_made_is_counted_and_deleted_the_oldest_first(folder):
    files = LocalFiles(folder, "c1")
    files.list_folder()
    assert files.total_bytes == 10
    assert files.delete_oldest()
    assert sorted(os.listdir(folder)) == sorted((NEW, *OTHERS))
    assert files.delete_oldest()
    assert not files.delete_oldest()
    assert sorted(os.listdir(folder)) == sorted(OTHERS)
    assert (files.total_bytes, files.deleted_files, files.deleted_rows) == (0, 2, 0), "no rows are in them"


def test_a_file_that_comes_while_somebody_looks_is_counted_once(folder, monkeypatch):
    files = LocalFiles(folder, "c1")
    late = NEW.replace("02T", "03T")
    real = os.scandir

    def slow(path):
        entries = real(path)
        (folder / late).write_bytes(b"1234567")
        files.add(late, 7)
        return entries

    with monkeypatch.context() as coming:
        coming.setattr(os, "scandir", slow)
        files.list_folder()
    assert files.total_bytes == 17
    files.list_folder()
    assert files.total_bytes == 17


@pytest.mark.parametrize("there", [True, False], ids=["gone", "remote"])
def test_without_a_local_folder_there_are_no_files(tmp_path, there):
    files = LocalFiles(tmp_path / "gone" if there else None, "c1")
    files.add(OLD, 5)
    files.list_folder()
    assert (files.total_bytes, files.delete_oldest()) == (0, False)
