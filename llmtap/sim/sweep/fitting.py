"""Fit a `LatencyModel` to a grid of batches, and an `IterationModel` to a capture or trace with token times.

A grid is a CSV file of batch size, length and time (`load_grid`), as `llmtap bench grid` measures it. `llmtap
sim run --latency` chooses the model by the kind of the file; `bench/exo/result.py` fits its grid. The results
are the constants of `sim/model_options.py`, the R^2 of each part, and the accuracy of predictions for data
that were not used for the fit (`Unseen`): for a grid, each point is predicted by a fit to the other points;
for a capture, one half of the time is predicted by a fit to the other half.

A capture must contain all traffic of the engine, because the number of running requests is computed from its
rows. Two parts of the `IterationModel` are fitted by least squares, each with its own R^2:

- **Prefill.** Requests that had the engine to themselves until their first token: TTFT = base + prefill p,
  where p are the prompt tokens that were not cached. With chunked prefill: base for each chunk.
- **Decode.** Gaps between tokens that began when no request waited or was in prefill: an iteration of d
  requests with c tokens in memory takes beta + beta gamma (d - 1) / d + context c.

If the load is never low, a part cannot be fitted in this way. Then whole answers, from first token to last,
are used. An answer of n tokens takes this time, with P prompt tokens of other requests that are processed at
the same time:

    (n - 1) (beta + beta gamma mean((d - 1) / d) + context mean(c)) + prefill P

and one more iteration for each prompt that is processed whole. If only first and last tokens have times, the
means are over time instead of iterations. gamma and context are at least 0.

If the size of the server's KV memory is known (`KvMemory`), a request with a prompt that does not fit into
the memory counts as waiting, not as in prefill. Gaps that began when the memory was full are then omitted,
since their request may have been preempted."""

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
"""Maximum number of gaps that are used: three constants do not need more. If there are more,
every n-th is used."""
GAPS_MIN: Final = 30
"""Minimum number of gaps. If there are fewer, or all have the same number of requests,
whole answers are used."""
ANSWERS_MIN: Final = 8
TOKENS_MIN: Final = 8
"""Minimum number of tokens of an answer that is used as a whole, so that effects at its ends are small."""
_ROUNDED_NS: Final = 2_000
"""Rounding error of times in captures: whole microseconds, rounded down, relative to each arrival."""
_SAME: Final = 1e-6
"""Values of (d - 1) / d within this distance count as the same d."""
_RANK: Final = 1e-7
"""Relative distance of a column from a combination of the other columns, below which it counts as dependent
on them."""


class FitError(LlmtapError):
    """The measurements do not determine a model; the message names the missing data."""


class GridError(FitError):
    """A grid of measurements cannot be used; the message has the reason and the place."""


# ---------------------------------------------------------------- least squares


@dataclass(frozen=True, slots=True)
class Part:
    source: str
    points: int
    r2: float
    """1 - (sum of squared residuals) / (sum of squared distances from the mean)."""
    error_max: float
    """Largest distance between model and measurement, as a share of the measurement."""


R2_MIN: Final = 0.8
RMS_ERROR_MAX: Final = 0.05
"""Limits of a poor fit, for durations that were not used for it: it explains less than R2_MIN of their
variance, and its root mean square error is more than RMS_ERROR_MAX of their mean. The second condition
excludes durations that are nearly equal: most of their variance is noise."""


@dataclass(frozen=True, slots=True)
class Unseen:
    """Accuracy of a fit for durations that were not used for the fit."""

    points: int
    r2: float
    rms_error: float
    """Root mean square error, as a share of the mean duration."""

    @property
    def is_poor(self) -> bool:
        return self.r2 < R2_MIN and self.rms_error > RMS_ERROR_MAX


def unseen_of(measured: Sequence[float], predicted: Sequence[float]) -> Unseen:
    part = part_of("", measured, predicted)
    y = np.asarray(measured, float)
    rms = float(np.sqrt(np.mean((y - np.asarray(predicted, float)) ** 2)))
    return Unseen(part.points, part.r2, rms / float(y.mean()))


