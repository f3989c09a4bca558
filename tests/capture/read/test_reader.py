import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmtap.capture.read.reader import CaptureError, read
from llmtap.capture.schema import META_KEY, SCHEMA, VERSION, CaptureInfo, CaptureVersionError
from tests.support.storage.captures import ledger, write_capture
from tests.support.traffic.exchanges import streamed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_capture(tmp_path / "llmtap-2.parquet", [streamed(3)], began_ns=20, ledger=ledger(3))
    write_capture(tmp_path / "llmtap-1.parquet", [streamed(1), streamed(2)], began_ns=10, ledger=ledger(2))
    write_capture(tmp_path / ".spool" / "llmtap-0.parquet", [streamed(98)])
    write_capture(tmp_path / ".llmtap-9.parquet", [streamed(99)])
    (tmp_path / "notes.txt").write_text("not a file of ours")
    return tmp_path


def seqs(where: Any, **options: Any) -> list[int]:
    found: list[int] = read(where, **options).table(["seq"])["seq"].to_pylist()
    return found


# ---------------------------------------------------------------- what is found


def test_a_folder_is_read_in_the_order_of_its_names_without_what_is_hidden(folder: Path) -> None:
    assert seqs(folder) == [1, 2, 3]
    assert seqs(str(folder)) == [1, 2, 3]


def test_a_file_and_several_places_are_read(folder: Path) -> None:
    assert seqs(folder / "llmtap-2.parquet") == [3]
    assert seqs([folder / "llmtap-2.parquet", str(folder / "llmtap-1.parquet")]) == [3, 1, 2]
    assert seqs([folder / "llmtap-2.parquet", folder]) == [3, 1, 2]  # each file once
    (folder / "llmtap-2.parquet").rename(folder / "odd[1].parquet")
    assert seqs(folder / "odd[1].parquet") == [3]


def test_only_where_no_name_is_ours_other_names_are_read(folder: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1]}), folder / "somebody-else.parquet")
    assert seqs(folder) == [1, 2, 3]
    write_capture(tmp_path / "sub" / "trace.parquet", [streamed(7)])
    assert seqs(tmp_path / "sub") == [7]


def test_a_url_of_a_local_folder_is_read(folder: Path) -> None:
    assert seqs(folder.as_uri()) == [1, 2, 3]
    assert [file.name for file in read(folder.as_uri()).files] == [
        f"{(folder / name).as_uri()}" for name in ("llmtap-1.parquet", "llmtap-2.parquet")
    ]


# ---------------------------------------------------------------- what a capture is


def test_a_capture_tells_what_it_is(folder: Path) -> None:
    capture = read(folder)
    assert len(capture) == 3
    assert repr(capture).startswith("<Capture 3 exchanges, 2 files, ")
    assert repr(capture).endswith(", level shape>")
    assert [(Path(f.name).name, f.rows, f.info.began_ns) for f in capture.files] == [
        ("llmtap-1.parquet", 2, 10),
        ("llmtap-2.parquet", 1, 20),
    ]
    info = capture.info
    assert (info.capture, info.level, info.tap_version, info.began_ns) == ("c1", "shape", "0.1.0", 10)
    assert info.ledger.relays["run.0.1"].opened == 3


def test_what_files_do_not_agree_on_is_not_said_of_them_together(tmp_path: Path) -> None:
    write_capture(tmp_path / "1.parquet", [streamed(1)], level="none", damaged={"batches": 1}, capture="a")
    write_capture(tmp_path / "2.parquet", [streamed(1)], level="full", damaged={"batches": 2}, capture="b")
    write_capture(tmp_path / "3.parquet", [streamed(1)], arrivals="trace", source="mooncake")
    info = read(tmp_path).info
    assert (info.level, info.capture, info.arrivals, info.source) == ("full", "", "", "")
    assert (info.blocks, info.damaged) == ("salted", {"batches": 3})


def test_columns_come_as_they_are_asked_for(folder: Path) -> None:
    capture = read(folder)
    table = capture.table(["tenant", "event_us", "seq"])
    assert table.column_names == ["tenant", "event_us", "seq"]
    assert table["event_us"][0].as_py() == [100_000, 120_000, 140_000, 141_000]
    assert capture.table().schema.equals(SCHEMA)
    with pytest.raises(CaptureError, match="column tenantt"):
        capture.table(["tenantt"])


def test_batches_are_small_and_come_again_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmtap.capture.read.reader._BATCH_BYTES", 1 << 20)
    file = write_capture(tmp_path / "llmtap-1.parquet", [streamed(i, words=100) for i in range(1, 601)])
    capture = read(file)
    sizes = [batch.num_rows for batch in capture.batches()]
    assert sum(sizes) == 600
    assert max(batch.nbytes for batch in capture.batches()) < 2 << 20
    assert len(sizes) > 1
    assert sum(1 for _ in capture.exchanges()) == 600


