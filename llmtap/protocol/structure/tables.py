"""Make the table of a dialect from the `Structure` of the events of an unknown stream.

`dialects/table/reader.py` reads answers with this table, and `llmtap inspect --draft` writes it.
"""

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, Literal

from llmtap.errors import ConfigError
from llmtap.protocol.delta import EventClass
from llmtap.protocol.dialects.table.declaration import Counts, DialectTable, EventMark, Rule, Scalar, Texts
from llmtap.protocol.structure import names
from llmtap.protocol.structure.structure import Counter, Kind, Place, Structure
from llmtap.protocol.structure.walk import EACH, Mark, Path

NAME: Final = "inferred"
_CHOICES: Final = frozenset(
    {"choices", "candidates", "generations", "responses", "outputs", "completions", "results"}
)
_SILENT_RULES_MAX: Final = 8
_UNNAMED: Final = (None, "message")
"""Values of the `event:` line of events that have no name."""
_COUNTED: Final = ("input", "output", "reasoning", "cached", "total")


@dataclass(slots=True)
class _Draft:
    """Draft of the rule for events with the same name and marks. Fields are as in `Rule`."""

    members: set[frozenset[str]] = field(default_factory=set, repr=False)
    """Sets of names of members at the top of these events."""
    where: dict[str, Scalar] = field(default_factory=dict)
    """By path: value that an event must have."""
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    """Paths of the text of reasoning."""
    tool_call: list[str] = field(default_factory=list)
    call: list[str] = field(default_factory=list)
    """Paths of the name of a tool call."""
    cumulative: bool = False
    """Whether each text repeats the texts before."""
    choice: str | None = None
    """Path of the index of the choice."""
    usage: list[str] = field(default_factory=list)
    """Paths of the object with the token counts."""
    finish_reason: list[str] = field(default_factory=list)
    """Paths of the finish reason."""
    done: dict[str, Scalar] = field(default_factory=dict)
    """By path: value that an event of the answer's end has."""
    event_class: EventMark | None = None


@dataclass(slots=True)
class _Usage:
    """Paths of the token counts in the answer."""

    counts: dict[str, list[str]]
    """Paths in the usage object, by their meaning: `input`, `output` and so on."""
    holders: list[tuple[Kind, Path]]
    """Kinds of the events that have the usage object, with its path."""


def make_table(
    structure: Structure, *, whole: bool, name: str = NAME, source: str = NAME
) -> DialectTable | None:
    """Return a table for the events in `structure`; None if they have no output.

    Args:
        whole: these are all events of the answer, so the last event is possibly its end mark.
    """
    outputs = structure.outputs()
    if not outputs:
        return None
    plain = any(not place.path and place.kind.event in _UNNAMED for place in outputs)
    naming = _Naming(structure)
    drafts: dict[tuple[str | None, tuple[Mark, ...]], _Draft] = {}

    def draft_of(kind: Kind) -> _Draft:
        key = naming.rule_key(kind)
        draft = drafts.get(key)
        if draft is None:
            draft = drafts[key] = _Draft(where={member_path(path): value for path, value in key[1]})
        draft.members |= kind.members
        return draft

    for place in outputs:
        if place.path or place.kind.event not in _UNNAMED:
            _add_output(draft_of(place.kind), place, structure)
    usage = _usage_of(structure)
    if usage is not None:
        for kind, holder in usage.holders:
            _add_new(draft_of(kind).usage, member_path(holder) or ".")
    for flag in structure.finish_reasons.values():
        _add_new(draft_of(flag.kind).finish_reason, member_path(flag.path))
    if whole:
        _add_ends(structure, draft_of)
    events: dict[EventMark, Texts] = {}
    silent = [kind for kind in structure.kinds.values() if naming.rule_key(kind) not in drafts]
    quiet = sorted(
        {
            name
            for name in map(naming.name, silent)
            if name is not None
            and not names.ERRORS.intersection(names.words(name))
            and not (plain and name in _UNNAMED)
        }
    )
    if quiet:
        events["metadata"] = tuple(quiet)
    rules = (
        *_rules_of(drafts, [] if usage is None else [p for paths in usage.counts.values() for p in paths]),
        *islice(_silent_rules(naming.rule_key(kind)[1] for kind in silent), _SILENT_RULES_MAX),
    )
    try:
        return DialectTable(
            name=name,
            source=source,
            end=_end_of(structure, rules) if whole else "none",
            match=naming.match,
            model=tuple(member_path(path) for path in sorted(structure.models)),
            message=structure.message_id_member,
            plain_text="content" if plain else None,
            events=events,
            rules=rules,
            counts=Counts() if usage is None else Counts(**{k: tuple(v) for k, v in usage.counts.items()}),
        )
    except ConfigError:
        return None  # The table has more names or paths than are allowed.


