"""`llmtap convert` and `llmtap inspect`, as one types them, and hostile files in every command."""

import gzip
import json
import os
import re
import signal
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from llmtap.user_files import DEPTH_MAX, TOML_BYTES_MAX, read_toml
from tests.cli.traces import Call

MOONCAKE = b"".join(
    b'{"timestamp": %d, "input_length": %d, "output_length": 5, "hash_ids": [%d]}\n' % (i * 3_000, 10 + i, i)
    for i in range(20)
)
COMMAND = [sys.executable, "-P", "-m", "llmtap.cli", "convert"]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_bytes(MOONCAKE)
    return path


def test_text_is_redacted_by_names_with_commas_or_by_a_pattern(tmp_path: Path, call: Call) -> None:
    source, target = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    source.write_text('{"prompt": "ann@example.com, cat1,2 or +49 30 12345678"}\n')
    args = (source, target, "--to", "vllm-custom", "--redact", "email,phone", "--redact", r"re:cat\d,\d")
    code, out, _ = call("convert", *args)
    assert code == 0
    assert json.loads(target.read_text())["prompt"] == "[email], [redacted] or [phone]"
    assert re.search("request body +1 of 1 +changed +3 marks in 1 rows", out)
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    code, _, err = call("convert", source, target, "--redact", "email,cards", "--to", "vllm-custom")
    assert (code, "expected one of email, card" in err) == (2, True)


