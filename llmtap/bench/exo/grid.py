"""Batch times of a measured grid, and the latency model that is fitted to them, for `llmtap bench grid`.

Input: the runs of an `ExoBench` with distinct prompts. Output: a `MeasuredGrid` with the fit of
`sim/sweep/fitting.py`; its `to_csv` is the file that `llmtap sim run --latency` reads.

The time of a batch is from the first byte of its first request to the end of its last response; its step is
the median over its requests of (last token - first token) / (tokens - 1). A cell is valid if in each measured
batch every request completed with the tokens that were asked for, and all generated at the same time: the
last first token came before the first response ended. A server that runs fewer requests at a time, or queues
some, fails the last condition.

Source: multi-bin batching paper, 3.2 (the CSV file), 4.1 and 4.2 (the model T = alpha + beta L h(b)).
"""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any, Final, Literal

import msgspec

from llmtap.bench.exo.result import ExoCell, ExoRun
from llmtap.metrics.summary import ENDED_WELL
from llmtap.sim.sweep.fitting import BatchFit, GridError, fit_batches
from llmtap.units import to_seconds

LengthOf = Literal["output", "prompt+output"]
LENGTHS: Final = ("output", "prompt+output")
"""Tokens that count as the length L of a batch: values of `length` in `llmtap.sim.model_options`."""
_COLUMNS: Final = (
    "batch_size", "max_seq_len", "mean_latency_sec", "std_latency_sec", "num_trials", "median_latency_sec",
    "min_latency_sec", "max_latency_sec", "step_sec", "prompt_tokens", "output_tokens",
)  # fmt: skip
"""The first five as in the multi-bin paper, 3.2."""


class GridCell(msgspec.Struct, frozen=True, kw_only=True):
    """One batch size and length; times in seconds, over the valid batches; None if the cell is not valid."""

    batch: int
    prompt_tokens: int
    output_tokens: int
    length: int
    n: int
    """Measured batches."""
    problem: str | None
    """Why the cell is not valid."""
    median_s: float | None = None
    mean_s: float | None = None
    std_s: float | None = None
    """Sample standard deviation; None for one batch."""
    min_s: float | None = None
    max_s: float | None = None
    step_s: float | None = None
    """Median of the batches' steps."""
    uncertainty_s: float | None = None
    """Largest of: the time from the first request's first byte to the last one's, and the longest time that a
    byte may have waited unread."""
    model_s: float | None = None
    """T of the fitted model."""


@dataclass(frozen=True, slots=True)
class MeasuredGrid:
    cells: Sequence[GridCell]
    fit: BatchFit | None
    problem: str | None
    """Why there is no fit."""

    def to_csv(self) -> str:
        """Return the valid cells as the CSV that `llmtap sim run --latency` reads."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for cell in self.cells:
            if cell.problem is None:
                seconds = (cell.mean_s, cell.std_s, cell.median_s, cell.min_s, cell.max_s, cell.step_s)
                mean, std, *others = ["" if value is None else f"{value:.9f}" for value in seconds]
                writer.writerow(
                    (cell.batch, cell.length, mean, std, cell.n, *others, cell.prompt_tokens,
                     cell.output_tokens)
                )  # fmt: skip
        return out.getvalue()

    def to_dict(self) -> dict[str, Any]:
        fit = None
        if self.fit is not None:
            model, part = self.fit.model, self.fit.part
            fit = {
                "alpha_s": to_seconds(model.alpha_ns), "beta_s": to_seconds(model.beta_ns),
                "gamma": model.gamma, "r2": part.r2, "error_max": part.error_max, "points": part.points,
            }  # fmt: skip
        return {"cells": msgspec.to_builtins(list(self.cells)), "fit": fit, "fit_problem": self.problem}


def measured_grid(runs: Iterable[ExoRun], *, warmup: int, length: LengthOf) -> MeasuredGrid:
    """Return the grid; the first `warmup` batches of each cell are left out."""
    by_cell: dict[ExoCell, dict[int, list[ExoRun]]] = {}
    for run in runs:
        if run.repeat_index >= warmup:
            batches = by_cell.setdefault(ExoCell(run.pp, run.tg, run.concurrency), {})
            batches.setdefault(run.repeat_index, []).append(run)
    cells = [_cell(cell, list(batches.values()), length) for cell, batches in by_cell.items()]
    points = [(c.batch, c.length, c.mean_s) for c in cells if c.mean_s is not None]
    try:
        fit = fit_batches(points)
    except GridError as exc:
        return MeasuredGrid(cells, None, str(exc))
    fitted = [
        cell if cell.problem else
        msgspec.structs.replace(cell, model_s=to_seconds(fit.model.batch_ns(cell.batch, cell.length)))
        for cell in cells
    ]  # fmt: skip
    return MeasuredGrid(fitted, fit, None)


def _cell(cell: ExoCell, batches: Sequence[Sequence[ExoRun]], length: LengthOf) -> GridCell:
    prompt = max(run.pp_tokens for batch in batches for run in batch)
    found = {
        "batch": cell.concurrency, "prompt_tokens": prompt, "output_tokens": cell.tg, "n": len(batches),
        "length": cell.tg if length == "output" else prompt + cell.tg,
    }  # fmt: skip
    problems = [problem for batch in batches for problem in _problems(batch)]
    if problems:
        return GridCell(**found, problem=problems[0])
    seconds = [_seconds(batch) for batch in batches]
    steps = [step for batch in batches if (step := _step(batch)) is not None]
    waited = [run.uncertainty_s or 0.0 for batch in batches for run in batch]
    spread = [batch[0].batch.start_spread_s or 0.0 for batch in batches]
    return GridCell(
        **found, problem=None, median_s=median(seconds), mean_s=fmean(seconds),
        std_s=stdev(seconds) if len(seconds) > 1 else None, min_s=min(seconds), max_s=max(seconds),
        step_s=median(steps) if steps else None, uncertainty_s=max(waited + spread),
    )  # fmt: skip


def _problems(batch: Sequence[ExoRun]) -> Iterator[str]:
    failed = [run.outcome for run in batch if run.outcome not in ENDED_WELL]
    if failed:
        yield f"{len(failed):,} of {len(batch):,} requests failed: {failed[0]}"
        return
    made = {run.stats.generation_tokens for run in batch} - {batch[0].tg}
    if made:
        shown = "an unknown number" if None in made else f"{min(n for n in made if n is not None):,}"
        yield f"an answer has {shown} of {batch[0].tg:,} tokens"
    if any(run.elapsed_s is None for run in batch):
        yield "the end of an answer is not known"
        return
    first = [(run.dispatch_late_s or 0.0) + run.ttft_s for run in batch if run.ttft_s is not None]
    ends = [run.elapsed_s for run in batch if run.elapsed_s is not None]
    if len(first) < len(batch) > 1:
        yield "answers were not streamed: whether all requests ran at the same time is not known"
    elif max(first, default=0.0) >= min(ends):
        yield "not all requests ran at the same time"


def _seconds(batch: Sequence[ExoRun]) -> float:
    ends = [run.elapsed_s for run in batch if run.elapsed_s is not None]
    return max(ends) - min(run.dispatch_late_s or 0.0 for run in batch)


def _step(batch: Sequence[ExoRun]) -> float | None:
    rates = [rate for run in batch if (rate := run.stats.generation_tps)]
    return median(1 / rate for rate in rates) if rates else None
