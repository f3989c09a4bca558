"""Every command that reads a file refuses a bad one by its name, with exit code 2 and without a traceback.

A case is a command and all kinds of files; it lists every file that was answered otherwise.
"""

import gzip
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cli.traces import Call, small_trace

ESCAPES = "a\x1b[2J\nb.json"
NOT_UTF8 = os.fsdecode(b"bad\xff.json")
MARKS = ("load", "sender", "plan", "metrics", "verdict")
PCAP = struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 65535, 1)


def result_with(filled: str = "") -> bytes:
    """Return the members by which `report` knows a result of a replay, all empty but one."""
    wrong = {"valid": 1, "notes": 2, "findings": "x"}
    return json.dumps({mark: wrong if mark == filled else {} for mark in MARKS}).encode()


CONTENTS = {
    "empty.json": b"",
    "blank.json": b" \n\t\n",
    "nul.json": b"\0" * 4_096,
    "text.txt": b"hello world\n" * 50,
    "latin1.csv": "Grüße;é\n".encode("latin-1"),
    "utf16.json": '{"a": 1}\n'.encode("utf-16"),
    "bom.json": b"\xef\xbb\xbf",
    "number.json": b"1",
    "null.json": b"null",
    "cut.json": b'{"a":[1,2',
    "surrogate.jsonl": b'{"prompt": "\\ud800"}\n',
    "deep.json": b"[" * 100_000,
    "cut.gz": gzip.compress(os.urandom(5_000))[:2_000],
    "bad.gz": b"\x1f\x8b\x08" + b"\xa5" * 100,
    "empty.gz": gzip.compress(b""),
    "bad.zst": b"\x28\xb5\x2f\xfd" + b"\xa5" * 100,
    "magic.parquet": b"PAR1",
    "tail.parquet": b"PAR1" + b"\xa5" * 500 + b"PAR1",
    "bad.spool": b"LTSP" + b"\xa5" * 200,
    "bad.pcap": PCAP[:10],
    "bad.pcapng": bytes.fromhex("0a0d0d0a") + b"\xa5" * 100,
    "short.csv": b"TIMESTAMP,ContextTokens,GeneratedTokens\n1\n",
    "types.har": b'{"log":{"entries":[{"time":"x"}]}}',
    "types.toml": b"relay = 1\nmeter = []\nslo = 3\n",
    "bad.toml": b"[relay\n",
    "latin.toml": b'a = "\xff"\n',
    "negative.jsonl": b'{"timestamp": -1, "input_length": -5, "output_length": -5}\n',
    "types.json": b'[{"id": 5, "conversations": [{"from": 3, "value": null}]}]',
    "otlp.json": b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"attributes":3}]}]}]}',
    "marks.json": result_with(),
    **{f"marks-{mark}.json": result_with(mark) for mark in MARKS},
    ESCAPES: b"{",
    NOT_UTF8: b"{",
}
CONVERT = ("convert", "--to", "mooncake")
TARGET = ("--target", "http://127.0.0.1:1", "--no-selftest", "--requests", "1")
COMMANDS: dict[str, Callable[[str], list[str]]] = {
    "inspect": lambda f: ["inspect", f, "--entry", "0"],
    "report": lambda f: ["report", f],
    "report html": lambda f: ["report", f, "--html", "o.html"],
    "report integrity": lambda f: ["report", f, "--integrity"],
    "compare": lambda f: ["report", f, "--compare", "marks.json"],
    "convert": lambda f: ["convert", f, "out.parquet"],
    **{
        f"convert {name}": lambda f, name=name: [*CONVERT, "--from", name, f, "out.jsonl"]
        for name in ("llmtap", "mooncake", "azure", "sharegpt", "har", "otlp", "openai-batch")
    },
    "replay": lambda f: ["replay", f, *TARGET],
    "replay header-file": lambda f: ["replay", "conversation", *TARGET, "--header-file", f],
    "replay ca": lambda f: ["replay", "conversation", "--target", "https://127.0.0.1:1", "--ca", f],
    "replay tokenizer": lambda f: ["replay", "conversation", *TARGET, "--tokenizer", f],
    "sim run": lambda f: ["sim", "run", f],
    "sim run latency": lambda f: ["sim", "run", "trace.csv", "--latency", f],
    "sim run results": lambda f: ["sim", "run", "trace.csv", "--results", f],
    "watch": lambda f: ["watch", "--read", f],
    "proxy config": lambda f: ["proxy", "--check", "--upstream", "http://127.0.0.1:1", "--config", f],
    "slo config": lambda f: ["slo", "generate", "--config", f],
    "top token": lambda f: ["top", "--once", "--token-file", f],
    "bench": lambda f: ["bench", "ttft", "--config", f],
}
MAY_READ = ("inspect", "watch", "convert ", "sim run results")
"""Beginnings of commands for which some of these files are as they should be: any text is a body."""
HARMLESS = {"bad.spool", "types.har", "blank.json", "bom.json", "empty.json"}
"""A spool may be torn, a HAR file may have no request to a model, and TOML that is blank, empty or only a
byte order mark sets no option."""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LLMTAP_CONFIG", raising=False)
    for name, content in CONTENTS.items():
        (tmp_path / name).write_bytes(content)
    pq.write_table(pa.table({"abcdefgh": [1]}), "other.parquet")
    whole = Path("other.parquet").read_bytes()
    Path("cut.parquet").write_bytes(whole[: len(whole) // 2])
    Path("name.parquet").write_bytes(whole.replace(b"abcdefgh", b"abc\xff\xfefgh"))
    for folder, name in (("none", ""), ("bad", "llmtap-1.parquet"), ("bench", "bench.json")):
        Path(folder).mkdir()
        if name:
            Path(folder, name).write_bytes(b"PAR1")
    os.symlink("loop", "loop")
    small_trace(tmp_path / "trace.csv")
    return [
        *CONTENTS,
        "other.parquet",
        "cut.parquet",
        "name.parquet",
        "none",
        "bad",
        "bench",
        "loop",
        "missing",
    ]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_bad_file_is_refused_by_its_name(command: str, files: list[str], call: Call) -> None:
    wrong = []
    for name in files:
        for made in ("out.parquet", "out.jsonl", "o.html"):
            Path(made).unlink(missing_ok=True)
        try:
            code, out, error = call(*COMMANDS[command](name))
        except BaseException as exc:
            wrong.append(f"{name!r}: {type(exc).__name__}: {exc}"[:200])
            continue
        controls = [c for c in out + error if c < " " and c != "\n"]
        accepted = code == 2 or command.startswith(MAY_READ) or (code == 0 and name in HARMLESS)
        if controls or len(error) > 2_000 or not accepted:
            wrong.append(f"{name!r}: {code}, {error[:200]!r}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("command", ["inspect", "report", "convert", "proxy config", "watch"])
def test_a_pipe_is_read_once(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    writer = threading.Thread(target=lambda: Path("pipe").write_bytes(b"\0\1 nothing\n"), daemon=True)
    writer.start()
    code, _, error = call(*COMMANDS[command]("pipe"))
    writer.join(60)
    assert not writer.is_alive()
    assert (code, "pipe" in error) == (2, True) or command == "inspect"


@pytest.mark.parametrize("command", ["replay header-file", "replay ca", "top token", "proxy config"])
def test_a_file_that_never_ends_is_refused(command: str, call: Call) -> None:
    code, _, error = call(*COMMANDS[command]("/dev/zero"))
    assert (code, "/dev/zero" in error) == (2, True)


def test_a_usage_error_escapes_the_name_that_it_quotes(call: Call) -> None:
    code, _, error = call("inspect", "a.json", "b\x1b[2J.json")
    assert code == 2
    assert "\x1b" not in error
    assert "[2J.json" in error


def test_the_package_is_the_command() -> None:
    command = [sys.executable, "-P", "-m", "llmtap", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout.startswith("llmtap ")) == (0, True)
