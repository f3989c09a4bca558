"""`llmtap sim run`: its axes, outputs and captures."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from llmtap.capture.read.reader import read
from llmtap.cli.shared import Stopped, stoppable
from llmtap.report.sweep_figures import batch_sizes, queue_waits
from tests.cli.traces import HEADER, Call, small_trace
from tests.support.waiting import block_until
from tests.support.workloads.sweeps import children


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
    assert (code, err.splitlines()[-1]) == (2, "hint: use --reading length=output")
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
        assert err.splitlines()[-1].endswith(": none has output tokens; leave out failed=dropped")
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


@pytest.mark.parametrize("scheduler", ["static_fifo", "multi_bin_dynamic", "continuous_batching"])
@pytest.mark.parametrize(
    ("options", "columns"),
    [
        ((), {"ttft_p50_ms"}),
        (("--capacity", "0.05"), {"capacity_threshold_lambda"}),
        (("--capacity", "0.05", "--capacity-by", "token"), {"capacity_qps_under_sla"}),
        (("--capacity", "0.05", "--capacity-by", "slo", "--slo", "e2e:30s"), {"capacity_qps_under_slo"}),
        (("--slo", "ttft:1s"), {"goodput_attainment_pct", "ttft_p50_ms"}),
        (("--reader-speed", "10"), {"user_idle_p99_ms", "smooth_goodput_tokens_per_sec"}),
    ],
)
def test_every_column_of_a_table_has_a_value(
    trace: Path, tmp_path: Path, call: Call, scheduler: str, options: tuple[str, ...], columns: set[str]
) -> None:
    place = tmp_path / "runs.csv"
    assert call("sim", "run", trace, "--scheduler", scheduler, *options, "--table", place)[0] == 0
    [row] = csv.DictReader(place.open())
    assert columns <= row.keys()
    assert [name for name, cell in row.items() if not cell] == []
    assert {name for name in row if name.startswith("capacity_")} == {
        name for name in columns if name.startswith("capacity_")
    }


def test_each_router_is_a_run_of_several_servers(trace: Path, tmp_path: Path, call: Call) -> None:
    place, table = tmp_path / "out.json", tmp_path / "t.csv"
    options = ("--scheduler", "continuous_batching,static_fifo", "--servers", "1,2")
    routers = ("--router", "round-robin,least-loaded,prefix-aware")
    code, out, _ = call("sim", "run", trace, *options, *routers, "--json", place, "--table", table)
    runs = json.loads(place.read_text())
    # One server needs no router, and the servers of whole batches have one queue.
    assert code == 0
    assert [(one["scheduler"], one["servers"], one["router"]) for one in runs] == [
        ("continuous_batching", 1, None),
        ("static_fifo", 1, None),
        ("continuous_batching", 2, "round-robin"),
        ("static_fifo", 2, None),
        ("continuous_batching", 2, "least-loaded"),
        ("continuous_batching", 2, "prefix-aware"),
    ]
    assert [one["by_server"] and sum(one["by_server"]["requests"]) for one in runs] == [
        None,
        None,
        60,
        None,
        60,
        60,
    ]
    assert [row["router"] for row in csv.DictReader(table.open())][2:5] == ["round-robin", "", "least-loaded"]
    assert out.count("works as least-loaded") == 1


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--scheduler", "continuous_batching", "--router", "least-loaded"), "has no effect with one server"),
        (("--scheduler", "static_fifo", "--servers", "2", "--router", "round-robin"), "one queue"),
        (("--scheduler", "continuous_batching", "--servers", "2", "--router", "x"), "round-robin"),
    ],
)
def test_a_router_without_effect_is_refused(
    trace: Path, call: Call, options: tuple[str, ...], problem: str
) -> None:
    code, _, err = call("sim", "run", trace, *options)
    assert (code, problem in err) == (2, True), err


def test_a_poor_fit_is_a_caution_at_every_figure(tmp_path: Path, call: Call) -> None:
    small = ("--serving", "kv_tokens=4000", "--scheduler", "continuous_batching", "--jobs", "1")
    load = ("sim", "run", "chat", "--rate", "8", "--requests", "300", *small)
    assert call(*load, "--capture", tmp_path / "c")[0] == 0
    [capture] = (tmp_path / "c").iterdir()
    place, table, page = tmp_path / "out.json", tmp_path / "t.csv", tmp_path / "p.html"
    outputs = ("--json", place, "--table", table, "--html", page)
    code, out, _ = call(*load, "--latency", capture, *outputs)
    [told] = json.loads(place.read_text())
    assert (code, told["fit"]["valid"]) == (4, False)
    assert told["fit"]["unseen"]["decode"]["r2"] < 0.8
    assert "--fit-kv-blocks" in told["fit"]["caution"]
    assert all(cell.endswith("?") for cell in re.split("  +", out.splitlines()[1].strip())[1:])
    assert told["fit"]["caution"] in out and told["fit"]["caution"] in page.read_text()
    assert next(csv.DictReader(table.open()))["caution"] == told["fit"]["caution"]

    load = ("sim", "run", "chat", "--rate", "8", "--requests", "300", *small[2:])
    code, out, _ = call(*load, "--latency", capture, "--fit-kv-blocks", "250", "--json", place)
    [told] = json.loads(place.read_text())
    assert told["fit"]["unseen"]["decode"]["r2"] > 0.999
    # The simulated server has the memory of the measured one.
    assert told["serving"]["kv_tokens"] == 4_000


@pytest.mark.parametrize(
    "options",
    [
        ("--fit-kv-blocks", "10"),
        ("--latency-from", "mooncake"),
        ("--latency", "grid.csv", "--fit-kv-blocks", "10"),
        ("--latency", "TRACE", "--latency-from", "nothing", "--scheduler", "continuous_batching"),
    ],
)
def test_an_option_of_a_fit_without_effect_is_refused(
    trace: Path, call: Call, options: tuple[str, ...]
) -> None:
    given = [str(trace) if word == "TRACE" else word for word in options]
    code, _, err = call("sim", "run", trace, *given)
    assert (code, any(word in err for word in options if word.startswith("--"))) == (2, True), err


def test_a_bound_of_a_capacity_that_is_not_searched_is_refused(trace: Path, call: Call) -> None:
    code, _, err = call("sim", "run", trace, "--capacity-by", "slo", "--slo", "e2e:2s")
    assert (code, "--capacity-by" in err) == (2, True)


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
    assert float(row["capacity_qps_under_slo"]) == told["capacity"]["by"]["slo"]
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
    problem, hint = err.splitlines()
    assert (code, problem) == (2, f"llmtap: --capture: {trace}/c: cannot be written: Not a directory")
    assert hint.startswith("hint: check the permissions of the folder")
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


JOBS = 8


@contextmanager
def sweeping(place: Path) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A sweep in processes of its own, of which some results are there and most are not."""
    command = command_for(place)
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        try:
            assert child.stderr is not None
            assert f" 1 of {JOBS}: " in child.stderr.readline()
            yield child, command
        finally:
            child.kill()


