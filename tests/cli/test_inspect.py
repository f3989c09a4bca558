import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmtap.cli.main import main

NAME = "a.sse"


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


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / NAME
    path.write_bytes(BODY)
    return path


def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["llmtap", "inspect", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def test_every_event_has_its_line(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = run(capsys, monkeypatch, str(file))
    assert (code, err) == (0, "")
    head, columns, *lines = out.splitlines()
    assert head == f"event stream · {len(BODY):,} bytes · dialect openai.chat · 6 events"
    rows = [line.split("\t") for line in lines[:6]]
    assert columns.split("\t") == ["#", "bytes", "class", "tokens", "adds"]
    assert [row[2] for row in rows] == ["role", "content", "content", "metadata", "usage", "done"]
    edges = [tuple(map(int, row[1].split("-"))) for row in rows]
    assert [BODY[a:b] for a, b in edges] == [part + b"\n\n" for part in BODY.split(b"\n\n")[:-1]]
    assert rows[1][4] == r'"Well,\n\u001b[2J yes"', "no byte of a text reaches the terminal as a command"
    assert rows[2][4].endswith("... (200 characters)")
    assert "finish=stop" in rows[3][4]
    assert rows[4][4] == "usage in=3 out=9"
    story = dict(line.split(": ", 1) for line in lines[6:])
    assert (story["outcome"], story["finish reason"], story["model"]) == ("complete", "stop", "tiny")
    assert story["tokens"] == "input 3  output 9  output by usage"
    assert story["first"] == "any #0  token #1  reasoning -  tool call -  refusal -  content #1"
    assert story["times"].startswith("none")


def test_without_text_there_is_none(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, out, _ = run(capsys, monkeypatch, str(file), "--no-text")
    assert "Well" not in out
    assert "200 characters" in out
    _, out, _ = run(capsys, monkeypatch, str(file), "--no-text", "--json")
    assert "Well" not in out


def test_as_json_it_is_the_exchange_with_what_each_event_says(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = run(
        capsys,
        monkeypatch,
        str(file),
        "--json",
        "--path",
        "/v1/chat/completions",
        "--request-body",
        '{"model": "big"}',
    )
    x = json.loads(out)
    assert (code, x["model"], x["endpoint"], x["outcome"]) == (0, "big", "chat.completions", "complete")
    assert (x["id"], x["arrival"], x["status"]) == (None, None, None)
    assert set(x["metrics"].values()) == set(x["timeline"].values()) == {None}, "nobody knows when"
    first = x["events"][1]
    assert (first["class"], first["t"], first["text"]) == ("content", None, "Well,\n\x1b[2J yes")
    assert BODY[first["start"] : first["end"]].endswith(b"\n\n")
    assert x["saved"]["first"]["token"] == 1
    assert x["tokens"] == {"input": 3, "output": 9, "reasoning": None, "cached": None, "source": "usage"}


def test_a_request_may_come_from_a_file(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = tmp_path / "ask.json"
    ask.write_text('{"model": "from-a-file"}')
    _, out, _ = run(capsys, monkeypatch, str(file), "--json", "--request-body", f"@{ask}")
    assert json.loads(out)["model"] == "from-a-file"


def test_a_har_gives_its_totals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "session.har"
    entry = {
        "startedDateTime": "2026-01-02T03:04:05Z", "time": 50,
        "request": {"method": "POST", "url": "http://g/v1/chat/completions"},
        "response": {"status": 200, "headers": [], "content": {"text": BODY.decode()}},
        "timings": {"send": 1, "wait": 20, "receive": 29},
    }  # fmt: skip
    path.write_text(json.dumps({"log": {"entries": [entry]}}))
    _, out, _ = run(capsys, monkeypatch, str(path), "--json")
    x = json.loads(out)
    assert (x["metrics"]["ttfb"], x["metrics"]["e2e"]) == (0.02, pytest.approx(0.049))
    assert x["metrics"]["ttft"] is None
    assert x["arrival"] == "2026-01-02T03:04:05Z"
    _, out, _ = run(capsys, monkeypatch, str(path))
    assert "wait 20 ms" in out
    code, _, err = run(capsys, monkeypatch, str(path), "--entry", "4")
    assert (code, "no entry 4" in err) == (2, True)


def test_bad_input_is_named_and_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    poem = tmp_path / "poem.txt"
    poem.write_text("Whose woods these are\n")
    cases = [
        (poem, "neither an event stream"),
        (tmp_path / "nowhere", "No such file"),
        (tmp_path, "Is a directory"),
    ]
    for path, problem in cases:
        code, out, err = run(capsys, monkeypatch, str(path))
        assert (code, out) == (2, "")
        assert err.startswith(f"llmtap: {path}: ")
        assert problem in err
        assert "Traceback" not in err


def test_a_pipe_is_read_too() -> None:
    command = [sys.executable, "-P", "-m", "llmtap.cli", "inspect", "-"]
    done = subprocess.run(command, input=BODY, capture_output=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode().startswith("event stream · ")
    done = subprocess.run(command, input=b"", capture_output=True, timeout=200)
    assert (done.returncode, done.stderr) == (2, b"llmtap: standard input: the file is empty\n")


def test_on_a_terminal_it_is_a_table(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    _, out, _ = run(capsys, monkeypatch, str(file))
    assert "\t" not in out
    assert "finish reason" in out
