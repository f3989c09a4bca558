"""Choose the dialect of an answer by evidence, and revise the choice while the dialect has read no output.

`exchange/answer.py` passes the events of a stream to a `DialectChooser`. Until the dialect is known, the
chooser stores the events; then it releases their Deltas, each with the time of its own read. The choice needs
no configuration, because one gateway can send several dialects. Users can add their own tables. `ADDING.md`
describes the rules of the choice.
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
from llmtap.protocol.repetition import RunningTotal
from llmtap.protocol.sse import SseEvent
from llmtap.protocol.structure.structure import TEXT_CHARS_MAX
from llmtap.protocol.structure.texts import Sequel, compare_texts

EVENTS_KEPT_MAX: Final = 16
"""Maximum number of events with data that are stored until the dialect is known."""
BYTES_KEPT_MAX: Final = 1 << 16
"""Maximum number of bytes of all stored events, including keep-alives."""
_EVENT_BYTES_MIN: Final = 256
"""Minimum number of bytes that a stored event counts as, because its Python object takes memory, too."""
CANDIDATES_MAX: Final = 4
"""Maximum number of dialects that read the same events until the dialect is known."""
REVISIONS_MAX: Final = 256
"""Maximum number of events for which other dialects are tried after the choice."""
_OUTPUTS_TO_REVISE: Final = 3
"""A chosen dialect that has read output is replaced only after other dialects have read output in this number
of events that the chosen dialect does not understand."""
_OUTPUTS_ON_FOREIGN_PATH: Final = 2
"""On a path that is not its own, a dialect is chosen only after this number of events with output or end."""
_TEXTS_TO_COMPARE: Final = 4
"""On a path that is not its own, a dialect that the events do not name is chosen only if two of its texts
join, or after this number of texts."""
_EVENTS_ON_PATH: Final = 2
"""On its own path, a table without output is chosen early only after it understood this number of events."""
_UNREAD_ON_PATH: Final = 4
"""On its own path, a dialect is not chosen if the events that it did not understand are more than this
multiple of the events that it understood."""
_NAMED: Final = 3
"""Minimum claim (`registry.Dialect.claim`) for an object that names its dialect."""
_FITS: Final = 2
"""Minimum claim for an object whose fields fit the dialect; below it, only the path fits."""


class Released(NamedTuple):
    """An event with its meaning."""

    delta: Delta
    event: SseEvent | None
    """The event; None if it is not for a dialect, such as a ping of a WebSocket."""
    t_ns: int
    """Time of the read that completed the event."""


class _StoredEvent(NamedTuple):
    """An event that waits until a dialect is chosen."""

    event: SseEvent | None
    delta: Delta | None
    """Meaning of an event that is not for a dialect; else None."""
    size: int
    t_ns: int

    @property
    def holds_data(self) -> bool:
        return self.event is not None and _is_data(self.event)


@dataclass(slots=True, eq=False)
class _Candidate:
    """A dialect that claims the answer, with the Deltas that it reads from the stored events."""

    reader: Reader
    position: int
    """Position of the dialect in `Dialects.entries`."""
    claim: int
    """How sure the dialect is that the answer is its own (`registry.Dialect.claim`)."""
    is_own: bool
    """Whether the dialect is a table of the user that fits."""
    is_on_path: bool
    """Whether the path of the request belongs to the dialect."""
    deltas: list[Delta] = field(default_factory=list)
    """What the candidate reads from each stored event."""
    evidence: int = 0
    """Number of events with strong or weak evidence for the dialect."""
    strong_events: int = 0
    """Number of events that carry output or end the answer, which is strong evidence."""
    output_events: int = 0
    """Number of events that carry output, or a verdict, which can stand in place of output."""
    data_events: int = 0
    """Number of events with data that the candidate has read."""
    parsed_events: int = 0
    """Number of events with data that the dialect understood."""
    unread_events: int = 0
    """Number of events since its first claim that the dialect did not understand."""
    texts: list[str] = field(default_factory=list)
    """The first texts of the output, if nothing but the shape of the events fits the dialect."""
    early_ns: int | None = None
    """Time of the first event with output that was released before the dialect was chosen."""
    sequel: Sequel | None = None
    """How the texts follow each other; None before the first text."""

    def read(self, stored: _StoredEvent, *, before: bool = False) -> None:
        """Read a stored event. `before`: it came before the first claim, so it does not count as unread."""
        if stored.delta is not None or stored.event is None:
            return
        delta = _read_with_guardrail(self.reader, stored.event)
        self.deltas.append(delta)
        if not _is_data(stored.event):
            return
        self.parsed_events += delta.parsed
        self.unread_events += not (delta.parsed or before)
        # Many dialects have the same end mark, so an end counts only if all events so far were understood.
        self.data_events += 1
        ended = delta.done and self.parsed_events == self.data_events
        strong = delta.output or ended or delta.finish_reason is not None
        self.strong_events += strong
        self.output_events += delta.output or delta.verdict is not None
        if delta.output and delta.text and self._can_be_by_chance and len(self.texts) < EVENTS_KEPT_MAX:
            self.texts.append(delta.text[:TEXT_CHARS_MAX])
            self.sequel = compare_texts(self.texts)
        self.evidence += strong or _is_weak_evidence(delta)

    @property
    def _can_be_by_chance(self) -> bool:
        """Whether only the shape of the events fits the dialect, and events of another API can have it, too:
        it can be one common member, such as `response`."""
        return not (any(self.certainty) or getattr(self.reader, "shape_certain", False))

    def forget(self, released: _StoredEvent) -> None:
        """Forget the Delta of the oldest stored event, which is released without a dialect."""
        if released.delta is None and released.event is not None:
            delta = self.deltas.pop(0)
            if delta.output and self.early_ns is None:
                self.early_ns = released.t_ns

    @property
    def rank(self) -> tuple[bool, bool, int, int]:
        """Rank among candidates with the same evidence; the highest wins."""
        return self.is_own, self.is_on_path, self.claim, -self.position

    @property
    def is_guess(self) -> bool:
        """Whether the events possibly belong to another API. On its own path, the dialect must understand one
        of five events. On another path, it must understand half of the events if they name it; else it must
        understand all of them, and read output whose texts can be pieces of an answer."""
        if self.is_own:
            return False
        if self.is_on_path:
            return self.unread_events > _UNREAD_ON_PATH * self.parsed_events
        if self.claim >= _NAMED:
            return self.unread_events > self.parsed_events
        if not self.output_events or self.unread_events:
            return True
        if self.output_events < _OUTPUTS_ON_FOREIGN_PATH and self.parsed_events < self.data_events / 2:
            return True
        # Texts that are notices, identifiers or constants are no pieces of an answer.
        sequel = self.sequel
        return sequel is not None and (sequel.are_no_text or sequel.are_constant or sequel.are_separate)

    @property
    def joins(self) -> bool:
        """Whether the texts are enough to see that they are pieces of an answer."""
        sequel = self.sequel
        return sequel is None or sequel.joining_pairs > 0 or len(self.texts) >= _TEXTS_TO_COMPARE

    @property
    def certainty(self) -> tuple[bool, bool, bool]:
        """Signs for the dialect: it is a table of the user, the path belongs to it, the events name it."""
        return self.is_own, self.is_on_path, self.claim >= _NAMED


class DialectChooser:
    """Reader of an answer whose dialect is not known before.

    While it is `open`, pass events to `offer` and use the returned events; afterwards call `read_event`.
    `conclude` ends the choice, at the latest at the end of the answer.
    """

    __slots__ = (
        "_candidates",
        "_certainty",
        "_data_events",
        "_dialects",
        "_has_read_output",
        "_inferred",
        "_is_full",
        "_outputs_of_others",
        "_path",
        "_reading",
        "_revisions_left",
        "_stored_events",
        "_times",
        "_unexamined",
        "chosen",
        "early_ns",
        "kept_bytes",
        "open",
    )

    def __init__(self, path: str, dialects: Dialects = BUILT_IN) -> None:
        self._path = path
        self._dialects = dialects
        self.open = True
        """Whether the dialect is not chosen yet."""
        self.chosen: Reader | None = None
        """Reader of the chosen dialect; None before the choice, and if no dialect fits."""
        self._reading = Reading.NONE
        self.kept_bytes = 0
        """Size of the stored events, for the limit BYTES_KEPT_MAX."""
        self.early_ns: int | None = None
        """Time of the first event that possibly had output, but was released before the answer was
        understood; None if the first token is certain."""
        self._stored_events: list[_StoredEvent] = []
        """Events that wait until a dialect is chosen."""
        self._data_events = 0
        """Number of events with data that are stored."""
        self._inferred: structure.InferredReader | None = None
        """Reader of the structure, which has examined the events; None before the limit was reached first."""
        self._unexamined: list[SseEvent] = []
        self._times: list[int] = []
        """Times of the events with data so far, while the answer is not understood."""
        self._candidates: list[_Candidate] = []
        """Dialects that claim one of the stored events."""
        self._certainty = (False, False, False)
        """Certainty of the chosen dialect (`_Candidate.certainty`)."""
        self._has_read_output = False
        """Whether the chosen dialect has read output."""
        self._outputs_of_others = 0
        """Number of outputs since the choice that only another dialect reads."""
        self._revisions_left = REVISIONS_MAX
        """How often the choice may still be changed."""
        self._is_full = False
        """Whether the limit of stored events was reached before the answer was understood."""

    @property
    def name(self) -> str | None:
        return None if self.chosen is None else self.chosen.name

    @property
    def reading(self) -> Reading:
        """How the answer is read; `none` also while no output is known from the structure of the answer."""
        if isinstance(self.chosen, structure.InferredReader) and not self.chosen.knows_output:
            return Reading.NONE
        return self._reading

    @property
    def names_read(self) -> frozenset[str] | None:
        """Members at the top of repeatable events that the dialect reads; None if unknown."""
        names: frozenset[str] | None = getattr(self.chosen, "names_read", None)
        return names

    @property
    def running_total(self) -> RunningTotal | None:
        """Total of a running usage; None if the dialect has no repeatable events with a usage."""
        total: RunningTotal | None = getattr(self.chosen, "running_total", None)
        return total

    @property
    def answer_id(self) -> bytes | None:
        """Id of the answer, in dialects whose requests can name the previous answer; else None."""
        answer_id: str | None = getattr(self.chosen, "answer_id", None)
        return None if answer_id is None else answer_id.encode("utf-8", "surrogatepass")

    @property
    def end_certain(self) -> bool:
        """Whether a stream without an end mark was certainly cut off."""
        # If neither the path nor a name in the events fits the dialect, the API can have another end mark.
        return any(self._certainty) and bool(getattr(self.chosen, "end_certain", False))

    @property
    def limits(self) -> tuple[ReadingLimit, ...]:
        """Limits that the reading of this answer reached."""
        inferred: tuple[ReadingLimit, ...] = getattr(self.chosen, "limits", ())
        limits = (ReadingLimit.KEPT_EVENTS,) if self._is_full else ()
        return limits + (() if self._revisions_left else (ReadingLimit.REVISIONS,)) + inferred

    def offer(self, event: SseEvent, size: int, t_ns: int) -> list[Released]:
        """Take an event of `size` bytes, complete at `t_ns`. Return the events whose meaning is known now."""
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
            best = best or self._add_candidates(event)
        if best is not None:
            return self._choose(best.reader, Reading.DIALECT, best)
        return self._release_oldest(tries=_is_data(event)) if self._has_too_many() else []

    def offer_known(self, delta: Delta, t_ns: int) -> list[Released]:
        """Take the Delta of an event that is not for a dialect. Return the events with a known meaning."""
        if not self._stored_events:
            return [Released(delta, None, t_ns)]
        self._store(_StoredEvent(None, delta, delta.size, t_ns))
        return self._release_oldest(tries=False) if self._has_too_many() else []

    def conclude(self, *, whole: bool = True) -> list[Released]:
        """End the choice, and return the stored events with their meanings. `whole`: whether the answer is
        over; if not, the limit of stored events ends the choice."""
        if not self.open:
            return []
        self._is_full |= not whole
        return self._choose(*self._find_reader(whole=whole))

    def _find_reader(self, *, whole: bool) -> tuple[Reader | None, Reading, _Candidate | None]:
        """Return the most likely reader for the events so far, and the candidate that has it, if any."""
        likely = [
            c
            for c in self._candidates
            if (c.strong_events or (c.evidence and c.parsed_events >= c.unread_events)) and not c.is_guess
        ]
        if not likely:
            # Without other evidence, accept a dialect that the events name if it understands at least half of
            # them: a single event, such as `session.closed`, can have a name of the dialect by chance.
            likely = [
                c
                for c in self._candidates
                if c.claim >= _NAMED and not c.unread_events and 2 * c.parsed_events >= c.data_events
            ]
        if not any(c.output_events or c.is_on_path for c in likely):
            # Many APIs have the same names of events, ends, usage and errors. Output in the structure of the
            # events is better evidence than these names.
            reader = self._infer(whole=whole) if likely else None
            if reader is not None and reader.knows_output:
                return reader, Reading.INFERRED, None
        if likely:
            best = max(likely, key=lambda c: (c.strong_events, c.evidence, c.rank))
            return best.reader, Reading.DIALECT, best
        owners = self._dialects.owners(self._path)
        if owners and self._unexamined and not self._is_full and all(map(_is_done_mark, self._unexamined)):
            return self._dialects.entries[owners[0]](), Reading.DIALECT, None
        reader = self._infer(whole=whole) if self._times else None
        return reader, Reading.NONE if reader is None else Reading.INFERRED, None

    def _infer(self, *, whole: bool) -> structure.InferredReader | None:
        """Return a reader by the structure of all events so far; None if the whole answer has no output."""
        events, self._unexamined = self._unexamined, []
        if self._inferred is None:
            self._inferred = structure.infer(events, whole=whole)
            return self._inferred
        for event in events:
            self._inferred.examine(event)
        is_last_chance = self._inferred.first_unjudged <= self._released_count
        if whole or is_last_chance or self.kept_bytes > BYTES_KEPT_MAX:
            self._inferred.judge()
        return self._inferred if self._inferred.knows_output or not whole else None

    @property
    def _released_count(self) -> int:
        """Number of events with data that were released before the answer was understood."""
        return len(self._times) - self._data_events

    def _has_too_many(self) -> bool:
        return self._data_events >= EVENTS_KEPT_MAX or self.kept_bytes > BYTES_KEPT_MAX

    def _release_oldest(self, *, tries: bool) -> list[Released]:
        """Choose if the stored events show how to read the answer; else release the oldest of them, and wait
        for later events. `tries`: the latest event has data, so it possibly shows more."""
        self._is_full = True
        if tries:
            reader, reading, by = self._find_reader(whole=False)
            knows = reading is Reading.DIALECT or (self._inferred is not None and self._inferred.knows_output)
            self._revisions_left -= not knows
            if knows or self._revisions_left <= 0:
                return self._choose(reader, reading, by)
        out = []
        while self._has_too_many() or (self._stored_events and not self._stored_events[0].holds_data):
            stored = self._stored_events.pop(0)
            self.kept_bytes -= max(stored.size, _EVENT_BYTES_MIN)
            self._data_events -= stored.holds_data
            for candidate in self._candidates:
                candidate.forget(stored)
            delta = stored.delta
            if delta is None:
                assert stored.event is not None
                delta = _read_with_guardrail(None, stored.event)
                delta.size = stored.size
            out.append(Released(delta, stored.event, stored.t_ns))
        return out

    def read_event(self, event: SseEvent) -> Delta:
        """Read an event after the choice."""
        chosen = self.chosen
        delta = _read_unclaimed(event) if chosen is None else chosen.read_event(event)
        # Skip repeatable events: by `is_bare` and `Anthropic._read`, they have no member of a guardrail.
        if not delta.repeatable:
            if event.data is not None and bedrock.GUARDRAIL_ACTION in event.data:
                bedrock.add_guardrail(delta, event.data)
            if not delta.parsed:
                delta = self._revise(event, delta)
            if not delta.parsed and isinstance(self.chosen, structure.InferredReader):
                delta = self.chosen.learn(event, delta)
        if delta.output:
            self._has_read_output = True
        return delta

    def read_body(self, body: bytes) -> Delta:
        """Read a JSON body that is the whole answer."""
        self.open = False
        delta = self._read_whole(body)
        if bedrock.GUARDRAIL_ACTION in body:
            bedrock.add_guardrail(delta, body)
        return delta

    def _store(self, stored: _StoredEvent) -> None:
        """Keep an event until the dialect is chosen."""
        self._stored_events.append(stored)
        if stored.event is not None and stored.holds_data:
            self._unexamined.append(stored.event)
            self._times.append(stored.t_ns)
        self.kept_bytes += max(stored.size, _EVENT_BYTES_MIN)

    def _add_candidates(self, event: SseEvent) -> _Candidate | None:
        """Add the dialects that claim this event, which was stored last, to the candidates. Return the
        candidate whose evidence decides; None if there is none."""
        known = {candidate.position: candidate for candidate in self._candidates}
        claims = self._dialects.claims_of(read_json(event.data or b""), self._path, event.event)
        for position, claim in islice(claims, CANDIDATES_MAX):
            if position in known:
                known[position].claim = max(known[position].claim, claim)
                continue
            if len(self._candidates) == CANDIDATES_MAX:
                weakest = min(self._candidates, key=lambda c: (c.evidence, c.rank))
                if weakest.evidence:
                    break  # The list is full, and each candidate has evidence: keep them all.
                self._candidates.remove(weakest)
            own = self._dialects.is_own(position, claim)
            on_path = self._dialects.is_on_path(position, self._path)
            candidate = _Candidate(self._dialects.entries[position](), position, claim, own, on_path)
            for stored in self._stored_events[:-1]:
                candidate.read(stored, before=True)
            candidate.read(self._stored_events[-1])
            self._candidates.append(candidate)
            owned = candidate.is_own or candidate.is_on_path or not self._dialects.owners(self._path)
            if owned and self._is_decisive(candidate):
                return candidate  # The rest of the loop has only weaker claims, which cannot win.
            if on_path and claim >= _NAMED and candidate.parsed_events:
                break  # The path and a name fit this dialect. Other dialects can still claim the next event.
        return self._find_decisive()

    def _find_decisive(self) -> _Candidate | None:
        """Return the candidate whose evidence decides; None if there is none."""
        decisive = filter(self._is_decisive, self._candidates)
        return max(decisive, key=lambda candidate: candidate.rank, default=None)

    def _is_decisive(self, candidate: _Candidate) -> bool:
        """Return whether a candidate has understood enough events to be chosen."""
        if candidate.is_on_path:
            rivals = (c for c in self._candidates if c.claim >= _NAMED)
            if candidate.claim < _FITS and any(c.strong_events for c in rivals):
                return False  # Only the path fits this dialect, and the events name another dialect.
            named = candidate.claim >= _NAMED and not candidate.unread_events
            # A table can understand an event by common members or by `event: message`, so it needs more
            # events than a class, which understands events by their names.
            is_table = isinstance(candidate.reader, TableReader) and not candidate.is_own
            enough = _EVENTS_ON_PATH if is_table else 1
            return bool(candidate.strong_events) or (named and candidate.parsed_events >= enough)
        if not candidate.output_events or candidate.is_guess:
            return False
        if candidate.is_own and not self._dialects.owners(self._path):
            return True
        is_named = candidate.is_own or candidate.claim >= _NAMED
        return candidate.strong_events >= _OUTPUTS_ON_FOREIGN_PATH and (is_named or candidate.joins)

    def _choose(self, reader: Reader | None, reading: Reading, by: _Candidate | None) -> list[Released]:
        """Choose this reader, and return the stored events. `by`: the candidate that has already read these
        events; None if `reader` must still read them."""
        self.open = False
        self.chosen, self._reading = reader, reading
        if by is not None:
            self._certainty, self.early_ns = by.certainty, by.early_ns
        elif isinstance(reader, structure.InferredReader):
            reader.end_examination()
            reader.knows_all = True
            if self._is_full and reader.knows_output:
                first = reader.first_output
                self.early_ns = self._times[first] if first < self._released_count else None
        deltas = iter(()) if by is None else iter(by.deltas)
        out = []
        for event, delta, size, t_ns in self._stored_events:
            if event is not None:
                delta = _read_with_guardrail(reader, event) if by is None else next(deltas)
                delta.size = size
                self._has_read_output |= delta.output
            assert delta is not None
            out.append(Released(delta, event, t_ns))
        self._stored_events, self._candidates, self.kept_bytes = [], [], 0
        self._inferred, self._unexamined, self._times = None, [], []
        if isinstance(reader, structure.InferredReader):
            reader.knows_all = False
        return out

    def _revise(self, event: SseEvent, delta: Delta) -> Delta:
        """Return the Delta of an event that the chosen dialect did not understand (`delta`).

        If another dialect reads output in the event, it possibly replaces the chosen dialect.
        """
        if not self._revisions_left or event.data is None or not is_object(event.data):
            return delta
        self._revisions_left -= 1
        claims = self._dialects.claims_of(read_json(event.data), self._path, event.event)
        for position, claim in islice(claims, CANDIDATES_MAX):
            reader = self._dialects.entries[position]()
            other = _read_with_guardrail(reader, event)
            if not other.output:
                continue
            self._outputs_of_others += 1
            own = self._dialects.is_own(position, claim)
            on_path = self._dialects.is_on_path(position, self._path)
            certainty = own, on_path, claim >= _NAMED
            is_better = claim >= _NAMED and certainty > self._certainty
            if self._has_read_output and not is_better and self._outputs_of_others < _OUTPUTS_TO_REVISE:
                return delta
            self.chosen, self._reading, self._certainty = reader, Reading.DIALECT, certainty
            self._outputs_of_others = 0
            return other
        return delta

    def _read_whole(self, body: bytes) -> Delta:
        """Read a body that is one JSON value with the dialect that understands it best."""
        value = read_json(body)
        named: tuple[Reader, Delta] | None = None
        for position, claim in islice(self._dialects.claims_of(value, self._path), CANDIDATES_MAX):
            reader = self._dialects.entries[position]()
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
    """Return whether an event has data, and is no keep-alive."""
    return bool(event.data) and event.event != b"ping"


def _is_done_mark(event: SseEvent) -> bool:
    """Return whether the event is `[DONE]`. Several dialects have this end mark, so it is evidence only for
    the dialect to which the path belongs."""
    return event.data is not None and event.data.strip() == b"[DONE]"


def _is_weak_evidence(delta: Delta) -> bool:
    """Return whether the event has usage, a verdict or an error, which other dialects have, too."""
    return delta.counts is not None or delta.verdict is not None or delta.event_class is EventClass.ERROR


def _read_with_guardrail(reader: Reader | None, event: SseEvent) -> Delta:
    """Read an event, and the action of Bedrock's guardrail in it."""
    delta = _read_unclaimed(event) if reader is None else reader.read_event(event)
    if event.data is not None and bedrock.GUARDRAIL_ACTION in event.data:
        bedrock.add_guardrail(delta, event.data)
    return delta


def _read_unclaimed(event: SseEvent) -> Delta:
    """Read an event that no dialect claims: only errors can be found in it."""
    if event.data is None or not is_object(event.data):
        return read_non_object(event)
    return failure_in(read_json(event.data), event.event)