def command_for(place: Path) -> list[str]:
    path = place.parent / "long.csv"
    path.write_text(HEADER + "".join(f"{i},GPT-4,{i % 97},{i % 31},9,API log\n" for i in range(25_000)))
    sizes = ",".join(map(str, range(1, JOBS + 1)))
    return [
        sys.executable,
        "-P",
        "-m",
        "llmtap.cli",
        "sim",
        "run",
        str(path),
        "--scheduler",
        "static_fifo",
        "--vary",
        f"static_batch={sizes}",
        "--jobs",
        "2",
        "--results",
        str(place),
    ]


def check_said(said: str, place: Path) -> None:
    """What is kept and how to go on, and nothing but that and the lines of what was done: no traceback."""
    *lines, last = said.splitlines()
    assert all(f" of {JOBS}: " in line for line in lines), said
    kept = rf"(\d+) runs are in {place}: the same command continues from there"
    found = re.fullmatch(rf"llmtap: stopped; {kept}", last)
    assert found is not None, said
    # The last one may have been written and not yet counted.
    assert int(found[1]) in (len(done_in(place)), len(done_in(place)) - 1)


def wait_gone(pids: set[int]) -> None:
    block_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 120)


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
        said = child.communicate(timeout=200)[1]
        if how is signal.SIGKILL:
            assert child.returncode == -signal.SIGKILL
        else:
            assert child.returncode == 128 + how
            check_said(said, place)
        wait_gone(workers)
    before = done_in(place)
    assert 1 <= len(before) < JOBS
    again = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert again.returncode == 0
    assert f"{len(before)} done before and taken from the results, {JOBS - len(before)} left" in again.stderr
    after = done_in(place)
    assert after[: len(before)] == before
    assert len(after) == len(set(after)) == JOBS


@pytest.mark.parametrize(("how", "after_s"), [(signal.SIGINT, 0.0), (signal.SIGTERM, 0.2)])
def test_while_processes_start_the_whole_group_may_be_told(
    tmp_path: Path, how: signal.Signals, after_s: float
) -> None:
    """As Ctrl-C in a terminal does, around the time when the first worker is there and not listening yet."""
    place = tmp_path / "r.jsonl"
    with subprocess.Popen(
        command_for(place), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as child:
        try:
            # Python's tracker of semaphores is the first of them.
            block_until(lambda: len(children(child.pid)) >= 2, 200)
            workers = children(child.pid)
            time.sleep(after_s)
            os.killpg(child.pid, how)
            said = child.communicate(timeout=200)[1]
        finally:
            child.kill()
    assert child.returncode == 128 + how
    check_said(said, place)
    wait_gone(workers)


def test_who_was_started_deaf_stays_deaf() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        before = signal.signal(number, signal.SIG_IGN)
        try:
            with stoppable():
                signal.raise_signal(number)
            assert signal.getsignal(number) is signal.SIG_IGN
        finally:
            signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_stops_and_others_do_nothing(number: signal.Signals) -> None:
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        with stoppable():
            pass
        assert {each: signal.getsignal(each) for each in before} == before

        def inside() -> None:
            try:
                signal.raise_signal(number)
            except KeyboardInterrupt:
                raise KeyboardInterrupt from None  # as Ray does, without a word of which it was

        with pytest.raises(Stopped) as told, stoppable():
            inside()
        assert told.value.code == 128 + number
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


LLMTAP = [sys.executable, "-P", "-m", "llmtap.cli", "sim"]


def run(*args: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*LLMTAP, *args], capture_output=True, text=True, timeout=200)


