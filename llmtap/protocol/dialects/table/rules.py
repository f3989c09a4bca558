"""Compile the rules of a table. A `CompiledRule` tests whether it fits an event, and collects its values."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

from llmtap.protocol.delta import EventClass
from llmtap.protocol.dialects.table import findings
from llmtap.protocol.dialects.table.declaration import (
    OUTPUTS,
    PAYLOADS,
    DialectTable,
    Each,
    Rule,
    Step,
    as_texts,
    count_paths,
    parse_path,
    rule_paths,
    timed_paths,
)
from llmtap.protocol.dialects.table.findings import Visit
from llmtap.protocol.dialects.table.paths import Place, follow, follow_first

OF_CHOICE: Final = ("finish_reason", "tokens", "logprobs", "running_tokens")
"""Keys of a rule that have a value for each choice. Other keys have one value for the whole event."""
_CALLS: Final = frozenset(("call", "tool_call"))


class CompiledRule:
    """A rule of a table in the form in which events are read."""

    def __init__(self, rule: Rule, table: DialectTable) -> None:
        self.rule = rule
        conditions = {**dict.fromkeys(as_texts(rule.has)), **rule.where}
        self.conditions = tuple((follow(parse_path(path)), wanted) for path, wanted in conditions.items())
        """For each condition: a function that gets a value, and the value wanted (None: any value)."""
        self.names = as_texts(rule.event)
        """Names of events that the rule fits; empty: all."""
        self.reads_error = bool(rule.error)
        """Whether the rule reads errors, so that it also fits events with an error."""
        self.reads_data = bool(self.names) and any("." in as_texts(getattr(rule, key)) for key in OUTPUTS)
        """Whether the whole data of the event, which then is no object, is output."""
        self.has_conditions = bool(rule.event or rule.has or rule.where)
        """Whether the rule fits only some events."""
        self.end_count = len(rule.done)
        """Number of values that an event must have to end the stream; 0 if it cannot end it."""
        self.times = tuple(timed_paths(rule))
        """Paths of durations, with their names and units."""
        self.role = follow_first(rule.role) if rule.role else None
        """Returns the speaker; None: the rule has no path of it."""
        outputs = {key for key in (*OUTPUTS, *PAYLOADS) if getattr(rule, key)}
        self.mark = None if rule.event_class is None else EventClass[rule.event_class.upper()]
        """Class of the event in addition to the classes of its output; None if there is none."""
        if self.mark is None and outputs and outputs <= _CALLS and not rule.role:
            # Set the class here: the first piece of a call is often empty, so no output shows the class.
            self.mark = EventClass.TOOL_CALL
        self.signal = next(
            (path.rpartition(".")[2] for path in as_texts(rule.finish_reason)), "finish_reason"
        )
        """Name of the field that holds the finish reason."""
        places = Place()
        for steps, use in _path_visits(rule, table):
            places.place_at(steps).visits.append(use)
        choice = parse_path(rule.choice) if rule.choice is not None else ()
        lead = next((i for i in range(len(choice), 0, -1) if isinstance(choice[i - 1], Each)), 0)
        self.choice_index = follow(choice) if choice and not lead else None
        """Returns the index of the choice; None: the rule has no path of it."""
        if lead:
            places.place_at(choice[:lead]).choice = follow(choice[lead:])
        self.visit = places.compile()
        """Function that collects the values of an event into `Findings`."""
        self.repeats = rule.repeats
        """Whether the rule's output repeats that of other rules."""
        self.usage_member = _usage_member(rule, table)
        """Top-level member with the usage; None: it is elsewhere."""
        self.has_evidence = bool(outputs or rule.usage or rule.done or rule.verdicts or rule.finish_reason)
        """Whether the rule reads output, usage, a verdict or the end, which is evidence for the dialect."""
        self.has_meaning = self.has_evidence or self.mark not in (EventClass.METADATA, EventClass.KEEPALIVE)
        """Whether the rule reads more than events that have no meaning, such as keep-alives."""
        self.repeatable = self.mark in (None, EventClass.METADATA, EventClass.TOOL_CALL) and not (
            rule.cumulative or rule.repeats
        )
        """Whether an event with one text can be repeatable, because only this text decides its meaning."""

    def fits(self, root: Any) -> bool:
        for get, wanted in self.conditions:
            value = get(root)
            if value is None if wanted is None else not findings.equal(value, wanted):
                return False
        return True


def _path_visits(rule: Rule, table: DialectTable) -> Iterator[tuple[Sequence[Step], Visit]]:
    """Yield each path of a rule with the function that uses the values at this path."""
    uses: dict[str, Visit] = {
        **{key: partial(findings.add_text, kind, rule.cumulative) for key, kind in OUTPUTS.items()},
        **{key: partial(findings.add_payload, kind) for key, kind in PAYLOADS.items()},
    }
    for key, use in uses.items():
        yield from ((parse_path(path), use) for path in as_texts(getattr(rule, key)))
    for path, wanted in rule.done.items():
        yield parse_path(path), partial(findings.count_end, wanted)
    for verdict in rule.verdicts:
        yield parse_path(verdict.path), partial(findings.add_verdict, verdict, follow_first(verdict.category))
    for key in OF_CHOICE:
        for rank, path in enumerate(as_texts(getattr(rule, key))):
            yield parse_path(path), partial(findings.store_choice_value, key, rank)
    usage = as_texts(rule.usage)
    singles = {
        "model": as_texts(table.model),
        "role": as_texts(rule.role),
        "error": as_texts(rule.error),
        "usage": [path for path in usage if path != "."],
        "count": count_paths(table) if "." in usage else (),
        **{f"times.{name}": [path] for name, path, _ in timed_paths(rule)},
    }
    for key, paths in singles.items():
        for rank, path in enumerate(paths):
            yield parse_path(path), partial(findings.store_value, key, rank)


def _usage_member(rule: Rule, table: DialectTable) -> str | None:
    """Return the member at the top in which the rule reads only the usage; None if there is none."""
    paths = [(key, parse_path(path)) for key, path in rule_paths(rule)]
    paths += (("", parse_path(path)) for path in (*as_texts(table.model), *as_texts(table.match)))
    usage = [steps for key, steps in paths if key == "usage"]
    others = [steps[:1] for key, steps in paths if key != "usage"]
    alone = len(usage) == 1 and len(usage[0]) == 1 and usage[0] not in others
    return usage[0][0] if alone and isinstance(usage[0][0], str) else None
