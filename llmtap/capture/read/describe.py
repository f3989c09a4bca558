"""A capture summed up: the Summary of its exchanges, and the shape of its workload, as public JSON."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

import pyarrow as pa

from llmtap.capture.read.workload import CapturedWorkload
from llmtap.capture.schema import CaptureInfo
from llmtap.capture.store.rows import exchanges_of
from llmtap.exchange.exchange import Exchange
from llmtap.metrics.objectives import Objectives
from llmtap.metrics.summary import Summary

__all__ = ["BY", "describe"]

GROUPS_MAX: Final = 1_000
"""Of each label: a summary takes some KB, and sessions come by the million. The rest is `other`."""
_OTHER: Final = "other"
_NONE: Final = "none"

_LABELS: Final[dict[str, Callable[[Exchange], str | None]]] = {
    "tenant": lambda x: x.tenant,
    "model": lambda x: x.model,
    "arm": lambda x: x.arm,
    "session": lambda x: None if x.turn is None else x.turn.session,
}
BY: Final = tuple(_LABELS)
"""What a capture's summary can be split by."""


class _Groups:
    """A summary for each value of a label."""

    def __init__(self, label: str, objectives: Objectives | None) -> None:
        self._of = _LABELS[label]
        self._objectives = objectives
        self.summaries: dict[str, Summary] = {}

    def add(self, x: Exchange) -> None:
        name = self._of(x) or _NONE
        summary = self.summaries.get(name)
        if summary is None:
            if len(self.summaries) >= GROUPS_MAX:
                name = _OTHER
            summary = self.summaries.setdefault(name, Summary(self._objectives))
        summary.add(x)


def describe(
    infos: Sequence[CaptureInfo],
    batches: Iterable[pa.RecordBatch],
    *,
    by: Collection[str] = (),
    objectives: Objectives | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, object]:
    """A Summary as JSON, with `capture` (what it is) and `workload` beside it.

    Args:
        infos: what the files say of themselves.
        batches: all rows, in the whole schema.
        by: some of BY, to have the same for each tenant, model, ...
        objectives: what the exchanges are judged by.
        progress: told the rows done, now and then.
    """
    wall = all(info.arrivals == "wall" for info in infos)
    workload = CapturedWorkload(wall=wall)
    total = Summary(objectives)
    groups = {label: _Groups(label, objectives) for label in by}
    unknown = uncertainties = 0
    for batch in batches:
        workload.add(batch)
        unknown += batch.column("outcome").null_count
        uncertainties += batch.num_rows - batch.column("uncertainty_us").null_count
        for x in exchanges_of(batch):
            total.add(x)
            for group in groups.values():
                group.add(x)
        if progress is not None:
            progress(workload.rows)
    window, seconds, mode = workload.window(), workload.span_s, workload.mode
    parts = {
        label: {
            name: summary.to_dict(window, seconds, mode)
            for name, summary in sorted(group.summaries.items(), key=lambda part: -part[1].n)
        }
        for label, group in groups.items()
    }
    out = total.to_dict(window, seconds, mode, parts)
    if unknown:
        # A trace that tells no outcome says nothing of how its exchanges ended.
        outcomes = Counter(out["outcomes"])  # type: ignore[call-overload]
        outcomes["unknown"], outcomes["complete"] = unknown, outcomes["complete"] - unknown
        out["outcomes"] = {name: n for name, n in sorted(outcomes.items()) if n}
    for one in (out, *(summary for part in parts.values() for summary in part.values())):
        if not uncertainties:
            one["uncertainty"] = None
        if not workload.ends_known:
            one["load"] |= {"achieved_rps": None}  # type: ignore[operator]
    told = workload.to_dict()
    out["capture"] = {
        "rows": workload.rows,
        "captures": sorted({info.capture for info in infos if info.capture}),
        "levels": told.pop("levels"),
        **{
            name: sorted({str(value) for info in infos if (value := getattr(info, name))})
            for name in ("level", "tap_version", "config", "tokenizer", "source", "arrivals", "blocks")
        },
        "damaged": sum(info.damaged.get("batches", 0) for info in infos),
    }
    out["workload"] = told
    return out
