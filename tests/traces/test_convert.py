"""What a conversion keeps is there afterwards, what it loses is told; a target is whole or not there."""

import errno
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmtap.capture.schema import SCHEMA, CaptureInfo
from llmtap.capture.store.parquet import write_parquet
from llmtap.errors import ConfigError
from llmtap.traces import registry
from llmtap.traces.convert import Report, convert
from llmtap.traces.format import ASPECTS, FormatError, TraceWriter, batch_of, count_rows_with
from tests.support.storage import capture_rows

MOONCAKE = b"".join(
    b'{"timestamp": %d, "input_length": %d, "output_length": %d, "hash_ids": [%d]}\n'
    % (i * 3_000, 10 + i, 5, i)
    for i in range(50)
)
AZURE = b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"


def put(folder: Path, name: str, data: bytes) -> str:
    path = folder / name
    path.write_bytes(data)
    return str(path)


def fates(report: Report) -> dict[str, tuple[int, str]]:
    return {a.name: (a.rows, a.fate) for a in report.aspects if a.fate != "absent"}


def test_there_and_back_it_is_the_same_file(tmp_path: Path) -> None:
    first = put(tmp_path, "a.jsonl", MOONCAKE)
    there = convert(first, str(tmp_path / "a.parquet"))
    back = convert(str(tmp_path / "a.parquet"), str(tmp_path / "b.jsonl"), target_format="mooncake")
    assert (tmp_path / "b.jsonl").read_bytes() == MOONCAKE
    assert (there.source_format, there.target_format, back.source_format) == ("mooncake", "llmtap", "llmtap")
    assert (there.rows_read, there.rows_written, back.rows_written) == (50, 50, 50)
    assert there.bytes_in == back.bytes_out == len(MOONCAKE)
    assert there.bytes_out == back.bytes_in == (tmp_path / "a.parquet").stat().st_size
    assert (
        fates(there)
        == fates(back)
        == dict.fromkeys(("arrival", "input tokens", "output tokens", "prefix blocks"), (50, "kept"))
    )
    assert there.seconds > 0


def test_a_target_that_needs_what_the_format_never_holds_is_refused_at_once(tmp_path: Path) -> None:
    source, target = put(tmp_path, "a.jsonl", MOONCAKE), tmp_path / "b.json"
    with pytest.raises(
        ConfigError, match=r"^--to: sharegpt requires request body, which mooncake does not contain\nhint: "
    ):
        convert(source, str(target), target_format="sharegpt")
    convert(source, str(tmp_path / "c.parquet"))
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ConfigError, match=r"sharegpt needs request body, and no row of .*c\.parquet has it"):
        convert(str(tmp_path / "c.parquet"), str(target), target_format="sharegpt")
    assert sorted(os.listdir(tmp_path)) == before


def test_a_folder_is_a_capture(tmp_path: Path) -> None:
    folder = tmp_path / "capture"
    folder.mkdir()
    for i in range(3):
        convert(put(tmp_path, "a.jsonl", MOONCAKE), str(folder / f"{i}.parquet"))
    report = convert(str(folder), str(tmp_path / "all.jsonl"), target_format="mooncake")
    assert (report.rows_read, report.source_format) == (150, "llmtap")
    assert report.bytes_in == sum(path.stat().st_size for path in folder.iterdir())
    with pytest.raises(ConfigError, match="a folder or URL can only be read as llmtap"):
        convert(str(folder), str(tmp_path / "x.parquet"), source_format="azure")


def test_a_compressed_capture_is_read_from_its_end(tmp_path: Path) -> None:
    convert(put(tmp_path, "a.jsonl", MOONCAKE), str(tmp_path / "a.parquet.gz"))
    convert(str(tmp_path / "a.parquet.gz"), str(tmp_path / "b.jsonl"), target_format="mooncake")
    assert (tmp_path / "b.jsonl").read_bytes() == MOONCAKE


