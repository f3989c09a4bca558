"""Invariant: what decides a result is in the job, and all of it is in the id."""

import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyarrow import csv

import llmtap
from llmtap.capture.read.reader import read
from llmtap.metrics.deadlines import Benefit
from llmtap.sim.model_options import IterationModel, LatencyModel, ModelOptions, Serving, ServingSetup
from llmtap.sim.sweep.fit_report import GridFitReport
from llmtap.sim.sweep.simulate import simulate
from llmtap.sim.sweep.sweep import SweepJob, attempt, digest_of, run_job, write_runs
from llmtap.units import Duration
from tests.support.workloads.sweeps import job, trace

TRACE = trace()
JOB = job(TRACE)

OTHER: dict[str, Any] = {
    "trace": "b.csv",
    "rows": digest_of(trace(39)),
    "count": 41,
    "scale": 2.0,
    "wanted_load": 3.0,
    "scheduler": "dynamic_no_bins",
    "servers": 2,
    "router": "least-loaded",
    "seed": 43,
    "readings": ModelOptions(eps=Duration(1)),
    "serving": Serving(chunk=511),
    "model": LatencyModel(1.0, 2.0, 0.5),
    "iterations": IterationModel(1.0, 0.5, 1.0),
    "fit": GridFitReport(
        grid="g.csv", r2=1.0, points=5, error_max=0.0, unseen=None, valid=True, caution=None
    ),
    "model_source": "a sketch",
    "objectives": "ttft:1s",
    "reader": Benefit(alpha=4.0),
    "measure": True,
    "follow": 3,
    "capacity": 0.01,
    "capacity_by": ("token",),
    "capture": "somewhere",
    "version": "0.0.0",
}


@pytest.mark.parametrize("name", OTHER)
def test_whatever_differs_makes_another_id(name: str) -> None:
    assert replace(JOB, **{name: OTHER[name]}).id != JOB.id


def test_the_table_of_what_may_differ_is_whole() -> None:
    assert sorted(OTHER) == sorted(field.name for field in fields(SweepJob))


def test_the_same_job_has_the_same_id_in_another_process() -> None:
    code = "from tests.support.workloads.sweeps import job, trace; print(job(trace()).id)"
    answer = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
        env={"PYTHONHASHSEED": "1"},
    )
    assert answer.stdout.strip() == JOB.id == job(trace()).id


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r.arrival_ns.append(r.arrival_ns.pop() + 1),
        lambda r: r.input.append(r.input.pop() + 1),
        lambda r: r.output.append(r.output.pop() + 1),
        lambda r: r.blocks.extend([(1,)] * len(r)),
        lambda r: setattr(r, "block_tokens", 16),
    ],
)
def test_rows_that_differ_have_another_digest(change: Any) -> None:
    other = trace()
    change(other.requests)
    assert digest_of(other) != digest_of(trace())
    assert digest_of(replace(trace(), has_dates=True)) != digest_of(trace())


def test_a_job_tells_the_figures_of_its_run_and_its_own_parameters() -> None:
    readings = ModelOptions(bins=3)
    answer = run_job(
        replace(JOB, scheduler="multi_bin_dynamic", readings=readings, servers=2, scale=5.0, count=90), TRACE
    )
    work = TRACE.requests_at(count=90, scale=5.0)
    result = simulate("multi_bin_dynamic", work, ServingSetup(readings=readings), servers=2).to_dict()
    assert {name: answer[name] for name in result} == result
    assert (answer["trace"], answer["scale"], answer["fit"]) == ("a.csv", 5.0, None)
    assert len(answer["bins"]) == 3
    assert set(answer) - set(result) == {"trace", "scale", "asked_load", "fit", "model_source", "job"}


def test_an_error_is_what_came_of_a_job() -> None:
    ticks = iter((10**9, 4 * 10**9))
    impossible = replace(JOB, measure=False, follow=1)
    failed = attempt(impossible, TRACE, lambda: next(ticks))
    assert failed.summary is None
    assert failed.error is not None
    assert "measuring.enabled: expected true" in failed.error
    assert (failed.id, failed.seconds) == (impossible.id, 3.0)
    other = attempt(replace(JOB, version="9.9.9"), TRACE, lambda: 0)
    assert (
        other.error
        == f"the job needs llmtap 9.9.9, but this process has {llmtap.__version__}: install one version"
    )
    broken = attempt(replace(JOB, scheduler="none"), TRACE, lambda: 0)
    assert broken.error == "KeyError: 'none'"


def test_each_capture_has_a_folder_that_is_whole_or_not_there(tmp_path: Path) -> None:
    captured = replace(JOB, capture=str(tmp_path))
    folder = tmp_path / f"static_fifo-40-{captured.id}"
    left_over = tmp_path / f"{folder.name}.part"
    left_over.mkdir()
    (left_over / "torn").touch()
    for _ in range(2):  # what an attempt made whose result was lost gives way
        assert run_job(captured, TRACE)["capture"] == str(folder)
        assert [path.name for path in tmp_path.iterdir()] == [folder.name]
        assert len(read(folder)) == 40
    assert not (folder / "torn").exists()


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_table_has_the_latencies_and_the_options_that_differ(tmp_path: Path, suffix: str) -> None:
    metrics = {"ttft": {"p50": 0.5, "p99": 2.0}, "itl": {"p50": 0.012, "option": "B-even"}}
    runs: list[dict[str, Any]] = [
        {
            "scheduler": "chunked_prefill",
            "metrics": metrics,
            "goodput": {"attainment": 0.75},
            "serving": {"chunk": chunk, "tbt": 0.25 * chunk, "seqs_max": 8, "classes": ["a"] * chunk},
        }
        for chunk in (1, 2)
    ]
    place = tmp_path / f"runs{suffix}"
    write_runs(place, [*runs, {"scheduler": "static_fifo"}])
    table = csv.read_csv(place) if suffix == ".csv" else pq.read_table(place)
    found = {name: table.column(name).to_pylist() for name in table.column_names}
    assert found["chunk"] == [1, 2, None]
    assert found["tbt_ms"] == [250, 500, None]
    assert found["seqs_max"] == [8, 8, None]
    assert [one or None for one in found["classes"]] == ["a", "a, a", None]
    assert (found["ttft_p50_ms"], found["ttft_p99_ms"]) == ([500, 500, None], [2_000, 2_000, None])
    assert (found["itl_p50_ms"][0], found["itl_option"][0]) == (12, "B-even")
    assert found["goodput_attainment_pct"] == [75, 75, None]
    write_runs(place, runs)
    again = csv.read_csv(place) if suffix == ".csv" else pq.read_table(place)
    assert set(found) - set(again.column_names) == {"seqs_max"}
