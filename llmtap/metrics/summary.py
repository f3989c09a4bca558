"""Mergeable summary of many exchanges: latencies, outcomes, tokens and goodput.

`Summary.add` adds an Exchange. `to_dict` returns public JSON, with sample counts and uncertainty, for a time
window that the caller passes. `to_bytes` packs a summary, and `merge_bytes` adds a packed summary to another
one. The meter, the load generator, reports of captures, and simulations have summaries. The metrics of one
exchange are in `latency.py`.

Streamed answers of every outcome have the times to a first token or event, TPOT, TBC, ITL, pauses, jitter,
user idle latency and smooth goodput. Every answer has `ttfb`; answers that ended well have `e2e`. Metrics of
answers that no dialect read, but that were inferred from their structure (`Exchange.reading`), are separate,
under `inferred`. The options of inter-token latency are those of the IETF draft, 4.6.3: `itl` is option
B-even (a gap is divided among the tokens of its chunk) if the tokens of each chunk are known, else option A
(gaps between chunks); `itl_server` is option C (times by the server). A histogram is created with its first
value, because a meter has thousands of small summaries.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict
from math import isfinite
from operator import attrgetter
from types import MappingProxyType
from typing import Final, NamedTuple

from msgspec import Struct, msgpack

from llmtap.exchange.exchange import Exchange
from llmtap.exchange.outcome import Outcome, Reading
from llmtap.exchange.verdict import no_token_reason as ending_reason
from llmtap.metrics import hdr
from llmtap.metrics.catalogue import METRICS, OF_AN_EXCHANGE, Answers, Unit, values_of
from llmtap.metrics.cost import Price, cost_of
from llmtap.metrics.deadlines import Benefit
from llmtap.metrics.histogram import Histogram
from llmtap.metrics.latency import DEFAULT_BENEFIT, Measured, measure, output_times_ns
from llmtap.metrics.objectives import Goodput, GoodputCount, Objectives, experience_of
from llmtap.metrics.refusals import is_refused, label_key, labels_document
from llmtap.metrics.statistics import summarise_ns

NO_TOKEN_REASONS: Final = (
    "refusal",
    "guardrail",
    "error",
    "client_error",
    "cancelled",
    "rejected",
    "empty",
    "only_metadata",
)
"""Reasons that `no_token_reason` can return, in the order of reports."""


def no_token_reason(x: Exchange, m: Measured) -> str | None:
    """Return why an exchange has no token; None if it has one, if it needs none, or if the reason is unknown.

    `guardrail`, `refusal`: blocked by a filter or by the model. `error`: the upstream failed, or was cut off.
    `client_error`: the request was wrong. `cancelled`: the client left first. `rejected`: llmtap refused it.
    `empty`: the stream ended well without any event; `only_metadata`: without generated output. A complete
    answer in one piece needs no token.
    """
    if m.output_events or x.outcome is Outcome.TAP_ERROR or (not x.stream and x.outcome is Outcome.COMPLETE):
        return None
    return (x.no_token_reason or "empty") if x.outcome is Outcome.COMPLETE else ending_reason(x)


def tokens_after_cancel(x: Exchange, m: Measured) -> int | None:
    """Return the number of tokens read after the client had left (`delivered_ns`); None if it did not leave.

    An event with an unknown number of tokens counts as one. A relay closes the connection to the upstream
    when the client leaves, so this number is near 0 for a relay.
    """
    if x.outcome is not Outcome.CLIENT_CANCELLED:
        return None
    left_ns = x.timeline.delivered_ns
    if left_ns is None:
        return 0
    times = output_times_ns(x.timeline.events)
    late = bisect_right(times, left_ns)
    return len(times) - late if m.tokens_per_chunk is None else sum(m.tokens_per_chunk[late:])


ENDPOINTS_MAX: Final = 32
"""Maximum number of unknown endpoints that are counted separately; further endpoints count as `other`."""
_OTHER: Final = "other"


class UnknownEndpoint(NamedTuple):
    """Endpoint whose answers no dialect reads."""

    reading: str
    """Value of `Exchange.reading`: how its answers were read without a dialect."""
    path: str
    content_type: str


class AnswersWithoutDialect:
    """Number of answers that no dialect reads, although one should read them, by endpoint."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: dict[UnknownEndpoint, int] = {}

    def add(self, x: Exchange) -> None:
        if x.reading is Reading.DIALECT:
            return
        if x.reading is Reading.INFERRED or x.not_understood:
            self.count(UnknownEndpoint(x.reading.value, x.path, x.content_type or ""))

    def count(self, endpoint: UnknownEndpoint, n: int = 1) -> None:
        """Count `n` answers of an endpoint; count a new endpoint as `other` if there are ENDPOINTS_MAX."""
        if endpoint not in self.counts and len(self.counts) >= ENDPOINTS_MAX:
            endpoint = UnknownEndpoint(endpoint.reading, _OTHER, _OTHER)
        self.counts[endpoint] = self.counts.get(endpoint, 0) + n

    def to_dicts(self) -> list[dict[str, object]]:
        """Return public JSON, the most frequent endpoint first."""
        rows = sorted(self.counts.items(), key=lambda row: (-row[1], row[0]))
        return [{**one._asdict(), "content_type": one.content_type or None, "n": n} for one, n in rows]


