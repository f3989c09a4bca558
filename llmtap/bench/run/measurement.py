"""One load and what came of it: a table with a row for each request, and the gaps between their tokens.

Every figure of a test is computed from this table, so a step that was measured before an interruption counts
like one that was measured now. It lies in the results folder as Parquet, beside the capture it came from.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from llmtap.exchange.exchange import Exchange
from llmtap.metrics.latency import measure
from llmtap.metrics.summary import ENDED_WELL

__all__ = ["Measurement", "MeasurementRecorder"]

NOT_KNOWN: Final = -1
"""In every integer column."""
_INTEGERS: Final = (
    "row", "sent_ns", "scheduled_ns", "end_ns", "ttft_ns", "ttft_any_ns", "e2e_ns", "input_tokens",
    "output_tokens", "cached_tokens", "uncertainty_ns",
)  # fmt: skip
_FLOATS: Final = ("tpot_ns", "jitter_ns", "server_queue_ns", "server_prefill_ns")
_TEXTS: Final = ("outcome", "request_class", "token_source", "itl_policy")


@dataclass(slots=True)
class Measurement:
    """What a load came to."""

    name: str
    """Of the step, unique within a test: `search/0012-16rps`."""
    arm: str
    result: dict[str, Any]
    """As `llmtap replay --json` tells it: summary, plan, dispatch lateness, verdict, warm-up."""
    table: pa.Table
    """A row for each request, in the order of their submission. Columns: `row` (of the plan), `sent_ns`,
    `scheduled_ns` and `end_ns` (from the load's start), `ttft_ns` (first content token), `ttft_any_ns`,
    `e2e_ns`, `tpot_ns`, `jitter_ns`, `input_tokens`, `output_tokens`, `cached_tokens`, `uncertainty_ns`,
    `server_queue_ns`, `server_prefill_ns`, `outcome`, `request_class`, `token_source`, `itl_policy`,
    `gaps_ns` (a list: the time before each event with tokens but the first) and `server_gaps_ns` (the
    same between tokens, by the server's own clock: option C of 4.6.3). What is not known is null."""
    cached: bool = False
    """It was measured before this run was begun, and read from the results folder."""

    @property
    def seconds(self) -> float:
        """From the load's start to its last answer."""
        return float(self.result["window"]["seconds"])

    @property
    def n(self) -> int:
        """Requests sent."""
        return len(self.table)

    def ended_well(self) -> pa.Table:
        """The rows whose answer came whole: complete, or refused by a guardrail."""
        return self.table.filter(pc.field("outcome").isin([o.value for o in ENDED_WELL]))

    def of_class(self, name: str) -> "Measurement":
        """The same for one class of requests."""
        chosen = self.table.filter(pc.field("request_class") == name)
        return Measurement(self.name, self.arm, self.result, chosen, self.cached)

    def values(self, column: str) -> list[float]:
        """A column's known values, of whole answers, ascending; in seconds where its name ends in `_ns`."""
        found = self.ended_well().column(column).drop_null().to_pylist()
        scale = 1e9 if column.endswith("_ns") else 1
        return sorted(value / scale for value in found)

    def gaps(self) -> list[float]:
        """All times between events with tokens, of answers that came whole; seconds, not sorted."""
        column = self.ended_well().column("gaps_ns").combine_chunks()
        flat = column.flatten() if len(column) else pa.array([], pa.int64())
        return [ns / 1e9 for ns in flat.to_pylist()]

    def gaps_by_request(self) -> list[list[float]]:
        """The same, a list for each request that has any."""
        rows = self.ended_well().column("gaps_ns").to_pylist()
        return [[ns / 1e9 for ns in gaps] for gaps in rows if gaps]

    def save(self, folder: Path) -> None:
        """Writes `requests.parquet` there. The result is the folder's owner's."""
        pq.write_table(self.table, folder / "requests.parquet", compression="zstd")

    @classmethod
    def load(cls, folder: Path, name: str, arm: str, result: Mapping[str, Any]) -> "Measurement":
        """What `save` wrote."""
        return cls(name, arm, dict(result), pq.read_table(folder / "requests.parquet"), cached=True)


@dataclass(slots=True)
class MeasurementRecorder:
    """Makes the table of exchanges, in any order."""

    began_ns: int
    """The load's start (mono)."""
    class_of: Callable[[int], str | None] = lambda row: None
    """The class of a request, by its row in the plan."""
    _integers: "dict[str, array[int]]" = field(default_factory=lambda: {n: array("q") for n in _INTEGERS})
    _floats: "dict[str, list[float | None]]" = field(default_factory=lambda: {n: [] for n in _FLOATS})
    _texts: "dict[str, list[str | None]]" = field(default_factory=lambda: {n: [] for n in _TEXTS})
    _gaps: "list[Sequence[int]]" = field(default_factory=list)
    _server_gaps: "list[Sequence[int] | None]" = field(default_factory=list)

    def add(self, row: int, x: Exchange) -> None:
        """An exchange of the load."""
        m, t, began_ns = measure(x), x.timeline, self.began_ns
        submit_ns = t.submit_ns
        end_ns = t.response_end_ns
        for name, value in (
            ("row", row),
            ("sent_ns", None if submit_ns is None else submit_ns - began_ns),
            ("scheduled_ns", None if x.scheduled_ns is None else x.scheduled_ns - began_ns),
            ("end_ns", None if end_ns is None else end_ns - began_ns),
            ("ttft_ns", m.ttft_ns), ("ttft_any_ns", m.ttft_any_ns), ("e2e_ns", m.e2e_ns),
            ("input_tokens", x.tokens.input), ("output_tokens", x.tokens.output),
            ("cached_tokens", x.tokens.cached), ("uncertainty_ns", x.uncertainty_ns),
        ):  # fmt: skip
            self._integers[name].append(NOT_KNOWN if value is None else value)
        self._floats["tpot_ns"].append(m.tpot_ns)
        self._floats["jitter_ns"].append(m.jitter_ns)
        self._floats["server_queue_ns"].append(_told_ns(x, "queue"))
        self._floats["server_prefill_ns"].append(_told_ns(x, "prefill"))
        self._texts["outcome"].append(x.outcome.value)
        self._texts["request_class"].append(self.class_of(row))
        self._texts["token_source"].append(x.tokens.source)
        self._texts["itl_policy"].append(m.itl_policy)
        self._gaps.append(m.tbc_ns)
        self._server_gaps.append(m.itl_c_ns)

    def table(self) -> pa.Table:
        """All rows, by the time of their submission."""
        columns: dict[str, pa.Array] = {}
        for name, integers in self._integers.items():
            values = pa.array(integers, pa.int64())
            unknown = pc.equal(values, NOT_KNOWN)
            columns[name] = pc.if_else(unknown, pa.scalar(None, pa.int64()), values)
        for name, floats in self._floats.items():
            columns[name] = pa.array(floats, pa.float64())
        for name, texts in self._texts.items():
            columns[name] = pa.array(texts, pa.string())
        columns["gaps_ns"] = pa.array(self._gaps, pa.list_(pa.int64()))
        columns["server_gaps_ns"] = pa.array(self._server_gaps, pa.list_(pa.int64()))
        return pa.table(columns).sort_by("sent_ns")


def _told_ns(x: Exchange, name: str) -> float | None:
    """A duration that the server told of this exchange."""
    for entry in x.server_timing or ():
        ms = entry.get("ms")
        if entry.get("name") == name and isinstance(ms, int | float):
            return ms * 1e6
    return None
