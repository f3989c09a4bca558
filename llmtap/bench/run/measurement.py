"""The result of one load: a table with a row for each request, and its steady part without the ramp-up.

A `MeasurementRecorder` gets each exchange while the load runs (`session.py`). The table (`Measurement`) is
stored as Parquet, and every figure of a test is computed from it. The steady part (`steady_of`) begins after
a tenth of the time, ends with the last request sent or at the planned end, and is divided into five equal
parts. The tokens of a response are spread evenly between its first token and its end. A difference counts if
it exceeds two standard deviations of independent arrivals and departures.

Source: IETF draft, 5.2.3.1 and 5.2.3.2, which define neither "growing" nor "stable".
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from math import sqrt
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from llmtap.exchange.exchange import Exchange
from llmtap.metrics.deadlines import Benefit
from llmtap.metrics.latency import DEFAULT_BENEFIT, measure
from llmtap.metrics.objectives import Objectives
from llmtap.metrics.saturation import SaturationLevel, heavy_tail, incomplete
from llmtap.metrics.statistics import percentile
from llmtap.metrics.summary import ENDED_WELL

COLUMNS: Final[dict[str, pa.DataType]] = {
    **dict.fromkeys((
        "row", "sent_ns", "scheduled_ns", "end_ns", "ttft_ns", "ttft_any_ns", "e2e_ns", "input_tokens",
        "output_tokens", "cached_tokens", "uncertainty_ns",
    ), pa.int64()),
    **dict.fromkeys((
        "tpot_ns", "jitter_ns", "server_queue_ns", "server_prefill_ns", "smooth_benefit",
    ), pa.float64()),
    "met": pa.bool_(),
    **dict.fromkeys(("outcome", "request_class", "token_source", "itl_policy"), pa.string()),
    **dict.fromkeys(("gaps_ns", "server_gaps_ns", "chunk_tokens"), pa.list_(pa.int64())),
}  # fmt: skip


@dataclass(slots=True)
class Measurement:
    name: str
    """Name of the load, unique within a test: `search/0012-16rps`."""
    arm: str
    result: dict[str, Any]
    """Result as in `llmtap replay --json`: summary, plan, dispatch lateness, verdict, warm-up."""
    table: pa.Table
    """`COLUMNS`, a row per request by time of submission. `sent_ns`, `scheduled_ns`, `end_ns`: from the
    load's start; `gaps_ns`: times between events with tokens; `server_gaps_ns`: the same by the server's
    clock (option C); `chunk_tokens`: tokens of each event; `met`: whether all objectives of the load were
    met, null if the request does not count (`Objectives.meets`); `smooth_benefit`: eq. 7 of the smooth
    goodput paper. Unknown values are null."""
    cached: bool = False
    """Whether it was read from the results folder."""

    @property
    def seconds(self) -> float:
        """Time from the load's start to its last response."""
        return float(self.result["window"]["seconds"])

    @property
    def n(self) -> int:
        return len(self.table)

    def ended_well(self) -> pa.Table:
        """Return the rows with a complete response or a refusal by a guardrail."""
        return self.table.filter(pc.field("outcome").isin([o.value for o in ENDED_WELL]))

    def of_class(self, name: str) -> "Measurement":
        chosen = self.table.filter(pc.field("request_class") == name)
        return Measurement(self.name, self.arm, self.result, chosen, self.cached)

    def values(self, column: str) -> list[float]:
        """Return a column's sorted values of complete responses, in seconds if its name ends in `_ns`."""
        found = self.ended_well().column(column).drop_null().to_pylist()
        scale = 1e9 if column.endswith("_ns") else 1
        return sorted(value / scale for value in found)

    def gaps(self) -> list[float]:
        """Return all times between events with tokens of complete responses, in seconds, unsorted."""
        column = self.ended_well().column("gaps_ns").combine_chunks()
        flat = column.flatten() if len(column) else pa.array([], pa.int64())
        return [ns / 1e9 for ns in flat.to_pylist()]

    def gaps_by_request(self) -> list[list[float]]:
        rows = self.ended_well().column("gaps_ns").to_pylist()
        return [[ns / 1e9 for ns in gaps] for gaps in rows if gaps]

    def save(self, folder: Path) -> None:
        pq.write_table(self.table, folder / "requests.parquet", compression="zstd")

    @classmethod
    def load(cls, folder: Path, name: str, arm: str, result: Mapping[str, Any]) -> "Measurement":
        table = pq.read_table(folder / "requests.parquet")
        for column in COLUMNS.keys() - set(table.column_names):  # of an earlier version
            table = table.append_column(column, pa.nulls(len(table), COLUMNS[column]))
        return cls(name, arm, dict(result), table, cached=True)


