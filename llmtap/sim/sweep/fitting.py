"""Fit a `LatencyModel` to a grid of batches, and an `IterationModel` to a capture or trace with token times.

A grid is a CSV file of batch size, length and time (`load_grid`), as `llmtap bench grid` measures it.
`llmtap sim run --latency` does the one or the other, by the file, and `bench/exo/grid.py` fits its grid; the
results are the constants of `sim/model_options.py`, with the R^2 of each part.

For a capture, all traffic of the engine must be in it: the number of running requests follows from the rows.
Two parts of the `IterationModel` are fitted by least squares, each with its own R^2:

- **Prefill.** Requests that had the engine to themselves until their first token: TTFT = base + prefill p,
  where p are the prompt tokens that were not cached. With chunked prefill: base for each chunk.
- **Decode.** Gaps between tokens that began when no request waited or was in prefill: an iteration of d
  requests with c tokens in memory takes beta + beta gamma (d - 1) / d + context c.

gamma and context are at least 0. A load that never rests determines neither part.
"""

import csv
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, combinations, islice, pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from llmtap.errors import ConfigError, LlmtapError
from llmtap.exchange.exchange import Exchange
from llmtap.metrics.latency import output_times_ns, tokens_per_chunk
from llmtap.sim.model_options import IterationModel, LatencyModel
from llmtap.traces.source import open_trace
from llmtap.units import to_seconds

GAPS_MAX: Final = 200_000
"""Of a capture with more, every n-th is used: more add nothing to three constants."""
GAPS_MIN: Final = 30
_ROUNDED_NS: Final = 2_000
"""Stamps of captures are whole microseconds, rounded down, counted from the arrival of each."""
_RANK: Final = 1e-7
"""A column nearer than this to a combination of the others, relative to its length, tells nothing."""


class FitError(LlmtapError):
    """The measurements do not determine a model; the message says what is missing."""


class GridError(FitError):
    """A grid of measurements cannot be used; the message says why, and where."""


# ---------------------------------------------------------------- least squares


@dataclass(frozen=True, slots=True)
class Part:
    source: str
    points: int
    r2: float
    """1 - (sum of squared residuals) / (sum of squared distances from the mean)."""
    error_max: float
    """Largest distance between model and measurement, as a share of the measurement."""


def part_of(source: str, measured: Sequence[float], fitted: Sequence[float]) -> Part:
    """Return how well the fitted values match the measured ones."""
    y = np.asarray(measured, float)
    left = y - np.asarray(fitted, float)
    spread = float(np.sum((y - y.mean()) ** 2))
    positive = y > 0
    error = float(np.max(np.abs(left[positive]) / y[positive]))
    return Part(source, len(y), 1 - float(np.sum(left**2)) / spread if spread else 1.0, error)


def least_squares(columns: Sequence[Sequence[float]], values: Sequence[float]) -> list[float] | None:
    """Return the combination of the columns nearest to the values; None if they do not determine one."""
    matrix = np.column_stack([np.asarray(column, float) for column in columns])
    lengths = np.linalg.norm(matrix, axis=0)
    if not lengths.all():
        return None
    solved, _, rank, _ = np.linalg.lstsq(matrix / lengths, np.asarray(values, float), rcond=_RANK)
    return None if rank < len(columns) else [float(x) for x in solved / lengths]


def nearest(
    columns: Mapping[str, Sequence[float]], values: Sequence[float], needed: Sequence[str]
) -> tuple[dict[str, float], list[float]] | None:
    """Return the nearest fit without constants below 0 and its values; None if there is none. The `needed`
    constants are above 0; others that would be below 0 are left out."""
    others = [name for name in columns if name not in needed]
    found: list[tuple[float, dict[str, float], list[float]]] = []
    for k in range(len(others), -1, -1):
        for more in combinations(others, k):
            names = (*needed, *more)
            solved = least_squares([columns[name] for name in names], values)
            if solved is None or min(solved) < 0 or min(solved[: len(needed)]) <= 0:
                continue
            fitted = np.column_stack([columns[name] for name in names]) @ np.asarray(solved)
            error = float(np.sum((np.asarray(values) - fitted) ** 2))
            found.append((error, dict(zip(names, solved, strict=True)), fitted.tolist()))
        if found:
            _, constants, told = min(found, key=lambda one: one[0])
            return constants, told
    return None


# ---------------------------------------------------------------- grids of whole batches

GridPoint = tuple[int, int, float]
"""Batch size, longest request in tokens, seconds."""
_COLUMNS: Final = ("batch_size", "max_seq_len", "mean_latency_sec")
"""Names as in the multi-bin paper, 3.2."""


@dataclass(frozen=True, slots=True)
class BatchFit:
    model: LatencyModel
    part: Part


