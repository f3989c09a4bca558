"""Count finished exchanges for `/metrics`, and render the counts in a format of Prometheus.

`Exposition` is a sink of the meter's pipeline: an exchange is counted once, at its end, in the `Series` of
its tenant, model and arm; calls to MCP servers are counted separately (`on_call`). A scrape copies the counts
on the meter's event loop (`Exposition.freeze`). A worker thread renders the copy (`FrozenExposition.render`,
with `writers.py`), because this can take seconds.
"""

import platform
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import InfoMetricFamily, Metric
from prometheus_client.samples import Exemplar

from llmtap import native
from llmtap.exchange.exchange import Exchange
from llmtap.exchange.outcome import Outcome, Reading
from llmtap.exchange.trace_context import TraceParent, parse_trace_parent
from llmtap.export.buckets import (
    ADDED_EDGES_NS,
    DURATION_EDGES_NS,
    Buckets,
    DualBuckets,
    ExponentialBuckets,
    configured_edges,
)
from llmtap.export.prometheus.catalogue import (
    ADDED,
    CALLS,
    COUNTERS,
    HISTOGRAMS,
    HistogramFamily,
    Value,
    collect,
)
from llmtap.export.prometheus.writers import CONTENT_TYPE, ProtobufWriter, TextWriter, is_preferred
from llmtap.export.sinks import SeriesKey
from llmtap.metrics import catalogue, summary
from llmtap.metrics.catalogue import FAMILIES, OF_AN_EXCHANGE, Answers, values_of
from llmtap.metrics.latency import Measured
from llmtap.metrics.objectives import Fluidity, Objectives, fluidity_of

EXEMPLARS_MAX: Final = 20_000
"""Maximum number of exemplars (0.7 KB each); the oldest are removed. 2,000 series of a histogram have 60,000
buckets. Without this limit, the exemplars would need much memory, and many of them would be old."""

CALLS_MAX: Final = 1_000
"""Maximum number of combinations of tenant, method, tool and outcome of MCP calls. Calls with further
combinations are counted as method `other`."""

BucketKey = tuple[str, tuple[str, ...], int]
"""Name of a metric, label values, and number of the bucket."""


class Exemplars:
    """Newest exemplar (a value and its trace) of each bucket of some histograms."""

    def __init__(self, exemplars_max: int = EXEMPLARS_MAX) -> None:
        self._newest: OrderedDict[BucketKey, Exemplar] = OrderedDict()
        """Newest exemplar of each bucket; the oldest is first, and is dropped at the limit."""
        self._exemplars_max = exemplars_max

    def add(self, key: BucketKey, value: float, parent: TraceParent, wall_ns: int) -> None:
        trace = {"trace_id": parent.trace_id, "span_id": parent.span_id}
        self._newest[key] = Exemplar(trace, value, wall_ns / 1e9)
        self._newest.move_to_end(key)
        if len(self._newest) > self._exemplars_max:
            self._newest.popitem(last=False)

    def freeze(self) -> dict[BucketKey, Exemplar]:
        return dict(self._newest)


def group_by_series(
    exemplars: Mapping[BucketKey, Exemplar],
) -> dict[str, dict[tuple[str, ...], dict[int, Exemplar]]]:
    """Return exemplars grouped by metric, then by label values, then by bucket, as the writers need them."""
    by_metric: dict[str, dict[tuple[str, ...], dict[int, Exemplar]]] = {}
    for (metric, labels, bucket), exemplar in exemplars.items():
        by_metric.setdefault(metric, {}).setdefault(labels, {})[bucket] = exemplar
    return by_metric


_Key = tuple[str, tuple[str, ...]]
"""Key of a metric in `HISTOGRAMS` or `COUNTERS`, and the values of the labels that only this metric has."""
_STREAM_METRICS: Final = tuple(
    metric for metric in OF_AN_EXCHANGE if metric.answers is Answers.STREAMS and metric.family is not None
)
_stream_values: Final = values_of(_STREAM_METRICS)


