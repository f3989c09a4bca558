"""The meter's numbers as a Prometheus exposition.

Recording happens once per exchange, at its end, into counters of our own (`buckets.py`); a scrape copies
them in one go (`Exposition.freeze`, on the thread that records) and renders the copy wherever it likes
(`Frozen.render`, in a worker thread): rendering 28,000 series takes Python 0.2 s, and nothing may wait
for it. Latencies in seconds; names as in design.md, "Public contract"; no `_created` series.
"""

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import InfoMetricFamily, Metric

from llmtap.export.buckets import (
    ADDED_EDGES_NS,
    DURATION_EDGES_NS,
    GAP_EDGES_NS,
    TOKEN_EDGES,
    TTFT_EDGES_NS,
    Buckets,
)
from llmtap.export.families import WHO, HistogramFamily, counter, histogram
from llmtap.export.house import MeterState, RelayState, collect_meter, collect_relays
from llmtap.metrics.latency import Measured
from llmtap.metrics.summary import ENDED_WELL
from llmtap.record.exchange import Exchange
from llmtap.tap.frames import LAG_EDGES_NS

__all__ = ["Exposition", "Frozen"]

_TTFT: Final = HistogramFamily(
    "llmtap_time_to_first_token_seconds",
    "Submit to first token of a stream; kind=content: first content that is not blank, any: of any kind",
    TTFT_EDGES_NS,
    labels=(*WHO, "kind"),
)
_TTFB: Final = HistogramFamily(
    "llmtap_time_to_first_byte_seconds", "Submit to first byte of the response's body", TTFT_EDGES_NS
)
_CHUNK_GAP: Final = HistogramFamily(
    "llmtap_inter_chunk_seconds", "Time between consecutive events that carry output", GAP_EDGES_NS
)
_TOKEN_GAP: Final = HistogramFamily(
    "llmtap_inter_token_seconds",
    "Inter-token latency; option=A: gaps between chunks, B: all tokens of a chunk arrive with it,"
    " B-even: a gap is spread over the tokens of its chunk (the last two where tokens per chunk are known)",
    GAP_EDGES_NS,
    labels=(*WHO, "option"),
)
_TPOT: Final = HistogramFamily(
    "llmtap_time_per_output_token_seconds", "(last token - first token) / (output tokens - 1)", GAP_EDGES_NS
)
_DURATION: Final = HistogramFamily(
    "llmtap_request_duration_seconds", "Submit to last byte, of answers that ended well", DURATION_EDGES_NS
)
_IDLE: Final = HistogramFamily(
    "llmtap_user_idle_seconds", "Longest wait of a reader of 20 tokens/s with nothing to read", TTFT_EDGES_NS
)
_CHUNK_TOKENS: Final = HistogramFamily(
    "llmtap_chunk_tokens", "Tokens in each event that carries output, where known", TOKEN_EDGES, unit=1
)
_ADDED: Final = HistogramFamily(
    "llmtap_tap_added_seconds",
    "What the tap itself added, from a read to the kernel's taking the bytes",
    ADDED_EDGES_NS,
    labels=("point",),
)
_LAG: Final = HistogramFamily(
    "llmtap_tap_loop_lag_seconds", "How late the relay's event loop ran", LAG_EDGES_NS, labels=("relay",)
)


class _Series:
    """The histograms of one tenant and model."""

    __slots__ = ("chunk_gap", "chunk_tokens", "duration", "idle", "itl_b", "itl_even", "tpot", "ttfb", "ttft",
                 "ttft_any")  # fmt: skip

    def __init__(self) -> None:
        self.ttft = Buckets(TTFT_EDGES_NS)
        self.ttft_any = Buckets(TTFT_EDGES_NS)
        self.ttfb = Buckets(TTFT_EDGES_NS)
        self.chunk_gap = Buckets(GAP_EDGES_NS)
        self.itl_b = Buckets(GAP_EDGES_NS)
        self.itl_even = Buckets(GAP_EDGES_NS)
        self.tpot = Buckets(GAP_EDGES_NS)
        self.duration = Buckets(DURATION_EDGES_NS)
        self.idle = Buckets(TTFT_EDGES_NS)
        self.chunk_tokens = Buckets(TOKEN_EDGES)

    def parts(self) -> Iterator[tuple[HistogramFamily, tuple[str, ...], Buckets]]:
        """Each histogram with its metric and the labels it has beside tenant and model."""
        yield _TTFT, ("content",), self.ttft
        yield _TTFT, ("any",), self.ttft_any
        yield _TTFB, (), self.ttfb
        yield _CHUNK_GAP, (), self.chunk_gap
        yield _TOKEN_GAP, ("A",), self.chunk_gap
        yield _TOKEN_GAP, ("B",), self.itl_b
        yield _TOKEN_GAP, ("B-even",), self.itl_even
        yield _TPOT, (), self.tpot
        yield _DURATION, (), self.duration
        yield _IDLE, (), self.idle
        yield _CHUNK_TOKENS, (), self.chunk_tokens

    def add(self, x: Exchange, m: Measured) -> None:
        if m.ttfb_ns is not None:
            self.ttfb.record(m.ttfb_ns)
        if m.e2e_ns is not None and x.outcome in ENDED_WELL:
            self.duration.record(m.e2e_ns)
        if not x.stream:
            return
        if m.ttft_ns is not None:
            self.ttft.record(m.ttft_ns)
        if m.ttft_any_ns is not None:
            self.ttft_any.record(m.ttft_any_ns)
        if m.tpot_ns is not None:
            self.tpot.record(round(m.tpot_ns))
        if m.user_idle_ns is not None:
            self.idle.record(m.user_idle_ns)
        self.chunk_gap.record_many(m.tbc_ns)
        if m.tokens_per_chunk is not None:
            self.chunk_tokens.record_many(m.tokens_per_chunk)
        if m.itl_b_ns is not None:
            self.itl_b.record_many(m.itl_b_ns)
        if m.itl_even_ns is not None:
            self.itl_even.record_many(m.itl_even_ns)


