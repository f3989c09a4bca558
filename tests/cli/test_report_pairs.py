"""`llmtap report FRONT BACK --pair`, as one types it."""

import json
from pathlib import Path

import pytest

from tests.cli.traces import Call
from tests.support.storage.captures import write_capture
from tests.support.traffic.gateway import Crossing


@pytest.fixture
def captures(tmp_path: Path) -> list[Path]:
    played = [Crossing(prompt=f"p{i}", at_ns=10**9 * (i + 1)).play(i + 1) for i in range(4)]
    backs = [back for _, own in played for back in own]
    folders = [tmp_path / "front", tmp_path / "back"]
    for folder, exchanges in zip(folders, ([front for front, _ in played], backs), strict=True):
        write_capture(folder / "llmtap-1.parquet", exchanges, pair_key="aa")
    return folders


def test_two_captures_are_paired(captures: list[Path], call: Call, tmp_path: Path) -> None:
    code, out, _ = call("report", *captures, "--pair", "--json")
    summary = json.loads(out)
    assert (code, summary["counts"]["pairs"], summary["comparable"]) == (0, 4, True)
    code, out, _ = call("report", *captures, "--pair", "--html", tmp_path / "page.html")
    assert code == 0 and "The gateway adds" in out
    assert "The gateway adds" in (tmp_path / "page.html").read_text()


def test_captures_with_other_keys_are_not_comparable(captures: list[Path], call: Call) -> None:
    write_capture(captures[1] / "llmtap-1.parquet", [Crossing().play(1)[0]], pair_key="bb")
    code, out, _ = call("report", *captures, "--pair", "--json")
    assert (code, json.loads(out)["comparable"]) == (0, False)


@pytest.mark.parametrize(
    "more", [["--by", "model"], ["--slo", "ttft:1s"], ["--integrity"], ["--compare", "x"]]
)
def test_options_of_other_reports_are_refused(captures: list[Path], call: Call, more: list[str]) -> None:
    code, _, err = call("report", *captures, "--pair", *more)
    assert code == 2 and "cannot be combined with --pair" in err


def test_a_capture_of_one_side_is_not_enough(captures: list[Path], call: Call) -> None:
    code, _, err = call("report", captures[0], "--pair")
    assert code == 2 and "front: does not have both sides of a gateway" in err
