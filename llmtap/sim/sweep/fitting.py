"""Fit a `LatencyModel` to a grid of batches, and an `IterationModel` to a capture or trace with token times.

A grid is a CSV file of batch size, length and time (`load_grid`), as `llmtap bench grid` measures it.
`llmtap sim run --latency` does the one or the other, by the file; `bench/exo/result.py` fits its grid. The
results are the constants of `sim/model_options.py`, with the R^2 of each part.

For a capture, all traffic of the engine must be in it: the number of running requests follows from the rows.
Two parts of the `IterationModel` are fitted by least squares, each with its own R^2:

- **Prefill.** Requests that had the engine to themselves until their first token: TTFT = base + prefill p,
  where p are the prompt tokens that were not cached. With chunked prefill: base for each chunk.
- **Decode.** Gaps between tokens that began when no request waited or was in prefill: an iteration of d
  requests with c tokens in memory takes beta + beta gamma (d - 1) / d + context c.

For a part that cannot be fitted so, because the load never rests, whole answers from first token to last are
used: with n tokens at means of d and c, and P prompt tokens processed meanwhile, an answer took

    (n - 1) (beta + beta gamma mean((d - 1) / d) + context mean(c)) + prefill P

and one iteration more for each prompt that is processed whole. Where only first and last tokens have times,
means are over time instead of iterations. gamma and context are at least 0.
"""

import csv
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, combinations, pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from llmtap.errors import ConfigError, LlmtapError
from llmtap.exchange.exchange import Exchange
from llmtap.metrics.latency import output_times_ns, tokens_per_chunk
from llmtap.sim.model_options import IterationModel, LatencyModel
from llmtap.traces.registry import open_trace
from llmtap.units import to_seconds

GAPS_MAX: Final = 200_000
"""Of a capture with more, every n-th is used: more add nothing to three constants."""
GAPS_MIN: Final = 30
"""With fewer, or all of one number of requests, whole answers are used instead."""
ANSWERS_MIN: Final = 8
TOKENS_MIN: Final = 8
"""Of an answer that is used as a whole, so that effects at its ends weigh little."""
_ROUNDED_NS: Final = 2_000
"""Stamps of captures are whole microseconds, rounded down, counted from the arrival of each."""
_SAME: Final = 1e-6
"""Shares (d - 1) / d that are no further apart belong to one d."""
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
        reader.fieldnames = _head(reader)
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


def _head(reader: "csv.DictReader[str]") -> list[str]:
    return [name.strip().lower() for name in reader.fieldnames or ()]


def length_counted(path: str | Path) -> str | None:
    """Return which tokens the lengths of a grid count, as in `ModelOptions.length`; None if it does not say.

    A grid says it by the columns `prompt_tokens` and `output_tokens`, as `llmtap bench grid` writes them.
    """
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        reader.fieldnames = _head(reader)
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


# ---------------------------------------------------------------- captures and traces


@dataclass(frozen=True, slots=True)
class IterationFit:
    model: IterationModel
    prefill: Part
    decode: Part
    base_ns: float | None = None
    """TTFT of a prompt without tokens that has the engine to itself; None where nobody had."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.to_dict(),
            "base": None if self.base_ns is None else to_seconds(self.base_ns),
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
    with chunked prefill; None: prompts are processed whole, in iterations of their own."""
    rows = [row for row in map(_row, exchanges) if row is not None]
    answered = [row for row in rows if row.last_ns is not None]
    if not answered:
        raise FitError("no row has the times of arrival, first and last token: capture streamed answers")
    if all(row.prompt is None for row in answered):
        raise FitError("no row has a count of input tokens, which the duration of a prompt is fitted to")
    load = _Load(rows)
    alone = _alone(answered, load, chunk)
    decode = _from_gaps(answered, load)
    constants = {} if decode is None else dict(decode[0])
    if alone is not None:
        constants["prefill"] = alone[0]
    part = None
    if alone is None or decode is None:
        constants, part = _from_answers(answered, load, chunk, constants)
    beta_ns = constants["beta"]
    gamma = constants.get("step", 0.0) / beta_ns
    model = IterationModel(beta_ns, gamma, constants["prefill"], constants.get("context", 0.0))
    prefill, decoded = part if alone is None else alone[2], part if decode is None else decode[1]
    assert prefill is not None
    assert decoded is not None
    return IterationFit(model, prefill, decoded, None if alone is None else alone[1])


