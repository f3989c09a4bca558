"""Find in the events of an unknown stream: places that hold output, counts of tokens, and marks of the end.

`Structure.add` takes the first events of an answer. Texts of one place (same path, event name and marks on
the path) are compared with each other. They are output if they are pieces of one text, or if each repeats the
text so far. Constants, identifiers, notices, log lines and repeated texts are no output. Each sign, and also
each usual name, gives points to a place. So no single sign decides, and a place with too few points holds no
output. `tables.py` makes a table of the result.
"""

from collections.abc import Sequence, Sized
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any, Final

from llmtap.protocol.delta import EventClass, ReadingLimit
from llmtap.protocol.dialects.openai_shapes import NOT_ENDED, read_count, read_data, read_json
from llmtap.protocol.speakers import MODEL_ROLES, SPEAKERS, MessageSpeakers, is_other_role, role_of
from llmtap.protocol.sse import SseEvent
from llmtap.protocol.structure import names
from llmtap.protocol.structure.texts import compare_texts
from llmtap.protocol.structure.walk import EACH, NODES_MAX, Leaf, Mark, Path, leaves, may_name_kind
from llmtap.protocol.verdicts import finish_reason_verdict

PLACES_MAX: Final = 256
"""Maximum number of places, of counts, and of kinds of events that are compared. Further ones are ignored."""
TEXTS_MAX: Final = 32
"""Maximum number of texts of one place that are compared."""
TEXT_CHARS_MAX: Final = 4_096
"""Maximum length of a text that is compared; the rest of a longer one is ignored."""
VALUES_MAX: Final = 8_192
"""Maximum number of JSON values of one answer that are examined, which takes at most 50 ms."""
ENOUGH: Final = 4
"""Minimum number of points of a place that is accepted as output."""
_SURE_CHARS: Final = 8
"""Minimum length of a text that is certainly not repeated by chance."""
_FIRST_EVENTS: Final = 16
_TEXTS_TO_JUDGE: Final = 4
"""Number of texts that show whether they are pieces; fewer can join by chance."""
_JUDGED_AGAIN: Final = frozenset({_TEXTS_TO_JUDGE, 8, 16, TEXTS_MAX})
"""Numbers of texts of a place at which it is judged again."""
_MESSAGE_IDS: Final = ("message_id", "messageId", "item_id", "itemId", "id")
_MEMBERS_MAX: Final = 16
_HOLDER_MAX: Final = 32
_REASON_CHARS_MAX: Final = 40


@dataclass(slots=True)
class Kind:
    """Events with the same name and the same marks at the top level of their JSON."""

    event: str | None
    """Value of the `event:` line; None without one."""
    marks: tuple[Mark, ...]
    """Paths and values of the words at the top level that tell kinds of events apart."""
    indexes: list[int] = field(default_factory=list)
    """Indexes of these events in the answer."""
    members: set[frozenset[str]] = field(default_factory=set)
    """Sets of names of members at the top of these events; {""} for an event that is no object."""
    paths: set[Path] = field(default_factory=set)
    """Paths of values in these events."""

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """Name of the event and values of its marks, each split into words."""
        values = (self.event or "", *(value for _, value in self.marks if isinstance(value, str)))
        return tuple(map(names.words, values))

    @property
    def words(self) -> frozenset[str]:
        """All words in the names of the kind."""
        return frozenset(word for name in self.names for word in name)

    @property
    def holds_stored_text(self) -> bool:
        """Whether the events have members of a row of a database, or of a document."""
        members = {name for path in self.paths for name in path}
        return any(not names.STORED.isdisjoint(names.words(name)) for name in members)


