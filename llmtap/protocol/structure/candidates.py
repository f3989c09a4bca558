"""Find values that a drafted table possibly lacks: the model, the finish reason, the usage and the end.

llmtap does not know the names of these values. `draft.py` writes them as comments, from which a user chooses.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from llmtap.protocol.dialects.openai_shapes import read_data
from llmtap.protocol.dialects.table.declaration import OUTPUTS, PAYLOADS, DialectTable, as_texts
from llmtap.protocol.dialects.table.reader import TableDialect
from llmtap.protocol.sse import SseEvent
from llmtap.protocol.structure import names
from llmtap.protocol.structure.structure import Structure
from llmtap.protocol.structure.tables import member_path
from llmtap.protocol.structure.walk import EACH, Path, leaves

_EDGE_EVENTS: Final = 3
"""Number of events at the start, and of events at the end, whose values are candidates."""
_CANDIDATES_MAX: Final = 12
_TEXT_CHARS_MAX: Final = 64
"""Maximum length of a text that can be the name of a model or a finish reason."""


@dataclass(slots=True)
class EdgeEvent:
    """One of the last events of an answer that have JSON, with its values."""

    name: str
    rule_index: int | None
    """Index of the table's rule that reads the event; None if no rule does."""
    holds_output: bool
    """Whether the event has output."""
    texts: dict[Path, str] = field(default_factory=dict)
    """Short texts by their paths. No earlier event has a text at any of these paths."""
    integers: dict[Path, int] = field(default_factory=dict)

    @property
    def condition(self) -> tuple[str, str] | None:
        """Key and value of a condition that fits this event; None if nothing distinguishes the event."""
        if self.name:
            return "event", self.name
        top = next((path[0] for path in (*self.texts, *self.integers) if path[0] != EACH), None)
        return None if top is None else ("has", top)


@dataclass(slots=True)
class Candidates:
    """Values in an answer that its inferred table possibly lacks."""

    models: dict[str, str]
    """Texts that are possibly the name of the model, by their paths."""
    last_events: list[EdgeEvent]
    """The last events of the answer, in their order."""
    last_is_unique: bool
    """Whether the final event differs from all others, so that it is possibly the end mark."""


def find_candidates(table: DialectTable, structure: Structure, events: Sequence[SseEvent]) -> Candidates:
    """Return the values in the events of a whole answer that possibly belong to missing keys of the table."""
    dialect = TableDialect(table)
    outputs = {place.path for place in structure.outputs()}
    last = [*islice(_edge_events(dialect, reversed(events), outputs, structure.kind_member), _EDGE_EVENTS)][
        ::-1
    ]
    _remove_repeated(last, structure)
    alone = bool(last) and _is_unique(dialect, last[-1], events)
    return Candidates(_find_models(dialect, structure, outputs), last, alone)


def _is_unique(dialect: TableDialect, last: EdgeEvent, events: Sequence[SseEvent]) -> bool:
    """Return whether the condition that fits the final event fits no other event."""
    if last.condition is None or (last.rule_index is not None and not last.name):
        return False
    key, wanted = last.condition
    fitting = 0
    for event in events:
        value = None if event.data is None else read_data(event.data)
        if key == "event":
            fitting += dialect.open(value, event.event)[0] == wanted
        else:
            fitting += isinstance(value, dict) and wanted in value
    return fitting == 1


def usage_of(last: Sequence[EdgeEvent]) -> tuple[EdgeEvent, Path, dict[str, int]] | None:
    """Return the object that probably counts tokens, as its event, path and integers: the object with the
    most integers, if possible in an event without output."""
    best: tuple[tuple[bool, int, int], EdgeEvent, Path, dict[str, int]] | None = None
    for number, event in enumerate(last):
        holders: dict[Path, dict[str, int]] = {}
        for path, value in event.integers.items():
            if path[-1] != EACH:
                holders.setdefault(path[:-1], {})[path[-1]] = value
        for holder, integers in holders.items():
            rank = (not event.holds_output, len(integers), number)
            # A single integer in an event with output is probably the event's number, not a count of tokens.
            is_plausible = len(integers) > 1 or not event.holds_output
            if is_plausible and (best is None or rank > best[0]):
                best = rank, event, holder, integers
    return None if best is None else best[1:]


