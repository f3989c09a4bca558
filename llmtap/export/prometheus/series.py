"""Histograms and counters of one combination of tenant, model and arm, updated once by each exchange.

`exposition.py` makes a `Series` for each combination, feeds it, and renders its copies. A histogram exists
once it has a value. `families_for` adds an edge to the histograms at each objective of an operator.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Final

from llmtap.exchange.exchange import Exchange
from llmtap.exchange.outcome import Outcome
from llmtap.export.buckets import Buckets, DualBuckets, ExponentialBuckets, edges_as
from llmtap.export.prometheus.catalogue import HISTOGRAMS, HistogramFamily
from llmtap.metrics import summary
from llmtap.metrics.latency import Measured
from llmtap.metrics.objectives import Fluidity

_ALSO: Final = {
    "ttft": ("ttft",), "ttft_any": ("ttft",), "ttfb": ("ttfb",), "tpot": ("tpot",), "e2e": ("duration",),
    "user_idle": ("idle", "idle_reading"), "tbc_max": ("chunk_gap", "token_gap"),
    "tbc_p99": ("chunk_gap", "token_gap"),
}  # fmt: skip
GUARDRAILS_MAX: Final = 32
"""Combinations of kind and source in a series; further ones are `other`."""
_FROM_THE_START: Final = (
    *((("exchanges", (outcome.value,))) for outcome in Outcome),
    *((("no_token", (reason,))) for reason in summary.NO_TOKEN_REASONS),
)  # fmt: skip

Key = tuple[str, tuple[str, ...]]
FrozenSeries = tuple[list[Key], list[Any], dict[Key, float], list[ExponentialBuckets] | None]


def families_for(
    bounds: Sequence[tuple[str, int]], edges: Mapping[str, Sequence[float]] | None = None
) -> dict[str, HistogramFamily]:
    """Return HISTOGRAMS with an additional edge at each bound (objective, ns) that operators set.

    The share of exchanges within a bound is then exact. `edges`: as in `buckets.edges_as`.
    """
    found = {key: replace(one, edges=edges_as(one.edges, edges or {})) for key, one in HISTOGRAMS.items()}
    for name, bound_ns in bounds:
        for key in _ALSO.get(name, ()):
            found[key] = found[key].with_edges((bound_ns,))
    return found


class Series:
    __slots__ = ("_cells", "_families", "_native", "counts")

    def __init__(self, families: Mapping[str, HistogramFamily], *, native: bool = False) -> None:
        self._families, self._native = families, native
        self._cells: dict[Key, Buckets] = {}
        # A counter that appears with its first event hides that event from rate().
        self.counts: dict[Key, float] = dict.fromkeys(_FROM_THE_START, 0)

    def freeze(self) -> FrozenSeries:
        """Return a copy: keys, counts by bucket, sums, counters, and native buckets of each histogram."""
        cells = self._cells.values()
        # Few objects that the garbage collector has to look at: there are 30,000 cells.
        read = chain.from_iterable(cell.read() for cell in cells)
        native = [cell.native.copy() for cell in cells if isinstance(cell, DualBuckets)]
        return list(self._cells), list(read), self.counts.copy(), native if self._native else None

    def add(self, x: Exchange, m: Measured) -> None:
        self._count("exchanges", 1, x.outcome.value)
        tokens = x.tokens
        if tokens.output is not None:
            self._count("output", tokens.output, tokens.source.value)
        if tokens.input is not None:
            self._count("input", tokens.input)
        if tokens.cached is not None:
            self._count("cached", tokens.cached)
        if tokens.reasoning is not None:
            self._count("reasoning", tokens.reasoning)
        if x.outcome is Outcome.CLIENT_CANCELLED and (after := summary.tokens_after_cancel(x, m)):
            self._count("after_cancel", after)
        if not m.output_events and (reason := summary.no_token_reason(x, m)) is not None:
            self._count("no_token", 1, reason)
        if x.refusal is not None or x.guardrail is not None:
            self._count_guardrail(x)
        t = x.timeline
        if t.head_ns is not None and t.submit_ns is not None and t.head_ns >= t.submit_ns:
            self._in("headers").record(t.head_ns - t.submit_ns)
        if m.ttfb_ns is not None:
            self._in("ttfb").record(m.ttfb_ns)
        if m.e2e_ns is not None and x.outcome in summary.ENDED_WELL:
            self._in("duration").record(m.e2e_ns)
        if x.server_timing:
            for name, ns in summary.clock_disagreement(x, m).items():
                self._in("clock", name, "ours" if ns >= 0 else "server").record(abs(ns))
        if x.stream:
            self._add_stream(x, m)

    def _add_stream(self, x: Exchange, m: Measured) -> None:
        t = x.timeline
        refusal_ns = None
        if t.first_refusal_ns is not None and t.submit_ns is not None:
            refusal_ns = max(0, t.first_refusal_ns - t.submit_ns)
        for kind, ns in (
            ("content", m.ttft_ns), ("any", m.ttft_any_ns), ("reasoning", m.ttft_reasoning_ns),
            ("tool", m.ttft_tool_call_ns), ("refusal", refusal_ns),
        ):  # fmt: skip
            if ns is not None:
                self._in("ttft", kind).record(ns)
        for key, ns in (
            ("first_event", m.first_event_ns), ("idle", m.user_idle_ns),
            ("idle_reading", m.user_idle_from_first_token_ns),
        ):  # fmt: skip
            if ns is not None:
                self._in(key).record(ns)
        if m.smooth_benefit is not None and x.tokens.output is not None:
            self._count("smooth_tokens", x.tokens.output)
            self._count("smooth_penalty", x.tokens.output - m.smooth_benefit)
        if m.tpot_ns is not None:
            self._in("tpot").record(round(m.tpot_ns))
        if m.tbc_ns:
            self._in("chunk_gap").record_many(m.tbc_ns)
        for option, gaps_ns in (("B", m.itl_b_ns), ("B-even", m.itl_even_ns), ("C", m.itl_c_ns)):
            if gaps_ns:
                self._in("token_gap", option).record_many(gaps_ns)
        if m.tokens_per_chunk:
            self._in("chunk_tokens").record_many(m.tokens_per_chunk)
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

    def deadlines(self, found: Fluidity) -> None:
        self._count("deadlines", found.in_time, "met")
        self._count("deadlines", found.missed, "missed")

    def uncertain(self) -> None:
        self._count("uncertain", 1)

    def _count(self, name: str, n: float, *labels: str) -> None:
        key = (name, labels)
        self.counts[key] = self.counts.get(key, 0) + n

    def _in(self, name: str, *labels: str) -> Buckets:
        key = (name, labels)
        cell = self._cells.get(key)
        if cell is None:
            family = self._families[name]
            cell = DualBuckets(family.edges, family.unit) if self._native else Buckets(family.edges)
            self._cells[key] = cell
        return cell
