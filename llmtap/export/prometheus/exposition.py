"""Count finished exchanges for `/metrics`, and render the counts in a format of Prometheus.

`Exposition` is a sink of the meter's pipeline: an exchange is counted once, at its end, in a `Series`
(`series.py`); calls to MCP servers are counted apart (`called`). A scrape copies the counts on the meter's
loop (`Exposition.freeze`) and renders the copy in a worker thread (`Frozen.render`, with `writers.py`), which
may take seconds.
"""

import platform
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import InfoMetricFamily, Metric
from prometheus_client.samples import Exemplar

from llmtap import native
from llmtap.exchange.exchange import Exchange
from llmtap.export.buckets import ADDED_EDGES_NS, DURATION_EDGES_NS, Buckets
from llmtap.export.prometheus.catalogue import ADDED, CALLS, COUNTERS, LAG, HistogramFamily, Value, collect
from llmtap.export.prometheus.series import FrozenSeries, Series, families_for
from llmtap.export.prometheus.writers import CONTENT_TYPE, ProtobufWriter, TextWriter, is_preferred
from llmtap.export.sinks import SeriesKey
from llmtap.export.trace_context import TraceParent, parse_trace_parent
from llmtap.metrics.latency import Measured
from llmtap.metrics.objectives import Objectives, fluidity_of
from llmtap.metrics.summary import ENDED_WELL

EXEMPLARS_MAX: Final = 20_000
"""Newest exemplars: 0.7 KB each; 2,000 series of a histogram have 60,000 buckets, most with old ones."""

CALLS_MAX: Final = 1_000
"""Combinations of tenant, method, tool and outcome of MCP; the methods of further ones are `other`."""

Place = tuple[str, tuple[str, ...], int]


class Exemplars:
    def __init__(self, most: int = EXEMPLARS_MAX) -> None:
        self._last: OrderedDict[Place, Exemplar] = OrderedDict()
        self._most = most

    def note(self, place: Place, value: float, parent: TraceParent, wall_ns: int) -> None:
        traced = {"trace_id": parent.trace_id, "span_id": parent.span_id}
        self._last[place] = Exemplar(traced, value, wall_ns / 1e9)
        self._last.move_to_end(place)
        if len(self._last) > self._most:
            self._last.popitem(last=False)

    def freeze(self) -> dict[Place, Exemplar]:
        return dict(self._last)


def by_series(kept: Mapping[Place, Exemplar]) -> dict[str, dict[tuple[str, ...], dict[int, Exemplar]]]:
    """Sort exemplars by metric, labels and bucket, as `TextWriter` takes them."""
    found: dict[str, dict[tuple[str, ...], dict[int, Exemplar]]] = {}
    for (metric, labels, bucket), exemplar in kept.items():
        found.setdefault(metric, {}).setdefault(labels, {})[bucket] = exemplar
    return found


_Who = tuple[str, str, str]
Cell = tuple[Any, ...]
"""Labels, counts by bucket, and sum of a histogram's series; then its native buckets, if it has some."""


