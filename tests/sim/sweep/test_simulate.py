"""Seed 004's figures: against the project's oracle, by hand, and each reading by what it changes."""

import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from llmtap.metrics.catalogue import METRICS
from llmtap.metrics.objectives import Objectives
from llmtap.metrics.summary import Summary
from llmtap.sim.engine import IterationState
from llmtap.sim.model_options import IterationModel, ModelOptions, Serving, ServingSetup, read_model_options
from llmtap.sim.schedulers.registry import SCHEDULERS, SchedulerKind
from llmtap.sim.sweep.simulate import (
    ExchangeMeasuring,
    SimulationResult,
    capacity_rps,
    expected_longest,
    simulate,
)
from tests.sim.sweep.scripted_scheduler import Scripted
from tests.sim.sweep.seed004 import simulate as oracle
from tests.support.data import ORACLE
from tests.support.workloads.batch_runs import MODEL, Row, S, served, simulated, workload

BATCHES = [name for name, kind in SCHEDULERS.items() if not kind.iterates]
"""The schedulers of seed 004."""


def setup(**settings: str) -> ServingSetup:
    return ServingSetup(readings=read_model_options(settings))


@pytest.mark.parametrize("scheduler", BATCHES)
@pytest.mark.parametrize("eps", ["0.005", "0.001"])
def test_twelve_requests_are_served_as_the_oracle_has_it_to_the_last_digit(scheduler: str, eps: str) -> None:
    answer = json.loads((ORACLE / "sim004_tiny.json").read_text())
    expected = answer["schedulers"][f"{scheduler} eps={eps}"]
    rows = list(zip(answer["arrival_s"], answer["prompt"], answer["output"], strict=True))
    result = simulate(scheduler, workload(rows), setup(eps=eps, bins="4"))
    summary = result.to_dict()
    assert [list(one) for one in served(result)] == expected["per_request_start_end_batch"]
    assert summary["latency"]["p95"] == expected["p95_latency_s"]
    assert (summary["batches"], summary["batch_mean"]) == (expected["batches"], expected["avg_batch_size"])
    assert summary["utilization"] * 100 == expected["gpu_util_pct"]
    assert summary["bins"] == (expected["bins"] and [tuple(span) for span in expected["bins"]])
    assert summary["bin_limits"] == expected["bin_bmax"]
    # Ours are the doubles nearest to the truth; sums of doubles can be one step beside it.
    exact = Fraction(sum(result.latencies_ns()), len(rows) * 10**9)
    assert summary["latency"]["mean"] == float(exact)
    assert abs(summary["latency"]["mean"] - expected["avg_latency_s"]) <= math.ulp(expected["avg_latency_s"])
    assert abs(summary["throughput_rps"] - expected["throughput_req_s"]) <= math.ulp(0.5)


ROWS: list[Row] = [(1, 10, 10), (2, 0, 10), (2, 0, 0), (5, 30, 10), (11, 0, 5)]
"""static_fifo: 1 to 4 alone, 4 to 6.25 as two, 6.25 to 11.25 and 11.25 to 12.75 alone."""


def test_every_figure_by_hand() -> None:
    answer = simulated("static_fifo", ROWS, request_sla="5s", token_sla="120ms").to_dict()
    assert (answer["scheduler"], answer["n"], answer["outcomes"]) == ("static_fifo", 5, {"complete": 5})
    assert answer["window"] == {"name": "first arrival to last completion", "seconds": 11.75}
    assert answer["load"] == {"mode": "open", "offered_rps": 0.4, "achieved_rps": 5 / 11.75}
    assert answer["tokens"] == {"input": 40, "output": 35, "output_per_second": 35 / 11.75}
    assert (answer["throughput_rps"], answer["throughput_tps"]) == (5 / 11.75, 75 / 11.75)
    latency = answer["latency"]
    assert answer["metrics"].keys() == {"e2e", "ttft"}
    assert answer["metrics"]["e2e"] == latency
    # 3, 4.25, 4.25, 6.25 and 1.75 s.
    assert (latency["n"], latency["mean"], latency["min"], latency["max"]) == (5, 3.9, 1.75, 6.25)
    assert (latency["p50"], latency["p90"]) == (4.25, pytest.approx(4.25 + 0.6 * 2))
    assert latency["marks"] == ["p50", "p90", "p95", "p99", "p999"]
    assert answer["request_sla_violation"] == 1 / 5
    assert answer["token_sla_violation"] == 2 / 5  # 0.125 s between tokens, in the batch of two
    assert answer["utilization"] == 1.0
    assert (answer["batches"], answer["batch_mean"], answer["batch_sizes"]) == (4, 1.25, {"1": 3, "2": 1})
    assert (answer["queueing"]["min"], answer["queueing"]["max"]) == (0, 2)
    assert answer["seconds_per_output_token"] == 11.75 / 35
    assert answer["decode_step_mean"] == pytest.approx((3 * 0.1 + 0.125) / 4)
    assert answer["readings"]["request_sla"] == 5.0
    assert answer["model"] == {"alpha": 1.0, "beta": 0.1, "gamma": 0.5}