@dataclass(slots=True)
class _Row:
    arrival_ns: int
    start_ns: int
    """When the server took it up, if it reports that; else its arrival."""
    first_ns: int | None
    last_ns: int | None
    end_ns: int
    prompt: int | None
    """Prompt tokens that were not cached."""
    context: int
    output: int
    times_ns: list[int]
    """Of its tokens, one by one; empty if unknown."""


def _row(x: Exchange) -> _Row | None:
    t, tokens = x.timeline, x.tokens
    if t.submit_ns is None and t.first_token_ns is None:
        return None
    submit_ns = t.arrival_ns if t.submit_ns is None else t.submit_ns
    # The first one only: a gateway and its engine may both report the same wait.
    queued = (float(str(one["ms"])) for one in x.server_timing or () if one.get("name") == "queue")
    queued_ms = next(queued, 0.0)
    last_ns = t.last_token_ns if x.stream else None
    times: list[int] = []
    if last_ns is not None and not x.unlogged_events:
        counts = tokens_per_chunk(x)
        if counts is not None and counts.count(1) == len(counts):
            times = output_times_ns(t.events)
    given = tokens.input
    return _Row(
        submit_ns, submit_ns + round(queued_ms * 1e6), t.first_token_ns if x.stream else None, last_ns,
        last_ns or t.response_end_ns or t.delivered_ns or submit_ns,
        None if given is None else max(0, given - (tokens.cached or 0)), given or 0,
        len(times) or tokens.output or 0, times,
    )  # fmt: skip


class _Load:
    """The requests under way at each moment."""

    def __init__(self, rows: Sequence[_Row]) -> None:
        running = [row for row in rows if row.first_ns is not None and row.last_ns is not None]
        self._arrivals = sorted(row.arrival_ns for row in rows)
        self._ends = sorted(row.end_ns for row in rows)
        self._taken_up = sorted(row.start_ns for row in rows)
        self._settled = sorted(row.end_ns if row.first_ns is None else row.first_ns for row in rows)
        firsts = sorted((row.first_ns or 0, row.context, row.prompt or 0) for row in running)
        lasts = sorted((row.last_ns or 0, row.context, row.output) for row in running)
        self._firsts, self._lasts = [t for t, _, _ in firsts], [t for t, _, _ in lasts]
        apart = (t - before > _ROUNDED_NS for before, t in pairwise([-3 * _ROUNDED_NS, *self._firsts]))
        self._taken_in = [0, *accumulate(apart)]
        self._prompts_begun = [0, *accumulate(n for _, n, _ in firsts)]
        self._prompts_taken = [0, *accumulate(n for _, _, n in firsts)]
        self._prompts_over = [0, *accumulate(n for _, n, _ in lasts)]
        self._tokens_over = [0, *accumulate(n for _, _, n in lasts)]
        self._tokens = sorted(t for row in running for t in row.times_ns)
        self._means = _Means(running)
        self.timed = all(row.times_ns for row in running)

    def alone(self, row: _Row) -> bool:
        """Return whether no other request was under way from its arrival to its first token."""
        assert row.first_ns is not None
        come = bisect_left(self._arrivals, row.first_ns)
        return come - bisect_right(self._ends, row.arrival_ns) == 1

    def undisturbed(self, t_ns: int) -> bool:
        """Return whether no request waits or is in prefill at a moment."""
        later_ns = t_ns + _ROUNDED_NS
        return bisect_right(self._taken_up, later_ns) <= bisect_right(self._settled, later_ns)

    def decoding(self, t_ns: int) -> tuple[int, int]:
        """Return how many requests decode at a moment, and, if all tokens have times, their context."""
        begun, over = bisect_left(self._firsts, t_ns), bisect_left(self._lasts, t_ns)
        made = bisect_left(self._tokens, t_ns) - self._tokens_over[over]
        # The newest token is not in memory yet: the iteration puts it there.
        context = self._prompts_begun[begun] - self._prompts_over[over] + made - (begun - over)
        return begun - over, context

    def taken_in(self, start_ns: int, end_ns: int) -> tuple[int, int]:
        """Return the iterations that ended with a first token in a period, and their prompt tokens."""
        low, high = (bisect_right(self._firsts, t_ns + _ROUNDED_NS) for t_ns in (start_ns, end_ns))
        prompts = self._prompts_taken[high] - self._prompts_taken[low]
        return self._taken_in[high] - self._taken_in[low], prompts

    def means(self, row: _Row) -> tuple[float, float]:
        """Return the means of (d - 1) / d and of the context during an answer, from first token to last: over
        iterations if all tokens have times, else over time."""
        assert row.first_ns is not None
        assert row.last_ns is not None
        if self.timed:
            found = [self.decoding(t_ns - _ROUNDED_NS) for t_ns in row.times_ns[1:]]
            n = len(found)
            return sum((d - 1) / d for d, _ in found if d) / n, sum(context for _, context in found) / n
        share, context = self._means.until(row.last_ns)
        share_before, context_before = self._means.until(row.first_ns)
        length_ns = row.last_ns - row.first_ns
        return (share - share_before) / length_ns, (context - context_before) / length_ns


