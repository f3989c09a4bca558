"""Spools of a meter that drains beside its successor: untouched while it lives, and not lost when it dies."""

import fcntl
import os
from pathlib import Path

from llmtap.capture.options import CaptureOptions
from llmtap.capture.store.aside import LOCK, aside_of, clear, take_back
from llmtap.capture.store.store import spool_folder


def laid(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in (LOCK, *names):
        (folder / name).write_text(name)
    return folder


def test_it_is_the_same_capture_in_a_folder_beside(tmp_path: Path) -> None:
    options = CaptureOptions(to=str(tmp_path / "kept"), level="none")
    aside = aside_of(options, spool_folder(options), 7)
    assert spool_folder(aside) == tmp_path / "kept/.spool/aside-7"
    assert (aside.to, aside.level) == (options.to, options.level)


def test_what_the_dead_left_is_taken_back_and_the_living_keep_theirs(tmp_path: Path) -> None:
    dead = laid(tmp_path / "aside-1", "llmtap-1.spool", "llmtap-2.spool")
    living = laid(tmp_path / "aside-2", "llmtap-3.spool")
    odd = laid(tmp_path / "aside-3", "llmtap-4.spool", "of-somebody-else")
    held = os.open(living / LOCK, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        take_back(tmp_path)
        assert {path.name for path in tmp_path.glob("*.spool")} == {
            "llmtap-1.spool", "llmtap-2.spool", "llmtap-4.spool",
        }  # fmt: skip
        assert not dead.exists()
        assert (living / "llmtap-3.spool").exists()
        assert {path.name for path in odd.iterdir()} == {LOCK, "of-somebody-else"}
    finally:
        os.close(held)
    take_back(tmp_path)
    assert (tmp_path / "llmtap-3.spool").read_text() == "llmtap-3.spool"
    assert not living.exists()


def test_a_folder_goes_only_when_nothing_is_left_in_it(tmp_path: Path) -> None:
    full = laid(tmp_path / "aside-1", "llmtap-1.spool")
    clear(full)
    assert (full / "llmtap-1.spool").exists()
    (full / "llmtap-1.spool").unlink()
    clear(full)
    assert not full.exists()
    clear(full)  # nobody minds
