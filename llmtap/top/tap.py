"""The tap itself: what its relays say of themselves, what it adds, what it could not measure."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from llmtap.report.values import milliseconds, number
from llmtap.top.table import Cell, Column, Row, Table, at, figure_cell, shown
from llmtap.top.view import Shown
from llmtap.units import format_bytes

__all__ = ["tap_table"]

TEXT_CHARS: Final = 160
_COLUMNS: Final = (
    Column("of", "\nof", number=False), Column("what", "\nwhat", number=False), Column("value", "\nvalue"),
    Column("about", "\nabout", number=False),
)  # fmt: skip
_POINTS: Final = {
    "request": "from a request's last byte read to its last byte written",
    "first_chunk": "from the answer's first read to its write",
    "chunk": "the same of every chunk",
}
_COUNTS: Final = {
    "opened": "exchanges begun", "measured": "acknowledged by the meter",
    "unsettled": "under way, or not acknowledged yet", "lost": "went down with the relay",
    "connections": "of clients, open", "streams": "answers under way", "refused": "connections turned away",
}  # fmt: skip


def tap_table(documents: Shown, width: int) -> Table:
    """Lines in an order of their own: sorting by a column is possible, and seldom wanted."""
    found = _lines(documents.summary)
    rows = [
        Row(f"{of}/{what}", (_cell(of), _cell(what), value, _cell(about))) for of, what, value, about in found
    ]
    return Table(_COLUMNS, rows, ("added: what the tap adds to a request's way, in ms; lag: of its loops",))


def _cell(text: str) -> Cell:
    return Cell(shown(text, TEXT_CHARS) if text else "", text)


Line = tuple[str, str, Cell, str]


def _lines(summary: Mapping[str, Any]) -> Iterator[Line]:
    yield from _added(summary)
    yield "stamps", "uncertainty", _ms(summary.get("uncertainty")), "ms; worst time a byte waited unread"
    uncertain, limit = at(summary, "uncertain", "n"), at(summary, "uncertain", "limit")
    yield "stamps", "uncertain", _count(uncertain), f"exchanges above {milliseconds(limit)} ms"
    yield "loops", "lag max", _ms(at(summary, "window", "lag_max")), "ms; of any relay in the window"
    for name, relay in _items(summary.get("relays")):
        yield from _relay(f"relay {name}", relay)
    for kind, n in _items(summary.get("meter_errors")):
        yield "meter", f"errors: {kind}", _count(n), "could not be measured"
    for name, value in _items(summary.get("capture")):
        if isinstance(value, int | float | str | bool) and value != "":
            yield "capture", name, Cell(shown(value, TEXT_CHARS), str(value)), ""


def _added(summary: Mapping[str, Any]) -> Iterator[Line]:
    for point, about in _POINTS.items():
        figures = at(summary, "added", point)
        n = at(figures, "n")
        for statistic in ("p50", "p99", "max"):
            said = f"ms; {about}; n {n:,}" if isinstance(n, int) else about
            yield "added", f"{point.replace('_', ' ')} {statistic}", figure_cell(figures, statistic), said


def _relay(of: str, relay: object) -> Iterator[Line]:
    connected, age = at(relay, "connected"), at(relay, "status_age")
    spoke = f"spoke {age:.1f} s ago" if isinstance(age, int | float) else "has not spoken yet"
    clock = f"{at(relay, 'clock') or '?'} clock, pid {at(relay, 'pid') or '?'}"
    yield of, "state", Cell("connected" if connected else "GONE", str(connected)), f"{spoke}; {clock}"
    for name, about in _COUNTS.items():
        if at(relay, name) is not None:
            yield of, name, _count(at(relay, name)), about
    dropped = at(relay, "dropped")
    if isinstance(dropped, Mapping):
        total = sum(n for n in dropped.values() if isinstance(n, int))
        why = ", ".join(f"{reason} {n:,}" for reason, n in dropped.items() if n)
        yield of, "dropped", _count(total), why or "exchanges that went unmeasured: none"
    yield of, "lag max", _ms(at(relay, "lag_max")), "ms; since its last word"
    pending = at(relay, "tap_pending_bytes")
    if isinstance(pending, int):
        yield of, "pending", Cell(format_bytes(pending), pending), "waits for the meter"
    cpu, rss = at(relay, "cpu"), at(relay, "rss_bytes")
    if isinstance(cpu, int | float) and isinstance(rss, int):
        yield of, "memory", Cell(format_bytes(rss), rss), f"resident; {number(cpu, 3)} s of CPU so far"


def _items(document: object) -> Iterator[tuple[str, Any]]:
    if isinstance(document, Mapping):
        yield from document.items()


def _count(value: object) -> Cell:
    if isinstance(value, Mapping):
        value = sum(n for n in value.values() if isinstance(n, int))
    return Cell(f"{value:,}", value) if isinstance(value, int) else Cell("-")


def _ms(seconds: object) -> Cell:
    return Cell(milliseconds(seconds), seconds) if isinstance(seconds, int | float) else Cell("-")