class Exposition:
    """Everything counted since the meter started.

    Bounds of `objectives` become edges of histograms and deadlines of tokens. `edges`: other edges in
    seconds, by kind. `native`: also count native histograms, and offer the protobuf format.
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
        bounds = [bound for one in self._objectives.values() for bound in one.bounds]
        self._families = families_for(bounds, edges)
        self._series: dict[_Who, Series] = {}
        self._added = {point: Buckets(ADDED_EDGES_NS) for point in ("request", "first_chunk", "chunk")}
        self._calls: dict[tuple[str, str, str, str], Buckets] = {}
        self._unparsed = 0
        self._exemplars = Exemplars()

    def ended(self, x: Exchange, m: Measured, key: SeriesKey, met: bool | None) -> None:
        who = key[:3]
        series = self._series.get(who)
        if series is None:
            series = self._series[who] = Series(self._families, native=self._native)
        series.add(x, m)
        objectives = self._objectives.get(key.slo) if x.stream else None
        if objectives is not None and (found := fluidity_of(x, m, objectives)) is not None:
            series.deadlines(found)
        if x.uncertain:
            series.uncertain()
        self._unparsed += x.unparsed_events
        added = x.added
        if added.request_ns is not None:
            self._added["request"].record(added.request_ns)
        if added.first_chunk_ns is not None:
            self._added["first_chunk"].record(added.first_chunk_ns)
        self._added["chunk"].record_many(added.chunks_ns)
        if x.trace_parent is not None:
            self._note_trace(x, m, who)

    def called(self, x: Exchange, m: Measured) -> None:
        method, _, name = (x.call or "").partition(" ")
        key = x.tenant, method, name, x.outcome.value
        if key not in self._calls and len(self._calls) >= CALLS_MAX:
            key = x.tenant, "other", "", x.outcome.value
        cell = self._calls.get(key)
        if cell is None:
            cell = self._calls[key] = Buckets(DURATION_EDGES_NS)
        cell.record(m.e2e_ns or 0)

    def _note_trace(self, x: Exchange, m: Measured, who: _Who) -> None:
        parent = parse_trace_parent(x.trace_parent)
        if parent is None or not parent.sampled or m.e2e_ns is None or x.timeline.response_end_ns is None:
            return
        wall_ns = x.arrival_wall_ns + x.timeline.response_end_ns - x.timeline.arrival_ns
        ttft, duration = self._families["ttft"], self._families["duration"]
        for family, labels, value in (
            (ttft, (*who, "content"), m.ttft_ns if x.stream else None),
            (ttft, (*who, "any"), m.ttft_any_ns if x.stream else None),
            (duration, who, m.e2e_ns if x.outcome in ENDED_WELL else None),
        ):
            if value is not None:
                place = family.name, labels, bisect_left(family.edges, value)
                self._exemplars.note(place, value / family.unit, parent, wall_ns)

    def freeze(
        self,
        values: Mapping[str, Value] | None = None,
        lags: Sequence[Cell] = (),
        helps: Mapping[str, str] | None = None,
    ) -> "Frozen":
        """Return a copy of all counts as they are now. Call it where `ended` is called.

        Args:
            values: those of llmtap itself, by name in `catalogue.SELF`; they must not change any more.
            lags: the relays' histograms of loop lag. helps: replaces the help of some metrics.
        """
        # Sorting and formatting run in another thread: only copying must happen here.
        return Frozen(
            self._version, self._families, [(who, s.freeze()) for who, s in self._series.items()],
            {point: buckets.read() for point, buckets in self._added.items()},
            [(labels, *buckets.read()) for labels, buckets in self._calls.items()],
            {"unparsed_events": self._unparsed, **(values or {})}, lags, helps or {},
            self._exemplars.freeze(), self._native,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Frozen:
    version: str
    families: Mapping[str, HistogramFamily]
    series: Sequence[tuple[_Who, FrozenSeries]]
    added: Mapping[str, tuple[Sequence[int], int]]
    calls: Sequence[Cell]
    values: Mapping[str, Value]
    lags: Sequence[Cell]
    helps: Mapping[str, str]
    exemplars: Mapping[Place, Exemplar]
    native: bool = False

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The exposition and its content type, in the format that the Accept header asks for."""
        if self.native and is_preferred(accept):
            protobuf = ProtobufWriter()
            self._write(protobuf)
            for metric in self.collect():
                protobuf.metric(metric)
            return protobuf.bytes(), CONTENT_TYPE
        encode, content_type = choose_encoder(accept)
        writer = TextWriter(openmetrics=content_type.startswith("application/openmetrics-text"))
        self._write(writer)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return writer.bytes() + encode(registry), content_type

    def _write(self, writer: TextWriter | ProtobufWriter) -> None:
        exemplars = by_series(self.exemplars)
        for family, cells in self._histograms():
            writer.histogram(family, cells, exemplars.get(family.name))
        for name, rows in self._counters().items():
            writer.counter(COUNTERS[name], rows)

    def collect(self) -> Iterator[Metric]:
        """Yield the few series without tenant: a prometheus_client collector."""
        yield from collect(self.values, self.helps)
        yield InfoMetricFamily(
            "llmtap_build",
            "Version of the meter, its Python, and the implementation of its per-event path",
            {
                "version": self.version,
                "python": platform.python_version(),
                "implementation": native.NAME,
            },
        )

    def _histograms(self) -> Iterator[tuple[HistogramFamily, Sequence[Cell]]]:
        found: dict[str, list[Cell]] = {}
        for who, (keys, read, _, exact) in self.series:
            for (name, more), counts, total, buckets in zip(
                keys, read[::2], read[1::2], exact or repeat(None, len(keys)), strict=True
            ):
                found.setdefault(name, []).append(((*who, *more), counts, total, buckets))
        # Option A is the gap between chunks: counted once, shown under both names.
        gaps = [((*labels, "A"), *rest) for labels, *rest in found.get("chunk_gap", ())]
        if gaps:
            found["token_gap"] = gaps + found.get("token_gap", [])
        for name, rows in found.items():
            yield self.families[name], rows
        yield ADDED, [((point,), counts, total) for point, (counts, total) in self.added.items()]
        if self.calls:
            yield CALLS, self.calls
        yield LAG, self.lags

    def _counters(self) -> dict[str, list[tuple[tuple[str, ...], float]]]:
        found: dict[str, list[tuple[tuple[str, ...], float]]] = {}
        for who, (_, _, counts, _) in self.series:
            for (name, more), n in counts.items():
                found.setdefault(name, []).append(((*who, *more), n))
        return found