@pytest.mark.parametrize("measure", [True, False])
def test_each_request_of_a_batch_has_its_ttft_and_decode_tbt(measure: bool) -> None:
    """004, 4.3 and 6.2: TTFT of service is alpha = 1 s, TBT is beta h(b); 8.4 wants both for each request."""
    result = simulate(
        "static_fifo", workload(ROWS), ServingSetup(MODEL), measuring=ExchangeMeasuring(measure)
    )
    # Starts at 1, 4, 6.25 and 11.25 s, arrivals at 1, 2, 5 and 11 s; the third request makes no token.
    assert [ns / S for ns in result.ttfts_ns()] == [1, 1.25, 2.25, 3]
    assert [ns / S for ns in result.decode_tbts_ns()] == [0.1, 0.1, 0.1, 0.125, 0.125]
    answer = result.to_dict()
    ttft, tbt = answer["metrics"]["ttft"], answer["decode_tbt"]
    assert (ttft["n"], ttft["mean"], ttft["p50"], ttft["max"]) == (4, 1.875, 1.75, 3)
    assert (tbt["n"], tbt["mean"], tbt["p50"], tbt["max"]) == (5, 0.11, 0.1, 0.125)


def test_the_longest_of_a_bin_is_shorter_than_of_as_many_from_all() -> None:
    """004, 5.5: bins [1, 2, 3, 5] and [100, 150, 200]: E[max | bin] against E[max | all]."""
    lengths = (1, 2, 3, 5, 100, 150, 200)
    rows: list[Row] = [(0, 0, n) for n in lengths]
    result = simulated("multi_bin_dynamic", rows, bin_edges="0,64", same_instant="all-first")
    longest = result.to_dict()["longest_output"]
    expected = expected_longest(lengths, (3, 4))
    assert longest["by_bin"] == [
        {"batches": 1, "mean": 5, "expected": expected[4]},
        {"batches": 1, "mean": 200, "expected": expected[3]},
    ]
    assert (longest["batches"], longest["mean"]) == (2, 102.5)
    assert longest["expected"] == pytest.approx((expected[3] + expected[4]) / 2)
    whole = simulated("static_fifo", rows, same_instant="all-first").to_dict()["longest_output"]
    assert (whole["batches"], whole["mean"], whole["by_bin"]) == (1, 200, None)


def test_the_expected_maximum_by_hand() -> None:
    # Two of 1, 1, 4, 10: 1 in 1/4, 4 in 9/16 - 1/4, 10 in 7/16 of the cases.
    assert expected_longest([10, 1, 4, 1], (1, 2)) == {1: 4.0, 2: 0.25 + 4 * 0.3125 + 10 * 0.4375}


def _result(
    scheduler: str = "static_fifo", rows: list[Row] | None = None, key: str = ""
) -> Callable[..., Any]:
    def look(settings: dict[str, str]) -> Any:
        result = simulated(scheduler, ROWS if rows is None else rows, **settings)
        return served(result) if not key else result.to_dict()[key]

    return look


def _sizes(scheduler: str, rows: list[Row], **fixed: str) -> Callable[..., Any]:
    def look(settings: dict[str, str]) -> Any:
        return [n for _, _, n in served(simulated(scheduler, rows, **(fixed | settings)))]

    return look