def part_of(source: str, measured: Sequence[float], fitted: Sequence[float]) -> Part:
    """Return the quality of a fit, computed from the measured and the fitted values."""
    y = np.asarray(measured, float)
    left = y - np.asarray(fitted, float)
    spread = float(np.sum((y - y.mean()) ** 2))
    positive = y > 0
    error = float(np.max(np.abs(left[positive]) / y[positive]))
    return Part(source, len(y), 1 - float(np.sum(left**2)) / spread if spread else 1.0, error)


def least_squares(columns: Sequence[Sequence[float]], values: Sequence[float]) -> list[float] | None:
    """Return the coefficients of the combination of columns nearest to the values; None if not determined."""
    matrix = np.column_stack([np.asarray(column, float) for column in columns])
    lengths = np.linalg.norm(matrix, axis=0)
    if not lengths.all():
        return None
    solved, _, rank, _ = np.linalg.lstsq(matrix / lengths, np.asarray(values, float), rcond=_RANK)
    return None if rank < len(columns) else [float(x) for x in solved / lengths]


def nearest(
    columns: Mapping[str, Sequence[float]], values: Sequence[float], needed: Sequence[str]
) -> tuple[dict[str, float], list[float]] | None:
    """Return the constants of the nearest fit without negative constants, and its values; None if there is
    none.

    The `needed` constants must be above 0; other constants are omitted if they would be negative.
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


# ---------------------------------------------------------------- grids of whole batches

GridPoint = tuple[int, int, float]
"""Batch size, tokens of the longest request, and time in seconds."""
_COLUMNS: Final = ("batch_size", "max_seq_len", "mean_latency_sec")
"""Names of the columns in the file, as in the multi-bin paper, 3.2."""


@dataclass(frozen=True, slots=True)
class BatchFit:
    model: LatencyModel
    part: Part
    unseen: Unseen | None
    """Accuracy for points that were not used; None if the grid without one of its
    points determines no model."""


def fit_batches(points: Sequence[GridPoint]) -> BatchFit:
    """Return the model nearest to the points: T is linear in 1, L and L (b - 1) / b. Raises GridError."""
    rows = [(1.0, float(length), length * (b - 1) / b) for b, length, _ in points]
    values = [seconds for _, _, seconds in points]
    solved = least_squares(list(zip(*rows, strict=True)), values) if rows else None
    if solved is None:
        raise GridError("the grid needs at least two batch sizes and two lengths")
    alpha, beta, beta_gamma = solved
    if beta <= 0:
        raise GridError("the model does not fit this grid: longer batches are not slower")
    if alpha < 0 or beta_gamma < -beta:
        raise GridError("the model does not fit this grid: some batches would have a negative duration")
    fitted = [alpha + beta * length + beta_gamma * share for _, length, share in rows]
    model = LatencyModel(alpha * 1e9, beta * 1e9, beta_gamma / beta)
    return BatchFit(model, part_of("grid", values, fitted), _left_out(list(zip(*rows, strict=True)), values))


def _left_out(columns: Sequence[Sequence[float]], values: Sequence[float]) -> Unseen | None:
    """Return the accuracy of predicting each value by a fit to the other values.

    It is computed from the leverage of each value in the fit to all. None if the fit is not determined
    without one of the values.
    """
    matrix, y = np.column_stack([np.asarray(column, float) for column in columns]), np.asarray(values, float)
    lengths = np.linalg.norm(matrix, axis=0)
    if len(y) <= matrix.shape[1] or not lengths.all():
        return None
    scaled = matrix / lengths
    inverse = np.linalg.pinv(scaled, rcond=_RANK)
    influence = np.sum(scaled * inverse.T, axis=1)
    if float(influence.max()) > 1 - _SAME:
        return None
    errors = (y - scaled @ (inverse @ y)) / (1 - influence)
    return unseen_of(values, (y - errors).tolist())


def load_grid(path: str | Path) -> list[GridPoint]:
    """Read a CSV file with the columns of the multi-bin paper, 3.2. Raises GridError."""
    points: list[GridPoint] = []
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        reader.fieldnames = _header_names(reader)
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
                    f"line {reader.line_num}: impossible values: {b} requests, {length} tokens, {seconds} s"
                )
            points.append((b, length, seconds))
    return points


def _header_names(reader: "csv.DictReader[str]") -> list[str]:
    return [name.strip().lower() for name in reader.fieldnames or ()]


def length_counted(path: str | Path) -> str | None:
    """Return which tokens the lengths of a grid count, as a value of `ModelOptions.length`; None: unknown.

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


