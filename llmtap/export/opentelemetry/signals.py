"""Make spans and metrics of OpenTelemetry from finished exchanges, without any text of prompt or answer.

`exporter.py` calls this module. `common_values_of` collects the values that the span and the metrics of an
exchange have in common (`CommonValues`). Spans and metrics have the names of a version in `semconv.py`.
`start_span` makes the span of an exchange. The relay forwards the caller's `traceparent` unchanged, so
llmtap's span is a child of the caller's span, and the spans of a gateway behind llmtap are siblings of
llmtap's span. The spans of a pair link to each other.

`MetricRecorder` counts each exchange when it ends. The exporter's sending thread takes the whole table of new
counts, so that neither thread waits long for the lock. It adds the table to `Totals` and sends the result of
`metrics_of`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, groupby
from operator import sub
from threading import Lock
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.metrics import export as sdk
from opentelemetry.sdk.trace.id_generator import IdGenerator

from llmtap.exchange.exchange import EventLog, Exchange
from llmtap.exchange.outcome import EventClass, Outcome, Reading, TokenSource
from llmtap.exchange.trace_context import SpanIds, TraceParent
from llmtap.export.buckets import Buckets, ExponentialBuckets
from llmtap.export.opentelemetry import semconv
from llmtap.metrics.catalogue import METRICS, values_of
from llmtap.metrics.latency import Measured
from llmtap.metrics.summary import ENDED_WELL

_OWN_METRICS: Final = tuple(metric for metric in METRICS if metric.otlp is not None)
"""Metrics that no convention defines, so they have a name of llmtap's own."""
_own_values: Final = values_of(_OWN_METRICS)
TEXT_MAX: Final = 256
"""Maximum number of characters of a name from traffic; longer names are cut. Model names are shorter."""

_NO_ERROR: Final = ENDED_WELL | {Outcome.CLIENT_CANCELLED}
_EXACT_SOURCES: Final = frozenset(
    {TokenSource.USAGE, TokenSource.TOKEN_IDS, TokenSource.LOGPROBS, TokenSource.RUNNING_USAGE}
)
"""Token sources that suffice for the conventions: the provider reported the total, or each token."""
_IS_CHUNK: Final = bytes(
    code not in (EventClass.KEEPALIVE.value, EventClass.DONE.value) for code in range(256)
)
"""For each code of an EventClass: 1 if a client library returns such an event as a chunk, else 0."""


@dataclass(slots=True)
class CommonValues:
    """Values that an exchange's span and metrics have in common. `semconv.py` defines the durations."""

    operation: str | None
    """Operation in the terms of the conventions; None if the exchange does not call a model."""
    provider: str | None
    model: str | None
    response_model: str | None
    error_type: str | None
    end_ns: int
    """Latest known time of the exchange, at which the span ends."""
    duration_ns: int
    first_chunk_ns: int | None
    chunk_times_ns: list[int]
    """Times of the events that a client library returns as chunks."""
    output_tokens: int | None
    """Number of output tokens; None if only an estimate is known."""
    cache_write_tokens: int | None
    """Number of input tokens that were written to a cache."""
    server_duration_ns: int | None
    """Time in which the server answered, without the network."""
    server_first_token_ns: int | None
    server_per_token_ns: int | None
    """Time per output token at the server."""


def common_values_of(x: Exchange, m: Measured, host: str | None, provider: str | None) -> CommonValues:
    """Return the attributes and durations of an exchange that its span and the metrics have in common.

    `host`: host of the upstream. `provider`: configured provider; None: the provider that the host and the
    dialect show. Source: OpenTelemetry semantic conventions for generative AI.
    """
    t = x.timeline
    # The body of an error is no chunk of an answer: in an outage, it would make the first chunk look fast.
    is_error = x.status is not None and x.status >= 400
    times = chunk_times_ns(t.events) if x.stream and not is_error else []
    end_ns = _end_ns(x)
    completed = x.outcome in ENDED_WELL and not is_error
    output = x.tokens.output if x.tokens.source in _EXACT_SOURCES else None
    # Durations of the server begin at the last byte of the request, and are only known for complete answers.
    server_ns = m.e2e_ns
    first_token_ns = m.ttft_any_ns if x.stream and completed else None
    operation = semconv.operation_of(x.endpoint)
    return CommonValues(
        operation=operation,
        provider=None if operation is None else provider or semconv.provider_of(host, x.dialect),
        model=_cut_text(x.model),
        response_model=_cut_text(x.response_model),
        error_type=error_type(x),
        end_ns=end_ns,
        duration_ns=end_ns - t.arrival_ns,
        first_chunk_ns=times[0] - t.arrival_ns if times else None,
        chunk_times_ns=times,
        output_tokens=output,
        cache_write_tokens=_cache_write_tokens(x.usage or {}),
        server_duration_ns=server_ns,
        server_first_token_ns=first_token_ns,
        server_per_token_ns=_per_token_ns(x, server_ns, first_token_ns, output),
    )