@dataclass(slots=True)
class MeasurementRecorder:
    began_ns: int
    class_of: Callable[[int], str | None] = lambda row: None
    objectives: Objectives | None = None
    reader: Benefit = DEFAULT_BENEFIT
    _columns: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in COLUMNS})

    def add(self, row: int, x: Exchange) -> None:
        m, t, tokens, began_ns = measure(x, self.reader), x.timeline, x.tokens, self.began_ns
        told = {
            "row": row, "sent_ns": _since(began_ns, t.submit_ns),
            "scheduled_ns": _since(began_ns, x.scheduled_ns), "end_ns": _since(began_ns, t.response_end_ns),
            "ttft_ns": m.ttft_ns, "ttft_any_ns": m.ttft_any_ns, "e2e_ns": m.e2e_ns,
            "input_tokens": tokens.input, "output_tokens": tokens.output, "cached_tokens": tokens.cached,
            "uncertainty_ns": x.uncertainty_ns, "tpot_ns": m.tpot_ns, "jitter_ns": m.jitter_ns,
            "server_queue_ns": _told_ns(x, "queue"), "server_prefill_ns": _told_ns(x, "prefill"),
            "outcome": x.outcome.value, "request_class": self.class_of(row), "token_source": tokens.source,
            "itl_policy": m.itl_policy, "gaps_ns": m.tbc_ns, "server_gaps_ns": m.itl_c_ns,
            "chunk_tokens": m.tokens_per_chunk, "smooth_benefit": m.smooth_benefit,
            "met": None if self.objectives is None else self.objectives.meets(m, x),
        }  # fmt: skip
        for name, column in self._columns.items():
            column.append(told[name])

    def table(self) -> pa.Table:
        columns = {name: pa.array(values, COLUMNS[name]) for name, values in self._columns.items()}
        return pa.table(columns).sort_by("sent_ns")


def _since(began_ns: int, ns: int | None) -> int | None:
    return None if ns is None else ns - began_ns


def _told_ns(x: Exchange, name: str) -> float | None:
    for entry in x.server_timing or ():
        ms = entry.get("ms")
        if entry.get("name") == name and isinstance(ms, int | float):
            return ms * 1e6
    return None


RAMP_UP: Final = 0.1
"""Share of a load's time that is dropped (5.2.3.2)."""
PARTS: Final = 5
"""Parts of the steady part: few enough for many requests each, enough to see a queue grow."""
DEVIATIONS: Final = 2.0
EARLY_MIN: Final = 5
CHANGE_MAX: Final = 0.1
"""Share by which the throughput of the halves may always differ."""
_WELL: Final = frozenset(outcome.value for outcome in ENDED_WELL)


@dataclass(frozen=True, slots=True)
class _Request:
    """Times in seconds from the load's start."""

    sent_s: float
    first_s: float
    """First token, or the end of a response without tokens."""
    end_s: float
    well: bool
    input: int | None
    output: int | None


