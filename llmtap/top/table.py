"""Data model of the tables of `llmtap top` (columns, rows, cells, sort keys), and the texts of its header.

`views.py` makes `ViewTable`s with it; `app.py` and `plain.py` draw them. The texts (`facts`,
`firing_sentences`, `warnings_of`) come from the JSON of a summary. Names come from traffic, so `visible_text`
escapes them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from rich.cells import cell_len

from llmtap.errors import printable
from llmtap.metrics.step_change import StepState
from llmtap.report.values import at, figure_text, milliseconds, number

NOTHING: Final = "-"
"""Text of a cell without a value."""
NAME_CHARS: Final = 40


@dataclass(frozen=True, slots=True)
class Cell:
    """Cell of a table: its text, and the value (None if unknown) for sorting and searching its column."""

    text: str
    value: float | str | None = None


@dataclass(frozen=True, slots=True)
class Column:
    """Column of a view's table."""

    key: str
    """Name of the column, unique in its table."""
    title: str
    cell: Callable[[Any], Cell]
    """Function that makes the cell of a row from the row's part of a document."""
    is_number: bool = True
    """Whether the values are numbers, which are aligned right and sorted largest first."""


@dataclass(frozen=True, slots=True)
class Row:
    """Row of a view's table. The key stays the same when the figures change."""

    key: str
    """Identifier of the row, such as the id of an exchange."""
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class ViewTable:
    """Table of a view, and the notes about it."""

    columns: tuple[Column, ...]
    rows: list[Row] = field(default_factory=list)
    notes: tuple[str, ...] = ()


def row_of(key: object, columns: Iterable[Column], part: object) -> Row:
    return Row(str(key), tuple(column.cell(part) for column in columns))


def sort_rows(rows: Iterable[Row], column: int, *, largest_first: bool) -> list[Row]:
    """Return the rows in the order of a column's values; rows without a value are last."""
    known = [row for row in rows if row.cells[column].value is not None]
    rest = [row for row in rows if row.cells[column].value is None]
    known.sort(key=lambda row: _sort_key(row.cells[column].value), reverse=largest_first)
    return known + rest


def _sort_key(value: float | str | None) -> tuple[float, str]:
    return (0.0, value.casefold()) if isinstance(value, str) else (value or 0.0, "")


def filter_rows(rows: Iterable[Row], text: str) -> list[Row]:
    """Return the rows with `text` in any cell. Names that are shown shortened are searched in full."""
    wanted = text.casefold()
    return [row for row in rows if any(wanted in cell.casefold() for cell in _searched_texts(row))]


def _searched_texts(row: Row) -> Iterator[str]:
    """Yield the texts of a row in which a filter is searched."""
    for cell in row.cells:
        yield cell.text
        if isinstance(cell.value, str):
            yield cell.value


def unique_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the first row of each key; drop other rows with the same key."""
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(row.key, row)
    return list(first.values())


def visible_text(value: object, chars: int = NAME_CHARS) -> str:
    """Return a value as text of at most `chars` characters, with control characters escaped; `-` if empty."""
    if value is None or value == "":
        return NOTHING
    text = printable(str(value)[: 4 * chars])
    return text if len(text) <= chars else text[: chars - 1] + "…"


def clock_time(wall_s: float) -> str:
    """Return the local time of a Unix time, as HH:MM:SS."""
    return datetime.fromtimestamp(wall_s, UTC).astimezone().strftime("%H:%M:%S")


def name_cell(value: object, chars: int = NAME_CHARS) -> Cell:
    return Cell(visible_text(value, chars), None if value is None else str(value))


def text_cell(text: str) -> Cell:
    return Cell(text, text)


def _number_cell(write: Callable[[float], str]) -> Callable[[object], Cell]:
    return lambda value: Cell(write(value), value) if isinstance(value, int | float) else Cell(NOTHING)


count_cell: Final = _number_cell("{:,.0f}".format)
number_cell: Final = _number_cell(lambda value: number(value, 3))
share_cell: Final = _number_cell("{:.1%}".format)
ms_cell: Final = _number_cell(milliseconds)


def figure_cell(figures: object, statistic: str) -> Cell:
    """Return the cell of a percentile in ms, marked if it has too few samples."""
    value = at(figures, statistic)
    if not isinstance(figures, Mapping) or not isinstance(value, int | float):
        return Cell(NOTHING)
    return Cell(figure_text(figures, statistic), value)


UNCOUNTED: Final = {"not_judged": "not judged", "own_faults": "left out (faults of llmtap)"}
"""By name of a count in the JSON: text for its exchanges, which do not count for the attainment."""


def column_of(
    key: str, title: str, cell: Callable[[Any], Cell], *path: str, is_number: bool = True
) -> Column:
    """Return a column with the values at a path in each row's part of the document."""
    return Column(key, title, lambda part: cell(at(part, *path)), is_number)


