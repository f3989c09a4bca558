"""A trace or capture as a workload: any number of rows, a window or a share of it, at any rate.

`load_trace` reads a file, folder or URL into a `Trace` (`trace_rows.py` reads the rows and links the turns);
replays and the simulation take its requests at a scale (`requests_at`).

- A trace that is too short is repeated, one mean gap after its last arrival.
- Scaling by S divides all distances from the first arrival by S, so bursts stay bursts. Think times do not
  change.
- Rows with equal arrivals stay at one time; a note reports them.
- In a replay, a later turn of a conversation waits for the answer to the previous turn and the think time,
  and its arrival is ignored. Without `conversations`, as in the simulation, each row arrives at its own time.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Final

from llmtap.errors import ConfigError
from llmtap.metrics.statistics import rate_rps
from llmtap.traces.format import FormatError
from llmtap.traces.registry import open_trace
from llmtap.units import format_ns
from llmtap.workload.requests import Requests, int_column
from llmtap.workload.trace_rows import TraceParts, TraceRows, tie_note, tied_share


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace that was read as a whole."""

    requests: Requests
    format: str = ""
    notes: list[str] = field(default_factory=list)
    has_dates: bool = False
    """Whether arrivals count from 1970 UTC, and not from a zero of the trace."""
    sessions: "array[int]" = field(default_factory=int_column)
    """Conversation number of each row, if requested. The numbers do not change if rows are omitted."""
    source_rows: "array[int]" = field(default_factory=int_column)
    """Number of each row in the source, from 0, if requested."""
    has_answer_times: bool = False
    """Whether at least one row has the time of its answer; known only with `source_rows`."""
    omitted_count: int = 0
    """Number of rows of the source that have no arrival or token count."""
    unsendable: dict[str, int] = field(default_factory=dict)
    """Number of further omitted rows, by the reason why they cannot be sent."""
    estimated_count: int = 0
    """Number of rows of the source whose token counts are estimated."""

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def span_ns(self) -> int:
        arrivals = self.requests.arrival_ns
        return arrivals[-1] - arrivals[0] if arrivals else 0

    @property
    def rate_rps(self) -> float | None:
        """Mean rate; None if all rows arrive at one time."""
        return rate_rps(len(self), self.span_ns)

    @property
    def tied_share(self) -> float:
        """Share of the arrivals at the same time as another one."""
        return tied_share(self.requests.arrival_ns)

    def first_rows(self, count: int) -> "Trace":
        return self._select_rows(range(min(count, len(self))))

    def window(self, from_ns: int = 0, for_ns: int | None = None) -> "Trace":
        """Return the rows that arrive from `from_ns` after the first row, during `for_ns` or to the end.

        Raises ValueError for an empty window.
        """
        arrivals = self.requests.arrival_ns
        begin_ns = arrivals[0] + from_ns if arrivals else 0
        first = bisect_left(arrivals, begin_ns)
        end = len(arrivals) if for_ns is None else bisect_left(arrivals, begin_ns + for_ns)
        if first >= end:
            end_text = "the end" if for_ns is None else format_ns(from_ns + for_ns)
            part, span_text = f"from {format_ns(from_ns)} to {end_text}", format_ns(self.span_ns)
            raise ValueError(f"no row arrives {part}; the trace is {span_text} long")
        return self._select_rows(range(first, end))

    def sample_conversations(self, share: float, seed: int) -> "Trace":
        """Return a share of the conversations, chosen by a hash of the seed and the conversation number.

        Conversations stay whole. Those in a smaller share are also in each larger share. Raises ValueError
        unless 0 < share <= 1, or if no conversation is left.
        """
        if not 0 < share <= 1:
            raise ValueError(f"expected a share above 0 and at most 1, got {share:g}")
        below = round(share * 2**64)
        numbers = self.sessions or range(len(self))
        stays = {
            number: int.from_bytes(blake2b(f"{seed}/{number}".encode(), digest_size=8).digest(), "big")
            < below
            for number in set(numbers)
        }
        rows = [row for row, number in enumerate(numbers) if stays[number]]
        if not rows:
            raise ValueError(f"a share of {share:g} leaves none of {len(stays):,} conversations: use more")
        return self._select_rows(rows)

    def requests_at(
        self, *, count: int, scale: float = 1.0, think_scale: float = 1.0, timed: bool = True
    ) -> Requests:
        """Return `count` requests from time 0, `scale` times as dense as in the trace.

        Request k is row k mod n. `timed`: whether the caller uses the arrivals. Raises ValueError if it does,
        the trace is too short, and all rows arrive at once, so that repetitions would have no distance.
        """
        source = self.requests
        n, span_ns = len(source), self.span_ns
        if count > n and span_ns == 0 and timed:
            raise ValueError(f"the rows arrive at once, so they cannot be repeated: use up to {n:,} requests")
        offsets = [t - source.arrival_ns[0] for t in source.arrival_ns[: min(n, count)]]
        if count > n:
            # The rows repeat after their span and one mean gap: span + span / (n - 1) = n span / (n - 1).
            # Round multiples of this period, not the period itself, so that rounding errors do not add up.
            rounds = range(-(-count // n))
            shifts = [k * span_ns * n // (n - 1) if span_ns else 0 for k in rounds]
            offsets = [t + shift for shift in shifts for t in offsets][:count]
        if scale != 1:
            offsets = [round(t / scale) for t in offsets]
        more = -(-count // n)
        before = source.after
        think_ns = source.think_ns
        if think_scale != 1:
            think_ns = array("q", (round(t / think_scale) for t in think_ns))
        return Requests(
            array("q", offsets),
            (source.input * more)[:count],
            (source.output * more)[:count],
            array("q"),
            (source.blocks * more)[:count],
            source.block_tokens,
            source.arrival_ns[0] if self.has_dates else 0,
            array("q", [row if row < 0 else row + k * n for k in range(more) for row in before][:count]),
            (think_ns * more)[:count],
            {
                row + k * n: tuple(other + k * n for other in others)
                for k in range(more)
                for row, others in source.joins.items()
                if row + k * n < count
            },
            (source.tenants * more)[:count],
            (source.bodies * more)[:count],
            (source.paths * more)[:count],
            (source.models * more)[:count],
            (source.labels * more)[:count],
        )

    def _select_rows(self, rows: Sequence[int]) -> "Trace":
        requests, notes = self.requests.select_rows(rows), self.notes
        ties_note = tie_note(self.requests.arrival_ns) if notes else []
        if ties_note and ties_note[0] in notes:  # The note describes all rows: replace it.
            notes = [note for note in notes if note not in ties_note] + tie_note(requests.arrival_ns)
        sessions = array("q", (self.sessions[row] for row in rows) if self.sessions else ())
        source_rows = array("q", (self.source_rows[row] for row in rows) if self.source_rows else ())
        return replace(self, requests=requests, notes=notes, sessions=sessions, source_rows=source_rows)


_ARRIVALS: Final = TraceParts()


def load_trace(
    place: str,
    *,
    count: int | None = None,
    source_format: str | None = None,
    progress: Callable[[int, int | None], None] | None = None,
    parts: TraceParts = _ARRIVALS,
) -> Trace:
    """Read the first `count` rows of a trace or capture with arrival and token counts.

    Missing token counts are estimated from the events that carry output, or from the number of bytes and the
    trace's mean bytes per token. A row without output tokens is a failed request and gets 0. Raises
    ConfigError naming the trace.
    """
    rows = TraceRows(count, parts)
    with open_trace(place, source_format=source_format, progress=progress, option=place) as trace:
        try:
            rows.read(trace.source)
        except FormatError as exc:
            raise ConfigError(place, str(exc)) from None
    if not rows.requests:
        raise ConfigError(place, rows.reason_for_no_rows())
    requests = rows.ordered_requests()
    # The file was read to its end, so the notes of the reader are complete: they count the skipped entries.
    notes = trace.source.notes + rows.notes() + (tie_note(requests.arrival_ns) if parts.timed else [])
    return Trace(
        requests,
        trace.format.name,
        notes,
        rows.has_dates,
        rows.links.session,
        rows.source_rows,
        rows.has_answer_times,
        rows.omitted_count,
        dict(rows.unsendable),
        rows.estimated_count,
    )
