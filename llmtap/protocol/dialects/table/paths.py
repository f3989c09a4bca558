"""Follow the paths of a table in JSON. `Place` is a node in a tree of all paths of a rule, so that one walk
through an event finds the values at all paths."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

from llmtap.protocol.dialects.openai_shapes import INDEX_MAX, PIECES_MAX
from llmtap.protocol.dialects.table.declaration import Each, Step, Texts, as_texts, parse_path
from llmtap.protocol.dialects.table.findings import NO_VALUE, Findings, Get, Visit, equal, store_value
from llmtap.protocol.speakers import has_other_speaker

ELEMENTS_MAX: Final = 8 * PIECES_MAX
"""Maximum number of list elements that are searched in one event. Further lists are not read, and the event
counts as not understood (`Delta.parsed`)."""


class Place:
    """A place in JSON on the paths of a rule, with the places inside it."""

    def __init__(self) -> None:
        self.visits: list[Visit] = []
        """Functions that use a value in this place."""
        self.members: dict[str, Place] = {}
        """By name of a member: place inside it."""
        self.elements: dict[str, tuple[Each, Place]] = {}
        """By text of a step `[...]`: the step, and the place inside each element that fits."""
        self.choice: Get | None = None
        """Function that returns the index of a choice from its value; None if no choice is in this place."""

    def place_at(self, steps: Sequence[Step]) -> "Place":
        """Return the place at the end of a path that begins here. Create it if it does not exist."""
        place = self
        for step in steps:
            if isinstance(step, str):
                place = place.members.setdefault(step, Place())
            else:  # The key is `repr(step)`, because steps with the values 1 and True are equal in Python.
                place = place.elements.setdefault(repr(step), (step, Place()))[1]
        return place

    def compile(self) -> Visit:
        """Return a function that uses a value in this place, and the values inside it."""
        visits = list(self.visits)
        if self.members:
            visits.append(_visit_members({name: place.compile() for name, place in self.members.items()}))
        if self.elements:
            visits.append(_visit_elements(self.elements.values()))
        if len(visits) == 1:
            return visits[0]

        def visit(value: Any, findings: Findings, index: int) -> None:
            for each in visits:
                each(value, findings, index)

        return visit


def _visit_members(members: dict[str, Visit]) -> Visit:
    """Return a function that passes each member of an object to the function for its name."""

    def visit(value: Any, findings: Findings, index: int) -> None:
        if type(value) is dict and not has_other_speaker(value):
            for name, member in value.items():
                if name in members and member is not None:
                    members[name](member, findings, index)

    return visit


def _visit_elements(elements: Iterable[tuple[Each, Place]]) -> Visit:
    """Return a function that reads the elements of a list whose conditions hold."""
    tests = [(each.key, each.value, each.equal, place.choice, place.compile()) for each, place in elements]

    def visit(value: Any, findings: Findings, index: int) -> None:
        values = value if type(value) is list else (value,)
        findings.elements += len(values)
        if findings.elements > ELEMENTS_MAX:
            findings.cut = True
            return
        for position, element in enumerate(values):
            for key, wanted, same, choice, visit_element in tests:
                if key is None or (type(element) is dict and equal(element.get(key), wanted) is same):
                    at = index if choice is None else index_of(choice(element), position)
                    visit_element(element, findings, at)

    return visit


def index_of(value: Any, default: int) -> int:
    """Return a value as the index of a choice; the default if the value is no valid index."""
    return value if type(value) is int and 0 <= value < INDEX_MAX else default


def follow(steps: Sequence[Step]) -> Get:
    """Return a function that returns the first value to which a path leads; None if there is no value."""
    names = [step for step in steps if isinstance(step, str)]
    if len(names) == len(steps) == 1:
        (only,) = names
        return lambda value: value.get(only) if type(value) is dict else None
    if len(names) == len(steps):

        def get(value: Any) -> Any:
            for name in names:
                if type(value) is not dict:
                    return None
                value = value.get(name)
            return value

        return get
    tree = Place()
    tree.place_at(steps).visits.append(partial(store_value, "", 0))
    visit = tree.compile()

    def search(value: Any) -> Any:
        visit(value, findings := Findings(), 0)
        return findings.values.get("", NO_VALUE)[1]

    return search


def follow_first(paths: Texts | None) -> Get | None:
    """Return a function that returns the first value at these paths that is not null; None without paths."""
    gets = [follow(parse_path(path)) for path in as_texts(paths)]
    if len(gets) < 2:
        return gets[0] if gets else None

    def search(value: Any) -> Any:
        for get in gets:
            if (result := get(value)) is not None:
                return result
        return None

    return search