@dataclass(slots=True)
class Place:
    """One path in events of one kind, and the texts at this path."""

    kind: Kind
    marks: tuple[Mark, ...]
    """Marks of all objects on the path, including the object at the top."""
    path: Path
    texts: dict[int, list[str]] = field(default_factory=dict)
    """Texts at this path, by the index of their choice."""
    indexes: list[int] = field(default_factory=list)
    """Indexes of the events with a text at this path; at most TEXTS_MAX for each choice."""
    text_count: int = 0
    """Number of texts at this path, also of those that are not stored in `texts`."""
    neighbours: frozenset[str] = frozenset()
    """Names of the other members of the objects that hold the texts."""
    roles: frozenset[str] = frozenset()
    """Roles of the speakers of the texts."""
    other_speaker_indexes: set[int] = field(default_factory=set)
    """Indexes of the events in which the text at this path has another speaker than the model."""
    holds_output: bool | None = None
    """Whether the texts are output of the model; None while this is not decided."""
    judged: tuple[int, bool, bool] = (0, False, False)
    """Basis of the latest judgement: number of the place's texts, and signs of a model in the stream."""
    points: int = 0
    """Sum of the signs that the place holds output."""
    event_class: EventClass = EventClass.CONTENT
    cumulative: bool = False
    """Whether each text repeats the texts before."""
    point_reasons: list[str] = field(default_factory=list)
    """Signs for and against output, with their points, for `inspect`."""


@dataclass(slots=True)
class Counter:
    """One path at which events of one kind have a number of tokens."""

    kind: Kind
    path: Path
    meaning: str
    """Kind of tokens: `input`, `output`, `reasoning`, `cached` or `total`."""
    values: list[int] = field(default_factory=list)
    """Numbers at the path, in order of the events."""


@dataclass(slots=True)
class Flag:
    """One path at which events of one kind have a sign of the end: `true`, or a finish reason."""

    kind: Kind
    path: Path
    indexes: list[int] = field(default_factory=list)
    """Indexes of the events that have the sign."""


