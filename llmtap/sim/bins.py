"""Bins of predicted output lengths: where their edges are, and how large a batch of each may be.

Equal-mass edges (seed 004, Algorithm 3) are quantiles of the predicted lengths, linear, floored. A length
that is many requests' makes edges equal, and bins between equal edges stay empty. The last bin has no upper
edge.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Final

from llmtap.sim.model_options import ModelOptions

__all__ = ["Bins", "batch_limits", "equal_mass"]

_ENDLESS: Final = 4_096
"""Upper edge of the last bin, where its mean length is to be told."""
_FIRST: Final = 1_000
"""Requests whose lengths are known to who cannot see the future."""


class Bins:
    """Lower edges, ascending; each bin ends before the next one's edge."""

    def __init__(self, edges: Sequence[int], *, below: str = "last") -> None:
        assert edges and list(edges) == sorted(edges), edges
        self.edges = list(edges)
        self._below = len(edges) - 1 if below == "last" else 0

    def __len__(self) -> int:
        return len(self.edges)

    def find(self, length: int) -> int:
        """The bin of a predicted length."""
        # Of bins with one lower edge all but the last are empty, and `bisect_right` finds the last.
        found = bisect_right(self.edges, length) - 1
        return found if found >= 0 else self._below

    @property
    def spans(self) -> list[tuple[int, int | None]]:
        """Of each bin, the first length that is in it and the first that is not."""
        return list(zip(self.edges, [*self.edges[1:], None], strict=True))


def equal_mass(lengths: Iterable[int], count: int, readings: ModelOptions) -> Bins:
    """Bins with as many of the lengths in each as whole edges allow."""
    known = list(lengths)
    if readings.edges == "first-1000":
        known = known[:_FIRST]
    known.sort()
    edges = []
    for i in range(count):
        # The quantile i / count in whole numbers, so that no rounding moves an edge.
        at, part = divmod((len(known) - 1) * i, count)
        low, high = known[at], known[min(at + 1, len(known) - 1)]
        edges.append((low * (count - part) + high * part) // count)
    return Bins(edges, below=readings.below_first)


def batch_limits(bins: Bins, readings: ModelOptions) -> list[int]:
    """Of each bin, how many requests a batch may have (seed 004, 8.2)."""
    if readings.bin_limit == "none":
        return [readings.b_max] * len(bins)
    memory_gb = readings.safe_gb if readings.bin_limit == "7gb" else readings.free_gb
    limits = []
    for low, high in bins.spans:
        # As many prompt tokens are expected as output tokens: twice the middle of the bin.
        tokens = low + (_ENDLESS if high is None else high)
        fits = memory_gb / (tokens * readings.kv_gb_per_token) if tokens else readings.b_max
        limits.append(max(1, min(readings.b_max, int(fits))))
    return limits