def _histogram_key(metric: catalogue.Metric, reading: str) -> _Key:
    """Return the key of the histogram that counts a metric of answers with this reading."""
    assert metric.family is not None
    own = (reading,) if metric.family.reading else ()
    return metric.family.key, own if metric.label is None else (*own, metric.label)


_STREAM_KEYS: Final = {
    reading.value: tuple(_histogram_key(metric, reading.value) for metric in _STREAM_METRICS)
    for reading in Reading
}
"""For each reading of an answer: keys of the histograms that count the values of `_STREAM_METRICS`."""
GUARDRAILS_MAX: Final = 32
"""Maximum number of combinations of a guardrail's kind and source in a series; others count as `other`."""
_ZERO_COUNTERS: Final = (
    *((("exchanges", (outcome.value,))) for outcome in Outcome),
    *((("no_token", (reason,))) for reason in summary.NO_TOKEN_REASONS),
)

_FrozenSeries = tuple[list[_Key], list[Any], dict[_Key, float], list[ExponentialBuckets] | None]
"""Copy of a series: keys of histograms; their counts and sums, alternately; counters; native buckets."""


def families_for(
    bounds: Sequence[tuple[str, int]], edges: Mapping[str, Sequence[float]] | None = None
) -> dict[str, HistogramFamily]:
    """Return HISTOGRAMS with additional edges at and near each bound (objective, ns) that operators set.

    `edges`: edges to use instead of the defaults, by kind, in seconds (`buckets.configured_edges`).
    """
    families = {
        key: replace(family, edges=configured_edges(family.edges, edges or {}))
        for key, family in HISTOGRAMS.items()
    }
    for name, bound_ns in bounds:
        for family in FAMILIES:
            if name in family.exact_for:
                families[family.key] = families[family.key].with_bound(bound_ns)
    return families


