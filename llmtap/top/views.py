"""Views of `llmtap top` in the order of their tabs (`VIEWS`): the API documents and the table of each.

Functions such as `streams_table` take the JSON documents and a width, and return a `ViewTable` (`table.py`).
Both the application (`app.py`, `feed.py`) and `plain.py` use them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from math import ceil
from typing import Any, Final

from llmtap.exchange.outcome import FAILED
from llmtap.report.experiment import experiment_lines
from llmtap.report.values import milliseconds, number
from llmtap.top.client import Document
from llmtap.top.table import (
    Cell,
    Column,
    Row,
    ViewTable,
    alarms,
    at,
    clock_time,
    count_cell,
    figure_cell,
    ms_cell,
    name_cell,
    name_chars,
    number_cell,
    ordered,
    share_cell,
    shown,
    text_cell,
    unique,
)
from llmtap.units import format_bytes


@dataclass(slots=True)
class Shown:
    summary: Document = field(default_factory=dict)
    beside: dict[str, Document | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class View:
    name: str
    title: str
    table: Callable[[Shown, int], ViewTable]
    by: str = "none"
    path: str | None = None
    query: Mapping[str, str] = field(default_factory=dict)
    inspects: bool = False
    """Rows are exchanges, ended or running, whose events can be shown."""


EXPERIMENT: Final = "experiment"
_FIGURES: Final = (
    Column("n", "\nn"), Column("rps", "\nreq/s"),
    Column("ttft_p50", "TTFT\np50"), Column("ttft_p99", "TTFT\np99"),
    Column("itl_p50", "ITL\np50"), Column("itl_p99", "ITL\np99"), Column("idle_p99", "idle\np99"),
    Column("good", "SLO\nmet"), Column("smooth", "smooth\ntok/s"), Column("failed", "\nfail"),
    Column("refused", "re-\nfused"), Column("output", "output\ntok/s"),
)  # fmt: skip


def arms_table(documents: Shown, width: int) -> ViewTable:
    table = _series(documents, width, "arm")
    if EXPERIMENT not in documents.beside:
        return table
    told = documents.beside[EXPERIMENT]
    lines = ("this version of llmtap has no experiments",) if told is None else tuple(experiment_lines(told))
    notes = table.notes if table.rows else ()  # units of nothing
    return ViewTable(table.columns, table.rows, tuple(shown(line, 400) for line in lines) + notes)


def _series(documents: Shown, width: int, label: str) -> ViewTable:
    summary = documents.summary
    parts = at(summary, "by", label)
    rows = [
        Row(str(name), (name_cell(name, name_chars(width)), *_cells(part)))
        for name, part in (parts.items() if isinstance(parts, Mapping) else ())
    ]
    busiest = ordered(rows, 1, largest_first=True)
    return ViewTable((Column("name", f"\n{label}", number=False), *_FIGURES), busiest, (caption(summary),))


def caption(summary: Mapping[str, Any]) -> str:
    option = at(summary, "metrics", "itl", "option")
    window = at(summary, "window", "name")
    return (
        f"ms, window {shown(window)}; ITL ({shown(option)}); idle: reader of {reader(summary)};"
        " * fewer than ten samples beyond it"
    )


def reader(summary: Mapping[str, Any]) -> str:
    speed = at(summary, "smooth_goodput", "speed_tokens_per_second")
    return f"{speed:g} tok/s" if isinstance(speed, int | float) else "several speeds"


def _cells(part: object) -> tuple[Cell, ...]:
    outcomes = at(part, "outcomes")
    failed = None
    if isinstance(outcomes, Mapping):
        failed = sum(n for name, n in outcomes.items() if name in FAILED and isinstance(n, int))
    return (
        count_cell(at(part, "n")), number_cell(at(part, "load", "achieved_rps")),
        figure_cell(at(part, "metrics", "ttft"), "p50"), figure_cell(at(part, "metrics", "ttft"), "p99"),
        figure_cell(at(part, "metrics", "itl"), "p50"), figure_cell(at(part, "metrics", "itl"), "p99"),
        figure_cell(at(part, "metrics", "user_idle"), "p99"), share_cell(at(part, "goodput", "attainment")),
        number_cell(at(part, "smooth_goodput", "tokens_per_second")), count_cell(failed),
        count_cell(at(part, "refusals", "n")), number_cell(at(part, "tokens", "output_per_second")),
    )  # fmt: skip


STREAMS: Final = "streams"
OLDER: Final = "this version of llmtap has no list of running streams (no /api/v1/streams)"
LEVELS: Final = "▁▂▃▄▅▆▇█"
SILENT: Final = "·"
SPARK_CELLS: Final = (12, 40)
_COLUMNS: Final = (
    Column("tenant", "\ntenant", number=False), Column("model", "\nmodel", number=False),
    Column("age", "age\ns"), Column("ttft", "TTFT\nms"), Column("events", "\nevents"),
    Column("tokens", "\ntokens"), Column("silent", "silent\nms"),
    Column("timeline", "\ntokens over time", number=False), Column("arm", "\narm", number=False),
    Column("dialect", "\ndialect", number=False), Column("id", "\nid", number=False),
)  # fmt: skip


def streams_table(documents: Shown, width: int) -> ViewTable:
    told = documents.beside.get(STREAMS, {})
    if told is None:
        return ViewTable(_COLUMNS, [], (OLDER,))
    streams, window = told.get("streams"), told.get("window")
    rows = unique(_row(one, width, window) for one in streams or () if isinstance(one, dict))
    count = told.get("count")
    notes = []
    if isinstance(count, int):
        said = f"{count:,} stream{'' if count == 1 else 's'} under way"
        notes.append(said + (f", the {len(rows):,} newest below" if count > len(rows) else ""))
    if isinstance(window, int | float):
        notes.append(f"tokens over the last {window:g} s, each line by its own largest; {SILENT} no token")
    return ViewTable(_COLUMNS, rows, ("; ".join(notes),) if notes else ())


def _row(one: dict[str, Any], width: int, window: object) -> Row:
    chars = name_chars(width) - 4
    cells = min(SPARK_CELLS[1], max(SPARK_CELLS[0], width - 68))
    age, timeline = one.get("age"), one.get("timeline")
    drawn = ""
    if isinstance(age, int | float) and isinstance(timeline, list):
        since = max(0.0, age - window) if isinstance(window, int | float) else 0.0
        drawn = sparkline(timeline, cells, since, age)
    return Row(
        str(one.get("id")),
        (
            name_cell(one.get("tenant"), chars), name_cell(one.get("model"), chars),
            number_cell(age), ms_cell(one.get("ttft")), count_cell(one.get("events")),
            count_cell(one.get("tokens")), ms_cell(one.get("since_last")), Cell(drawn),
            name_cell(one.get("arm"), chars), name_cell(one.get("dialect")), name_cell(one.get("id")),
        ),
    )  # fmt: skip


def sparkline(timeline: Sequence[object], cells: int, since: float, until: float) -> str:
    """Draw the tokens in each of `cells` equal parts of the time from `since` to `until`.

    Relative to the largest. `timeline` has `[t, tokens]`, in seconds; an event with unknown tokens counts as
    one.
    """
    length = until - since
    if length <= 0 or cells < 1:
        return ""
    sums = [0.0] * cells
    for point in timeline:
        if not (isinstance(point, list) and point and isinstance(point[0], int | float)):
            continue
        tokens = point[1] if len(point) > 1 and isinstance(point[1], int | float) else 1
        place = int((point[0] - since) / length * cells)
        if since <= point[0] <= until:
            sums[min(place, cells - 1)] += tokens
    most = max(sums)
    return "".join(LEVELS[ceil(n / most * len(LEVELS)) - 1] if n > 0 else SILENT for n in sums)


EXCHANGES: Final = "exchanges"
PATH_CHARS: Final = 24
ALL: Final = "all"
_EXCHANGE_COLUMNS: Final = (
    Column("arrival", "\narrival", number=False), Column("tenant", "\ntenant", number=False),
    Column("model", "\nmodel", number=False), Column("outcome", "\noutcome", number=False),
    Column("ttft", "TTFT\nms"), Column("tpot", "TPOT\nms"), Column("idle", "idle\nms"),
    Column("e2e", "E2E\nms"), Column("tokens", "\ntokens"), Column("status", "\nstatus"),
    Column("path", "\npath", number=False),
    Column("arm", "\narm", number=False), Column("refusal", "\nrefused by", number=False),
    Column("finish", "\nfinish", number=False), Column("id", "\nid", number=False),
)  # fmt: skip
_CUT_COLUMNS: Final = (
    Column("name", "\ntenant", number=False), Column("n", "\nn"), Column("refused", "re-\nfused"),
    Column("share", "\nshare"), Column("kinds", "\nby whom", number=False),
    Column("tokens_chunk", "tokens/\nchunk"), Column("single", "single\ntoken"),
    Column("events_read", "events/\nread"), Column("bursts", "\nbursts"), Column("held", "held\nms"),
    Column("tbc_p99", "TBC\np99"),
)  # fmt: skip


def exchanges_table(documents: Shown, width: int) -> ViewTable:
    found = at(documents.beside.get(EXCHANGES), "exchanges")
    rows = [_exchange_row(x, width) for x in found or () if isinstance(x, dict)]
    return ViewTable(_EXCHANGE_COLUMNS, unique(rows))


def _exchange_row(x: dict[str, Any], width: int) -> Row:
    chars = name_chars(width) - 4
    token_times = x.get("metrics") if x.get("stream", True) else None
    return Row(
        str(x.get("id")),
        (
            _arrival(x.get("arrival")), name_cell(x.get("tenant"), chars), name_cell(x.get("model"), chars),
            name_cell(x.get("outcome")), ms_cell(at(token_times, "ttft")), ms_cell(at(token_times, "tpot")),
            ms_cell(at(x, "metrics", "user_idle")), ms_cell(at(x, "metrics", "e2e")),
            count_cell(at(x, "tokens", "output")), Cell(*_status(x.get("status"))),
            name_cell(x.get("path"), PATH_CHARS), name_cell(x.get("arm"), chars),
            name_cell(at(x, "refusal", "kind")), name_cell(x.get("finish_reason")), name_cell(x.get("id")),
        ),
    )  # fmt: skip


def _arrival(value: object) -> Cell:
    try:
        wall_s = datetime.fromisoformat(str(value)).timestamp()
    except (ValueError, OverflowError):
        return Cell("-")
    return Cell(clock_time(wall_s), wall_s)


def _status(value: object) -> tuple[str, float | None]:
    return (str(value), value) if isinstance(value, int) else ("-", None)


def refusals_table(documents: Shown, width: int) -> ViewTable:
    summary = documents.summary
    parts = at(summary, "by", "tenant")
    # A tenant may also be called `all`.
    rows = [_cut_row("", Cell(ALL, ""), summary)] if "refusals" in summary else []
    for name, part in parts.items() if isinstance(parts, Mapping) else ():
        rows.append(_cut_row(f"tenant {name}", name_cell(name, name_chars(width)), part))
    held = "held: longest silence before a burst of events"
    return ViewTable(_CUT_COLUMNS, rows, (f"{caption(summary)}; {held}",))


def _cut_row(key: str, name: Cell, part: object) -> Row:
    kinds = at(part, "refusals", "kinds")
    said = ", ".join(f"{kind} {n:,}" for kind, n in kinds.items()) if isinstance(kinds, Mapping) else ""
    chunking, bursts = at(part, "chunking"), at(part, "chunking", "bursts")
    return Row(
        key,
        (
            name, count_cell(at(part, "n")), count_cell(at(part, "refusals", "n")),
            share_cell(at(part, "refusals", "share")), name_cell(said),
            number_cell(at(chunking, "tokens_per_chunk_mean")),
            share_cell(at(chunking, "single_token_share")),
            number_cell(at(chunking, "events_per_read")), count_cell(at(bursts, "n")),
            ms_cell(at(bursts, "hold_max")), figure_cell(at(part, "metrics", "tbc"), "p99"),
        ),
    )  # fmt: skip


TEXT_CHARS: Final = 160
_TAP_COLUMNS: Final = (
    Column("of", "\nof", number=False), Column("what", "\nwhat", number=False), Column("value", "\nvalue"),
    Column("about", "\nabout", number=False),
)  # fmt: skip
_POINTS: Final = {
    "request": "request: last byte read to last byte written",
    "first_chunk": "response: first read to its write",
    "chunk": "response: each read to its write",
}
_COUNTS: Final = {
    "opened": "exchanges started", "measured": "acknowledged by the meter",
    "unsettled": "running, or not acknowledged yet", "lost": "lost when the relay died",
    "connections": "open client connections", "streams": "responses in progress",
    "refused": "rejected connections",
}  # fmt: skip
_PACKETS: Final = {"packets": "lost: the kernel had no room for them", "watched": "connections, by kind"}


def tap_table(documents: Shown, width: int) -> ViewTable:
    found = _lines(documents.summary)
    rows = [
        Row(f"{of}/{what}", (_cell(of), _cell(what), value, _cell(about))) for of, what, value, about in found
    ]
    return ViewTable(
        _TAP_COLUMNS, rows, ("added: latency added by llmtap, in ms; lag: delay of its event loops",)
    )


def _cell(text: str) -> Cell:
    return Cell(shown(text, TEXT_CHARS) if text else "", text)


Line = tuple[str, str, Cell, str]


def _lines(summary: Mapping[str, Any]) -> Iterator[Line]:
    yield from _added(summary)
    yield "stamps", "uncertainty", ms_cell(summary.get("uncertainty")), "ms; worst time a byte waited unread"
    uncertain, limit = at(summary, "uncertain", "n"), at(summary, "uncertain", "limit")
    yield "stamps", "uncertain", _count(uncertain), f"exchanges above {milliseconds(limit)} ms"
    yield "loops", "lag max", ms_cell(at(summary, "window", "lag_max")), "ms; of any relay in the window"
    for name, relay in _items(summary.get("relays")):
        yield from _relay(f"{at(relay, 'vantage') or 'relay'} {name}", relay)
    for kind, n in _items(summary.get("meter_errors")):
        yield "meter", f"errors: {kind}", _count(n), "exchanges or values not measured"
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
    spoke = f"reported {age:.1f} s ago" if isinstance(age, int | float) else "no report yet"
    clock = f"{at(relay, 'clock') or '?'} clock, pid {at(relay, 'pid') or '?'}"
    yield of, "state", Cell("connected" if connected else "GONE", str(connected)), f"{spoke}; {clock}"
    for name, about in _COUNTS.items():
        if at(relay, name) is not None:
            yield of, name, _count(at(relay, name)), about
    for group, about in _PACKETS.items():
        for kind, n in _items(at(relay, group)):
            yield of, f"{group} {kind}", _count(n), about
    missing = at(relay, "missing_bytes")
    if isinstance(missing, int):
        place = at(relay, "side") or "unknown"
        yield of, "missing", Cell(format_bytes(missing), missing), f"bytes in no packet; side: {place}"
    dropped = at(relay, "dropped")
    if isinstance(dropped, Mapping):
        total = sum(n for n in dropped.values() if isinstance(n, int))
        why = ", ".join(f"{reason} {n:,}" for reason, n in dropped.items() if n)
        yield of, "dropped", _count(total), why or "no exchange dropped"
    for url, up in _items(at(relay, "upstreams")):
        ages = at(relay, "upstream_ages")
        age = ages.get(url) if isinstance(ages, Mapping) else None
        when = f", {age:.0f} s ago" if isinstance(age, int | float) else ""
        yield of, f"upstream {url}", Cell("up" if up else "DOWN", str(up)), f"at the latest connection{when}"
    if isinstance(skipped := at(relay, "skipped"), Mapping):
        rules = ", ".join(f"{rule} {n:,}" for rule, n in skipped.items())
        yield of, "skipped", _count(sum(skipped.values())), rules or "no request that is not inference"
    yield of, "lag max", ms_cell(at(relay, "lag_max")), "ms; since its last report"
    pending = at(relay, "tap_pending_bytes")
    if isinstance(pending, int):
        yield of, "pending", Cell(format_bytes(pending), pending), "queued for the meter"
    cpu, rss = at(relay, "cpu"), at(relay, "rss_bytes")
    if isinstance(cpu, int | float) and isinstance(rss, int):
        yield of, "memory", Cell(format_bytes(rss), rss), f"resident; {number(cpu, 3)} s of CPU so far"


_ALARM_COLUMNS: Final = (
    Column("class", "\nclass", number=False), Column("state", "\nstate", number=False),
    Column("severity", "\nseverity", number=False), Column("limit", "\nlimit"),
    Column("long", "burn rate,\nlong window", number=False),
    Column("short", "burn rate,\nshort window", number=False), Column("counted", "counted,\nlong window"),
    Column("objectives", "\nobjectives", number=False), Column("target", "\ntarget"),
)  # fmt: skip


def slo_table(documents: Shown, width: int) -> ViewTable:
    """Return a row for each burn-rate alarm of each class of tenants; firing alarms first."""
    rows = []
    for name, alarm, long, short in alarms(documents.summary):
        slo = at(documents.summary, "slo", name)
        counted = at(slo, "windows", alarm["long"], "counted")
        if alarm["ringing"]:
            state = "FIRING"
        elif not alarm["reachable"]:
            state = "cannot fire at this target"
        elif counted < alarm["events_min"]:
            state = f"quiet until {alarm['events_min']:,} counted"
        else:
            state = "quiet"
        cells = (
            name_cell(name, name_chars(width)), text_cell(state), name_cell(alarm["severity"]),
            number_cell(alarm["burn_rate"]), text_cell(long), text_cell(short), count_cell(counted),
            name_cell(at(slo, "objectives"), TEXT_CHARS), share_cell(at(slo, "target")),
        )  # fmt: skip
        rows.append(Row(f"{name} {alarm['long']}", cells))
    rows.sort(key=lambda row: row.cells[1].text != "FIRING")
    note = "burn rate 1 uses exactly the error budget; an alarm fires if both windows are above its limit"
    none = "no class of tenants has objectives: [slo.NAME] in the configuration"
    return ViewTable(_ALARM_COLUMNS, rows, (note if rows else none,))


def _items(document: object) -> Iterator[tuple[str, Any]]:
    if isinstance(document, Mapping):
        yield from document.items()


def _count(value: object) -> Cell:
    if isinstance(value, Mapping):
        value = sum(n for n in value.values() if isinstance(n, int))
    return Cell(f"{value:,}", value) if isinstance(value, int) else Cell("-")


STREAMS_MAX: Final = 200
EXCHANGES_MAX: Final = 200

VIEWS: Final = (
    View("tenants", "Tenants", partial(_series, label="tenant"), by="tenant"),
    View("models", "Models", partial(_series, label="model"), by="model"),
    View("arms", "Arms", arms_table, by="arm", path=EXPERIMENT),
    View(
        "streams", "Streams", streams_table,
        path=STREAMS, query={"limit": str(STREAMS_MAX)}, inspects=True,
    ),
    View(
        "exchanges", "Exchanges", exchanges_table,
        path=EXCHANGES, query={"limit": str(EXCHANGES_MAX)}, inspects=True,
    ),
    View("refusals", "Refusals", refusals_table, by="tenant"),
    View("tap", "Tap", tap_table),
    View("slo", "SLO", slo_table),
)  # fmt: skip