def error_type(x: Exchange) -> str | None:
    """Return `error.type`: the status if it is 400 or more, or the outcome of a failure; else None.

    A disconnected client and a refusal are not errors. Source: semantic conventions, HTTP client spans.
    """
    if x.status is not None and x.status >= 400:
        return str(x.status)
    return None if x.outcome in _NO_ERROR else x.outcome.value


def chunk_times_ns(log: EventLog) -> list[int]:
    """Return the timestamps of all events except keep-alives and the end marker."""
    return list(compress(log.t_ns, log.classes.translate(_IS_CHUNK)))


def _end_ns(x: Exchange) -> int:
    """Return the latest known time of the exchange."""
    t = x.timeline
    points = (
        t.arrival_ns,
        t.request_end_ns,
        t.submit_ns,
        t.head_ns,
        t.first_byte_ns,
        t.response_end_ns,
        t.delivered_ns,
        t.events.t_ns[-1] if len(t.events) else None,
    )
    return max(point for point in points if point is not None)


def _per_token_ns(x: Exchange, server_ns: int | None, first_ns: int | None, output: int | None) -> int | None:
    """Return the server's time per output token after the first; None: unknown."""
    if server_ns is None or first_ns is None or output is None or output < 2:
        return None
    if x.tokens.reasoning and x.timeline.first_reasoning_ns is None:
        return None  # The reasoning was hidden, so its tokens are known, but not the time of its first token.
    return (server_ns - first_ns) // (output - 1)


def _cache_write_tokens(usage: Mapping[str, object]) -> int | None:
    """Return the number of input tokens written to a cache (fields of Anthropic, Converse, OpenRouter)."""
    details = usage.get("prompt_tokens_details")
    for source, name in (
        (usage, "cache_creation_input_tokens"),
        (usage, "cacheWriteInputTokens"),
        (details, "cache_write_tokens"),
    ):
        count = source.get(name) if isinstance(source, Mapping) else None
        if isinstance(count, int) and count >= 0:
            return count
    return None


def _cut_text(text: str | None) -> str | None:
    return None if text is None else text[:TEXT_MAX]


Value = str | bool | int | float | list[str]


class ExchangeIds(IdGenerator):
    """Gives each span the ids computed from its exchange, so that users find the span of an exchange."""

    def __init__(self) -> None:
        self.next_ids = SpanIds(0, 0)
        """Ids of the next span, to be set before the span is started."""

    def generate_trace_id(self) -> int:
        return self.next_ids.trace_id

    def generate_span_id(self) -> int:
        return self.next_ids.span_id


def start_span(
    tracer: trace.Tracer,
    x: Exchange,
    common: CommonValues,
    names: semconv.Semconv,
    parent: TraceParent | None,
    server: tuple[str, int] | None,
) -> trace.Span:
    """Start a span of the kind CLIENT for an exchange. The caller must end the span at `common.end_ns`.

    If the tracer's sampler does not select the exchange, the span records nothing.

    Args:
        names: names of the attributes.
        parent: span of the caller.
        server: host and port of the upstream.
    """
    context = Context()
    if parent is not None:
        caller = trace.SpanContext(
            int(parent.trace_id, 16), int(parent.span_id, 16), True, trace.TraceFlags(parent.flags)
        )
        context = trace.set_span_in_context(trace.NonRecordingSpan(caller), context)
    attributes = {k: _clean_value(v) for k, v in _attributes(x, common, names, server) if v is not None}
    span = tracer.start_span(
        _attribute_text(_span_name(x, common)),
        context,
        trace.SpanKind.CLIENT,
        attributes,
        [trace.Link(_span_context(partner)) for partner in x.pair.partners] if x.pair is not None else None,
        start_time=x.arrival_wall_ns,
    )
    if not span.is_recording():
        return span
    t = x.timeline
    for name, t_ns in (
        ("llmtap.submit", t.submit_ns),
        ("llmtap.first_byte", t.first_byte_ns),
        ("llmtap.first_token", t.first_token_ns if x.stream else None),
        ("llmtap.first_content", t.first_content_ns if x.stream else None),
        ("llmtap.last_token", t.last_token_ns if x.stream else None),
    ):
        if t_ns is not None:
            span.add_event(name, timestamp=t_ns + x.arrival_wall_ns - t.arrival_ns)
    if common.error_type is not None:
        span.set_status(trace.Status(trace.StatusCode.ERROR, _attribute_text(x.error or common.error_type)))
    return span