class Series:
    """Counters and histograms of one tenant, model and arm."""

    __slots__ = ("_cells", "_families", "_native", "counts")

    def __init__(self, families: Mapping[str, HistogramFamily], *, native: bool = False) -> None:
        self._families, self._native = families, native
        """`_families`: by key, declaration of a histogram. `_native`: whether to count for native
        histograms, too."""
        self._cells: dict[_Key, Buckets] = {}
        """By key of a histogram and own labels: its buckets."""
        # Start at 0: if a counter appeared with its first event, rate() would not count this event.
        self.counts: dict[_Key, float] = dict.fromkeys(_ZERO_COUNTERS, 0)
        """By key of a counter and own labels: its value."""

    def freeze(self) -> _FrozenSeries:
        """Return a copy of all counts."""
        cells = self._cells.values()
        # Copy up to 30,000 histograms into few objects, so that the garbage collector has little work.
        counts_and_sums = chain.from_iterable(cell.read() for cell in cells)
        native = [cell.exponential.copy() for cell in cells if isinstance(cell, DualBuckets)]
        return list(self._cells), list(counts_and_sums), self.counts.copy(), native if self._native else None

    def add(self, x: Exchange, m: Measured) -> None:
        """Add a measured exchange to the counters and histograms of this series (`catalogue.py`)."""
        self._count("exchanges", 1, x.outcome.word)
        tokens = x.tokens
        if tokens.output is not None:
            self._count("output", tokens.output, tokens.source.word)
        for name, n in (("input", tokens.input), ("cached", tokens.cached), ("reasoning", tokens.reasoning)):
            if n is not None:
                self._count(name, n)
        if x.outcome is Outcome.CLIENT_CANCELLED and (after := summary.tokens_after_cancel(x, m)):
            self._count("after_cancel", after)
        if not m.output_events and (reason := summary.no_token_reason(x, m)) is not None:
            self._count("no_token", 1, reason)
        if x.refusal is not None or x.guardrail is not None:
            self._count_guardrail(x)
        t = x.timeline
        if t.head_ns is not None and t.submit_ns is not None and t.head_ns >= t.submit_ns:
            self._buckets("headers").record(t.head_ns - t.submit_ns)
        if m.ttfb_ns is not None:
            self._buckets("ttfb").record(m.ttfb_ns)
        if m.e2e_ns is not None and x.outcome in summary.ENDED_WELL:
            self._buckets("duration").record(m.e2e_ns)
        if x.server_timing:
            for name, ns in summary.clock_disagreement(x, m).items():
                self._buckets("clock", name, "ours" if ns >= 0 else "server").record(abs(ns))
        if x.stream:
            self._add_stream(x, m)

    def _add_stream(self, x: Exchange, m: Measured) -> None:
        t, reading = x.timeline, x.reading.word
        for key, ns in zip(_STREAM_KEYS[reading], _stream_values(m), strict=True):
            if ns is not None:
                self._cell(key).record(ns if type(ns) is int else round(ns))
        if t.first_refusal_ns is not None and t.submit_ns is not None:
            self._buckets("ttft", reading, "refusal").record(max(0, t.first_refusal_ns - t.submit_ns))
        is_inferred = x.reading is Reading.INFERRED
        if m.smooth_benefit is not None and x.tokens.output is not None and not is_inferred:
            self._count("smooth_tokens", x.tokens.output)
            self._count("smooth_penalty", x.tokens.output - m.smooth_benefit)
        if m.tbc_ns:
            self._buckets("chunk_gap", reading).record_many(m.tbc_ns)
        for option, gaps_ns in (("B", m.itl_b_ns), ("B-even", m.itl_even_ns), ("C", m.itl_c_ns)):
            if gaps_ns:
                self._buckets("token_gap", reading, option).record_many(gaps_ns)
        if m.tokens_per_chunk and not is_inferred:
            self._buckets("chunk_tokens").record_many(m.tokens_per_chunk)
        self._count("events", len(t.events))
        self._count("reads", x.reads)
        self._count("bursts", m.bursts.count)
        self._count("burst_events", m.bursts.events)

    def _count_guardrail(self, x: Exchange) -> None:
        if x.refusal is not None:
            kind, source = x.refusal.get("kind"), x.refusal.get("source")
        else:
            assert x.guardrail is not None
            kind, source = x.guardrail.get("action"), x.guardrail.get("signal")
        labels = (str(kind or "unknown"), str(source or "unknown"))
        if ("guardrail", labels) not in self.counts:
            known = sum(key == "guardrail" for key, _ in self.counts)
            if known >= GUARDRAILS_MAX:
                labels = ("other", "other")
        self._count("guardrail", 1, *labels)

    def count_deadlines(self, fluidity: Fluidity) -> None:
        self._count("deadlines", fluidity.tokens_in_time, "met")
        self._count("deadlines", fluidity.missed_deadlines, "missed")

    def count_uncertain(self) -> None:
        self._count("uncertain", 1)

    def _count(self, name: str, n: float, *labels: str) -> None:
        key = (name, labels)
        self.counts[key] = self.counts.get(key, 0) + n

    def _buckets(self, name: str, *labels: str) -> Buckets:
        return self._cell((name, labels))

    def _cell(self, key: _Key) -> Buckets:
        """Return the buckets of a histogram; they are made at its first value."""
        cell = self._cells.get(key)
        if cell is None:
            family = self._families[key[0]]
            cell = DualBuckets(family.edges, family.unit) if self._native else Buckets(family.edges)
            self._cells[key] = cell
        return cell


_SeriesLabels = tuple[str, str, str]
Cell = tuple[Any, ...]
"""A series of a histogram: label values, counts by bucket, sum, and native buckets if it has any."""


