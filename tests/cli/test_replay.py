"""`llmtap replay` as one types it, and its result read again by `llmtap report`."""

import asyncio
import json
import stat
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from llmtap.cli.results import load_result, store_result, stored_verdicts
from llmtap.errors import ConfigError, ExitCode
from llmtap.sim.server.options import SimOptions
from llmtap.units import Duration
from tests.cli.traces import Call
from tests.support.results.pages import Page
from tests.support.results.replay_results import replay_result
from tests.support.servers.sim_engine import engine
from tests.support.storage.captures import ledger, write_capture
from tests.support.traffic.exchanges import streamed

LATE = {"what": "dispatch_lateness", "figure": 0.5, "limit": 0.002, "says": "1 of 10 requests left late"}
GOOD: dict[str, Any] = replay_result(10)
BAD: dict[str, Any] = GOOD | {"verdict": GOOD["verdict"] | {"valid": False, "findings": [LATE]}}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b"PAR1",
        b"\xff\xfe{}",
        b'{"load": {}, "sender": {}, "plan": {}, "metrics": 1}',
        b'{"timestamp": 0, "input_length": 9, "output_length": 9, "hash_ids": [1]}\n' * 2,
        b"{" * 9_999,
    ],
)
def test_other_files_are_no_results(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    assert load_result(path) is None
    assert load_result(tmp_path) is None
    assert load_result(tmp_path / "missing") is None


def test_two_results_are_not_one_report(tmp_path: Path, call: Call) -> None:
    for name in "ab":
        (tmp_path / name).write_text(json.dumps(GOOD))
    code, _, err = call("report", tmp_path / "a", tmp_path / "b")
    assert (code, f"{tmp_path / 'a'}: is a stored result" in err) == (2, True)


def test_beside_a_capture_lie_the_verdicts_of_its_replays(tmp_path: Path, call: Call) -> None:
    tmp_path = tmp_path / "capture"
    tmp_path.mkdir()
    write_capture(tmp_path / "llmtap-1.parquet", [streamed(1), streamed(2)], ledger=ledger(2))
    assert not list(stored_verdicts([str(tmp_path)]))
    for result, start in ((BAD, "2026-11-22T09:05:46.476Z"), (GOOD, "2026-11-22T09:05:47.000Z")):
        window = result["window"] | {"start": start}
        store_result(str(tmp_path), result | {"window": window})
    assert [path.suffix for path in tmp_path.iterdir()] == [".parquet"], "one dataset for other tools"
    assert pq.read_table(tmp_path).num_rows == 2
    (tmp_path / "replay-none.json").write_text("{}")
    names = ["replay-20261122T090546476Z.json", "replay-20261122T090547000Z.json"]
    assert [name for name, _ in stored_verdicts([str(tmp_path), "missing"])] == names
    code, out, err = call("report", tmp_path)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("2 exchanges · 1 file, ")
    assert [line for line in lines if line.startswith("replay ")] == [f"replay {name}" for name in names]
    assert lines[-4].startswith("NOT VALID.")
    assert lines[-3] == "- 1 of 10 requests left late (limit 2.00 ms)"
    assert lines[-1].startswith("Valid.")
    code, out, err = call("report", tmp_path, "--json")
    report = json.loads(out)["replays"]
    assert {name: verdict["valid"] for name, verdict in report.items()} == {names[0]: False, names[1]: True}


def test_a_store_gets_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store_result("s3://bucket/prefix", BAD)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--capture: cannot write"):
        store_result(str(tmp_path / "gone" / "capture"), BAD)


REPLAY = [sys.executable, "-P", "-m", "llmtap.cli", "replay"]
TIMEOUT_S = 250


async def replayed(*args: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a replay to a server of our own."""
    # With gaps of 0 all tokens can come in one read, and no self-test has such a load.
    async with engine(SimOptions(ttft=Duration(0), itl=Duration(2_000_000), tokens=5)) as server:
        process = await asyncio.create_subprocess_exec(
            *REPLAY,
            *args,
            "--target",
            server.url,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def test_a_replay_is_a_page_of_what_its_json_says(tmp_path: Path) -> None:
    page, report = tmp_path / "page.html", tmp_path / "result.json"
    args = (
        "conversation",
        "--rate",
        "100",
        "--requests",
        "20",
        "--html",
        str(page),
        "--json",
        str(report),
        "--capture",
        str(tmp_path / "c"),
        "--csv",
        str(tmp_path / "rows.csv"),
    )
    code, out, err = asyncio.run(replayed(*args))
    # This machine may be too busy for valid figures, which is not what this test is about.
    assert code in (ExitCode.OK, ExitCode.NOT_VALID), err
    assert "20 of 20 sent" in out
    result = json.loads(report.read_text())
    made = Page(page.read_text())
    assert made.headings[0].startswith("Replay of conversation to http://127.0.0.1:")
    verdict = result["verdict"]
    assert verdict["valid"] == (code == 0)
    grade = "NOT VALID." if code else "Caution." if verdict["findings"] else "Valid."
    assert grade in made.words
    (first, *_) = made.figures["plots"]["first-token-0"]["series"]
    assert first["x"][0] in (result["quantiles"]["submit"]["ttft"][0] * k for k in (1.0, 1e3))
    sent = next(one for one in made.figures["plots"]["load-0"]["series"] if one["name"] == "sent")
    assert sum(sent["y"][:-1]) == result["load"]["sent"] == 20
    # Only the owner may read the requests, and what was measured of each.
    private = [tmp_path / "rows.csv", *tmp_path.glob("c.replay-*.json"), *(tmp_path / "c").glob("*.parquet")]
    assert [stat.S_IMODE(path.stat().st_mode) for path in private] == [0o600] * 3
    rows = dict(row for row in made.tables["settings"] if len(row) == 2)
    assert f"(n {result['selftest']['itl']['n']:,}); self-test of" in rows["our own error"]
    assert "our own error  TTFT" in out


def test_selftest_states_load_count_and_duration(call: Call) -> None:
    code, out, _ = call("selftest", "--streams", 2, "--itl", "100ms", "--duration", "1s", "--json", "-")
    report = json.loads(out)
    assert (code, report["unmatched"], report["load"]["streams"]) == (0, 0, 2)
    assert report["load"]["tokens_per_second"] > 0
    code, out, _ = call("selftest", "--streams", 1, "--itl", "100ms", "--duration", "1s")
    assert code == 0
    assert out.splitlines()[0].startswith("99 % of TTFTs")
    assert out.splitlines()[1].startswith("1 stream, ")
    assert {line.split()[0] for line in out.splitlines()[1:]} >= {"error,", "TTFT", "ITL"}
    code, _, err = call("selftest", "--itl", "0.1ms")
    assert (code, "--itl: expected a time from 1 ms to 60 s, got 100 us" in err) == (2, True)
