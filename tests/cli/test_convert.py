import gzip
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llmtap.capture.formats.registry import FORMATS
from llmtap.cli.main import main

MOONCAKE = b"".join(
    b'{"timestamp": %d, "input_length": %d, "output_length": 5, "hash_ids": [%d]}\n' % (i * 3, 10 + i, i)
    for i in range(20)
)
COMMAND = [sys.executable, "-P", "-m", "llmtap.cli", "convert"]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_bytes(MOONCAKE)
    return path


def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: object
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["llmtap", "convert", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def test_a_table_tells_what_was_kept_and_lost(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = run(capsys, monkeypatch, trace, trace.with_name("b.csv"), "--to", "azure")
    assert (code, err) == (0, "")
    head, columns, *rows = out.splitlines()
    assert head.startswith("mooncake to azure: 20 of 20 rows, ")
    assert columns.split("\t") == ["aspect", "rows", "fate", "why"]
    cells = [row.split("\t") for row in rows if "\t" in row]
    assert [(c[0], c[1], c[2]) for c in cells] == [
        ("arrival", "20", "kept"), ("input tokens", "20", "kept"), ("output tokens", "20", "kept"),
        ("prefix blocks", "20", "lost"),
    ]  # fmt: skip
    assert [row for row in rows if row.startswith("note: ")]


def test_as_json_it_is_the_whole_report(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = run(capsys, monkeypatch, trace, trace.with_name("b.parquet"), "--json")
    report = json.loads(out)
    assert (code, report["source_format"], report["rows_written"]) == (0, "mooncake", 20)
    assert report["bytes_out"] == trace.with_name("b.parquet").stat().st_size
    assert {a["fate"] for a in report["aspects"]} == {"kept", "absent"}


def test_the_list_says_of_each_format_what_it_holds_and_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = run(capsys, monkeypatch, "--list")
    rows = [line.split("\t") for line in out.splitlines()]
    assert (code, rows[0]) == (0, ["name", "title", "extensions", "does", "holds", "needs"])
    assert [row[0] for row in rows[1:]] == [f.name for f in FORMATS]
    assert dict(zip(rows[0], rows[1], strict=True))["holds"] == "everything"
    _, out, _ = run(capsys, monkeypatch, "--list", "--json")
    listed = {f["name"]: f for f in json.loads(out)["formats"]}
    assert listed["azure"]["needs"] == ["arrival", "input tokens", "output tokens"]
    assert listed["azure"]["does"] == ["read", "write"]


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ([], "IN OUT: is missing\nhint: llmtap convert --help"),
        (["a.jsonl"], "OUT: is missing"),
        (["no", "b.parquet"], "no: cannot be read: No such file"),
        (["a.jsonl", "b.csv"], "b.csv: its name may mean azure, "),
        (
            ["a.jsonl", "b.csv", "--to", "azur"],
            "--to: no format to write is called 'azur'; did you mean azure?",
        ),
        (["a.jsonl", "b.parquet", "--from", "burstgpt"], "a.jsonl: line 1"),
        (["a.jsonl", "a.jsonl", "--to", "mooncake"], "a.jsonl: is there already\nhint: --force"),
        (["a.jsonl", "b.json", "--to", "sharegpt"], "--to: sharegpt needs request body, which mooncake"),
        (["a.jsonl", "b.csv", "--to", "azure", "--style", "x"], "--style: expected key=value, got 'x'"),
        (["a.jsonl", "b.parquet", "--override-model"], "--override-model: needs --model"),
        (["a.jsonl", "-"], "--to: is needed"),
    ],
)
def test_mistakes_are_one_sentence_and_end_with_2(
    args: list[str],
    problem: str,
    trace: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(trace.parent)
    code, out, err = run(capsys, monkeypatch, *args)
    assert (code, out) == (2, "")
    assert err.startswith(f"llmtap: {problem}")
    assert "Traceback" not in err
    assert os.listdir(trace.parent) == ["a.jsonl"]
    assert trace.read_bytes() == MOONCAKE


def test_force_replaces(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = trace.with_name("b.csv")
    target.write_bytes(b"old")
    code, _, _ = run(capsys, monkeypatch, trace, target, "--to", "azure", "--force")
    assert code == 0
    assert target.read_bytes().startswith(b"TIMESTAMP,")


def test_styles_and_models_reach_the_writer(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = trace.with_name("b.har")
    code, _, _ = run(capsys, monkeypatch, trace, target, "--style", "llmtap=none", "--model", "acme")
    assert code == 0
    assert b"_llmtap" not in target.read_bytes()
    code, _, _ = run(capsys, monkeypatch, trace, target, "--model", "acme", "--force")
    assert json.loads(target.read_bytes())["log"]["entries"][3]["_llmtap"]["row"]["model"] == "acme"


def test_pipes_do_and_the_report_stays_out_of_the_data() -> None:
    done = subprocess.run(
        [*COMMAND, "-", "-", "--from", "mooncake", "--to", "azure"],
        input=gzip.compress(MOONCAKE), capture_output=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stdout.startswith(b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n")
    assert len(done.stdout.splitlines()) == 21
    assert b"prefix blocks\t20\tlost" in done.stderr
    capture = subprocess.run(
        [*COMMAND, "-", "-", "--to", "llmtap"], input=MOONCAKE, capture_output=True, timeout=60
    )
    again = subprocess.run(
        [*COMMAND, "-", "-", "--to", "mooncake"], input=capture.stdout, capture_output=True, timeout=60
    )
    assert again.stdout == MOONCAKE


def test_a_reader_that_goes_away_is_no_traceback(trace: Path) -> None:
    trace.write_bytes(MOONCAKE * 20_000)
    with subprocess.Popen(
        [*COMMAND, str(trace), "-", "--to", "mooncake"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as running:
        assert running.stdout is not None and running.stderr is not None
        running.stdout.read(10)
        running.stdout.close()
        err = running.stderr.read()
        assert running.wait(60) == 2
    assert err == b"llmtap: standard output: cannot be written: Broken pipe\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ended_by_a_signal_it_leaves_no_part(number: signal.Signals, tmp_path: Path) -> None:
    target = tmp_path / "out" / "b.jsonl"
    target.parent.mkdir()
    command = [*COMMAND, "-", str(target), "--from", "mooncake", "--to", "mooncake"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdin is not None
        # More than a pipe holds: once it is taken, the conversion is under way, and waits for more.
        running.stdin.write(MOONCAKE * 4_000)
        running.stdin.flush()
        for _ in range(6):
            running.send_signal(number)
            try:
                running.wait(5)
                break
            except subprocess.TimeoutExpired:
                pass  # Python looks at signals just before it waits, and not again: people press twice
        assert running.wait(1) == 128 + number
        running.stdin.close()
    assert os.listdir(target.parent) == []


def test_on_a_terminal_there_is_a_bar_and_a_table(trace: Path) -> None:
    trace.write_bytes(MOONCAKE * 5_000)
    ours, theirs = pty.openpty()
    command = [*COMMAND, str(trace), str(trace.with_name("b.csv")), "--to", "azure"]
    with subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    ) as running:
        os.close(theirs)
        said = b""
        try:
            while data := os.read(ours, 65_536):
                said += data
        except OSError:
            pass  # Linux says so when the other end is closed
        assert running.wait(60) == 0
    os.close(ours)
    text = said.decode()
    assert "MB" in text, "the bytes of the bar"
    assert "prefix blocks" in text
    assert "\t" not in text
