"""A replay's result read again: `llmtap report` tells what `llmtap replay` told, its verdict first of all."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from llmtap.cli.main import main
from llmtap.cli.replay_outputs import Outputs, load_result, verdicts_beside, write_beside
from llmtap.errors import ConfigError
from tests.support.captures import ledger, write_capture
from tests.support.exchanges import streamed
from tests.support.pages import Page
from tests.support.replay_results import replay_result

LATE = {"what": "dispatch_lateness", "figure": 0.5, "limit": 0.002, "says": "1 of 10 requests left late"}
BAD: dict[str, Any] = replay_result(10) | {"verdict": {"valid": False, "findings": [LATE]}}
GOOD: dict[str, Any] = replay_result(10)


def report(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: str | Path
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["llmtap", "report", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


@pytest.fixture
def place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """What `llmtap replay --json` writes."""
    path = tmp_path / "result.json"
    outputs = Outputs(json=str(path), html=None, markdown=None)
    outputs.tell(BAD)
    return path


def test_a_result_is_told_with_its_verdict(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = capsys.readouterr().out  # by the replay itself
    code, out, err = report(capsys, monkeypatch, place)
    assert (code, out, err) == (0, told, "")
    lines = out.splitlines()
    assert lines[0].startswith("trace.csv to http://host:8000 · ")
    assert lines[-2:] == [
        "verdict    Not valid. What speaks against the figures:", "NOT VALID: 1 of 10 requests left late",
    ]  # fmt: skip


def test_a_result_is_a_page_and_markdown_and_json(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page, text = tmp_path / "page.html", tmp_path / "text.md"
    code, _, err = report(capsys, monkeypatch, place, "--html", page, "--markdown", text)
    assert (code, err) == (0, "")
    assert "Not valid. What speaks against the figures:1 of 10" in Page(page.read_text()).words
    assert "**Not valid.** What speaks against the figures:\n\n- 1 of 10" in text.read_text()
    code, out, err = report(capsys, monkeypatch, place, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == json.loads(place.read_text())
    code, out, err = report(capsys, monkeypatch, place, "--markdown", "-")
    assert (code, out, err) == (0, text.read_text(), "")


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (("--by", "tenant"), "--by: is of a capture"),
        (("--slo", "ttft:1s"), "--slo: is of a capture"),
        (("--integrity",), "--integrity: is of a capture"),
        (("--skip-broken",), "--skip-broken: is of a capture"),
        (("--html", "no/where.html"), "--html: there is no folder no"),
        (("--json", "--markdown", "-"), "--markdown: is written to stdout, and --json is, too"),
    ],
)
def test_what_a_result_has_no_use_for_is_named(
    place: Path, args: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    code, out, err = report(capsys, monkeypatch, place, *args)
    assert (code, out) == (2, "")
    assert problem in err


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"{}", b"PAR1", b"\xff\xfe{}",
        b'{"load": {}, "sender": {}, "plan": {}, "metrics": 1}',
        b'{"timestamp": 0, "input_length": 9, "output_length": 9, "hash_ids": [1]}\n' * 2, b"{" * 9_999,
    ],
)  # fmt: skip
def test_other_files_are_no_results(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    assert load_result(path) is None
    assert load_result(tmp_path) is None
    assert load_result(tmp_path / "missing") is None


def test_a_result_may_have_its_keys_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "sorted.json"
    path.write_text("\n  " + json.dumps(BAD, sort_keys=True))
    assert load_result(path) == json.loads(json.dumps(BAD))


def test_beside_a_capture_lie_the_verdicts_of_its_replays(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_capture(tmp_path / "llmtap-1.parquet", [streamed(1), streamed(2)], ledger=ledger(2))
    assert not list(verdicts_beside([str(tmp_path)]))
    for result, start in ((BAD, "2026-11-22T09:05:46.476Z"), (GOOD, "2026-11-22T09:05:47.000Z")):
        window = result["window"] | {"start": start}
        write_beside(str(tmp_path), result | {"window": window})
    (tmp_path / "replay-none.json").write_text("{}")
    names = ["replay-20261122T090546476Z.json", "replay-20261122T090547000Z.json"]
    assert [name for name, _ in verdicts_beside([str(tmp_path), "missing"])] == names
    code, out, err = report(capsys, monkeypatch, tmp_path)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("2 exchanges · 1 file, ")
    assert lines[-5:-1] == [
        f"replay     {names[0]}", "verdict    Not valid. What speaks against the figures:",
        "NOT VALID: 1 of 10 requests left late", f"replay     {names[1]}",
    ]  # fmt: skip
    assert lines[-1].startswith("verdict    Valid.")
    code, out, err = report(capsys, monkeypatch, tmp_path, "--json")
    told = json.loads(out)["replays"]
    assert {name: verdict["valid"] for name, verdict in told.items()} == {names[0]: False, names[1]: True}


def test_a_store_gets_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_beside("s3://bucket/prefix", BAD)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--capture: cannot write"):
        write_beside(str(tmp_path / "gone"), BAD)