MANY: list[Row] = [(0, 5, 5)] * 200
TOGETHER = {"same_instant": "all-first"}
STEADY = {**TOGETHER, "token_sla": "160ms", "eps": "100ms", "tau_start": "beta"}
"""Every step is within the band from the first batch on."""
SLOW = {**TOGETHER, "token_sla": "1ms", "eps": "0s", "tau_start": "beta"}
DYNAMIC, BINS = "dynamic_no_bins", "multi_bin_dynamic"
LENGTHS: list[Row] = [(0, 0, n) for n in (2, 4, 6, 8, 10, 12, 14, 16)]

HALVES: list[Row] = [(0, 0, 5)] * 1_000 + [(0, 0, 9)] * 1_000
LONG: list[Row] = [(0, 0, 281)] * 2

CHANGES: list[tuple[str, str, Callable[..., Any], Any, Any]] = [
    # reading, another value, what is looked at, by default, with the value
    (
        "eps",
        "100ms",
        _sizes(DYNAMIC, MANY[:7], **{**STEADY, "eps": "5ms"}, b_max="9"),
        [7] * 7,
        [5] * 5 + [2] * 2,
    ),
    ("token_sla", "110ms", _result(key="token_sla_violation"), 1.0, 2 / 5),
    ("request_sla", "3s", _result(key="request_sla_violation"), 0.0, 3 / 5),
    (
        "predictor",
        "prompt",
        _result(BINS, [(0, 10, 90)] * 3, "bins"),
        [(90, 90)] * 7 + [(90, None)],
        [(7, 7)] * 7 + [(7, None)],
    ),
    ("bin_limit", "none", _result(BINS, LONG, "bin_limits"), [66] * 7 + [8], [128] * 8),
    ("controller_limit", "bin", _sizes(BINS, LONG[:1] * 9, **STEADY, bins="1"), [8] * 8 + [1], [4] * 8 + [1]),
    # One short request brings the average of its controller to 1: alone it is 5, and (3 + 7) / 2 = 5.
    (
        "controllers",
        "global",
        _sizes(BINS, [(0, 0, 5), *[(0, 0, 30)] * 5], **STEADY, b_max="9", alpha_ema="1", bin_edges="0,10"),
        [1] + [5] * 5,
        [1, 2, 2, 2, 2, 1],
    ),
    (
        "length",
        "output",
        _result(),
        [(1, 4, 1), (4, 6.25, 2), (4, 6.25, 2), (6.25, 11.25, 1), (11.25, 12.75, 1)],
        [(1, 3, 1), (3, 5.25, 2), (3, 5.25, 2), (5.25, 7.25, 1), (11, 12.5, 1)],
    ),
    ("window", "arrivals", _result(key="throughput_rps"), 5 / 11.75, 0.5),
    ("tokens", "output", _result(key="throughput_tps"), 75 / 11.75, 35 / 11.75),
    (
        "bins",
        "2",
        _result(BINS, LENGTHS, "bins"),
        [(2, 3), (3, 5), (5, 7), (7, 9), (9, 10), (10, 12), (12, 14), (14, None)],
        [(2, 9), (9, None)],
    ),
    (
        "bin_choice",
        "longest-queue",
        lambda s: [
            end
            for _, end, _ in served(
                simulated(BINS, [(0, 0, 0), (0.1, 0, 20), (0.2, 0, 1), (0.3, 0, 2)], bin_edges="0,10", **s)
            )
        ],
        [1, 4, 5.25, 5.25],
        [1, 5.25, 2.25, 2.25],
    ),
    ("b_start", "one", _sizes(DYNAMIC, MANY[:3], **STEADY, b_max="9"), [3, 3, 3], [2, 2, 1]),
    ("band", "delta", _sizes(DYNAMIC, MANY[:3], **STEADY, b_start="one"), [2, 2, 1], [1, 1, 1]),
    (
        "tau_start",
        "beta",
        _sizes(DYNAMIC, MANY[:7], **{**STEADY, "tau_start": "zero"}, b_max="9"),
        [7] * 7,
        [5] * 5 + [2] * 2,
    ),
    ("guards", "authors", _sizes(DYNAMIC, MANY[:5], **SLOW, b_max="9"), [3, 3, 3, 2, 2], [5] * 5),
    ("memory_check", "hard", _sizes("static_fifo", [(0, 10_000, 0)] * 6, **TOGETHER), [6] * 6, [3] * 6),
    ("lengths_start", "limit", _sizes(DYNAMIC, MANY[:96], **TOGETHER), [76] * 76 + [20] * 20, [96] * 96),
    ("candidates", "2", _sizes(DYNAMIC, MANY[:3], **TOGETHER), [3, 3, 3], [2, 2, 1]),
    ("failed", "dropped", _result(key="n"), 5, 4),
    ("same_instant", "all-first", _sizes("static_fifo", MANY[:3]), [1, 2, 2], [3, 3, 3]),
    ("tie", "gpu-first", _sizes("static_fifo", [(0, 0, 10), (1, 0, 10), (2, 0, 10)]), [1, 2, 2], [1, 1, 1]),
    ("sla_step", "update", _sizes(DYNAMIC, MANY[:7], **TOGETHER, b_max="9"), [7] * 7, [5] * 5 + [2] * 2),
    ("partial", "wait", _sizes("static_fifo", MANY[:3]), [1, 2, 2], [3, 3, 3]),
    (
        "bin_edges",
        "0,9",
        _result(BINS, LENGTHS[:2], "bins"),
        [(2, 2), (2, 2), (2, 2), (2, 3), (3, 3), (3, 3), (3, 3), (3, None)],
        [(0, 9), (9, None)],
    ),
    (
        "edges",
        "first-1000",
        lambda s: simulated(BINS, HALVES, bins="2", **s).bins,
        [(5, 7), (7, None)],
        [(5, 5), (5, None)],
    ),
    (
        "below_first",
        "first",
        _sizes(BINS, [(0, 0, n) for n in (1, 12, 30)], **TOGETHER, bin_edges="10,20"),
        [2, 1, 2],
        [2, 2, 1],
    ),
    (
        "percentile",
        "higher",
        lambda s: simulated("static_fifo", ROWS, **s).to_dict()["latency"]["p90"],
        5.45,
        6.25,
    ),
    # Too slow: high = max(5, 1 + 4) = 5, so (1 + 5) / 2 = 3; with a step of 8, high = 9.
    ("alpha_step", "8", _sizes(DYNAMIC, MANY[:5], **SLOW, b_max="9"), [3, 3, 3, 2, 2], [5] * 5),
    # Half the band: 1 + 2 / 2 = 2, then 1 + 4 / 2 = 3.
    ("delta_step", "4", _sizes(DYNAMIC, MANY[:3], **STEADY, b_start="one", band="delta"), [1] * 3, [2, 2, 1]),
    # The first batch takes 143 ms a token. An average of 29 ms is below the SLA, one of 143 ms is above it.
    (
        "alpha_ema",
        "1",
        _sizes(DYNAMIC, MANY[:14], **TOGETHER, token_sla="100ms", eps="0s", b_max="9"),
        [7] * 14,
        [7] * 7 + [6] * 6 + [1],
    ),
    # 8 GB are 42,666 tokens; 90 % of them are 76 requests of 500 tokens, half of them are 42.
    ("rho", "0.5", _sizes(DYNAMIC, MANY[:76], **TOGETHER), [76] * 76, [42] * 42 + [34] * 34),
    ("b_min", "4", _sizes(DYNAMIC, MANY[:5], **SLOW, b_max="9"), [3, 3, 3, 2, 2], [5] * 5),
    ("static_batch", "2", _sizes("static_fifo", MANY[:3], **TOGETHER), [3, 3, 3], [2, 2, 1]),
    # (1 + 2) // 2 = 1 is the average to begin with, and low = 2 - 4.
    ("b_max", "2", _sizes(DYNAMIC, MANY[:3], **TOGETHER), [3, 3, 3], [1, 1, 1]),
    ("memory_gb", "13", _result(BINS, LONG, "bin_limits"), [66] * 7 + [8], [75] * 7 + [9]),
    ("model_gb", "5", _result(BINS, LONG, "bin_limits"), [66] * 7 + [8], [56] * 7 + [7]),
    ("margin_gb", "0", _result(BINS, LONG, "bin_limits"), [66] * 7 + [8], [75] * 7 + [9]),
    ("kv_gb_per_token", "3.75e-4", _result(BINS, LONG, "bin_limits"), [66] * 7 + [8], [33] * 7 + [4]),
]


