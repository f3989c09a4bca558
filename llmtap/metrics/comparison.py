"""One configuration against another: caches, guardrails, throughput. Source: IETF seed 000, 5.7.4 and 5.10.4.

None where the base is 0 or a figure is missing: a change of nothing is not known.
"""

from collections.abc import Sequence

__all__ = ["cache_hit_rate", "difference", "increase", "overhead", "reduction"]


def reduction(base: float | None, other: float | None) -> float | None:
    """(base - other) / base: TTFT reduction by a cache, throughput reduction by guardrails; a share."""
    if base is None or other is None or not base:
        return None
    return (base - other) / base


def increase(base: float | None, other: float | None) -> float | None:
    """(other - base) / base: throughput improvement by a cache; a share."""
    less = reduction(base, other)
    return None if less is None else -less


def difference(base: float | None, other: float | None) -> float | None:
    """other - base: input filter overhead of TTFT, total guardrail overhead of E2E; the figures' own unit."""
    return None if base is None or other is None else other - base


def overhead(base: Sequence[float | None], other: Sequence[float | None]) -> list[float | None]:
    """`difference` figure by figure, for a row of percentiles."""
    return [difference(b, o) for b, o in zip(base, other, strict=True)]


def cache_hit_rate(cached_tokens: int, prefix_tokens: int) -> float | None:
    """Share of prefix tokens that were served from the cache; None without a prefix."""
    return cached_tokens / prefix_tokens if prefix_tokens else None
