"""What a trace amounts to, in the terms of the `stats.json` beside the shared traces.

Whole numbers all the way: sums, sums of squares and percentiles are exact; only the last step makes a float
of each, rounded to twelve digits as those files have it. Percentiles are linear (numpy's default); gaps are
those of the sorted times; bins of one second begin with the first arrival.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pyarrow as pa

__all__ = ["arrivals", "column", "correlation", "counts", "prefix", "twelve_digits"]

_PERCENTILES = ("p1", "p5", "p25", "p50", "p75", "p90", "p95", "p99", "p99.9")
_S = 1_000_000_000


def column(batches: Iterable[pa.RecordBatch], name: str) -> list[Any]:
    """A column of all batches."""
    return [value for batch in batches for value in batch.column(name).to_pylist()]


def counts(values: Sequence[int]) -> dict[str, Any]:
    """Of token counts, or whole seconds."""
    n, total = len(values), sum(values)
    found: dict[str, Any] = {
        "n": n,
        "mean": Fraction(total, n),
        "std_pop": _std(values),
        "min": min(values),
        "max": max(values),
        "sum": total,
    }
    ordered = sorted(values)
    return twelve_digits({**found, **{p: _percentile(ordered, p) for p in _PERCENTILES}})


def arrivals(times_ns: Sequence[int]) -> dict[str, Any]:
    """Of the arrivals of a trace, in the order of its rows."""
    n, ordered = len(times_ns), sorted(times_ns)
    gaps = [b - a for a, b in pairwise(ordered)]
    span, std = ordered[-1] - ordered[0], _std(gaps)
    mean = Fraction(span, n - 1)
    in_bin = Counter((t - ordered[0]) // _S for t in ordered)
    bins = span // _S + 1
    return twelve_digits(
        {
            "n": n,
            "span_s": Fraction(span, _S),
            "out_of_order_rows": sum(b < a for a, b in pairwise(times_ns)),
            "mean_rate_rps_(n-1)/span": (n - 1) / Fraction(span, _S),
            "iat_mean_s": mean / _S,
            "iat_std_pop_s": std / _S,
            "iat_cv_pop": std / float(mean),
            "iat_cv_sample_ddof1": std * math.sqrt(len(gaps) / (len(gaps) - 1)) / float(mean),
            "zero_gap_fraction": Fraction(gaps.count(0), len(gaps)),
            "iat_percentiles_s": {p: _percentile(sorted(gaps), p) / _S for p in ("p50", "p90", "p99")},
            "dispersion_index_1s_bins": _dispersion(in_bin.values(), n, bins),
            "peak_1s_count": max(in_bin.values()),
        }
    )


def correlation(a: Sequence[int], b: Sequence[int]) -> float:
    """Pearson's."""
    n = len(a)
    both = n * sum(x * y for x, y in zip(a, b, strict=True)) - sum(a) * sum(b)
    found: float = twelve_digits(both / (_std(a) * _std(b) * n * n))
    return found


def prefix(ids: Sequence[list[int]], tokens: Sequence[int], size: int) -> dict[str, Any]:
    """How much of the prompts an endless cache would have held, row after row."""
    total, seen = sum(map(len, ids)), set[int]()
    hits = hit_tokens = known = 0
    for row, length in zip(ids, tokens, strict=True):
        lead = next((i for i, block in enumerate(row) if block not in seen), len(row))
        hits += lead
        hit_tokens += min(lead * size, length)
        known += sum(block in seen for block in row)
        seen.update(row)
    fits = sum(len(row) == -(-length // size) for row, length in zip(ids, tokens, strict=True))
    return twelve_digits(
        {
            "block_size": size,
            "blocks_total": total,
            "blocks_unique": len(seen),
            "rows_where_len_hash_ids_eq_ceil(input/bs)": fits,
            "infinite_cache_prefix_block_hit_ratio": Fraction(hits, total),
            "infinite_cache_prefix_token_hit_ratio": Fraction(hit_tokens, sum(tokens)),
            "infinite_cache_membership_block_ratio": Fraction(known, total),
            "max_hash_id": max(seen),
            "min_hash_id": min(seen),
        }
    )


def twelve_digits(value: Any) -> Any:
    """Numbers as those files have them."""
    if isinstance(value, dict):
        return {key: twelve_digits(v) for key, v in value.items()}
    return float(f"{float(value):.12g}") if isinstance(value, Fraction | float) else value


def _std(values: Sequence[int]) -> float:
    n = len(values)
    return math.sqrt(n * sum(v * v for v in values) - sum(values) ** 2) / n


def _percentile(ordered: Sequence[int], name: str) -> Fraction:
    at = Fraction(name[1:]) / 100 * (len(ordered) - 1)
    low = ordered[math.floor(at)]
    return low + (at - math.floor(at)) * (ordered[math.ceil(at)] - low)


def _dispersion(in_bins: Iterable[int], n: int, bins: int) -> Fraction:
    """Variance over mean of the bins, the empty ones included."""
    mean = Fraction(n, bins)
    return (Fraction(sum(c * c for c in in_bins), bins) - mean**2) / mean