# ---------------------------------------------------------------- captures and traces


@dataclass(frozen=True, slots=True)
class IterationFit:
    model: IterationModel
    prefill: Part
    decode: Part
    base_ns: float | None = None
    """TTFT of an empty prompt on an idle engine; None: no request had the engine to itself."""
    prefill_unseen: Unseen | None = None
    decode_unseen: Unseen | None = None
    """Accuracy for durations that were not used: a fit to one half of the time predicts the other half. If
    few requests had the engine to themselves, the prefill of each is predicted by a fit to the others. None
    if these fits are not possible."""

    def to_dict(self) -> dict[str, Any]:
        unseen = {"prefill": self.prefill_unseen, "decode": self.decode_unseen}
        return {
            "model": self.model.to_dict(),
            "base": None if self.base_ns is None else to_seconds(self.base_ns),
            "prefill": asdict(self.prefill), "decode": asdict(self.decode),
            "unseen": {name: None if one is None else asdict(one) for name, one in unseen.items()},
        }  # fmt: skip


def caution_of(parts: Mapping[str, Unseen | None]) -> str | None:
    """Return the reason why figures of a fitted model are doubtful; None if no part is poor."""
    poor = [
        f"{name}: R^2 {one.r2:.3g}, root mean square error {one.rms_error:.2g} of the mean"
        for name, one in parts.items()
        if one is not None and one.is_poor
    ]
    if poor:
        return f"the latency model predicts poorly what it was not fitted to: {'; '.join(poor)}"
    unknown = [name for name, one in parts.items() if one is None]
    if unknown:
        return (
            f"too little data to check the latency model on what it was not fitted to: {', '.join(unknown)}"
        )
    return None


@dataclass(frozen=True, slots=True)
class KvMemory:
    """KV memory of the measured server. A block that several prompts share is counted once
    for each of them."""

    blocks: int
    block_tokens: int


def fit_capture(
    place: str, *, source_format: str | None = None, option: str = "--from",
    chunk: int | None = None, memory: KvMemory | None = None,
) -> IterationFit:  # fmt: skip
    """Fit a model to a capture, or to a trace of any format with token times.

    Raises ConfigError naming `place`, or `option` for an unknown `source_format`.
    """
    # Imported here, because the import of Arrow takes a third of a second, and grids do not need it.
    import pyarrow.compute as pc

    from llmtap.capture.store.rows import exchanges_of

    try:
        with open_trace(place, source_format=source_format, option=option) as trace:
            arrived = (
                batch.filter(pc.is_valid(batch.column("arrival_ns"))) for batch in trace.source.batches
            )
            exchanges = (x for batch in arrived for x in exchanges_of(batch))
            return fit_exchanges(exchanges, chunk=chunk, memory=memory)
    except FitError as exc:
        raise ConfigError(place, str(exc)) from None


