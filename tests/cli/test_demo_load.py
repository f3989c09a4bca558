"""What the demo sends: BurstGPT's published figures, and any trace."""

import json
import math
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist

import pytest

from llmtap.cli.demo_load import RATE_RPS, TENANTS, TOKENS_MAX, burst_workload, demo_plan
from llmtap.errors import ConfigError
from llmtap.workload.synthetic import WORKLOADS


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
