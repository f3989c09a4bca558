"""Declaration of a count that llmtap reports about itself: a field of a status, annotated with `Count`.

The process that counts increments the field. `/metrics`, the admin API and its schema loop over `fields_of`,
so a new counter needs only one annotated field and its increments. A status is a struct or a dataclass.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, get_type_hints

RELAY, MIDDLEWARE, PASSIVE = "relay", "middleware", "passive"


@dataclass(frozen=True, slots=True)
class Count:
    """A counter since the process started, or a gauge. A field with `_ns` in its name is shown in seconds."""

    help: str
    """Meaning of the value, without a full stop."""
    metric: str | None = None
    """Name on `/metrics`, without the prefix `llmtap_` and the suffix `_total`; None: not on `/metrics`."""
    label: str | None = None
    """Name of the label on `/metrics`. Its values are the keys of the field's mapping, or `value`."""
    gauge: bool = False
    """Whether this is a current value (gauge), which `/metrics` omits after the process has ended."""
    value: str | None = None
    """Value of `label` for this field, if several fields form one metric."""
    vantages: tuple[str, ...] = (RELAY, MIDDLEWARE, PASSIVE)
    """Kinds of vantage that count this field. Other kinds do not show it."""


class CountField(NamedTuple):
    """A field of a status that has a `Count`."""

    attribute: str
    """Name of the field in the status."""
    kind: Any
    """Type of the field, without its annotation."""
    declaration: Count
    """The `Count` of the field."""

    @property
    def name(self) -> str:
        """Name of the field in the API."""
        return self.attribute.replace("_ns", "")

    @property
    def in_seconds(self) -> bool:
        """Whether the API shows the value in seconds."""
        return "_ns" in self.attribute

    def applies_to(self, vantage: str) -> bool:
        """Return whether this kind of vantage counts the field. Without a kind, a vantage is a relay."""
        return (vantage or RELAY) in self.declaration.vantages

    def value(self, status: object) -> Any:
        """Return the field's value as the admin API shows it: seconds for `_ns`, None for an empty text."""
        value = getattr(status, self.attribute)
        return value / 1e9 if self.in_seconds else None if value == "" else value

    def samples(self, status: object, *labels: str) -> dict[tuple[str, ...], float]:
        """Return the values for `/metrics` by their label values; the first of these are `labels`."""
        value = self.value(status)
        if isinstance(value, Mapping):
            return {(*labels, key): number for key, number in value.items()}
        return {labels if self.declaration.value is None else (*labels, self.declaration.value): value}


@cache
def fields_of(status: type) -> tuple[CountField, ...]:
    """Return the fields of a status that have a `Count`, in their order."""
    return tuple(
        CountField(name, hint.__origin__, count)
        for name, hint in get_type_hints(status, include_extras=True).items()
        for count in getattr(hint, "__metadata__", ())
        if isinstance(count, Count)
    )
