"""A grid of batch times has the constants that were planted, and only cells that were batches."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llmtap.bench.exo.result import ExoBatch, ExoRun, measured_grid
from llmtap.sim.latency import LatencyModel
from llmtap.sim.sweep.fitting import fit_batches, load_grid
from tests.bench.exo.exo import exo_run

MS = 1_000_000
MODEL = LatencyModel(alpha_ns=60 * MS, beta_ns=5 * MS, gamma=0.3)
LATE_S = 0.001
_BATCH = ExoBatch(
    start_s=0.0, wall_s=None, per_req_tps=None, agg_gen_tps=None, start_spread_s=0.002, joules=None,
    findings=[],
)  # fmt: skip
PLACE = {"repeat_index": 0, "concurrency": 1, "concurrent_index": 0}


def run(size: int, tokens: int, repeat: int, index: int, seconds: float) -> ExoRun:
    """A request of a batch that took `seconds` from its first byte, sent 1 ms after the common start."""
    return exo_run(
        tokens, None, 1e9 / MODEL.step_ns(size), _BATCH, repeat_index=repeat, concurrency=size,
        concurrent_index=index, elapsed_s=LATE_S + seconds, ttft_s=0.06, dispatch_late_s=LATE_S,
        uncertainty_s=0.0005,
    )  # fmt: skip


def planted(changed: Mapping[tuple[int, int], dict[str, Any]] = {}) -> list[ExoRun]:
    """Three repeats of each cell; the first takes a second longer, the last one 2 ms longer.

    `changed`: fields of the last request of the last batch of a cell.
    """
    runs = []
    for size, tokens in ((b, n) for b in (1, 2, 4) for n in (16, 64)):
        for repeat, more_s in enumerate((1.0, 0.0, 0.002)):
            seconds = MODEL.batch_ns(size, tokens) / 1e9 + more_s
            runs += [run(size, tokens, repeat, i, seconds) for i in range(size)]
        runs[-1] = msgspec.structs.replace(runs[-1], **changed.get((size, tokens), {}))
    return runs


def test_the_file_has_the_constants_that_were_planted(tmp_path: Path) -> None:
    grid = measured_grid(planted(), warmup=1, length="output")
    assert [(c.batch, c.length, c.n, c.problem) for c in grid.cells] == [
        (b, n, 2, None) for b in (1, 2, 4) for n in (16, 64)
    ]
    for cell in grid.cells:
        seconds = MODEL.batch_ns(cell.batch, cell.length) / 1e9
        assert (cell.min_s, cell.max_s) == (pytest.approx(seconds), pytest.approx(seconds + 0.002))
        assert [cell.median_s, cell.mean_s, cell.model_s] == pytest.approx([seconds + 0.001] * 3)
        assert cell.std_s == pytest.approx(0.002 / 2**0.5)
        assert cell.uncertainty_s == 0.002, "the requests were sent 2 ms apart"
    place = tmp_path / "grid.csv"
    place.write_text(grid.to_csv())
    read = fit_batches(load_grid(place))
    assert (read.model.alpha_ns, read.model.beta_ns, read.model.gamma) == (
        pytest.approx(MODEL.alpha_ns + MS, rel=1e-6), pytest.approx(MODEL.beta_ns, rel=1e-6),
        pytest.approx(MODEL.gamma, rel=1e-5),
    )  # fmt: skip
    assert [c.length for c in measured_grid(planted(), warmup=1, length="prompt+output").cells][:2] == [
        80,
        128,
    ]


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"outcome": "upstream_reset"}, "1 of 4 requests failed: upstream_reset"),
        ({"stats": exo_run(9, None, 1.0, _BATCH, **PLACE).stats}, "an answer has 9 of 64 tokens"),
        ({"ttft_s": 0.5}, "not all requests ran at the same time"),
        (
            {"ttft_s": None},
            "answers were not streamed: whether all requests ran at the same time is not known",
        ),
    ],
)
def test_a_cell_that_was_no_batch_is_named_and_left_out(changed: dict[str, Any], problem: str) -> None:
    grid = measured_grid(planted({(4, 64): changed}), warmup=1, length="output")
    assert [(c.batch, c.length, c.problem) for c in grid.cells if c.problem] == [(4, 64, problem)]
    assert grid.fit is not None and grid.fit.part.points == 5
    assert "\n4,64," not in grid.to_csv()
    assert "\n4,16," in grid.to_csv()