@pytest.mark.parametrize(
    ("name", "value", "look", "before", "after"), CHANGES, ids=[change[0] for change in CHANGES]
)
def test_a_reading_changes_what_it_should(
    name: str, value: str, look: Callable[..., Any], before: Any, after: Any
) -> None:
    assert look({}) == before
    assert look({name: value}) == after
    assert before != after


def test_every_reading_is_in_the_table() -> None:
    assert sorted(change[0] for change in CHANGES) == sorted(ModelOptions.__struct_fields__)


def test_when_all_requests_failed_none_are_left() -> None:
    with pytest.raises(ValueError, match="none has output tokens"):
        simulated("static_fifo", [(0, 5, 0)], failed="dropped")


@pytest.mark.parametrize("start", [0.01, 1.0, 7.0, 500.0])
@pytest.mark.parametrize("truth", [0.9, 3.0, 40.0])
def test_the_capacity_is_found_from_above_and_below(start: float, truth: float) -> None:
    request = []

    def late(rate: float) -> float:
        request.append(rate)
        return 0.0 if rate <= truth else 0.5

    found = capacity_rps(late, 0.01, start)
    assert found is not None
    assert found <= truth <= found * 1.01
    assert len(request) < 40
    assert capacity_rps(lambda rate: 0.05, 0.05, start) is None
    assert capacity_rps(lambda rate: 1.0, 0.5, start) == 0.0


