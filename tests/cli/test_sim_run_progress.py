"""Whoever watches a sweep reads what the command said: loads, values, and all that varies."""

from dataclasses import replace
from typing import Any

import pytest

from llmtap.cli.sim_sweep import SweepLabels, SweepLines, axes_of
from llmtap.sim.model_options import read_model_options, read_serving, settled
from llmtap.sim.sweep.grid import PRESETS
from llmtap.sim.sweep.sweep import SweepAttempt, SweepJob
from tests.support.workloads.sweeps import job, trace

JOB = replace(job(trace(2_000)), seed=None)


def at(
    scheduler: str, settings: dict[str, str], serving: dict[str, str] | None = None, **more: Any
) -> SweepJob:
    served = settled(read_serving(serving or {}), scheduler)
    return replace(JOB, scheduler=scheduler, readings=read_model_options(settings), serving=served, **more)


CASES = [
    # axes, a job, and what it is called after its scheduler and its size
    ({}, at("static_fifo", {}), ""),
    ({"scale": (1.0,)}, at("static_fifo", {}), ""),
    ({"scale": (1.0, 100.0)}, at("static_fifo", {}), ", scale 1"),
    ({"scale": (100.0,)}, at("static_fifo", {}, scale=100.0), ", scale 100"),
    ({"rate": (5.0,)}, at("static_fifo", {}, scale=2.5), ", 5 req/s"),
    ({"share": (0.5, 1.0)}, at("static_fifo", {}, scale=1.0), ", 2 req/s"),
    ({"share": (0.5, 1.0)}, at("static_fifo", {}, scale=1e12), ", all at once"),
    ({"servers": (1, 4)}, at("static_fifo", {}), ", 1 server"),
    ({"servers": (4,)}, at("static_fifo", {}, servers=4), ", 4 servers"),
    ({"seed": (42, 43)}, at("multi_bin_dynamic", {"predictor": "noisy"}, seed=42),
     ", seed 42, predictor noisy"),
    ({"seed": (42, 43)}, at("static_fifo", {}, seed=None), ""),
    ({"eps": ("5ms", "1ms")}, at("dynamic_no_bins", {}), ", eps 5 ms"),
    ({"eps": ("5ms", "1ms")}, at("dynamic_no_bins", {"eps": "0.001"}), ", eps 1 ms"),
    ({"eps": ("5ms", "1ms")}, at("static_fifo", {}), ""),
    ({"bin_edges": ("0,9",)}, at("multi_bin_dynamic", {"bin_edges": "0,9"}), ", bin_edges 0, 9"),
    ({"prefix_cache": ("true", "false")}, at("chunked_prefill", {}), ", prefix_cache off"),
    ({"prefix_cache": ("true",)}, at("chunked_prefill", {}, {"prefix_cache": "true"}), ", prefix_cache on"),
    ({"output_delay": ("0", "50ms")}, at("output_delay", {}), ", output_delay 50 ms"),
    ({}, at("output_delay", {}), ""),
    ({}, at("output_delay", {}, {"output_delay": "0"}), ", output_delay 0 s"),
]  # fmt: skip


@pytest.mark.parametrize(("axes", "job", "said"), CASES)
def test_a_job_is_called_by_what_varies_and_what_is_not_by_default(
    axes: dict[str, Any], job: SweepJob, said: str
) -> None:
    label = SweepLabels(axes, lambda job: 2.0 * job.scale).of(job)
    assert label == f"{job.scheduler}, 2,000 requests{said}"


def test_where_all_come_at_once_there_is_no_rate() -> None:
    assert (
        SweepLabels({"rate": (1.0,)}, lambda job: None).of(JOB) == "static_fifo, 2,000 requests, all at once"
    )


def test_what_a_preset_compares_varies() -> None:
    axes = axes_of({"requests": (1_000,)}, PRESETS["methods"])
    assert SweepLabels(axes, lambda job: None).of(JOB) == "static_fifo, 2,000 requests, 1 server"
    assert axes_of({"bins": ("4",)}, None) == {"bins": ("4",)}


def test_a_line_for_each_job(capsys: pytest.CaptureFixture[str]) -> None:
    lines = SweepLines(SweepLabels({}, lambda job: None))
    lines.planned([JOB, JOB], 3)
    lines.ended(JOB, SweepAttempt("ab", seconds=1.234, summary={}))
    lines.ended(JOB, SweepAttempt("cd", error="no"))
    assert capsys.readouterr().err.splitlines() == [
        "llmtap: 3 done before and taken from the results, 2 left",
        "llmtap: 1 of 2: static_fifo, 2,000 requests (ab): 1.23 s",
        "llmtap: 2 of 2: static_fifo, 2,000 requests (cd): failed: no",
    ]
