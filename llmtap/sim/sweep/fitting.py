"""Fit an `IterationModel` to a capture or trace with token times.

The result has the model (`sim/model_options.py`), the R^2 of each part of the fit, and the accuracy of
predictions for data that were not used for the fit (`PredictionAccuracy`): one half of the time is predicted
by a fit to the other half. `batch_grid.py` fits whole batches; `llmtap sim run --latency` chooses the model
by the kind of file.

A capture must contain all traffic of the engine, because the number of running requests is computed from its
rows. Two parts of the `IterationModel` are fitted by least squares, each with its own R^2:

- **Prefill.** Only requests that were alone on the engine until their first token are used: TTFT = base +
  prefill p, where p is the number of prompt tokens that were not cached. With chunked prefill, base is
  multiplied by the number of chunks.
- **Decode.** Only gaps between tokens are used that began when no request waited or was in prefill. An
  iteration of d requests with c tokens in memory takes beta + beta gamma (d - 1) / d + context c.

If the load is never low, there are too few of these data for a part. Then the part is fitted to whole
answers, from the first to the last token. An answer of n tokens takes this time, if P prompt tokens of other
requests are processed at the same time:

    (n - 1) (beta + beta gamma mean((d - 1) / d) + context mean(c)) + prefill P

For each prompt that is processed whole, the time of one iteration is added. If only first and last tokens
have times, the means are over time instead of over iterations. gamma and context are limited to 0 or more.

If the size of the server's KV memory is known (`KvMemory`), a request whose prompt does not fit into the
memory counts as waiting, not as being in prefill. Gaps that began when the memory was full are omitted,
because their request was possibly preempted."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from llmtap.errors import ConfigError
from llmtap.exchange.exchange import Exchange
from llmtap.sim.model_options import IterationModel
from llmtap.sim.sweep.engine_load import EngineLoad, KvMemory, RequestTimes, request_times
from llmtap.sim.sweep.linear_fit import (
    SAME,
    FitError,
    FitQuality,
    PredictionAccuracy,
    fit_quality,
    least_squares,
    leave_one_out,
    nearest,
    prediction_accuracy,
)
from llmtap.traces.registry import open_trace

GAPS_MAX: Final = 200_000
"""Maximum number of gaps that are used: enough for three constants. Of more gaps, every n-th is used."""
GAPS_MIN: Final = 30
"""Minimum number of gaps to fit the decode part to gaps; with fewer, it is fitted to whole answers."""
ANSWERS_MIN: Final = 8
"""Minimum number of whole answers for a fit; with fewer, the fit fails with an error."""
TOKENS_MIN: Final = 8
"""Minimum number of tokens of a whole answer that is used, so that effects at its ends are small."""


@dataclass(frozen=True, slots=True)
class IterationFit:
    """A fitted model, with the quality of the fit."""

    model: IterationModel
    prefill: FitQuality
    decode: FitQuality
    base_ns: float | None = None
    """TTFT of an empty prompt on an idle engine; None: no request was alone on the engine."""
    prefill_unseen: PredictionAccuracy | None = None
    """Accuracy for durations that were not used: a fit to one half of the time predicts the other half. If
    too few requests were alone on the engine, the prefill of each is predicted by a fit to the others. None
    if these fits are not possible."""
    decode_unseen: PredictionAccuracy | None = None
    """As `prefill_unseen`, for the decode part."""
    model_count: int = 1
    """Number of different models in the requests; with more than 1, they are probably not of one engine."""


def fit_capture(
    place: str,
    *,
    source_format: str | None = None,
    option: str = "--from",
    chunk: int | None = None,
    memory: KvMemory | None = None,
) -> IterationFit:
    """Fit a model to a capture, or to a trace of any format with token times.

    Raises ConfigError naming `place`, or `option` for an unknown `source_format`.
    """
    # Imported here, because the import of Arrow takes a third of a second, and the fit of a grid does not
    # need it.
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
    """Fit a model to the exchanges of one engine. Raises FitError.

    Args:
        chunk: number of tokens per iteration with chunked prefill; None: the engine processes whole prompts.
        memory: KV memory of the engine; None: unknown.
    """
    rows: list[RequestTimes] = []
    models: set[str | None] = set()
    for x in exchanges:
        if (row := request_times(x)) is not None:
            rows.append(row)
            models.add(x.model)
    answered = [row for row in rows if row.last_ns is not None]
    if not answered:
        raise FitError("no row has the times of arrival, first and last token: capture streamed answers")
    if all(row.prompt is None for row in answered):
        raise FitError(
            "no row has a number of input tokens, which the fit of prefill needs: capture answers with usage"
        )
    load = EngineLoad(rows, memory)
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
        prefill_unseen = leave_one_out(list(alone.columns.values()), alone.durations_ns)
    base_ns = None if alone is None else constants["base"]
    parts = prefilled.quality_of(constants), decoded.quality_of(constants)
    return IterationFit(model, *parts, base_ns, prefill_unseen, decode_unseen, len(models))


_Constants = dict[str, float]


@dataclass(frozen=True, slots=True)
class _Points:
    """Data for a linear fit: each duration is the sum of value x constant over all columns."""

    source: str
    """Description of the data, for reports."""
    columns: Mapping[str, Sequence[float]]
    """Values of each column, by the name of its constant."""
    durations_ns: Sequence[float]
    """Measured durations."""

    def predict(self, constants: Mapping[str, float]) -> list[float]:
        names = [name for name in self.columns if constants.get(name)]
        total = np.zeros(len(self.durations_ns))
        for name in names:
            total += constants[name] * np.asarray(self.columns[name], float)
        predicted: list[float] = total.tolist()
        return predicted

    def quality_of(self, constants: Mapping[str, float]) -> FitQuality:
        return fit_quality(self.source, self.durations_ns, self.predict(constants))


def _fit_all(
    rows: Sequence[RequestTimes], load: EngineLoad, chunk: int | None
) -> tuple[_Points | None, _Points | None, _Points | None, _Constants]:
    """Return the data used for prefill, decode and whole answers, and all constants. Raises FitError.

    The constant `base` is missing if too few requests were alone on the engine.
    """
    candidates = _alone_points(rows, load, chunk)
    prefill = _fit_prefill(candidates)
    alone = None if prefill is None else candidates
    answers: _Points | None = None
    constants: _Constants = prefill or {}
    decode = _gap_points(rows, load)
    gaps = None if decode is None else nearest(decode.columns, decode.durations_ns, ("beta",))
    if gaps is None:
        decode = None
    else:
        constants |= gaps[0]
    if alone is None or decode is None:
        answers = _answer_points(rows, load, chunk)
        constants |= _fit_answers(answers, {n: v for n, v in constants.items() if n != "base"})
    return alone, decode, answers, constants


def _unseen_errors(
    rows: Sequence[RequestTimes], load: EngineLoad, chunk: int | None, *, alone: bool, gaps: bool
) -> tuple[PredictionAccuracy | None, PredictionAccuracy | None]:
    """Fit a model to one half of the time. Return its accuracy for prefill and decode in the other half.

    The fit uses the half with the higher maximum of running requests, because a model can be wrong for higher
    loads than it was fitted to. `alone`, `gaps`: whether the whole fit used these data for prefill and
    decode.
    """
    arrivals = [row.arrival_ns for row in rows]
    middle_ns = (min(arrivals) + max(arrivals)) // 2
    halves = (
        [row for row in rows if row.arrival_ns < middle_ns],
        [row for row in rows if row.arrival_ns >= middle_ns],
    )
    running_max = [max((load.running_count(row.first_ns or 0) for row in half), default=0) for half in halves]
    fitted, other = halves if running_max[0] >= running_max[1] else halves[::-1]
    try:
        constants = _fit_all(fitted, load, chunk)[-1]
    except FitError:
        return None, None
    prefill = _alone_points(other, load, chunk) if alone and "base" in constants else None
    if prefill is not None and len(prefill.durations_ns) < 2:
        prefill = None
    decode = _gap_points(other, load, at_least=2) if gaps else None
    if not alone or not gaps:
        try:
            answers = _answer_points(other, load, chunk)
        except FitError:
            answers = None
        prefill, decode = prefill if alone else answers, decode if gaps else answers
    return _accuracy_of(prefill, constants), _accuracy_of(decode, constants)


def _accuracy_of(points: _Points | None, constants: Mapping[str, float]) -> PredictionAccuracy | None:
    if points is None:
        return None
    return prediction_accuracy(points.durations_ns, points.predict(constants))


def _alone_points(rows: Sequence[RequestTimes], load: EngineLoad, chunk: int | None) -> _Points:
    """Return the TTFTs of the requests that were alone on the engine."""
    alone = [
        row for row in rows if row.prompt is not None and row.first_ns is not None and load.was_alone(row)
    ]
    prompts = [float(row.prompt or 0) for row in alone]
    durations_ns = [float((row.first_ns or 0) - row.start_ns) for row in alone]
    iterations = [1.0 if chunk is None else float(max(1, -(-n // chunk))) for n in map(int, prompts)]
    columns = {"base": iterations, "prefill": prompts}
    return _Points("requests that had the engine to themselves", columns, durations_ns)


def _fit_prefill(points: _Points) -> _Constants | None:
    """Return the constants `base` and `prefill`; None if too few requests were alone on the engine."""
    columns = points.columns
    solved = (
        least_squares(list(columns.values()), points.durations_ns) if len(points.durations_ns) > 2 else None
    )
    if solved is None or solved[1] <= 0 or solved[0] < 0:
        return None
    return dict(zip(columns, solved, strict=True))


def _gap_points(rows: Sequence[RequestTimes], load: EngineLoad, at_least: int = GAPS_MIN) -> _Points | None:
    """Return the gaps between tokens that began when no request waited or was in prefill.

    The constants of the columns are `beta`, `step` (beta gamma) and, if all tokens have times, `context`.
    None if there are fewer gaps than `at_least`, or too few different numbers of running requests.
    """
    stride = -(-sum(max(0, len(row.times_ns) - 1) for row in rows) // GAPS_MAX) or 1
    shares, contexts, durations_ns = [], [], []
    number = 0
    for row in rows:
        times = row.times_ns
        for before_ns, t_ns in pairwise(times):
            number += 1
            if number % stride or not load.is_undisturbed(before_ns) or t_ns <= before_ns:
                continue
            d, context = load.decoding_state((before_ns + t_ns) // 2)
            shares.append((d - 1) / d if d else 0.0)
            contexts.append(float(context))
            durations_ns.append(float(t_ns - before_ns))
    if len(durations_ns) < at_least or (at_least >= GAPS_MIN and len(set(shares)) < 2):
        return None
    columns = {"beta": [1.0] * len(durations_ns), "step": shares}
    if load.has_token_times:
        columns["context"] = contexts
    return _Points("gaps between tokens while nobody waited", columns, durations_ns)


def _answer_points(rows: Sequence[RequestTimes], load: EngineLoad, chunk: int | None) -> _Points:
    """Return the times per token of whole answers. Raises FitError."""
    columns: dict[str, list[float]] = {"beta": [], "step": [], "context": [], "prefill": []}
    durations_ns = []
    for row in rows:
        n, first_ns, last_ns = row.output - 1, row.first_ns, row.last_ns
        if n + 1 < TOKENS_MIN or first_ns is None or last_ns is None or last_ns <= first_ns:
            continue
        share, context = load.means(row)
        iterations, prompts = load.prompts_processed(first_ns, last_ns)
        # Divide by the number of tokens, so that long answers do not have more weight than short answers.
        columns["beta"].append(1.0 if chunk is not None else (n + iterations) / n)
        columns["step"].append(share)
        columns["context"].append(context)
        columns["prefill"].append(prompts / n)
        durations_ns.append((last_ns - first_ns) / n)
    if len(durations_ns) < ANSWERS_MIN:
        raise FitError(
            f"too few data for the time per token: {len(durations_ns)} answers have times and at least"
            f" {TOKENS_MIN} tokens, but {ANSWERS_MIN} are needed: capture more traffic"
        )
    return _Points("whole answers, from first token to last", columns, durations_ns)


def _fit_answers(points: _Points, known: Mapping[str, float]) -> _Constants:
    """Fit the constants that are not in `known` to whole answers. Return all constants. Raises FitError."""
    columns = points.columns
    shares = columns["step"]
    if "beta" not in known and max(shares) - min(shares) < SAME:
        running = round(1 / (1 - shares[0]))
        raise FitError(
            f"the number of running requests was always {running}, so its effect cannot be fitted: capture "
            "some requests one at a time, and some many at a time"
        )
    if "beta" in known:
        known = {"step": 0.0, "context": 0.0, **known}
    rest = list(points.durations_ns)
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
