"""Count exchanges in histograms and counters for OpenTelemetry, and convert the totals to points of the SDK.

`exporter.py` feeds `MetricRecorder` with each exchange when it ends. Its sending thread takes the table of
new counts as a whole, so that neither thread waits long for the lock, adds it to `Totals`, and sends the
result of `metrics_of`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import sub
from threading import Lock
from typing import Any, Final

from opentelemetry.sdk.metrics import export as sdk

from llmtap.exchange.exchange import Exchange
from llmtap.export.buckets import Buckets, ExponentialBuckets
from llmtap.export.opentelemetry import semconv
from llmtap.export.opentelemetry.spans import TEXT_MAX, Terms
from llmtap.metrics.latency import Measured

EXPONENTIAL_MAX: Final = 160
"""Buckets of an exponential histogram. Source: OpenTelemetry metrics SDK specification, default `MaxSize`."""

NO_EXTREMES: Final[Mapping[str, Any]] = {"min": None, "max": None}

Key = tuple[str | None, ...]
"""Values of the attributes, in the order of `Recorder.names`; empty: the series of what had no room."""


@dataclass(frozen=True, slots=True)
class Point:
    measure: semconv.Measure
    attributes: list[tuple[str, str | bool | int]]
    cell: Buckets | ExponentialBuckets
    start_ns: int
    place: tuple[int, Key]


class MetricRecorder:
    """Counter of exchanges, on the thread where they end."""

    def __init__(self, names: semconv.Semconv, series_max: int, *, exponential: bool = False) -> None:
        self.names: Final = (
            names.operation, names.provider, names.request_model, names.response_model,
            semconv.TENANT, semconv.ARM, semconv.ERROR_TYPE, semconv.OUTCOME,
        )  # fmt: skip
        self.measures: list[semconv.Measure] = []
        self._of: dict[semconv.SemconvQuantity, tuple[int, ...]] = {}
        for quantity, measures in names.measures.items():
            first = len(self.measures)
            self.measures += measures
            self._of[quantity] = tuple(range(first, len(self.measures)))
        self._known: list[set[Key]] = [set() for _ in self.measures]
        self._series_max = series_max
        self._lock = Lock()
        self._fresh: dict[tuple[int, Key], Buckets | ExponentialBuckets] = {}
        self._exponential = exponential

    def take(self) -> dict[tuple[int, Key], Buckets | ExponentialBuckets]:
        """Return what was counted since the last call; for any thread."""
        with self._lock:
            fresh, self._fresh = self._fresh, {}
        return fresh

    def record(self, x: Exchange, m: Measured, terms: Terms) -> None:
        with self._lock:
            self._record(x, m, terms)

    def _record(self, x: Exchange, m: Measured, terms: Terms) -> None:
        add = self._add
        base = (
            terms.operation, terms.provider, terms.model, terms.response_model, x.tenant[:TEXT_MAX], x.arm
        )  # fmt: skip
        key = (*base, None, None)
        add(semconv.SemconvQuantity.EXCHANGES, (*base, terms.error_type, x.outcome.value), 1)
        if terms.operation is None:
            return
        # Only durations have the error's type: the other terms belong to answers.
        of_error = key if terms.error_type is None else (*base, terms.error_type, None)
        if terms.operation == "embeddings":
            add(semconv.SemconvQuantity.EMBEDDINGS_DURATION, of_error, terms.duration_ns)
            add(semconv.SemconvQuantity.EMBEDDINGS_TOKENS, key, x.tokens.input)
        else:
            add(semconv.SemconvQuantity.DURATION, of_error, terms.duration_ns)
            add(semconv.SemconvQuantity.INPUT_TOKENS, key, x.tokens.input)
            add(semconv.SemconvQuantity.OUTPUT_TOKENS, key, terms.output_tokens)
            add(semconv.SemconvQuantity.CACHED_TOKENS, key, x.tokens.cached)
            add(semconv.SemconvQuantity.CACHE_WRITE_TOKENS, key, terms.cache_write_tokens)
            add(semconv.SemconvQuantity.REASONING_TOKENS, key, x.tokens.reasoning)
        add(semconv.SemconvQuantity.SERVER_DURATION, of_error, terms.server_duration_ns)
        if not x.stream:
            return
        times = terms.chunk_times_ns
        add(semconv.SemconvQuantity.FIRST_CHUNK, key, terms.first_chunk_ns)
        add(semconv.SemconvQuantity.SERVER_FIRST_TOKEN, key, terms.server_first_token_ns)
        add(semconv.SemconvQuantity.SERVER_PER_TOKEN, key, terms.server_per_token_ns)
        add(semconv.SemconvQuantity.FIRST_CONTENT, key, m.ttft_ns)
        add(semconv.SemconvQuantity.USER_IDLE, key, m.user_idle_ns)
        self._add_many(semconv.SemconvQuantity.CHUNK_GAP, key, list(map(sub, times[1:], times)))
        self._add_many(semconv.SemconvQuantity.TBC, key, m.tbc_ns)

    def _add(self, quantity: semconv.SemconvQuantity, key: Key, value: int | None) -> None:
        if value is not None:
            for i in self._of.get(quantity, ()):
                self._cell(i, key).record(value)

    def _add_many(self, quantity: semconv.SemconvQuantity, key: Key, values: Sequence[int]) -> None:
        if values:
            for i in self._of.get(quantity, ()):
                self._cell(i, key).record_many(values)

    def _cell(self, i: int, key: Key) -> Buckets | ExponentialBuckets:
        cell = self._fresh.get((i, key))
        if cell is not None:
            return cell
        known = self._known[i]
        if key not in known:
            if len(known) < self._series_max:
                known.add(key)
            else:
                key = ()
        instrument = self.measures[i].instrument
        if self._exponential and instrument.edges:
            return self._fresh.setdefault((i, key), ExponentialBuckets(instrument.scale))
        return self._fresh.setdefault((i, key), Buckets(instrument.edges))


class Totals:
    def __init__(
        self, recorder: MetricRecorder, servers: Mapping[str, tuple[str, int]], start_ns: int = 0
    ) -> None:
        """`servers` names the upstream's host and port by arm, under "" for all others."""
        self._recorder = recorder
        self._servers = servers
        self._arm = recorder.names.index(semconv.ARM)
        self._cells: dict[tuple[int, Key], tuple[int, Buckets | ExponentialBuckets]] = {}
        self._start_ns = self._gathered_ns = start_ns

    def gather(self, now_ns: int = 0) -> Iterator[Point]:
        for at, cell in self._recorder.take().items():
            if at in self._cells:
                self._cells[at][1].merge(cell)  # type: ignore[arg-type]  # of the same kind
            else:
                self._cells[at] = self._gathered_ns, cell
        self._gathered_ns = now_ns
        measures = self._recorder.measures
        for place, (start_ns, cell) in sorted(
            self._cells.items(), key=lambda item: measures[item[0][0]].instrument.name
        ):
            measure = measures[place[0]]
            yield Point(measure, self._attributes(measure, place[1]), cell, start_ns, place)

    def forget(self, points: Sequence[Point]) -> None:
        """Count these series from zero again, because they were delivered as deltas."""
        for point in points:
            del self._cells[point.place]

    def _attributes(self, measure: semconv.Measure, key: Key) -> list[tuple[str, str | bool | int]]:
        if not key:
            return [*measure.attributes, (semconv.OVERFLOW, True)]
        out: list[tuple[str, str | bool | int]] = list(measure.attributes)
        for name, value in zip(self._recorder.names, key, strict=True):
            if value is not None:
                out.append((name, value))
        server = self._servers.get(key[self._arm] or "", self._servers.get(""))
        if server is not None:
            out += ((semconv.SERVER_ADDRESS, server[0]), (semconv.SERVER_PORT, server[1]))
        return out


