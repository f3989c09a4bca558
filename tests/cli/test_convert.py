import gzip
import json
import os
import pty
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from llmtap.cli.convert import STYLES
from llmtap.cli.main import main
from llmtap.traces.registry import FORMATS

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
        ("arrival", "20 of 20", "kept"), ("input tokens", "20 of 20", "kept"),
        ("output tokens", "20 of 20", "kept"), ("prefix blocks", "0 of 20", "lost"),
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
    assert (code, rows[0]) == (0, ["name", "title", "extensions", "does", "holds", "needs", "styles"])
    assert [row[0] for row in rows[1:]] == [f.name for f in FORMATS]
    assert dict(zip(rows[0], rows[1], strict=True))["holds"] == "everything"
    _, out, _ = run(capsys, monkeypatch, "--list", "--json")
    listed = {f["name"]: f for f in json.loads(out)["formats"]}
    assert listed["azure"]["needs"] == ["arrival", "input tokens", "output tokens"]
    assert listed["azure"]["does"] == ["read", "write"]
    assert listed["har"]["styles"].keys() == {"llmtap"}


def test_the_list_of_one_format_tells_all_about_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = run(capsys, monkeypatch, "--list", "mooncake")
    fmt = next(f for f in FORMATS if f.name == "mooncake")
    assert code == 0
    assert out.splitlines()[0] == f"mooncake: {fmt.title}"
    assert all(len(line) <= 80 for line in out.splitlines())
    assert [line.split()[1] for line in out.splitlines() if line.startswith("style ")] == [*fmt.styles]
    code, out, err = run(capsys, monkeypatch, "--list", "moncake")
    assert (code, out) == (2, "")
    assert "did you mean mooncake?" in err


def test_the_help_names_the_styles_of_every_format() -> None:
    told = {name: set(keys.split(", ")) for names, keys in STYLES.items() for name in names.split(", ")}
    assert told == {f.name: set(f.styles) for f in FORMATS if f.styles}


def test_text_is_redacted_by_names_with_commas_or_by_a_pattern(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    source.write_text('{"prompt": "ann@example.com, cat1,2 or +49 30 12345678"}\n')
    args = (source, target, "--to", "vllm-custom", "--redact", "email,phone", "--redact", r"re:cat\d,\d")
    code, out, _ = run(capsys, monkeypatch, *args)
    assert code == 0
    assert json.loads(target.read_text())["prompt"] == "[email], [redacted] or [phone]"
    assert "request body\t1 of 1\tchanged\t3 marks in 1 rows" in out
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    code, _, err = run(capsys, monkeypatch, source, target, "--redact", "email,cards", "--to", "vllm-custom")
    assert (code, "'cards' is none of email, card" in err) == (2, True)


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
        input=gzip.compress(MOONCAKE), capture_output=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stdout.startswith(b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n")
    assert len(done.stdout.splitlines()) == 21
    assert b"prefix blocks\t0 of 20\tlost" in done.stderr
    capture = subprocess.run(
        [*COMMAND, "-", "-", "--to", "llmtap"], input=MOONCAKE, capture_output=True, timeout=200
    )
    again = subprocess.run(
        [*COMMAND, "-", "-", "--to", "mooncake"], input=capture.stdout, capture_output=True, timeout=200
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
        assert running.wait(60) == 141
    assert err == b""


@pytest.mark.parametrize("args", [["--list"], ["--list", "--json"], ["--list", "azure"]])
def test_a_list_that_nobody_reads_says_nothing(args: list[str]) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run([*COMMAND, *args], stdout=theirs, stderr=subprocess.PIPE, timeout=200)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (141, b"")


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


BAR_AFTER = """
import sys
from llmtap.cli import convert
from llmtap.cli.main import main
convert._BAR_AFTER_NS = int(sys.argv.pop(1))
main()
"""
NEVER_NS = 1 << 62


def on_a_terminal(*args: object, bar_after_ns: int = NEVER_NS, columns: int = 120) -> str:
    """All that a terminal shows."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-P", "-c", BAR_AFTER, str(bar_after_ns), "convert", *map(str, args)]
    with subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": str(columns)},
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
    return said.decode()


def test_on_a_terminal_there_is_a_bar_and_a_table(trace: Path) -> None:
    trace.write_bytes(MOONCAKE * 5_000)
    text = on_a_terminal(trace, trace.with_name("b.csv"), "--to", "azure", bar_after_ns=0)
    assert "MB" in text, "the bytes of the bar"
    assert "prefix blocks" in text
    assert "\t" not in text


def test_of_little_there_is_no_bar_and_of_many_files_one(trace: Path) -> None:
    folder = trace.parent / "capture"
    folder.mkdir()
    run_quietly = [*COMMAND, str(trace), str(folder / "a.parquet")]
    assert subprocess.run(run_quietly, capture_output=True, timeout=200).returncode == 0
    to = ("--to", "azure", "--force")
    assert on_a_terminal(folder, trace.with_name("b.csv"), *to).startswith("llmtap to azure: ")
    text = on_a_terminal(folder, trace.with_name("b.csv"), *to, bar_after_ns=0).split("llmtap to azure")[0]
    assert "kB" in text
    assert "/?" not in text


def test_on_a_narrow_terminal_the_list_has_a_line_for_each_format() -> None:
    lines = on_a_terminal("--list", columns=80).splitlines()
    assert all(any(line.split("m")[-1].startswith(f"{f.name} ") or line.startswith(f"{f.name} ")
                   for line in lines) for f in FORMATS)  # fmt: skip
    assert all(any(f.title in line for line in lines) for f in FORMATS)
    assert len(lines) < len(FORMATS) + 5
