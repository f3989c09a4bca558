"""A Summary: many exchanges as one set of numbers, with what makes the numbers believable.

Built by adding exchanges, and mergeable: the sum of two summaries is the summary of both sets. What is
pooled:

- `ttft`, `ttft_any`, `tpot`, `tbc`, `itl`, `tbc_max`, `jitter`, `user_idle` and smooth goodput: streamed
  answers, whatever became of them. An answer in one piece has no first token to wait for.
- `ttfb`: every answer. `e2e`: answers that ended as they should (complete, refused).
- `itl`: where the tokens of each chunk are known, gaps spread evenly over them (`B-even`); elsewhere
  the gaps between chunks (`A`). `option` names what the figure holds.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Final

from llmtap.metrics.histogram import Histogram
from llmtap.metrics.latency import ALPHA, READER_NS_PER_TOKEN, Measured, measure
from llmtap.metrics.statistics import summarise_ns
from llmtap.record.exchange import Exchange
from llmtap.record.outcome import Outcome

__all__ = ["ENDED_WELL", "METRICS", "Summary"]

METRICS: Final = (
    "ttft", "ttft_any", "ttfb", "tpot", "e2e", "user_idle", "tbc_max", "jitter", "smooth_benefit",
    "tbc", "itl",
)  # fmt: skip
"""Every name under `metrics`: those of an exchange, then the pooled gaps."""
ENDED_WELL: Final = frozenset({Outcome.COMPLETE, Outcome.REFUSED})
"""Outcomes whose end to end time is that of an answer."""
_ADDED: Final = ("request", "first_chunk", "chunk")
_TOKENS: Final = ("input", "output", "reasoning", "cached")


class Summary:
    """Sums and histograms over exchanges."""

    __slots__ = (
        "_added", "_chunk_tokens", "_content_events", "_events", "_itl_samples", "_metrics",
        "_outcomes", "_reads", "_refusals", "_sources", "_tokens", "_uncertainty_ns",
        "benefit", "n", "opened",
    )  # fmt: skip

    def __init__(self) -> None:
        self.n = 0
        """Exchanges added."""
        self.opened: int | None = None
        """Exchanges begun, whether or not they have ended: the offered load. None if not counted."""
        self._metrics = {name: Histogram() for name in METRICS}
        self._added = {point: Histogram() for point in _ADDED}
        self._chunk_tokens = Histogram()
        self._itl_samples: Counter[str] = Counter()
        self._outcomes: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()
        self._sources: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self.benefit = 0.0
        """Tokens: the sum of every stream's smooth benefit."""
        self._events = 0
        self._content_events = 0
        self._reads = 0
        self._uncertainty_ns = 0

    def add(self, x: Exchange, measured: Measured | None = None) -> None:
        """Counts one exchange. `measured` spares working its terms out again."""
        m = measure(x) if measured is None else measured
        self.n += 1
        self._outcomes[x.outcome.value] += 1
        if x.refusal is not None or x.outcome is Outcome.REFUSED:
            self._refusals[str((x.refusal or {}).get("kind") or "unknown")] += 1
        self.saw_uncertainty(x.uncertainty_ns)
        self._add_tokens(x)
        self._add_added(x)
        metrics = self._metrics
        if m.ttfb_ns is not None:
            metrics["ttfb"].record(m.ttfb_ns)
        if m.e2e_ns is not None and x.outcome in ENDED_WELL:
            metrics["e2e"].record(m.e2e_ns)
        if x.stream:
            self._add_stream(x, m)

    def _add_stream(self, x: Exchange, m: Measured) -> None:
        metrics = self._metrics
        for name, value in (
            ("ttft", m.ttft_ns), ("ttft_any", m.ttft_any_ns), ("tpot", m.tpot_ns),
            ("user_idle", m.user_idle_ns), ("tbc_max", m.tbc_max_ns), ("jitter", m.jitter_ns),
        ):  # fmt: skip
            if value is not None:
                metrics[name].record(round(value))
        if m.smooth_benefit is not None:
            # In billionths of a token, so that the histogram's integers serve.
            metrics["smooth_benefit"].record(round(m.smooth_benefit * 1e9))
            self.benefit += m.smooth_benefit
        metrics["tbc"].record_many(m.tbc_ns)
        if m.itl_even_ns is None:
            metrics["itl"].record_many(m.tbc_ns)
            self._itl_samples["A"] += len(m.tbc_ns)
        else:
            metrics["itl"].record_many(m.itl_even_ns)
            self._itl_samples["B-even"] += len(m.itl_even_ns)
        self._events += len(x.timeline.events)
        self._content_events += m.output_events
        self._reads += x.reads
        if m.tokens_per_chunk is not None:
            self._chunk_tokens.record_many(m.tokens_per_chunk)

    def _add_tokens(self, x: Exchange) -> None:
        tokens, totals = x.tokens, self._tokens
        if tokens.output is not None:
            self._sources[tokens.source.value] += 1
            totals["output"] += tokens.output
        if tokens.input is not None:
            totals["input"] += tokens.input
        if tokens.reasoning is not None:
            totals["reasoning"] += tokens.reasoning
        if tokens.cached is not None:
            totals["cached"] += tokens.cached

    def _add_added(self, x: Exchange) -> None:
        added = x.added
        if added.request_ns is not None:
            self._added["request"].record(added.request_ns)
        if added.first_chunk_ns is not None:
            self._added["first_chunk"].record(added.first_chunk_ns)
        self._added["chunk"].record_many(added.chunks_ns)

    def saw_uncertainty(self, ns: int) -> None:
        """A byte may have waited this long before it was stamped."""
        if ns > self._uncertainty_ns:
            self._uncertainty_ns = ns

    def merge(self, other: "Summary") -> None:
        """Adds all that `other` holds. `other` stays as it is."""
        self.n += other.n
        if other.opened is not None:
            self.opened = (self.opened or 0) + other.opened
        for name, histogram in other._metrics.items():
            self._metrics[name].merge(histogram)
        for point, histogram in other._added.items():
            self._added[point].merge(histogram)
        self._chunk_tokens.merge(other._chunk_tokens)
        for name in ("_itl_samples", "_outcomes", "_refusals", "_sources", "_tokens"):
            getattr(self, name).update(getattr(other, name))
        self.benefit += other.benefit
        self._events += other._events
        self._content_events += other._content_events
        self._reads += other._reads
        self.saw_uncertainty(other._uncertainty_ns)

    @property
    def benefit_n(self) -> int:
        """Streams that `benefit` sums."""
        return self._metrics["smooth_benefit"].n

    def fold(self) -> None:
        """Makes the summary final: from here on reading does not change it, so threads may share it."""
        for histogram in (*self._metrics.values(), *self._added.values(), self._chunk_tokens):
            histogram.fold()

    def copy(self) -> "Summary":
        """The same numbers in an object of their own."""
        twin = Summary()
        twin.merge(self)
        return twin

    def to_dict(
        self,
        window: Mapping[str, object],
        seconds: float,
        mode: str = "live",
        by: Mapping[str, Mapping[str, object]] | None = None,
    ) -> dict[str, object]:
        """The summary as public JSON: stable names, seconds, null where nothing was seen.

        `window` says what span of time it is of, `seconds` how long that is, `mode` how the load was
        made (`live`, `open`, `closed`), `by` holds the same per tenant, model and arm.
        """
        metrics = {name: summarise_ns(histogram) for name, histogram in self._metrics.items()}
        metrics["itl"]["option"] = "+".join(sorted(+self._itl_samples)) or None
        metrics["itl"]["samples"] = dict(sorted((+self._itl_samples).items()))
        out: dict[str, object] = {
            "n": self.n,
            "window": dict(window),
            "load": {
                "mode": mode,
                "offered_rps": None if self.opened is None else _rate(self.opened, seconds),
                "achieved_rps": _rate(self.n, seconds),
            },
            "metrics": metrics,
            "added": {point: summarise_ns(histogram) for point, histogram in self._added.items()},
            "outcomes": dict(sorted(self._outcomes.items())),
            "tokens": {
                # A Counter holds a name once somebody counted it: what nobody counted is null, not 0.
                **{name: self._tokens.get(name) for name in _TOKENS},
                "output_per_second": _rate(self._tokens["output"], seconds) if self._sources else None,
                "source": dict(sorted(self._sources.items())),
            },
            "goodput": None,
            "smooth_goodput": {
                "tokens_per_second": _rate(self.benefit, seconds) if self.benefit_n else None,
                "n": self.benefit_n,
                "alpha": ALPHA,
                "speed_tokens_per_second": 1e9 / READER_NS_PER_TOKEN,
                "idle": "A0: max(t_i - submit - V(i-1)), f(l) = l in seconds",
            },
            "chunking": self._chunking(),
            "refusals": {
                "n": self._refusals.total(),
                "share": self._refusals.total() / self.n if self.n else None,
                "kinds": dict(sorted(self._refusals.items())),
            },
            "uncertainty": self._uncertainty_ns / 1e9 if self.n or self._uncertainty_ns else None,
        }
        if by is not None:
            out["by"] = {label: dict(parts) for label, parts in by.items()}
        return out

    def _chunking(self) -> dict[str, object]:
        sizes = self._chunk_tokens
        return {
            "events": self._events,
            "content_events": self._content_events,
            "reads": self._reads,
            "events_per_read": self._events / self._reads if self._reads else None,
            "tokens_per_chunk_mean": sizes.mean,
            "tokens_per_chunk_max": sizes.max,
            "single_token_share": sizes.count(1) / sizes.n if sizes.n else None,
            "chunks_with_known_tokens": sizes.n,
        }


def _rate(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 else None
