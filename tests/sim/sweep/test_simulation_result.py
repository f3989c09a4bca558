"""What becomes of requests that are not served to the end; the other figures are in test_wind_tunnel.py."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from llmtap.metrics.objectives import Objectives
from llmtap.sim.engine import IterationState
from llmtap.sim.latency import IterationModel
from llmtap.sim.model_options import Serving, read_model_options
from llmtap.sim.schedulers.registry import SCHEDULERS, SchedulerKind
from llmtap.sim.sweep.simulate import SimulationResult, simulate
from tests.support.flights import Row, S, workload
from tests.support.scripted_scheduler import Scripted

ROWS: list[Row] = [(1, 10, 2), (1.5, 20, 3), (2, 30, 1), (8, 40, 2)]
"""Served alone, one after another: 1 to 4, 4 to 8, 8 to 10, 10 to 13 s, with tokens at 3, 4; 6, 7, 8; 10;
12, 13 s."""


def flown(
    monkeypatch: pytest.MonkeyPatch, tokens_max: Mapping[int, int], *, window: str = "completion", **more: Any
) -> SimulationResult:
    kind = SchedulerKind(lambda requests, setup: Scripted(requests, tokens_max), iterates=True)
    monkeypatch.setitem(SCHEDULERS, "scripted", kind)
    read = read_model_options({"request_sla": "6s", "token_sla": "900ms", "window": window})
    return simulate("scripted", workload(ROWS), read, **more)


def test_when_all_are_served_every_figure_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    model = IterationModel(beta_ns=S, gamma=0.5, prefill_ns=S / 10, context_ns=S / 1_000)
    told = flown(monkeypatch, {}, iterations=model, serving=Serving(seqs_max=1)).to_dict()
    assert (told["n"], told["outcomes"], told["unserved"]) == (4, {"complete": 4}, {})
    assert told["window"]["seconds"] == 12
    assert (told["throughput_rps"], told["throughput_tps"]) == (4 / 12, 108 / 12)
    assert (told["latency"]["min"], told["latency"]["max"]) == (3, 8)  # 3, 6.5, 8 and 5 s
    assert told["request_sla_violation"] == 2 / 4
    assert told["token_sla_violation"] == 3 / 4  # the third has one token, and so no gap
    assert (told["batches"], told["batch_mean"], told["batch_sizes"]) == (8, 1, {"1": 8})
    assert told["utilization"] == 1
    assert (told["queueing"]["min"], told["queueing"]["max"]) == (0, 6)
    assert told["decode_step_mean"] == 12 / 8
    assert told["model"] == {"beta": 1.0, "gamma": 0.5, "prefill": 0.1, "context": 0.001}
    # Nobody is given up: no bound is read.
    assert (told["serving"]["seqs_max"], told["serving"]["ttft"]) == (1, None)
    assert told["engine"]["preempted_share"] == 0
    assert (told["engine"]["prefix_hit_rate"], told["engine"]["preemption_loss"]) == (None, None)
    assert (told["engine"]["recovery"], told["engine"]["kv_peak"]) == (None, 0)
    assert told["metrics"]["ttft"]["n"] == 4


GIVEN_UP = {1: 2, 2: 0}
"""The second after two tokens, at 7 s, the third at once, at 2 s; the last is served from 8 to 11 s."""


@pytest.mark.parametrize("measure", [True, False])
def test_who_is_given_up_is_an_outcome_and_late_and_no_throughput(
    monkeypatch: pytest.MonkeyPatch, measure: bool
) -> None:
    result = flown(monkeypatch, GIVEN_UP, measure=measure)
    told = result.to_dict()
    assert result.record.given_up == {1: 2, 2: 0}
    assert told["outcomes"] == {"complete": 2, "truncated": 1, "upstream_error": 1}
    assert told["unserved"] == {"late_midway": 1, "too_large": 1}
    assert (told["n"], told["latency"]["n"], told["latency"]["max"]) == (4, 2, 3)
    assert told["request_sla_violation"] == 2 / 4
    assert told["token_sla_violation"] == (3 / 4 if measure else None)
    assert told["window"]["seconds"] == 10
    # Completed: 10 and 40 in, 2 and 2 out. What had left of the second counts as tokens, too.
    assert (told["throughput_rps"], told["throughput_tps"]) == (2 / 10, 54 / 10)
    assert (told["tokens"]["input"], told["tokens"]["output"]) == (70, 6)
    assert told["seconds_per_output_token"] == 9 / 6
    assert told["queueing"]["n"] == 3
    assert told["engine"]["preemptions"] == 1


def test_goodput_counts_who_was_given_up_as_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    told = flown(monkeypatch, GIVEN_UP, objectives=Objectives.parse("ttft:10s")).to_dict()
    assert (told["goodput"]["counted"], told["goodput"]["met"]) == (4, 2)
    assert told["goodput"]["broken"] == {"ended": 2}
    # Two tokens each: readers wait 2.95, 5.45 and 2.95 s for the second. Who got none had nothing to read.
    assert told["smooth_goodput"]["n"] == 3
    assert told["smooth_goodput"]["tokens_per_second"] == pytest.approx((3 * 2 - 5 * 11.35) / 10)


def test_what_the_engine_did_with_its_memory_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    state = IterationState(
        kv_peak=0.9, preemptions=4, preempted=2, recovered=1, preempted_tokens=10, prefix_queries=8,
        prefix_hits=2,
    )  # fmt: skip
    engine = replace(flown(monkeypatch, {}), state=state).to_dict()["engine"]
    assert engine == {
        "preemptions": 4, "preempted": 2, "preempted_share": 2 / 4, "recovery": 1 / 2, "preempted_tokens": 10,
        "preemption_loss": 10 / 4, "kv_peak": 0.9, "prefix_queries": 8, "prefix_hits": 2,
        "prefix_hit_rate": 2 / 8,
    }  # fmt: skip


def test_when_nobody_is_served_nothing_is_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    told = flown(monkeypatch, dict.fromkeys(range(4), 0)).to_dict()
    assert told["outcomes"] == {"upstream_error": 4}
    assert told["request_sla_violation"] == 1
    assert (told["latency"]["n"], told["latency"]["mean"], told["latency"]["p99"]) == (0, None, None)
    assert (told["throughput_rps"], told["batch_mean"], told["decode_step_mean"]) == (None, None, None)
    assert (told["seconds_per_output_token"], told["utilization"]) == (None, 0)
    assert (told["tokens"]["input"], told["tokens"]["output"]) == (0, 0)
    window = flown(monkeypatch, dict.fromkeys(range(4), 0), window="arrivals").to_dict()
    assert window["throughput_rps"] == 0
