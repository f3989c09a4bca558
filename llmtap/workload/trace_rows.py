"""Read the rows of a trace as `Requests`, and link the turns of its conversations.

`TraceRows` takes the batches of an opened trace and returns the first `count` rows, or all, in the order of
arrival, for `trace.py`. Missing token counts are estimated if possible; rows that still lack a prompt
length, or an arrival, are left out and counted.

- A row follows its named parent, else the row of its session with the nearest smaller turn, else the latest
  row of the session.
- The think time is the trace's `think_us`, else the time from the end of the previous answer to this arrival,
  at least 0. If that end is unknown, it is the time between the two arrivals.
- A row also waits for the sessions (subagents) that its previous turn started, if they had ended when the row
  arrived. Its think time then counts from the latest of these ends.
- A row of a session that has no arrival (AIPerf writes only a delay) arrives after the answer to its previous
  turn and its think time.

An answer ends at `delivered_us`, else `response_end_us`, else `last_token_us`. The module is long because the
rows' columns, their links and their times are computed together.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress, islice, takewhile
from operator import eq
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from llmtap.capture.schema import back_rows_mask
from llmtap.exchange.label import label_of
from llmtap.exchange.outcome import TokenSource
from llmtap.metrics.statistics import percentile
from llmtap.metrics.summary import ENDED_WELL
from llmtap.traces.format import (
    ASPECTS,
    BYTES_PER_TOKEN,
    FormatError,
    TraceSource,
    count_rows_with,
    replace_column,
)
from llmtap.units import format_ns
from llmtap.workload.destinations import reason_unsendable
from llmtap.workload.requests import Requests, int_column

LINK_COLUMNS: Final = (
    "capture",
    "session",
    "turn",
    "id",
    "parent",
    "think_us",
    "delivered_us",
    "response_end_us",
    "last_token_us",
)
_Name = tuple[str | None, str]
"""Name of a session or a request: the capture and the id, which is unique only within a capture."""


@dataclass(slots=True)
class Links:
    """Links between rows as columns of `Requests`, and the conversation number of each row."""

    after: "array[int]" = field(default_factory=int_column)
    """Row of the previous turn; -1: there is none."""
    think_ns: "array[int]" = field(default_factory=int_column)
    """Time from the previous answer to the request."""
    session: "array[int]" = field(default_factory=int_column)
    """By row: number of its conversation."""
    joins: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By row: further rows for whose answers it waits."""


@dataclass(slots=True)
class _Session:
    """A conversation of the trace: its rows so far."""

    number: int
    rows_by_turn: dict[int, int] = field(default_factory=dict)
    """By number of a turn: its row."""
    turn_max: int = -1
    """Largest number of a turn so far."""

    def row_before_turn(self, turn: int) -> int:
        """Return the row of the nearest smaller turn; -1 if there is none."""
        if turn - 1 in self.rows_by_turn:
            return self.rows_by_turn[turn - 1]
        smaller = [t for t in self.rows_by_turn if t < turn]
        return self.rows_by_turn[max(smaller)] if smaller else -1