def fit_batches(points: Sequence[GridPoint]) -> BatchFit:
    """Return the model nearest to the points: T is linear in 1, L and L (b - 1) / b. Raises GridError."""
    rows = [(1.0, float(length), length * (b - 1) / b) for b, length, _ in points]
    values = [seconds for _, _, seconds in points]
    solved = least_squares(list(zip(*rows, strict=True)), values) if rows else None
    if solved is None:
        raise GridError("the grid needs at least two batch sizes and two lengths")
    alpha, beta, beta_gamma = solved
    if beta <= 0:
        raise GridError("longer batches are not slower in this grid: the model does not fit")
    if alpha < 0 or beta_gamma < -beta:
        raise GridError(
            "the fit would give some batches a negative duration: the model does not fit this grid"
        )
    fitted = [alpha + beta * length + beta_gamma * share for _, length, share in rows]
    return BatchFit(LatencyModel(alpha * 1e9, beta * 1e9, beta_gamma / beta), part_of("grid", values, fitted))


def load_grid(path: str | Path) -> list[GridPoint]:
    """Read a CSV file with the columns of the multi-bin paper, 3.2. Raises GridError."""
    points: list[GridPoint] = []
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        for name in _COLUMNS:
            if name not in (reader.fieldnames or ()):
                raise GridError(f"line 1: expected a column {name}")
        for row in reader:
            try:
                b, length, seconds = int(row[_COLUMNS[0]]), int(row[_COLUMNS[1]]), float(row[_COLUMNS[2]])
            except (TypeError, ValueError):
                raise GridError(
                    f"line {reader.line_num}: expected batch size and length as whole numbers, and seconds"
                ) from None
            if b < 1 or length < 0 or not 0 < seconds < float("inf"):
                raise GridError(
                    f"line {reader.line_num}: impossible: a batch of {b} with {length} tokens in {seconds} s"
                )
            points.append((b, length, seconds))
    return points


def length_counted(path: str | Path) -> str | None:
    """Return which tokens the lengths of a grid count, as in `ModelOptions.length`; None if it does not say.

    A grid says it by the columns `prompt_tokens` and `output_tokens`, as `llmtap bench grid` writes them.
    """
    with open(path, newline="", encoding="utf-8-sig") as file:
        try:
            counts = [
                (int(row["max_seq_len"]), int(row["prompt_tokens"]), int(row["output_tokens"]))
                for row in csv.DictReader(file)
            ]
        except (KeyError, TypeError, ValueError):
            return None
    if all(length == output for length, _, output in counts):
        return "output"
    return "prompt+output" if all(length == p + output for length, p, output in counts) else None


# ---------------------------------------------------------------- captures and traces


