"""Declaration of a count that llmtap reports about itself: a field of a status, annotated with `Count`.

The process that counts increments the field. `/metrics`, the admin API and its schema loop over `fields_of`,
so a new counter is one annotated field and its increments. A status is a msgspec struct or a dataclass.
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
    metric: str | None = None
    """Name on `/metrics`, without the prefix `llmtap_` and the suffix `_total`; None: not there."""
    label: str | None = None
    """Label on `/metrics`, whose values are the keys of the field's object, or `value`."""
    gauge: bool = False
    """A value of this moment: `/metrics` omits it once the process has left."""
    value: str | None = None
    """Value of the label for this field, where several fields are one metric."""
    vantages: tuple[str, ...] = (RELAY, MIDDLEWARE, PASSIVE)
    """Kinds of vantage that count it: the others do not show it."""


class CountField(NamedTuple):
    """A field of a status that has a `Count`."""

    attribute: str
    kind: Any
    about: Count

    @property
    def name(self) -> str:
        """Name in the API."""
        return self.attribute.replace("_ns", "")

    @property
    def in_seconds(self) -> bool:
        return "_ns" in self.attribute

    def applies_to(self, vantage: str) -> bool:
        """Return whether this kind of vantage counts it; one that does not report its kind is a relay."""
        return (vantage or RELAY) in self.about.vantages

    def value(self, status: object) -> Any:
        """Return the value as the API shows it."""
        value = getattr(status, self.attribute)
        return value / 1e9 if self.in_seconds else None if value == "" else value

    def samples(self, status: object, *labels: str) -> dict[tuple[str, ...], float]:
        """Return the values as `/metrics` shows them, by label values that begin with `labels`."""
        value = self.value(status)
        if isinstance(value, Mapping):
            return {(*labels, key): number for key, number in value.items()}
        return {labels if self.about.value is None else (*labels, self.about.value): value}


@cache
def fields_of(status: type) -> tuple[CountField, ...]:
    """Return the fields of a status that have a `Count`, in their order."""
    return tuple(
        CountField(name, hint.__origin__, count)
        for name, hint in get_type_hints(status, include_extras=True).items()
        for count in getattr(hint, "__metadata__", ())
        if isinstance(count, Count)
    )