def test_a_column_that_a_file_lacks_is_null(tmp_path: Path) -> None:
    file = write_capture(tmp_path / "llmtap-1.parquet", [streamed(1)])
    pq.write_table(pq.read_table(file).drop_columns(["turn", "event_flags"]), file)
    assert read(file).table(["turn", "seq"]).to_pylist() == [{"turn": None, "seq": 1}]
    (x,) = read(file).exchanges()
    assert list(x.timeline.events.flags) == [0, 0, 0, 0]


# ---------------------------------------------------------------- what goes wrong


def of_version(version: int) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        meta = {META_KEY: msgspec.json.encode(CaptureInfo(schema_version=version))}
        pq.write_table(pq.read_table(file).replace_schema_metadata(meta), file)

    return change


def replaced(data: bytes) -> Callable[[Path], None]:
    return lambda file: file.write_bytes(data) and None


def other_table(meta: dict[bytes, bytes] | None) -> Callable[[Path], None]:
    return lambda file: pq.write_table(pa.table({"x": [1]}).replace_schema_metadata(meta), file)


BROKEN = [
    (replaced(b"\n"), "cannot be read as Parquet"),
    (replaced(b"PAR1" * 99), "cannot be read as Parquet"),
    (other_table(None), "not a capture of llmtap"),
    (other_table({META_KEY: b"{"}), "invalid llmtap metadata"),
    (other_table({META_KEY: b'{"level":7}'}), "invalid llmtap metadata"),
]


@pytest.mark.parametrize(("spoil", "problem"), BROKEN)
def test_a_broken_file_is_named_and_passed_over_only_when_asked(
    folder: Path, spoil: Callable[[Path], None], problem: str
) -> None:
    spoil(folder / "llmtap-1.parquet")
    with pytest.raises(CaptureError, match=problem) as error:
        read(folder)
    assert error.value.place == str(folder / "llmtap-1.parquet")
    capture = read(folder, skip_broken=True)
    assert seqs(folder, skip_broken=True) == [3]
    ((name, why),) = capture.broken
    assert name.endswith("llmtap-1.parquet")
    assert problem in why
    assert "1 broken" in repr(capture)
    assert not capture.integrity().ok


def test_damage_inside_of_a_file_is_named_where_it_is_met(folder: Path) -> None:
    file = folder / "llmtap-1.parquet"
    data = bytearray(file.read_bytes())
    data[200:2_000] = b"\xff" * 1_800
    file.write_bytes(data)
    capture = read(folder)
    with pytest.raises(CaptureError, match=r"llmtap-1\.parquet: is damaged"):
        list(capture.exchanges())
    capture = read(folder, skip_broken=True)
    assert [x.seq for x in capture.exchanges()] == [3]
    assert [Path(name).name for name, _ in capture.broken] == ["llmtap-1.parquet"]
    list(capture.exchanges())
    assert len(capture.broken) == 1  # told once


def test_a_later_version_is_refused_and_an_earlier_one_is_read(folder: Path) -> None:
    of_version(VERSION - 1)(folder / "llmtap-2.parquet")
    assert seqs(folder / "llmtap-2.parquet") == [3]
    of_version(VERSION + 1)(folder / "llmtap-2.parquet")
    with pytest.raises(CaptureVersionError, match=r"llmtap-2\.parquet: has schema version 2"):
        read(folder)


@pytest.mark.parametrize(
    ("where", "problem"),
    [("missing", "does not exist"), ("*.parquet", "does not exist"), (".", "no Parquet file")],
)
def test_where_nothing_is_the_error_says_where(tmp_path: Path, where: str, problem: str) -> None:
    with pytest.raises(CaptureError, match=problem) as error:
        read(tmp_path / where)
    assert str(tmp_path) in error.value.place


def test_a_url_that_cannot_be_is_an_error_without_its_keys() -> None:
    with pytest.raises(CaptureError, match="not a URL that llmtap can read") as error:
        read("ftp://user:s3cr3t@host/captures")
    assert "s3cr3t" not in str(error.value)
    with pytest.raises(CaptureError, match="no file, folder or URL to read"):
        read([])


# ---------------------------------------------------------------- the package


def test_arrow_is_imported_by_those_only_who_need_it() -> None:
    modules = "llmtap, llmtap.vantage.relay.relay, llmtap.cli.main, llmtap.cli.report"
    code = f"import sys, {modules}; sys.exit('pyarrow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