class TraceTurns:
    """Collects the columns LINK_COLUMNS of a trace's batches, and links all rows after the final batch."""

    def __init__(self) -> None:
        self._sessions: list[_Name | None] = []
        self._turn_numbers: list[int | None] = []
        self._ids: list[_Name | None] = []
        """By row: id of its exchange."""
        self._parents: list[_Name | None] = []
        """By row: id of the previous exchange of the conversation."""
        self._think_us: list[int | None] = []
        """By row: pause before it, from the trace."""
        self._end_us: list[int | None] = []
        self._latest_rows: dict[_Name, tuple[int, int]] = {}
        """By session: arrival of its latest row, and end of the answer to this row, in ns."""
        self._undated_rows = 0
        """Number of rows without an arrival time."""
        self._orphans = 0
        """Number of turns whose previous turn is not in the trace."""
        self._overlaps = 0
        """Number of turns that began before the end of the previous answer."""
        self._unknown_ends = 0
        """Number of turns whose previous answer has no known end."""

    def add(self, batch: pa.RecordBatch) -> None:
        rows = [batch.column(name).to_pylist() for name in LINK_COLUMNS]
        for capture, session, turn, id_, parent, think_us, *ends in zip(*rows, strict=True):
            self._sessions.append(None if session is None else (capture, session))
            self._turn_numbers.append(turn)
            self._ids.append(None if id_ is None else (capture, id_))
            self._parents.append(None if parent is None else (capture, parent))
            self._think_us.append(think_us)
            self._end_us.append(_end_us(ends))

    def arrivals_ns(self, batch: pa.RecordBatch) -> pa.Array:
        """Return the arrivals of a batch; null if unknown. Call it with the batches in their order."""
        names = ("arrival_ns", "capture", "session", "think_us", *LINK_COLUMNS[-3:])
        arrivals = []
        for arrival_ns, capture, session, think_us, *ends in zip(
            *(batch.column(name).to_pylist() for name in names), strict=True
        ):
            if session is not None:
                before = self._latest_rows.get((capture, session))
                if arrival_ns is None and before is not None:
                    arrival_ns = before[1] + (think_us or 0) * 1_000
                    self._undated_rows += 1
                if arrival_ns is not None:
                    ended_ns = arrival_ns + (_end_us(ends) or 0) * 1_000
                    self._latest_rows[capture, session] = arrival_ns, ended_ns
            arrivals.append(arrival_ns)
        try:
            return pa.array(arrivals, pa.int64())
        except OverflowError:
            raise FormatError(
                "the delays of a conversation add up to more than 2^63 ns, the maximum"
            ) from None

    def link_rows(self, order: Sequence[int], arrivals_ns: Sequence[int]) -> Links:
        """Return the links of the rows: the previous row of each row in its conversation.

        `order`: rows in the order of arrival. `arrivals_ns`: arrivals in the same order.
        """
        links = Links()
        by_id: dict[_Name, int] = {}
        sessions: dict[_Name, _Session] = {}
        numbers = 0
        for place, row in enumerate(order):
            name, parent, turn = self._sessions[row], self._parents[row], self._turn_numbers[row]
            session = None if name is None else sessions.get(name)
            if name is not None and session is None:
                session = sessions[name] = _Session(numbers)
                numbers += 1
            exact = True
            before = -1 if parent is None else by_id.get(parent, -1)
            if session is not None:
                number = session.turn_max + 1 if turn is None else turn
                if before < 0:
                    before = session.row_before_turn(number)
                    exact = parent is None and (turn is None or session.rows_by_turn.get(turn - 1) == before)
                session.rows_by_turn[number] = place
                session.turn_max = max(session.turn_max, number)
            self._orphans += before < 0 and (parent is not None or bool(turn))
            links.after.append(before)
            distance_ns = arrivals_ns[place] - arrivals_ns[before]
            links.think_ns.append(0 if before < 0 else self._think_ns(row, order[before], exact, distance_ns))
            if before >= 0:
                links.session.append(links.session[before])
            elif session is not None:
                links.session.append(session.number)
            else:
                links.session.append(numbers)
                numbers += 1
            if (id_ := self._ids[row]) is not None:
                by_id[id_] = place
        self._add_joins(links, order, arrivals_ns)
        return links

    def _add_joins(self, links: Links, order: Sequence[int], arrivals_ns: Sequence[int]) -> None:
        """Add to `links.joins` the last rows of the subagents for which a row waited."""
        names = [self._sessions[row] for row in order]
        ends_ns = [
            None if (end_us := self._end_us[row]) is None else at_ns + end_us * 1_000
            for row, at_ns in zip(order, arrivals_ns, strict=True)
        ]
        last: dict[_Name, int] = {}
        """By session: its latest row so far."""
        started: dict[int, list[_Name]] = {}
        """By row: the sessions that it started."""
        for place, (name, before) in enumerate(zip(names, links.after, strict=True)):
            if name is None:
                continue
            if name not in last and before >= 0 and names[before] is not None:
                started.setdefault(before, []).append(name)
            last[name] = place
        for place, before in enumerate(links.after):
            if before < 0 or names[place] != names[before] or before not in started:
                continue
            ends = {last[name]: ends_ns[last[name]] for name in started[before]}
            at_ns = arrivals_ns[place]
            joined = {row: ns for row, ns in ends.items() if row < place and ns is not None and ns <= at_ns}
            if joined:
                links.joins[place] = tuple(joined)
                links.think_ns[place] = max(0, at_ns - max((*joined.values(), ends_ns[before] or 0)))

    def notes(self) -> list[str]:
        counts = (
            (self._undated_rows, "rows have no arrival time: they arrive after the previous answer"),
            (self._orphans, "turns continue a turn that the trace does not have: each begins a conversation"),
            (self._overlaps, "turns did not wait for the previous answer: think time 0"),
            (
                self._unknown_ends,
                "turns follow an answer with an unknown end: think time is from arrival to arrival",
            ),
        )
        return [f"{n:,} {what}" for n, what in counts if n]

    def _think_ns(self, row: int, before: int, exact: bool, distance_ns: int) -> int:
        """Return the think time of a row. `exact`: the trace gives it from the answer to row `before`."""
        think_us, end_us = self._think_us[row], self._end_us[before]
        if think_us is not None and (exact or end_us is None):
            return think_us * 1_000
        if end_us is None:
            self._unknown_ends += distance_ns > 0
            return distance_ns
        self._overlaps += distance_ns < end_us * 1_000
        return max(0, distance_ns - end_us * 1_000)