def member_path(path: Path, marks: Iterable[Mark] = (), but: Iterable[Path] = ()) -> str:
    """Return a path in the notation of dialect tables.

    Args:
        marks: marks of objects on this path; each becomes a condition `[name=value]`.
        but: flags of objects on this path that must not be true; each becomes a condition `[name!=true]`.
    """
    out = ""
    for i, name in enumerate(path):
        if name == EACH:
            out += "[]"
        else:
            out += f".{name}" if out else name
        holder = path[: i + 1]
        conditions = [f"[{m[-1]}={str(v).lower() if v is True else v}]" for m, v in marks if m[:-1] == holder]
        conditions += [f"[{m[-1]}!=true]" for m in but if m[:-1] == holder]
        if conditions:
            out = out.removesuffix("[]") + "".join(conditions)
    return out


class _Naming:
    """Place of the names of the events in a stream: a member of their JSON, or the `event:` line."""

    def __init__(self, structure: Structure) -> None:
        kinds = structure.kinds.values()
        members = Tally(path for kind in kinds for path, value in kind.marks if isinstance(value, str))
        values = {path: {value for kind in kinds for p, value in kind.marks if p == path} for path in members}
        lines = {kind.event for kind in kinds if kind.event is not None}
        best = max(members, key=lambda p: (len(values[p]), members[p], p == ("type",)), default=None)
        if best is not None and len(lines) > len(values[best]):
            best = None
        self._member: Path | None = best
        """Path of the member that names events; None: the `event:` line names them."""
        self.match: str | tuple[str, ...] = "type"
        """`match` of the table: paths of the events' names."""
        if best is not None:
            self.match = member_path(best)
        elif ("type",) in members:
            self.match = ()

    def name(self, kind: Kind) -> str | None:
        for path, value in kind.marks:
            if path == self._member:
                return str(value)
        return kind.event

    def rule_key(self, kind: Kind) -> tuple[str | None, tuple[Mark, ...]]:
        """Return the key of the rule for these events: their name, and their other marks at the top."""
        return self.name(kind), tuple(mark for mark in kind.marks if mark[0] != self._member)


def output_path(place: Place, structure: Structure) -> str:
    """Return the path of a place of output in the notation of dialect tables."""
    inner = [mark for mark in place.marks if len(mark[0]) > 1]
    flags = {
        mark[0]
        for other in structure.places.values()
        if other.path == place.path
        for mark in other.marks
        if mark[1] is True and len(mark[0]) > 1
    }
    return member_path(place.path, inner, flags.difference(path for path, _ in inner))


def _add_output(draft: _Draft, place: Place, structure: Structure) -> None:
    path = output_path(place, structure) or "."
    if place.event_class is EventClass.REASONING:
        _add_new(draft.reasoning, path)
    elif place.event_class is EventClass.TOOL_CALL:
        is_name = bool(place.path) and names.words(place.path[-1]) in names.CALL_NAMES
        _add_new(draft.call if is_name else draft.tool_call, path)
    else:
        _add_new(draft.content, path)
    draft.cumulative |= place.cumulative
    if len(place.texts) > 1 and EACH in place.path:
        lead = place.path[: place.path.index(EACH) + 1]
        if len(lead) > 1 and names.words(lead[-2])[-1:] and names.words(lead[-2])[-1] in _CHOICES:
            draft.choice = member_path((*lead, "index"))


def _usage_of(structure: Structure) -> _Usage | None:
    """Return the object that counts tokens; None if none certainly counts output tokens. It must count some
    of them, and have other counts, a name such as `usage`, or a count with `token` or `eval` in its name."""
    by_holder: dict[Path, list[Counter]] = {}
    for counter in structure.counters.values():
        if counter.meaning == "output":
            by_holder.setdefault(counter.path[:-1], []).append(counter)
    best: tuple[int, Path] | None = None
    for holder, outputs in by_holder.items():
        inside = [c for c in structure.counters.values() if c.path[: len(holder)] == holder]
        if not any(c.values[-1] > 0 for c in outputs) or any(EACH in c.path[len(holder) :] for c in outputs):
            continue
        above = frozenset(word for name in holder for word in names.words(name))
        points = len({c.meaning for c in inside}) + bool(above & {"usage"}) - bool(above & {"billed"})
        own = frozenset(word for c in outputs for word in names.words(c.path[-1]))
        if points >= 2 or own & {"token", "tokens", "eval"}:
            best = max(best, (points, holder)) if best else (points, holder)
    if best is None:
        return None
    holder = best[1]
    counts: dict[str, list[str]] = {}
    for counter in sorted(structure.counters.values(), key=lambda c: len(c.path)):
        if counter.path[: len(holder)] == holder and EACH not in counter.path[len(holder) :]:
            meaning_paths = counts.setdefault(counter.meaning, [])
            _add_new(meaning_paths, member_path(counter.path[len(holder) :]))
    # Other events can have the usage object at another path: for example, the first event of an answer often
    # has the number of input tokens. So use all paths with known counts.
    known = {path for paths in counts.values() for path in paths}
    ends = {holder, *(c.path[:-1] for c in structure.counters.values() if c.path[-1] in known)}
    holders = [
        (c.kind, end)
        for end in sorted(ends, key=lambda path: (path != holder, len(path), path))
        for c in structure.counters.values()
        if c.path[: len(end)] == end and member_path(c.path[len(end) :]) in known
    ]
    return _Usage({k: counts[k] for k in _COUNTED if k in counts}, holders)