_BURSTS: Final = {"n": "bursts", "streams": "burst_streams", "events": "burst_events"}
"""For each public field on bursts, the name of its count in `Summary._counts`."""


def clock_disagreement(x: Exchange, m: Measured) -> dict[str, int]:
    """Return llmtap's duration minus the server's, in ns, for each duration that the server reports.

    A difference above 0 is the time in network, queues and buffers. Far below 0, one of the clocks is wrong.

    - `ttft`: time to the first token of any kind, against the server's `ttft`, or else `queue` + `prefill`.
    - `decode`: time from the first to the last token, against `decode`.
    - `itl`: TPOT, against `mean_itl`. `e2e`: against `total`.
    """
    entries = x.server_timing
    if not entries:
        return {}
    server: dict[str, float] = {}
    for entry in entries:
        name, ms = entry.get("name"), entry.get("ms")
        if isinstance(name, str) and isinstance(ms, int | float) and isfinite(ms):
            server.setdefault(name, ms * 1e6)
    if "ttft" not in server and "queue" in server and "prefill" in server:
        server["ttft"] = server["queue"] + server["prefill"]
    t = x.timeline
    decode_ns = (
        None if t.first_token_ns is None or t.last_token_ns is None else t.last_token_ns - t.first_token_ns
    )
    pairs = (
        ("ttft", m.ttft_any_ns, "ttft"),
        ("decode", decode_ns, "decode"),
        ("itl", m.tpot_ns, "mean_itl"),
        ("e2e", m.e2e_ns, "total"),
    )
    return {
        key: round(ours - server[name]) for key, ours, name in pairs if ours is not None and name in server
    }


ENDED_WELL: Final = frozenset({Outcome.COMPLETE, Outcome.REFUSED})
"""Outcomes of whole answers, whose end to end times are comparable."""
_ADDED_POINTS: Final = ("request", "first_chunk", "chunk")
_TOKENS: Final = ("input", "output", "reasoning", "cached")
_token_counts: Final = attrgetter(*_TOKENS)
_STREAM_METRICS: Final = tuple(
    metric for metric in OF_AN_EXCHANGE if metric.answers is Answers.STREAMS and metric.unit is Unit.SECONDS
)
_NOT_TIMES: Final = frozenset(metric.name for metric in METRICS if metric.unit is not Unit.SECONDS)
_STREAM_NAMES: Final = tuple(metric.name for metric in _STREAM_METRICS)
_stream_values: Final = values_of(_STREAM_METRICS)
_EMPTY: Final = Histogram()
_UNCERTAINTIES: Final = "uncertainties"
_TPOT_TO_END: Final = "tpot_to_end"
TPOT_DIFFERENCE_MIN: Final = 0.01
"""`tpot_to_end` is also reported if its mean exceeds the mean of `tpot` by more than this share."""
_COUNTERS: Final = (
    "_counts",
    "_itl_policies",
    "_itl_samples",
    "_labels",
    "_no_token",
    "_outcomes",
    "_readings",
    "_refusals",
    "_token_sources",
    "_tokens",
)


