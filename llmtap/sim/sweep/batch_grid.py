"""Fit a `LatencyModel` to a grid of whole batches: a CSV file with the size, length and duration of batches.

`llmtap bench grid` measures a grid. To check the fit, each point is predicted by a fit to the other points
(`PredictionAccuracy`).
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from llmtap.sim.model_options import LatencyModel
from llmtap.sim.sweep.linear_fit import (
    FitError,
    FitQuality,
    PredictionAccuracy,
    fit_quality,
    least_squares,
    leave_one_out,
)


class GridError(FitError):
    """A grid of measurements cannot be used. The message has the reason, and the line of the file, if any."""


GridPoint = tuple[int, int, float]
"""Batch size, number of tokens of the longest request, and duration in seconds."""
_COLUMNS: Final = ("batch_size", "max_seq_len", "mean_latency_sec")
"""Names of the columns in the file, as in the multi-bin paper, 3.2."""


@dataclass(frozen=True, slots=True)
class BatchFit:
    """A fitted model, with the quality of the fit."""

    model: LatencyModel
    part: FitQuality
    unseen: PredictionAccuracy | None
    """Accuracy for points that were not used for the fit; None if the fit needs every point."""


def fit_batches(points: Sequence[GridPoint]) -> BatchFit:
    """Fit T(b, L) = alpha + beta L + beta gamma L (b - 1) / b by least squares. Raises GridError."""
    rows = [(1.0, float(length), length * (b - 1) / b) for b, length, _ in points]
    values = [seconds for _, _, seconds in points]
    solved = least_squares(list(zip(*rows, strict=True)), values) if rows else None
    if solved is None:
        raise GridError(
            f"the grid has {len({b for b, _, _ in points})} batch sizes and"
            f" {len({n for _, n, _ in points})} lengths; a fit needs at least two of each, and three points"
        )
    alpha, beta, beta_gamma = solved
    if beta <= 0:
        raise GridError(
            f"the model does not fit this grid: the fitted time per token is {beta:.3g} s, not above 0:"
            " measure the grid again, with more batch sizes and lengths"
        )
    if alpha < 0 or beta_gamma < -beta:
        raise GridError(
            "the model does not fit this grid: it gives some batches a negative duration (alpha"
            f" {alpha:.3g} s, gamma {beta_gamma / beta:.3g}): measure the grid again, with more batch sizes"
        )
    fitted = [alpha + beta * length + beta_gamma * share for _, length, share in rows]
    model = LatencyModel(alpha * 1e9, beta * 1e9, beta_gamma / beta)
    return BatchFit(
        model, fit_quality("grid", values, fitted), leave_one_out(list(zip(*rows, strict=True)), values)
    )


def load_grid(path: str | Path) -> list[GridPoint]:
    """Read a CSV file with the columns `_COLUMNS`. Raises GridError."""
    points: list[GridPoint] = []
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        reader.fieldnames = _header_names(reader)
        for name in _COLUMNS:
            if name not in reader.fieldnames:
                raise GridError(f"line 1: expected the columns {', '.join(_COLUMNS)}, got no column {name}")
            if reader.fieldnames.count(name) > 1:
                raise GridError(f"line 1: the column {name} occurs twice: remove one")
        for row in reader:
            try:
                b, length, seconds = int(row[_COLUMNS[0]]), int(row[_COLUMNS[1]]), float(row[_COLUMNS[2]])
            except (TypeError, ValueError):
                raise GridError(
                    f"line {reader.line_num}: expected whole numbers as batch_size and max_seq_len, and a"
                    f" number as mean_latency_sec, got {', '.join(str(row[name]) for name in _COLUMNS)}"
                ) from None
            if b < 1 or length < 0 or not 0 < seconds < float("inf"):
                raise GridError(
                    f"line {reader.line_num}: expected batch_size >= 1, max_seq_len >= 0 and a finite"
                    f" mean_latency_sec > 0, got {b}, {length} and {seconds}"
                )
            points.append((b, length, seconds))
    return points


def _header_names(reader: "csv.DictReader[str]") -> list[str]:
    return [name.strip().lower() for name in reader.fieldnames or ()]


def length_counted(path: str | Path) -> str | None:
    """Return the kind of tokens that a grid's lengths count (`ModelOptions.length`); None: unknown.

    It follows from the columns `prompt_tokens` and `output_tokens`, which `llmtap bench grid` writes.
    """
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        reader.fieldnames = _header_names(reader)
        try:
            counts = [
                (int(row["max_seq_len"]), int(row["prompt_tokens"]), int(row["output_tokens"]))
                for row in reader
            ]
        except (KeyError, TypeError, ValueError):
            return None
    if all(length == output for length, _, output in counts):
        return "output"
    return "prompt+output" if all(length == p + output for length, p, output in counts) else None
