"""`llmtap watch`: its options, and a file read to its summary. Live packets: `tests/vantage/passive`."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from llmtap.cli.main import app, load_commands
from llmtap.errors import ConfigError
from llmtap.supervisor import watching
from llmtap.vantage.passive import ring
from tests.vantage.passive.test_pcap_file import conversation, pcap

load_commands()


def run(*args: str, stdin: bytes | None = None, **environ: str) -> Any:
    environ = {"LLMTAP_CONFIG": None, **environ}  # type: ignore[dict-item]
    return CliRunner().invoke(app, ["watch", *args], env=environ, input=stdin)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    place = tmp_path / "a.pcap"
    place.write_bytes(pcap(conversation()))
    return place


def test_a_file_and_standard_input_give_the_summary_in_file_time(file: Path) -> None:
    of_file, of_stdin = (
        run("--read", str(file), "--json"),
        run("--read", "-", "--json", stdin=file.read_bytes()),
    )
    assert of_file.exit_code == of_stdin.exit_code == 0, of_file.output
    told = json.loads(of_file.stdout)
    assert told == json.loads(of_stdin.stdout)
    assert (told["n"], told["outcomes"], told["uncertainty"]) == (1, {"complete": 1}, 1e-9)
    assert told["metrics"]["ttft"]["p50"] == pytest.approx(0.002, rel=0.02)
    assert told["load"]["mode"] == "recorded"
    relay = told["relays"]["file"]
    assert (relay["opened"], relay["measured"], relay["packets"]) == (1, 1, {"captured": 11})
    assert relay["watched"] == {"followed": 1} and relay["vantage"] == "passive"


def test_a_file_is_captured_and_its_accounts_are_in_the_integrity(file: Path, tmp_path: Path) -> None:
    done = run("--read", str(file), "--capture", str(tmp_path / "c"), "--port", "8000,9000")
    assert done.exit_code == 0 and "connections: followed 1" in done.stdout
    report = CliRunner().invoke(app, ["report", str(tmp_path / "c"), "--integrity", "--json"])
    ((relay,),) = [capture["relays"] for capture in json.loads(report.stdout)["captures"]]
    assert (relay["present"], relay["missing"], relay["watched"]) == (1, 0, {"followed": 1})


def test_inspect_and_watch_warn_of_a_file_that_was_cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])
    for command in (["inspect", str(file)], ["watch", "--read", str(file)]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0 and "ends within a packet" in done.output


def test_a_stopped_file_gives_what_was_read(file: Path) -> None:
    from llmtap.vantage.passive.file_vantage import FileVantage
    from llmtap.vantage.passive.options import WatchOptions

    vantage = FileVantage(WatchOptions(), lambda frames, now_ns: None)
    assert vantage.stop()
    vantage.read(io.BytesIO(file.read_bytes()))
    assert (vantage.status().packets, vantage.status().unsettled) == ({"captured": 1}, 0)


def test_a_check_reads_no_file() -> None:
    done = run("--read", "nowhere.pcap", "--check")
    assert (done.exit_code, done.stdout[:11]) == (0, "ok (config ")


def refused(*args: str, **environ: str) -> ConfigError:
    done = run(*args, **environ)
    assert isinstance(done.exception, ConfigError), done.output
    return done.exception


def test_a_missing_permission_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> object:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(ring.socket, "socket", denied)
    exc = refused("--interface", "lo", "--port", "80")
    assert exc.place == "watch.interfaces" and "CAP_NET_RAW" in (exc.hint or "")


def test_a_check_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "open_ring", None)
    done = run("--check", "--interface", "lo", "--port", "80")
    assert (done.exit_code, done.stdout.startswith("ok (config ")) == (0, True)


def test_a_check_reports_everything_that_this_host_does_not_have() -> None:
    wrong = ("watch.user=nobody-of-this-name", "watch.ring_bytes=100KiB")
    options = [option for value in wrong for option in ("--set", value)]
    exc = refused("--check", "--interface", "lo", "--interface", "eth98", "--port", "80", *options)
    places = [error.place.partition(" ")[0] for error in exc.all_errors()]
    assert places == ["watch.interfaces[1]", "watch.ring_bytes", "watch.user"]


def test_a_cut_file_warns(file: Path) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[:-3])
    done = run("--read", str(file))
    assert done.exit_code == 0
    assert f"at byte {len(whole) - 3:,}" in done.stderr


@pytest.mark.parametrize("command", ["watch", "inspect"])
def test_packets_before_damage_are_measured(file: Path, command: str) -> None:
    file.write_bytes(file.read_bytes() + b"\xff" * 16)
    if command == "watch":
        done = run("--read", str(file), "--json")
        assert (done.exit_code, json.loads(done.stdout)["n"]) == (1, 1)
    else:
        done = CliRunner().invoke(app, ["inspect", str(file), "--json"])
        assert (done.exit_code, len(json.loads(done.stdout))) == (0, 1)
    assert f"{file}: the file is damaged before byte {file.stat().st_size:,}" in done.stderr


def test_inspect_lists_the_exchanges_of_a_file_and_explains_one(file: Path) -> None:
    def inspect(*args: str) -> Any:
        return CliRunner().invoke(app, ["inspect", str(file), *args])

    listed = inspect()
    head, row = listed.stdout.splitlines()
    cells = dict(zip(*(re.split("  +", line.strip()) for line in (head, row)), strict=True))
    assert (cells["#"], cells["status"], cells["outcome"], cells["events"]) == ("0", "200", "complete", "6")
    assert float(cells["TTFT ms"]) == 2.0 and cells["request"] == "POST /v1/chat/completions"
    assert "1 followed" in listed.stderr
    (told,) = json.loads(inspect("--json").stdout)
    assert told["clock"] == "packet" and told["metrics"]["ttft"] == pytest.approx(0.002)
    explained = inspect("--entry", "0")
    assert explained.exit_code == 0 and "w3" in explained.stdout
    assert (
        re.search(r"^0 +2\.000 ", explained.stdout, re.MULTILINE)
        and "times: ttft 2.00 ms" in explained.stdout
    )
    one = json.loads(inspect("--entry", "0", "--json").stdout)
    assert (one["method"], one["metrics"]) == ("POST", told["metrics"])
    assert [event["t"] for event in one["events"]][:1] == [pytest.approx(0.002)]
    assert isinstance(inspect("--entry", "7").exception, ConfigError)