def _span_context(ids: SpanIds) -> trace.SpanContext:
    return trace.SpanContext(*ids, is_remote=False, trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED))


def _attribute_text(text: str) -> str:
    # Replace characters that UTF-8 cannot encode, because text from traffic can contain half a surrogate pair
    # (from a JSON escape).
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _clean_value(value: Value) -> Value:
    if isinstance(value, str):
        return _attribute_text(value)
    return [_attribute_text(text) for text in value] if isinstance(value, list) else value


def _span_name(x: Exchange, common: CommonValues) -> str:
    if common.operation is None:
        return x.method[:TEXT_MAX] or "HTTP"
    return common.operation if common.model is None else f"{common.operation} {common.model}"


def _attributes(
    x: Exchange, common: CommonValues, names: semconv.Semconv, server: tuple[str, int] | None
) -> "list[tuple[str, Value | None]]":
    host, port = server or (None, None)
    out: list[tuple[str, Value | None]] = [
        (semconv.HTTP_METHOD, x.method[:TEXT_MAX] or None),
        (semconv.URL_PATH, x.path[:TEXT_MAX] or None),
        (semconv.HTTP_STATUS, x.status),
        (semconv.SERVER_ADDRESS, host),
        (semconv.SERVER_PORT, port),
        (semconv.ERROR_TYPE, common.error_type),
        (semconv.EXCHANGE_ID, x.id),
        (semconv.OUTCOME, x.outcome.value),
        (semconv.TENANT, x.tenant[:TEXT_MAX]),
        (semconv.ARM, x.arm),
        (semconv.REQUEST_ID, x.request_id),
        (semconv.UNCERTAINTY, x.uncertainty_ns / 1e9),
        (semconv.SIDE, x.side),
        (semconv.PAIR_ROLE, None if x.pair is None else x.pair.role or None),
    ]
    if common.operation is None:
        return out
    kind = None if x.refusal is None else x.refusal.get("kind")
    tokens = x.tokens
    out += [
        (names.operation, common.operation),
        (names.provider, common.provider),
        (names.request_model, common.model),
        (names.response_model, common.response_model),
        (names.request_stream, True if x.stream else None),
        (names.finish_reasons, None if x.finish_reason is None else [x.finish_reason[:TEXT_MAX]]),
        (names.first_chunk, None if common.first_chunk_ns is None else common.first_chunk_ns / 1e9),
        (names.input_tokens, tokens.input),
        (names.output_tokens, common.output_tokens),
        (names.cached_tokens, tokens.cached),
        (names.cache_write_tokens, common.cache_write_tokens),
        (names.reasoning_tokens, tokens.reasoning),
        (semconv.DIALECT, x.dialect),
        (semconv.READING, x.reading.value),
        (semconv.REFUSAL_KIND, None if kind is None else str(kind)),
        (semconv.TOKEN_SOURCE, tokens.source.value),
    ]
    return out


EXPONENTIAL_MAX: Final = 160
"""Maximum number of buckets of an exponential histogram; with more, neighbours are merged. Source:
OpenTelemetry metrics SDK specification, default of `MaxSize`."""

NO_EXTREMES: Final[Mapping[str, Any]] = {"min": None, "max": None}

Key = tuple[str | None, ...]
"""Values of the attributes of a series, in the order of `MetricRecorder.names`. The empty key is the series
that counts all values above the maximum number of series."""
CellKey = tuple[int, Key]
"""Index of a measure in `MetricRecorder.measures`, and key of the series."""


@dataclass(frozen=True, slots=True)
class Point:
    """One series of a metric with its totals."""

    measure: semconv.Measure
    """Metric and attributes of the series."""
    attributes: list[tuple[str, str | bool | int]]
    cell: Buckets | ExponentialBuckets
    """Values of the series."""
    start_ns: int
    """Time at which the count of the totals began, by the wall clock."""
    cell_key: CellKey