class _Means:
    """Integrals over time; between two points d is constant and c grows linearly."""

    def __init__(self, running: Sequence[_Row]) -> None:
        firsts, lasts = (
            np.array(ends) for ends in zip(*((r.first_ns, r.last_ns) for r in running), strict=True)
        )
        grown = np.array([float(row.output - 1) for row in running]) * (lasts > firsts)
        pace = grown / np.maximum(lasts - firsts, 1)
        context = np.array([float(row.context) for row in running])
        at = np.concatenate([firsts, lasts])
        order = np.argsort(at, kind="stable")
        self._at = at[order]
        past = np.diff(self._at)
        d = np.cumsum(np.repeat([1, -1], len(running))[order])
        self._share = np.where(d > 0, (d - 1) / np.maximum(d, 1), 0.0)
        self._pace = np.cumsum(np.concatenate([pace, -pace])[order])
        self._held = np.cumsum(np.concatenate([context, -context - grown])[order])
        self._held[1:] += np.cumsum(self._pace[:-1] * past)
        self._share_sum = np.append(0, np.cumsum(self._share[:-1] * past))
        self._held_sum = np.append(0, np.cumsum((self._held[:-1] + self._pace[:-1] * past / 2) * past))

    def until(self, t_ns: int) -> tuple[float, float]:
        """Return both integrals from the first point to a moment at or after it."""
        i = int(np.searchsorted(self._at, t_ns, side="right")) - 1
        past_ns = t_ns - int(self._at[i])
        share = self._share_sum[i] + self._share[i] * past_ns
        held = self._held_sum[i] + (self._held[i] + self._pace[i] * past_ns / 2) * past_ns
        return float(share), float(held)