class Structure:
    """Places, counts and marks that were found in some events of an answer. Memory: PLACES_MAX places of
    TEXTS_MAX texts.

    Args:
        events: the first events of the answer, which show which member names their kinds. They are not added.
        values_max: maximum number of JSON values that are examined.
        of_model: the events are known to be the answer of a model.
    """

    def __init__(
        self, events: Sequence[SseEvent] = (), values_max: int = VALUES_MAX, *, of_model: bool = False
    ) -> None:
        self._of_model = of_model
        self.kind_member = _find_kind_member(events[:_FIRST_EVENTS])
        """Name of the member at the top whose value names the kind of an event; None if unknown."""
        self.values_left = values_max
        """Number of values that can still be read; the limit bounds the CPU time."""
        self._has_reached_limit = False
        """Whether further places were ignored because of a limit."""
        self.kinds: dict[tuple[Any, ...], Kind] = {}
        """Kinds of events, by name and marks."""
        self.places: dict[tuple[Any, ...], Place] = {}
        self.counters: dict[tuple[Any, ...], Counter] = {}
        """Places with a number of tokens."""
        self.flags: dict[tuple[Any, ...], Flag] = {}
        """Places with a sign of the end."""
        self.finish_reasons: dict[tuple[Any, ...], Flag] = {}
        self.filter_ends: set[int] = set()
        """Indexes of the events in which a filter ended the answer: their text possibly replaces it."""
        self.models: set[Path] = set()
        """Paths of members that name a model."""
        self.event_count = 0
        self.waits = False
        """Whether a new place is judged only when it has enough texts."""
        self.judges_once = False
        """Whether no place is judged again when it has more texts."""
        self.message_id_member: str | None = None
        """Member with a message's id, if only the first event of a message names its speaker; else None."""
        self._messages = MessageSpeakers()
        self._new_forms = 0
        """Number of kinds, places, counts and flags in the current event that no earlier event had."""
        self.end_text: str | None = None
        """Data of the latest event if it is a known end mark, such as `[DONE]`; else None."""

    def add(self, event: SseEvent) -> bool:
        """Add the next event. Return whether it has a new kind, place, count or flag, or enough new texts to
        judge a place again."""
        if event.data is None or not self.values_left:
            return False
        self._new_forms = 0
        self.values_left -= 1
        value = read_data(event.data)
        number = self.event_count
        self.event_count += 1
        is_end = isinstance(value, str) and value.strip().lower() in names.END_TEXTS
        self.end_text = str(value).strip() if is_end else None
        if is_end:
            return False
        has_other_speaker = self._has_other_speaker(value) or _is_request(value)
        kind: Kind | None = None
        for leaf in leaves(value, min(NODES_MAX, self.values_left), self.kind_member):
            self.values_left -= 1
            if kind is None:
                kind = self._find_kind(event, value, leaf.marks, number)
                if kind is None:
                    return False
            if len(kind.paths) < PLACES_MAX:
                kind.paths.add(leaf.path)
            if isinstance(leaf.value, str):
                if not has_other_speaker:
                    self._add_text(leaf, kind, number)
            elif type(leaf.value) in (int, float):
                if not any(map(names.is_of_user, kind.names)):
                    self._add_number(leaf, kind)
            elif leaf.value is True and leaf.path and names.meaning_of(leaf.path[-1]).is_end_flag:
                self._add_flag(self.flags, leaf, kind, number)
        return self._new_forms > 0

    @property
    def limits(self) -> tuple[ReadingLimit, ...]:
        """Limits that were reached, so that further values or places were ignored."""
        values = () if self.values_left else (ReadingLimit.STRUCTURE_VALUES,)
        return values + ((ReadingLimit.STRUCTURE_PLACES,) if self._has_reached_limit else ())

    def first_unjudged(self) -> int:
        """Return the index of the first event with a text whose place was never judged; without such a text,
        the number of events."""
        waiting = (place.indexes[0] for place in self.places.values() if place.texts and not place.judged[0])
        return min(waiting, default=self.event_count)

    def outputs(self) -> list[Place]:
        """Return the places that hold output, the most certain first.

        While no place holds output, places are judged again when they have more texts. Afterwards, each place
        is judged only once (`judges_once`), because a later change would move the time of the first token.
        """
        counted = any(counter.values[-1] > 0 for counter in self.counters.values())
        has_model = self._of_model or counted or bool(self.finish_reasons or self.models)
        paths = {place.path for place in self.places.values() if place.holds_output}
        holders = {path[:-1] for path in paths}
        for place in self.places.values():
            judged_by = place.text_count, counted, has_model
            if self.waits and not place.judged[0] and place.text_count < _TEXTS_TO_JUDGE:
                continue
            if place.texts and place.holds_output is None and place.judged != judged_by:
                place.judged = judged_by
                beside_output = place.path[:-1] in holders
                _judge_place(
                    place,
                    counted=counted,
                    has_model=has_model,
                    beside_output=beside_output,
                    on_path=place.path in paths,
                )
                if place.points >= ENOUGH and not self.filter_ends.issuperset(place.indexes):
                    place.holds_output = True
        self._mark_flagged_places()
        out: list[Place] = []
        for place in sorted((p for p in self.places.values() if p.holds_output), key=lambda p: -p.points):
            place.holds_output = not _repeats_accepted(place, out)
            if place.holds_output:
                out.append(place)
        self.judges_once |= bool(out)
        if self.judges_once:
            for place in self.places.values():
                if place.texts and place.holds_output is None:
                    place.holds_output = False
        return out

    def _mark_flagged_places(self) -> None:
        """Set that a place with a flag (such as `thought`) holds output if the same place without the flag
        does, because one rule reads both places."""
        plain = {(p.kind.event, p.marks, p.path) for p in self.places.values() if p.holds_output}
        for place in self.places.values():
            marks = tuple(mark for mark in place.marks if mark[1] is not True)
            if marks != place.marks and (place.kind.event, marks, place.path) in plain:
                place.holds_output = True

    def _is_full(self, entries: Sized) -> bool:
        """Return whether no more of these entries can be stored, and record that this limit was reached."""
        full = len(entries) >= PLACES_MAX
        self._has_reached_limit |= full
        return full

    def _find_kind(self, event: SseEvent, value: Any, marks: tuple[Mark, ...], number: int) -> Kind | None:
        """Return the kind of an event: its name and its marks; None: there are too many kinds."""
        name = None if event.event is None else event.event.decode("latin-1")[: names.NAME_CHARS_MAX]
        top = tuple(mark for mark in marks if len(mark[0]) == 1)
        kind = self.kinds.get((name, top))
        if kind is None:
            if self._is_full(self.kinds):
                return None
            kind = self.kinds[name, top] = Kind(name, top)
            self._new_forms += 1
        if len(kind.indexes) < PLACES_MAX:
            kind.indexes.append(number)
        if len(kind.members) < _MEMBERS_MAX:
            kind.members.add(frozenset(islice(value, _HOLDER_MAX) if isinstance(value, dict) else ("",)))
        return kind

    def _add_text(self, leaf: Leaf, kind: Kind, number: int) -> None:
        """Note a text where it was found. `number`: index of the event."""
        own = names.meaning_of(leaf.path[-1] if leaf.path else "")
        if own.is_reason:
            if 0 < len(leaf.value) <= _REASON_CHARS_MAX and leaf.value.lower() not in NOT_ENDED:
                self._add_flag(self.finish_reasons, leaf, kind, number)
                if finish_reason_verdict(leaf.value) is not None:
                    self.filter_ends.add(number)
            return
        if own.is_model and leaf.value and EACH not in leaf.path and len(self.models) < 4:
            self.models.add(leaf.path)
        key = (kind.event, leaf.marks, leaf.path)
        place = self.places.get(key)
        if place is None:
            if self._is_full(self.places):
                return
            place = self.places[key] = Place(kind, leaf.marks, leaf.path)
        if is_other_role(leaf.role):
            if len(place.other_speaker_indexes) < TEXTS_MAX:
                place.other_speaker_indexes.add(number)
            return
        if leaf.role:
            place.roles |= {leaf.role}
        if leaf.holder is not None and len(place.neighbours) < min(len(leaf.holder), _HOLDER_MAX):
            place.neighbours |= {names.meaning_of(name).phrase for name in islice(leaf.holder, _HOLDER_MAX)}
        if leaf.value:
            place.text_count += 1
            self._new_forms += not place.texts
            texts = place.texts.setdefault(leaf.choice, [])
            if len(texts) < TEXTS_MAX:
                texts.append(leaf.value[:TEXT_CHARS_MAX])
                place.indexes.append(number)
                self._new_forms += place.holds_output is None and len(texts) in _JUDGED_AGAIN

    def _has_other_speaker(self, value: Any) -> bool:
        """Return whether an event belongs to a message of another speaker than the model. An event that names
        the speaker and has no text begins such a message."""
        if type(value) is not dict:
            return False
        role, member = role_of(value), self.message_id_member
        if member is None:
            member = next((name for name in _MESSAGE_IDS if type(value.get(name)) is str), None)
            if member is None or not is_other_role(role) or any(map(_may_hold_text, value)):
                return False
            self.message_id_member = member
            self._new_forms += 1
        return self._messages.has_other_speaker(value.get(member), role)

    def _add_number(self, leaf: Leaf, kind: Kind) -> None:
        meaning = names.count_of(leaf.path)
        value = read_count(leaf.value)
        if meaning is None or value is None:
            return
        key = (kind.event, kind.marks, leaf.path)
        counter = self.counters.get(key)
        if counter is None:
            if self._is_full(self.counters):
                return
            counter = self.counters[key] = Counter(kind, leaf.path, meaning)
        self._new_forms += value > 0 and not (counter.values and counter.values[-1] > 0)
        if len(counter.values) == TEXTS_MAX:
            counter.values.pop()
        counter.values.append(value)

    def _add_flag(self, flags: dict[tuple[Any, ...], Flag], leaf: Leaf, kind: Kind, number: int) -> None:
        """Note that a value was found in an event, such as a finish reason."""
        key = (kind.event, kind.marks, leaf.path)
        flag = flags.get(key)
        if flag is None:
            if self._is_full(flags):
                return
            flag = flags[key] = Flag(kind, leaf.path)
            self._new_forms += 1
        if len(flag.indexes) < TEXTS_MAX:
            flag.indexes.append(number)


