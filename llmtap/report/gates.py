"""Tables of judged gates: the requirements on a result (`--require`), and worse figures (`--fail-if-worse`).

Takes the public JSON of `gates/requirements.py` and `gates/regression.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from llmtap.report.document import Note, Table
from llmtap.report.values import MARK, milliseconds, number

_Json = Mapping[str, Any]
_STATES: Final = {"met": "met", "missed": "MISSED", "not_valid": "NOT VALID"}


def gate_text(value: float | None, unit: str) -> str:
    """Return a value of a gate as text: seconds in `ms`, shares in `%`, other values as numbers."""
    if value is None:
        return "-"
    match unit:
        case "ms":
            return f"{milliseconds(value)} ms"
        case "%":
            return f"{number(value * 100)} %"
    return number(value)


def requirements_blocks(rows: Sequence[_Json] | None) -> Iterator[Table | Note]:
    """Yield the table of judged requirements and its summary; nothing without rows."""
    if not rows:
        return
    labelled = any(row["of"] for row in rows)
    cells = []
    for row in rows:
        doubtful = ", doubtful" if row["validity"] == "doubtful" else ""
        cells.append([
            *([row["of"]] if labelled else []), row["requirement"],
            gate_text(row["value"], row["unit"]) + MARK * row["few"], _STATES[row["state"]] + doubtful,
        ])  # fmt: skip
    heads = [*(["of"] if labelled else []), "requirement", "value", "state"]
    yield Table(heads, cells, "Requirements", label="Requirements", nowrap=True)
    yield from _reason_notes(rows)
    yield _summary_note("requirements", rows, _STATES)


def _reason_notes(rows: Sequence[_Json]) -> Iterator[Note]:
    """Yield each reason why figures are doubtful or not valid, once, with the names of the figures."""
    figures: dict[str, dict[str, None]] = {}
    for row in rows:
        if row["reason"]:
            figures.setdefault(row["reason"], {})[row["figure"]] = None
    yield from (Note(f"{', '.join(names)}: {reason}") for reason, names in figures.items())


_CHANGES: Final = {"not_worse": "not worse", "worse": "WORSE", "not_valid": "NOT VALID"}


def regression_blocks(rows: Sequence[_Json] | None) -> Iterator[Table | Note]:
    """Yield the table of judged changes and its summary; nothing if none was judged."""
    if rows is None:
        return
    if not rows:
        yield Note("changes: no figure has an interval that decides", "bold red")
        return
    cells = [
        [
            row["of"], row["figure"], gate_text(row["a"], row["unit"]), gate_text(row["b"], row["unit"]),
            f"{_bound_text(row['low'], row['unit'])} to {_bound_text(row['high'], row['unit'])}",
            f"{number(row['tolerance'] * 100)} %", _CHANGES[row["state"]],
        ]
        for row in rows
    ]  # fmt: skip
    heads = ["of", "figure", "before", "after", "difference, interval", "tolerance", "state"]
    yield Table(heads, cells, "Changes", label="Changes", nowrap=True)
    yield from _reason_notes(rows)
    yield Note(
        "A figure is worse if the whole interval of its difference is beyond the tolerance; the intervals"
        " hold together with 95 %."
    )
    yield _summary_note("changes", rows, _CHANGES)


def _bound_text(value: float | None, unit: str) -> str:
    if value is None:
        return "…"
    return f"{'+' if value > 0 else ''}{gate_text(value, unit)}"


def _summary_note(name: str, rows: Sequence[_Json], titles: Mapping[str, str]) -> Note:
    counts = {state: sum(row["state"] == state for row in rows) for state in titles}
    text = ", ".join(f"{n:,} {titles[state]}" for state, n in counts.items() if n)
    good = counts[next(iter(titles))] == len(rows)
    return Note(f"{name}: {text}", "bold green" if good else "bold red")