def _end_us(ends: Sequence[int | None]) -> int | None:
    return next((us for us in ends if us is not None), None)


NO_TIMES: Final = "none of its rows has an arrival time"

_LENGTH_COLUMNS = ("arrival_ns", "input_tokens", "output_tokens")
_BLOCK_COLUMNS = ("blocks", "block_size", "block_unit", "prompt_bytes")
_REQUEST_COLUMNS = ("method", "path", "endpoint", "request_body")
_ANSWER_ASPECTS = ("end of the answer", "first token", "times of events")
_ANSWER_COLUMNS = ("outcome", "token_source", "event_flags", "response_bytes", "stream", "method", "endpoint")
_CARRIES_OUTPUT: Final = 2
"""Bit of `event_flags` that marks an event with output."""
_ENDED_WELL: Final = pa.array(sorted(ENDED_WELL), pa.string())
_TO_ESTIMATE: Final = -1
"""Placeholder for a token count that is estimated after all rows are read."""
_NOT_YET = -(1 << 62)
"""Placeholder for the arrival of rows before the first row with a known arrival."""


@dataclass(frozen=True, slots=True)
class TraceParts:
    """Parts of a trace that are read in addition to the lengths."""

    conversations: bool = False
    """Whether to read turns and think times. Later rows of a session then need no arrival."""
    names: bool = False
    """Whether to read tenants, models and labels."""
    bodies: bool = False
    """Whether to read request bodies. A row then needs no token counts if it has a body that can be sent."""
    timed: bool = True
    """Whether rows need an arrival. Otherwise, a row without one gets the arrival of the previous row, and
    the first rows get the first known arrival, or 0."""
    row_numbers: bool = False
    """Whether to keep the number of each row in the source."""