def metrics_of(points: Iterable[Point], now_ns: int, delta: bool) -> list[sdk.Metric]:
    """Return these points as the SDK's exporters take them; those of one instrument follow each other."""
    temporality = sdk.AggregationTemporality.DELTA if delta else sdk.AggregationTemporality.CUMULATIVE
    found = []
    for instrument, group in groupby(points, key=lambda point: point.measure.instrument):
        ready = [_ready(point, now_ns) for point in group]
        data: Any
        if not instrument.edges:
            data = sdk.Sum(ready, temporality, is_monotonic=True)
        elif isinstance(ready[0], sdk.HistogramDataPoint):
            data = sdk.Histogram(ready, temporality)
        else:
            data = sdk.ExponentialHistogram(ready, temporality)
        found.append(sdk.Metric(instrument.name, instrument.description, instrument.unit, data))
    return found


def _ready(point: Point, now_ns: int) -> Any:
    instrument, cell, when = point.measure.instrument, point.cell, (point.start_ns, now_ns)
    attributes = dict(point.attributes)
    if isinstance(cell, ExponentialBuckets):
        scale, offset, dense = cell.dense(EXPONENTIAL_MAX)
        positive, negative = sdk.Buckets(offset, dense), sdk.Buckets(0, [])
        return sdk.ExponentialHistogramDataPoint(
            attributes, *when, cell.n, cell.total / instrument.scale, scale, cell.zeros, positive, negative,
            flags=0, **NO_EXTREMES,
        )  # fmt: skip
    counts, total = cell.read()
    if not instrument.edges:
        return sdk.NumberDataPoint(attributes, *when, total)
    bounds = [edge / instrument.scale for edge in instrument.edges]
    return sdk.HistogramDataPoint(
        attributes, *when, sum(counts), total / instrument.scale, counts, bounds, **NO_EXTREMES
    )
