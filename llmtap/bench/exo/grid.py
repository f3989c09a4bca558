"""Batch times of `llmtap bench grid`, from the runs of an exo benchmark (`make_grid`).

The time of a batch is from the first byte of its first request to the end of its last response. A cell is
valid if in each measured batch every request completed with the requested number of tokens, and all requests
generated at the same time: every request had its first token before the first response ended. This condition
fails if the server runs fewer requests at a time and queues the others.

Source: multi-bin batching paper, 3.2 (the CSV file), 4.1 and 4.2 (the model T = alpha + beta L h(b)).
"""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Final, Literal

import msgspec

from llmtap.bench.exo.result import ExoCell, ExoRun, group_by_cell
from llmtap.metrics.summary import ENDED_WELL
from llmtap.sim.sweep.batch_grid import BatchFit, GridError, fit_batches
from llmtap.units import to_seconds

LengthOf = Literal["output", "prompt+output"]
LENGTHS: Final = ("output", "prompt+output")
"""Kinds of tokens that count as the length L of a batch: the values of `length` in `sim/model_options.py`."""
_COLUMNS: Final = (
    "batch_size",
    "max_seq_len",
    "mean_latency_sec",
    "std_latency_sec",
    "num_trials",
    "prompt_tokens",
    "output_tokens",
)
"""Columns of the CSV file. The first five are those of the multi-bin paper, 3.2. The other two show `llmtap
sim run` which tokens count as the length."""


class GridCell(msgspec.Struct, frozen=True, kw_only=True):
    """Times of all batches of one size and length, in seconds. A cell that is not valid has no times."""

    batch: int
    """Number of requests that were sent together."""
    prompt_tokens: int
    output_tokens: int
    length: int
    """Tokens of a request that count as the length L of the batch (`LengthOf`)."""
    n: int
    """Number of measured batches."""
    problem: str | None
    """Why the cell is not valid; None if it is valid."""
    median_s: float | None = None
    mean_s: float | None = None
    std_s: float | None = None
    """Sample standard deviation; None if only one batch was measured."""
    min_s: float | None = None
    max_s: float | None = None
    uncertainty_s: float | None = None
    """Largest possible error of a batch's time: the time between the first bytes of the first and of the last
    request, or the longest time for which a response byte possibly waited to be read, if that is longer."""
    model_s: float | None = None
    """Time of a batch that the fitted model predicts."""


@dataclass(frozen=True, slots=True)
class MeasuredGrid:
    """Measured cells of a grid, and the model of batch times that was fitted to them."""

    cells: Sequence[GridCell]
    """Measured cells, in the order of the grid."""
    fit: BatchFit | None
    """Model of batch times; None if too few cells are valid."""
    problem: str | None
    """Why there is no fit; None if there is one."""

    def to_csv(self) -> str:
        """Return the valid cells as the CSV that `llmtap sim run --latency` reads."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for cell in self.cells:
            if cell.problem is None:
                mean, std = ("" if value is None else f"{value:.9f}" for value in (cell.mean_s, cell.std_s))
                lengths = (cell.prompt_tokens, cell.output_tokens)
                writer.writerow((cell.batch, cell.length, mean, std, cell.n, *lengths))
        return out.getvalue()

    def to_dict(self) -> dict[str, object]:
        """Return the grid as JSON: the cells, and the constants of the model or why it is missing."""
        fit = None
        if self.fit is not None:
            model, part = self.fit.model, self.fit.part
            fit = {
                "alpha_s": to_seconds(model.alpha_ns),
                "beta_s": to_seconds(model.beta_ns),
                "gamma": model.gamma,
                "r2": part.r2,
                "error_max": part.error_max,
                "points": part.points,
            }
        return {"cells": msgspec.to_builtins(list(self.cells)), "fit": fit, "fit_problem": self.problem}


def make_grid(runs: Iterable[ExoRun], *, warmup: int, length: LengthOf) -> MeasuredGrid:
    """Return the batch times of all cells, without the first `warmup` batches of each, and their model."""
    batches = group_by_cell(run for run in runs if run.repeat_index >= warmup)
    cells = [_measured_cell(cell, repeats, length) for cell, repeats in batches.items()]
    try:
        fit = fit_batches([(c.batch, c.length, c.mean_s) for c in cells if c.mean_s is not None])
    except GridError as exc:
        return MeasuredGrid(cells, None, str(exc))
    fitted = [
        cell
        if cell.problem
        else msgspec.structs.replace(cell, model_s=to_seconds(fit.model.batch_ns(cell.batch, cell.length)))
        for cell in cells
    ]
    return MeasuredGrid(fitted, fit, None)


def _measured_cell(cell: ExoCell, batches: Sequence[Sequence[ExoRun]], length: LengthOf) -> GridCell:
    """Return a cell of the grid from the runs of its batches; cells with a problem have no figures."""
    runs = [run for batch in batches for run in batch]
    prompt = max(run.pp_tokens for run in runs)
    grid_cell = GridCell(
        batch=cell.concurrency,
        prompt_tokens=prompt,
        output_tokens=cell.tg,
        n=len(batches),
        length=cell.tg if length == "output" else prompt + cell.tg,
        problem=next((problem for batch in batches for problem in _batch_problems(batch)), None),
    )
    if grid_cell.problem:
        return grid_cell
    seconds = [
        max(run.elapsed_s or 0.0 for run in batch) - min(run.dispatch_late_s or 0.0 for run in batch)
        for batch in batches
    ]
    return msgspec.structs.replace(
        grid_cell,
        median_s=median(seconds),
        mean_s=fmean(seconds),
        std_s=stdev(seconds) if len(seconds) > 1 else None,
        min_s=min(seconds),
        max_s=max(seconds),
        uncertainty_s=max(max(run.uncertainty_s or 0.0, run.batch.start_spread_s or 0.0) for run in runs),
    )


def _batch_problems(batch: Sequence[ExoRun]) -> Iterator[str]:
    """Yield why the runs of one batch cannot be used for the fit."""
    failed = [run.outcome for run in batch if run.outcome not in ENDED_WELL]
    if failed:
        yield f"{len(failed):,} of {len(batch):,} requests failed: {failed[0]}"
        return
    wrong_counts = {run.stats.generation_tokens for run in batch} - {batch[0].tg}
    if wrong_counts:
        count_text = (
            "an unknown number"
            if None in wrong_counts
            else f"{min(n for n in wrong_counts if n is not None):,}"
        )
        yield f"an answer has {count_text} of {batch[0].tg:,} tokens"
    ends = [run.elapsed_s for run in batch if run.elapsed_s is not None]
    if len(ends) < len(batch):
        yield "the end of an answer is not known"
        return
    first = [(run.dispatch_late_s or 0.0) + run.ttft_s for run in batch if run.ttft_s is not None]
    if len(first) < len(batch) > 1:
        yield "answers were not streamed: whether all requests ran at the same time is not known"
    elif max(first, default=0.0) >= min(ends):
        yield "not all requests ran at the same time"