def test_the_tokenizer_file_counts_as_we_do(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the extra `tokenizers` is not installed")
    from llmtap.workload.prompts.text import answer_tokens

    file = tmp_path / "tokenizer.json"
    assert run("tokenizer", str(file)).returncode == 0
    assert file.stat().st_size < 100_000
    judge = tokenizers.Tokenizer.from_file(str(file))
    assert len(judge.encode("".join(answer_tokens(777, "key"))).ids) == 777
    assert json.loads(run("tokenizer", "-").stdout) == json.loads(file.read_text())


def test_grpc_is_served_beside_http_and_imported_only_then() -> None:
    args = [*LLMTAP, "serve", "--listen", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    with subprocess.Popen(args, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            said = [server.stdout.readline().split("://")[0] for _ in range(2)]
        finally:
            server.send_signal(signal.SIGINT)
        assert said == ["llmtap sim: http", "llmtap sim: grpc"]
        assert server.wait(200) == 0
    check = "'grpc' in sys.modules, 'google.protobuf' in sys.modules"
    code = f"import sys, llmtap.sim.server.server; print({check})"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=200)
    assert done.stdout.split() == ["False", "False"]


def test_goodput_is_also_given_in_vllms_form_in_ms(trace: Path, tmp_path: Path, call: Call) -> None:
    found = []
    given = (
        ("--goodput", "ttft:200", "tpot:50"),
        ("--goodput", "ttft:200 tpot:50"),
        ("--slo", "ttft:200ms tpot:50ms"),
    )
    for options in given:
        place = tmp_path / "out.json"
        code = call("sim", "run", trace, "--scheduler", "chunked_prefill", *options, "--json", place)[0]
        [run] = json.loads(place.read_text())
        found.append((code, run["goodput"]))
    assert found[0] == found[1] == found[2]
    code, goodput = found[0]
    assert (code, goodput["objectives"]) == (0, "ttft:200ms tpot:50ms")
    assert 0 < goodput["met"] < goodput["counted"] == 60
    code, _, err = call("sim", "run", trace, "--slo", "ttft:200 tpot:50")
    assert (code, "--slo" in err) == (2, True)


def test_the_knee_of_a_queue_is_that_of_mm1(tmp_path: Path, call: Call) -> None:
    place = tmp_path / "out.json"
    code, out, _ = call("sim", "run", "--preset", "knee", "--requests", "20000", "--json", place)
    found = {
        round(rho, 2): (wait, expected) for rho, wait, expected in queue_waits(json.loads(place.read_text()))
    }
    assert (code, len(found)) == (0, 11)
    # A service takes 59.653 ms + 1,000 x 5.742 ms on average: rho / (1 - rho) of these.
    for rho, times in ((0.2, 0.25), (0.5, 1.0), (0.7, 0.7 / 0.3)):
        wait, expected = found[rho]
        assert expected == pytest.approx(5.802 * times, rel=0.03)
        assert wait == pytest.approx(expected, rel=0.1)
    assert found[0.95][0] > 2 * found[0.9][0] > 3 * found[0.8][0]
    assert re.split("  +", out.splitlines()[0]) == ["utilisation", "mean wait", "M/M/1", "difference"]


def test_a_larger_batch_gives_throughput_and_takes_itl(tmp_path: Path, call: Call) -> None:
    place, page = tmp_path / "out.json", tmp_path / "out.html"
    code, _, _ = call("sim", "run", "--preset", "batch-size", "--json", place, "--html", page)
    rows = batch_sizes(json.loads(place.read_text()))
    assert (code, [size for size, _, _ in rows]) == (0, [1, 2, 4, 8, 16, 32, 64, 128, 256])
    for size, rate, itl in rows:
        # 5.742 ms, and 0.8 us for each of the mean 128 tokens of each request.
        step = 0.005742 + size * 128 * 0.8e-6
        assert itl == pytest.approx(step, rel=1e-3)
        # 256 requests in turns of `size`: a prompt, then 255 tokens.
        assert rate == pytest.approx(size * 256 / (0.005742 + 255 * step), rel=1e-3)
    assert 'id="figure-1"' in page.read_text()
    assert call("sim", "run", "--preset", "grid")[0] == 2, "it has no workload of its own"