@pytest.mark.parametrize("scheduler", BATCHES)
@pytest.mark.parametrize("eps", [0.005, 0.001])
@pytest.mark.parametrize("seed", range(4))
def test_a_second_implementation_serves_each_request_at_the_same_time(
    scheduler: str, eps: float, seed: int
) -> None:
    chance = random.Random(seed)
    at_s, rows = 0.0, []
    for _ in range(600):
        # Bursts, with no two events at one moment: the two keep time differently.
        at_s += chance.expovariate(2.0) if chance.random() < 0.7 else chance.expovariate(0.1)
        rows.append((at_s, int(chance.lognormvariate(5.5, 1.3)), int(chance.lognormvariate(3.5, 1.5))))
    result = simulate(scheduler, workload(rows), setup(eps=str(eps)))
    again = oracle(scheduler, rows, eps, 8)
    assert [n for _, _, n in served(result)] == [n for _, _, n in again]
    for (start, end, _), (start_again, end_again, _) in zip(served(result), again, strict=True):
        assert (start, end) == pytest.approx((start_again, end_again), abs=1e-5)


OBJECTIVES = Objectives.parse("ttft:3s e2e:5s")


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_measuring_changes_no_figure_and_adds_all_of_a_summary(scheduler: str) -> None:
    work, read = workload(ROWS), setup(request_sla="5s")
    plain = simulate(scheduler, work, read, measuring=ExchangeMeasuring(False)).to_dict()
    answer = simulate(scheduler, work, read, measuring=ExchangeMeasuring(objectives=OBJECTIVES)).to_dict()
    assert answer.keys() - plain.keys() == Summary().to_dict({}, 1.0).keys() - plain.keys()
    for name in plain.keys() - {"metrics", "tokens", "token_sla_violation"}:
        assert answer[name] == plain[name], name
    for name, figures in plain["metrics"].items():
        assert answer["metrics"][name].items() >= figures.items(), name
    assert set(answer["metrics"]) == {metric.name for metric in METRICS}
    assert {name: answer["tokens"][name] for name in plain["tokens"]} == pytest.approx(plain["tokens"])
    # One of the five asks for no token: an empty answer meets nothing.
    assert (answer["goodput"]["counted"], answer["goodput"]["broken"]["ended"]) == (5, 1)
    assert answer["smooth_goodput"]["n"] == 4


ALONE_ROWS: list[Row] = [(1, 10, 2), (1.5, 20, 3), (2, 30, 1), (8, 40, 2)]
"""Served alone, one after another: 1 to 4, 4 to 8, 8 to 10, 10 to 13 s, with tokens at 3, 4; 6, 7, 8; 10;
12, 13 s."""