class _Packed(Struct, array_like=True):
    """A `Summary` in packed form. The attributes of `Summary` with these names have docstrings."""

    n: int
    opened: int | None
    benefit: float
    """Sum of the benefits of the answers (smooth goodput)."""
    readers: list[tuple[float, int, str, int]]
    """Parameters of each `Benefit` with which benefits were computed."""
    metrics: dict[str, bytes]
    """Packed histogram of each metric, by its name; so are `added`, `clocks` and `inferred`."""
    added: dict[str, bytes]
    """Histograms of the latency that the relay added, by its part."""
    clocks: dict[str, bytes]
    """Histograms of the differences from the times that the server reports."""
    chunk_tokens: bytes
    """Packed histogram of the number of tokens in a chunk."""
    counters: list[dict[str, int] | None]
    """Counts of each attribute in `_COUNTERS`, in this order; None: all are 0."""
    goodput: list[tuple[str, int, int, int, int, dict[str, int], int, int]]
    """Attributes of the `GoodputCount` for each set of objectives, whose name is first."""
    inferred: dict[str, bytes]
    """Histograms of metrics of answers without a dialect."""
    without_dialect: list[tuple[str, str, str, int]]
    """Number of answers of each `UnknownEndpoint`, after its attributes."""
    burst_hold_max_ns: int | None
    uncertainty_ns: int
    benefit_eq4: float = 0.0
    """As `benefit`, by equation 4 of the smooth goodput paper as printed."""


_encode: Final = msgpack.Encoder().encode
_decode: Final = msgpack.Decoder(_Packed).decode