class Exposition:
    """All counts of exchanges since the meter started.

    Args:
        version: version of llmtap.
        objectives: objectives of each SLO class. Their bounds become edges of histograms, and deadlines of
            tokens.
        edges: edges to use instead of the defaults, by kind, in seconds.
        native: count native histograms in addition, and offer the protobuf format.
    """

    def __init__(
        self,
        version: str,
        objectives: Mapping[str, Objectives] | None = None,
        edges: Mapping[str, Sequence[float]] | None = None,
        *,
        native: bool = False,
    ) -> None:
        self._version, self._native = version, native
        self._objectives = objectives or {}
        """By class of tenants: objectives, whose bounds become edges of buckets."""
        bounds = [bound for one in self._objectives.values() for bound in one.bounds]
        self._families = families_for(bounds, edges)
        """By key: declaration of a histogram."""
        self._series: dict[_SeriesLabels, Series] = {}
        self._added_latency = {
            point: Buckets(ADDED_EDGES_NS) for point in ("request", "first_chunk", "chunk")
        }
        """By part of an exchange: latency that llmtap added."""
        self._calls: dict[tuple[str, str, str, str], Buckets] = {}
        """By tenant, method, tool and outcome of an MCP call: its durations."""
        self._unparsed = 0
        """Number of events that no dialect could read."""
        self._without_dialect = summary.AnswersWithoutDialect()
        self._exemplars = Exemplars()

    def on_end(self, x: Exchange, m: Measured, key: SeriesKey, met: bool | None) -> None:
        labels = key[:3]
        series = self._series.get(labels)
        if series is None:
            series = self._series[labels] = Series(self._families, native=self._native)
        series.add(x, m)
        objectives = self._objectives.get(key.slo) if x.stream and m.tokens_known else None
        if objectives is not None and (fluidity := fluidity_of(x, m, objectives)) is not None:
            series.count_deadlines(fluidity)
        if x.uncertain:
            series.count_uncertain()
        self._unparsed += x.unparsed_events
        self._without_dialect.add(x)
        added = x.added
        if added.request_ns is not None:
            self._added_latency["request"].record(added.request_ns)
        if added.first_chunk_ns is not None:
            self._added_latency["first_chunk"].record(added.first_chunk_ns)
        self._added_latency["chunk"].record_many(added.chunks_ns)
        if x.trace_parent is not None:
            self._add_exemplars(x, m, labels)

    def on_call(self, x: Exchange, m: Measured, *, trusted: bool = True) -> None:
        """Count a call to an MCP server.

        `trusted`: whether the call can add a new combination of labels; otherwise it counts as `other`.
        """
        method, _, name = (x.call or "").partition(" ")
        key = x.tenant, method, name, x.outcome.value
        if key not in self._calls and (not trusted or len(self._calls) >= CALLS_MAX):
            key = x.tenant, "other", "", x.outcome.value
        cell = self._calls.get(key)
        if cell is None:
            cell = self._calls[key] = Buckets(DURATION_EDGES_NS)
        cell.record(m.e2e_ns or 0)

    def _add_exemplars(self, x: Exchange, m: Measured, series_labels: _SeriesLabels) -> None:
        parent = parse_trace_parent(x.trace_parent)
        if parent is None or not parent.sampled or m.e2e_ns is None or x.timeline.response_end_ns is None:
            return
        wall_ns = x.arrival_wall_ns + x.timeline.response_end_ns - x.timeline.arrival_ns
        ttft, duration = self._families["ttft"], self._families["duration"]
        for family, labels, value in (
            (ttft, (*series_labels, x.reading.value, "content"), m.ttft_ns if x.stream else None),
            (ttft, (*series_labels, x.reading.value, "any"), m.ttft_any_ns if x.stream else None),
            (duration, series_labels, m.e2e_ns if x.outcome in summary.ENDED_WELL else None),
        ):
            if value is not None:
                key = family.name, labels, bisect_left(family.edges, value)
                self._exemplars.add(key, value / family.unit, parent, wall_ns)

    def freeze(
        self,
        values: Mapping[str, Value] | None = None,
        histograms: Sequence[tuple[HistogramFamily, Sequence[Cell]]] = (),
        helps: Mapping[str, str] | None = None,
    ) -> "FrozenExposition":
        """Return a copy of all current counts. Call this method on the thread that calls `on_end`.

        Args:
            values: values of the metrics about llmtap itself, by name in `catalogue.SELF`. The caller must
                not change them later.
            histograms: histograms about llmtap itself and about pairs, with their series.
            helps: by name of a metric, the help text to use instead of the declared text.
        """
        # Only copy the counts here, because sorting and formatting take longer: another thread does that.
        return FrozenExposition(
            self._version,
            self._families,
            [(labels, s.freeze()) for labels, s in self._series.items()],
            {point: buckets.read() for point, buckets in self._added_latency.items()},
            [(labels, *buckets.read()) for labels, buckets in self._calls.items()],
            {
                "unparsed_events": self._unparsed,
                "answers_without_dialect": {
                    (*place,): n for place, n in self._without_dialect.counts.items()
                },
                **(values or {}),
            },
            histograms,
            helps or {},
            self._exemplars.freeze(),
            self._native,
        )