def _alone(rows: Sequence[_Row], load: _Load, chunk: int | None) -> tuple[float, float, Part] | None:
    """Return prefill and base from requests that had the engine to themselves; None if too few had."""
    found = [row for row in rows if row.prompt is not None and row.first_ns is not None and load.alone(row)]
    prompts = [float(row.prompt or 0) for row in found]
    took = [float((row.first_ns or 0) - row.start_ns) for row in found]
    iterations = [1.0 if chunk is None else float(max(1, -(-n // chunk))) for n in map(int, prompts)]
    solved = least_squares([iterations, prompts], took) if len(found) > 2 else None
    if solved is None or solved[1] <= 0 or solved[0] < 0:
        return None
    base_ns, prefill_ns = solved
    told = [base_ns * k + prefill_ns * n for k, n in zip(iterations, prompts, strict=True)]
    return prefill_ns, base_ns, part_of("requests that had the engine to themselves", took, told)


def _from_gaps(rows: Sequence[_Row], load: _Load) -> tuple[dict[str, float], Part] | None:
    """Return `beta`, `step` (beta gamma) and, if the gaps determine it, `context`; None if too few gaps."""
    every = -(-sum(max(0, len(row.times_ns) - 1) for row in rows) // GAPS_MAX) or 1
    shares, contexts, took = [], [], []
    number = 0
    for row in rows:
        times = row.times_ns
        for before_ns, t_ns in pairwise(times):
            number += 1
            if number % every or not load.undisturbed(before_ns) or t_ns <= before_ns:
                continue
            d, context = load.decoding((before_ns + t_ns) // 2)
            shares.append((d - 1) / d if d else 0.0)
            contexts.append(float(context))
            took.append(float(t_ns - before_ns))
    if len(took) < GAPS_MIN or len(set(shares)) < 2:
        return None
    columns = {"beta": [1.0] * len(took), "step": shares}
    if load.timed:
        columns["context"] = contexts
    best = nearest(columns, took, ("beta",))
    if best is None:
        return None
    found, told = best
    return found, part_of("gaps between tokens while nobody waited", took, told)


def _from_answers(
    rows: Sequence[_Row], load: _Load, chunk: int | None, known: Mapping[str, float]
) -> tuple[dict[str, float], Part]:
    """Return all constants from whole answers, including the `known` ones. Raises FitError."""
    columns: dict[str, list[float]] = {"beta": [], "step": [], "context": [], "prefill": []}
    took = []
    for row in rows:
        n, first_ns, last_ns = row.output - 1, row.first_ns, row.last_ns
        if n + 1 < TOKENS_MIN or first_ns is None or last_ns is None or last_ns <= first_ns:
            continue
        share, context = load.means(row)
        iterations, prompts = load.taken_in(first_ns, last_ns)
        # Means per token, so that long answers weigh no more than short ones.
        columns["beta"].append(1.0 if chunk is not None else (n + iterations) / n)
        columns["step"].append(share)
        columns["context"].append(context)
        columns["prefill"].append(prompts / n)
        took.append((last_ns - first_ns) / n)
    if len(took) < ANSWERS_MIN:
        raise FitError(
            f"only {len(took)} answers have {TOKENS_MIN} tokens or more with their times, and too few gaps "
            "between tokens were undisturbed: capture more traffic"
        )
    shares = columns["step"]
    if "beta" not in known and max(shares) - min(shares) < _SAME:
        running = round(1 / (1 - shares[0]))
        raise FitError(
            f"the number of running requests was always {running}, so its effect cannot be fitted: capture "
            "some requests one at a time, and some many at a time"
        )
    if "beta" in known:
        known = {"step": 0.0, "context": 0.0, **known}
    rest = list(took)
    for name, value in known.items():
        rest = [y - value * x for y, x in zip(rest, columns[name], strict=True)]
    unknown = {name: column for name, column in columns.items() if name not in known}
    best = nearest(unknown, rest, [name for name in ("beta", "prefill") if name in unknown])
    if best is None:
        raise FitError(
            "the durations of a prompt and of a token cannot be separated, or the model does not fit: "
            "capture some prompts of different lengths one at a time"
        )
    found, left = best
    told = [y - x + z for y, x, z in zip(took, rest, left, strict=True)]
    return {**known, **found}, part_of("whole answers, from first token to last", took, told)
