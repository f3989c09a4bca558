"""What a prefix cache was worth, from repeats in three states: off, cold and warm (seed 000, 5.7.4).

All figures are public JSON.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from typing import Any, Final

import msgspec

from llmtap.bench.report.paired import over_repeats, pairs, quantile_ratio, values_by_row
from llmtap.bench.run.figures import latency_row
from llmtap.bench.run.load_level import Capacity
from llmtap.bench.run.measurement import Measurement
from llmtap.metrics.comparison import cache_hit_rate, increase
from llmtap.metrics.significance import compare_paired
from llmtap.workload.plan import NO_CONTEXT

__all__ = ["SHARES", "STATES", "PrefixRun", "Rates", "figures", "hot_firsts", "ttfts"]

STATES: Final = {"off": "Cache Disabled", "cold": "Cache (Cold)", "warm": "Cache (Warm)"}
SHARES: Final = {"p50": 0.50, "p95": 0.95, "p99": 0.99}
Rates = Mapping[str, Sequence[tuple[float, float | None]]]
"""Requests and output tokens per second of each repeat, `off` and `on`."""


@dataclass(slots=True)
class PrefixRun:
    """A repeat: one measurement for each state."""

    contexts: Sequence[int]
    """By row, which prefix it shares; NO_CONTEXT where it shares none."""
    lengths: Sequence[int]
    """Tokens of each prefix."""
    states: dict[str, Measurement] = field(default_factory=dict)

    def prefix(self, row: int) -> int:
        """Tokens of the row's shared prefix; 0 where it shares none."""
        context = self.contexts[row]
        return 0 if context == NO_CONTEXT else self.lengths[context]


def figures(
    runs: Sequence[PrefixRun], rate: float, capacity: Capacity | None, rates: Rates | None
) -> dict[str, Any]:
    """All that 5.7.4 asks for; of cold and of warm against off."""
    told: dict[str, Any] = {
        "rate_rps": rate,
        "capacity": None if capacity is None else msgspec.to_builtins(capacity),
        "ttft": {state: latency_row(ttfts(runs, state), SHARES) for state in STATES},
        "by_sharing": {
            state: {
                says: latency_row(ttfts(runs, state, shares), SHARES)
                for says, shares in (("shared", True), ("not_shared", False))
            }
            for state in STATES
        },
        "reduction": {},
        "hit_rate": {state: _hits(runs, state) for state in STATES},
        "throughput": None if rates is None else _improvement(rates),
    }  # fmt: skip
    for state in ("cold", "warm"):
        off, on = pairs(((one.states["off"], one.states[state]) for one in runs), "ttft_ns")
        ratios = {name: quantile_ratio(off, on, p, paired=True) for name, p in SHARES.items()}
        shift = compare_paired(off, on)
        told["reduction"][state] = {
            **{name: None if ratio is None else _less(ratio) for name, ratio in ratios.items()},
            "pairs": len(off),
            "shift": None if shift is None else shift.to_dict(),
            "by_repeats": _by_repeats(runs, state),
        }
    return told


def ttfts(runs: Iterable[PrefixRun], state: str, shares: bool | None = None) -> list[float]:
    """TTFT of all repeats in a state; of requests that do, or do not, share a prefix, where that is asked."""
    return [
        value
        for one in runs
        for row, value in values_by_row(one.states[state], "ttft_ns").items()
        if shares is None or shares == bool(one.prefix(row))
    ]


def _less(ratio: Mapping[str, Any]) -> dict[str, Any]:
    """on / off as a reduction, (off - on) / off."""
    return {
        **ratio,
        "value": 1 - ratio["value"],
        "low": None if ratio["high"] is None else 1 - ratio["high"],
        "high": None if ratio["low"] is None else 1 - ratio["low"],
    }


def _by_repeats(runs: Sequence[PrefixRun], state: str) -> dict[str, Any] | None:
    """The reduction of P50 in one repeat after the other: their geometric mean; None of fewer than three."""
    logs = []
    for one in runs:
        off, on = pairs([(one.states["off"], one.states[state])], "ttft_ns")
        ratio = quantile_ratio(off, on, 0.5, paired=True)
        if ratio is not None:
            logs.append(log(ratio["value"]))
    found = over_repeats(logs)
    if found is None:
        return None
    ends = {"value": 1 - exp(found["value"]), "low": 1 - exp(found["high"]), "high": 1 - exp(found["low"])}
    return {**found, **ends}


def _hits(runs: Sequence[PrefixRun], state: str) -> dict[str, Any] | None:
    """Of the tokens of shared prefixes, those that came from the cache; None where the server tells none.

    A server may leave the field out where it is 0, so one that tells it once is taken to mean 0 elsewhere.
    """
    cached = prefix = told = 0
    for one in runs:
        hits = values_by_row(one.states[state], "cached_tokens")
        told += len(hits)
        for row in values_by_row(one.states[state], "e2e_ns"):
            cached += min(int(hits.get(row, 0)), one.prefix(row))
            prefix += one.prefix(row)
    rate = cache_hit_rate(cached, prefix)
    if not told or rate is None:
        return None
    return {"value": rate, "cached_tokens": cached, "prefix_tokens": prefix, "answers_that_tell": told}


def _improvement(rates: Rates) -> dict[str, Any]:
    """Output tokens per second, or requests where tokens are not known; off, on, and the increase."""
    known = all(tps is not None for runs in rates.values() for _, tps in runs)
    off, on = ([(tps if known else rps) or 0.0 for rps, tps in rates[state]] for state in ("off", "on"))
    means = [sum(values) / len(values) for values in (off, on)]
    more = [gain for a, b in zip(off, on, strict=True) if (gain := increase(a, b)) is not None]
    compared = over_repeats(more)
    return {
        "unit": "output tokens/s" if known else "requests/s",
        "off": {"mean": means[0], "runs": off},
        "on": {"mean": means[1], "runs": on},
        "improvement": {
            "value": sum(more) / len(more) if more else None,
            "low": None if compared is None else compared["low"],
            "high": None if compared is None else compared["high"],
            "n": len(off), "level": 0.95, "p": None if compared is None else compared["p"],
        },
    }  # fmt: skip


def hot_firsts(runs: Sequence[PrefixRun]) -> int:
    """First requests of a prefix, in cold runs, for most of which the cache had something."""
    hot = 0
    for one in runs:
        cold = one.states["cold"]
        hits = values_by_row(cold, "cached_tokens")
        seen = {NO_CONTEXT}
        for row, context in enumerate(one.contexts):
            if context not in seen:
                seen.add(context)
                hot += hits.get(row, 0) > one.prefix(row) / 2
    return hot
