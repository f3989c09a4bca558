"""Invariant: every combination is there once, and nothing else."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llmtap.errors import ConfigError
from llmtap.sim.model_options import Serving, read_model_options, read_serving
from llmtap.sim.schedulers.registry import SCHEDULERS
from llmtap.sim.sweep.grid import (
    BEST,
    LOADS,
    PRESETS,
    READINGS,
    SERVING,
    GridSource,
    Preset,
    SweepGrid,
    best_of,
    points,
)
from llmtap.sim.sweep.sweep import JobOptions, SweepAttempt, SweepJob, digest_of, run_job
from llmtap.workload.registry import draw_requests, is_workload
from llmtap.workload.requests import Requests
from llmtap.workload.trace import Trace

HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


@pytest.fixture
def source(tmp_path: Path) -> GridSource:
    path = tmp_path / "a.csv"
    rows = [(i * 2, 10 + i, i % 30) for i in range(60)]
    path.write_text(HEADER + "".join(f"{t},GPT-4,{n},{m},{n + m},API log\n" for t, n, m in rows))
    return GridSource(str(path))


class Ran:
    """Runs jobs, and keeps which."""

    def __init__(self, source: GridSource) -> None:
        self.jobs: list[SweepJob] = []
        self._source = source

    def __call__(self, jobs: Sequence[SweepJob]) -> Mapping[str, SweepAttempt]:
        self.jobs += jobs
        return {j.id: SweepAttempt(j.id, summary=run_job(j, self._source.traces[j.rows])) for j in jobs}


def nothing(jobs: Sequence[SweepJob]) -> Mapping[str, SweepAttempt]:
    raise AssertionError("nothing has to be run first")


def test_jobs_have_what_their_points_say(source: GridSource) -> None:
    axes = {
        "requests": (30, 100),
        "rate": (5.0,),
        "servers": (2,),
        "seed": (7,),
        "bins": ("3",),
        "eps": ("1ms",),
        "chunk": ("64",),
        "scheduler": ("multi_bin_dynamic",),
    }
    jobs = SweepGrid(source, JobOptions(capacity=0.1, measure=True)).jobs(axes, None, nothing)
    assert [j.count for j in jobs] == [30, 100]
    # Rows come every 2 s; a rate is by the rows that are taken.
    assert [j.scale for j in jobs] == [pytest.approx(10), pytest.approx(10)]
    one = jobs[0]
    assert (one.scheduler, one.servers) == ("multi_bin_dynamic", 2)
    # It reads nothing of serving, and nothing was drawn.
    assert (one.readings.bins, one.readings.eps, one.serving, one.seed) == (3, 1_000_000, Serving(), None)
    assert (one.capacity, one.measure, one.trace) == (0.1, True, source.name)
    assert [len(source.traces[j.rows]) for j in jobs] == [30, 60]


ONCE = [
    # axes, and over which values of them there are jobs
    ({"scheduler": ("static_fifo",), "bins": ("2", "4"), "eps": ("1ms", "5ms")}, [{}]),
    (
        {"scheduler": ("multi_bin_dynamic",), "bins": ("2", "4"), "chunk": ("64", "128")},
        [{"bins": 2}, {"bins": 4}],
    ),
    (
        {"scheduler": ("static_fifo", "dynamic_no_bins"), "eps": ("1ms", "2ms"), "static_batch": ("4", "5")},
        [{"static_batch": 4}, {"eps": 1_000_000}, {"static_batch": 5}, {"eps": 2_000_000}],
    ),
    (
        {
            "scheduler": ("continuous_batching", "chunked_prefill"),
            "eps": ("1ms", "5ms"),
            "chunk": ("64", "128"),
        },
        [{"chunk": 512}, {"chunk": 64}, {"chunk": 128}],
    ),
    # Of seeds, who draws nothing has one.
    ({"scheduler": ("static_fifo",), "predictor": ("noisy",), "seed": (1, 2)}, [{}]),
    (
        {"scheduler": ("multi_bin_dynamic",), "predictor": ("perfect", "noisy"), "seed": (1, 2)},
        [
            {"predictor": "perfect", "seed": None},
            {"predictor": "noisy", "seed": 1},
            {"predictor": "noisy", "seed": 2},
        ],
    ),
]


@pytest.mark.parametrize(("axes", "expected"), ONCE)
def test_a_run_is_made_once_over_what_its_scheduler_reads(
    source: GridSource, axes: dict[str, Any], expected: list[dict[str, Any]]
) -> None:
    jobs = SweepGrid(source).jobs(axes, None, nothing)
    result = [
        msgspec.to_builtins(j.readings, enc_hook=int)
        | msgspec.to_builtins(j.serving, enc_hook=int)
        | {"seed": j.seed}
        for j in jobs
    ]
    assert [
        {name: one[name] for name in want} for one, want in zip(result, expected, strict=True)
    ] == expected


def test_a_workload_is_drawn_by_its_name_and_seed() -> None:
    source = GridSource("chat")
    axes = {"scheduler": ("static_fifo",), "requests": (50,), "seed": (1, 2)}
    first, second = SweepGrid(source).jobs(axes, None, nothing)
    assert first.rows != second.rows
    assert source.traces[first.rows].requests == draw_requests("chat", 50, 1, "")
    assert len(source.rows(None, 1)[1]) == 10_000


@pytest.mark.parametrize(
    ("axes", "common", "problem"),
    [
        ({"rate": (3.0,)}, {}, "--rate: all rows arrive at once"),
        ({"requests": (3,)}, {}, "--requests: expected at most 2 .* got 3: the rows cannot be repeated"),
        ({}, {"capacity": 0.1}, "--capacity: all rows arrive at once"),
        ({"memory_gb": ("4",)}, {}, "--reading: memory_gb: expected more than"),
        ({"scale": (1e-12,), "requests": (2,)}, {}, "--scale: the last of 2 requests would arrive after"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_run(
    tmp_path: Path, axes: dict[str, Any], common: dict[str, Any], problem: str
) -> None:
    path = tmp_path / "a.csv"
    ends = 9 if "scale" in axes else 1
    path.write_text(HEADER + "".join(f"{t},GPT-4,5,5,10,API log\n" for t in (1, ends)))
    with pytest.raises(ConfigError, match=problem):
        SweepGrid(GridSource(str(path)), JobOptions(**common)).jobs(
            {"scheduler": ("static_fifo",), **axes}, None, nothing
        )


def result(late: float) -> dict[str, Any]:
    return {"request_sla_violation": late}


@pytest.mark.parametrize(
    ("late", "best"),
    [
        # by servers, then bins: (1, 1) (1, 8) (4, 1) (4, 8)
        ([0.5, 0.5, 0.5, 0.5], (1, "1")),
        ([0.5, 0.1, 0.1, 0.1], (1, "8")),
        ([0.5, 0.4, 0.11, 0.1], (4, "1")),
        ([0.5, 0.4, 0.111, 0.1], (4, "8")),
        ([0.11, 0.4, 0.2, 0.1], (1, "1")),
        ([0.2, 0.1, 0.1, 0.3], (1, "8")),
    ],
)
def test_the_best_is_the_smallest_that_is_as_good_as_any(late: list[float], best: tuple[int, str]) -> None:
    tried = [{"servers": k, "bins": b} for k in (1, 4) for b in ("1", "8")]
    assert best_of(tried, [result(one) for one in late]) == {"servers": best[0], "bins": best[1]}


PRESET = Preset("", "", {}, ({"scheduler": "multi_bin_dynamic", "servers": BEST, "bins": BEST},), "grid")


def test_the_best_is_searched_with_all_else_being_equal(source: GridSource) -> None:
    ran = Ran(source)
    axes = {"requests": (60,), "scale": (10.0, 40.0), "eps": ("1ms",)}
    jobs = SweepGrid(source).jobs(axes, PRESET, ran)
    assert len(ran.jobs) == 2 * 48
    assert {(j.count, j.scale, j.readings.eps) for j in ran.jobs} == {
        (60, 10.0, 1_000_000),
        (60, 40.0, 1_000_000),
    }
    assert [j.scale for j in jobs] == [10.0, 40.0]
    for job in jobs:
        assert job.id in {j.id for j in ran.jobs}
        same_load = [run_job(j, source.traces[j.rows]) for j in ran.jobs if j.scale == job.scale]
        least = min(one["request_sla_violation"] for one in same_load)
        assert run_job(job, source.traces[job.rows])["request_sla_violation"] <= least + 0.01


def test_shares_are_of_what_is_done_when_all_come_at_once(source: GridSource) -> None:
    preset = Preset(
        "",
        "",
        {},
        ({"scheduler": "continuous_batching"}, {"scheduler": "chunked_prefill"}),
        share_settings={"scheduler": "continuous_batching"},
    )
    ran = Ran(source)
    axes = {"share": (0.5, 1.0), "chunk": ("64",)}
    jobs = SweepGrid(source, JobOptions(objectives="ttft:1s")).jobs(axes, preset, ran)
    [first] = ran.jobs
    assert (first.scheduler, first.objectives, first.measure, first.serving.chunk) == (
        "continuous_batching",
        "",
        False,
        512,
    )
    at_once = source.traces[first.rows].requests_at(count=first.count, scale=first.scale)
    assert max(at_once.arrival_ns) <= 1
    [result] = [run_job(first, source.traces[first.rows])]
    own_rps = source.traces[first.rows].rate_rps
    assert own_rps is not None
    capacity_rps = result["throughput_rps"]
    assert [j.scale for j in jobs] == pytest.approx(
        [share * capacity_rps / own_rps for share in (0.5, 0.5, 1.0, 1.0)]
    )
    assert [j.objectives for j in jobs] == ["ttft:1s"] * 4
    plain = [replace(j, scheduler="", scale=0.0, wanted_load=None) for j in jobs]
    assert (plain[:2], [j.wanted_load for j in jobs]) == (plain[2:], [0.5, 0.5, 1.0, 1.0])
    few = SweepGrid(source).jobs({"share": (0.5,), "requests": (50,)}, preset, ran)
    assert ([j.count for j in few], ran.jobs[-1].count) == ([50, 50], 2_000)  # enough for the capacity


OWN = {"requests", "seed", "servers", "scheduler", *LOADS}


class Small(GridSource):
    """Whatever is asked for has two rows."""

    def rows(self, count: int | None, seed: int) -> tuple[str, Trace]:
        trace = Trace(Requests(*(array("q", column) for column in ([0, 10**9], [1, 2], [3, 4]))))
        digest = digest_of(trace)
        self.traces[digest] = trace
        return digest, trace


def instantly(jobs: Sequence[SweepJob]) -> Mapping[str, SweepAttempt]:
    return {
        j.id: SweepAttempt(j.id, summary={"request_sla_violation": 0.0, "throughput_rps": 1.0}) for j in jobs
    }


@pytest.mark.parametrize("name", PRESETS)
def test_every_name_and_value_of_a_preset_is_known(name: str) -> None:
    preset = PRESETS[name]
    assert preset.description
    assert " paper, " in preset.source or " chapter, " in preset.source
    assert not preset.trace or is_workload(preset.trace)
    assert sum(load in preset.axes for load in LOADS) == 1
    assert not preset.best_preset or preset.best_preset in PRESETS
    assert bool(preset.share_settings) is ("share" in preset.axes)
    for point in [*points(preset.axes, preset.variants), dict(preset.share_settings)]:
        assert set(point) <= OWN | READINGS | SERVING
        assert point.get("scheduler", "static_fifo") in SCHEDULERS
        settings = {key: value for key, value in point.items() if value != BEST}
        read_model_options({key: value for key, value in settings.items() if key in READINGS})
        read_serving({key: value for key, value in settings.items() if key in SERVING})
        assert BEST not in point.values() or preset.best_preset


def test_the_grid_is_the_one_of_the_seed() -> None:
    """7.1, step 1: 4 x 8 x 6 = 192 runs at a load."""
    preset = PRESETS["grid"]
    jobs = SweepGrid(Small("x")).jobs(preset.axes, preset, instantly)
    assert len(jobs) == 192
    assert {j.count for j in jobs} == {1_000, 10_000, 100_000, 1_000_000}
    assert {j.servers for j in jobs} == {1, 2, 4, 8, 16, 32, 64, 100}
    assert {j.readings.bins for j in jobs} == {1, 2, 4, 8, 16, 32}
    assert {(j.scheduler, j.scale, j.seed) for j in jobs} == {("multi_bin_dynamic", 100.0, None)}
    of_one_size = SweepGrid(Small("x")).jobs(preset.axes | {"requests": (10_000,)}, preset, instantly)
    assert len(of_one_size) == 48


def test_the_defaults_include_the_run_of_the_seed() -> None:
    """8.1: NUM_GPUS 4, K_BINS 4, RPS_SCALING 10."""
    preset = PRESETS["defaults"]
    jobs = SweepGrid(Small("x")).jobs(preset.axes, preset, instantly)
    [own] = [j for j in jobs if (j.scheduler, j.readings.bins, j.scale) == ("multi_bin_dynamic", 4, 10.0)]
    assert (own.servers, own.count) == (4, 1_000)
    assert (own.readings.b_min, own.readings.b_max, own.readings.eps) == (1, 128, 5_000_000)
    assert (own.readings.token_sla, own.readings.request_sla) == (10_000_000, 20_000_000_000)
    assert (own.readings.memory_gb, own.readings.model_gb, own.readings.kv_gb_per_token) == (12, 4, 1.875e-4)


def test_the_methods_are_those_of_the_seed() -> None:
    """7.1, step 2: 4 methods x 4 sizes. Here a GPU and a bin are as good as any, so that is the best."""
    preset = PRESETS["methods"]
    jobs = SweepGrid(Small("x")).jobs(preset.axes, preset, instantly)
    assert len(jobs) == 16
    assert [(j.scheduler, j.servers, j.readings.bins) for j in jobs[:4]] == [
        ("static_fifo", 1, 8),
        ("dynamic_no_bins", 1, 8),
        ("multi_bin_dynamic", 1, 8),
        ("multi_bin_dynamic", 1, 1),
    ]
