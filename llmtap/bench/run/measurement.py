"""The result of one load: a table with a row for each request, and its steady part without the ramp-up.

A `MeasurementRecorder` gets each exchange while the load runs (`session.py`). The table (`Measurement`) is
stored as Parquet, and every figure of a test is computed from it. The steady part (`steady_part_of`) begins
after a tenth of the load's time, ends when the last request was sent or at the planned end, and has five
equal divisions. The tokens of a response are assumed to be spread evenly between its first token and its end.
A difference between divisions counts if it exceeds two standard deviations; these are computed as if arrivals
and completions were independent.

Source: IETF draft, 5.2.3.1 and 5.2.3.2, which define neither "growing" nor "stable".
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from math import sqrt
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from llmtap.exchange.exchange import Exchange
from llmtap.exchange.outcome import Outcome
from llmtap.metrics.catalogue import Surface, shown_on, values_of
from llmtap.metrics.deadlines import Benefit
from llmtap.metrics.latency import DEFAULT_BENEFIT, measure
from llmtap.metrics.objectives import Judgement, Objectives
from llmtap.metrics.saturation import TAIL_TIMES, SaturationLevel, heavy_tail, incomplete
from llmtap.metrics.statistics import percentile
from llmtap.metrics.summary import ENDED_WELL
from llmtap.user_files import open_private

_METRICS: Final = shown_on(Surface.BENCH)
_metric_values: Final = values_of(_METRICS)
COLUMNS: Final[dict[str, pa.DataType]] = {
    **dict.fromkeys(
        (
            "row",
            "sent_ns",
            "scheduled_ns",
            "end_ns",
            "input_tokens",
            "output_tokens",
            "cached_tokens",
            "uncertainty_ns",
        ),
        pa.int64(),
    ),
    **dict.fromkeys(("server_queue_ns", "server_prefill_ns"), pa.float64()),
    **{metric.field: pa.float64() for metric in _METRICS},
    **dict.fromkeys(("met", "not_judged"), pa.bool_()),
    **dict.fromkeys(("outcome", "request_class", "token_source", "itl_policy"), pa.string()),
    **dict.fromkeys(("gaps_ns", "server_gaps_ns", "chunk_tokens"), pa.list_(pa.int64())),
}


@dataclass(slots=True)
class Measurement:
    """Result of one load: a summary, and a table with a row for each request."""

    name: str
    """Name of the load, unique within a test: `search/0012-16rps`."""
    arm: str
    """Configuration of the target to which the load was sent."""
    result: dict[str, Any]
    """Result as in `llmtap replay --json`: summary, plan, dispatch lateness, verdict, warm-up."""
    table: pa.Table
    """Table with the columns `COLUMNS` and a row for each request, in the order of submission. `sent_ns`,
    `scheduled_ns`, `end_ns`: times from the load's start; `gaps_ns`: times between events with tokens;
    `server_gaps_ns`: these times by the server's clock (option C); `chunk_tokens`: tokens of each event;
    `met`: whether all objectives of the load were met, null if the request does not count or is not judged
    (`Objectives.judge`); `not_judged`: whether the objectives could not judge the request, null without
    objectives; `smooth_benefit`: eq. 7 of the smooth goodput paper. Unknown values are null."""
    cached: bool = False
    """Whether an earlier command measured the load, and the result was read from the results folder."""

    @property
    def seconds(self) -> float:
        """Time from the load's start to its last response."""
        return float(self.result["window"]["seconds"])

    @property
    def n(self) -> int:
        return len(self.table)

    def successful_rows(self) -> pa.Table:
        """Return the rows with a complete response or a refusal by a guardrail."""
        return self.table.filter(pc.field("outcome").isin([o.value for o in ENDED_WELL]))

    def select_class(self, name: str) -> "Measurement":
        return replace(self, table=self.table.filter(pc.field("request_class") == name))

    def values(self, column: str) -> list[float]:
        """Return the sorted values of a column for responses that ended well; columns `*_ns` in seconds."""
        values = self.successful_rows().column(column).drop_null().to_pylist()
        scale = 1e9 if column.endswith("_ns") else 1
        return sorted(value / scale for value in values)

    def values_by_row(self, column: str) -> dict[int, float]:
        """Return a column's values for complete responses by row of the plan; columns `*_ns` in seconds."""
        table = self.table.filter(pc.field("outcome") == Outcome.COMPLETE.value)
        scale = 1e9 if column.endswith("_ns") else 1
        pairs = zip(table["row"].to_pylist(), table[column].to_pylist(), strict=True)
        return {row: value / scale for row, value in pairs if value is not None}

    def gaps(self) -> list[float]:
        """Return all gaps between events with tokens in responses that ended well, in seconds, unsorted."""
        return [gap for gaps in self.gaps_by_request() for gap in gaps]

    def gaps_by_request(self) -> list[list[float]]:
        rows = self.successful_rows().column("gaps_ns").to_pylist()
        return [[ns / 1e9 for ns in gaps] for gaps in rows if gaps]

    def save(self, folder: Path) -> None:
        with open(folder / "requests.parquet", "wb", opener=open_private) as file:
            pq.write_table(self.table, file, compression="zstd")

    @classmethod
    def load(cls, folder: Path, name: str, arm: str, result: Mapping[str, Any]) -> "Measurement":
        table = pq.read_table(folder / "requests.parquet")
        for column in COLUMNS.keys() - set(table.column_names):
            # Fill the column with unknown values: an earlier version of llmtap wrote the file without it.
            table = table.append_column(column, pa.nulls(len(table), COLUMNS[column]))
        return cls(name, arm, dict(result), table, cached=True)