def fit_exchanges(
    exchanges: Iterable[Exchange], *, chunk: int | None = None, memory: KvMemory | None = None
) -> IterationFit:
    """Return the model nearest to the exchanges of one engine. Raises FitError.

    Args:
        chunk: tokens per iteration with chunked prefill; None: prompts are processed whole, in separate
            iterations.
        memory: KV memory of the engine; None: unknown.
    """
    rows = [row for row in map(_row_of, exchanges) if row is not None]
    answered = [row for row in rows if row.last_ns is not None]
    if not answered:
        raise FitError("no row has the times of arrival, first and last token: capture streamed answers")
    if all(row.prompt is None for row in answered):
        raise FitError("no row has a count of input tokens, which the fit of prefill needs")
    load = _Load(rows, memory)
    alone, decode, answers, constants = _fit_all(answered, load, chunk)
    beta_ns = constants["beta"]
    gamma = constants.get("step", 0.0) / beta_ns
    model = IterationModel(beta_ns, gamma, constants["prefill"], constants.get("context", 0.0))
    prefilled, decoded = alone or answers, decode or answers
    assert prefilled is not None
    assert decoded is not None
    prefill_unseen, decode_unseen = _unseen_errors(
        answered, load, chunk, alone=alone is not None, gaps=decode is not None
    )
    if prefill_unseen is None and alone is not None:
        prefill_unseen = _left_out(list(alone.columns.values()), alone.took_ns)
    base_ns = None if alone is None else constants["base"]
    return IterationFit(
        model, prefilled.part(constants), decoded.part(constants), base_ns, prefill_unseen, decode_unseen
    )


_Constants = dict[str, float]


@dataclass(frozen=True, slots=True)
class _Points:
    """Durations, and the columns of the linear model. A duration is the sum of constant times column, and
    each column has the name of its constant."""

    source: str
    columns: Mapping[str, Sequence[float]]
    took_ns: Sequence[float]

    def predicted(self, constants: Mapping[str, float]) -> list[float]:
        names = [name for name in self.columns if constants.get(name)]
        total = np.zeros(len(self.took_ns))
        for name in names:
            total += constants[name] * np.asarray(self.columns[name], float)
        predicted: list[float] = total.tolist()
        return predicted

    def part(self, constants: Mapping[str, float]) -> Part:
        return part_of(self.source, self.took_ns, self.predicted(constants))


def _fit_all(
    rows: Sequence["_Row"], load: "_Load", chunk: int | None
) -> tuple[_Points | None, _Points | None, _Points | None, _Constants]:
    """Return the points used for prefill, decode and whole answers, and all constants. Raises FitError.

    The constant `base` is missing if no request had the engine to itself.
    """
    candidates = _alone_points(rows, load, chunk)
    prefill = _prefill_of(candidates)
    alone = None if prefill is None else candidates
    answers: _Points | None = None
    constants: _Constants = prefill or {}
    decode = _gap_points(rows, load)
    gaps = None if decode is None else nearest(decode.columns, decode.took_ns, ("beta",))
    if gaps is None:
        decode = None
    else:
        constants |= gaps[0]
    if alone is None or decode is None:
        answers = _answer_points(rows, load, chunk)
        constants |= _from_answers(answers, {n: v for n, v in constants.items() if n != "base"})
    return alone, decode, answers, constants


def _unseen_errors(
    rows: Sequence["_Row"], load: "_Load", chunk: int | None, *, alone: bool, gaps: bool
) -> tuple[Unseen | None, Unseen | None]:
    """Return the accuracy of a fit to one half of the time for the other half: of prefill, and of decode.

    The half with the higher maximum of running requests is used for the fit, since a model may be wrong for
    higher loads than it was fitted to.
    """
    arrivals = [row.arrival_ns for row in rows]
    middle_ns = (min(arrivals) + max(arrivals)) // 2
    halves = (
        [row for row in rows if row.arrival_ns < middle_ns],
        [row for row in rows if row.arrival_ns >= middle_ns],
    )
    running_max = [max((load.running(row.first_ns or 0) for row in half), default=0) for half in halves]
    fitted, other = halves if running_max[0] >= running_max[1] else halves[::-1]
    try:
        constants = _fit_all(fitted, load, chunk)[-1]
    except FitError:
        return None, None
    prefill = _alone_points(other, load, chunk) if alone and "base" in constants else None
    if prefill is not None and len(prefill.took_ns) < 2:
        prefill = None
    decode = _gap_points(other, load, at_least=2) if gaps else None
    if not alone or not gaps:
        try:
            answers = _answer_points(other, load, chunk)
        except FitError:
            answers = None
        prefill, decode = prefill if alone else answers, decode if gaps else answers
    return _unseen_of(prefill, constants), _unseen_of(decode, constants)