def text_column(key: str, title: str, *path: str, chars: int = NAME_CHARS) -> Column:
    return column_of(key, title, partial(name_cell, chars=chars), *path, is_number=False)


SILENT_S: Final = 5.0
"""Age of the latest status from which a relay counts as silent. Relays report twice per second."""
_SEPARATOR: Final = " · "
_OBJECTIVES_CHARS: Final = 60
_SENTENCE_CHARS: Final = 600


def facts(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts of the header: each figure with its number of samples, window or parameters."""
    if "n" not in summary:
        return
    seconds = at(summary, "window", "seconds")
    long = f" ({seconds:.0f} s)" if isinstance(seconds, int | float) else ""
    yield f"window {visible_text(at(summary, 'window', 'name'))}{long}"
    rate = at(summary, "load", "achieved_rps")
    yield "req/s -" if rate is None else f"{number(rate, 3)} req/s"
    yield f"n {summary['n']:,}"
    yield _latency_text("TTFT", at(summary, "metrics", "ttft"))
    option = at(summary, "metrics", "itl", "option")
    yield _latency_text(f"ITL ({visible_text(option)})", at(summary, "metrics", "itl"))
    goodput, smooth = at(summary, "goodput"), at(summary, "smooth_goodput")
    unjudged = "".join(f", {n:,} {text}" for name, text in UNCOUNTED.items() if (n := at(goodput, name)))
    if at(goodput, "attainment") is None:
        yield f"goodput - (no objectives met or missed{unjudged})"
    else:
        objectives = visible_text(goodput["objectives"], _OBJECTIVES_CHARS)
        met = f"{goodput['met']:,} of {goodput['counted']:,} met {objectives}{unjudged}"
        yield f"goodput {number(goodput['requests_per_second'], 3)} req/s ({met})"
    rate, speed = at(smooth, "tokens_per_second"), at(smooth, "speed_tokens_per_second")
    settings = "several readers" if speed is None else f"alpha {smooth['alpha']:g}, reader {speed:g} tok/s"
    yield "smooth goodput -" if rate is None else f"smooth goodput {number(rate, 3)} tok/s ({settings})"
    yield _latency_text("uncertainty", at(summary, "uncertainties"))
    if lost := sum(at(relay, "lost") or 0 for relay in (at(summary, "relays") or {}).values()):
        yield f"{lost:,} lost (tap_error) when a process of llmtap died: see Tap"
    places = at(summary, "without_dialect") or []
    if places:
        n, largest = sum(place["n"] for place in places), places[0]
        where = visible_text(f"{largest['path']} {largest['content_type'] or ''}".strip(), _OBJECTIVES_CHARS)
        yield (
            f"unknown format {n / summary['n']:.1%} ({n:,}), most {where} {largest['reading']}:"
            " llmtap inspect FILE --draft NAME"
        )


def _latency_text(title: str, figures: Any) -> str:
    if not at(figures, "n"):
        return f"{title} -"
    return (
        f"{title} p50 {figure_text(figures, 'p50')} p99 {figure_text(figures, 'p99')} ms (n {figures['n']:,})"
    )


def flow_lines(facts_: Iterable[str], width: int) -> list[str]:
    """Return lines of this width, with several texts on each. A text is never broken."""
    lines: list[str] = []
    for fact in facts_:
        joined = f"{lines[-1]}{_SEPARATOR}{fact}" if lines else fact
        if lines and cell_len(joined) <= width:
            lines[-1] = joined
        else:
            lines.append(fact)
    return lines


_WINDOW_S: Final = {"5m": 300, "30m": 1800, "1h": 3600, "6h": 21_600}
_COMPLETE_SHARE: Final = 0.9
"""Share of its length that a complete window must cover: below 1, because windows move in steps."""


def alarms(
    summary: Mapping[str, Any],
) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any], str, str]]:
    """Yield for each burn-rate alarm: name of its owner (a class, or a tenant and its class), data of the
    class with the owner's windows, the alarm, and two texts: the burn rates in its long and short window."""
    for name, slo in (at(summary, "slo") or {}).items():
        for alarm in at(slo, "alarms") or ():
            tenant = alarm.get("tenant")
            owner_slo = slo if tenant is None else {**slo, "windows": at(slo, "by", "tenant", tenant)}
            rates = (_burn_rate_text(owner_slo, alarm[window]) for window in ("long", "short"))
            yield name if tenant is None else f"{tenant} ({name})", owner_slo, alarm, *rates


def _burn_rate_text(slo: object, name: str) -> str:
    """Return a text with the burn rate of the window `name`, and the time that it covers."""
    rate, seconds = at(slo, "windows", name, "burn_rate"), at(slo, "windows", name, "seconds")
    measured = isinstance(seconds, int | float) and seconds < _COMPLETE_SHARE * _WINDOW_S.get(name, 0)
    span = f"the {seconds:.0f} s measured" if measured else name
    return f"{NOTHING if rate is None else number(rate, 3)} over {span}"


def firing_sentences(summary: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each burn-rate alarm that fires, except repeated alarms of one cause."""
    sentences = []
    for name, _, alarm, *rates in alarms(summary):
        if alarm["ringing"] and not alarm["inhibited"]:
            limit = f"{number(alarm['burn_rate'], 3)} over {alarm['long']} and {alarm['short']}"
            rate = " and ".join(dict.fromkeys(rates))
            words = f"uses its error budget too fast: burn rate {rate}; {alarm['severity']} above {limit}"
            sentences.append(f"{visible_text(name)} {words}")
    return sentences


def warnings_of(summary: Mapping[str, Any]) -> list[str]:
    """Return a warning if no relay reports, one for each upstream that is down and for each model whose TTFT
    has risen, and one for a paused capture."""
    pause = at(summary, "capture", "pause", "sentence")
    paused = [] if pause is None else [f"CAPTURE PAUSED: {visible_text(pause, _SENTENCE_CHARS)}"]
    models = (at(summary, "ttft_steps", "models") or {}).values()
    risen = [
        f"TTFT HAS RISEN: {visible_text(model['sentence'], _SENTENCE_CHARS)}"
        for model in models
        if at(model, "step") and at(model, "step", "until") is None and at(model, "state") != StepState.FEW
    ]
    if "relays" not in summary:
        return risen + paused
    connected = [relay for relay in summary["relays"].values() if at(relay, "connected")]
    lines = []
    if not any(isinstance(age := at(r, "status_age"), int | float) and age <= SILENT_S for r in connected):
        lines.append("NO RELAY REPORTS: requests are not measured. Hint: is the proxy running? See its log")
    upstreams = [at(relay, "upstreams") or {} for relay in connected]
    down = dict.fromkeys(url for of in upstreams for url, up in of.items() if not up)
    return (
        lines
        + [
            f"UPSTREAM DOWN: {visible_text(url, 40)} accepts no connection; clients get 502 or 504"
            for url in down
        ]
        + risen
        + paused
    )
