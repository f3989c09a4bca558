"""`llmtap sim run`: its axes, outputs and captures."""

import csv
import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from llmtap.capture.read.reader import read
from tests.cli.traces import HEADER, Call, small_trace


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return small_trace(tmp_path / "a.csv")


def test_a_grid_with_another_length_is_refused(trace: Path, tmp_path: Path, call: Call) -> None:
    grid = tmp_path / "grid.csv"
    rows = [(b, n, 0.02 + 0.001 * n * b, 128, n) for b in (1, 4) for n in (100, 900)]
    grid.write_text(
        "batch_size,max_seq_len,mean_latency_sec,prompt_tokens,output_tokens\n"
        + "".join(",".join(map(str, row)) + "\n" for row in rows)
    )
    options = ("sim", "run", trace, "--scheduler", "static_fifo", "--latency", grid)
    code, _, err = call(*options)
    assert (code, err.splitlines()[-1]) == (2, "hint: --reading length=output")
    assert call(*options, "--reading", "length=output")[0] == 0


def test_what_has_several_values_is_multiplied_out(trace: Path, tmp_path: Path, call: Call) -> None:
    place = tmp_path / "out.json"
    axes = ("--scale", "10,100", "--servers", "1,2", "--vary", "bins=2,4", "--vary", "eps=1ms,5ms")
    code, out, err = call(
        "sim", "run", trace, "--scheduler", "static_fifo,multi_bin_dynamic", *axes, "--json", place
    )
    told = json.loads(place.read_text())
    # One scheduler has neither bins nor a band: 4 runs; the other 16.
    assert (code, len(told)) == (0, 4 + 16)
    assert [one["scheduler"] for one in told[:2]] == ["static_fifo", "multi_bin_dynamic"]
    found = {
        (o["scheduler"], o["scale"], o["servers"], o["readings"]["bins"], o["readings"]["eps"]) for o in told
    }
    assert len(found) == 20
    columns, *rows = (re.split("  +", line.strip()) for line in out.splitlines()[:21])
    assert columns[:5] == ["scheduler", "offered req/s", "servers", "bins", "eps"]
    assert [row[3:5] for row in rows[:2]] == [["-", "-"], ["2", "1 ms"]]
    assert err.count(" of 20: ") == 20
    one = next(one for one in told if (one["scheduler"], one["servers"]) == ("static_fifo", 2))
    assert f": static_fifo-60-2-servers ({one['job']})" in err


def test_a_job_that_fails_is_told_and_the_others_go_on(tmp_path: Path, call: Call) -> None:
    path, kept = tmp_path / "a.csv", tmp_path / "r.jsonl"
    path.write_text(HEADER + "1,GPT-4,5,0,5,API log\n" * 2)
    options = (path, "--scheduler", "static_fifo", "--vary", "failed=kept,dropped", "--results", kept)
    for _ in range(2):  # what failed is tried again, what was done is not
        code, out, err = call("sim", "run", *options)
        lines = [line for line in out.splitlines() if not line.startswith("note: ")]
        assert (code, len(lines)) == (1, 5), lines
        assert "offered all at once" in out
        assert err.splitlines()[-1].endswith(": all requests failed, and failed ones are dropped")
    errors = ["error" in json.loads(line) for line in kept.read_text().splitlines()]
    assert errors == [False, True, True]


def test_why_requests_were_not_served_is_told(trace: Path, tmp_path: Path, call: Call) -> None:
    place = tmp_path / "out.json"
    options = ("--scheduler", "continuous_batching", "--serving", "kv_tokens=80", "--scale", 1_000)
    limits = ("--serving", "give_up=late", "--serving", "ttft=300ms")
    code, out, _ = call("sim", "run", trace, *options, *limits, "--json", place, "--capture", tmp_path / "c")
    [told] = json.loads(place.read_text())
    assert code == 0
    assert told["unserved"].keys() == {"too_large", "late", "late_midway"}
    n, late, midway = (told["unserved"][reason] for reason in ("too_large", "late", "late_midway"))
    assert (n + late, midway) == (told["outcomes"]["upstream_error"], told["outcomes"]["truncated"])
    assert f"refused: {n} requests need more than the KV memory holds (kv_tokens 80)" in out
    [capture] = (tmp_path / "c").iterdir()
    errors = Counter(x.error for x in read(capture).exchanges() if x.error)
    assert errors == {
        "refused: it needs more than the KV memory holds": n,
        "given up before its first token: late": late,
        "given up midway: a token was late": midway,
    }