def format_name(accept: str, *, native: bool) -> str:
    """Return the content type with which `FrozenExposition.render` answers an Accept header."""
    return CONTENT_TYPE if native and is_preferred(accept) else choose_encoder(accept)[1]


@dataclass(frozen=True, slots=True, eq=False)
class FrozenExposition:
    """Copy of all counts, which any thread can read."""

    version: str
    families: Mapping[str, HistogramFamily]
    series: Sequence[tuple[_SeriesLabels, _FrozenSeries]]
    added: Mapping[str, tuple[Sequence[int], int]]
    """By part of an exchange: counts and sum of the latency that llmtap added."""
    calls: Sequence[Cell]
    """Durations of MCP calls, by labels."""
    values: Mapping[str, Value]
    """Values of the metrics about llmtap itself."""
    histograms: Sequence[tuple[HistogramFamily, Sequence[Cell]]]
    """Histograms about llmtap itself."""
    helps: Mapping[str, str]
    """By name of a metric: help text that replaces the declared one."""
    exemplars: Mapping[BucketKey, Exemplar]
    native: bool = False
    """Whether there are native histograms, too."""

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return the exposition and its content type, in the format that the Accept header requests."""
        if self.native and is_preferred(accept):
            protobuf = ProtobufWriter()
            self._write(protobuf)
            for metric in self.collect():
                protobuf.write_metric(metric)
            return protobuf.content(), CONTENT_TYPE
        encode, content_type = choose_encoder(accept)
        writer = TextWriter(openmetrics=content_type.startswith("application/openmetrics-text"))
        self._write(writer)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return writer.content() + encode(registry), content_type

    def _write(self, writer: TextWriter | ProtobufWriter) -> None:
        exemplars = group_by_series(self.exemplars)
        for family, cells in self._histograms():
            writer.write_histogram(family, cells, exemplars.get(family.name))
        for name, rows in self._counters().items():
            writer.write_counter(COUNTERS[name], rows)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics about llmtap itself. prometheus_client calls this method of a collector."""
        yield from collect(self.values, self.helps)
        yield InfoMetricFamily(
            "llmtap_build",
            "Version of the meter, its Python, and the implementation of its per-event path",
            {"version": self.version, "python": platform.python_version(), "implementation": native.NAME},
        )

    def _histograms(self) -> Iterator[tuple[HistogramFamily, Sequence[Cell]]]:
        rows_by_family: dict[str, list[Cell]] = {}
        for series_labels, (keys, counts_and_sums, _, native_buckets) in self.series:
            for (name, own_labels), counts, total, buckets in zip(
                keys,
                counts_and_sums[::2],
                counts_and_sums[1::2],
                native_buckets or repeat(None, len(keys)),
                strict=True,
            ):
                labels = (*series_labels, *own_labels)
                rows_by_family.setdefault(name, []).append((labels, counts, total, buckets))
        # ITL by option A is the gap between chunks. Gaps are counted once, and exported under both names.
        gaps = [((*labels, "A"), *rest) for labels, *rest in rows_by_family.get("chunk_gap", ())]
        if gaps:
            rows_by_family["token_gap"] = gaps + rows_by_family.get("token_gap", [])
        for name, rows in rows_by_family.items():
            yield self.families[name], rows
        yield ADDED, [((point,), counts, total) for point, (counts, total) in self.added.items()]
        if self.calls:
            yield CALLS, self.calls
        yield from self.histograms

    def _counters(self) -> dict[str, list[tuple[tuple[str, ...], float]]]:
        rows_by_metric: dict[str, list[tuple[tuple[str, ...], float]]] = {}
        for series_labels, (_, _, counts, _) in self.series:
            for (name, own_labels), n in counts.items():
                rows_by_metric.setdefault(name, []).append(((*series_labels, *own_labels), n))
        return rows_by_metric
