"""What the seeds ask for, and what the presets are."""

from array import array
from collections.abc import Mapping, Sequence

import pytest

from llmtap.sim.model_options import read_model_options, read_serving
from llmtap.sim.schedulers.registry import SCHEDULERS
from llmtap.sim.sweep.grid import BEST, LOADS, PRESETS, READINGS, SERVING, GridSource, SweepGrid, points
from llmtap.sim.sweep.sweep import SweepAttempt, SweepJob, rows_of
from llmtap.workload.requests import Requests
from llmtap.workload.trace import Trace

OWN = {"requests", "seed", "servers", "scheduler", *LOADS}


class Small(GridSource):
    """Whatever is asked for has two rows."""

    def rows(self, count: int | None, seed: int) -> tuple[str, Trace]:
        trace = Trace(Requests(*(array("q", column) for column in ([0, 10**9], [1, 2], [3, 4]))))
        digest = rows_of(trace).digest
        self.traces[digest] = trace
        return digest, trace


def nothing(jobs: Sequence[SweepJob]) -> Mapping[str, SweepAttempt]:
    return {
        j.id: SweepAttempt(j.id, summary={"request_sla_violation": 0.0, "throughput_rps": 1.0}) for j in jobs
    }


@pytest.mark.parametrize("name", PRESETS)
def test_every_name_and_value_of_a_preset_is_known(name: str) -> None:
    preset = PRESETS[name]
    assert preset.about
    assert preset.source.startswith("seed ")
    assert sum(load in preset.axes for load in LOADS) == 1
    assert not preset.best_of or preset.best_of in PRESETS
    assert bool(preset.share_of) is ("share" in preset.axes)
    for point in [*points(preset.axes, preset.variants), dict(preset.share_of)]:
        assert set(point) <= OWN | READINGS | SERVING
        assert point.get("scheduler", "static_fifo") in SCHEDULERS
        settings = {key: value for key, value in point.items() if value != BEST}
        read_model_options({key: value for key, value in settings.items() if key in READINGS})
        read_serving({key: value for key, value in settings.items() if key in SERVING})
        assert BEST not in point.values() or preset.best_of


def test_the_grid_is_the_one_of_the_seed() -> None:
    """7.1, step 1: 4 x 8 x 6 = 192 runs at a load."""
    preset = PRESETS["grid"]
    jobs = SweepGrid(Small("x"), {}).jobs(preset.axes, preset, nothing)
    assert len(jobs) == 192
    assert {j.count for j in jobs} == {1_000, 10_000, 100_000, 1_000_000}
    assert {j.servers for j in jobs} == {1, 2, 4, 8, 16, 32, 64, 100}
    assert {j.readings.bins for j in jobs} == {1, 2, 4, 8, 16, 32}
    assert {(j.scheduler, j.scale, j.seed) for j in jobs} == {("multi_bin_dynamic", 100.0, None)}
    of_one_size = SweepGrid(Small("x"), {}).jobs(preset.axes | {"requests": (10_000,)}, preset, nothing)
    assert len(of_one_size) == 48


def test_the_methods_are_those_of_the_seed() -> None:
    """7.1, step 2: 4 methods x 4 sizes. Here a GPU and a bin are as good as any, so that is the best."""
    preset = PRESETS["methods"]
    jobs = SweepGrid(Small("x"), {}).jobs(preset.axes, preset, nothing)
    assert len(jobs) == 16
    assert [(j.scheduler, j.servers, j.readings.bins) for j in jobs[:4]] == [
        ("static_fifo", 1, 8), ("dynamic_no_bins", 1, 8), ("multi_bin_dynamic", 1, 8),
        ("multi_bin_dynamic", 1, 1),
    ]  # fmt: skip


def test_no_name_is_a_reading_and_an_option_of_serving() -> None:
    """`--vary` and points name both alike."""
    assert not READINGS & SERVING
    assert not OWN & (READINGS | SERVING)
