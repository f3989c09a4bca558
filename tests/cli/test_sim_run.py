import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from llmtap.cli.main import main

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
        (("TRACE", "--json", "nowhere/out.json"), "--json: there is no folder nowhere"),
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


def test_in_a_terminal_there_is_a_table_and_a_bar(trace: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-P", "-m", "llmtap.cli", "sim", "run", str(trace), "--requests", "20000"]
    with subprocess.Popen(
        command, stdout=theirs, stderr=theirs, env={**os.environ, "COLUMNS": "160"}
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
    assert b"static_fifo" in seen
    assert b"queue p50 s" in seen
    assert b"\t" not in seen
