"""How long a batch takes, by seed 004's model: T(b, L) = alpha + beta L h(b), h(b) = 1 + gamma (b - 1) / b.

b is the batch's size and L its longest request in tokens; alpha is what every batch takes, beta what one
token takes a batch of one, gamma how much slower the largest batches are. beta h(b) is the time between two
tokens of a batch. The default constants are the seed's (4.2: Qwen3-1.7B in FP16 on an RTX 4080).

Times inside are whole nanoseconds: T is worked out in double precision and rounded once, so that the starts
and ends of batches add up exactly, and two events at one moment are at one moment. In seconds as doubles,
errors of 1e-15 s decide which of an arrival and a completion came first.

The model is fitted to a grid of measured batches by least squares: T is linear in 1, L and L (b - 1) / b.
"""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Final

from llmtap.errors import LlmtapError

__all__ = [
    "SEED_ITERATIONS", "SEED_MODEL", "Fit", "GridError", "IterationModel", "LatencyModel", "Point", "fit",
    "load_grid",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """The three constants; the times in ns."""

    alpha_ns: float
    beta_ns: float
    gamma: float

    def overhead(self, size: int) -> float:
        """h(b)."""
        return 1 + self.gamma * (size - 1) / size

    def step_ns(self, size: int) -> float:
        """Time between two tokens of a batch of this size: beta h(b)."""
        return self.beta_ns * self.overhead(size)

    def batch_ns(self, size: int, length: int) -> int:
        """T(b, L)."""
        return round(self.alpha_ns + length * self.step_ns(size))


SEED_MODEL: Final = LatencyModel(alpha_ns=59_653_000, beta_ns=5_742_000, gamma=0.316)


@dataclass(frozen=True, slots=True)
class IterationModel:
    """How long one iteration takes in which some requests take in a part of their prompt and others decode.

    T(p, d, c) = step(max(d, 1)) + prefill p + context c, with step(d) = beta h(d) of a `LatencyModel`, p the
    tokens of prompts taken in, d the requests that decode, and c the tokens that lie in the KV memory of
    those. The two phases are separate terms, so an iteration of both is as long as their sum less one step.
    """

    beta_ns: float
    """One forward pass for one request: a token."""
    gamma: float
    """How much slower it is for very many (seed 004's h)."""
    prefill_ns: float
    """Per token of a prompt."""
    context_ns: float = 0.0
    """Per token of KV that attention reads."""

    def duration_ns(self, prefill: int, decodes: int, context: int = 0) -> int:
        """T(p, d, c)."""
        size = max(decodes, 1)
        step_ns = self.beta_ns * (1 + self.gamma * (size - 1) / size)
        return round(step_ns + self.prefill_ns * prefill + self.context_ns * context)


SEED_ITERATIONS: Final = IterationModel(
    beta_ns=SEED_MODEL.beta_ns,
    gamma=SEED_MODEL.gamma,
    prefill_ns=(SEED_MODEL.alpha_ns - SEED_MODEL.beta_ns) / 611,
)
"""Seed 004's constants with its phases taken apart. The seed has one alpha for any prompt ("TTFT", 4.3); a
prompt of its data's mean length (611 tokens, 3.1) takes that long here, and others in proportion."""

Point = tuple[int, int, float]
"""Batch size, longest request in tokens, seconds."""


class GridError(LlmtapError):
    """A grid of measurements cannot be used. Says why, and where."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A model, and how well it tells the measurements it was fitted to."""

    model: LatencyModel
    r2: float
    """1 - (sum of squared residuals) / (sum of squared distances from the mean)."""
    points: int
    error_max: float
    """Largest distance between model and measurement, as a share of the measurement."""


def fit(points: Sequence[Point]) -> Fit:
    """The model nearest to the points by least squares. Raises GridError where they do not tell it."""
    rows = [(Fraction(1), Fraction(L), Fraction(L * (b - 1), b)) for b, L, _ in points]
    values = [Fraction(seconds) for _, _, seconds in points]
    # The normal equations, in fractions: a grid is small, and nothing has to be said of conditioning.
    zero = Fraction(0)
    left = [[sum((r[i] * r[j] for r in rows), zero) for j in range(3)] for i in range(3)]
    right = [sum((r[i] * v for r, v in zip(rows, values, strict=True)), zero) for i in range(3)]
    solved = _solve(left, right)
    if solved is None:
        raise GridError("the grid needs at least two batch sizes and two lengths")
    alpha, beta, beta_gamma = solved
    if beta <= 0:
        raise GridError("by this grid longer batches are not slower: the model does not fit it")
    if alpha < 0 or beta_gamma < -beta:
        raise GridError("by this grid some batches would take less than no time: the model does not fit it")
    model = LatencyModel(float(alpha * 10**9), float(beta * 10**9), float(beta_gamma / beta))
    told = [alpha + beta * r[1] + beta_gamma * r[2] for r in rows]
    residuals = [v - t for v, t in zip(values, told, strict=True)]
    mean = sum(values, zero) / len(values)
    spread = sum(((v - mean) ** 2 for v in values), zero)
    r2 = float(1 - sum((d * d for d in residuals), zero) / spread) if spread else 1.0
    error = max(abs(float(d / v)) for d, v in zip(residuals, values, strict=True))
    return Fit(model, r2, len(points), error)


def _solve(left: list[list[Fraction]], right: list[Fraction]) -> list[Fraction] | None:
    """Gauss and Jordan; None where the equations do not tell everything."""
    n = len(right)
    rows = [[*line, value] for line, value in zip(left, right, strict=True)]
    for i in range(n):
        pivot = next((k for k in range(i, n) if rows[k][i]), None)
        if pivot is None:
            return None
        rows[i], rows[pivot] = rows[pivot], rows[i]
        rows[i] = [x / rows[i][i] for x in rows[i]]
        for k in range(n):
            if k != i:
                factor = rows[k][i]
                rows[k] = [x - factor * y for x, y in zip(rows[k], rows[i], strict=True)]
    return [line[n] for line in rows]


_NAMES: Final = (
    ("batch_size", "b"),
    ("max_seq_len", "l", "length"),
    ("mean_latency_sec", "seconds", "latency_s"),
)
"""Columns, and what they may be called; the first as in seed 004, 3.2."""


def load_grid(path: str | Path) -> list[Point]:
    """Reads a CSV of batch sizes, lengths and seconds. Raises GridError and OSError."""
    with open(path, newline="", encoding="utf-8-sig") as file:
        return list(_points(file))


def _points(lines: Iterable[str]) -> Iterable[Point]:
    reader = csv.reader(lines)
    header = [name.strip().lower() for name in next(reader, [])]
    places = []
    for names in _NAMES:
        place = next((header.index(name) for name in names if name in header), None)
        if place is None:
            raise GridError(f"line 1: no column is called {' or '.join(names)}")
        places.append(place)
    for row in reader:
        if not row:
            continue
        try:
            b, length, seconds = (row[place].strip() for place in places)
            point = int(b), int(length), float(seconds)
        except (ValueError, IndexError):
            raise GridError(f"line {reader.line_num}: expected two whole numbers and seconds") from None
        if point[0] < 1 or point[1] < 0 or not 0 < point[2] < float("inf"):
            raise GridError(f"line {reader.line_num}: a batch of {b} with {length} tokens in {seconds} s")
        yield point