def test_pipes_do_and_the_report_stays_out_of_the_data() -> None:
    done = subprocess.run(
        [*COMMAND, "-", "-", "--from", "mooncake", "--to", "azure"],
        input=gzip.compress(MOONCAKE),
        capture_output=True,
        timeout=200,
    )
    assert done.returncode == 0
    assert done.stdout.startswith(b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n")
    assert len(done.stdout.splitlines()) == 21
    assert re.search(rb"prefix blocks +0 of 20 +lost .* --to llmtap or mooncake", done.stderr)
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


def test_ended_by_a_signal_it_leaves_no_part(tmp_path: Path) -> None:
    target = tmp_path / "out" / "b.jsonl"
    target.parent.mkdir()
    command = [*COMMAND, "-", str(target), "--from", "mooncake", "--to", "mooncake"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdin is not None
        # More than a pipe holds: once it is taken, the conversion is under way, and waits for more.
        running.stdin.write(MOONCAKE * 4_000)
        running.stdin.flush()
        running.send_signal(signal.SIGTERM)
        with suppress(BrokenPipeError):  # a read that began just before the signal ends with more input
            running.stdin.write(MOONCAKE)
            running.stdin.close()
        assert running.wait(200) == 128 + signal.SIGTERM
    assert os.listdir(target.parent) == []


def chunk(**choice: Any) -> dict[str, Any]:
    return {"model": "tiny", "choices": [{"index": 0, "delta": {}, "finish_reason": None, **choice}]}


BODY = (
    b"".join(
        b"data: " + json.dumps(value).encode() + b"\n\n"
        for value in (
            chunk(delta={"role": "assistant", "content": ""}),
            chunk(delta={"content": "Well,\n\x1b[2J yes"}),
            chunk(delta={"content": "x" * 200}),
            chunk(finish_reason="stop"),
            {"model": "tiny", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 9}},
        )
    )
    + b"data: [DONE]\n\n"
)


def test_a_har_gives_its_totals(tmp_path: Path, call: Call) -> None:
    path = tmp_path / "session.har"
    entry = {
        "startedDateTime": "2026-01-02T03:04:05Z",
        "time": 50,
        "request": {"method": "POST", "url": "http://g/v1/chat/completions"},
        "response": {"status": 200, "headers": [], "content": {"text": BODY.decode()}},
        "timings": {"send": 1, "wait": 20, "receive": 29},
    }
    path.write_text(json.dumps({"log": {"entries": [entry]}}))
    _, out, _ = call("inspect", str(path), "--json")
    x = json.loads(out)
    assert (x["metrics"]["ttfb"], x["metrics"]["e2e"]) == (0.02, pytest.approx(0.049))
    assert x["metrics"]["ttft"] is None
    assert x["arrival"] == "2026-01-02T03:04:05Z"
    _, out, _ = call("inspect", str(path))
    assert "wait 20 ms" in out
    code, _, err = call("inspect", str(path), "--entry", "4")
    assert (code, "no entry 4" in err) == (2, True)


def test_a_pipe_is_read_too() -> None:
    command = [sys.executable, "-P", "-m", "llmtap.cli", "inspect", "-"]
    done = subprocess.run(command, input=BODY, capture_output=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode().startswith("event stream · ")
    done = subprocess.run(command, input=b"", capture_output=True, timeout=200)
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, b"llmtap: standard input: the file is empty")


DEEP = b"[" * 100_000 + b"]" * 100_000
FILES = {
    "list.json": DEEP,
    "object.json": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "second-line.jsonl": b'{"timestamp":1,"input_length":1,"output_length":1}\n{"a":%s}\n' % DEEP,
    "list.toml": b"# a comment\n[relay]\nupstream = %s\n" % DEEP,
    "key.toml": b"[relay]\n\n%sa = 1\n" % (b"a." * 50_000),
    "quoted-key.toml": b"[relay]\n\n%sa = 1\n" % (b'"a" . ' * 50_000),
    "header.toml": b"[%sa]\n" % (b"a." * 50_000),
    "inline.toml": b"[relay]\nx = %s1%s\n" % (b"{a=" * 50_000, b"}" * 50_000),
    "digits.toml": b'[relay]\nidle_timeout = "%ss"\n' % (b"9" * 400),
    "size.toml": b'[relay]\nhead_bytes = "%sMiB"\n' % (b"9" * 400),
    "integer.toml": b"[relay]\nhead_bytes = %s\n" % (b"9" * 5_000),
    "not-utf8.toml": b"\xff",
    "nul.toml": b"[relay]\n\x00",
    "long.toml": b"#" * (TOML_BYTES_MAX + 1),
    "empty.json": b"",
    "nul.json": b'{"a":\x00}',
    "cut.json": b'{"a":[1,2',
}
PROXY = ["proxy", "--check", "--upstream", "http://127.0.0.1:1", "--config"]
METER = ["meter", "--check", "--config"]
READERS = [["report"], ["replay", "--target", "http://127.0.0.1:1"], ["sim", "run"], ["convert"]]
JSON = [name for name in FILES if ".json" in name]
TOML = [name for name in FILES if name.endswith(".toml")]
CASES = [
    *((command, name) for command in READERS for name in JSON),
    *((command, name) for command in (PROXY, METER) for name in TOML),
]
SAID = {
    "list.json": "line 1",
    "object.json": "line 1",
    "second-line.jsonl": "line 2",
    "list.toml": "line 3",
    "key.toml": "line 3",
    "quoted-key.toml": "line 3",
    "header.toml": "line 1",
    "inline.toml": "line 2",
    "digits.toml": "relay.idle_timeout",
    "size.toml": "relay.head_bytes",
}


@pytest.mark.parametrize(("command", "name"), CASES, ids=[f"{' '.join(c[:2])} {n}" for c, n in CASES])
def test_a_hostile_file_is_refused_by_its_name(
    command: list[str],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: Call,
) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LLMTAP_CONFIG", raising=False)
    more = ["out.parquet"] if command == ["convert"] else []
    code, _, error = call(*command, name, *more)
    assert code == 2
    assert name in error
    assert SAID.get(name, name) in error
    assert len(error) < 1_000


def test_dots_and_brackets_in_texts_and_comments_are_no_nesting(tmp_path: Path) -> None:
    many = "." * 500 + "[{" * 500
    file = tmp_path / "texts.toml"
    file.write_text(
        f'\ufeff# {many}\na = \'{many}\' # {many}\nb = "\\"{many}"\nc = """\n{many}"\n"""\n'
        f"d = '''\n{many}'''\ne = [{','.join(['1.5'] * 500)}]\n[{'f.' * (DEPTH_MAX - 1)}f]\n"
    )
    content = read_toml(file)
    assert (content["a"], content["b"]) == (many, '"' + many)
    assert len(content["e"]) == 500