@pytest.mark.parametrize(
    ("name", "data", "options", "problem"),
    [
        ("a.bin", bytes(range(256)) * 9, {}, "a.bin: the format of the file is not known"),
        ("a.jsonl", gzip.compress(MOONCAKE, mtime=0)[:-9], {}, "a.jsonl: .*runcated"),
        ("a.parquet", b"PAR1 and no more", {}, "a.parquet: cannot be read as Parquet"),
        ("a.jsonl", MOONCAKE, {"source_format": "azure"}, "a.jsonl: "),
        ("a.jsonl", MOONCAKE, {"source_format": "azur"}, "--from: .*did you mean azure"),
    ],
)
def test_what_cannot_be_read_is_told_and_leaves_nothing(
    name: str, data: bytes, options: dict[str, str], problem: str, tmp_path: Path
) -> None:
    source = put(tmp_path, name, data)
    with pytest.raises(ConfigError, match=problem):
        convert(source, str(tmp_path / "out.parquet"), **options)  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize(
    ("source", "target", "problem"),
    [
        ("a.jsonl", "x.csv", "x.csv: the file name fits several formats; set --to to one of azure"),
        ("a.jsonl", "no/x.parquet", "no/x.parquet: cannot be written: No such file"),
        ("a.jsonl", "there.parquet", "there.parquet: already exists\nhint: to replace the file, use --force"),
        ("a.jsonl", "s3://bucket/x.parquet", "is a URL, and only local files"),
        ("a.jsonl", "-", "--to: is required"),
    ],
)
def test_places_that_do_not_do_are_told(
    source: str, target: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    put(tmp_path, "a.jsonl", MOONCAKE)
    put(tmp_path, "there.parquet", b"old")
    with pytest.raises(ConfigError, match=problem):
        convert(source, target)
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "there.parquet"]
    assert (tmp_path / "there.parquet").read_bytes() == b"old"


# Counts.

DERIVED = {
    ("openai-batch", "message roles and sizes"),
    ("openai-batch", "model"),
    ("openai-batch", "max_tokens"),
    ("sharegpt", "session and turn"),
}
"""What a reader finds in the bodies, or gives to every row."""


def mixed() -> pa.RecordBatch:
    """Rows with and without text, tokens, arrivals, sessions; whole, failed and given up."""
    rows = capture_rows.rows(60, 7)
    for i, row in enumerate(rows):
        if i % 3 == 0:
            messages = [{"role": "user", "content": f"mail to ann{i}@example.com"}]
            row["request_body"] = json.dumps({"model": "m", "max_tokens": 9, "messages": messages})
            row["response_text"] = None if i % 4 == 0 else "hello"
            row["level"] = "full"
        if i % 5 == 0:
            row |= {"input_tokens": None, "usage": None}
        if i % 7 == 0:
            row["outcome"] = "client_cancelled"
        if i % 11 == 0:
            row |= {"outcome": "upstream_error", "status": 503, "output_tokens": None, "response_text": None}
        if i % 13 == 0:
            row |= {"session": None, "turn": None}
        if i == 8:
            row |= {"arrival_ns": None, "arrival": None}
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


@pytest.mark.parametrize("name", [f.name for f in registry.FORMATS if f.write_rows is not None])
def test_what_is_said_to_be_written_is_in_the_file(name: str, tmp_path: Path) -> None:
    source, target = tmp_path / "a.parquet", tmp_path / "out"
    info = CaptureInfo(capture="c", block_unit="tokens", block_size=512)
    write_parquet(source, info, [mixed()])
    report = convert(str(source), str(target), target_format=name)
    result = dict.fromkeys(ASPECTS, 0)
    wanted = registry.format_named(name)
    with target.open("rb") as file:
        for batch in wanted.read(file).batches:
            for aspect in ASPECTS:
                result[aspect] += count_rows_with(batch, aspect)
    for a in report.aspects:
        assert a.rows == count_rows_with(mixed(), a.name)
        if (name, a.name) not in DERIVED:
            # A failed request of BurstGPT's has 0 tokens, which its capture did not know.
            assert a.written == min(a.rows, result[a.name]) if a.name in wanted.aspects else a.written == 0, a
        if a.fate in ("kept", "lost", "partly"):
            assert a.fate == ("kept" if a.written == a.rows else "partly" if a.written else "lost")
        assert a.why or a.fate in ("kept", "absent")


