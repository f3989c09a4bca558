"""`llmtap replay --html`, as one types it: a page beside the JSON, or a sentence before anything is sent."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages import Page
from tests.support.sim_engine import engine

REPLAY = [sys.executable, "-P", "-m", "llmtap.cli", "replay"]
TIMEOUT_S = 250


async def replayed(*args: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a replay to a server of our own."""
    async with engine() as server:
        process = await asyncio.create_subprocess_exec(
            *REPLAY, *args, "--target", server.url, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def test_a_replay_is_a_page_of_what_its_json_says(tmp_path: Path) -> None:
    page, told = tmp_path / "page.html", tmp_path / "result.json"
    args = ("conversation", "--rate", "100", "--requests", "20", "--html", str(page), "--json", str(told))
    code, out, err = asyncio.run(replayed(*args))
    # 1 is the verdict's: how busy this machine is, is not what is asked here.
    assert code in (0, 1), err
    assert "20 of 20 sent" in out
    result = json.loads(told.read_text())
    made = Page(page.read_text())
    assert made.headings[0].startswith("Replay of conversation to http://127.0.0.1:")
    assert ("Not valid." if code else "Valid.") in made.words
    (first, *_) = made.figures["plots"]["first-token-0"]["data"]
    assert first["x"][0] in (result["quantiles"]["submit"]["ttft"][0] * k for k in (1.0, 1e3))
    sent = next(one for one in made.figures["plots"]["load-0"]["data"] if one["name"] == "sent")
    assert sum(sent["y"][:-1]) == result["load"]["sent"] == 20
    rows = dict(row for row in made.tables["settings"] if len(row) == 2)
    assert rows["plan.workload.sha256"] == result["plan"]["workload"]["sha256"]


def refused(*args: str) -> "subprocess.CompletedProcess[str]":
    """With a target that nobody listens at: it is never asked."""
    return subprocess.run(
        [*REPLAY, "conversation", "--target", "http://127.0.0.1:9", *args], capture_output=True, text=True,
        timeout=TIMEOUT_S,
    )  # fmt: skip


def test_a_page_without_a_place_is_refused_at_once(tmp_path: Path) -> None:
    missing = tmp_path / "no" / "page.html"
    done = refused("--html", str(missing))
    assert done.returncode == 2
    assert f"--html: there is no folder {missing.parent}" in done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_page_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    done = refused("--html", str(tmp_path / "page.html"))
    assert done.returncode == 2
    assert "--html: cannot write" in done.stderr


def test_a_page_is_not_made_where_a_folder_is(tmp_path: Path) -> None:
    done = refused("--html", str(tmp_path))
    assert done.returncode == 2
    assert "--html: cannot write" in done.stderr
    assert tmp_path.is_dir()


def test_nothing_is_left_of_a_page_that_was_not_made(tmp_path: Path) -> None:
    page, kept = tmp_path / "page.html", tmp_path / "kept.html"
    kept.write_text("of yesterday")
    for place in (page, kept):
        assert refused("--html", str(place)).returncode == 2
    assert not page.exists()
    assert kept.read_text() == "of yesterday"