def _find_kind_member(events: Sequence[SseEvent]) -> str | None:
    """Return the member at the top whose values (small integers or words) name the kinds of these events, or
    None. Successive events often have the same kind, but other members seldom have equal values."""
    found: dict[str, list[int | str]] = {}
    objects = 0
    for event in events:
        value = None if event.data is None else read_json(event.data)
        if type(value) is dict:
            objects += 1
            for name, kind in islice(value.items(), _HOLDER_MAX):
                if may_name_kind(kind):
                    found.setdefault(name, []).append(kind)
    for name, values in found.items():
        same = sum(a == b for a, b in pairwise(values))
        meaning = names.meaning_of(name)
        most = max(map(values.count, values))
        is_text = type(values[0]) is str  # `leaves` has already found marks that are texts.
        may_be = meaning.is_plain and not meaning.is_mark if is_text else meaning.is_mark or len(name) == 1
        # Accept a single value if it means thoughts: they can fill all first events before the answer.
        is_thought = not names.REASONING.isdisjoint(names.words(str(values[0])))
        limit = objects + (is_thought and names.NEVER.isdisjoint(meaning.words))
        if len(values) == objects and may_be and 2 * same >= objects and objects // 2 < most < limit:
            return name
    return None


def _is_request(value: Any) -> bool:
    """Return whether an event is a request of JSON-RPC to the client, which must answer it."""
    return type(value) is dict and "params" in value and "id" in value and "method" in value