@dataclass(frozen=True, slots=True)
class Steady:
    from_s: float
    to_s: float
    sent: Measurement
    arrivals: int
    completed: int
    """Complete responses that ended in it."""
    expected: int
    """Requests that would complete in it without a queue: sent earlier by the time of a response."""
    output_tokens: float | None
    """Tokens generated in it for complete responses; None without token counts."""
    input_tokens: int | None
    """Tokens of prompts whose first response token came in it."""
    in_flight: tuple[float, ...]
    at_begin: int
    at_end: int
    halves: tuple[float, float]
    """Tokens (or responses, without token counts) of the first and of the second half."""
    halves_deviation: float
    """Standard deviation of their difference, for independent requests."""
    held_tokens: float | None
    """Time average of the tokens in flight: prompts and the generated part of responses."""

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
    def delivered(self) -> float:
        """Completion rate / arrival rate; 1 if no completion was expected."""
        return self.completed / self.expected if self.expected else 1.0

    @property
    def success(self) -> float:
        """Share of its requests with a complete response, whenever it ended."""
        return len(self.sent.ended_well()) / self.arrivals if self.arrivals else 1.0

    @property
    def failed(self) -> float:
        """Share of its requests without a complete response."""
        return (self.arrivals - len(self.sent.ended_well())) / self.arrivals if self.arrivals else 0.0

    @property
    def attainment(self) -> float | None:
        """Share of the requests sent in it that met all objectives, of those that count; None without any."""
        met = self.sent.table["met"].drop_null().to_pylist()
        return sum(met) / len(met) if met else None

    @property
    def smooth_share(self) -> float | None:
        """Smooth goodput / output tokens of the requests sent in it; answers that broke off add none."""
        tokens = pc.sum(self.sent.table["output_tokens"]).as_py()
        benefit = pc.sum(self.sent.ended_well()["smooth_benefit"]).as_py()
        return None if not tokens or benefit is None else benefit / tokens

    @property
    def queue_grows(self) -> bool:
        """Whether requests in flight grow from each part to later ones (with one exception), beyond chance,
        and by a quarter of it in the second half, which excludes the ramp-up of long responses."""
        parts = self.in_flight
        rise = parts[-1] - parts[0]
        falls = sum(later <= earlier for earlier, later in combinations(parts, 2))
        lasting = parts[-1] - parts[PARTS // 2] >= rise / 4
        return falls <= 1 and lasting and rise > DEVIATIONS * sqrt(parts[0] + parts[-1])

    @property
    def falls_short(self) -> bool:
        """Whether fewer than 90 % of the arrivals complete, beyond chance."""
        short = self.expected - self.completed
        level = SaturationLevel(max(self.arrival_rps, 1e-9), 0.0, 0.0, 0.0, self.delivered)
        by_chance = DEVIATIONS * sqrt(self.at_begin + self.at_end)
        return incomplete([level]) is not None and short > by_chance

    @property
    def throughput_is_stable(self) -> bool:
        """Whether both halves have the same throughput, within a tenth or within chance."""
        first, second = self.halves
        allowed = max(CHANGE_MAX * (first + second) / 2, DEVIATIONS * self.halves_deviation)
        return abs(second - first) <= allowed

    @property
    def is_steady(self) -> bool:
        return not self.queue_grows and self.throughput_is_stable

    def latency(self, column: str, p: float) -> float | None:
        return percentile(self.sent.values(column), p)

    def _per_second(self, amount: float) -> float:
        return amount / self.seconds if self.seconds else 0.0


def steady_of(measured: Measurement, duration_s: float | None = None) -> Steady:
    """Return a load without its ramp-up; `duration_s`: planned, None: until the last request was sent."""
    requests = list(_requests(measured.table))
    last_sent_s = max((r.sent_s for r in requests), default=0.0)
    stopped = (measured.result.get("load") or {}).get("stopped")
    to_s = last_sent_s if duration_s is None or stopped is None else duration_s
    from_s = RAMP_UP * to_s
    sent_ns = pc.coalesce(pc.field("sent_ns"), pc.field("scheduled_ns"))
    within = measured.table.filter((sent_ns >= round(from_s * 1e9)) & (sent_ns < round(to_s * 1e9)))
    sent = Measurement(measured.name, measured.arm, measured.result, within, measured.cached)
    well = [r for r in requests if r.well]
    edges = [from_s + (to_s - from_s) * i / PARTS for i in range(PARTS + 1)]
    middle_s = (from_s + to_s) / 2
    takes_s = _takes_s(well, from_s)
    tell_output = any(r.output is not None for r in well)
    tell_input = any(r.input is not None for r in well)
    amounts = [(r, float((r.output or 0) if tell_output else 1)) for r in well]
    first, second = (
        sum(amount * _share_made(r, a, b) for r, amount in amounts)
        for a, b in ((from_s, middle_s), (middle_s, to_s))
    )
    squares = sum(amount**2 for r, amount in amounts if _share_made(r, from_s, to_s) > 0)
    return Steady(
        from_s=from_s,
        to_s=to_s,
        sent=sent,
        arrivals=len(within),
        completed=sum(from_s <= r.end_s < to_s for r in well),
        expected=sum(from_s <= r.sent_s + takes_s < to_s for r in requests),
        output_tokens=first + second if tell_output else None,
        input_tokens=sum(r.input or 0 for r in well if from_s <= r.first_s < to_s) if tell_input else None,
        in_flight=tuple(
            sum(_overlap(r.sent_s, r.end_s, a, b) for r in requests) / (b - a) if b > a else 0.0
            for a, b in pairwise(edges)
        ),
        at_begin=sum(r.sent_s < from_s <= r.end_s for r in requests),
        at_end=sum(r.sent_s < to_s <= r.end_s for r in requests),
        halves=(first, second),
        halves_deviation=sqrt(squares),
        held_tokens=_held_tokens(well, from_s, to_s) if tell_output and tell_input else None,
    )


def tail_is_heavy(steady: Steady, lowest: Steady, column: str = "e2e_ns", times: float = 10.0) -> bool:
    """Return whether P99 exceeds 10 x the lowest level's P50 (5.2.3.1), unless that level's own does."""
    figures = [lowest.latency(column, 0.50), lowest.latency(column, 0.99)]
    figures += [steady.latency(column, 0.50), steady.latency(column, 0.99)]
    if any(figure is None for figure in figures):
        return False
    base_p50, base_p99, p50, p99 = (figure or 0.0 for figure in figures)
    if base_p99 > times * base_p50:
        return False
    levels = [SaturationLevel(1.0, 0.0, base_p50, base_p99), SaturationLevel(2.0, 0.0, p50, p99)]
    return heavy_tail(levels, times) is not None


def _requests(table: pa.Table) -> Iterator[_Request]:
    names = ["sent_ns", "scheduled_ns", "ttft_any_ns", "end_ns", "input_tokens", "output_tokens", "outcome"]
    rows: list[dict[str, Any]] = table.select(names).to_pylist()
    for number, row in enumerate(rows):
        sent_ns, end_ns = row["sent_ns"], row["end_ns"]
        if sent_ns is None:  # no connection: counted at its scheduled time
            sent_ns = row["scheduled_ns"]
        if sent_ns is None:
            continue
        ttft_ns = row["ttft_any_ns"]
        if end_ns is None:  # broken off: ends with its last known event
            gaps_ns: Sequence[int] = table["gaps_ns"][number].as_py() or ()
            end_ns = sent_ns + (ttft_ns or 0) + sum(gaps_ns)
        first_ns = end_ns if ttft_ns is None else min(end_ns, sent_ns + ttft_ns)
        yield _Request(
            sent_ns / 1e9, first_ns / 1e9, end_ns / 1e9, row["outcome"] in _WELL,
            row["input_tokens"], row["output_tokens"],
        )  # fmt: skip


def _takes_s(well: Sequence[_Request], ramp_up_s: float) -> float:
    """Return the duration of a response without a queue: the median of the ramp-up or of the first few."""
    early = [r.end_s - r.sent_s for r in well if r.sent_s < ramp_up_s]
    if len(early) < EARLY_MIN:
        early = [r.end_s - r.sent_s for r in well[:EARLY_MIN]]
    return percentile(sorted(early), 0.5) or 0.0


def _overlap(a: float, b: float, c: float, d: float) -> float:
    return max(0.0, min(b, d) - max(a, c))


def _share_made(r: _Request, from_s: float, to_s: float) -> float:
    if r.end_s <= r.first_s:
        return float(from_s <= r.end_s < to_s)
    return _overlap(r.first_s, r.end_s, from_s, to_s) / (r.end_s - r.first_s)


def _held_tokens(requests: Sequence[_Request], from_s: float, to_s: float) -> float:
    """Return the time average of tokens held: prompts from submission to end, responses as they grow."""
    if to_s <= from_s:
        return 0.0
    total = 0.0
    for r in requests:
        total += (r.input or 0) * _overlap(r.sent_s, r.end_s, from_s, to_s)
        begin, end = max(r.first_s, from_s), min(r.end_s, to_s)
        if end > begin:
            grown = ((begin + end) / 2 - r.first_s) / (r.end_s - r.first_s)
            total += (r.output or 0) * grown * (end - begin)
    return total / (to_s - from_s)
