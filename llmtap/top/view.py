"""One view of a tap: which documents it needs, and the table it makes of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from llmtap.top.client import Document
from llmtap.top.table import Table

__all__ = ["Shown", "View"]


@dataclass(slots=True)
class Shown:
    """What there is to be shown. Documents of views that were left stay until they are asked for again."""

    summary: Document = field(default_factory=dict)
    beside: dict[str, Document | None] = field(default_factory=dict)
    """By path; None: this tap does not know it."""


@dataclass(frozen=True, slots=True)
class View:
    name: str
    title: str
    table: Callable[[Shown, int], Table]
    """Of the documents, for a screen of so many columns."""
    by: str = "none"
    """What the summary is to be split by."""
    path: str | None = None
    """Of the document beside the summary."""
    query: Mapping[str, str] = field(default_factory=dict)
    inspects: bool = False
    """A row is an exchange, over or under way, that can be looked into."""
    stands: bool = False
    """Lines never change and newer ones come above: with the cursor among them nothing moves."""
