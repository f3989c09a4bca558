"""Tables of judged gates: the requirements on a result (`--require`), and worse figures (`--fail-if-worse`).

`gates/requirements.py` and `gates/regression.py` judge the results and make the rows of the tables.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from llmtap.report.document import Note, Table
from llmtap.report.values import MARK, milliseconds, number

_STATES: Final = {"met": "met", "missed": "MISSED", "not_valid": "NOT VALID"}


class RequirementRow(Struct, frozen=True):
    """A requirement, and whether a result meets it. Values are seconds, shares or numbers."""

    of: str
    """Label of the run or test; empty if there is only one."""
    requirement: str
    figure: str
    value: float | None
    bound: float
    """Value that the figure is compared with."""
    unit: str
    """Unit in texts: `ms`, `%` or empty."""
    state: str
    """Result of the judgement: `met`, `missed` or `not_valid`."""
    validity: str
    """State of the figure: `valid`, `doubtful` or `not_valid`."""
    reason: str
    """Reason why the figure is doubtful or not valid; empty if it is valid."""
    few: bool
    """Whether the figure has too few samples."""


class Change(Struct, frozen=True):
    """The difference of a figure between two results: b - a. Values are seconds, shares or numbers."""

    of: str
    """Label of the result b, which is compared with a."""
    figure: str
    unit: str
    better: str
    """Which values are better: `lower` or `higher`."""
    reason: str
    """Reason why the change cannot be judged; empty if it can be judged."""
    a: float | None
    b: float | None
    difference: float | None
    low: float | None
    """Lower end of the interval of the difference; None if the interval has no lower end."""
    high: float | None
    """Upper end of the interval of the difference."""
    level: float
    """Confidence level of the interval."""


class JudgedChange(Change, frozen=True):
    """A change of a figure, and whether it exceeds a tolerance."""

    tolerance: float
    """Maximum worsening, as a share of `a`."""
    state: str
    """Result of the judgement: `worse`, `not_worse` or `not_valid`."""


def requirement_rows(document: Mapping[str, Any]) -> list[RequirementRow]:
    """Return the judged requirements in the JSON of a result or report, which can come from a file."""
    return msgspec.convert(document.get("requirements") or [], list[RequirementRow])


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


def requirements_blocks(rows: Sequence[RequirementRow]) -> Iterator[Table | Note]:
    """Yield a table of judged requirements, the reasons, and a summary; nothing if there are no rows."""
    if not rows:
        return
    labelled = any(row.of for row in rows)
    cells = []
    for row in rows:
        doubtful = ", doubtful" if row.validity == "doubtful" else ""
        cells.append(
            [
                *([row.of] if labelled else []),
                row.requirement,
                gate_text(row.value, row.unit) + MARK * row.few,
                _STATES[row.state] + doubtful,
            ]
        )
    heads = [*(["of"] if labelled else []), "requirement", "value", "state"]
    yield Table(heads, cells, "Requirements", label="Requirements", nowrap=True)
    yield from _reason_notes(rows)
    yield _summary_note("requirements", rows, _STATES)


def _reason_notes(rows: Sequence[RequirementRow | JudgedChange]) -> Iterator[Note]:
    """Yield each reason why figures are doubtful or not valid, once, with the names of the figures."""
    figures: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.reason:
            figures.setdefault(row.reason, {})[row.figure] = None
    yield from (Note(f"{', '.join(names)}: {reason}") for reason, names in figures.items())


_CHANGES: Final = {"not_worse": "not worse", "worse": "WORSE", "not_valid": "NOT VALID"}


def change_rows(document: Mapping[str, Any]) -> list[JudgedChange] | None:
    """Return the judged changes in the JSON of a comparison; None if the user gave no tolerances."""
    rows = document.get("regression")
    return None if rows is None else msgspec.convert(rows, list[JudgedChange])


def regression_blocks(rows: Sequence[JudgedChange] | None) -> Iterator[Table | Note]:
    """Yield a table of judged changes, the reasons, and a summary; nothing if `rows` is None."""
    if rows is None:
        return
    if not rows:
        yield Note("changes: no figure has an interval that decides", "bold red")
        return
    cells = [
        [
            row.of,
            row.figure,
            gate_text(row.a, row.unit),
            gate_text(row.b, row.unit),
            f"{_bound_text(row.low, row.unit)} to {_bound_text(row.high, row.unit)}",
            f"{number(row.tolerance * 100)} %",
            _CHANGES[row.state],
        ]
        for row in rows
    ]
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


def _summary_note(
    name: str, rows: Sequence[RequirementRow | JudgedChange], titles: Mapping[str, str]
) -> Note:
    counts = {state: sum(row.state == state for row in rows) for state in titles}
    text = ", ".join(f"{n:,} {titles[state]}" for state, n in counts.items() if n)
    good = counts[next(iter(titles))] == len(rows)
    return Note(f"{name}: {text}", "bold green" if good else "bold red")