class MetricRecorder:
    """Counts exchanges for metrics. `record` is called on the thread on which exchanges end."""

    def __init__(self, names: semconv.Semconv, series_max: int, *, exponential: bool = False) -> None:
        self.names: Final = (
            names.operation,
            names.provider,
            names.request_model,
            names.response_model,
            semconv.TENANT,
            semconv.ARM,
            semconv.ERROR_TYPE,
            semconv.OUTCOME,
        )
        self.measures: list[semconv.Measure] = []
        self._indexes_of: dict[str, tuple[int, ...]] = {}
        """For each quantity, the indexes of its measures in `measures`."""
        for quantity, measures in names.measures.items():
            first = len(self.measures)
            self.measures += measures
            self._indexes_of[quantity] = tuple(range(first, len(self.measures)))
        self._known_keys: list[set[Key]] = [set() for _ in self.measures]
        """For each measure: attributes of its series, for the limit on series."""
        self._series_max = series_max
        self._lock = Lock()
        self._new_values: dict[CellKey, Buckets | ExponentialBuckets] = {}
        """By measure and attributes: values since the latest `take`."""
        self._exponential = exponential
        """Whether to count in exponential buckets."""

    def take(self) -> dict[CellKey, Buckets | ExponentialBuckets]:
        """Return the counts since the previous call, and reset them. Any thread can call this method."""
        with self._lock:
            new_values, self._new_values = self._new_values, {}
        return new_values

    def record(self, x: Exchange, m: Measured, common: CommonValues) -> None:
        with self._lock:
            self._record(x, m, common)

    def _record(self, x: Exchange, m: Measured, common: CommonValues) -> None:
        add = self._add
        base = (
            common.operation,
            common.provider,
            common.model,
            common.response_model,
            x.tenant[:TEXT_MAX],
            x.arm,
        )
        key = (*base, None, None)
        add("exchanges", (*base, common.error_type, x.outcome.value), (1,))
        if common.operation is None:
            return
        # Only durations have the error type as an attribute, because the other figures describe answers.
        duration_key = key if common.error_type is None else (*base, common.error_type, None)
        tokens = x.tokens
        add("server_duration", duration_key, (common.server_duration_ns,))
        if common.operation == "embeddings":
            add("embeddings_duration", duration_key, (common.duration_ns,))
            add("embeddings_tokens", key, (tokens.input,))
        else:
            add("duration", duration_key, (common.duration_ns,))
            for name, n in (
                ("input", tokens.input),
                ("output", common.output_tokens),
                ("cached", tokens.cached),
                ("cache_write", common.cache_write_tokens),
                ("reasoning", tokens.reasoning),
            ):
                add(f"{name}_tokens", key, (n,))
        if not x.stream or x.reading is Reading.INFERRED:
            return  # Do not mix exact times with times of tokens that were inferred from an unknown dialect.
        for quantity, ns in (
            ("first_chunk", common.first_chunk_ns),
            ("server_first_token", common.server_first_token_ns),
            ("server_per_token", common.server_per_token_ns),
        ):
            add(quantity, key, (ns,))
        for metric, value in zip(_OWN_METRICS, _own_values(m), strict=True):
            add(metric.name, key, value if metric.pooled else (None if value is None else round(value),))
        times = common.chunk_times_ns
        add("chunk_gap", key, list(map(sub, times[1:], times)))

    def _add(self, quantity: str, key: Key, values: Sequence[int | None]) -> None:
        """Record the values of a quantity. Record nothing for `(None,)`: the quantity does not apply."""
        if values and values[0] is not None:
            for i in self._indexes_of.get(quantity, ()):
                self._cell(i, key).record_many(values)  # type: ignore[arg-type]  # Only the first can be None.

    def _cell(self, i: int, key: Key) -> Buckets | ExponentialBuckets:
        """Return the buckets of a series; above the limit on series, those of the overflow series."""
        cell = self._new_values.get((i, key))
        if cell is not None:
            return cell
        known = self._known_keys[i]
        if key not in known:
            if len(known) < self._series_max:
                known.add(key)
            else:
                key = ()
        instrument = self.measures[i].instrument
        if self._exponential and instrument.edges:
            return self._new_values.setdefault((i, key), ExponentialBuckets(instrument.scale))
        return self._new_values.setdefault((i, key), Buckets(instrument.edges))