class Summary:
    """Sums and histograms over exchanges.

    `objectives`: objectives by which the exchanges are judged. `reader`: parameters of the reader, for
    exchanges that are added without their `Measured`.
    """

    __slots__ = (
        *_COUNTERS,
        "_added_latency",
        "_burst_hold_max_ns",
        "_chunk_tokens",
        "_clock_differences",
        "_inferred_metrics",
        "_metrics",
        "_reader",
        "_readers",
        "_uncertainty_ns",
        "_without_dialect",
        "benefit",
        "benefit_eq4",
        "goodput",
        "n",
        "objectives",
        "opened",
    )

    def __init__(self, objectives: Objectives | None = None, reader: Benefit = DEFAULT_BENEFIT) -> None:
        self.objectives = objectives
        self._reader = reader
        """Assumed reader, for smooth goodput and user idle latency."""
        self.n = 0
        """Number of exchanges."""
        self.opened: int | None = None
        """Number of exchanges that have begun, ended or not: the offered load. None if not counted."""
        self.goodput = Goodput()
        self.benefit = 0.0
        """Sum of the smooth benefits of all streams, in tokens."""
        self.benefit_eq4 = 0.0
        """As `benefit`, but with token i due at d_i = V i (smooth goodput paper, eq. 4 as printed)."""
        self._readers: tuple[Benefit, ...] = ()
        """All parameters of readers with which `benefit` and `user_idle` were computed."""
        self._metrics: dict[str, Histogram] = {}
        self._inferred_metrics: dict[str, Histogram] = {}
        """Metrics of streams whose readings were inferred from their structure."""
        self._added_latency: dict[str, Histogram] = {}
        """By part of an exchange: histogram of the latency that llmtap added."""
        self._clock_differences: dict[str, Histogram] = {}
        """llmtap's duration minus the server's, by name (`clock_disagreement`)."""
        self._chunk_tokens = Histogram()
        """Histogram of the number of tokens in a chunk."""
        self._counts: Counter[str] = Counter()
        """Sums by name: events, reads, tokens after a disconnect, and so on."""
        self._itl_policies: Counter[str] = Counter()
        """By way to distribute the time of a chunk over its tokens: number of answers."""
        self._itl_samples: Counter[str] = Counter()
        """By ITL option (A, B or C): number of gaps between tokens."""
        self._labels: Counter[str] = Counter()
        """By label of a request and result of its answer: number of exchanges."""
        self._no_token: Counter[str] = Counter()
        """By reason: number of answers without a token."""
        self._outcomes: Counter[str] = Counter()
        self._readings: Counter[str] = Counter()
        """By way the answer was read (dialect or inferred): number of exchanges."""
        self._without_dialect = AnswersWithoutDialect()
        self._refusals: Counter[str] = Counter()
        """By kind of refusal: number of exchanges."""
        self._token_sources: Counter[str] = Counter()
        """By source of the output token count: number of exchanges."""
        self._tokens: Counter[str] = Counter()
        """By kind (input, output and so on): number of tokens."""
        self._burst_hold_max_ns: int | None = None
        """Longest time that a server held text before a burst."""
        self._uncertainty_ns = 0
        """Largest uncertainty of a timestamp."""

    def add(self, x: Exchange, measured: Measured | None = None) -> None:
        """Add an exchange. `measured`: its figures, if they are already computed."""
        m = measure(x, self._reader) if measured is None else measured
        self.n += 1
        self._outcomes[x.outcome.word] += 1
        self._readings[x.reading.word] += 1
        self._without_dialect.add(x)
        if (key := label_key(x)) is not None:
            self._labels[key] += 1
        if is_refused(x):
            self._refusals[str((x.refusal or {}).get("kind") or "unknown")] += 1
        self.add_uncertainty(x.uncertainty_ns)
        _histogram_in(self._metrics, _UNCERTAINTIES).record(x.uncertainty_ns)
        self.goodput.add(self.objectives, m, x)
        self._add_tokens(x)
        self._add_added_latency(x)
        if m.ttfb_ns is not None:
            _histogram_in(self._metrics, "ttfb").record(m.ttfb_ns)
        if m.e2e_ns is not None and x.outcome in ENDED_WELL:
            _histogram_in(self._metrics, "e2e").record(m.e2e_ns)
        if not m.output_events and (reason := no_token_reason(x, m)) is not None:
            self._no_token[reason] += 1
        if x.outcome is Outcome.CLIENT_CANCELLED:
            after = tokens_after_cancel(x, m) or 0
            self._counts["cancelled_tokens"] += max(0, (x.tokens.output or 0) - after)
            self._counts["cancelled_tokens_after"] += after
        if x.server_timing:
            for name, ns in clock_disagreement(x, m).items():
                _histogram_in(self._clock_differences, name).record(ns)
        if x.stream:
            self._add_stream(x, m)

    def _add_stream(self, x: Exchange, m: Measured) -> None:
        if x.reading is Reading.INFERRED:
            self._add_inferred_metrics(m)
            return
        metrics = self._metrics
        for name, value in zip(_STREAM_NAMES, _stream_values(m), strict=True):
            if value is not None:
                _histogram_in(metrics, name).record(round(value))
        if m.tpot_ns is not None:
            # If a stream did not end well, its generation ended with the last token, not with the response.
            to_end_ns = m.tpot_to_end_ns if x.outcome in ENDED_WELL else None
            _histogram_in(metrics, _TPOT_TO_END).record(round(m.tpot_ns if to_end_ns is None else to_end_ns))
        if m.smooth_benefit is not None:
            # Record billionths of a token, because the histogram holds integers.
            _histogram_in(metrics, "smooth_benefit").record(round(m.smooth_benefit * 1e9))
            self.benefit += m.smooth_benefit
            self.benefit_eq4 += m.smooth_benefit_eq4 or 0.0
            if m.benefit not in self._readers:
                self._readers = (*self._readers, m.benefit)
        if m.tbc_ns:
            _histogram_in(metrics, "tbc").record_many(m.tbc_ns)
            option, gaps = ("A", m.tbc_ns) if m.itl_even_ns is None else ("B-even", m.itl_even_ns)
            _histogram_in(metrics, "itl").record_many(gaps)
            self._itl_samples[option] += len(gaps)
            self._itl_policies[m.itl_policy] += 1
        if m.itl_c_ns:
            _histogram_in(metrics, "itl_server").record_many(m.itl_c_ns)
        if self.objectives is not None:
            experience = experience_of(x, m, self.objectives)
            if experience is not None:
                for name, share in (
                    ("fluidity_index_doc", experience.fluidity.index_of_doc),
                    ("fluidity_index_code", experience.fluidity.index_of_code),
                    ("qoe_area_step", experience.qoe_area_step),
                ):
                    _histogram_in(metrics, name).record(round(share * 1e9))
        self._add_chunking(x, m)

    def _add_inferred_metrics(self, m: Measured) -> None:
        for name, value in zip(_STREAM_NAMES, _stream_values(m), strict=True):
            if value is not None:
                _histogram_in(self._inferred_metrics, name).record(round(value))
        if m.tbc_ns:
            _histogram_in(self._inferred_metrics, "tbc").record_many(m.tbc_ns)

    def _add_chunking(self, x: Exchange, m: Measured) -> None:
        """Add the numbers of events, reads and chunks of an answer."""
        log, counts = x.timeline.events, self._counts
        counts["events"] += len(log)
        counts["content_events"] += m.output_events
        counts["reads"] += x.reads
        counts["bytes"] += sum(log.sizes)
        bursts = m.bursts
        if bursts.hold_max_ns is not None:
            counts["bursts"] += bursts.count
            counts["burst_events"] += bursts.events
            counts["burst_streams"] += 1
            self._record_hold(bursts.hold_max_ns)
        if m.tokens_per_chunk is not None:
            if m.itl_b_ns is m.tbc_ns:  # `measure` returns one list for both if each chunk has one token.
                self._chunk_tokens.record_copies(1, len(m.tokens_per_chunk))
            else:
                self._chunk_tokens.record_many(m.tokens_per_chunk)

    def _record_hold(self, ns: int | None) -> None:
        """Keep the longest hold before a burst."""
        if ns is not None and (self._burst_hold_max_ns is None or ns > self._burst_hold_max_ns):
            self._burst_hold_max_ns = ns

    def _add_tokens(self, x: Exchange) -> None:
        if x.tokens.output is not None:
            self._token_sources[x.tokens.source.word] += 1
        for name, n in zip(_TOKENS, _token_counts(x.tokens), strict=True):
            if n is not None:
                self._tokens[name] += n

    def _add_added_latency(self, x: Exchange) -> None:
        added = x.added
        for name, ns in (("request", added.request_ns), ("first_chunk", added.first_chunk_ns)):
            if ns is not None:
                _histogram_in(self._added_latency, name).record(ns)
        if added.chunks_ns:
            _histogram_in(self._added_latency, "chunk").record_many(added.chunks_ns)

    def add_uncertainty(self, ns: int) -> None:
        """Update the uncertainty of all timestamps: the longest time that a byte waited for its timestamp."""
        if ns > self._uncertainty_ns:
            self._uncertainty_ns = ns

    def merge(self, other: "Summary") -> None:
        self.n += other.n
        if other.opened is not None:
            self.opened = (self.opened or 0) + other.opened
        for mine, others in (
            (self._metrics, other._metrics),
            (self._added_latency, other._added_latency),
            (self._clock_differences, other._clock_differences),
            (self._inferred_metrics, other._inferred_metrics),
        ):
            for name, histogram in others.items():
                _histogram_in(mine, name).merge(histogram)
        self._chunk_tokens.merge(other._chunk_tokens)
        for name in _COUNTERS:
            getattr(self, name).update(getattr(other, name))
        for endpoint, n in other._without_dialect.counts.items():
            self._without_dialect.count(endpoint, n)
        self.goodput.merge(other.goodput)
        self.benefit += other.benefit
        self.benefit_eq4 += other.benefit_eq4
        self._readers += tuple(reader for reader in other._readers if reader not in self._readers)
        self._record_hold(other._burst_hold_max_ns)
        self.add_uncertainty(other._uncertainty_ns)

    def histogram(self, name: str) -> Histogram:
        """Return the values of a metric, in ns. The caller must not change the histogram."""
        return self._metrics.get(name, _EMPTY)

    def hdr_histograms(self) -> dict[str, str]:
        """Return the values of each metric that is a time, in ns, as encoded by `hdr.encode`."""
        excluded = _NOT_TIMES | {_TPOT_TO_END}
        return {name: hdr.encode(h) for name, h in self._metrics.items() if h.n and name not in excluded}

    @property
    def benefit_n(self) -> int:
        """Number of exchanges in the sum `benefit`."""
        return self._metrics.get("smooth_benefit", _EMPTY).n

    def to_bytes(self) -> bytes:
        """Return all counts and histograms, without the objectives, in a compact form."""
        return _encode(
            _Packed(
                self.n,
                self.opened,
                self.benefit,
                [(r.alpha, r.reader_ns_per_token, r.f, r.grace_tokens) for r in self._readers],
                {name: h.to_bytes() for name, h in self._metrics.items()},
                {name: h.to_bytes() for name, h in self._added_latency.items()},
                {name: h.to_bytes() for name, h in self._clock_differences.items()},
                self._chunk_tokens.to_bytes(),
                [getattr(self, name) or None for name in _COUNTERS],
                [
                    (name, c.counted, c.met, c.tokens, c.good_tokens, c.broken, c.not_judged, c.own_faults)
                    for name, c in self.goodput.by_objectives.items()
                ],
                {name: h.to_bytes() for name, h in self._inferred_metrics.items()},
                [(*endpoint, n) for endpoint, n in self._without_dialect.counts.items()],
                self._burst_hold_max_ns,
                self._uncertainty_ns,
                self.benefit_eq4,
            )
        )

    def merge_bytes(self, packed: bytes) -> None:
        """Add a summary that `to_bytes` has packed."""
        p = _decode(packed)
        self.n += p.n
        if p.opened is not None:
            self.opened = (self.opened or 0) + p.opened
        for mine, others in (
            (self._metrics, p.metrics),
            (self._added_latency, p.added),
            (self._clock_differences, p.clocks),
            (self._inferred_metrics, p.inferred),
        ):
            for name, histogram in others.items():
                _histogram_in(mine, name).merge_bytes(histogram)
        self._chunk_tokens.merge_bytes(p.chunk_tokens)
        for name, counts in zip(_COUNTERS, p.counters, strict=True):
            if counts:
                getattr(self, name).update(counts)
        for *endpoint, n in p.without_dialect:
            self._without_dialect.count(UnknownEndpoint(*endpoint), n)
        for name, counted, met, tokens, good_tokens, broken, not_judged, own_faults in p.goodput:
            count = GoodputCount(counted, met, tokens, good_tokens, Counter(broken), not_judged, own_faults)
            self.goodput.by_objectives.setdefault(name, GoodputCount()).merge(count)
        self.benefit += p.benefit
        self.benefit_eq4 += p.benefit_eq4
        for settings in p.readers:
            reader = Benefit(*settings)
            if reader not in self._readers:
                self._readers = (*self._readers, reader)
        self._record_hold(p.burst_hold_max_ns)
        self.add_uncertainty(p.uncertainty_ns)

    def copy(self) -> "Summary":
        twin = Summary(self.objectives, self._reader)
        twin.merge(self)
        return twin

    def to_dict(
        self,
        window: Mapping[str, object],
        seconds: float,
        mode: str = "live",
        by: Mapping[str, Mapping[str, object]] | None = None,
        price: Price | None = None,
        percentiles: Mapping[str, float] | None = None,
        judged_seconds: Mapping[str, float] = MappingProxyType({}),
    ) -> dict[str, object]:
        """Return public JSON: names that do not change, times in seconds, null for a figure without values.

        `window`: description of the time window; `seconds`: its length; `mode`: kind of load (`live`, `open`,
        `closed`); `by`: the same JSON for each tenant, model, arm and class; `price`: price for the cost of
        the window; `percentiles`: further percentiles of each metric, by name; `judged_seconds`: as in
        `Goodput.to_dict`; if not empty, the cost of a good token is omitted.
        """
        metrics = {
            metric.name: summarise_ns(self._metrics.get(metric.name, _EMPTY), percentiles)
            for metric in METRICS
        }
        to_end = self.histogram(_TPOT_TO_END)
        if _differ(self.histogram("tpot"), to_end):
            metrics["tpot"]["to_end"] = summarise_ns(to_end, percentiles)
        metrics["itl"]["option"] = "+".join(sorted(+self._itl_samples)) or None
        metrics["itl"]["samples"] = dict(sorted((+self._itl_samples).items()))
        metrics["itl"]["policy"] = dict(sorted(self._itl_policies.items()))
        metrics["itl_server"]["option"] = "C" if "itl_server" in self._metrics else None
        out: dict[str, object] = {
            "n": self.n,
            "window": dict(window),
            "load": {
                "mode": mode,
                "offered_rps": None if self.opened is None else _rate_of(self.opened, seconds),
                "achieved_rps": _rate_of(self.n, seconds),
            },
            "metrics": metrics,
            "added": {point: summarise_ns(self._added_latency.get(point, _EMPTY)) for point in _ADDED_POINTS},
            "outcomes": dict(sorted(self._outcomes.items())),
            "readings": dict(sorted(self._readings.items())),
            "without_dialect": self._without_dialect.to_dicts(),
            "inferred": {
                name: summarise_ns(histogram, percentiles)
                for name, histogram in self._inferred_metrics.items()
            },
            "no_token": {"n": self._no_token.total(), "reasons": dict(sorted(self._no_token.items()))},
            "tokens": {
                # `get` returns None (null) instead of 0 for tokens that no provider reported.
                **{name: self._tokens.get(name) for name in _TOKENS},
                "input_per_second": _rate_of(self._tokens["input"], seconds)
                if "input" in self._tokens
                else None,
                "output_per_second": _rate_of(self._tokens["output"], seconds)
                if self._token_sources
                else None,
                "source": dict(sorted(self._token_sources.items())),
                "cancelled": self._counts.get("cancelled_tokens"),
                "after_cancel": self._counts.get("cancelled_tokens_after"),
            },
            "goodput": self.goodput.to_dict(seconds, judged_seconds),
            "smooth_goodput": self._smooth_goodput(seconds),
            "chunking": self._chunking(),
            "clock_disagreement": {
                name: summarise_ns(histogram) for name, histogram in sorted(self._clock_differences.items())
            },
            "refusals": {
                "n": self._refusals.total(),
                "share": self._refusals.total() / self.n if self.n else None,
                "kinds": dict(sorted(self._refusals.items())),
            },
            "labels": labels_document(self._labels),
            "cost": None if price is None else self._cost(price, seconds, judged=not judged_seconds),
            "uncertainties": summarise_ns(self._metrics.get(_UNCERTAINTIES, _EMPTY)),
            "uncertainty": self._uncertainty_ns / 1e9 if self.n or self._uncertainty_ns else None,
        }
        if by is not None:
            out["by"] = {label: dict(parts) for label, parts in by.items()}
        return out

    def _smooth_goodput(self, seconds: float) -> dict[str, object]:
        """Return smooth goodput with the reader's parameters; if readers differ, `readers` has them all."""
        readers = self._readers or (self._reader,)
        only_reader = readers[0] if len(readers) == 1 else None
        due = {reader.due_text for reader in readers}
        out: dict[str, object] = {
            "tokens_per_second": _rate_of(self.benefit, seconds) if self.benefit_n else None,
            "tokens_per_second_eq4": _rate_of(self.benefit_eq4, seconds) if self.benefit_n else None,
            "n": self.benefit_n,
            "alpha": None if only_reader is None else only_reader.alpha,
            "speed_tokens_per_second": None if only_reader is None else only_reader.speed,
            "idle": f"max(t_i - submit - {due.pop() if len(due) == 1 else 'd_i'}),"
            f" {'several f' if only_reader is None else only_reader.f_text}",
        }
        if only_reader is None:
            out["readers"] = [
                {"alpha": reader.alpha, "speed_tokens_per_second": reader.speed, "f": reader.f_text}
                for reader in readers
            ]
        return out

    def _chunking(self) -> dict[str, object]:
        sizes, counts = self._chunk_tokens, self._counts
        events, reads = counts["events"], counts["reads"]
        return {
            "events": events,
            "content_events": counts["content_events"],
            "reads": reads,
            "events_per_read": events / reads if reads else None,
            "bytes_per_event_mean": counts["bytes"] / events if events else None,
            "tokens_per_chunk_mean": sizes.mean,
            "tokens_per_chunk_max": sizes.max,
            "single_token_share": sizes.count(1) / sizes.n if sizes.n else None,
            "chunks_with_known_tokens": sizes.n,
            "bursts": {
                **{name: counts[key] for name, key in _BURSTS.items()},
                "hold_max": None if self._burst_hold_max_ns is None else self._burst_hold_max_ns / 1e9,
            },
        }

    def _cost(self, price: Price, seconds: float, *, judged: bool) -> dict[str, object]:
        good = self.goodput.total().good_tokens if judged and self.goodput.by_objectives else None
        return asdict(cost_of(price, seconds, self._tokens["output"], good, self._tokens["input"]))


def with_objectives(packed: bytes, names: Collection[str]) -> bytes:
    """Return a packed summary (`Summary.to_bytes`) that has only the goodput of the objectives `names`."""
    p = _decode(packed)
    p.goodput = [row for row in p.goodput if row[0] in names]
    return _encode(p)


def _histogram_in(histograms: dict[str, Histogram], name: str) -> Histogram:
    histogram = histograms.get(name)
    if histogram is None:
        histogram = histograms[name] = Histogram()
    return histogram


def _differ(tpot: Histogram, to_end: Histogram) -> bool:
    """Return whether the mean TPOT to the end of the response exceeds the mean TPOT to the last token by more
    than `TPOT_DIFFERENCE_MIN`."""
    if tpot.mean is None or to_end.mean is None:
        return False
    return to_end.mean > tpot.mean * (1 + TPOT_DIFFERENCE_MIN)


def _rate_of(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 else None
