"""Linear least squares, and the quality of a fit: R^2, errors, and accuracy for data that were not used."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np

from llmtap.errors import LlmtapError

SAME: Final = 1e-6
"""Tolerance for rounding errors: shares within this distance count as equal."""
_RANK_TOLERANCE: Final = 1e-7
"""A column counts as dependent if its relative distance from a combination of other columns is smaller."""


class FitError(LlmtapError):
    """The measurements do not determine a model. The message names the missing data."""


@dataclass(frozen=True, slots=True)
class FitQuality:
    """Quality of a fit for the `points` data points from which it was computed; `source` describes them."""

    source: str
    """Kind of data from which the fit was computed, such as `gaps`."""
    points: int
    """Number of data points."""
    r2: float
    """1 - (sum of squared residuals) / (sum of squared distances from the mean)."""
    error_max: float
    """Largest distance between fit and measurement, as a share of the measurement."""


R2_MIN: Final = 0.8
RMS_ERROR_MAX: Final = 0.05
"""Limits for durations that were not used for a fit. A fit predicts them poorly if it explains less than
R2_MIN of their variance, and if its root mean square error is more than RMS_ERROR_MAX of their mean. R^2
alone is not enough: most of the variance of nearly equal durations is noise."""


@dataclass(frozen=True, slots=True)
class PredictionAccuracy:
    """Accuracy of a fit for `points` durations that were not used for the fit."""

    points: int
    r2: float
    """Share of the variance that the fit explains (R^2)."""
    rms_error: float
    """Root mean square error / mean duration."""

    @property
    def is_poor(self) -> bool:
        return self.r2 < R2_MIN and self.rms_error > RMS_ERROR_MAX


def prediction_accuracy(measured: Sequence[float], predicted: Sequence[float]) -> PredictionAccuracy:
    part = fit_quality("", measured, predicted)
    y = np.asarray(measured, float)
    rms = float(np.sqrt(np.mean((y - np.asarray(predicted, float)) ** 2)))
    return PredictionAccuracy(part.points, part.r2, rms / float(y.mean()))


def fit_quality(source: str, measured: Sequence[float], fitted: Sequence[float]) -> FitQuality:
    """Return the quality of a fit, computed from the measured and the fitted values."""
    y = np.asarray(measured, float)
    residuals = y - np.asarray(fitted, float)
    spread, unexplained = float(np.sum((y - y.mean()) ** 2)), float(np.sum(residuals**2))
    positive = y > 0
    error = float(np.max(np.abs(residuals[positive]) / y[positive]))
    # Equal values have no variance that a fit could explain. So R^2 is 1 if the fit is exact, else 0.
    is_exact = unexplained <= SAME**2 * float(np.sum(y**2))
    return FitQuality(source, len(y), 1 - unexplained / spread if spread else float(is_exact), error)


def least_squares(columns: Sequence[Sequence[float]], values: Sequence[float]) -> list[float] | None:
    """Return the coefficients of the linear fit of the columns to the values; None for dependent columns."""
    matrix = np.column_stack([np.asarray(column, float) for column in columns])
    lengths = np.linalg.norm(matrix, axis=0)
    if not lengths.all():
        return None
    solved, _, rank, _ = np.linalg.lstsq(matrix / lengths, np.asarray(values, float), rcond=_RANK_TOLERANCE)
    return None if rank < len(columns) else [float(x) for x in solved / lengths]


def nearest(
    columns: Mapping[str, Sequence[float]], values: Sequence[float], needed: Sequence[str]
) -> tuple[dict[str, float], list[float]] | None:
    """Return the constants of the best fit without negative ones, and the fitted values; None if impossible.

    The `needed` constants must be above 0. Other constants are omitted if they would be negative.
    """
    others = [name for name in columns if name not in needed]
    fits: list[tuple[float, dict[str, float], list[float]]] = []
    for k in range(len(others), -1, -1):
        for more in combinations(others, k):
            names = (*needed, *more)
            solved = least_squares([columns[name] for name in names], values)
            if solved is None or min(solved) < 0 or min(solved[: len(needed)]) <= 0:
                continue
            fitted = np.column_stack([columns[name] for name in names]) @ np.asarray(solved)
            error = float(np.sum((np.asarray(values) - fitted) ** 2))
            fits.append((error, dict(zip(names, solved, strict=True)), fitted.tolist()))
        if fits:
            _, constants, values_ = min(fits, key=lambda one: one[0])
            return constants, values_
    return None


def leave_one_out(columns: Sequence[Sequence[float]], values: Sequence[float]) -> PredictionAccuracy | None:
    """Return the accuracy if each value is predicted by a fit to the other values.

    It is computed from the leverage of each value in the fit to all values. None if the columns would be
    dependent without one of the values.
    """
    matrix, y = np.column_stack([np.asarray(column, float) for column in columns]), np.asarray(values, float)
    lengths = np.linalg.norm(matrix, axis=0)
    if len(y) <= matrix.shape[1] or not lengths.all():
        return None
    scaled = matrix / lengths
    inverse = np.linalg.pinv(scaled, rcond=_RANK_TOLERANCE)
    leverage = np.sum(scaled * inverse.T, axis=1)
    if float(leverage.max()) > 1 - SAME:
        return None
    errors = (y - scaled @ (inverse @ y)) / (1 - leverage)
    return prediction_accuracy(values, (y - errors).tolist())