class Exposition:
    """Everything counted since the meter started."""

    def __init__(self, version: str) -> None:
        self._version = version
        self._series: dict[tuple[str, str], _Series] = {}
        self._exchanges: dict[tuple[str, ...], int] = {}
        self._tokens: dict[tuple[str, ...], int] = {}
        self._added = {point: Buckets(ADDED_EDGES_NS) for point in ("request", "first_chunk", "chunk")}
        self._unparsed = 0

    def add(self, x: Exchange, m: Measured, tenant: str, model: str) -> None:
        """Counts one exchange under labels whose number the caller keeps bounded."""
        who = (tenant, model)
        series = self._series.get(who)
        if series is None:
            series = self._series[who] = _Series()
        series.add(x, m)
        key = (tenant, model, x.outcome.value)
        self._exchanges[key] = self._exchanges.get(key, 0) + 1
        if x.tokens.output is not None:
            key = (tenant, model, x.tokens.source.value)
            self._tokens[key] = self._tokens.get(key, 0) + x.tokens.output
        self._unparsed += x.unparsed_events
        added = x.added
        if added.request_ns is not None:
            self._added["request"].record(added.request_ns)
        if added.first_chunk_ns is not None:
            self._added["first_chunk"].record(added.first_chunk_ns)
        self._added["chunk"].record_many(added.chunks_ns)

    def freeze(self, relays: Sequence[RelayState] = (), meter: MeterState | None = None) -> "Frozen":
        """A copy of all counts as they are now. Call it where `add` is called."""
        histograms: dict[HistogramFamily, list[tuple[tuple[str, ...], list[int], int]]] = {}
        for who, series in self._series.items():
            for family, more, buckets in series.parts():
                counts, total = buckets.read()
                if any(counts):
                    histograms.setdefault(family, []).append((who + more, counts, total))
        histograms[_ADDED] = [((point,), *buckets.read()) for point, buckets in self._added.items()]
        histograms[_LAG] = [
            ((relay.name,), relay.status.lag_buckets, relay.status.lag_sum_ns)
            for relay in relays
            if relay.status is not None and len(relay.status.lag_buckets) == len(LAG_EDGES_NS) + 1
        ]
        return Frozen(
            self._version, histograms, dict(self._exchanges), dict(self._tokens), self._unparsed,
            tuple(relays), MeterState() if meter is None else meter,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Frozen:
    """A copy of an Exposition's counts; a prometheus_client collector."""

    version: str
    histograms: Mapping[HistogramFamily, list[tuple[tuple[str, ...], list[int], int]]]
    exchanges: Mapping[tuple[str, ...], int]
    tokens: Mapping[tuple[str, ...], int]
    unparsed: int
    relays: tuple[RelayState, ...]
    meter: MeterState

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The exposition and its content type, in the format that the Accept header asks for."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        encode, content_type = choose_encoder(accept)
        return encode(registry), content_type

    def collect(self) -> Iterator[Metric]:
        for family, cells in self.histograms.items():
            yield histogram(family, cells)
        yield counter("llmtap_exchanges", "Exchanges by outcome", (*WHO, "outcome"), self.exchanges.items())
        yield counter(
            "llmtap_output_tokens",
            "Output tokens by the source of the count",
            (*WHO, "source"),
            self.tokens.items(),
        )
        yield counter(
            "llmtap_unparsed_events", "Events of a shape the dialect does not know", (), [((), self.unparsed)]
        )
        yield from collect_relays(self.relays)
        yield from collect_meter(self.meter)
        yield InfoMetricFamily(
            "llmtap_build", "What runs", {"version": self.version, "python": platform.python_version()}
        )