@dataclass(frozen=True, slots=True)
class IterationFit:
    model: IterationModel
    prefill: Part
    decode: Part
    base_ns: float
    """TTFT of a prompt without tokens that has the engine to itself."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.to_dict(),
            "base": to_seconds(self.base_ns),
            "prefill": asdict(self.prefill), "decode": asdict(self.decode),
        }  # fmt: skip


def fit_capture(place: str, *, chunk: int | None = None) -> IterationFit:
    """Fit a model to a capture, or to a trace of any format with token times. Raises ConfigError of
    `place`."""
    # Arrow takes a third of a second to import, and grids need none.
    import pyarrow.compute as pc

    from llmtap.capture.store.rows import exchanges_of

    try:
        with open_trace(place) as trace:
            arrived = (
                batch.filter(pc.is_valid(batch.column("arrival_ns"))) for batch in trace.source.batches
            )
            return fit_exchanges((x for batch in arrived for x in exchanges_of(batch)), chunk=chunk)
    except FitError as exc:
        raise ConfigError(place, str(exc)) from None


def fit_exchanges(exchanges: Iterable[Exchange], *, chunk: int | None = None) -> IterationFit:
    """Return the model nearest to the exchanges of one engine. Raises FitError. `chunk`: tokens per iteration
    with chunked prefill; None: prompts are processed whole."""
    rows = [row for row in map(_row, exchanges) if row is not None]
    answered = [row for row in rows if row.last_ns is not None]
    if not answered:
        raise FitError("no row has the times of arrival, first and last token: capture streamed answers")
    if all(row.prompt is None for row in answered):
        raise FitError("no row has a count of input tokens, which the duration of a prompt is fitted to")
    load = _Load(rows)
    prefill_ns, base_ns, prefill = _alone(answered, load, chunk)
    decode, decoded = _from_gaps(answered, load)
    model = IterationModel(
        decode["beta"], decode.get("step", 0.0) / decode["beta"], prefill_ns, decode.get("context", 0.0)
    )
    return IterationFit(model, prefill, decoded, base_ns)


@dataclass(slots=True)
class _Row:
    arrival_ns: int
    first_ns: int | None
    last_ns: int | None
    end_ns: int
    prompt: int | None
    """Prompt tokens that were not cached."""
    context: int
    times_ns: list[int]
    """Of its tokens, one by one; empty if unknown."""


def _row(x: Exchange) -> _Row | None:
    t, tokens = x.timeline, x.tokens
    if t.submit_ns is None and t.first_token_ns is None:
        return None
    submit_ns = t.arrival_ns if t.submit_ns is None else t.submit_ns
    last_ns = t.last_token_ns if x.stream else None
    times: list[int] = []
    if last_ns is not None and not x.unlogged_events:
        counts = tokens_per_chunk(x)
        if counts is not None and counts.count(1) == len(counts):
            times = output_times_ns(t.events)
    given = tokens.input
    return _Row(
        submit_ns, t.first_token_ns if x.stream else None, last_ns,
        last_ns or t.response_end_ns or t.delivered_ns or submit_ns,
        None if given is None else max(0, given - (tokens.cached or 0)), given or 0, times,
    )  # fmt: skip


class _Load:
    """The requests under way at each moment."""

    def __init__(self, rows: Sequence[_Row]) -> None:
        running = [row for row in rows if row.first_ns is not None and row.last_ns is not None]
        self._arrivals = sorted(row.arrival_ns for row in rows)
        self._ends = sorted(row.end_ns for row in rows)
        self._settled = sorted(row.end_ns if row.first_ns is None else row.first_ns for row in rows)
        firsts = sorted((row.first_ns or 0, row.context) for row in running)
        lasts = sorted((row.last_ns or 0, row.context, len(row.times_ns)) for row in running)
        self._firsts, self._lasts = [t for t, _ in firsts], [t for t, _, _ in lasts]
        self._prompts_begun = [0, *accumulate(n for _, n in firsts)]
        self._prompts_over = [0, *accumulate(n for _, n, _ in lasts)]
        self._tokens_over = [0, *accumulate(n for _, _, n in lasts)]
        self._tokens = sorted(t for row in running for t in row.times_ns)
        self.timed = all(row.times_ns for row in running)

    def alone(self, row: _Row) -> bool:
        """Return whether no other request was under way from its arrival to its first token."""
        assert row.first_ns is not None
        come = bisect_left(self._arrivals, row.first_ns)
        return come - bisect_right(self._ends, row.arrival_ns) == 1

    def undisturbed(self, t_ns: int) -> bool:
        """Return whether no request waits or is in prefill at a moment."""
        later_ns = t_ns + _ROUNDED_NS
        return bisect_right(self._arrivals, later_ns) <= bisect_right(self._settled, later_ns)

    def decoding(self, t_ns: int) -> tuple[int, int]:
        """Return how many requests decode at a moment, and, if all tokens have times, their context."""
        begun, over = bisect_left(self._firsts, t_ns), bisect_left(self._lasts, t_ns)
        made = bisect_left(self._tokens, t_ns) - self._tokens_over[over]
        # The newest token is not in memory yet: the iteration puts it there.
        context = self._prompts_begun[begun] - self._prompts_over[over] + made - (begun - over)
        return begun - over, context


def _alone(rows: Sequence[_Row], load: _Load, chunk: int | None) -> tuple[float, float, Part]:
    """Return prefill and base in ns from requests that had the engine to themselves. Raises FitError."""
    found = [row for row in rows if row.prompt is not None and row.first_ns is not None and load.alone(row)]
    prompts = [float(row.prompt or 0) for row in found]
    took = [float((row.first_ns or 0) - row.arrival_ns) for row in found]
    iterations = [1.0 if chunk is None else float(max(1, -(-int(n) // chunk))) for n in prompts]
    solved = least_squares([iterations, prompts], took) if len(found) > 2 else None
    if solved is None or solved[1] <= 0 or solved[0] < 0:
        raise FitError(
            f"{len(found)} requests had the engine to themselves until their first token, which does not"
            " determine the duration of a prompt: capture some prompts of different lengths one at a time"
        )
    base_ns, prefill_ns = solved
    told = [base_ns * k + prefill_ns * n for k, n in zip(iterations, prompts, strict=True)]
    return prefill_ns, base_ns, part_of("requests that had the engine to themselves", took, told)


def _from_gaps(rows: Sequence[_Row], load: _Load) -> tuple[dict[str, float], Part]:
    """Return `beta`, `step` (beta gamma) and, if the gaps determine it, `context`. Raises FitError."""
    every = -(-sum(max(0, len(row.times_ns) - 1) for row in rows) // GAPS_MAX) or 1
    gaps = (gap for row in rows for gap in pairwise(row.times_ns))
    shares, contexts, took = [], [], []
    for before_ns, t_ns in islice(gaps, every - 1, None, every):
        if t_ns <= before_ns or not load.undisturbed(before_ns):
            continue
        d, context = load.decoding((before_ns + t_ns) // 2)
        shares.append((d - 1) / d if d else 0.0)
        contexts.append(float(context))
        took.append(float(t_ns - before_ns))
    columns = {"beta": [1.0] * len(took), "step": shares}
    if load.timed:
        columns["context"] = contexts
    varied = len(took) >= GAPS_MIN and len(set(shares)) > 1
    best = nearest(columns, took, ("beta",)) if varied else None
    if best is None:
        raise FitError(
            f"{len(took)} gaps between tokens, with {len(set(shares))} different numbers of running requests,"
            " began while no request waited, which does not determine the duration of a token: capture some"
            " requests one at a time, and some together with pauses"
        )
    found, told = best
    return found, part_of("gaps between tokens while nobody waited", took, told)