def _may_hold_text(name: str) -> bool:
    phrase = names.meaning_of(name).phrase
    return phrase in names.STRONG or phrase in names.USUAL


def _judge_place(place: Place, *, counted: bool, has_model: bool, beside_output: bool, on_path: bool) -> None:
    """Judge a place that has texts: set its points with their reasons, its class, and whether its texts are
    cumulative. `counted`: the events count tokens. `has_model`: they count tokens, or name a
    finish reason or a model.
    `beside_output`: another member of the same object holds
    output. `on_path`: events of another kind hold output at the same path."""
    own = names.words(place.path[-1]) if place.path and place.path[-1] != EACH else ()
    above = [names.words(name) for name in place.path[:-1] if name != EACH]
    if ("method",) in place.kind.paths and place.path[0] == "params":
        del above[:1]  # In a notification of JSON-RPC, the event is in `params`.
    if place.path and place.path[-1] == EACH and above:
        own = above.pop()
    marks = [
        names.words(name)
        for name in (place.kind.event or "", *(v for _, v in place.marks if isinstance(v, str)))
    ]
    own_name, own_words = " ".join(own), frozenset(own)
    above_words = frozenset(word for name in above for word in name)
    kinds = frozenset(word for name in marks for word in name)
    flags = [path[-1] for path, value in place.marks if value is True]
    is_thought = any(names.meaning_of(name).is_reasoning_flag for name in flags)
    place.event_class = _class_of([own, *above, *marks], flagged=is_thought)
    place.points, place.cumulative = 0, False
    place.point_reasons.clear()
    points = 0

    def add(n: int, reason: str) -> None:
        nonlocal points
        points += n
        place.point_reasons.append(f"{n:+d} {reason}")

    if not place.other_speaker_indexes.isdisjoint(place.indexes):
        return  # Messages of several speakers: the events repeat the conversation, which is no output.
    outer = (*above, *marks)
    if ("input",) in marks or any(map(_is_result, outer)) or any(map(names.is_of_user, (own, *outer))):
        return
    is_call = place.event_class is EventClass.TOOL_CALL
    called = bool((above_words | kinds | own_words) & names.CALLING) or "arguments" in place.neighbours
    if is_call and own in names.CALL_NAMES:
        if called and not (kinds & names.ENDS or place.neighbours & names.DEFINITION):
            place.points = ENOUGH
            place.point_reasons.append("name of a call")
        return
    sequel = compare_texts(max(place.texts.values(), key=len))
    if sequel.are_no_text or sequel.are_constant:
        return
    if is_call and own_name in names.ARGUMENTS:
        add(3 + called, "arguments of a call")
    elif own_name in names.STRONG:
        add(3, "name of generated text")
    elif own_name in names.USUAL:
        add(2, "usual name of generated text")
    elif own_words & names.NEVER:
        return
    elif own_name in names.POSSIBLE:
        add(1, "possible name of generated text")
    elif not own:
        add(1, "the event is a text")
    is_short = len(next(iter(place.texts.values()))[0].split()) < 3
    on_path = on_path and is_short and not kinds & names.KIND_NEVER
    named = points >= 2 or on_path
    if not (named or sequel.are_cumulative or sequel.are_pieces or sequel.joining_pairs):
        return
    if above_words & names.ABOVE_NEVER and not (own_name == "transcript" and "delta" in above_words):
        return
    if above_words & names.ABOVE_STRONG:
        add(2, "names above it")
    elif above_words & names.ABOVE_USUAL:
        add(1, "names above it")
    if above_words & names.ABOVE_DOUBTFUL:
        add(-1, "names above it")
    if kinds & names.KIND_STRONG:
        add(2, "name of the event")
    elif kinds & names.KIND_USUAL:
        add(1, "name of the event")
    if kinds & names.KIND_NEVER:
        add(-5, "name of the event")
    is_of_model = bool(place.roles & MODEL_ROLES)
    if is_of_model:
        add(1, "role of the model")
    if counted and named:
        add(1, "tokens are counted")
    if on_path:
        add(3, "output of another kind in its place")
    elif beside_output and named:
        add(1, "output beside it")
    if sequel.are_cumulative:
        place.cumulative = True
        # A text that a person writes grows, too: the rest of the stream must show a model.
        add(4 if has_model or is_of_model else 1, "the text so far")
    elif sequel.are_pieces and not sequel.are_lines:
        add(3, "pieces of one text")
        if sequel.joining_pairs >= 5:
            add(1, "many of them")
    elif sequel.joining_pairs and not sequel.are_separate:
        add(1, "texts that join")
    if sequel.are_separate:
        add(-4, "texts apart from each other")
    if sequel.are_lines:
        add(-2, "whole lines")
    if (sequel.are_cumulative or not named) and place.kind.holds_stored_text:
        add(-3, "members of a row or document")
    if place.neighbours & names.BESIDE_NEVER - frozenset(SPEAKERS if is_of_model else ()):
        add(-3, "members beside it")
    is_span = place.neighbours >= names.SPAN
    if is_span or place.neighbours & names.ANNOTATIONS:
        add(-4, "annotations of a known text")
    if not is_span and (
        place.neighbours & names.END_FLAGS
        or any(names.REASON_WORDS.intersection(b.split()) for b in place.neighbours)
    ):
        add(1, "an end mark beside it")
    place.points = points


