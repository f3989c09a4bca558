"""An IterationModel from what was measured: captures, or traces that tell when tokens came.

How many ran at a time is worked out from the rows themselves: a request runs from its first token to its
last. So all of an engine's traffic must be there; what was not captured made the others slower without a
trace. Two parts are fitted, each by least squares, and each with its own R^2:

- **Prefill.** Requests that had the engine to themselves until their first token: TTFT = base + prefill p,
  where p are the tokens of the prompt that were not cached. The model has beta as its base; what is beyond it
  is the network's and the server's own. Where a server took prompts in by chunks, each took an iteration.
- **Decode.** Gaps between tokens that began when nobody waited or was being taken in: one iteration of d
  requests that have c tokens in memory takes beta + beta gamma (d - 1) / d + context c.

Under a load that never rests there are neither. Then whole answers are used, from their first token to their
last: with n tokens made one after the other, while d and c were so much on average and prompts of P tokens
were taken in, such an answer took

    (n - 1) (beta + beta gamma mean((d - 1) / d) + context mean(c)) + prefill P

and one iteration more for each prompt where they are taken in whole, since then nobody else makes a token.
Where only first and last tokens have times, means are over time and not over iterations, which is the same
as long as iterations are of one length.

gamma and context are never below 0: where they would be, the nearest fit without them is taken. What the rows
cannot tell is an error that says which traffic would.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise
from math import sqrt
from operator import mul
from typing import Any, Final

import pyarrow.compute as pc

from llmtap.capture.store.rows import exchanges_of
from llmtap.errors import ConfigError, LlmtapError
from llmtap.exchange.exchange import Exchange
from llmtap.metrics.latency import output_times_ns, tokens_per_chunk
from llmtap.sim.latency import IterationModel
from llmtap.units import to_seconds
from llmtap.workload.trace import opened_trace

__all__ = [
    "FitError",
    "IterationFit",
    "Part",
    "fit_capture",
    "fit_exchanges",
    "least_squares",
    "nearest",
    "part_of",
]


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


GAPS_MAX: Final = 200_000
"""Of a capture with more, every n-th is used: more add nothing to three constants."""
GAPS_MIN: Final = 30
"""Fewer, or all of one number of requests, and whole answers are used instead."""
ANSWERS_MIN: Final = 8
"""Twice as many as there are constants."""
TOKENS_MIN: Final = 8
"""Of an answer that is used as a whole: what happened at its ends weighs little."""
_ROUNDED_NS: Final = 2_000
"""Stamps of captures are whole microseconds, rounded down, counted from the arrival of each."""


_SAME: Final = 1e-6
"""Shares (d - 1) / d that are no further apart tell of one d."""


class FitError(LlmtapError):
    """The measurements do not tell a model. Says what is missing."""


@dataclass(frozen=True, slots=True)
class IterationFit:
    """A model, and how well it tells the measurements."""

    model: IterationModel
    prefill: Part
    decode: Part
    base_ns: float | None = None
    """TTFT of a prompt without tokens that has the engine to itself; None where nobody had."""

    def to_dict(self) -> dict[str, Any]:
        """As public JSON, seconds."""
        model = self.model
        parts = {
            name: {"source": p.source, "points": p.points, "r2": p.r2, "error_max": p.error_max}
            for name, p in (("prefill", self.prefill), ("decode", self.decode))
        }
        return {
            "model": {"beta": to_seconds(model.beta_ns), "gamma": model.gamma,
                      "prefill": to_seconds(model.prefill_ns), "context": to_seconds(model.context_ns)},
            "base": None if self.base_ns is None else to_seconds(self.base_ns),
            **parts,
        }  # fmt: skip


def fit_capture(
    place: str,
    *,
    source_format: str | None = None,
    chunk: int | None = None,
    progress: Callable[[int, int | None], None] | None = None,
) -> IterationFit:
    """`fit_exchanges` of a capture, or of a trace of any format that tells when tokens came.

    Raises ConfigError, whose place is the capture, for what cannot be read or does not tell a model.
    """

    def exchanges() -> Iterable[Exchange]:
        with opened_trace(place, source_format=source_format, progress=progress) as (source, _):
            for batch in source.batches:
                yield from exchanges_of(batch.filter(pc.is_valid(batch.column("arrival_ns"))))

    try:
        return fit_exchanges(exchanges(), chunk=chunk)
    except FitError as exc:
        raise ConfigError(place, str(exc)) from None


def fit_exchanges(exchanges: Iterable[Exchange], *, chunk: int | None = None) -> IterationFit:
    """The model nearest to the exchanges of one engine.

    Args:
        chunk: tokens of an iteration, where the engine took prompts in by chunks, beside those who decoded.
            None: it took them in whole, in iterations of their own.

    Raises FitError.
    """
    rows = [row for row in map(_row, exchanges) if row is not None]
    answered = [row for row in rows if row.last_ns is not None]
    if not answered:
        raise FitError("no row has an arrival, a first and a last token: was it streamed, and measured?")
    if all(row.prompt is None for row in answered):
        raise FitError("no row has a count of input tokens: how long a prompt takes cannot be told")
    load = _Load(rows)
    alone = _alone(answered, load, chunk)
    decode = _from_gaps(answered, load)
    if alone is not None and decode is not None:
        prefill_ns, base_ns, prefill = alone
        constants, part = decode
        return IterationFit(_model({**constants, "prefill": prefill_ns}), prefill, part, base_ns)
    known = {} if decode is None else dict(decode[0])
    if alone is not None:
        known["prefill"] = alone[0]
    constants, part = _from_answers(answered, load, chunk, known)
    told = part if decode is None else decode[1]
    if alone is None:
        return IterationFit(_model(constants), part, told)
    return IterationFit(_model(constants), alone[2], told, alone[1])


def _model(constants: Mapping[str, float]) -> IterationModel:
    beta_ns = constants["beta"]
    gamma = constants.get("step", 0.0) / beta_ns
    return IterationModel(beta_ns, gamma, constants["prefill"], constants.get("context", 0.0))


# ---------------------------------------------------------------- rows


@dataclass(slots=True)
class _Row:
    """What is known of a request; ns."""

    arrival_ns: int
    start_ns: int
    """When the server took it up, where it tells; else its arrival."""
    first_ns: int | None
    last_ns: int | None
    end_ns: int
    prompt: int | None
    """Tokens of it that were not cached."""
    context: int
    """All of them."""
    output: int
    times_ns: list[int]
    """When its tokens came, one by one; empty where that is not known."""


def _row(x: Exchange) -> _Row | None:
    t, tokens = x.timeline, x.tokens
    if t.submit_ns is None and t.first_token_ns is None:
        return None
    submit_ns = t.arrival_ns if t.submit_ns is None else t.submit_ns
    # As told first: a gateway and its engine may both tell the same wait.
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
    """Who was under way when."""

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
        """All tokens have their times."""

    def alone(self, row: _Row) -> bool:
        """Whether nobody else was under way from its arrival to its first token."""
        assert row.first_ns is not None
        come = bisect_left(self._arrivals, row.first_ns)
        return come - bisect_right(self._ends, row.arrival_ns) == 1

    def undisturbed(self, t_ns: int) -> bool:
        """Whether nobody is waiting for a server, or being taken in, at a moment."""
        later_ns = t_ns + _ROUNDED_NS
        return bisect_right(self._taken_up, later_ns) <= bisect_right(self._settled, later_ns)

    def decoding(self, t_ns: int) -> tuple[int, int]:
        """How many make a token at a moment, and how many tokens they have in memory.

        The last counts only where all tokens have their times.
        """
        begun, over = bisect_left(self._firsts, t_ns), bisect_left(self._lasts, t_ns)
        made = bisect_left(self._tokens, t_ns) - self._tokens_over[over]
        # What was made last is not in memory yet: the iteration puts it there.
        context = self._prompts_begun[begun] - self._prompts_over[over] + made - (begun - over)
        return begun - over, context

    def taken_in(self, start_ns: int, end_ns: int) -> tuple[int, int]:
        """Iterations that ended with somebody's first token in a time, and the tokens of these prompts."""
        low, high = (bisect_right(self._firsts, t_ns + _ROUNDED_NS) for t_ns in (start_ns, end_ns))
        return self._taken_in[high] - self._taken_in[low], self._prompts_taken[high] - self._prompts_taken[
            low
        ]

    def means(self, row: _Row) -> tuple[float, float]:
        """Means of (d - 1) / d and of the tokens in memory while an answer was made, from its first token on.

        Over iterations where all tokens have their times, else over time.
        """
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
    """Integrals over time, piece by piece: between two of its points d is the same, and c grows evenly."""

    def __init__(self, running: Sequence[_Row]) -> None:
        steps: list[tuple[int, int, float, float]] = []
        for row in running:
            first_ns, last_ns = row.first_ns or 0, row.last_ns or 0
            pace = (row.output - 1) / (last_ns - first_ns) if last_ns > first_ns else 0.0
            steps.append((first_ns, 1, row.context, pace))
            steps.append((last_ns, -1, -row.context - (row.output - 1 if pace else 0), -pace))
        steps.sort()
        self._at: list[int] = []
        self._sums: list[tuple[float, float, float, float, float]] = []
        """At each point: both integrals so far; and from there on (d - 1) / d, c, and how fast c grows."""
        now_ns, d = steps[0][0], 0
        share = held = share_sum = held_sum = pace = 0.0
        for t_ns, more, tokens, faster in steps:
            past_ns = t_ns - now_ns
            share_sum += share * past_ns
            held_sum += (held + pace * past_ns / 2) * past_ns
            held += pace * past_ns + tokens
            now_ns, d, pace = t_ns, d + more, pace + faster
            share = (d - 1) / d if d else 0.0
            self._at.append(t_ns)
            self._sums.append((share_sum, held_sum, share, held, pace))

    def until(self, t_ns: int) -> tuple[float, float]:
        """Both integrals, from the first point to a moment at or behind it."""
        i = bisect_right(self._at, t_ns) - 1
        share_sum, held_sum, share, held, pace = self._sums[i]
        past_ns = t_ns - self._at[i]
        return share_sum + share * past_ns, held_sum + (held + pace * past_ns / 2) * past_ns


