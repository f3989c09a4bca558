"""Choose the dialect of an answer by evidence, and revise the choice while the dialect has read no output.

`exchange/answer.py` passes the events of a stream to a `DialectChooser`. Until the dialect is known, the
chooser keeps the events; then it releases their Deltas, each with the time of its own read. The choice needs
no configuration, because one gateway may speak several dialects; users may add tables of their own.
`ADDING.md` describes the rule of the choice.
"""

from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple

from llmtap.protocol import structure
from llmtap.protocol.delta import Delta, EventClass, Reading, ReadingLimit
from llmtap.protocol.dialects import bedrock
from llmtap.protocol.dialects.openai_shapes import is_object, read_json, read_non_object
from llmtap.protocol.dialects.registry import BUILT_IN, Dialects, Reader
from llmtap.protocol.dialects.shapes import failure_in
from llmtap.protocol.dialects.table.reader import TableReader
from llmtap.protocol.sse import SseEvent

EVENTS_KEPT_MAX: Final = 16
"""Events with data that are kept until the dialect is known."""
BYTES_KEPT_MAX: Final = 1 << 16
"""Bytes of all events that are kept, keep-alives included."""
_EVENT_BYTES_MIN: Final = 256
"""Minimum number of bytes that a kept event is counted with: its Python object takes memory, too."""
CANDIDATES_MAX: Final = 4
"""Dialects that read the same events while the dialect is not known."""
REVISIONS_MAX: Final = 256
"""Maximum number of events for which other dialects are tried after the choice."""
_OUTPUTS_TO_REVISE: Final = 3
"""A chosen dialect that has read output is replaced only after another dialect has read output in so many
events in which the chosen one read none."""
_OUTPUTS_ON_FOREIGN_PATH: Final = 2
"""If the path is not one of its own, a dialect is chosen only after so many events with output or an end."""
_EVENTS_ON_PATH: Final = 2
"""On its own path, a table that has read no output is chosen before the end only after it has understood so
many events."""
_UNREAD_ON_PATH: Final = 4
"""On its own path, a dialect is not chosen if it understood less than one event for so many that it did not
understand."""
_NAMED: Final = 3
"""Claim (`registry.Dialect.claim`) of an object that names its dialect."""
_FITS: Final = 2
"""Claim of an object whose fields fit; below it, only the path fits."""


class Released(NamedTuple):
    """An event whose meaning is known."""

    delta: Delta
    event: SseEvent | None
    """None if no dialect reads it, such as a ping of a WebSocket."""
    t_ns: int
    """Time of the read that completed the event."""


class _StoredEvent(NamedTuple):
    event: SseEvent | None
    delta: Delta | None
    """Meaning of an event that no dialect reads; else None."""
    size: int
    t_ns: int


@dataclass(slots=True, eq=False)
class _Candidate:
    """A dialect that claims the answer, with what it reads of the kept events."""

    reader: Reader
    position: int
    claim: int
    is_own: bool
    is_on_path: bool
    deltas: list[Delta] = field(default_factory=list)
    evidence: int = 0
    strong_events: int = 0
    """Number of events that carry output or end the answer."""
    output_events: int = 0
    """Number of events that carry output, or a verdict, which may stand in its place."""
    data_events: int = 0
    parsed_events: int = 0
    unread_events: int = 0

    def read(self, stored: _StoredEvent, *, before: bool = False) -> None:
        """Read a kept event. `before`: the event came before the dialect's claim, so it does not count as
        unread."""
        if stored.delta is not None or stored.event is None:
            return
        delta = _read_with_guardrail(self.reader, stored.event)
        self.deltas.append(delta)
        if not _is_data(stored.event):
            return
        self.parsed_events += delta.parsed
        self.unread_events += not (delta.parsed or before)
        # Many dialects have the same end mark, so an end counts only if all events before it were understood.
        self.data_events += 1
        ended = delta.done and self.parsed_events == self.data_events
        strong = delta.output or ended or delta.finish_reason is not None
        self.strong_events += strong
        self.output_events += delta.output or delta.verdict is not None
        self.evidence += strong or _is_weak_evidence(delta)

    @property
    def rank(self) -> tuple[bool, bool, int, int]:
        return self.is_own, self.is_on_path, self.claim, -self.position

    @property
    def is_guess(self) -> bool:
        """Whether the events may be of another API: the dialect understands few of them, although the path
        speaks for it; or without its path, it names few of them, or reads no output by their members alone,
        or not all of them."""
        if self.is_own:
            return False
        if self.is_on_path:
            return self.unread_events > _UNREAD_ON_PATH * self.parsed_events
        if self.claim >= _NAMED:
            return self.unread_events > self.parsed_events
        return not self.output_events or self.unread_events > 0

    @property
    def certainty(self) -> tuple[bool, bool, bool]:
        """Return three signs that the dialect is right: it is the user's own table, the path is one of its
        paths, the events name it."""
        return self.is_own, self.is_on_path, self.claim >= _NAMED