class Totals:
    """Totals of all series since the start, or (with delta temporality) since the latest delivery."""

    def __init__(
        self, recorder: MetricRecorder, servers: Mapping[str, tuple[str, int]], start_ns: int = 0
    ) -> None:
        """`servers`: host and port of the upstream by arm; the key "" is for all other arms."""
        self._recorder = recorder
        self._servers = servers
        self._arm_index = recorder.names.index(semconv.ARM)
        """Position of the arm in the attributes of a series."""
        self._cells: dict[CellKey, tuple[int, Buckets | ExponentialBuckets]] = {}
        """Start time and totals of each series."""
        self._start_ns = self._gathered_ns = start_ns
        """`_gathered_ns`: time of the latest `gather`, from which a new series counts."""

    def gather(self, now_ns: int = 0) -> Iterator[Point]:
        """Add the recorder's new counts, and yield all series, sorted by the instrument."""
        for cell_key, cell in self._recorder.take().items():
            if cell_key in self._cells:
                self._cells[cell_key][1].merge(cell)  # type: ignore[arg-type]  # Both have the same class.
            else:
                self._cells[cell_key] = self._gathered_ns, cell
        self._gathered_ns = now_ns
        measures = self._recorder.measures
        for cell_key, (start_ns, cell) in sorted(
            self._cells.items(), key=lambda item: measures[item[0][0]].instrument.name
        ):
            index, key = cell_key
            measure = measures[index]
            yield Point(measure, self._attributes(measure, key), cell, start_ns, cell_key)

    def forget(self, points: Sequence[Point]) -> None:
        """Start the series of these points from 0 again, because their counts were delivered as deltas."""
        for point in points:
            del self._cells[point.cell_key]

    def _attributes(self, measure: semconv.Measure, key: Key) -> list[tuple[str, str | bool | int]]:
        if not key:
            return [*measure.attributes, (semconv.OVERFLOW, True)]
        out: list[tuple[str, str | bool | int]] = list(measure.attributes)
        for name, value in zip(self._recorder.names, key, strict=True):
            if value is not None:
                out.append((name, value))
        server = self._servers.get(key[self._arm_index] or "", self._servers.get(""))
        if server is not None:
            out += ((semconv.SERVER_ADDRESS, server[0]), (semconv.SERVER_PORT, server[1]))
        return out


def metrics_of(points: Iterable[Point], now_ns: int, delta: bool) -> list[sdk.Metric]:
    """Return the points in the form of the SDK's exporters. Points of one instrument must be adjacent."""
    temporality = sdk.AggregationTemporality.DELTA if delta else sdk.AggregationTemporality.CUMULATIVE
    metrics = []
    for instrument, group in groupby(points, key=lambda point: point.measure.instrument):
        sdk_points = [_sdk_point(point, now_ns) for point in group]
        data: Any
        if not instrument.edges:
            data = sdk.Sum(sdk_points, temporality, is_monotonic=True)
        elif isinstance(sdk_points[0], sdk.HistogramDataPoint):
            data = sdk.Histogram(sdk_points, temporality)
        else:
            data = sdk.ExponentialHistogram(sdk_points, temporality)
        metrics.append(sdk.Metric(instrument.name, instrument.description, instrument.unit, data))
    return metrics


def _sdk_point(point: Point, now_ns: int) -> Any:
    """Return a value of a metric in the form of OpenTelemetry's SDK."""
    instrument, cell, period = point.measure.instrument, point.cell, (point.start_ns, now_ns)
    attributes = dict(point.attributes)
    if isinstance(cell, ExponentialBuckets):
        scale, offset, dense = cell.dense_counts(EXPONENTIAL_MAX)
        positive, negative = sdk.Buckets(offset, dense), sdk.Buckets(0, [])
        return sdk.ExponentialHistogramDataPoint(
            attributes,
            *period,
            cell.value_count,
            cell.value_sum / instrument.scale,
            scale,
            cell.zero_count,
            positive,
            negative,
            flags=0,
            **NO_EXTREMES,
        )
    counts, total = cell.read()
    if not instrument.edges:
        return sdk.NumberDataPoint(attributes, *period, total)
    bounds = [edge / instrument.scale for edge in instrument.edges]
    return sdk.HistogramDataPoint(
        attributes, *period, sum(counts), total / instrument.scale, counts, bounds, **NO_EXTREMES
    )
