"""Ctrl-C before a command has begun ends it with 130; outputs and pairs name their option."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from llmtap.cli.shared import Outputs, read_pairs
from llmtap.errors import ConfigError
from tests.cli.traces import Call
from tests.support.storage.captures import write_capture
from tests.support.traffic.exchanges import streamed

SCRIPT = """
import os, signal, sys

when, *sys.argv[1:] = sys.argv[1:]

class CtrlC:
    "It comes while that module is looked for: in the middle of whatever reads it."
    def find_spec(self, name, path=None, target=None):
        if name == when:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, CtrlC())
from llmtap.cli.__main__ import main
main()
"""
REPLAY = ("replay", "conversation", "--rate", "4", "--target", "http://127.0.0.1:9")


def interrupted(when: str, *args: str) -> "subprocess.CompletedProcess[str]":
    """A command that gets a SIGINT as it reads that module."""
    command = [sys.executable, "-P", "-c", SCRIPT, when, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize(
    ("when", "args"),
    [
        ("llmtap.cli.main", ("--version",)),
        ("llmtap.cli.bench_exo", ("--version",)),
        ("llmtap.load.replay.perform", REPLAY),
        ("llmtap.config", ("proxy", "--check")),
    ],
)
def test_while_a_command_reads_what_it_needs(when: str, args: tuple[str, ...]) -> None:
    done = interrupted(when, *args)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def told(outputs: Outputs) -> None:
    outputs.write_or_show({"--html": lambda: "page", "--json": lambda: "{}"}, lambda: print("table"))


def test_texts_go_to_their_files_and_to_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "page.html"
    told(Outputs(html=str(place)))
    assert (place.read_text(), capsys.readouterr().out) == ("page\n", "table\n")
    told(Outputs(html=str(place), json="-"))
    assert capsys.readouterr().out == "{}\n"


def test_a_place_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    missing = tmp_path / "no" / "page.html"
    with pytest.raises(ConfigError, match=f"--html: the folder {missing.parent} does not exist"):
        Outputs(html=str(missing))
    with pytest.raises(ConfigError, match="--html: cannot write"):
        Outputs(html=str(tmp_path))
    with pytest.raises(ConfigError, match="--markdown: cannot be written to stdout together with --html"):
        Outputs(html="-", markdown="-")


def test_pairs_of_options_name_the_option() -> None:
    assert read_pairs("--set", ["a = 1", "b=c=d"]) == {"a": "1", "b": "c=d"}
    with pytest.raises(ConfigError, match="--set: expected KEY=VALUE, got 'a'"):
        read_pairs("--set", ["a"])
    with pytest.raises(ConfigError, match="--set a: is given twice"):
        read_pairs("--set", ["a=1", "a=2"], unique=True)


def test_the_goodput_of_vllm_is_in_milliseconds_and_percentiles_can_be_chosen(
    tmp_path: Path, call: Call
) -> None:
    """`streamed` has a TTFT of 99 ms and a TPOT of its gap: 20, 40, and 60 ms (seed 002, "Goodput")."""
    place = write_capture(tmp_path / "c", [streamed(i, gap_ms=gap) for i, gap in enumerate((20, 40, 60), 1)])
    args = ("report", place, "--goodput", "ttft:200", "tpot:50", "--percentiles", "25", "75", "99.5")
    code, out, err = call(*args, "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert told["goodput"]["objectives"] == "ttft:200ms tpot:50ms"
    assert (told["goodput"]["met"], told["goodput"]["counted"]) == (2, 3)
    tpot = told["metrics"]["tpot"]
    assert [round(tpot[name], 3) for name in ("p25", "p50", "p75", "p995")] == [0.03, 0.04, 0.05, 0.06]
    _, out, _ = call(*args)
    (heads,) = (line.split() for line in out.splitlines() if line.startswith("ms "))
    assert heads == ["ms", "n", "mean", "p25", "p50", "p75", "p90", "p99", "p99.5", "max"]


@pytest.mark.parametrize(
    ("args", "to_file"),
    [
        (["report", "x.json", "--json"], False),
        (["report", "--json", "x.json"], False),
        (["report", "--json=out.json", "x.json"], True),
        (["sim", "run", "t.csv", "--json", "--jobs", "1", "--scheduler", "static_fifo"], False),
        (["sim", "run", "t.csv", "--json", "out.json", "--jobs", "1", "--scheduler", "static_fifo"], True),
    ],
)
def test_json_is_printed_or_written_to_a_file(
    args: list[str], to_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    monkeypatch.chdir(tmp_path)
    data = Path(__file__).parents[1] / "data"
    for name, source in (("x.json", "replay.json"), ("t.csv", "trace.csv")):
        (tmp_path / name).write_bytes((data / source).read_bytes())
    code, out, _ = call(*args)
    assert code == 0
    assert (tmp_path / "out.json").exists() is to_file
    json.loads((tmp_path / "out.json").read_text() if to_file else out)