class DialectChooser:
    """Reader of an answer whose dialect is not known beforehand.

    While `open`, pass events to `offer` and use what it returns; afterwards call `read_event`. `conclude`
    ends the choice early, or at the end of the answer.
    """

    __slots__ = (
        "_candidates",
        "_certainty",
        "_data_events",
        "_dialects",
        "_is_full",
        "_output_read",
        "_outputs_of_another",
        "_path",
        "_reading",
        "_revisions_left",
        "_stored_events",
        "chosen",
        "kept_bytes",
        "open",
    )

    def __init__(self, path: str, dialects: Dialects = BUILT_IN) -> None:
        self._path = path
        self._dialects = dialects
        self.open = True
        self.chosen: Reader | None = None
        self._reading = Reading.NONE
        self.kept_bytes = 0
        self._stored_events: list[_StoredEvent] = []
        self._data_events = 0
        self._candidates: list[_Candidate] = []
        self._certainty = (False, False, False)
        """Certainty of the chosen dialect (`_Candidate.certainty`)."""
        self._output_read = False
        self._outputs_of_another = 0
        self._revisions_left = REVISIONS_MAX
        self._is_full = False
        """Whether the limit of kept events was reached before the dialect was certain."""

    @property
    def name(self) -> str | None:
        return None if self.chosen is None else self.chosen.name

    @property
    def reading(self) -> Reading:
        """How the answer is read; also `none` while the structure of the answer shows no output."""
        if isinstance(self.chosen, structure.InferredReader) and not self.chosen.knows_output:
            return Reading.NONE
        return self._reading

    @property
    def names_read(self) -> frozenset[str] | None:
        """Top-level members that the dialect reads in events that may repeat (`Delta.repeatable`); None if
        unknown."""
        names: frozenset[str] | None = getattr(self.chosen, "names_read", None)
        return names

    @property
    def answer_id(self) -> bytes | None:
        """Id of the answer, in dialects whose requests may name the previous answer; else None."""
        answer_id: str | None = getattr(self.chosen, "answer_id", None)
        return None if answer_id is None else answer_id.encode("utf-8", "surrogatepass")

    @property
    def end_certain(self) -> bool:
        """Whether a stream of the dialect that ends without an end mark was cut off."""
        # Without a name and the path, other members do not show that this is not another API.
        return any(self._certainty) and bool(getattr(self.chosen, "end_certain", False))

    @property
    def limits(self) -> tuple[ReadingLimit, ...]:
        """Limits that the reading of this answer reached."""
        inferred: tuple[ReadingLimit, ...] = getattr(self.chosen, "limits", ())
        limits = (ReadingLimit.KEPT_EVENTS,) if self._is_full else ()
        return limits + (() if self._revisions_left else (ReadingLimit.REVISIONS,)) + inferred

    def offer(self, event: SseEvent, size: int, t_ns: int) -> list[Released]:
        """Take an event of `size` bytes, complete at `t_ns`; return the events whose meaning is now known."""
        if not self._stored_events and not _is_data(event):
            delta = _read_with_guardrail(None, event)
            delta.size = size
            return [Released(delta, event, t_ns)]
        stored = _StoredEvent(event, None, size, t_ns)
        self._store(stored)
        for candidate in self._candidates:
            candidate.read(stored)
        best = self._find_decisive()
        if _is_data(event):
            self._data_events += 1
            best = best or self._admit(event)
        if best is not None:
            return self._settle(best.reader, Reading.DIALECT, best)
        if self._data_events >= EVENTS_KEPT_MAX or self.kept_bytes > BYTES_KEPT_MAX:
            return self.conclude(whole=False)
        return []

    def offer_known(self, delta: Delta, t_ns: int) -> list[Released]:
        """Take an event whose meaning is known and that no dialect reads. Return the events whose meaning is
        now known, in the order in which they came."""
        if not self._stored_events:
            return [Released(delta, None, t_ns)]
        self._store(_StoredEvent(None, delta, delta.size, t_ns))
        return self.conclude(whole=False) if self.kept_bytes > BYTES_KEPT_MAX else []

    def conclude(self, *, whole: bool = True) -> list[Released]:
        """End the choice and return the kept events. `whole`: whether the answer is over; False if the limit
        of kept events ends the choice earlier."""
        if not self.open:
            return []
        self._is_full = not whole
        likely = [
            c
            for c in self._candidates
            if (c.strong_events or (c.evidence and c.parsed_events >= c.unread_events)) and not c.is_guess
        ]
        if not likely:
            # Without better evidence, accept a dialect that the events name, unless most of them mean nothing
            # to it: a single event may have a dialect's name by chance, such as `session.closed`.
            likely = [
                c
                for c in self._candidates
                if c.claim >= _NAMED and not c.unread_events and 2 * c.parsed_events >= c.data_events
            ]
        if not any(c.output_events or c.is_on_path for c in likely):
            # Names of events, ends, usage and errors look alike in many APIs. A text that the structure of
            # the events shows is better evidence than these.
            events = [stored.event for stored in self._stored_events if stored.event is not None]
            reader = structure.infer(events, whole=whole) if likely else None
            if reader is not None and reader.knows_output:
                return self._settle(reader, Reading.INFERRED, None)
        if likely:
            best = max(likely, key=lambda c: (c.strong_events, c.evidence, c.rank))
            return self._settle(best.reader, Reading.DIALECT, best)
        events = [stored.event for stored in self._stored_events if stored.event is not None]
        owners = self._dialects.owners(self._path)
        if owners and self._data_events and all(map(_is_done_mark, filter(_is_data, events))):
            return self._settle(self._dialects.all[owners[0]](), Reading.DIALECT, None)
        reader = structure.infer(events, whole=whole) if self._data_events else None
        return self._settle(reader, Reading.NONE if reader is None else Reading.INFERRED, None)

    def read_event(self, event: SseEvent) -> Delta:
        """Read an event after the choice."""
        chosen = self.chosen
        delta = _read_unclaimed(event) if chosen is None else chosen.read_event(event)
        # A repeatable event has no member of a guardrail (`is_bare` and `Anthropic._read` ensure this), so
        # skip the search.
        if not delta.repeatable:
            if event.data is not None and bedrock.GUARDRAIL_ACTION in event.data:
                bedrock.add_guardrail(delta, event.data)
            if not delta.parsed:
                delta = self._revise(event, delta)
            if not delta.parsed and isinstance(self.chosen, structure.InferredReader):
                delta = self.chosen.learn(event, delta)
        if delta.output:
            self._output_read = True
        return delta

    def read_body(self, body: bytes) -> Delta:
        """Read a whole JSON answer, which is the only event of its body."""
        self.open = False
        delta = self._read_whole(body)
        if bedrock.GUARDRAIL_ACTION in body:
            bedrock.add_guardrail(delta, body)
        return delta

    def _store(self, stored: _StoredEvent) -> None:
        self._stored_events.append(stored)
        self.kept_bytes += max(stored.size, _EVENT_BYTES_MIN)

    def _admit(self, event: SseEvent) -> _Candidate | None:
        """Add the dialects that claim this event, the last one kept, to the candidates. Return the candidate
        for which the event is decisive."""
        known = {candidate.position: candidate for candidate in self._candidates}
        claims = self._dialects.claims_of(read_json(event.data or b""), self._path, event.event)
        for order, claim in islice(claims, CANDIDATES_MAX):
            if order in known:
                known[order].claim = max(known[order].claim, claim)
                continue
            if len(self._candidates) == CANDIDATES_MAX:
                weakest = min(self._candidates, key=lambda c: (c.evidence, c.rank))
                if weakest.evidence:
                    break
                self._candidates.remove(weakest)
            own, on_path = self._dialects.is_own(order, claim), self._dialects.is_on_path(order, self._path)
            candidate = _Candidate(self._dialects.all[order](), order, claim, own, on_path)
            for stored in self._stored_events[:-1]:
                candidate.read(stored, before=True)
            candidate.read(self._stored_events[-1])
            self._candidates.append(candidate)
            owned = candidate.is_own or candidate.is_on_path or not self._dialects.owners(self._path)
            if owned and self._is_decisive(candidate):
                return candidate  # Later claims are less certain.
            if on_path and claim >= _NAMED and candidate.parsed_events:
                break  # Others may still claim the next event.
        return self._find_decisive()

    def _find_decisive(self) -> _Candidate | None:
        """Return the candidate whose evidence decides; None if there is none."""
        decisive = filter(self._is_decisive, self._candidates)
        return max(decisive, key=lambda candidate: candidate.rank, default=None)

    def _is_decisive(self, candidate: _Candidate) -> bool:
        if candidate.is_on_path:
            rivals = (c for c in self._candidates if c.claim >= _NAMED)
            if candidate.claim < _FITS and any(c.strong_events for c in rivals):
                return False  # Only the path fits, and the events name another dialect.
            named = candidate.claim >= _NAMED and not candidate.unread_events
            # Tables may know an event by common members or `event: message`, classes know it by its name.
            is_table = isinstance(candidate.reader, TableReader) and not candidate.is_own
            enough = _EVENTS_ON_PATH if is_table else 1
            return bool(candidate.strong_events) or (named and candidate.parsed_events >= enough)
        if not candidate.output_events or candidate.is_guess:
            return False
        is_free = candidate.is_own and not self._dialects.owners(self._path)
        return is_free or candidate.strong_events >= _OUTPUTS_ON_FOREIGN_PATH

    def _settle(self, reader: Reader | None, reading: Reading, by: _Candidate | None) -> list[Released]:
        """End the choice with this reader. `by`: the candidate that has already read the kept events; None if
        `reader` must still read them."""
        self.open = False
        self.chosen, self._reading = reader, reading
        if by is not None:
            self._certainty = by.certainty
        deltas = iter(()) if by is None else iter(by.deltas)
        out = []
        for event, delta, size, t_ns in self._stored_events:
            if event is not None:
                delta = _read_with_guardrail(reader, event) if by is None else next(deltas)
                delta.size = size
                self._output_read |= delta.output
            assert delta is not None
            out.append(Released(delta, event, t_ns))
        self._stored_events, self._candidates, self.kept_bytes = [], [], 0
        return out

    def _revise(self, event: SseEvent, delta: Delta) -> Delta:
        """Return what an event means that the chosen dialect did not understand.

        A dialect that finds output in the event may replace the chosen one.
        """
        if not self._revisions_left or event.data is None or not is_object(event.data):
            return delta
        self._revisions_left -= 1
        claims = self._dialects.claims_of(read_json(event.data), self._path, event.event)
        for order, claim in islice(claims, CANDIDATES_MAX):
            reader = self._dialects.all[order]()
            other = _read_with_guardrail(reader, event)
            if not other.output:
                continue
            self._outputs_of_another += 1
            own, on_path = self._dialects.is_own(order, claim), self._dialects.is_on_path(order, self._path)
            certainty = own, on_path, claim >= _NAMED
            is_better = claim >= _NAMED and certainty > self._certainty
            if self._output_read and not is_better and self._outputs_of_another < _OUTPUTS_TO_REVISE:
                return delta
            self.chosen, self._reading, self._certainty = reader, Reading.DIALECT, certainty
            self._outputs_of_another = 0
            return other
        return delta

    def _read_whole(self, body: bytes) -> Delta:
        value = read_json(body)
        named: tuple[Reader, Delta] | None = None
        for order, claim in islice(self._dialects.claims_of(value, self._path), CANDIDATES_MAX):
            reader = self._dialects.all[order]()
            delta = reader.read_body(body)
            if delta.output or delta.done or delta.finish_reason is not None or _is_weak_evidence(delta):
                self.chosen, self._reading = reader, Reading.DIALECT
                return delta
            if claim >= _NAMED and delta.parsed and named is None:
                named = reader, delta
        if named is not None:
            self.chosen, self._reading = named[0], Reading.DIALECT
            return named[1]
        inferred = structure.infer([SseEvent(0, len(body), body)], whole=True)
        if inferred is not None:
            self.chosen, self._reading = inferred, Reading.INFERRED
            return inferred.read_body(body)
        return failure_in(value)


def _is_data(event: SseEvent) -> bool:
    return bool(event.data) and event.event != b"ping"


def _is_done_mark(event: SseEvent) -> bool:
    """Return whether the event is `[DONE]`. Several dialects share this end mark, so it is evidence only for
    the dialect to which the path belongs."""
    return event.data is not None and event.data.strip() == b"[DONE]"


def _is_weak_evidence(delta: Delta) -> bool:
    """Return whether the event has usage, a verdict or an error: signs of this dialect that other dialects
    have, too."""
    return delta.counts is not None or delta.verdict is not None or delta.event_class is EventClass.ERROR


def _read_with_guardrail(reader: Reader | None, event: SseEvent) -> Delta:
    delta = _read_unclaimed(event) if reader is None else reader.read_event(event)
    if event.data is not None and bedrock.GUARDRAIL_ACTION in event.data:
        bedrock.add_guardrail(delta, event.data)
    return delta


def _read_unclaimed(event: SseEvent) -> Delta:
    if event.data is None or not is_object(event.data):
        return read_non_object(event)
    return failure_in(read_json(event.data), event.event)
