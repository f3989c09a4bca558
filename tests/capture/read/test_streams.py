import gzip
import os
import random
import stat
import threading
from pathlib import Path

import pytest
import zstandard

from llmtap.capture.read.streams import new_file, open_input
from llmtap.errors import ConfigError

DATA = random.Random(1).randbytes(200_000) + b"text\n" * 200_000
PACKED = {"": DATA, ".gz": gzip.compress(DATA), ".zst": zstandard.compress(DATA)}


@pytest.mark.parametrize("ending", PACKED)
def test_what_is_compressed_is_undone_and_counted_as_it_lies(ending: str, tmp_path: Path) -> None:
    path = tmp_path / "no-ending-tells"
    path.write_bytes(PACKED[ending])
    told: list[tuple[int, int | None]] = []
    with open_input(str(path), 1_000, lambda done, total: told.append((done, total))) as file:
        assert file.head == DATA[:1_000]
        assert file.stream.read() == DATA
        assert file.seekable == (not ending)
        assert file.size == len(PACKED[ending])
    assert told[-1] == (len(PACKED[ending]), len(PACKED[ending]))
    assert [done for done, _ in told] == sorted(done for done, _ in told)


@pytest.mark.parametrize("ending", PACKED)
def test_a_pipe_is_read_from_its_beginning(ending: str, tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)

    def feed() -> None:
        with path.open("wb", buffering=0) as out:
            data = PACKED[ending]
            for at in range(0, len(data), 50_000):
                out.write(data[at : at + 50_000])

    feeder = threading.Thread(target=feed)
    feeder.start()
    with open_input(str(path), 100_000) as file:
        assert file.head == DATA[:100_000]
        assert file.stream.read() == DATA
        assert file.size == len(PACKED[ending])
        assert not file.seekable
    feeder.join()


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_stream_that_was_cut_off_is_an_error(ending: str, tmp_path: Path) -> None:
    path = tmp_path / "cut"
    path.write_bytes(PACKED[ending][:-9])
    with open_input(str(path), 100) as file, pytest.raises(OSError, match="Truncated"):
        file.stream.read()


def test_members_one_after_another_are_one_file(tmp_path: Path) -> None:
    path = tmp_path / "two"
    path.write_bytes(gzip.compress(b"a\n") + gzip.compress(b"b\n"))
    with open_input(str(path), 100) as file:
        assert file.stream.read() == b"a\nb\n"


@pytest.mark.parametrize("ending", PACKED)
def test_a_new_file_is_there_when_it_is_whole(ending: str, tmp_path: Path) -> None:
    target = tmp_path / f"out{ending}"
    with new_file(str(target), replace=False) as out:
        out.stream.write(DATA)
        assert not target.exists()
    assert out.bytes_written == target.stat().st_size
    with open_input(str(target), 10) as file:
        assert file.stream.read() == DATA
    assert (target.read_bytes() == DATA) == (not ending)
    assert os.listdir(tmp_path) == [target.name]


@pytest.mark.parametrize("end", [RuntimeError, KeyboardInterrupt, SystemExit, OSError])
def test_whatever_goes_wrong_nothing_half_is_left(end: type[BaseException], tmp_path: Path) -> None:
    target = tmp_path / "out.gz"
    with pytest.raises(end), new_file(str(target), replace=False) as out:
        out.stream.write(DATA)
        raise end
    assert os.listdir(tmp_path) == []
    target.write_bytes(b"old")
    with pytest.raises(end), new_file(str(target), replace=True) as out:
        out.stream.write(DATA)
        raise end
    assert os.listdir(tmp_path) == ["out.gz"]
    assert target.read_bytes() == b"old"


def test_what_is_there_is_replaced_only_when_asked(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.write_bytes(b"old")
    with (
        pytest.raises(ConfigError, match="already exists\nhint: to replace the file, use --force"),
        new_file(str(target), replace=False),
    ):
        pytest.fail("it is told before anything is written")
    with new_file(str(target), replace=True) as out:
        out.stream.write(b"new")
    assert target.read_bytes() == b"new"
    with pytest.raises(ConfigError, match="is a folder"), new_file(str(tmp_path), replace=True):
        pytest.fail("it is told before anything is written")


def test_a_file_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with pytest.raises(ConfigError, match="already exists"), new_file(str(target), replace=False) as out:
        out.stream.write(b"new")
        target.write_bytes(b"somebody else's")
    assert target.read_bytes() == b"somebody else's"
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("ending", PACKED)
def test_a_new_file_is_its_owners_alone_and_another_keeps_its_mode(ending: str, tmp_path: Path) -> None:
    target = tmp_path / f"out{ending}"
    for before, after in ((None, 0o600), (0o644, 0o644), (0o640, 0o640)):
        if before is not None:
            target.chmod(before)
        with new_file(str(target), replace=True) as out:
            parts = [path for path in tmp_path.iterdir() if path.suffix == ".part"]
            assert [stat.S_IMODE(part.stat().st_mode) for part in parts] == [after]
            out.stream.write(b"x")
        assert stat.S_IMODE(target.stat().st_mode) == after


def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with (
        pytest.raises(ConfigError, match="is not a regular file\nhint: to write"),
        new_file(str(pipe), replace=True),
    ):
        pytest.fail("it is told before anything is written")
    assert stat.S_ISFIFO(pipe.stat().st_mode)