def test_what_fell_away_with_its_rows_is_kept_in_part_only(tmp_path: Path) -> None:
    source = tmp_path / "a.parquet"
    columns = {"arrival_ns": [1, 2, 3], "input_tokens": [5, None, 7], "output_tokens": [1, 1, 1]}
    write_parquet(source, CaptureInfo(capture="c"), [batch_of(3, {**columns, "model": ["a", None, None]})])
    report = convert(str(source), str(tmp_path / "b"), target_format="mooncake")
    result = {a.name: (a.written, a.rows, a.fate) for a in report.aspects if a.rows}
    assert result == {
        "arrival": (2, 3, "partly"),
        "input tokens": (2, 2, "kept"),
        "output tokens": (2, 3, "partly"),
        "model": (0, 1, "lost"),
    }
    assert report.aspects[0].why == (
        "left out: no count of input tokens (1); in whole milliseconds, from the first one"
    )
    assert report.aspects[0].written == 2


def test_where_no_row_has_what_is_needed_it_is_said_how_a_capture_gets_it(tmp_path: Path) -> None:
    source = tmp_path / "a.parquet"
    columns = {"arrival_ns": [1, 2], "outcome": ["client_cancelled", "upstream_error"], "status": [200, 503]}
    write_parquet(source, CaptureInfo(capture="c"), [batch_of(2, columns)])
    for target, hint in (
        (
            "mooncake",
            "needs input tokens, .*\nhint: before the capture, set meter.tokenizer, or let clients send",
        ),
        ("openai-batch", "needs request body, .*\nhint: a capture has text only if capture.level is"),
    ):
        with pytest.raises(ConfigError, match=hint):
            convert(str(source), str(tmp_path / "b"), target_format=target)
    assert os.listdir(tmp_path) == ["a.parquet"]


# Faults on the way.


def replace_column(monkeypatch: pytest.MonkeyPatch, name: str, **parts: Any) -> None:
    formats = tuple(replace(f, **parts) if f.name == name else f for f in registry.FORMATS)
    monkeypatch.setattr(registry, "FORMATS", formats)