def _unseen_of(points: _Points | None, constants: Mapping[str, float]) -> Unseen | None:
    if points is None:
        return None
    return unseen_of(points.took_ns, points.predicted(constants))


@dataclass(slots=True)
class _Row:
    arrival_ns: int
    start_ns: int
    """Time at which the server began to process the request, if reported; else the arrival."""
    first_ns: int | None
    last_ns: int | None
    end_ns: int
    prompt: int | None
    """Prompt tokens that were not cached."""
    context: int
    output: int
    times_ns: list[int]
    """Time of each token; empty if unknown."""


def _row_of(x: Exchange) -> _Row | None:
    t, tokens = x.timeline, x.tokens
    if t.submit_ns is None and t.first_token_ns is None:
        return None
    submit_ns = t.arrival_ns if t.submit_ns is None else t.submit_ns
    # Use only the first entry: a gateway and its engine may both report the same wait.
    queued = (float(str(one["ms"])) for one in x.server_timing or () if one.get("name") == "queue")
    queued_ms = next(queued, 0.0)
    last_ns = t.last_token_ns if x.stream else None
    if last_ns is None and x.stream and t.first_token_ns is not None:
        last_ns = t.response_end_ns  # Traces such as Dynamo's have only the end of the answer.
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
    """Number of running requests, and of their tokens in memory (context), at any time."""

    def __init__(self, rows: Sequence[_Row], memory: KvMemory | None = None) -> None:
        running = [row for row in rows if row.first_ns is not None and row.last_ns is not None]
        self._arrivals = sorted(row.arrival_ns for row in rows)
        self._end_times = sorted(row.end_ns for row in rows)
        self._taken_up = sorted(row.start_ns for row in rows)
        self._settled_times = sorted(row.end_ns if row.first_ns is None else row.first_ns for row in rows)
        firsts = sorted((row.first_ns or 0, row.context, row.prompt or 0) for row in running)
        lasts = sorted((row.last_ns or 0, row.context, row.output) for row in running)
        self._first_times, self._last_times = [t for t, _, _ in firsts], [t for t, _, _ in lasts]
        is_later = (
            t - previous_ns > _ROUNDED_NS
            for previous_ns, t in pairwise([-3 * _ROUNDED_NS, *self._first_times])
        )
        self._taken_in = [0, *accumulate(is_later)]
        self._prompts_begun = [0, *accumulate(n for _, n, _ in firsts)]
        self._prompts_taken = [0, *accumulate(n for _, _, n in firsts)]
        self._prompts_over = [0, *accumulate(n for _, n, _ in lasts)]
        self._tokens_over = [0, *accumulate(n for _, _, n in lasts)]
        self._tokens = sorted(t for row in running for t in row.times_ns)
        self._running_means = _Means(running)
        self.timed = all(row.times_ns for row in running)
        self._memory = memory if self.timed else None
        if self._memory is not None:
            self._settle(rows, running)

    def _settle(self, rows: Sequence[_Row], running: Sequence[_Row]) -> None:
        """Store the periods in which a request waits or is in prefill, or may be preempted."""
        waits = [
            (row.start_ns, row.end_ns if row.first_ns is None else row.first_ns, row.context) for row in rows
        ]
        waits.sort(key=lambda one: one[1])
        self._settled_times = [end_ns for _, end_ns, _ in waits]
        self._waiting = [(start_ns, tokens) for start_ns, _, tokens in waits]
        # Each entry of `waits` ends when the request "settles": it gets its first token, or ends without one.
        # At any time, the request that settles next is the head of the queue, if it has already begun to
        # wait.
        absent = [(a, b) for row in running for a, b in pairwise(row.times_ns) if self.is_full(a)]
        self._left = sorted(a for a, _ in absent)
        self._back = sorted(b for _, b in absent)

    def is_full(self, t_ns: int) -> bool:
        """Return whether the memory may be too small for the next token of each running request."""
        assert self._memory is not None
        d, context = self.decoding(t_ns + _ROUNDED_NS)
        return context // self._memory.block_tokens + 2 * d > self._memory.blocks

    def running(self, t_ns: int) -> int:
        """Return the number of requests that decode at a time."""
        return bisect_left(self._first_times, t_ns) - bisect_left(self._last_times, t_ns)

    def alone(self, row: _Row) -> bool:
        """Return whether no other request was open between the arrival of a request and its first token."""
        assert row.first_ns is not None
        come = bisect_left(self._arrivals, row.first_ns)
        return come - bisect_right(self._end_times, row.arrival_ns) == 1

    def undisturbed(self, t_ns: int) -> bool:
        """Return whether at this time no request is in prefill and none can begin it.

        Either no request waits, or the next one does not fit into the memory.
        """
        later_ns = t_ns + _ROUNDED_NS
        settled = bisect_right(self._settled_times, later_ns)
        nobody_waits = bisect_right(self._taken_up, later_ns) <= settled
        if self._memory is None:
            return nobody_waits
        if bisect_right(self._left, later_ns) > bisect_right(self._back, later_ns):
            return False
        if nobody_waits:
            return True
        head_start_ns, tokens = self._waiting[settled]
        context = self.decoding(later_ns)[1]
        # A request that waits because the memory is full is not in prefill, so it disturbs nothing. `held` is
        # a lower bound of the blocks in use, so if the next prompt does not fit by it, the request was not
        # admitted.
        held = -(-context // self._memory.block_tokens)
        needed = -(-tokens // self._memory.block_tokens)
        return head_start_ns <= later_ns and held + needed > self._memory.blocks

    def decoding(self, t_ns: int) -> tuple[int, int]:
        """Return the number of requests that decode at a time, and the number of their tokens in memory.

        The second number is valid only if all tokens have times.
        """
        begun, over = bisect_left(self._first_times, t_ns), bisect_left(self._last_times, t_ns)
        tokens_made = bisect_left(self._tokens, t_ns) - self._tokens_over[over]
        # Do not count the newest token of each request: the iteration adds it to the memory.
        context = self._prompts_begun[begun] - self._prompts_over[over] + tokens_made - (begun - over)
        return begun - over, context

    def taken_in(self, start_ns: int, end_ns: int) -> tuple[int, int]:
        """Return the number of iterations in a period that made a first token, and of their prompt tokens."""
        low, high = (bisect_right(self._first_times, t_ns + _ROUNDED_NS) for t_ns in (start_ns, end_ns))
        prompts = self._prompts_taken[high] - self._prompts_taken[low]
        return self._taken_in[high] - self._taken_in[low], prompts

    def means(self, row: _Row) -> tuple[float, float]:
        """Return the means of (d - 1) / d and of the context during an answer, from first token to last.

        The means are over iterations if all tokens have times, else over time.
        """
        assert row.first_ns is not None
        assert row.last_ns is not None
        if self.timed:
            loads = [self.decoding(t_ns - _ROUNDED_NS) for t_ns in row.times_ns[1:]]
            n = len(loads)
            return sum((d - 1) / d for d, _ in loads if d) / n, sum(context for _, context in loads) / n
        share, context = self._running_means.until(row.last_ns)
        share_before, context_before = self._running_means.until(row.first_ns)
        length_ns = row.last_ns - row.first_ns
        return (share - share_before) / length_ns, (context - context_before) / length_ns


class _Means:
    """Integrals of (d - 1) / d and of the context c over time. Between two points, d is constant
    and c grows linearly."""

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
        """Return both integrals from the first point to this time."""
        i = int(np.searchsorted(self._at, t_ns, side="right")) - 1
        past_ns = t_ns - int(self._at[i])
        share = self._share_sum[i] + self._share[i] * past_ns
        held = self._held_sum[i] + (self._held[i] + self._pace[i] * past_ns / 2) * past_ns
        return float(share), float(held)


def _alone_points(rows: Sequence[_Row], load: _Load, chunk: int | None) -> _Points:
    """Return the TTFTs of the requests that had the engine to themselves."""
    chosen = [row for row in rows if row.prompt is not None and row.first_ns is not None and load.alone(row)]
    prompts = [float(row.prompt or 0) for row in chosen]
    took = [float((row.first_ns or 0) - row.start_ns) for row in chosen]
    iterations = [1.0 if chunk is None else float(max(1, -(-n // chunk))) for n in map(int, prompts)]
    columns = {"base": iterations, "prefill": prompts}
    return _Points("requests that had the engine to themselves", columns, took)


def _prefill_of(points: _Points) -> _Constants | None:
    """Return the constants prefill and base; None if too few requests had the engine to themselves."""
    columns = points.columns
    solved = least_squares(list(columns.values()), points.took_ns) if len(points.took_ns) > 2 else None
    if solved is None or solved[1] <= 0 or solved[0] < 0:
        return None
    return dict(zip(columns, solved, strict=True))


def _gap_points(rows: Sequence[_Row], load: _Load, at_least: int = GAPS_MIN) -> _Points | None:
    """Return the gaps between tokens that began when no request waited or was in prefill.

    The columns are `beta`, `step` (for beta gamma) and, if all tokens have times, `context`. None if there
    are too few gaps, or if the number of running requests is the same in all of them.
    """
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
    if len(took) < at_least or (at_least >= GAPS_MIN and len(set(shares)) < 2):
        return None
    columns = {"beta": [1.0] * len(took), "step": shares}
    if load.timed:
        columns["context"] = contexts
    return _Points("gaps between tokens while nobody waited", columns, took)


def _answer_points(rows: Sequence[_Row], load: _Load, chunk: int | None) -> _Points:
    """Return the time per token of whole answers. Raises FitError."""
    columns: dict[str, list[float]] = {"beta": [], "step": [], "context": [], "prefill": []}
    took = []
    for row in rows:
        n, first_ns, last_ns = row.output - 1, row.first_ns, row.last_ns
        if n + 1 < TOKENS_MIN or first_ns is None or last_ns is None or last_ns <= first_ns:
            continue
        share, context = load.means(row)
        iterations, prompts = load.taken_in(first_ns, last_ns)
        # Divide by the number of tokens, so that long answers do not have more weight than short ones.
        columns["beta"].append(1.0 if chunk is not None else (n + iterations) / n)
        columns["step"].append(share)
        columns["context"].append(context)
        columns["prefill"].append(prompts / n)
        took.append((last_ns - first_ns) / n)
    if len(took) < ANSWERS_MIN:
        raise FitError(
            f"too few data for the time per token: {len(took)} answers with {TOKENS_MIN} tokens "
            f"or more and their times, where {ANSWERS_MIN} are needed: capture more traffic"
        )
    return _Points("whole answers, from first token to last", columns, took)


def _from_answers(points: _Points, known: Mapping[str, float]) -> _Constants:
    """Return all constants: the `known` ones, and the others fitted to whole answers. Raises FitError."""
    columns = points.columns
    shares = columns["step"]
    if "beta" not in known and max(shares) - min(shares) < _SAME:
        running = round(1 / (1 - shares[0]))
        raise FitError(
            f"the number of running requests was always {running}, so its effect cannot be fitted: capture "
            "some requests one at a time, and some many at a time"
        )
    if "beta" in known:
        known = {"step": 0.0, "context": 0.0, **known}
    rest = list(points.took_ns)
    for name, value in known.items():
        rest = [y - value * x for y, x in zip(rest, columns[name], strict=True)]
    unknown = {name: column for name, column in columns.items() if name not in known}
    best = nearest(unknown, rest, [name for name in ("beta", "prefill") if name in unknown])
    if best is None:
        raise FitError(
            "the durations of prompts and of tokens cannot be fitted separately: "
            "capture some prompts of different lengths one at a time"
        )
    return {**known, **best[0]}
