"""Summarise a capture (`llmtap report`): Summary of its exchanges and shape of its workload, as public JSON.

`describe` takes the metadata of the files and batches of rows. `cli/report.py` calls it for captures and for
traces of other formats. The Summary has the figures of `metrics/summary.py`, split by labels if wanted and
judged by the objectives of each class of tenants. `CapturedWorkload` counts arrivals, lengths, turns and
shared blocks, and `metrics/silences.py` counts the silences of the streams.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from llmtap.capture.columns import LABEL_GETTERS
from llmtap.capture.schema import CaptureInfo, back_rows_mask
from llmtap.capture.store.rows import exchanges_of
from llmtap.exchange.exchange import Exchange
from llmtap.metrics.deadlines import Benefit
from llmtap.metrics.histogram import Histogram
from llmtap.metrics.latency import DEFAULT_BENEFIT, Measured, measure
from llmtap.metrics.objectives import Objectives
from llmtap.metrics.phases import PhaseTimes
from llmtap.metrics.silences import SilenceCounts
from llmtap.metrics.statistics import rate_rps, summarise_ns
from llmtap.metrics.summary import Summary

_QUANTILES: Final = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
_BLOCK_KIND: Final = ["capture", "block_unit", "block_size"]
"""Columns in which two rows must be equal so that their block ids can be compared."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class CapturedWorkload:
    """Statistics of a capture's workload, to which batches are added."""

    def __init__(self, *, wall: bool = True) -> None:
        """`wall`: arrivals are times of the wall clock, and not offsets from the beginning of a trace."""
        self.rows = 0
        self._is_wall_time = wall
        """Whether the times are dates; False for a simulation, which begins at 0."""
        self._arrivals: list[pa.Array] = []
        """Arrival times, one array for each batch."""
        self._last_end_ns: int | None = None
        """Latest end of an exchange."""
        self._tokens: dict[str, list[pa.Array]] = {"input": [], "output": []}
        self._counts: dict[str, dict[str, int]] = {}
        """By column: number of exchanges with each value."""
        self._scheduled_rows = 0
        """Number of exchanges with a planned send time, which shows a replay."""
        self._ended_rows = 0
        """Number of exchanges whose end is known."""
        self._blocks: dict[tuple[Any, ...], tuple[int, pa.Array]] = {}
        """By capture, unit and size of blocks: number of blocks, and ids of all different ones."""
        self._sessions: list[pa.Table] = []
        """Session and turn of each exchange, one table for each batch."""
        self._think_times: list[pa.Table] = []
        """Times that users took before a request, with their kind."""

    def add(self, batch: pa.RecordBatch) -> None:
        """Count the rows of a batch that has all columns of a capture."""
        self.rows += batch.num_rows
        arrivals = batch.column("arrival_ns")
        self._arrivals.append(arrivals.drop_null())
        ended = batch.column("response_end_us")
        ends = pc.add(arrivals, pc.multiply(pc.fill_null(ended, 0), 1_000))
        last_ns = pc.max(ends).as_py()
        if last_ns is not None:
            self._last_end_ns = last_ns if self._last_end_ns is None else max(self._last_end_ns, last_ns)
        for name, values in self._tokens.items():
            values.append(batch.column(f"{name}_tokens").drop_null())
        self._scheduled_rows += batch.num_rows - batch.column("scheduled_us").null_count
        self._ended_rows += batch.num_rows - ended.null_count
        for name in ("input_token_source", "token_source", "session_source", "turn_by"):
            counts = self._counts.setdefault(name, {})
            for entry in pc.value_counts(batch.column(name).drop_null()).to_pylist():
                counts[entry["values"]] = counts.get(entry["values"], 0) + entry["counts"]
        self._add_blocks(batch)
        named = pa.Table.from_batches([batch.select(["capture", "session"])])
        named = named.filter(pc.is_valid(named.column("session")))
        self._sessions.append(named.group_by(["capture", "session"]).aggregate([([], "count_all")]))
        think = pa.Table.from_batches([batch.select(["turn_by", "think_us"])])
        self._think_times.append(think.filter(pc.is_valid(think.column("think_us"))))

    def _add_blocks(self, batch: pa.RecordBatch) -> None:
        """Add the block ids, separately for each kind of blocks: only ids of one kind can be compared."""
        table = pa.Table.from_batches([batch.select(_BLOCK_KIND)])
        kinds = table.group_by(_BLOCK_KIND).aggregate([]).to_pylist()
        for kind in kinds:
            part = batch
            if len(kinds) > 1:
                for name, value in kind.items():
                    column = part.column(name)
                    part = part.filter(pc.is_null(column) if value is None else pc.equal(column, value))
            ids = part.column("blocks").flatten()
            if len(ids):
                key = tuple(kind.values())
                n, distinct = self._blocks.get(key, (0, pa.array([], pa.int64())))
                self._blocks[key] = n + len(ids), pc.unique(pa.concat_arrays([distinct, ids]))

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last end; 0 without rows."""
        first_ns = self._first_ns()
        return 0.0 if first_ns is None or self._last_end_ns is None else (self._last_end_ns - first_ns) / 1e9

    @property
    def mode(self) -> str:
        """`open` if every row has a planned send time, else `recorded`."""
        return "open" if self._scheduled_rows and self._scheduled_rows == self.rows else "recorded"

    @property
    def has_ends(self) -> bool:
        return self._ended_rows > 0

    def window(self) -> dict[str, object]:
        """Return the span in the form of a Summary's window."""
        return {
            "name": "capture",
            "seconds": self.span_s,
            "start": self._date_text(self._first_ns()),
            "end": self._date_text(self._last_end_ns),
        }

    def to_dict(self) -> dict[str, object]:
        """Return the statistics as public JSON: seconds, tokens and shares; null if unknown."""
        return {
            "rows": self.rows,
            "arrivals": self._arrival_figures(),
            "input_tokens": self._token_figures("input", "input_token_source"),
            "output_tokens": self._token_figures("output", "token_source"),
            "prefix": self._prefix_figures(),
            "sessions": self._session_figures(),
        }

    def _first_ns(self) -> int | None:
        firsts = [pc.min(part).as_py() for part in self._arrivals if len(part)]
        return min(firsts, default=None)

    def _date_text(self, ns: int | None) -> str | None:
        if ns is None or not self._is_wall_time:
            return None
        return (_EPOCH + timedelta(microseconds=ns // 1_000)).isoformat().replace("+00:00", "Z")

    def _arrival_figures(self) -> dict[str, object]:
        stamps = pa.chunked_array(self._arrivals, pa.int64()).combine_chunks()
        ordered = stamps.take(pc.array_sort_indices(stamps))
        n = len(ordered)
        gaps = pc.subtract(ordered.slice(1), ordered.slice(0, max(0, n - 1)))
        mean_ns = pc.mean(gaps).as_py()
        span_ns = ordered[-1].as_py() - ordered[0].as_py() if n else 0
        return {
            "n": n,
            "seconds": span_ns / 1e9,
            "rate_rps": rate_rps(n, span_ns),
            "gap_cv": pc.stddev(gaps).as_py() / mean_ns if mean_ns else None,
            "ties": pc.sum(pc.equal(gaps, 0)).as_py() / len(gaps) if len(gaps) else None,
        }

    def _token_figures(self, name: str, source: str) -> dict[str, object]:
        values = pa.chunked_array(self._tokens[name], pa.int64())
        return {**_figures(values), "total": pc.sum(values).as_py(), "source": self._counts.get(source, {})}

    def _prefix_figures(self) -> list[dict[str, object]]:
        return [
            {
                "capture": capture,
                "unit": unit,
                "block_size": size,
                "blocks": n,
                "hits": n - len(seen),
                "share": (n - len(seen)) / n,
            }
            for (capture, unit, size), (n, seen) in self._blocks.items()
        ]

    def _session_figures(self) -> dict[str, object] | None:
        if not any(table.num_rows for table in self._sessions):
            return None
        table = pa.concat_tables(self._sessions)
        turns = (
            table.group_by(["capture", "session"]).aggregate([("count_all", "sum")]).column("count_all_sum")
        )
        by = self._counts.get("turn_by", {})
        known = sum(by.values())
        think = pa.concat_tables(self._think_times)
        thinking = {
            author: _figures(
                think.filter(pc.fill_null(pc.equal(think.column("turn_by"), author), False)).column(
                    "think_us"
                ),
                1e6,
            )
            for author in ("human", "tool")
        }
        return {
            "n": len(turns),
            "exchanges": pc.sum(turns).as_py(),
            "turns": _figures(turns),
            "single_turn_share": pc.sum(pc.equal(turns, 1)).as_py() / len(turns),
            "source": self._counts.get("session_source", {}),
            "think": thinking,
            "tool_turn_share": by.get("tool", 0) / known if known else None,
        }


def _figures(values: Any, divisor: float = 1) -> dict[str, object]:
    """Return `n`, `mean`, `min`, `max` and percentiles of the values, each value divided by `divisor`."""
    n = len(values)
    spread = pc.min_max(values).as_py() if n else {"min": None, "max": None}
    figures = {"mean": pc.mean(values).as_py() if n else None, **spread}
    quantiles = pc.quantile(values, list(_QUANTILES.values())).to_pylist() if n else [None] * len(_QUANTILES)
    figures.update(zip(_QUANTILES, quantiles, strict=True))
    return {"n": n, **{name: None if v is None else v / divisor for name, v in figures.items()}}


GROUPS_MAX: Final = 1_000
"""Maximum number of groups of a label, because a group takes some KB, and a label such as `session` can have
millions of values. Exchanges with further values are counted in the group `other`."""


class _LabelGroups:
    """Summaries of the exchanges, one for each value of a label."""

    def __init__(self, label: str, new: Callable[[], Summary]) -> None:
        self._value_of, self._make_summary = LABEL_GETTERS[label], new
        self.summaries: dict[str, Summary] = {}

    def add(self, x: Exchange, m: Measured) -> None:
        name = str(self._value_of(x) or "none")
        if name not in self.summaries and len(self.summaries) >= GROUPS_MAX:
            name = "other"
        if name not in self.summaries:
            self.summaries[name] = self._make_summary()
        self.summaries[name].add(x, m)


def describe(
    infos: Sequence[CaptureInfo],
    batches: Iterable[pa.RecordBatch],
    *,
    by: Collection[str] = (),
    objectives: Objectives | None = None,
    percentiles: Mapping[str, float] | None = None,
    reader: Benefit = DEFAULT_BENEFIT,
    progress: Callable[[int], None] | None = None,
    on_exchange: Callable[[Exchange], None] | None = None,
) -> dict[str, object]:
    """Return a Summary as public JSON, with more members: `capture`, `phases`, `workload` and `silences`.

    Rows captured behind a gateway repeat requests sent to it, so only the Summaries by `side` count them.

    Args:
        infos: metadata of the files.
        batches: all rows, with all columns.
        by: names of labels (LABEL_GETTERS): adds a Summary for each value of each label.
        objectives: objectives by which the exchanges are judged.
        percentiles: additional percentiles of each metric, by name.
        reader: reading speed of a user, for user idle latency and smooth goodput.
        progress: called with the number of rows processed so far.
        on_exchange: called with each exchange.
    """
    wall = all(info.arrivals == "wall" for info in infos)
    workload = CapturedWorkload(wall=wall)
    total, phases, silences = Summary(objectives, reader), PhaseTimes(), SilenceCounts()
    groups = {label: _LabelGroups(label, lambda: Summary(objectives, reader)) for label in by}
    unknown = uncertainties = back = 0
    for rows in batches:
        is_back = back_rows_mask(rows)
        back += is_back.true_count
        if is_back.true_count and "side" in groups:
            for x in exchanges_of(rows.filter(is_back)):
                groups["side"].add(x, measure(x, reader))
        batch = rows.filter(pc.invert(is_back)) if is_back.true_count else rows
        workload.add(batch)
        unknown += batch.column("outcome").null_count
        uncertainties += batch.num_rows - batch.column("uncertainty_us").null_count
        for x in exchanges_of(batch):
            m = measure(x, reader)
            total.add(x, m)
            phases.add(x)
            silences.add(x, m)
            for group in groups.values():
                group.add(x, m)
            if on_exchange is not None:
                on_exchange(x)
        if progress is not None:
            progress(workload.rows + back)
    window, seconds, mode = workload.window(), workload.span_s, workload.mode
    parts = {
        label: {
            name: summary.to_dict(window, seconds, mode, percentiles=percentiles)
            for name, summary in sorted(group.summaries.items(), key=lambda part: -part[1].n)
        }
        for label, group in groups.items()
    }
    out = total.to_dict(window, seconds, mode, parts, percentiles=percentiles)
    if unknown:
        # Rows of a trace without an outcome were counted as complete: count them as unknown instead.
        outcomes = Counter(out["outcomes"])  # type: ignore[call-overload]
        outcomes["unknown"], outcomes["complete"] = unknown, outcomes["complete"] - unknown
        out["outcomes"] = {name: n for name, n in sorted(outcomes.items()) if n}
    for summary_part in (out, *(summary for part in parts.values() for summary in part.values())):
        if not uncertainties:
            summary_part["uncertainty"] = None
            summary_part["uncertainties"] = summarise_ns(Histogram())
        if not workload.has_ends:
            summary_part["load"] |= {"achieved_rps": None}  # type: ignore[operator]
    out["capture"] = {
        "rows": workload.rows,
        "back_rows": back,
        "captures": sorted({info.capture for info in infos if info.capture}),
        **{
            name: sorted({str(value) for info in infos if (value := getattr(info, name))})
            for name in ("level", "tap_version", "config", "tokenizer", "source", "arrivals", "blocks")
        },
        "damaged": sum(info.damaged.get("batches", 0) for info in infos),
    }
    out["phases"] = phases.to_dict()
    out["workload"] = workload.to_dict()
    out["silences"] = silences.to_dict()
    return out
