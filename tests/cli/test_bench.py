"""`llmtap bench`, as one types it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from llmtap.bench.run.test import TESTS
from llmtap.cli.bench import _command
from llmtap.cli.main import app
from llmtap.errors import ConfigError
from tests.bench.support import sim

BENCH = [sys.executable, "-P", "-m", "llmtap.cli", "bench"]
NOBODY = "http://127.0.0.1:9"
SMALL = (
    "--set", "target.endpoint=completions", "--set", "target.metrics=none", "--set", "ttft.requests=10",
    "--set", "ttft.concurrency=4", "--warmup", "2",
)  # fmt: skip


def run(*args: str, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
    where = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run([*BENCH, *args], capture_output=True, text=True, timeout=280, cwd=cwd, env=where)


def test_the_tests_are_commands_with_their_sections_and_parameters() -> None:
    said = run("--help").stdout
    for name, (section, title) in TESTS.items():
        assert re.search(rf"^  {name} +{section} {title}$", said, re.MULTILINE)
    for command in ("all", "list", "init", "compliance"):
        assert re.search(rf"^  {command} ", said, re.MULTILINE)
    listed = run("list").stdout
    for section, title in TESTS.values():
        assert f"{title} (IETF {section})" in listed
    assert "needs [arms.cache_off] and [arms.cache_on]\n" in listed
    guards = "[arms.input_filter], [arms.output_filter], [arms.full]"
    assert f"needs [arms.baseline], and one or more of {guards}\n" in listed
    assert re.search(r"^  requests +10000 +.*\(--quick: \d+\)$", run("list", "ttft").stdout, re.MULTILINE)


def test_help_is_quick_to_come_and_loads_no_room_of_a_benchmark() -> None:
    code = (
        "import sys, llmtap.cli.bench;"
        " print([m for m in sys.modules if m in ('scipy', 'pyarrow', 'aiohttp', 'llmtap.bench.run.session')])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=280)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_demands_are_listed() -> None:
    lines = run("compliance").stdout.splitlines()
    assert lines[0].split()[:2] == ["Demand", "Level"]
    assert any(line.startswith("4.2.5-1 ") and "MUST NOT" in line for line in lines)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("ttft",), "--target: is missing"),
        (("ttft", "--target", NOBODY), "tests.ttft.rate: is not given"),
        (("ttft", "--target", NOBODY, "--set", "reqests=1"), "--set reqests: there is no such parameter"),
        (("ttft", "--target", NOBODY, "--set", "requests=x"), "--set requests: 'x' is no whole number"),
        (("ttft", "--target", NOBODY, "--set", "rate=4"), f"--target: {NOBODY} cannot be reached"),
        (("ttft", "--target", NOBODY, "--warmup", "some"), "--warmup: 'some' is neither"),
        (("ttft", "--target", NOBODY, "--config", "none.toml"), "--config: none.toml cannot be read"),
        (("ttft", "--target", NOBODY, "--html", "no/where.html"), "--html: there is no folder no"),
        (("ttft", "--target", NOBODY, "--json", "-", "--markdown", "-"), "is written to stdout"),
        (("ttft", "--target", NOBODY, "--again"), "--again: is of results that are there"),
        (("list", "tttf"), "no test is called 'tttf'"),
        (("init",), "--target: is missing"),
        (("init", "--target", NOBODY, "-"), "--target: http://127.0.0.1:9 cannot be reached"),
        (("prefix-cache", "--target", NOBODY), "[arms.cache_off]: is missing"),
    ],
)
def test_what_does_not_fit_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["bench", *args])
    assert isinstance(done.exception, ConfigError), done.output
    assert says in str(done.exception)
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_the_command_that_goes_on_measures_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["llmtap", "bench", "ttft", "--again", "--results", "my r"])
    assert _command(Path("my r")) == "llmtap bench ttft --results 'my r'"


def test_other_parameters_are_exit_2_and_replace_nothing(tmp_path: Path) -> None:
    held = {"quick": False, "seed": 42, "warmup": "auto", "params": {"requests": 12, "rate": 4.0}}
    (tmp_path / "r/ttft").mkdir(parents=True)
    for at, told in (("bench.json", {}), ("ttft/result.json", held)):
        (tmp_path / "r" / at).write_text(json.dumps(told))
    done = run("ttft", "--target", NOBODY, "--set", "rate=9", "--results", "r", cwd=tmp_path)
    assert done.returncode == 2
    assert "requests 12 there, 10000 now; rate 4.0 there, 9.0 now" in done.stderr
    assert "--again" in done.stderr
    assert json.loads((tmp_path / "r/ttft/result.json").read_text()) == held
    assert (tmp_path / "r/bench.json").read_text() == "{}"


def test_what_does_not_fit_is_exit_2(tmp_path: Path) -> None:
    done = run("ttft", cwd=tmp_path)
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "llmtap: --target: is missing")


def test_a_file_is_written_once_and_is_what_a_test_runs_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with sim("--ttft", "20ms") as url:
        init = ["bench", "init", "--target", url]
        said = CliRunner().invoke(app, init).output
        assert "the server told sut.software" in said
        assert re.search(r"^llmtap: \d+ declarations? that the draft demands .*sut.prefix_cache", said, re.M)
        assert "--force" in str(CliRunner().invoke(app, init).exception)
        assert CliRunner().invoke(app, [*init, "--force"]).exit_code == 0
        done = run("ttft", "--config", "bench.toml", *SMALL, "--json", "-", cwd=tmp_path)
    assert done.returncode in (0, 1), done.stderr
    told = json.loads(done.stdout)
    assert told["sut"]["software"] == "llmtap sim serve"
    assert re.fullmatch(r"bench-results/\d{8}T\d{6}Z-ttft", told["results"])
    assert (tmp_path / told["results"] / "minimum.txt").read_text().startswith("=== LLM Benchmark Report")


def test_a_result_is_shown_written_and_gone_on_with(tmp_path: Path) -> None:
    outputs = ("--json", "r.json", "--html", "r.html", "--markdown", "r.md", "--results", "r")
    with sim("--ttft", "20ms") as url:
        first = run("ttft", "--target", url, *SMALL, *outputs, cwd=tmp_path)
        second = run("ttft", "--target", url, *SMALL, *outputs, cwd=tmp_path)
    # 1 is the verdict's: how busy this machine is, is not what is asked here.
    assert first.returncode in (0, 1), first.stderr
    assert "Table 1: TTFT Results" in first.stdout
    assert "=== End Report ===" in first.stdout
    assert "results: r" in first.stdout
    assert json.loads((tmp_path / "r.json").read_text())["tests"][0]["test"] == "ttft"
    assert "5.1 Time to First Token" in (tmp_path / "r.html").read_text()
    assert (tmp_path / "r.md").read_text() == (tmp_path / "r/report.md").read_text()
    assert "load: measured before" in second.stderr
    assert "sent" not in second.stderr
    page = subprocess.run(
        [*BENCH[:-1], "report", "r", "--html", "again.html"], capture_output=True, text=True, timeout=280,
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert page.returncode == 0, page.stderr
    assert "Table 1: TTFT Results" in page.stdout
    assert (tmp_path / "again.html").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_one_signal_keeps_what_is_done_and_says_how_to_go_on(tmp_path: Path, number: signal.Signals) -> None:
    with sim("--ttft", "20ms", "--itl", "20ms") as url:
        args = ("ttft", "--target", url, *SMALL, "--set", "ttft.requests=500", "--results", "r")
        with subprocess.Popen(
            [*BENCH, *args], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        ) as process:  # fmt: skip
            assert process.stderr is not None
            for line in process.stderr:
                if " of 500, in flight" in line:
                    break
            process.send_signal(number)
            began = time.monotonic()
            said = process.stderr.read()
            code = process.wait(200)
    assert code == 128 + number, said
    assert time.monotonic() - began < 120, "not the minutes that all of it takes"
    assert "To go on:" in said
    assert f"llmtap bench ttft --target {url}" in said
    assert "--results r" in said
    assert (tmp_path / "r/bench.json").exists()
    assert not (tmp_path / "r/ttft/result.json").exists()
