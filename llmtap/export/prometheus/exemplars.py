"""Exemplars: for each bucket of a histogram, the last request in it that its caller traces.

They lead from "the slow bucket grew" to a trace of just that. OpenMetrics shows them beside the bucket; the
older text format has no place for them.

Source: OpenMetrics 1.0, "Exemplars": at most 128 characters over all names and values (ours have 63).
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

from prometheus_client.samples import Exemplar

from llmtap.export.trace_context import TraceParent

__all__ = ["EXEMPLARS_MAX", "Exemplars", "Kept", "by_series"]

EXEMPLARS_MAX: Final = 20_000
"""The newest: 0.5 KB each, and 2,000 series of a histogram have 60,000 buckets, most with old news."""

Kept = Mapping[tuple[str, tuple[str, ...], int], tuple[int, str, str, int]]
"""By metric, labels and bucket: value, trace id, span id, and when, in ns since the epoch."""


class Exemplars:
    """The last of each bucket."""

    def __init__(self, most: int = EXEMPLARS_MAX) -> None:
        self._last: OrderedDict[tuple[str, tuple[str, ...], int], tuple[int, str, str, int]] = OrderedDict()
        self._most = most

    def note(
        self,
        metric: str,
        labels: tuple[str, ...],
        edges: Sequence[int],
        value: int,
        parent: TraceParent,
        wall_ns: int,
    ) -> None:
        """A value of a metric's series, of a request that is traced."""
        key = (metric, labels, bisect_left(edges, value))
        self._last[key] = (value, parent.trace_id, parent.span_id, wall_ns)
        self._last.move_to_end(key)
        if len(self._last) > self._most:
            self._last.popitem(last=False)

    def freeze(self) -> Kept:
        """A copy."""
        return dict(self._last)


def by_series(kept: Kept, unit: float) -> dict[str, dict[tuple[str, ...], dict[int, Exemplar]]]:
    """As the exposition wants them: by metric, labels, bucket; `unit` of ours make one of the metric's."""
    found: dict[str, dict[tuple[str, ...], dict[int, Exemplar]]] = {}
    for (metric, labels, bucket), (value, trace_id, span_id, wall_ns) in kept.items():
        exemplar = Exemplar({"trace_id": trace_id, "span_id": span_id}, value / unit, wall_ns / 1e9)
        found.setdefault(metric, {}).setdefault(labels, {})[bucket] = exemplar
    return found