def _edge_events(
    dialect: TableDialect, events: Iterator[SseEvent], outputs: set[Path], kind_member: str | None
) -> Iterator[EdgeEvent]:
    """Yield the texts and integers of each event besides its output: one of them can be the model or a
    count."""
    numbers = {id(rule): number for number, rule in enumerate(dialect.table.rules)}
    for event in events:
        value: Any = None if event.data is None else read_data(event.data)
        if not isinstance(value, dict | list):
            continue
        name, _ = dialect.open(value, event.event)
        compiled, _ = dialect.find_rule(value, event.event)
        rule = None if compiled is None else numbers.get(id(compiled.rule))
        holds_output = rule is not None and any(
            getattr(dialect.table.rules[rule], key) for key in (*OUTPUTS, *PAYLOADS)
        )
        edge = EdgeEvent(name, rule, holds_output)
        for leaf in leaves(value):
            if type(leaf.value) is int and leaf.path != (kind_member,):
                edge.integers.setdefault(leaf.path, leaf.value)
            elif leaf.path not in outputs and _may_be_name(dialect, leaf.path, leaf.value):
                edge.texts.setdefault(leaf.path, leaf.value)
        edge.integers = dict(islice(edge.integers.items(), _CANDIDATES_MAX))
        yield edge


def _may_be_name(dialect: TableDialect, path: Path, value: object) -> bool:
    """Return whether a value is possibly the name of a model or a finish reason, and not that of an event."""
    return (
        isinstance(value, str)
        and 0 < len(value) <= _TEXT_CHARS_MAX
        and bool(path)
        and EACH not in path
        and not names.meaning_of(path[-1]).is_mark
        and member_path(path) not in as_texts(dialect.table.match)
    )


def _remove_repeated(last: Sequence[EdgeEvent], structure: Structure) -> None:
    """Remove the texts at paths at which earlier events have texts, too."""
    counts: Counter[Path] = Counter()
    for place in structure.places.values():
        counts[place.path] += place.text_count
    edge = Counter(path for event in last for path in event.texts)
    for event in last:
        fresh = ((path, text) for path, text in event.texts.items() if counts[path] <= edge[path])
        event.texts = dict(islice(fresh, _CANDIDATES_MAX))


def _find_models(dialect: TableDialect, structure: Structure, outputs: set[Path]) -> dict[str, str]:
    """Return the texts that are constant, or are only in one of the first events, by their paths."""
    texts: dict[Path, set[str]] = {}
    counts: Counter[Path] = Counter()
    first: dict[Path, int] = {}
    for place in structure.places.values():
        if place.path in outputs or not place.texts:
            continue
        texts.setdefault(place.path, set()).update(*place.texts.values())
        counts[place.path] += place.text_count
        first[place.path] = min(place.indexes[0], first.get(place.path, place.indexes[0]))
    found = {
        member_path(path): next(iter(texts[path]))
        for path in sorted(texts, key=lambda path: first[path])
        if len(texts[path]) == 1
        and (counts[path] > 1 or first[path] < _EDGE_EVENTS)
        and _may_be_name(dialect, path, next(iter(texts[path])))
    }
    return dict(islice(found.items(), _CANDIDATES_MAX))


def integers_of(last: Sequence[EdgeEvent]) -> Mapping[str, int]:
    """Return the integers of the last events by their paths."""
    found = {member_path(path): value for event in last for path, value in event.integers.items()}
    return dict(islice(found.items(), _CANDIDATES_MAX))


def texts_of(last: Sequence[EdgeEvent]) -> Mapping[str, str]:
    """Return the short texts that only the last events have, by their paths."""
    found = {member_path(path): value for event in last for path, value in event.texts.items()}
    return dict(islice(found.items(), _CANDIDATES_MAX))