def _is_result(name: tuple[str, ...]) -> bool:
    """Return whether a name means the result of a tool."""
    calls = [word in names.CALL for word in name]
    return True in calls and not names.CALL_RESULT.isdisjoint(name[calls.index(True) :])


def _class_of(name_words: list[tuple[str, ...]], *, flagged: bool) -> EventClass:
    """Return the class of a text by the names around it. `flagged`: a mark shows thinking."""
    words = frozenset(word for name in name_words for word in name)
    if flagged or words & names.REASONING:
        return EventClass.REASONING
    if words & names.CALL or ("partial", "json") in name_words:
        return EventClass.TOOL_CALL
    return EventClass.CONTENT


def _repeats_accepted(place: Place, accepted: Sequence[Place]) -> bool:
    """Return whether the texts of a place repeat those of a place with more points."""
    for other in accepted:
        if other.indexes == place.indexes and other.texts == place.texts:
            return True
        if other.indexes and place.indexes and min(place.indexes) > max(other.indexes):
            texts = next(iter(other.texts.values()))
            so_far = (texts[-1] if other.cumulative else "".join(texts)).strip()
            known = {text.strip() for texts in place.texts.values() for text in texts}
            if known == {so_far}:
                return True
            if len(so_far) >= _SURE_CHARS and any(text.startswith(so_far) for text in known):
                return True
    return False