class TraceRows:
    """Reads rows as `Requests`, in the order of their arrivals. The arguments are those of `load_trace`."""

    has_dates = False
    has_answer_times = False

    def __init__(self, count: int | None, parts: TraceParts) -> None:
        self.requests = Requests()
        self.links = Links()
        self.source_rows = array("q")
        """By row: its number in the trace."""
        self._rows_left = count
        """Number of rows that may still be read."""
        self._blocks = _Blocks()
        self._turns = TraceTurns() if parts.conversations else None
        self._parts = parts
        """Which data to read in addition to the lengths."""
        self._uses_lengths = False
        """Whether to use the lengths of the rows instead of their bodies: for formats of other tools."""
        self._missing_counts = dict.fromkeys(("arrival_ns", "input_tokens"), 0)
        """By column: number of rows left out because they have no value."""
        self._uncounted_rows = 0
        """Number of rows without token counts."""
        self._untimed_rows = 0
        """Number of rows without a time."""
        self._other_requests = 0
        """Number of rows that are not requests to a model."""
        self._unanswered_rows = 0
        """Number of rows without an answer."""
        self.unsendable: Counter[str] = Counter()
        """Number of rows whose bodies cannot be sent, by reason."""
        self._prompt_estimate, self._answer_estimate = _TokenEstimate(BYTES_PER_TOKEN), _TokenEstimate(0.0)
        """Estimates of the tokens of prompts and answers from their sizes."""
        self.estimated_count = 0
        """Number of rows whose input or output tokens are an estimate."""
        self._last_arrival_ns = _NOT_YET
        """Arrival of the latest row, for rows without a time."""

    def read(self, source: TraceSource) -> None:
        """Read the requested rows of a source; `ordered_requests` returns them afterwards."""
        self.has_dates = source.info.arrivals == "wall"
        self._uses_lengths = source.info.source != "" and not self._parts.bodies
        wanted = {
            *_LENGTH_COLUMNS,
            "side",
            *_BLOCK_COLUMNS,
            *_ANSWER_COLUMNS,
            *(LINK_COLUMNS if self._turns is not None else ()),
            *(("tenant", "model", "label") if self._parts.names else ()),
            *(_REQUEST_COLUMNS if self._parts.bodies else ()),
            *(name for aspect in _ANSWER_ASPECTS if self._parts.row_numbers for name in ASPECTS[aspect]),
        }
        begin = 0
        for batch in source.batches:
            batch = batch.select(sorted(wanted))
            rows: Iterable[int] = range(begin, begin + batch.num_rows)
            begin += batch.num_rows
            batch, rows = _filter_rows(batch, rows, pc.invert(back_rows_mask(batch)))
            batch, rows = _filter_rows(batch, rows, pc.invert(self._rows_without_model(batch)))
            if self._parts.bodies:
                batch, rows = _filter_rows(batch, rows, self._sendable_rows(batch))
            batch = self._fill_values(batch)
            for name in self._missing_counts:
                self._missing_counts[name] += batch.column(name).null_count
            known = (batch.column(name).is_valid() for name in self._missing_counts)
            batch, rows = _filter_rows(batch, rows, pc.and_(*known))
            batch = batch.slice(0, self._rows_left)
            self._add(batch)
            if self._parts.row_numbers:
                self.source_rows.extend(islice(rows, batch.num_rows))
                self.has_answer_times |= any(count_rows_with(batch, aspect) for aspect in _ANSWER_ASPECTS)
            if self._rows_left is not None:
                self._rows_left -= batch.num_rows
                if not self._rows_left:
                    break
        arrivals = self.requests.arrival_ns
        first_ns = next((at_ns for at_ns in arrivals if at_ns != _NOT_YET), 0)
        for row in takewhile(lambda row: arrivals[row] == _NOT_YET, range(len(arrivals))):
            arrivals[row] = first_ns
        self._prompt_estimate.fill(self.requests.input)
        self._answer_estimate.fill(self.requests.output)
        self.requests.block_tokens, self.requests.blocks = self._blocks.blocks_by_row(self.requests.input)
        for name in ("tenants", "models", "labels", "bodies", "paths"):
            if not any(getattr(self.requests, name)):
                setattr(self.requests, name, [])

    def ordered_requests(self) -> Requests:
        """Return the requests in the order of their arrivals, with their links between turns."""
        arrivals = self.requests.arrival_ns
        order = sorted(range(len(arrivals)), key=arrivals.__getitem__)  # Equal arrivals keep their order.
        as_read = order == list(range(len(order)))
        requests = self.requests if as_read else self.requests.select_rows(order)
        if self.source_rows and not as_read:
            self.source_rows = array("q", map(self.source_rows.__getitem__, order))
        if self._turns is not None:
            self.links = self._turns.link_rows(order, requests.arrival_ns)
            if any(place >= 0 for place in self.links.after):
                requests.after, requests.think_ns = self.links.after, self.links.think_ns
                requests.joins = self.links.joins
        return requests

    def notes(self) -> list[str]:
        reasons = {"arrival_ns": "have no arrival time", "input_tokens": "have no count of input tokens"}
        notes = [f"{n:,} rows {reasons[name]}: left out" for name, n in self._missing_counts.items() if n]
        if self._other_requests:
            notes.append(f"{self._other_requests:,} rows are no requests to a model: not read")
        notes += [f"{n:,} rows {reason}: not sent" for reason, n in self.unsendable.most_common()]
        if self.estimated_count:
            notes.append(
                f"{self.estimated_count:,} rows lack a token count: estimated from the events that"
                " carry output, and from bytes"
            )
        if self._uncounted_rows:
            problem = "rows have a body and no count of input tokens: taken for 0"
            notes.append(f"{self._uncounted_rows:,} {problem}")
        if self._unanswered_rows:
            notes.append(f"{self._unanswered_rows:,} rows have no count of output tokens: taken for 0")
        if self._untimed_rows:
            notes.append(f"{self._untimed_rows:,} rows have no arrival time: they come with the row before")
        return notes + ([] if self._turns is None else self._turns.notes()) + self._blocks.notes

    @property
    def omitted_count(self) -> int:
        """Number of rows omitted because they have no arrival or no token count."""
        return sum(self._missing_counts.values())

    def reason_for_no_rows(self) -> str:
        """Return why none of the trace's rows could be read as a request."""
        if self._missing_counts["arrival_ns"]:
            return NO_TIMES
        if self.unsendable:
            return f"none of its rows can be sent: they {self.unsendable.most_common(1)[0][0]}"
        if self._missing_counts["input_tokens"]:
            return "none of its rows has a count of input tokens"
        return "has no rows"

    def _rows_without_model(self, batch: pa.RecordBatch) -> pa.BooleanArray:
        """Return which rows are HTTP requests without inference: no prompt, no tokens, unknown endpoint."""
        names = (
            "input_tokens",
            "prompt_bytes",
            "endpoint",
            *(("request_body",) if self._parts.bodies else ()),
        )
        other = batch.column("method").is_valid()
        for name in names:
            other = pc.and_(other, batch.column(name).is_null())
        self._other_requests += other.true_count
        return other

    def _sendable_rows(self, batch: pa.RecordBatch) -> pa.BooleanArray:
        """Return which rows can be sent, and count the others by reason."""
        columns = [batch.column(name) for name in _REQUEST_COLUMNS]
        if all(column.null_count == len(batch) for column in columns):
            return pa.array([True] * len(batch), pa.bool_())
        reasons = list(map(reason_unsendable, *(column.to_pylist() for column in columns)))
        self.unsendable.update(reason for reason in reasons if reason is not None)
        return pa.array([reason is None for reason in reasons], pa.bool_())

    def _fill_values(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the batch with values for missing counts and arrivals."""
        batch = self._mark_estimates(batch)
        inputs = batch.column("input_tokens")
        if self._parts.bodies and inputs.null_count:
            unknown = pc.and_(inputs.is_null(), batch.column("request_body").is_valid())
            self._uncounted_rows += unknown.true_count
            batch = replace_column(batch, "input_tokens", pc.if_else(unknown, 0, inputs))
        if self._turns is not None:
            batch = replace_column(batch, "arrival_ns", self._turns.arrivals_ns(batch))
        arrivals = batch.column("arrival_ns")
        if not self._parts.timed:
            self._untimed_rows += arrivals.null_count
            known = pc.fill_null(pc.fill_null_forward(arrivals), self._last_arrival_ns)
            if len(known):
                self._last_arrival_ns = known[-1].as_py()
            batch = replace_column(batch, "arrival_ns", known)
        return batch

    def _mark_estimates(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Mark the token counts that must be estimated. For a stream, use its number of output events."""
        inputs, outputs = batch.column("input_tokens"), batch.column("output_tokens")
        n_bytes = batch.column("prompt_bytes")
        if inputs.null_count:
            unknown = pc.and_(inputs.is_null(), n_bytes.is_valid())
            batch = replace_column(batch, "input_tokens", pc.if_else(unknown, _TO_ESTIMATE, inputs))
        if outputs.null_count:
            counts = outputs.to_pylist()
            columns = (
                batch.column(name).to_pylist() for name in ("outcome", "event_flags", "response_bytes")
            )
            for row, (outcome, flags, n) in enumerate(zip(*columns, strict=True)):
                if counts[row] is None and outcome in ENDED_WELL:
                    events = sum(1 for flag in flags or () if flag & _CARRIES_OUTPUT)
                    counts[row] = events or (_TO_ESTIMATE if n else None)
            batch = replace_column(batch, "output_tokens", pa.array(counts, pa.int64()))
        return batch

    def _add(self, batch: pa.RecordBatch) -> None:
        """Add the rows of a batch."""
        requests = self.requests
        if self._uses_lengths:
            no_failure = pc.is_in(pc.fill_null(batch.column("outcome"), "complete"), _ENDED_WELL)
            self._unanswered_rows += pc.and_(batch.column("output_tokens").is_null(), no_failure).true_count
        made = pc.fill_null(batch.column("output_tokens"), 0)
        begin = len(requests)
        whole = pc.if_else(pc.fill_null(batch.column("stream"), False), None, batch.column("response_bytes"))
        estimated = pc.equal(pc.fill_null(batch.column("token_source"), ""), TokenSource.CHUNKS.value)
        for estimate, tokens, sizes in (
            (self._prompt_estimate, batch.column("input_tokens"), batch.column("prompt_bytes")),
            (self._answer_estimate, made, whole),
        ):
            estimated = pc.or_(estimated, estimate.mark_missing(begin, tokens, sizes))
        self.estimated_count += estimated.true_count
        for column, values in (
            (requests.arrival_ns, batch.column("arrival_ns")),
            (requests.input, batch.column("input_tokens")),
            (requests.output, made),
        ):
            column.extend(values.to_pylist())
        self._blocks.add([batch.column(name) for name in _BLOCK_COLUMNS])
        if self._turns is not None:
            self._turns.add(batch)
        if self._parts.names:
            requests.tenants += pc.fill_null(batch.column("tenant"), "").to_pylist()
            requests.models += pc.fill_null(batch.column("model"), "").to_pylist()
            requests.labels += map(label_of, batch.column("label").to_pylist())
        if self._parts.bodies:
            texts, paths = (batch.column(name).to_pylist() for name in ("request_body", "path"))
            requests.bodies += [(text or "").encode() for text in texts]
            requests.paths += [path or "" if text else "" for text, path in zip(texts, paths, strict=True)]


def tied_share(arrivals_ns: Sequence[int]) -> float:
    """Return the share of the gaps between successive arrivals that have length 0."""
    gaps = len(arrivals_ns) - 1
    return sum(map(eq, arrivals_ns, islice(arrivals_ns, 1, None))) / gaps if gaps > 0 else 0.0


def tie_note(arrivals_ns: Sequence[int]) -> list[str]:
    """Return a note if many rows arrive at the same time."""
    share = tied_share(arrivals_ns)
    if not share:
        return []
    gaps = sorted(b - a for a, b in zip(arrivals_ns, islice(arrivals_ns, 1, None), strict=False) if b > a)
    middle = percentile(gaps, 0.5)
    steps = "" if middle is None else f" (the others have a median of {format_ns(middle)})"
    return [f"{share:.1%} of the gaps between arrivals are 0{steps}: such rows stay together"]


def _filter_rows(
    batch: pa.RecordBatch, rows: Iterable[int], chosen: pa.BooleanArray
) -> tuple[pa.RecordBatch, Iterable[int]]:
    """Return the chosen rows of a batch, and their numbers."""
    if chosen.true_count == len(chosen):
        return batch, rows
    return batch.filter(chosen), compress(rows, chosen.to_pylist())


class _TokenEstimate:
    """Estimates the token counts of rows without one, from the bytes per token of the rows that have one."""

    def __init__(self, bytes_per_token: float) -> None:
        """`bytes_per_token`: assumed value if no row has a count; 0: estimate 0 tokens in this case."""
        self._assumed_bytes_per_token = bytes_per_token
        """Ratio that is used if no row has both counts."""
        self._tokens = self._bytes = 0
        """Sums over the rows that have both a token count and a size."""
        self._bytes_by_row: dict[int, int] = {}
        """By row to estimate: its number of bytes."""

    def mark_missing(self, begin: int, tokens: pa.Array, sizes: pa.Array) -> pa.Array:
        """Return which rows must be estimated, and store their sizes. `begin`: index of the first row."""
        wanted = pc.equal(tokens, _TO_ESTIMATE)
        if sizes.null_count < len(sizes):
            known = pc.and_(pc.greater(tokens, 0), sizes.is_valid())
            self._tokens += pc.sum(tokens.filter(known)).as_py() or 0
            self._bytes += pc.sum(sizes.filter(known)).as_py() or 0
            if wanted.true_count:
                places = pc.indices_nonzero(wanted).to_pylist()
                self._bytes_by_row |= {begin + row: sizes[row].as_py() for row in places}
        return wanted

    def fill(self, column: "array[int]") -> None:
        """Set the missing token counts by sizes in bytes."""
        per_token = self._bytes / self._tokens if self._tokens else self._assumed_bytes_per_token
        for row, size in self._bytes_by_row.items():
            column[row] = max(1, round(size / per_token)) if per_token else 0


class _Blocks:
    """Collects the prompt blocks of rows. All blocks must have the size and unit of the first ones."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._ids: list[tuple[int, ...]] = []
        """Block ids of each row; empty if it has none."""
        self._block_kind: tuple[int, str] | None = None
        """Size and unit of the first blocks."""
        self._bytes: dict[int, int] = {}
        """By row: prompt bytes, if the size of its blocks is given in bytes."""
        self._ignored_rows = 0
        """Number of rows whose blocks have another size or unit."""

    def add(self, columns: Sequence[pa.Array]) -> None:
        """Add the block ids of a batch."""
        lists = columns[0]
        if lists.null_count == len(lists):
            self._ids += [()] * len(lists)
            return
        for ids, size, unit, n_bytes in zip(*(column.to_pylist() for column in columns), strict=True):
            if ids and size:
                kind = size, unit or "tokens"
                if self._block_kind is None:
                    self._block_kind = kind
                if kind != self._block_kind:
                    self._ignored_rows += 1
                    ids = ()
                elif kind[1] == "bytes" and n_bytes:
                    self._bytes[len(self._ids)] = n_bytes
            self._ids.append(tuple(ids or ()) if size else ())

    def blocks_by_row(self, inputs: "array[int]") -> tuple[int, list[tuple[int, ...]]]:
        """Return the tokens per block, and the blocks of each row; 0 and [] without blocks.

        If the size is given in tokens, the last block of a row can be partial; if in bytes, only whole blocks
        are kept.
        """
        if self._block_kind is None:
            return 0, []
        size, unit = self._block_kind
        if self._ignored_rows:
            self.notes.append(
                f"{self._ignored_rows:,} rows have prompt blocks of another size: taken for unknown"
            )
        if unit == "bytes":
            n_bytes = sum(self._bytes.values())
            tokens = sum(inputs[row] for row in self._bytes)
            if not tokens:
                return 0, []
            in_bytes, size = size, max(1, round(size * tokens / n_bytes))
            self.notes.append(
                f"prompt blocks of {in_bytes:,} bytes are taken for {size:,} tokens, by the mean"
            )
        # Keep ceil(n / size) blocks if the unit is tokens, because the last block can be partial; else floor.
        begun = size - 1 if unit == "tokens" else 0
        return size, [ids[: (n + begun) // size] for ids, n in zip(self._ids, inputs, strict=True)]