def _add_ends(structure: Structure, draft_of: Callable[[Kind], _Draft]) -> None:
    """Add the marks that only the last event has."""
    last = max(structure.kinds.values(), key=lambda kind: kind.indexes[-1])
    for flag in structure.flags.values():
        once = len(flag.indexes) == 1 and flag.indexes[0] == last.indexes[-1]
        if once and EACH not in flag.path:
            draft_of(flag.kind).done[member_path(flag.path)] = True
    if len(last.indexes) == 1 and len(structure.kinds) > 1 and last.words & names.ENDS:
        draft_of(last).event_class = "done"


def _end_of(
    structure: Structure, rules: tuple[Rule, ...]
) -> Literal["done", "[DONE]", "finish_reason", "none"]:
    """Return how the table finds the end of an answer."""
    if structure.end_text == "[DONE]":
        return "[DONE]"
    if any(rule.done or rule.event_class == "done" for rule in rules):
        return "done"
    return "finish_reason" if any(rule.finish_reason for rule in rules) else "none"


def _silent_rules(kinds: Iterable[tuple[Mark, ...]]) -> Iterator[Rule]:
    """Yield rules for events without output whose kind is a number, because `events` has only names."""
    for marks in kinds:
        where = {member_path(path): value for path, value in marks}
        if any(type(value) is int for value in where.values()):
            yield Rule(where=where, event_class="metadata")


def _rules_of(
    drafts: dict[tuple[str | None, tuple[Mark, ...]], _Draft], names_of_counts: list[str]
) -> Iterator[Rule]:
    """Yield the rules, those with more conditions first. Events that are read in the same way have one rule
    with all their names. Events without a name are recognised by the members that are read."""
    merged: dict[str, tuple[list[str], _Draft]] = {}
    unnamed: list[_Draft] = []
    for (name, _), draft in drafts.items():
        if name is None:
            unnamed.append(draft)
        else:
            merged.setdefault(repr(draft), ([], draft))[0].append(name)
    for events, draft in sorted(merged.values(), key=lambda m: -len(m[1].where)):
        yield _rule_of(draft, event=tuple(sorted(events)))
    for draft in sorted(unnamed, key=lambda d: -len(d.where)):
        outputs = [*draft.content, *draft.reasoning, *draft.tool_call, *draft.call]
        known: set[str] = set()
        rest = _Draft(
            where=draft.where, usage=draft.usage, finish_reason=draft.finish_reason, done=draft.done
        )
        others = [path for path in (*rest.usage, *rest.finish_reason, *rest.done) if path != "."]
        others += names_of_counts if "." in rest.usage else []
        for reading, paths in ((draft, outputs), (rest, others)):
            for top in dict.fromkeys(map(_top_member, paths)):
                if any(top in members and known.isdisjoint(members) for members in draft.members):
                    known.add(top)
                    yield _rule_of(reading, has=top)


def _rule_of(draft: _Draft, *, event: tuple[str, ...] = (), has: str = "") -> Rule:
    return Rule(
        event=event,
        has=has or (),
        where=draft.where,
        event_class=draft.event_class,
        done=draft.done,
        content=tuple(draft.content),
        reasoning=tuple(draft.reasoning),
        tool_call=tuple(draft.tool_call),
        call=tuple(draft.call),
        cumulative=draft.cumulative,
        choice=draft.choice,
        usage=tuple(draft.usage),
        finish_reason=tuple(draft.finish_reason),
    )


def _top_member(path: str) -> str:
    """Return the first member of a path; "" if the path begins with a list."""
    return path.partition(".")[0].partition("[")[0]


def _add_new(values: list[str], value: str) -> None:
    if value not in values:
        values.append(value)