@dataclass(slots=True)
class MeasurementRecorder:
    """Collector of the table of a `Measurement`, one row per exchange."""

    began_ns: int
    """Start of the load, from which the times in the table count."""
    class_of: Callable[[int], str | None] = lambda row: None
    """Function that returns the request class of a row of the plan."""
    objectives: Objectives | None = None
    reader: Benefit = DEFAULT_BENEFIT
    """Reading speed of the assumed user, for smooth goodput."""
    _columns: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in COLUMNS})
    """By name of a column: its values so far."""

    def add(self, row: int, x: Exchange) -> None:
        """Add an exchange to the table. `row`: index of its request in the load's plan."""
        m, t, tokens, began_ns = measure(x, self.reader), x.timeline, x.tokens, self.began_ns
        judgement = None if self.objectives is None else self.objectives.judge(m, x)
        values = {
            "row": row,
            "sent_ns": _ns_since(began_ns, t.submit_ns),
            "scheduled_ns": _ns_since(began_ns, x.scheduled_ns),
            "end_ns": _ns_since(began_ns, t.response_end_ns),
            **{metric.field: value for metric, value in zip(_METRICS, _metric_values(m), strict=True)},
            "input_tokens": tokens.input,
            "output_tokens": tokens.output,
            "cached_tokens": tokens.cached,
            "uncertainty_ns": x.uncertainty_ns,
            "server_queue_ns": _server_time_ns(x, "queue"),
            "server_prefill_ns": _server_time_ns(x, "prefill"),
            "outcome": x.outcome.value,
            "request_class": self.class_of(row),
            "token_source": tokens.source,
            "itl_policy": m.itl_policy,
            "gaps_ns": m.tbc_ns,
            "server_gaps_ns": m.itl_c_ns,
            "chunk_tokens": m.tokens_per_chunk,
            "met": None if judgement is None else judgement.met,
            "not_judged": None if judgement is None else judgement is Judgement.NOT_JUDGED,
        }
        for name, column in self._columns.items():
            column.append(values[name])

    def table(self) -> pa.Table:
        columns = {name: pa.array(values, COLUMNS[name]) for name, values in self._columns.items()}
        return pa.table(columns).sort_by("sent_ns")


def _ns_since(began_ns: int, ns: int | None) -> int | None:
    return None if ns is None else ns - began_ns


def _server_time_ns(x: Exchange, name: str) -> float | None:
    for entry in x.server_timing or ():
        ms = entry.get("ms")
        if entry.get("name") == name and isinstance(ms, int | float):
            return ms * 1e6
    return None


