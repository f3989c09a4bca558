"""`llmtap bench`, as one types it."""

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress as RichProgress
from rich.progress import TextColumn
from typer.testing import CliRunner

from llmtap.bench.sut.sut import load_bench
from llmtap.bench.tests.throughput import ThroughputParams
from llmtap.cli import bench as bench_command
from llmtap.cli import bench_exo
from llmtap.cli import progress as bench_progress
from llmtap.cli.main import app
from llmtap.cli.progress import ProgressBar, ProgressLines
from llmtap.errors import ConfigError, ExitCode
from llmtap.load.workers.worker_handle import Progress
from llmtap.sim.server.options import SimOptions
from llmtap.units import Duration
from tests.bench.support import sim
from tests.cli.traces import FREQUENT_PROGRESS, Call
from tests.support.results.bench_results import results_folder
from tests.support.servers.sim_engine import QUICK, engine

BENCH = [sys.executable, "-P", "-m", "llmtap.cli", "bench"]
NOBODY = "http://127.0.0.1:9"
SMALL = (
    "--set",
    "target.endpoint=completions",
    "--set",
    "target.metrics=none",
    "--set",
    "ttft.requests=10",
    "--set",
    "ttft.concurrency=4",
    "--warmup",
    "2",
)


def run(*args: str, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
    where = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run([*BENCH, *args], capture_output=True, text=True, timeout=280, cwd=cwd, env=where)


def test_help_is_quick_to_come_and_loads_no_room_of_a_benchmark() -> None:
    code = (
        "import sys, llmtap.cli.bench;"
        " print([m for m in sys.modules if m in ('scipy', 'pyarrow', 'aiohttp', 'llmtap.bench.run.session')])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=280)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_result_is_shown_written_and_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    """The file that `init` writes is what the test runs with, twice; then the report is made again."""
    monkeypatch.chdir(tmp_path)
    outputs = ("--json", "r.json", "--html", "r.html", "--markdown", "r.md", "--results", "r")
    with sim("--ttft", "20ms") as url:
        init = ["bench", "init", "--target", url]
        assert "sut.software" in CliRunner().invoke(app, init).output
        assert "--force" in str(CliRunner().invoke(app, init).exception)
        assert CliRunner().invoke(app, [*init, "--force"]).exit_code == 0
        first = run("ttft", "--config", "bench.toml", *SMALL, *outputs, cwd=tmp_path)
        second = run("ttft", "--config", "bench.toml", *SMALL, *outputs, cwd=tmp_path)
    # On a busy machine a figure may not be valid.
    assert first.returncode in (ExitCode.OK, ExitCode.NOT_VALID), first.stderr
    assert "Table 1: TTFT Results" in first.stdout
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["sut"]["software"] == "llmtap sim serve"
    assert report["tests"][0]["test"] == "ttft"
    assert "5.1 Time to First Token" in (tmp_path / "r.html").read_text()
    assert (tmp_path / "r.md").read_text() == (tmp_path / "r/report.md").read_text()
    assert (tmp_path / "r/minimum.txt").read_text().startswith("=== LLM Benchmark Report")
    assert "load: measured before" in second.stderr
    assert "sent" not in second.stderr
    code, out, _ = call("report", "r", "--html", "again.html")
    assert code == 0
    assert "Table 1: TTFT Results" in out
    assert (tmp_path / "again.html").exists()


def test_runs_of_two_systems_alternate_and_are_compared(tmp_path: Path) -> None:
    with sim("--ttft", "20ms", "--itl", "1ms") as a, sim("--ttft", "120ms", "--itl", "1ms") as b:
        (tmp_path / "b.toml").write_text(f'[target]\nurl = "{b}"\n')
        done = run(
            "ttft",
            "--target",
            a,
            "--against",
            "b.toml",
            *SMALL,
            "--results",
            "r",
            "--json",
            "c.json",
            "--no-selftest",
            cwd=tmp_path,
        )
    report = json.loads((tmp_path / "c.json").read_text())
    invalid = report["tests"][0]["invalid"]  # this machine may be too busy
    assert done.returncode == (ExitCode.NOT_VALID if invalid else ExitCode.OK), done.stderr
    turns = [line.rpartition("to do: ")[2] for line in done.stderr.splitlines() if "system" in line]
    assert turns == [
        f"{i + 1} of 6: run {i // 2 + 1} of 3, system {label}" for i, label in enumerate("abbaab")
    ]
    assert [system["label"] for system in report["systems"]] == ["a", "b"]
    # The finding depends on the load of this machine. bench/report/test_compare.py tests it with given runs.
    (p50,) = (
        row
        for row in report["tests"][0]["comparisons"]
        if row["figure"] == "TTFT P50" and row["step"] == "load"
    )
    assert (p50["samples"], p50["n"], p50["m"], p50["key"]) == ("runs", 3, 3, True)
    assert "b (3 runs) against a (3 runs)" in done.stdout


@pytest.mark.parametrize("valid", [True, False])
def test_a_comparison_with_runs_that_are_not_valid_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, valid: bool
) -> None:
    late = {"step": "load", "what": "late", "says": "requests left late"}
    changes = {} if valid else {"verdict": {"valid": False, "findings": [late]}}

    def measured(systems: object, place: Path, *args: object, **how: object) -> None:
        results_folder(place / "a")
        results_folder(place / "b", place_in_turn=1, changes=changes)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench_command, "_measure_alternately", measured)
    (tmp_path / "b.toml").write_text(f'[target]\nurl = "{NOBODY}"\n')
    options = ("--target", NOBODY, "--set", "rate=1", "--against", "b.toml", "--results", "r")
    done = CliRunner().invoke(app, ["bench", "ttft", *options])
    assert done.exit_code == (ExitCode.OK if valid else ExitCode.NOT_VALID), done.output
    assert ("not valid are its runs 1, 2, 3 of 3" in done.output) == (not valid)


def test_one_signal_keeps_what_is_done_and_says_how_to_go_on(tmp_path: Path) -> None:
    with sim("--ttft", "20ms", "--itl", "20ms") as url:
        args = ("ttft", "--target", url, *SMALL, "--set", "ttft.requests=500", "--results", "r")
        with subprocess.Popen(
            [sys.executable, "-P", "-c", FREQUENT_PROGRESS, "bench", *args],
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        ) as process:
            assert process.stderr is not None
            for line in process.stderr:
                if " of 500, in flight" in line:
                    break
            process.send_signal(signal.SIGTERM)
            message = process.stderr.read()
            assert process.stdout is not None
            report = process.stdout.read()
            code = process.wait(200)
    assert code == 128 + signal.SIGTERM, message
    assert "To continue:" in message
    assert "Loads until the test was stopped" in report
    assert "Deviation (ttft): the test was stopped before its end" in (tmp_path / "r/report.md").read_text()
    assert f"llmtap bench ttft --target {url}" in message
    assert "--results r" in message
    assert (tmp_path / "r/bench.json").exists()
    assert not (tmp_path / "r/ttft/result.json").exists()


TIMEOUT_S = 250
assert bench_exo.exo is not None, "imported, it is one of the commands"


async def measured(*args: str, options: SimOptions = QUICK) -> tuple[int | None, str, str]:
    """Exit code, stdout and stderr of a benchmark of a server of our own."""
    async with engine(options) as server:
        process = await asyncio.create_subprocess_exec(
            *BENCH,
            *args,
            "--target",
            server.url,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    return process.returncode, out.decode(), err.decode()


def test_a_row_for_each_point_of_the_grid_and_a_run_for_each_request(tmp_path: Path) -> None:
    place = tmp_path / "exo.json"
    args = ("exo", "--pp", "16,32", "--tg", "8", "--concurrency", "1,2", "--repeat", "2", "--warmup", "1")
    quick = SimOptions(ttft=Duration(20_000_000), itl=Duration(2_000_000))
    code, out, err = asyncio.run(measured(*args, "--json", str(place), options=quick))
    assert code in (ExitCode.OK, ExitCode.NOT_VALID), err  # this machine may be too busy
    heads, *lines = out.splitlines()
    assert heads.split()[:5] == ["pp", "tg", "x", "n", "prefill"]
    assert [line.split()[:4] for line in lines[:4]] == [
        [pp, "8", n, "2"] for pp in ("16", "32") for n in ("1", "2")
    ]
    assert "client" in lines[0]
    result = json.loads(place.read_text())
    assert list(result) == ["runs", "cluster", "system_metrics"]
    assert len(result["runs"]) == 2 * (1 + 2) * 2
    run = result["runs"][0]
    named = {
        "elapsed_s",
        "output_text_preview",
        "stats",
        "model_id",
        "placement_sharding",
        "placement_instance_meta",
        "placement_nodes",
        "pp_tokens",
        "tg",
        "repeat_index",
        "concurrency",
        "concurrent_index",
        "prefix_cache_hit",
    }
    assert named <= run.keys(), "as seed 003 names them"
    assert run["stats"].keys() == {
        "prompt_tps",
        "generation_tps",
        "prompt_tokens",
        "generation_tokens",
        "peak_memory_usage",
    }
    assert result["system_metrics"]["local"]["system"]["t"]
    assert "warm-up" in err and "to do: 8 of 8 batches" in err


def progress(under_way: int, ended: int = 5) -> Progress:
    return Progress(9, under_way, ended, 0, 5, 0, None, None, None, None, None)


def bar() -> tuple[RichProgress, io.StringIO]:
    out = io.StringIO()
    return RichProgress(TextColumn("{task.description}"), console=Console(file=out, width=100)), out


def shown(of: RichProgress) -> list[tuple[str, float, float | None]]:
    return [(task.description, task.completed, task.total) for task in of.tasks if task.visible]


def test_one_thing_is_under_way_at_a_time() -> None:
    place, _ = bar()
    bars = ProgressBar(place)
    bars.on_preparing(3, 9)
    assert shown(place) == [("preparing prompts", 3, 9)]
    bars.on_warming("none")
    assert shown(place) == [("preparing prompts", 3, 9)]
    bars.on_warming("auto")
    assert shown(place) == [("warming up", 0, None)]
    bars.on_warming("auto", 40, 100)
    assert shown(place) == [("warming up", 40, 100)]
    bars.on_sending(progress(4), 14)
    assert shown(place) == [("sending", 5, 14)]
    # The next load begins where this one did.
    bars.on_preparing(1, 4)
    assert shown(place) == [("preparing prompts", 1, 4)]


def test_steps_and_what_is_left_stay_above_it() -> None:
    place, out = bar()
    watcher = ProgressBar(place)
    watcher.step("load", "8 at a time, 12 requests")
    watcher.on_sending(progress(2), 12)
    watcher.report_stop()
    watcher.report_remaining("")
    watcher.report_remaining("2 of 4 levels")
    watcher.step("other", "measured before")
    assert shown(place) == []
    lines = [line.removeprefix("llmtap: ").removeprefix("[00:00] ") for line in out.getvalue().splitlines()]
    assert lines == [
        "load: 8 at a time, 12 requests",
        "stopping: 2 answers in flight, signal again to cancel them",
        "to do: 2 of 4 levels",
        "other: measured before",
    ]


def test_the_time_until_the_last_request_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_ns = 10**9
    monkeypatch.setattr(bench_progress.SystemClock, "mono_ns", lambda: clock_ns)
    lines = ProgressLines()
    assert lines._remaining_text(progress(9, ended=0), 18) == ""  # the load begins
    clock_ns += 60 * 10**9
    assert lines._remaining_text(progress(4), 18) == ", 1:00 until the last request, then the last answers"
    assert lines._remaining_text(progress(4), None) == ""
    assert lines._remaining_text(progress(4), 9) == ", all sent"
    assert lines._remaining_text(progress(0), 9) == ""


def test_progress_lines_show_the_estimated_end_of_all_tests(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock_ns = 10**9
    monkeypatch.setattr(bench_progress.SystemClock, "mono_ns", lambda: clock_ns)
    lines = ProgressLines()
    lines.estimate_remaining(605.5)
    clock_ns += 60 * 10**9
    lines.on_sending(progress(0), 9)
    lines.estimate_remaining(20.0)  # The load ended sooner.
    clock_ns += 30 * 10**9
    lines.on_sending(progress(0), 9)
    ends = [line.partition("; ")[2] for line in capsys.readouterr().err.splitlines()]
    assert ends == ["all tests end in about 9:05", "all tests end in about 0:00"]


def test_goodput_in_vllms_form_is_the_slo_of_the_throughput_test(
    monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    sets: list[str] = []

    def load(*_: object, **options: list[str]) -> None:
        sets.extend(options["sets"])
        raise ConfigError("here", "it ends")

    with monkeypatch.context() as patch:
        patch.setattr("llmtap.bench.sut.sut.load_bench", load)
        call("bench", "throughput", "--goodput", "ttft:200", "tpot:50", "--set", "attainment=0.9")
    assert sets == ["attainment=0.9", "slo=ttft:200ms tpot:50ms"]
    file = load_bench(None, target=NOBODY, sets=sets, tests=["throughput"])
    params = file.tests["throughput"]
    assert isinstance(params, ThroughputParams)
    assert params.bounds.slo == "ttft:200ms tpot:50ms"


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (("ttft", "--goodput", "ttft:200"), "--goodput: has no effect on ttft"),
        (("throughput", "--goodput", "ttft:2s"), "--goodput: expected NAME:MILLISECONDS, got 'ttft:2s'"),
        (("throughput", "--goodput", "ttft:200", "--set", "slo=e2e:1s"), "cannot be combined with --set slo"),
    ],
)
def test_a_goodput_that_cannot_be_searched_is_refused(
    args: tuple[str, ...], problem: str, call: Call
) -> None:
    code, _, err = call("bench", *args, "--target", NOBODY)
    assert (code, problem in err) == (2, True), err
