"""Compare an event with an earlier one. Most events of a stream differ only in text and usage, so that their
text can be read without the paths of the table."""

from collections.abc import Callable
from operator import itemgetter
from typing import Any, Final

import msgspec

from llmtap.json_types import JsonObject
from llmtap.protocol.delta import Delta, EventClass
from llmtap.protocol.dialects.table.declaration import STEPS_MAX
from llmtap.protocol.sse import SseEvent

SAMPLE_BYTES_MAX: Final = 4_096
_NUMBERS: Final = frozenset((int, float, bool))


class Sample(msgspec.Struct, gc=False):
    """An event with one text, and at most usage beside it."""

    event_name: bytes | None
    holder: tuple[Any, ...]
    """Keys and positions that lead to the object that holds the text."""
    key: Any
    """Key of the text in this object."""
    read_members: Callable[[JsonObject], tuple[Any, ...]]
    """Function that returns the values of the members that the dialect reads, except the usage."""
    values: tuple[Any, ...]
    """Values of these members in the sample, with null in place of the text."""
    types: list[type] | None
    """Types of the values if one of them is a number, because 1 and True are equal in Python; else None."""
    absent_members: frozenset[str]
    """Names of members that the dialect reads, and that the sample does not have."""
    kind: EventClass
    """Class of the text."""
    choices: tuple[int, ...]
    usage_member: str | None
    """Member that has the usage; None: the event has none."""

    def take_text(self, root: JsonObject) -> str:
        """Return the text of an event that is equal to the sample except for text and usage, and remove the
        text. Else return "". Inside the members, 1 and True count as equal."""
        holder: Any = root
        try:
            for key in self.holder:
                holder = holder[key]
            text = holder[self.key]
        except (LookupError, TypeError):
            return ""
        if type(text) is not str or not text or not self.absent_members.isdisjoint(root):
            return ""
        holder[self.key] = None
        try:
            values = self.read_members(root)
        except KeyError:  # The event has another structure than the sample.
            values = ()
        if values == self.values and (self.types is None or list(map(type, values)) == self.types):
            return text
        holder[self.key] = text
        return ""


def take_sample(
    delta: Delta, root: JsonObject, event: SseEvent, names: frozenset[str], usage_member: str | None
) -> Sample | None:
    """Return the sample of an event that was read as `delta`; None if its text has no certain place. The
    caller must not use `root` afterwards, because its text is removed."""
    # `_path_to` finds the text by identity, so refuse texts of one character: CPython shares such objects.
    if not event.data or len(event.data) > SAMPLE_BYTES_MAX or len(delta.text) < 2:
        return None
    path = _path_to(delta.text, root)
    if path is None:
        return None
    *holder, key = path
    place: Any = root
    for step in holder:
        place = place[step]
    place[key] = None
    members = sorted(names.intersection(root) - {usage_member})
    read_members = itemgetter(*members, members[0])  # With one name, itemgetter would not return a tuple.
    types = list(map(type, values := read_members(root)))
    return Sample(
        event_name=event.event,
        holder=tuple(holder),
        key=key,
        read_members=read_members,
        values=values,
        types=None if _NUMBERS.isdisjoint(types) else types,
        absent_members=names.difference(root) - {usage_member},
        kind=delta.event_class,
        choices=delta.choices,
        usage_member=usage_member,
    )


def _path_to(text: str, value: Any, depth: int = STEPS_MAX) -> tuple[Any, ...] | None:
    """Return the keys and positions that lead to this text (compared by identity); None if not found."""
    if value is text:
        return ()
    if type(value) is dict or type(value) is list:
        for key, inner in (value.items() if type(value) is dict else enumerate(value)) if depth else ():
            if (path := _path_to(text, inner, depth - 1)) is not None:
                return (key, *path)
    return None
