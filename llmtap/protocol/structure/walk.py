"""Yield the leaves of an event's JSON value, each with its path and the marks of the objects that hold it.

At most `NODES_MAX` values of an event are examined, however deep or wide it is.
"""

import re
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final, NamedTuple

from llmtap.json_types import JsonObject
from llmtap.protocol.speakers import role_of
from llmtap.protocol.structure import names

NODES_MAX: Final = 256
"""Maximum number of values of one event that are examined."""
DEPTH_MAX: Final = 12
ELEMENTS_MAX: Final = 8
"""Maximum number of elements of one array that are examined."""
_MARK: Final = re.compile(r"[A-Za-z][A-Za-z_./:\- ]{0,63}|[A-Za-z][A-Za-z0-9_./:\-]{0,24}")
_KINDS_MAX: Final = 100
"""Integers from 0 to below this limit can name the kind of an event."""
_INDEX_MAX: Final = 1_024
EACH: Final = "[]"
"""Step of a path that stands for every element of an array."""

Path = tuple[str, ...]
Mark = tuple[Path, str | bool | int]
"""Path and value of a member that names the kind of its object."""


class Leaf(NamedTuple):
    """A value in the JSON of an event, with its place."""

    path: Path
    value: Any
    """A text, a number, a boolean or None."""
    marks: tuple[Mark, ...]
    """Marks of all objects that hold the value, the outermost first."""
    choice: int
    """Index of the choice: member `index` of the innermost array element that holds the value, else the
    position of this element; 0 without an array."""
    holder: JsonObject | None
    """The object that has the value as a member."""
    role: str
    """Role in the innermost object that holds the value and names a role; "" without a role."""


def may_name_kind(value: Any) -> bool:
    """Return whether a value is a word or small integer that can name the kind of an event or object."""
    if type(value) is str:
        return _MARK.fullmatch(value) is not None
    return type(value) is int and 0 <= value < _KINDS_MAX


def leaves(value: Any, nodes_max: int = NODES_MAX, kind_member: str | None = None) -> Iterator[Leaf]:
    """Yield the leaves of a JSON value in the order of its members. At most `nodes_max` values are examined.

    Args:
        kind_member: name of the member at the top whose value names the kind of the event.
    """
    stack: list[tuple[Path, Any, tuple[Mark, ...], int, JsonObject | None, str]]
    stack = [((), value, (), 0, None, "")]
    room = nodes_max
    while stack and room:
        room -= 1
        path, value, marks, index, holder, role = stack.pop()
        if type(value) is dict:
            if len(path) >= DEPTH_MAX:
                continue
            role = role_of(value) or role
            members = []
            for name, v in islice(value.items(), room):
                meaning = names.meaning_of(name)
                if not meaning.is_plain:
                    continue
                if meaning.is_mark and type(v) is str and may_name_kind(v):
                    marks = (*marks, ((*path, name), v))
                elif v is True and (meaning.is_reasoning_flag or meaning.is_partial_flag):
                    marks = (*marks, ((*path, name), True))
                elif name == kind_member and not path and may_name_kind(v):
                    marks = (*marks, ((name,), v))
                elif name == "index" and type(v) is int and EACH in path and 0 <= v < _INDEX_MAX:
                    index = v
                members.append((name, v))
            stack += [((*path, name), v, marks, index, value, role) for name, v in reversed(members)]
        elif type(value) is list:
            if len(path) < DEPTH_MAX:
                inside = (*path, EACH)
                if not path and len(value) > 1 and type(value[0]) is int and may_name_kind(value[0]):
                    marks = ((inside, str(value[0])),)
                elements = list(enumerate(value[:ELEMENTS_MAX]))
                stack += [(inside, v, marks, i, None, role) for i, v in reversed(elements)]
        else:
            yield Leaf(path, value, marks, index, holder, role)
