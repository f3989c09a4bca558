"""A capture survives being read and written as a format, whole or in pieces; what is none is told."""

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap import __version__
from llmtap.capture.read.reader import CaptureError
from llmtap.capture.read.reader import read as open_capture
from llmtap.capture.schema import SCHEMA, VERSION, CaptureInfo, CaptureLedger, RelayCount
from llmtap.capture.store.parquet import write_parquet
from llmtap.traces.format import FormatError, TraceSource, batch_of
from llmtap.traces.formats.parquet_capture import FORMAT, read_files

read, write = FORMAT.read, FORMAT.write

INFO = CaptureInfo(level="shape", source="mooncake", arrivals="trace")


def rows_of(source: TraceSource) -> list[dict[str, Any]]:
    batches = list(source.batches)
    assert all(batch.schema.equals(SCHEMA) for batch in batches)
    return [row for batch in batches for row in batch.to_pylist()]


def written(*batches: pa.RecordBatch, info: CaptureInfo = INFO) -> bytes:
    out = io.BytesIO()
    result = write(out, info, iter(batches))
    assert result.rows == sum(batch.num_rows for batch in batches)
    return out.getvalue()


@given(
    st.lists(
        st.lists(
            st.tuples(
                st.integers(-(1 << 60), 1 << 60),
                st.none() | st.text(st.characters(codec="utf-8")),
                st.none() | st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=3),
            ),
            max_size=4,
        ),
        max_size=4,
    )
)
def test_rows_survive(parts: list[list[tuple[int, str | None, list[int] | None]]]) -> None:
    batches = [
        batch_of(
            len(part),
            {
                "arrival_ns": [row[0] for row in part],
                "model": [row[1] for row in part],
                "blocks": [row[2] for row in part],
            },
        )
        for part in parts
    ]
    source = read(io.BytesIO(written(*batches)))
    assert rows_of(source) == [row for batch in batches for row in batch.to_pylist()]
    assert (source.info.source, source.info.arrivals) == ("mooncake", "trace")
    assert (source.info.schema_version, source.info.tap_version) == (VERSION, __version__)


@pytest.mark.parametrize("cut", [0, 100, -1])
def test_a_torn_file_is_told(cut: int) -> None:
    data = written(batch_of(1, {"arrival_ns": [1]}))
    with pytest.raises(FormatError, match="cannot be read as Parquet"):
        read(io.BytesIO(data[:cut]))


def test_many_files_follow_each_other(tmp_path: Path) -> None:
    for i, level in enumerate(("none", "full", "shape")):
        info = CaptureInfo(level=level, capture="c", source="mooncake" if i else "azure")
        (tmp_path / f"llmtap-{i}.parquet").write_bytes(written(batch_of(1, {"arrival_ns": [i]}), info=info))
    (tmp_path / ".spool").mkdir()
    (tmp_path / ".spool" / "llmtap-9.parquet").write_bytes(b"not yet")
    source, size = read_files(str(tmp_path))
    assert [row["arrival_ns"] for row in rows_of(source)] == [0, 1, 2]
    assert (source.info.level, source.info.capture, source.info.source) == ("full", "c", "")
    assert size == sum(path.stat().st_size for path in tmp_path.glob("*.parquet"))


def test_many_files_that_do_not_fit_together_are_told(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="no Parquet file"):
        read_files(str(tmp_path))
    for name in ("wall", "trace"):
        info = CaptureInfo(arrivals=name)
        (tmp_path / f"{name}.parquet").write_bytes(written(batch_of(1, {}), info=info))
    with pytest.raises(FormatError, match="convert them separately"):
        read_files(str(tmp_path))
    newer = tmp_path / "newer"
    newer.mkdir()
    write_parquet(newer / "a.parquet", CaptureInfo(schema_version=VERSION + 1), [batch_of(1, {})])
    with pytest.raises(FormatError, match="schema version"):
        read_files(str(newer))


def capture(folder: Path, name: str, numbers: list[int], opened: int) -> None:
    """One file, whose relay says that it began `opened` exchanges, and dropped what is not there."""
    n = len(numbers)
    batch = batch_of(n, {"capture": [name] * n, "relay": ["r0"] * n, "seq": numbers, "arrival_ns": numbers})
    ledger = CaptureLedger({"r0": RelayCount(opened, {"queue": opened - n})}, meter=f"m-{name}", closed=True)
    write_parquet(folder / f"llmtap-{name}.parquet", CaptureInfo(capture=name, ledger=ledger), [batch])


def converted(where: Path, target: Path) -> list[str]:
    source, _ = read_files(str(where))
    with target.open("wb") as out:
        return write(out, source.info, source.batches).notes


def test_of_one_capture_the_integrity_is_what_it_was(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    capture(tmp_path / "in", "a", [1, 2, 5], 7)
    before = open_capture(tmp_path / "in").integrity()
    assert (before.ok, before.captures[0].missing) == (True, 4)
    assert converted(tmp_path / "in", tmp_path / "one.parquet") == []
    assert open_capture(tmp_path / "one.parquet").integrity() == before


def test_of_several_captures_in_one_file_nothing_is_told_that_is_not_so(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    capture(tmp_path / "in", "a", [1, 2, 5], 7)
    capture(tmp_path / "in", "b", [2, 3], 900)
    notes = converted(tmp_path / "in", tmp_path / "both.parquet")
    assert len(notes) == 1
    assert notes[0].startswith("5 rows are of several captures, or came without a ledger: ")
    result = open_capture(tmp_path / "both.parquet").integrity()
    assert (result.ok, result.captures, result.unnumbered) == (True, [], 5)
    table = open_capture(tmp_path / "both.parquet").table(["capture", "seq"]).to_pylist()
    assert [(row["capture"], row["seq"]) for row in table] == [
        ("a", 1),
        ("a", 2),
        ("a", 5),
        ("b", 2),
        ("b", 3),
    ]


def test_it_is_told_how_much_of_many_files_is_read(tmp_path: Path) -> None:
    for name in "ab":
        capture(tmp_path, name, [1, 2], 2)
    seen: list[tuple[int, int | None]] = []
    source, size = read_files(str(tmp_path), lambda done, total: seen.append((done, total)))
    assert len(list(source.batches)) == 2
    assert seen == [(size // 2, size), (size, size)]


@pytest.mark.parametrize("name", ["input_tokens", "output_tokens"])
def test_a_negative_count_is_refused(name: str) -> None:
    source = read(io.BytesIO(written(batch_of(2, {"arrival_ns": [0, 1], name: [1, -5]}))))
    with pytest.raises(FormatError, match=f"the column {name} has a negative value"):
        rows_of(source)