RAMP_UP: Final = 0.1
"""Share of a load's time that is excluded at its beginning (IETF 5.2.3.2)."""
PARTS: Final = 5
"""Number of equal divisions of the steady part: few, so that each division has many requests, but enough to
show whether a queue grows."""
DEVIATIONS: Final = 2.0
"""Number of standard deviations above which a growing queue, or missing completions, are no chance effect."""
STABLE_DEVIATIONS: Final = 3.0
"""Number of standard deviations by which the throughputs of the two halves of a stable load can differ. If it
were two, chance would end one in three searches of ten levels."""
EARLY_MIN: Final = 5
"""Smallest number of responses for the median duration of a response without a queue."""
CHANGE_MAX: Final = 0.1
"""Share of the throughput by which the halves of a stable load can differ even if it is not by chance."""
_Values = NDArray[Any]


@dataclass(frozen=True, slots=True)
class SteadyPart:
    """The steady part of a load, after the ramp-up. Times are in seconds from the load's start."""

    from_s: float
    """Begin of this part."""
    to_s: float
    sent_requests: Measurement
    """The load's measurement, reduced to the requests that were sent in this part."""
    arrivals: int
    """Number of requests sent in this part."""
    completed: int
    """Number of complete responses that ended in this part."""
    expected: int
    """Number of requests that would complete in this part if there were no queue: the requests sent in a
    time window of the same length that begins earlier by the duration of a response."""
    output_tokens: float | None
    """Tokens generated in this part for complete responses; None without token counts."""
    input_tokens: int | None
    """Prompt tokens of the requests whose first token came in this part."""
    in_flight: tuple[float, ...]
    """Mean number of requests in flight in each of the five divisions."""
    in_flight_begin: int
    """Number of requests in flight at the beginning of this part."""
    in_flight_end: int
    """Number of requests in flight at the end of this part."""
    halves: tuple[float, float]
    """Number of tokens (without token counts: of responses) in the first and in the second half."""
    halves_deviation: float
    """Standard deviation of the difference between `halves`, computed as if requests were independent."""
    held_tokens: float | None
    """Mean number of tokens in flight over the time: tokens of prompts and those generated so far."""

    @property
    def seconds(self) -> float:
        return self.to_s - self.from_s

    @property
    def arrival_rps(self) -> float:
        return self._per_second(self.arrivals)

    @property
    def completed_rps(self) -> float:
        return self._per_second(self.completed)

    @property
    def output_tps(self) -> float | None:
        return None if self.output_tokens is None else self._per_second(self.output_tokens)

    @property
    def input_tps(self) -> float | None:
        return None if self.input_tokens is None else self._per_second(self.input_tokens)

    @property
    def delivered_share(self) -> float:
        """Completion rate / arrival rate; 1 if no completion was expected."""
        return self.completed / self.expected if self.expected else 1.0

    @property
    def success_share(self) -> float:
        """Share of the requests sent in this part that got a complete response, even after this part."""
        return len(self.sent_requests.successful_rows()) / self.arrivals if self.arrivals else 1.0

    @property
    def failed_share(self) -> float:
        failed = self.arrivals - len(self.sent_requests.successful_rows())
        return failed / self.arrivals if self.arrivals else 0.0

    @property
    def attainment(self) -> float | None:
        """Share of this part's requests that met all objectives; None if no request was judged."""
        met = self.sent_requests.table["met"].drop_null().to_pylist()
        return sum(met) / len(met) if met else None

    @property
    def not_judged(self) -> int | None:
        """Number of this part's requests that the objectives could not judge, because their responses were
        not understood; None if the load has no objectives."""
        judged = self.sent_requests.table["not_judged"]
        return None if judged.null_count == len(judged) else pc.sum(judged).as_py()

    @property
    def smooth_share(self) -> float | None:
        """Smooth goodput / output tokens of this part's requests; broken responses have no goodput."""
        tokens = pc.sum(self.sent_requests.table["output_tokens"]).as_py()
        benefit = pc.sum(self.sent_requests.successful_rows()["smooth_benefit"]).as_py()
        return None if not tokens or benefit is None else benefit / tokens

    @property
    def queue_grows(self) -> bool:
        """Whether the number of requests in flight grows, and by more than chance explains.

        It must be higher in each division than in every earlier one, with one exception at most. A quarter of
        the growth must be in the second half: this excludes the ramp-up of long responses.
        """
        parts = self.in_flight
        growth = parts[-1] - parts[0]
        exceptions = sum(later <= earlier for earlier, later in combinations(parts, 2))
        continues = parts[-1] - parts[PARTS // 2] >= growth / 4
        return exceptions <= 1 and continues and growth > DEVIATIONS * sqrt(parts[0] + parts[-1])

    @property
    def falls_short(self) -> bool:
        """Whether fewer than 90 % of the arrivals complete, which chance alone does not explain."""
        level = SaturationLevel(max(self.arrival_rps, 1e-9), 0.0, 0.0, 0.0, self.delivered_share)
        by_chance = DEVIATIONS * sqrt(self.in_flight_begin + self.in_flight_end)
        return incomplete([level]) is not None and self.expected - self.completed > by_chance

    @property
    def throughput_is_stable(self) -> bool:
        """Whether the throughputs of both halves differ by at most a tenth, or by no more than chance."""
        first, second = self.halves
        allowed = max(CHANGE_MAX * (first + second) / 2, STABLE_DEVIATIONS * self.halves_deviation)
        return abs(second - first) <= allowed

    @property
    def is_sustained(self) -> bool:
        """Whether the load is sustained, by the rules of DEFINITIONS.md that need only this load."""
        return not self.queue_grows and not self.falls_short and self.throughput_is_stable

    def latency(self, column: str, p: float) -> float | None:
        """Return the p-quantile of a latency column (`ttft_ns`) of this part's requests, in seconds."""
        return percentile(self.sent_requests.values(column), p)

    def _per_second(self, amount: float) -> float:
        return amount / self.seconds if self.seconds else 0.0


def steady_part_of(measured: Measurement, duration_s: float | None = None) -> SteadyPart:
    """Return the steady part of a load, without its ramp-up.

    `duration_s`: planned duration. If the load was stopped after this time, the steady part ends there too;
    otherwise it ends when the last request was sent.
    """
    requests = _request_columns(measured.table)
    completed = _RequestColumns(*(column[requests.is_complete] for column in requests))
    last_sent_s = max(requests.sent_s, default=0.0)
    stopped = (measured.result.get("load") or {}).get("stopped")
    to_s = float(last_sent_s if duration_s is None or stopped is None else duration_s)
    from_s = RAMP_UP * to_s
    sent_ns = pc.coalesce(pc.field("sent_ns"), pc.field("scheduled_ns"))
    within = measured.table.filter((sent_ns >= round(from_s * 1e9)) & (sent_ns < round(to_s * 1e9)))
    edges = np.linspace(from_s, to_s, PARTS + 1)
    has_output, has_input = (not np.isnan(tokens).all() for tokens in (completed.output, completed.input))
    output = np.nan_to_num(completed.output) if has_output else np.ones(len(completed.output))
    middle_s = (from_s + to_s) / 2
    first, second = (
        float(output @ _generated_share(completed, a, b)) for a, b in ((from_s, middle_s), (middle_s, to_s))
    )

    def count(times_s: _Values) -> int:
        return int(((from_s <= times_s) & (times_s < to_s)).sum())

    return SteadyPart(
        from_s=from_s,
        to_s=to_s,
        sent_requests=replace(measured, table=within),
        arrivals=len(within),
        completed=count(completed.end_s),
        expected=count(requests.sent_s + _unqueued_duration_s(completed, from_s)),
        output_tokens=first + second if has_output else None,
        input_tokens=int(
            np.nan_to_num(completed.input)[(from_s <= completed.first_s) & (completed.first_s < to_s)].sum()
        )
        if has_input
        else None,
        in_flight=tuple(
            float(_overlap_seconds(requests.sent_s, requests.end_s, a, b).sum() / (b - a)) if b > a else 0.0
            for a, b in pairwise(edges)
        ),
        in_flight_begin=int(((requests.sent_s < from_s) & (from_s <= requests.end_s)).sum()),
        in_flight_end=int(((requests.sent_s < to_s) & (to_s <= requests.end_s)).sum()),
        halves=(first, second),
        halves_deviation=float(np.linalg.norm(output[_generated_share(completed, from_s, to_s) > 0])),
        held_tokens=_held_tokens(completed, from_s, to_s) if has_output and has_input else None,
    )


def tail_is_heavy(steady: SteadyPart, lowest: SteadyPart) -> bool:
    """Return whether the P99 of E2E exceeds `TAIL_TIMES` times the P50 of the lowest level (IETF 5.2.3.1).

    False if the P99 of the lowest level exceeds this limit too: then the tail is not due to the load.
    """
    base_p50, base_p99 = (lowest.latency("e2e_ns", p) for p in (0.50, 0.99))
    p50, p99 = (steady.latency("e2e_ns", p) for p in (0.50, 0.99))
    if base_p50 is None or base_p99 is None or p50 is None or p99 is None or base_p99 > TAIL_TIMES * base_p50:
        return False
    levels = [SaturationLevel(1.0, 0.0, base_p50, base_p99), SaturationLevel(2.0, 0.0, p50, p99)]
    return heavy_tail(levels) is not None


class _RequestColumns(NamedTuple):
    """Columns of requests; times in seconds from the load's start, unknown tokens as NaN."""

    sent_s: _Values
    first_s: _Values
    """Time of the first token, or the end of a response without tokens."""
    end_s: _Values
    is_complete: _Values
    input: _Values
    output: _Values


def _request_columns(table: pa.Table) -> _RequestColumns:
    """Return times (in seconds) and counts of the requests as arrays; unknown times are estimated."""
    names = ("sent_ns", "scheduled_ns", "ttft_any_ns", "end_ns", "input_tokens", "output_tokens")
    sent, scheduled, ttft, end, prompt, output = (table[name].to_numpy().astype(float) for name in names)
    sent = np.where(np.isnan(sent), scheduled, sent)  # Requests without a connection were not sent.
    gaps = table["gaps_ns"].to_pylist() if np.isnan(end).any() else []
    known_s = np.array([sum(row_gaps_ns or ()) for row_gaps_ns in gaps] or 0.0) + np.nan_to_num(ttft)
    end = np.where(np.isnan(end), sent + known_s, end)  # If the end is unknown, use the last event.
    first = np.where(np.isnan(ttft), end, np.minimum(end, sent + ttft))
    is_complete = np.isin(table["outcome"].to_numpy(), [o.value for o in ENDED_WELL])
    columns = (sent / 1e9, first / 1e9, end / 1e9, is_complete, prompt, output)
    return _RequestColumns(*(column[~np.isnan(sent)] for column in columns))


def _unqueued_duration_s(completed: _RequestColumns, ramp_up_s: float) -> float:
    """Return the duration of a response without a queue: the median over the ramp-up.

    If the ramp-up has fewer than `EARLY_MIN` responses, use the first `EARLY_MIN` responses of the load.
    """
    durations_s = completed.end_s - completed.sent_s
    early = durations_s[completed.sent_s < ramp_up_s]
    early = early if len(early) >= EARLY_MIN else durations_s[:EARLY_MIN]
    return float(np.median(early)) if len(early) else 0.0


def _overlap_seconds(begins_s: _Values, ends_s: _Values, from_s: float, to_s: float) -> _Values:
    """Return for how long each request overlaps the period from `from_s` to `to_s`."""
    seconds: _Values = np.maximum(0.0, np.minimum(ends_s, to_s) - np.maximum(begins_s, from_s))
    return seconds


def _generated_share(requests: _RequestColumns, from_s: float, to_s: float) -> _Values:
    """Return the share of each response that was generated between two times."""
    durations_s = requests.end_s - requests.first_s
    ends_within = (from_s <= requests.end_s) & (requests.end_s < to_s)
    overlap_share = _overlap_seconds(requests.first_s, requests.end_s, from_s, to_s) / np.where(
        durations_s > 0, durations_s, 1
    )
    share: _Values = np.where(durations_s > 0, overlap_share, ends_within)
    return share


def _held_tokens(completed: _RequestColumns, from_s: float, to_s: float) -> float:
    """Return the mean number of tokens in flight between two times (`SteadyPart.held_tokens`)."""
    if to_s <= from_s:
        return 0.0
    prompts = np.nan_to_num(completed.input) * _overlap_seconds(
        completed.sent_s, completed.end_s, from_s, to_s
    )
    middle_s = (np.maximum(completed.first_s, from_s) + np.minimum(completed.end_s, to_s)) / 2
    grown = (middle_s - completed.first_s) * _generated_share(completed, from_s, to_s)
    return float((prompts + np.nan_to_num(completed.output) * grown).sum()) / (to_s - from_s)
