"""Least squares for a few constants and many measurements, with no constant below 0 that may not be."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import sqrt
from operator import mul
from typing import Final

__all__ = ["Part", "least_squares", "nearest", "part_of"]

_RANK: Final = 1e-7
"""A column that is so near to the others, by its length, tells nothing of its own."""


@dataclass(frozen=True, slots=True)
class Part:
    """How well one part of the model tells what it was fitted to."""

    source: str
    """What it was fitted to."""
    points: int
    r2: float
    """1 - (sum of squared residuals) / (sum of squared distances from the mean)."""
    error_max: float
    """Largest distance between model and measurement, as a share of the measurement."""


def nearest(
    columns: Mapping[str, Sequence[float]], values: Sequence[float], needed: Sequence[str]
) -> tuple[dict[str, float], list[float]] | None:
    """The nearest fit without constants below 0, and what it tells; None where there is none.

    Constants that would be below 0 are left out, but for `needed` ones, at least one: they are above 0.
    """
    others = [name for name in columns if name not in needed]
    found: list[tuple[float, dict[str, float], list[float]]] = []
    for k in range(len(others), -1, -1):
        for more in combinations(others, k):
            names = (*needed, *more)
            chosen = [columns[name] for name in names]
            solved = least_squares(chosen, values)
            if solved is None or min(solved) < 0 or min(solved[: len(needed)]) <= 0:
                continue
            told = [sum(map(mul, solved, row)) for row in zip(*chosen, strict=True)]
            error = sum((y - t) ** 2 for y, t in zip(values, told, strict=True))
            found.append((error, dict(zip(names, solved, strict=True)), told))
        if found:
            break
    if not found:
        return None
    _, constants, told = min(found, key=lambda one: one[0])
    return constants, told


def least_squares(columns: Sequence[Sequence[float]], values: Sequence[float]) -> list[float] | None:
    """The combination of the columns that is nearest to the values; None where they do not tell one.

    By Gram and Schmidt, modified: exact enough where columns are nearly alike, as tokens in memory and
    requests that run are.
    """
    basis: list[list[float]] = []
    weights: list[list[float]] = []
    for column in columns:
        rest, length = list(column), _length(column)
        parts = []
        for direction in basis:
            share = sum(map(mul, direction, rest))
            parts.append(share)
            rest = [x - share * q for x, q in zip(rest, direction, strict=True)]
        left = _length(rest)
        if left <= _RANK * length:
            return None
        basis.append([x / left for x in rest])
        weights.append([*parts, left])
    shares = []
    rest = list(values)
    for direction in basis:
        share = sum(map(mul, direction, rest))
        shares.append(share)
        rest = [x - share * q for x, q in zip(rest, direction, strict=True)]
    solved = [0.0] * len(columns)
    for i in reversed(range(len(columns))):
        above = sum(weights[j][i] * solved[j] for j in range(i + 1, len(columns)))
        solved[i] = (shares[i] - above) / weights[i][i]
    return solved


def _length(values: Sequence[float]) -> float:
    return sqrt(sum(map(mul, values, values)))


def part_of(source: str, measured: Sequence[float], told: Sequence[float]) -> Part:
    """How well `told` tells what was measured."""
    mean = sum(measured) / len(measured)
    spread = sum((y - mean) ** 2 for y in measured)
    left = sum((y - t) ** 2 for y, t in zip(measured, told, strict=True))
    error = max(abs(y - t) / y for y, t in zip(measured, told, strict=True) if y > 0)
    return Part(source, len(measured), 1 - left / spread if spread else 1.0, error)
