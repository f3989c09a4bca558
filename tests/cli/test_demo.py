"""`llmtap demo` as one types it: short ones, to their end and broken off; and no process is left."""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import NormalDist
from typing import Any, cast
from urllib.request import urlopen

import pytest

from llmtap.cli.demo import (
    RATE_RPS,
    REQUESTS_FACTOR,
    TENANTS,
    TOKENS_MAX,
    WORKLOAD,
    _measurement_problems,
    _own_requests,
    demo_plan,
)
from llmtap.errors import ConfigError
from llmtap.workload.registry import SIMULATED
from tests.support.waiting import block_until

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
        [*DEMO, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environ,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
    block_until(lambda: not descendants(mark), hint=lambda: descendants(mark))


def test_a_short_demo_shows_all_there_is(tmp_path: Path) -> None:
    with running(short_answers(tmp_path), "--seconds", "4s", "--json", mark="short") as process:
        out, err = process.communicate(timeout=250)
    assert process.returncode == 0, err
    told = json.loads(out)
    sent = told["clients"]["n"]
    assert told["n"] == sent == 80
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


def test_a_trace_is_played_and_then_it_stays_up_when_asked_to(tmp_path: Path) -> None:
    with running(short_answers(tmp_path), "--seconds", "2s", "--keep", mark="keep") as process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if "until Ctrl-C" in line:
                break
        assert any(line.startswith("clients      complete") for line in said)
        [admin] = [line.split()[1] for line in said if line.startswith("dashboard ")]

        def repeats() -> bool:
            """Return whether there are more requests than those of two seconds."""
            with urlopen(f"{admin}api/v1/summary?window=all", timeout=60) as answer:
                return bool(json.load(answer)["n"] > 40)

        block_until(repeats)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=250)
    assert (process.returncode, err) == (130, "stopped by SIGINT\n")
    assert out.startswith("A comparison needs 50 requests of each arm")


def test_the_drawn_workload_has_the_published_figures() -> None:
    """Of 20,000 requests: medians, the mean of prompts, and of answers the mean of a cut lognormal."""
    requests = demo_plan(WORKLOAD, speed=100, seconds=20_000 / 27 / REQUESTS_FACTOR).requests
    assert len(requests) == 20_000
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


OK = {"complete": 4, "refused": 1}
CUT = {"complete": 4, "client_cancelled": 1}


@pytest.mark.parametrize(
    ("measured", "others", "sent", "errors", "problems"),
    [
        (OK, {}, OK, {}, []),
        (CUT, {}, CUT, {}, []),
        (CUT, {}, OK, {}, ["1 more responses were cancelled than the clients cancelled"]),
        ({"complete": 4}, {}, OK, {}, ["4 of 5 exchanges were measured"]),
        (
            OK,
            {},
            {"complete": 4, "truncated": 1},
            {"the server left": 1},
            ["1 truncated (counted by the clients)", "1 x the server left"],
        ),
        ({"complete": 4, "upstream_reset": 1}, {}, OK, {}, ["1 upstream_reset (counted by the proxy)"]),
        # Exchanges of others, counted before the load began.
        (OK | {"upstream_reset": 1}, {"upstream_reset": 1}, OK, {}, []),
    ],
)
def test_problems_of_a_demo(
    measured: dict[str, int],
    others: dict[str, int],
    sent: dict[str, int],
    errors: dict[str, int],
    problems: list[str],
) -> None:
    by = {"default": {"n": sum(others.values()), "outcomes": others}} if others else {}
    ours = _own_requests({"n": sum(measured.values()), "outcomes": measured, "by": {"tenant": by}}, {"a"})
    assert _measurement_problems(ours, {"outcomes": sent, "errors": errors, "load": {"sent": 5}}) == problems


def test_requests_without_a_tenant_are_of_others_unless_the_plan_has_them() -> None:
    rows = {"n": 5, "outcomes": OK}
    summary = {**rows, "by": {"tenant": {"default": rows}}}
    assert _own_requests(summary, {"a"}).n == 0
    ours = _own_requests(summary, {"default"})
    assert {"n": ours.n, "outcomes": ours.outcomes} == rows


def test_the_rate_and_the_tenants_are_those_of_the_plan(tmp_path: Path) -> None:
    assert SIMULATED[WORKLOAD].about["rate_rps"] == RATE_RPS
    drawn = demo_plan(WORKLOAD, speed=10, seconds=30)
    named = demo_plan("chat", speed=100, seconds=1)
    rates = [cast(dict[str, Any], plan.about["arrivals"])["rate_rps"] for plan in (drawn, named)]
    assert rates == pytest.approx([2.7, 27])
    assert (len(drawn.requests), set(drawn.requests.tenants)) == (486, set(TENANTS))
    assert drawn.requests.arrival_ns[0] < 10**9
    recorded = demo_plan(short_answers(tmp_path), speed=4, seconds=30)
    assert list(recorded.requests.arrival_ns)[:12] == [125_000_000 * i for i in range(12)]


def test_a_trace_without_times_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "requests.jsonl"
    trace.write_text('{"prompt": "hello", "output_tokens": 3}\n' * 3)
    with pytest.raises(ConfigError):
        demo_plan(str(trace), speed=1, seconds=1)