def test_runs_are_a_table_with_both_capacities_and_gpus_are_in_the_capture(
    trace: Path, tmp_path: Path, call: Call
) -> None:
    place, columnar = tmp_path / "runs.csv", tmp_path / "runs.parquet"
    options = ("--scheduler", "static_fifo", "--requests", 200, "--servers", 2, "--capacity", 0.05)
    options += ("--reading", "request_sla=4s", "--scale", 100)
    bounds = ("--capacity-by", "request,token,slo", "--slo", "e2e:2s", "--capture", tmp_path / "c")
    code, out, _ = call("sim", "run", trace, *options, *bounds, "--table", place, "--json", tmp_path / "j")
    [told] = json.loads((tmp_path / "j").read_text())
    [row] = list(csv.DictReader(place.open()))
    assert (code, row["num_gpus"], row["num_requests"]) == (0, "2", "200")
    assert float(row["capacity_threshold_lambda"]) == told["capacity"]["by"]["request"]
    assert told["capacity"]["by"].keys() == {"request", "token", "slo"}
    # A bound of 2 s is met at a lower rate than one of 4 s.
    assert told["capacity"]["by"]["slo"] < told["capacity"]["by"]["request"]
    assert float(row["decode_step_time_ms"]) == told["decode_step_mean"] * 1_000
    assert "capacity (token) req/s" in out
    [capture] = (tmp_path / "c").iterdir()
    assert {x.route for x in read(capture).exchanges()} == {"gpu-0", "gpu-1"}
    assert call("sim", "run", trace, *options, "--table", columnar)[0] == 0
    assert pq.read_table(columnar).column("p99_latency").to_pylist() == [told["latency"]["p99"]]
    assert call("sim", "run", trace, *options, "--capacity-by", "slo")[0] == 2


def test_a_place_for_a_capture_is_tried_before_anything_is_run(
    trace: Path, tmp_path: Path, call: Call
) -> None:
    kept = tmp_path / "r.jsonl"
    code, _, err = call("sim", "run", trace, "--capture", trace / "c", "--results", kept)
    assert (code, err) == (2, f"llmtap: --capture: {trace}/c: cannot be written: Not a directory\n")
    assert not kept.exists()
    # And for a file, of which nothing is left where another option is wrong.
    out = tmp_path / "o.json"
    assert call("sim", "run", trace, "--json", out, "--capture", trace)[0] == 2
    assert not out.exists()


def test_one_request_is_followed_through_both_schedulers(tmp_path: Path, call: Call) -> None:
    place = tmp_path / "j"
    options = ("--preset", "chunking", "--requests", 60, "--json", place, "--capture", tmp_path / "c")
    code, _, _ = call("sim", "run", "long-chat", *options)
    whole, chunked = json.loads(place.read_text())
    assert code == 0
    longest = max(read(whole["capture"]).exchanges(), key=lambda x: x.tokens.output or 0)
    gaps = {}
    for told in (whole, chunked):
        one = told["followed"]
        [x] = [x for x in read(told["capture"]).exchanges() if x.seq == one["row"]]
        assert (x.tokens.input, x.tokens.output) == (one["input"], one["output"])
        assert one["output"] == longest.tokens.output == len(one["token_seconds"])
        stamps = [(t - x.timeline.arrival_ns) / 1e9 for t in x.timeline.events.t_ns]
        assert one["token_seconds"] == pytest.approx(stamps, abs=2e-6)  # captures have whole microseconds
        gaps[told["scheduler"]] = max(b - a for a, b in pairwise(one["token_seconds"]))
    # Pieces of prompts stall an answer less than whole prompts (smooth goodput paper, figure 7).
    assert gaps["chunked_prefill"] < gaps["continuous_batching"] / 2