# ---------------------------------------------------------------- parts


def _alone(rows: Sequence[_Row], load: _Load, chunk: int | None) -> tuple[float, float, Part] | None:
    """Prefill and base from those that had the engine to themselves; None where too few had."""
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
    """`beta`, `step` (beta gamma) and `context` from gaps with nothing but decoding; None where too few were.

    What the gaps do not tell is not among them.
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
    """All constants from whole answers, those included that are `known` already. Raises FitError."""
    columns: dict[str, list[float]] = {"beta": [], "step": [], "context": [], "prefill": []}
    took = []
    for row in rows:
        n, first_ns, last_ns = row.output - 1, row.first_ns, row.last_ns
        if n + 1 < TOKENS_MIN or first_ns is None or last_ns is None or last_ns <= first_ns:
            continue
        share, context = load.means(row)
        iterations, prompts = load.taken_in(first_ns, last_ns)
        # Of one token, as a mean: so that long answers weigh no more than short ones.
        columns["beta"].append(1.0 if chunk is not None else (n + iterations) / n)
        columns["step"].append(share)
        columns["context"].append(context)
        columns["prefill"].append(prompts / n)
        took.append((last_ns - first_ns) / n)
    if len(took) < ANSWERS_MIN:
        raise FitError(
            f"{len(took)} answers have {TOKENS_MIN} tokens or more and their times, and too few gaps between "
            "tokens were undisturbed: more traffic is needed"
        )
    shares = columns["step"]
    if "beta" not in known and max(shares) - min(shares) < _SAME:
        running = round(1 / (1 - shares[0]))
        raise FitError(
            f"always {running} ran at a time: how much slower more of them are cannot be told; capture some "
            "traffic one at a time, and some of many at a time"
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
            "these answers do not tell how long a prompt and a token take, or the model does not fit them; "
            "capture some prompts of different lengths one at a time"
        )
    found, left = best
    told = [y - x + z for y, x, z in zip(took, rest, left, strict=True)]
    return {**known, **found}, part_of("whole answers, from first token to last", took, told)
