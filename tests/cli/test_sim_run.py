import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llmtap.capture.reader import read
from llmtap.cli.main import main
from tests.support.sweeps import children

HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "a.csv"
    rows = [(i * 2, 10 + i, i % 30) for i in range(60)]
    path.write_text(HEADER + "".join(f"{t},GPT-4,{n},{m},{n + m},API log\n" for t, n, m in rows))
    return path


def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: object
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["llmtap", "sim", "run", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def test_schedulers_are_compared_in_a_table(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = run(capsys, monkeypatch, trace, "--scale", 100)
    assert (code, err) == (0, "")
    columns, *rows, foot = out.splitlines()
    assert columns.split("\t")[:3] == ["scheduler", "requests", "req/s"]
    cells = [row.split("\t") for row in rows]
    assert [c[:2] for c in cells] == [
        ["static_fifo", "60"], ["dynamic_no_bins", "60"], ["multi_bin_dynamic", "60"],
    ]  # fmt: skip
    assert all(len(c) == len(columns.split("\t")) for c in cells)
    assert "outside the request SLA of 20 s" in foot
    assert "Offered: 50 requests/s" in foot


def test_as_json_it_is_a_list_of_summaries(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = tmp_path / "out.json"
    options = ("--scheduler", "multi_bin_dynamic,static_fifo", "--rate", 5, "--requests", 100, "--bins", 3)
    code, out, _ = run(capsys, monkeypatch, trace, *options, "--eps", "1ms", "--json", place)
    told = json.loads(place.read_text())
    assert (code, out.count("\n")) == (0, 4)
    assert [t["scheduler"] for t in told] == ["multi_bin_dynamic", "static_fifo"]
    first = told[0]
    assert {
        "n", "window", "load", "metrics", "outcomes", "tokens", "scheduler", "throughput_rps",
        "throughput_tps", "latency", "request_sla_violation", "token_sla_violation", "utilization",
        "batch_mean", "queueing",
    } <= set(first)  # fmt: skip
    assert (first["n"], len(first["bins"]), first["readings"]["eps"]) == (100, 3, 0.001)
    assert (first["load"]["offered_rps"], first["scale"]) == (pytest.approx(5), pytest.approx(10))
    code, out, _ = run(capsys, monkeypatch, trace, *options, "--json", "-")
    assert [t["n"] for t in json.loads(out)] == [100, 100]


def test_readings_are_listed_and_set(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = run(capsys, monkeypatch, "--readings")
    names = [line.split("\t")[0] for line in out.splitlines()]
    assert code == 0
    assert {"reading", "eps", "bin_choice", "same_instant"} <= set(names)
    settings = ("--reading", "window=arrivals", "--reading", "failed=dropped", "--bins", "0,10,20")
    _, out, _ = run(capsys, monkeypatch, trace, *settings, "--predictor", "prompt", "--json", "-")
    told = json.loads(out)[-1]
    assert (told["n"], told["window"]["name"]) == (58, "first arrival to last arrival")
    assert (told["readings"]["predictor"], told["bins"]) == ("prompt", [[0, 10], [10, 20], [20, None]])


def test_a_grid_is_fitted_and_told(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    grid = tmp_path / "grid.csv"
    points = [(b, n, 0.02 + 0.001 * n * (1 + 0.5 * (b - 1) / b)) for b in (1, 4) for n in (100, 900)]
    grid.write_text(
        "batch_size,max_seq_len,mean_latency_sec\n" + "".join(f"{b},{n},{s!r}\n" for b, n, s in points)
    )
    _, out, _ = run(capsys, monkeypatch, trace, "--latency", grid)
    assert "alpha 20 ms, beta 1 ms/token, gamma 0.5; R^2 1.00000 on 4 points" in out


def test_the_capacity_is_searched(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--capacity", 0.1, "--scheduler", "static_fifo", "--requests", 500)
    _, out, _ = run(capsys, monkeypatch, trace, *options, "--json", "-")
    [told] = json.loads(out)
    capacity = told["capacity"]
    assert (capacity["allowed"], told["request_sla_violation"]) == (0.1, 0)
    for factor, within in ((0.98, True), (1.05, False)):
        rate = ("--rate", capacity["rps"] * factor, "--requests", 500, "--scheduler", "static_fifo")
        _, out, _ = run(capsys, monkeypatch, trace, *rate, "--json", "-")
        assert (json.loads(out)[0]["request_sla_violation"] <= 0.1) is within
    _, out, _ = run(capsys, monkeypatch, trace, *options)
    assert out.splitlines()[0].endswith("\tcapacity req/s")


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ((), "TRACE: is missing"),
        (("none.csv",), "none.csv: cannot be read: No such file"),
        (("TRACE", "--scheduler", "statik_fifo"), "--scheduler: no scheduler is called 'statik_fifo'; did"),
        (("TRACE", "--scheduler", ","), "--scheduler: names none"),
        (("TRACE", "--from", "burstgtp"), "no format to read is called 'burstgtp'; did you mean burstgpt?"),
        (("TRACE", "--scale", 0), "--scale: expected more than 0, got 0"),
        (("TRACE", "--rate", "nan"), "--rate: expected more than 0, got nan"),
        (("TRACE", "--rate", 1, "--scale", 1), "--rate: is a scale, and --scale is given"),
        (("TRACE", "--requests", -5), "--requests: expected more than 0, got -5"),
        (("TRACE", "--bins", 0), "--bins: Expected `int` >= 1"),
        (("TRACE", "--bins", "5,3"), "--bins: expected rising whole numbers"),
        (("TRACE", "--eps", "soon"), "--eps: expected a duration"),
        (("TRACE", "--predictor", "oracle"), "--predictor: is none of perfect, prompt, noisy, shuffled"),
        (("TRACE", "--reading", "window"), "--reading: expected NAME=VALUE, got 'window'"),
        (("TRACE", "--reading", "windo=x"), "--reading: no reading is called 'windo'; did you mean window?"),
        (("TRACE", "--capacity", 1), "--capacity: expected a share from 0 to below 1, got 1"),
        (("TRACE", "--latency", "none.csv"), "--latency: cannot read none.csv: No such file"),
        (("TRACE", "--latency", "TRACE"), "line 1: no column is called batch_size"),
        (("TRACE", "--requests", "9" * 20), "--requests: expected at most 1,000,000,000"),
        (("TRACE", "--fit-chunk", "512"), "--fit-chunk: is of a capture that --latency names"),
        (("TRACE", "--latency", "g.csv", "--fit-chunk", "9"), "--fit-chunk: is of a capture, and g.csv is"),
        (("TRACE", "--json", "nowhere/out.json"), "--json: there is no folder nowhere"),
        (("TRACE", "--html", "nowhere/out.html"), "--html: there is no folder nowhere"),
        (("TRACE", "--requests", "1e3"), "--requests: expected a whole number, got '1e3'"),
        (("TRACE", "--requests", ","), "--requests: names none"),
        (("TRACE", "--scale", "1,two"), "--scale: expected a number, got 'two'"),
        (("TRACE", "--servers", "1,20000"), "--servers: expected at most 10,000, got 20,000"),
        (("TRACE", "--seed", "x"), "--seed: expected a whole number, got 'x'"),
        (("TRACE", "--scheduler", "continuous_batching", "--servers", "1,2"),
         "--servers: continuous_batching has one"),
        (("TRACE", "--vary", "bins"), "--vary: expected NAME=VALUE,VALUE, got 'bins'"),
        (("TRACE", "--vary", "bins="), "--vary: bins has no values"),
        (("TRACE", "--vary", "bims=1,2"), "--vary: no reading is called 'bims'; did you mean bins?"),
        (("TRACE", "--vary", "bins=1,x"), "--vary: bins=x"),
        (("TRACE", "--vary", "chunk=64,x"), "--vary: chunk"),
        (("TRACE", "--serving", "chunks=64"), "--serving: no option of serving is called 'chunks'; did you"),
        (("TRACE", "--vary", "eps=1ms", "--eps", "5ms"), "--vary: eps is set by --eps as well"),
        (("TRACE", "--vary", "bins=1", "--vary", "bins=2"), "--vary: bins is set twice"),
        (("TRACE", "--bins", "1,30", "--vary", "bins=1,2"), "--bins: gives edges, and how many bins there"),
        (("TRACE", "--preset", "gird"), "--preset: no preset is called 'gird'; did you mean grid?"),
        (("TRACE", "--preset", "methods", "--servers", 4), "--servers: servers is what --preset methods"),
        (("TRACE", "--slo", "ttft:1s", "--no-measure"), "--no-measure: objectives are of exchanges"),
        (("TRACE", "--capture", "c", "--no-measure"), "--no-measure: a capture is of exchanges"),
        (("TRACE", "--slo", "tttf:1s"), "--slo: unknown objective 'tttf'"),
        (("TRACE", "--ray", "auto", "--jobs", 2), "--jobs: how many run at a time is up to the cluster"),
        (("TRACE", "--results", "nowhere/r.jsonl"), "--results: cannot open nowhere/r.jsonl"),
        (("TRACE", "--results", "TRACE"), "line 1: is no result of a sweep"),
        (("TRACE", "--latency", "capture", "--scheduler", "static_fifo"),
         "--latency: capture tells how long iterations take; static_fifo serves whole batches"),
        (("TRACE", "--latency", "g.csv", "--scheduler", "continuous_batching"),
         "--latency: g.csv tells how long whole batches take, and nothing of iterations"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(
    args: tuple[object, ...], problem: str, trace: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    code, out, err = run(capsys, monkeypatch, *(trace if a == "TRACE" else a for a in args))
    assert (code, out) == (2, "")
    assert problem in err
    assert len(err.splitlines()) <= 2


def test_rows_that_come_at_once_have_no_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.csv"
    path.write_text(HEADER + "1,GPT-4,5,5,10,API log\n" * 2)
    for args, problem in (
        (("--rate", 3), "--rate: all rows arrive at once"),
        (("--requests", 3), "--requests: 3 are more than"),
        (("--capacity", 0.1), "--capacity: all rows arrive at once"),
    ):
        code, _, err = run(capsys, monkeypatch, path, *args)
        assert (code, problem in err) == (2, True)


@pytest.mark.parametrize("width", [80, 160])
def test_in_a_terminal_there_is_a_table_and_a_bar(trace: Path, width: int) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-P", "-m", "llmtap.cli", "sim", "run", str(trace), "--requests", "20000"]
    with subprocess.Popen(
        command, stdout=theirs, stderr=theirs, env={**os.environ, "COLUMNS": str(width)}
    ) as child:
        os.close(theirs)
        seen = b""
        while True:
            try:
                data = os.read(ours, 65_536)
            except OSError:  # the other end is closed
                break
            if not data:
                break
            seen += data
    os.close(ours)
    assert child.returncode == 0
    for whole in (b"multi_bin_dynamic", b"dynamic_no_bins", b"queue p50 s"):
        assert whole in seen
    assert "\N{HORIZONTAL ELLIPSIS}".encode() not in seen, "something was cut"
    assert b"\t" not in seen


def test_what_has_several_values_is_multiplied_out(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = tmp_path / "out.json"
    axes = ("--scale", "10,100", "--servers", "1,2", "--vary", "bins=2,4", "--vary", "eps=1ms,5ms")
    code, out, err = run(
        capsys, monkeypatch, trace, "--scheduler", "static_fifo,multi_bin_dynamic", *axes, "--json", place
    )
    told = json.loads(place.read_text())
    assert (code, len(told)) == (0, 32)
    assert [one["scheduler"] for one in told[:2]] == ["static_fifo", "multi_bin_dynamic"]
    found = {
        (o["scheduler"], o["scale"], o["servers"], o["readings"]["bins"], o["readings"]["eps"]) for o in told
    }
    assert len(found) == 32
    columns = out.splitlines()[0].split("\t")
    assert columns[:6] == ["scheduler", "requests", "offered req/s", "servers", "eps", "bins"]
    assert err.count(" of 32: ") == 32
    assert "multi_bin_dynamic, 60 requests, scale 100, 2 servers, eps 1 ms, bins 4 (" in err


def test_values_that_hold_commas_are_apart_by_bars(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--scheduler", "multi_bin_dynamic", "--vary", "bin_edges=0,10|0,5,20")
    _, out, _ = run(capsys, monkeypatch, trace, *options, "--json", "-")
    assert [one["bins"] for one in json.loads(out)] == [[[0, 10], [10, None]], [[0, 5], [5, 20], [20, None]]]


def test_measured_runs_have_their_columns(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = ("--scheduler", "continuous_batching,static_fifo", "--slo", "ttft:1s", "--scale", 100)
    code, out, _ = run(capsys, monkeypatch, trace, *options, "--capture", tmp_path / "captures")
    columns, first, second, *lines = out.splitlines()
    assert code == 0
    assert columns.split("\t")[-6:] == [
        "TTFT p50 s", "TTFT p99 s", "TBT p99 s", "idle p99 s", "smooth tok/s", "goodput req/s",
    ]  # fmt: skip
    assert len(columns.split("\t")) == len(first.split("\t")) == len(second.split("\t"))
    assert "goodput: requests that met ttft:1s" in lines
    captures = sorted((tmp_path / "captures").iterdir())
    assert [path.name.split("-")[0] for path in captures] == ["continuous_batching", "static_fifo"]
    assert [len(read(path)) for path in captures] == [60, 60]
    _, out, _ = run(capsys, monkeypatch, trace, "--scheduler", "continuous_batching", "--no-measure")
    assert "TTFT" not in out


def test_a_preset_is_listed_and_run_with_what_options_put_in_its_place(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, out, _ = run(capsys, monkeypatch, "--presets")
    assert {"grid", "methods", "chat"} <= {line.split("\t")[0] for line in out.splitlines()}
    place, kept = tmp_path / "out.json", tmp_path / "r.jsonl"
    options = ("--requests", 60, "--rate", 5, "--results", kept, "--json", place)
    code, _, err = run(capsys, monkeypatch, trace, "--preset", "grid", *options)
    grid = json.loads(place.read_text())
    assert (code, len(grid), err.count("\n")) == (0, 48, 48)
    assert [one["load"]["offered_rps"] for one in grid] == [pytest.approx(5)] * 48
    code, out, err = run(capsys, monkeypatch, trace, "--preset", "methods", *options)
    methods = json.loads(place.read_text())
    assert [one["scheduler"] for one in methods] == [
        "static_fifo", "dynamic_no_bins", "multi_bin_dynamic", "multi_bin_dynamic",
    ]  # fmt: skip
    assert methods[-1] in grid
    # The grid was there; of the four, two are in it.
    assert err.splitlines()[:2] == [
        "llmtap: 48 done before and taken from the results, 0 left",
        "llmtap: 2 done before and taken from the results, 2 left",
    ]


def test_a_job_that_fails_is_told_and_the_others_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, kept = tmp_path / "a.csv", tmp_path / "r.jsonl"
    path.write_text(HEADER + "1,GPT-4,5,0,5,API log\n" * 2)
    options = (path, "--scheduler", "static_fifo", "--vary", "failed=kept,dropped", "--results", kept)
    for _ in range(2):  # what failed is tried again, what was done is not
        code, out, err = run(capsys, monkeypatch, *options)
        assert (code, len(out.splitlines())) == (1, 3)
        assert err.splitlines()[-1].endswith(": all requests failed, and failed ones are dropped")
    errors = ["error" in json.loads(line) for line in kept.read_text().splitlines()]
    assert errors == [False, True, True]


def test_the_page_is_written(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("plotly", reason="plotly is not installed: pip install llmtap[report]")
    place = tmp_path / "page.html"
    options = ("--scheduler", "static_fifo", "--scale", "1,10", "--html", place)
    assert run(capsys, monkeypatch, trace, *options)[0] == 0
    page = place.read_text()
    assert "static_fifo" in page
    assert "options at their defaults" in page


def test_without_plotly_that_is_said_before_anything_is_run(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    kept = tmp_path / "r.jsonl"
    code, _, err = run(capsys, monkeypatch, trace, "--html", tmp_path / "p.html", "--results", kept)
    assert (code, err) == (2, "llmtap: --html: needs plotly\nhint: pip install llmtap[report]\n")
    assert not kept.exists()


def test_a_workload_is_run_by_its_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, out, _ = run(
        capsys, monkeypatch, "chat", "--scheduler", "static_fifo", "--requests", 50, "--json", "-"
    )
    assert [(one["n"], one["trace"]) for one in json.loads(out)] == [(50, "chat")]


def test_a_model_is_fitted_to_a_capture(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = ("chat", "--requests", 100, "--rate", 0.7, "--scheduler", "continuous_batching")
    run(capsys, monkeypatch, *options, "--capture", tmp_path)
    [capture] = tmp_path.iterdir()
    _, out, _ = run(capsys, monkeypatch, *options, "--latency", capture, "--json", "-")
    [told] = json.loads(out)
    assert told["fit"]["capture"] == str(capture)
    # The seed's, by which the capture was made.
    assert told["model"]["beta"] == pytest.approx(0.005742, rel=1e-3)
    assert told["model"]["gamma"] == pytest.approx(0.316, rel=1e-3)


SEEDS = 24


@contextmanager
def sweeping(place: Path) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A sweep in processes of its own, of which some results are there and most are not."""
    path = place.parent / "long.csv"
    path.write_text(HEADER + "".join(f"{i},GPT-4,{i % 97},{i % 31},9,API log\n" for i in range(40_000)))
    command = [
        sys.executable, "-P", "-m", "llmtap.cli", "sim", "run", str(path), "--scheduler", "static_fifo",
        "--seed", ",".join(map(str, range(SEEDS))), "--jobs", "2", "--results", str(place),
    ]  # fmt: skip
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        try:
            assert child.stderr is not None
            assert " 1 of 24: " in child.stderr.readline()
            yield child, command
        finally:
            child.kill()


def wait_gone(pids: set[int]) -> None:
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, f"{pids} are still there"
        time.sleep(0.05)


def done_in(place: Path) -> list[str]:
    lines = [json.loads(line) for line in place.read_bytes().split(b"\n")[:-1]]
    assert all("summary" in line for line in lines)
    return [line["id"] for line in lines]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_what_was_stopped_goes_on_where_it_was_and_leaves_no_process(
    tmp_path: Path, how: signal.Signals
) -> None:
    place = tmp_path / "r.jsonl"
    with sweeping(place) as (child, command):
        workers = children(child.pid)
        assert len(workers) >= 2
        child.send_signal(how)
        said = child.communicate(timeout=60)[1]
        if how is signal.SIGINT:
            assert child.returncode == 130
            assert f"stopped; what is done is in {place}" in said
            assert "Traceback" not in said
        else:
            assert child.returncode == -signal.SIGKILL
        wait_gone(workers)
    before = done_in(place)
    assert 1 <= len(before) < SEEDS
    again = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert again.returncode == 0
    assert f"{len(before)} done before and taken from the results, {SEEDS - len(before)} left" in again.stderr
    after = done_in(place)
    assert after[: len(before)] == before
    assert len(after) == len(set(after)) == SEEDS
    assert len(again.stdout.splitlines()) == 1 + SEEDS + 1
