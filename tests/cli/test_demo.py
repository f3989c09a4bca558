"""`llmtap demo` as one types it: short ones, to their end and broken off; and no process is left."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from urllib.request import urlopen

import pytest

from llmtap.cli.demo import NOBODY, _problems
from llmtap.cli.demo_stage import RATE_RPS, TENANTS, TOKENS_MAX, burst_workload, demo_plan
from llmtap.errors import ConfigError
from llmtap.workload.synthetic import WORKLOADS

DEMO = [sys.executable, "-P", "-m", "llmtap.cli", "demo"]
ROOT = Path(__file__).parents[2]


def descendants(mark: str) -> list[int]:
    """Processes that were started by what has this mark in its environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environ = (entry / "environ").read_bytes()
            except OSError:
                continue
            if f"TEST_MARK={mark}".encode() in environ.split(b"\0"):
                found.append(int(entry.name))
    return found


@contextmanager
def running(*args: str, mark: str) -> Iterator["subprocess.Popen[str]"]:
    environ = {**os.environ, "TEST_MARK": mark}
    with subprocess.Popen(
        [*DEMO, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environ,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
    deadline = time.monotonic() + 60
    while left := descendants(mark):
        assert time.monotonic() < deadline, f"processes are left: {left}"
        time.sleep(0.1)


def test_a_short_demo_shows_all_there_is() -> None:
    with running("--requests", "12", "--seconds", "4s", "--json", mark="short") as process:
        out, err = process.communicate(timeout=250)
    assert process.returncode == 0, err
    told = json.loads(out)
    sent = told["clients"]["n"]
    assert told["n"] == sent == 12
    assert set(told["outcomes"]) <= {"complete", "refused"}
    assert told["experiment"]["name"] == "guardrail"
    assert sum(arm["assigned"] for arm in told["experiment"]["arms"].values()) == sent
    assert told["goodput"]["objectives"] == "ttft:500ms tpot:50ms"
    first, _, dashboard = err.splitlines()[:3]
    assert first.startswith("engine ")
    assert dashboard.startswith("dashboard  http://127.0.0.1:")
    assert any("measured" in line for line in err.splitlines()), "figures before the end"


def short_answers(folder: Path) -> str:
    """A trace of twelve requests, two a second, of six tokens each."""
    trace = folder / "trace.jsonl"
    about = {"input_length": 40, "output_length": 6}
    rows = [{"timestamp": 500 * i, "hash_ids": [i], **about} for i in range(12)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(trace)


def test_a_signal_ends_it_with_the_summary_so_far() -> None:
    number = signal.SIGTERM
    with running("--seconds", "5m", mark=f"stop-{number}") as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "measured" in line:
                break
        process.send_signal(number)
        out, err = process.communicate(timeout=250)
    assert process.returncode == 128 + number, err
    assert "time to first token" in out
    assert "failed:" not in err


def test_a_signal_before_anything_was_sent_is_no_harm() -> None:
    with running(mark="early") as process:
        assert process.stderr is not None
        process.stderr.readline()  # the engine's: processes are being started
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=250)
    assert process.returncode == 130, err
    assert "Traceback" not in err


def test_a_trace_is_played_and_then_it_stays_up_when_asked_to(tmp_path: Path) -> None:
    with running(short_answers(tmp_path), "--requests", "3", "--keep", mark="keep") as process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if "until Ctrl-C" in line:
                break
        assert any(line.startswith("clients      complete") for line in said)
        [admin] = [line.split()[1] for line in said if line.startswith("dashboard ")]
        for _ in range(600):  # the load repeats: more than its three requests
            with urlopen(f"{admin}api/v1/summary?window=all", timeout=10) as answer:
                if json.load(answer)["n"] > 3:
                    break
            time.sleep(0.1)
        else:
            pytest.fail("the load was sent once")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=250)
    assert process.returncode == 130
    assert err == "stopped by SIGINT\n"
    assert out.startswith("A comparison needs 50 requests of each arm")


def test_what_broke_is_told_on_either_side() -> None:
    fine = {"n": 5, "outcomes": {"complete": 4, "refused": 1}}
    clients = {"outcomes": {"complete": 4, "refused": 1}, "errors": {}, "load": {"sent": 5}}
    assert _problems(fine, NOBODY, clients) == []
    cut = {"n": 5, "outcomes": {"complete": 4, "client_cancelled": 1}}
    assert _problems(cut, NOBODY, {**clients, "outcomes": {"complete": 4, "client_cancelled": 1}}) == []
    assert _problems(cut, NOBODY, clients) == ["1 more responses were cancelled than the clients cancelled"]
    assert _problems({**fine, "n": 4}, NOBODY, clients) == ["4 of 5 exchanges were measured"]
    broken = {
        "outcomes": {"complete": 4, "truncated": 1},
        "errors": {"the server left": 1},
        "load": {"sent": 5},
    }
    assert _problems(fine, NOBODY, broken) == ["1 truncated (counted by the clients)", "1 x the server left"]
    reset = {"n": 5, "outcomes": {"complete": 4, "upstream_reset": 1}}
    assert _problems(reset, NOBODY, clients) == ["1 upstream_reset (counted by the proxy)"]
    others = {"n": 2, "outcomes": {"complete": 1, "upstream_reset": 1}}
    with_others = {"n": 7, "outcomes": {"complete": 5, "refused": 1, "upstream_reset": 1}}
    assert _problems(with_others, others, clients) == []


def test_the_drawn_workload_has_the_published_figures(tmp_path: Path) -> None:
    """Of 20,000 requests: medians, the mean of prompts, and of answers the mean of a cut lognormal."""
    plan = demo_plan(str(burst_workload(tmp_path)), speed=10, seconds=30, requests=20_000)
    requests = plan.requests
    assert sorted(requests.input)[10_000] == pytest.approx(251, rel=0.05)
    assert sorted(requests.output)[10_000] == pytest.approx(34, rel=0.05)
    assert sum(requests.input) / 20_000 == pytest.approx(611, rel=0.08)
    mu, sigma, unit = math.log(34), math.sqrt(2 * math.log(123 / 34)), NormalDist()
    z = (math.log(TOKENS_MAX) - mu) / sigma
    below, above = unit.cdf(z), 1 - unit.cdf(z)
    # E[min(X, c)] of a lognormal X.
    cut_mean = math.exp(mu + sigma**2 / 2) * unit.cdf(z - sigma) + TOKENS_MAX * above
    assert sum(requests.output) / 20_000 == pytest.approx(cut_mean, rel=0.05)
    assert max(requests.output) == TOKENS_MAX
    assert above < 0.05 < below


def test_the_rate_is_the_published_one_ten_times(tmp_path: Path) -> None:
    assert WORKLOADS["bursty"].rate_rps == RATE_RPS
    plan = demo_plan(str(burst_workload(tmp_path)), speed=10, seconds=30, requests=None)
    arrivals = plan.about["arrivals"]
    assert isinstance(arrivals, dict)
    assert arrivals["rate_rps"] == pytest.approx(2.7)
    assert "13.28" in str(arrivals["given"] or plan.about["workload"])


def test_the_default_half_minute_is_worth_looking_at(tmp_path: Path) -> None:
    """The first request comes at once, bursts follow, and both arms get enough to be compared."""
    plan = demo_plan(str(burst_workload(tmp_path)), speed=10, seconds=30, requests=None)
    due = [at_ns / 1e9 for at_ns in plan.requests.arrival_ns if at_ns < 30e9]
    assert len(due) < len(plan.requests), "there is more than time for"
    assert due[0] < 1.0
    assert 120 <= len(due) <= 400
    assert sum(1 for a, b in pairwise(due) if b - a > 0.5) >= 5, "they come in bursts"
    assert due[-1] > 20


def test_requests_have_tenants_where_a_trace_has_none(tmp_path: Path) -> None:
    plan = demo_plan(str(burst_workload(tmp_path)), speed=10, seconds=30, requests=500)
    assert set(plan.requests.tenants) == set(TENANTS)
    assert len(plan.requests) == 500


def test_a_trace_is_played_in_its_own_times(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 1_000 * i, "input_length": 100, "output_length": 5, "hash_ids": [i]} for i in range(9)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = demo_plan(str(trace), speed=4, seconds=30, requests=9)
    assert list(plan.requests.arrival_ns) == [250_000_000 * i for i in range(9)]


def test_a_workload_by_its_name_comes_at_that_rate() -> None:
    plan = demo_plan("chat", speed=100, seconds=1, requests=20)
    arrivals = plan.about["arrivals"]
    assert isinstance(arrivals, dict)
    assert arrivals["rate_rps"] == pytest.approx(27)


def test_a_trace_without_times_is_named_with_the_way_out(tmp_path: Path) -> None:
    trace = tmp_path / "requests.jsonl"
    trace.write_text('{"prompt": "hello", "output_tokens": 3}\n' * 3)
    with pytest.raises(ConfigError):
        demo_plan(str(trace), speed=1, seconds=1, requests=3)
    with pytest.raises(ConfigError, match=r"none\.csv"):
        demo_plan(str(tmp_path / "none.csv"), speed=1, seconds=1, requests=3)