def scripted(
    monkeypatch: pytest.MonkeyPatch,
    tokens_max: Mapping[int, int],
    *,
    window: str = "completion",
    measure: bool | None = None,
    **parts: Any,
) -> SimulationResult:
    kind = SchedulerKind(lambda requests, setup: Scripted(requests, tokens_max), iterates=True)
    monkeypatch.setitem(SCHEDULERS, "scripted", kind)
    read = read_model_options({"request_sla": "6s", "token_sla": "900ms", "window": window})
    own = ServingSetup(readings=read, **parts)
    return simulate("scripted", workload(ALONE_ROWS), own, measuring=ExchangeMeasuring(measure))


def test_when_all_are_served_every_figure_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    model = IterationModel(beta_ns=S, gamma=0.5, prefill_ns=S / 10, context_ns=S / 1_000)
    answer = scripted(monkeypatch, {}, iterations=model, serving=Serving(seqs_max=1)).to_dict()
    assert (answer["n"], answer["outcomes"], answer["unserved"]) == (4, {"complete": 4}, {})
    assert answer["window"]["seconds"] == 12
    assert (answer["throughput_rps"], answer["throughput_tps"]) == (4 / 12, 108 / 12)
    assert (answer["latency"]["min"], answer["latency"]["max"]) == (3, 8)  # 3, 6.5, 8 and 5 s
    assert answer["request_sla_violation"] == 2 / 4
    assert answer["token_sla_violation"] == 3 / 4  # the third has one token, and so no gap
    assert (answer["batches"], answer["batch_mean"], answer["batch_sizes"]) == (8, 1, {"1": 8})
    assert answer["utilization"] == 1
    assert (answer["queueing"]["min"], answer["queueing"]["max"]) == (0, 6)
    assert answer["decode_step_mean"] == 12 / 8
    assert answer["model"] == {"beta": 1.0, "gamma": 0.5, "prefill": 0.1, "context": 0.001}
    assert answer["serving"]["seqs_max"] == 1
    assert answer["engine"]["preempted_share"] == 0
    assert (answer["engine"]["prefix_hit_rate"], answer["engine"]["preemption_loss"]) == (None, None)
    assert (answer["engine"]["recovery"], answer["engine"]["kv_peak"]) == (None, 0)
    assert answer["metrics"]["ttft"]["n"] == 4


GIVEN_UP = {1: 2, 2: 0}
"""The second after two tokens, at 7 s, the third at once, at 2 s; the last is served from 8 to 11 s."""


@pytest.mark.parametrize("measure", [True, False])
def test_who_is_given_up_is_an_outcome_and_late_and_no_throughput(
    monkeypatch: pytest.MonkeyPatch, measure: bool
) -> None:
    result = scripted(monkeypatch, GIVEN_UP, measure=measure)
    answer = result.to_dict()
    assert result.record.given_up == {1: 2, 2: 0}
    assert answer["outcomes"] == {"complete": 2, "truncated": 1, "upstream_error": 1}
    assert answer["unserved"] == {"late_midway": 1, "too_large": 1}
    assert (answer["n"], answer["latency"]["n"], answer["latency"]["max"]) == (4, 2, 3)
    assert answer["request_sla_violation"] == 2 / 4
    assert answer["token_sla_violation"] == (3 / 4 if measure else None)
    assert answer["window"]["seconds"] == 10
    # Completed: 10 and 40 in, 2 and 2 out. What had left of the second counts as tokens, too.
    assert (answer["throughput_rps"], answer["throughput_tps"]) == (2 / 10, 54 / 10)
    assert (answer["tokens"]["input"], answer["tokens"]["output"]) == (70, 6)
    assert answer["seconds_per_output_token"] == 9 / 6
    assert answer["queueing"]["n"] == 3
    assert answer["engine"]["preemptions"] == 1


def test_what_the_engine_did_with_its_memory_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    state = IterationState(
        kv_peak=0.9,
        preemptions=4,
        preempted=2,
        recovered=1,
        preempted_tokens=10,
        prefix_queries=8,
        prefix_hits=2,
    )
    engine = replace(scripted(monkeypatch, {}), state=state).to_dict()["engine"]
    assert engine == {
        "preemptions": 4,
        "preempted": 2,
        "preempted_share": 2 / 4,
        "recovery": 1 / 2,
        "preempted_tokens": 10,
        "preemption_loss": 10 / 4,
        "kv_peak": 0.9,
        "prefix_queries": 8,
        "prefix_hits": 2,
        "prefix_hit_rate": 2 / 8,
    }