@pytest.mark.parametrize(
    ("at", "end"), [(0, KeyboardInterrupt()), (3, OSError(errno.ENOSPC, "No space left on device"))]
)
def test_a_full_disk_or_an_impatient_user_leaves_no_part(
    at: int, end: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = registry.format_named("azure").write_rows
    assert writes is not None

    def failing(writer: TraceWriter) -> None:
        file, left = writer.out, at

        def write(data: bytes) -> int:
            nonlocal left
            if not left:
                raise end
            left -= 1
            return file.write(data[:10])

        writer.out = SimpleNamespace(write=write)  # type: ignore[assignment]
        writes(writer)

    replace_column(monkeypatch, "azure", write_rows=failing)
    source = put(tmp_path, "a.jsonl", MOONCAKE * 600)
    expected = ConfigError if isinstance(end, OSError) else KeyboardInterrupt
    with pytest.raises(expected) as failure:
        convert(source, str(tmp_path / "b.csv"), target_format="azure")
    assert os.listdir(tmp_path) == ["a.jsonl"]
    if expected is ConfigError:
        assert "b.csv: cannot be written: No space left on device\n" in str(failure.value)


@pytest.mark.parametrize(
    ("end", "shown"),
    [
        (FormatError("line 9: x"), "a.csv: line 9: x"),
        (OSError(errno.EIO, "Input/output error"), "a.csv: cannot be read: Input/output error"),
        (pa.ArrowInvalid("odd\nmore"), "a.csv: does not fit its format: odd"),
    ],
)
def test_a_source_that_fails_late_is_to_blame_and_leaves_no_part(
    end: Exception, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = registry.format_named("azure").batches
    assert batches is not None

    def failing(file: BinaryIO, notes: list[str]) -> Iterator[pa.RecordBatch]:
        yield from batches(file, notes)
        raise end

    replace_column(monkeypatch, "azure", batches=failing)
    with pytest.raises(ConfigError) as failure:
        convert(put(tmp_path, "a.csv", AZURE), str(tmp_path / "b.parquet"))
    assert str(failure.value).splitlines()[0].endswith(shown)
    assert os.listdir(tmp_path) == ["a.csv"]


def test_what_is_read_is_told_as_it_goes(tmp_path: Path) -> None:
    source = put(tmp_path, "a.jsonl", MOONCAKE * 2_000)
    result: list[tuple[int, int | None]] = []
    convert(source, str(tmp_path / "b.parquet"), progress=lambda *step: result.append(step))
    size = Path(source).stat().st_size
    assert len(result) > 5
    assert result == sorted(result) and result[-1] == (size, size)


PROGRAM = """
import resource, sys
from llmtap.traces.convert import convert
convert(sys.argv[1], sys.argv[2], target_format=sys.argv[3])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_ten_times_the_rows_do_not_take_ten_times_the_memory(tmp_path: Path) -> None:
    peaks = []
    head = b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    for rows in (20_000, 200_000):
        source = tmp_path / f"{rows}.csv"
        lines = (
            b"%d,ChatGPT,%d,%d,%d,API log\n" % (i // 3, 10 + i % 900, 5, 15 + i % 900) for i in range(rows)
        )
        source.write_bytes(head + b"".join(lines))
        command = [sys.executable, "-c", PROGRAM, str(source), str(tmp_path / f"{rows}.out"), "mooncake"]
        done = subprocess.run(command, capture_output=True, timeout=250, check=True)
        peaks.append(int(done.stdout) * 1024)
    # 180,000 rows more are 9 MB of CSV, and would be 150 MB of batches held.
    assert peaks[1] - peaks[0] < 100 << 20


# Redaction.


def body(text: str) -> str:
    return json.dumps({"messages": [{"role": "user", "content": text}]})


@pytest.mark.parametrize(
    ("rules", "columns", "expected", "notes"),
    [
        (
            ("email", "re:gr[ae]y"),
            {
                "request_body": [body("a@b.com, again a@b.com"), None, None],
                "response_text": ["a gray cat", None, "x"],
                "redactions": [4, None, None],
            },
            [(body("[email], again [email]"), "a [redacted] cat", 7), (None, None, None), (None, "x", 0)],
            [],
        ),
        (
            ("email",),
            {"request_body": ["a@b.com"], "response_text": ["b"]},
            [(None, "b", 0)],
            [
                "--redact found nothing to redact",
                "1 bodies are no JSON that --redact could read, and were left out",
            ],
        ),
        (
            (),
            {"request_body": [body("a@b.com"), body("x"), None], "redactions": [None, 0, None]},
            [(body("a@b.com"), None, None), (body("x"), None, 0), (None, None, None)],
            ["1 rows have text that nobody redacted; --redact email,card,phone,key does"],
        ),
    ],
)
def test_text_is_redacted_by_the_rules_or_counted(
    rules: tuple[str, ...],
    columns: dict[str, list[Any]],
    expected: list[tuple[Any, ...]],
    notes: list[str],
    tmp_path: Path,
) -> None:
    source, target = tmp_path / "a.parquet", tmp_path / "b.parquet"
    write_parquet(source, CaptureInfo(capture="c"), [batch_of(len(expected), columns)])
    report = convert(str(source), str(target), redact=rules)
    table = pq.read_table(target, columns=["request_body", "response_text", "redactions"]).to_pylist()
    found = [tuple(row.values()) for row in table]
    loads = [(None if b is None else json.loads(b), *rest) for b, *rest in found]
    assert loads == [(None if b is None else json.loads(b), *rest) for b, *rest in expected]
    assert report.notes_written == notes
