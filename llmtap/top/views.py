"""Views of `llmtap top` in the order of their tabs (`VIEWS`), and the events of one exchange (`event_table`).

A view names the documents of the API that it needs, and makes a `ViewTable` (`table.py`) from them. Both the
application (`app.py`, `client.py`) and `plain.py` use the views. `event_table` shows, for each event, its
time, its deadline and the wait of the assumed reader; the waits add up to the user idle latency (smooth
goodput paper, eq. 4 and 6).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import accumulate
from typing import Any, Final

from llmtap.errors import printable
from llmtap.exchange.outcome import FAILED
from llmtap.metrics.catalogue import Answers, Surface, Unit, shown_on
from llmtap.metrics.deadlines import READER_NS_PER_TOKEN
from llmtap.report.experiment import experiment_lines
from llmtap.report.values import at, milliseconds, number
from llmtap.top.streams import silences_table, streams_table
from llmtap.top.table import (
    NOTHING,
    UNCOUNTED,
    Cell,
    Column,
    ViewTable,
    alarms,
    clock_time,
    column_of,
    count_cell,
    figure_cell,
    ms_cell,
    name_cell,
    number_cell,
    row_of,
    share_cell,
    sort_rows,
    text_cell,
    text_column,
    visible_text,
)
from llmtap.units import format_bytes

Document = dict[str, Any]
EXPERIMENT: Final = "experiment"
STREAMS: Final = "streams"
SILENCES: Final = "silences"
EXCHANGES: Final = "exchanges"


@dataclass(slots=True)
class Documents:
    """JSON documents of the admin API from which a view makes its table."""

    summary: Document = field(default_factory=dict)
    """Answer of `/api/v1/summary`."""
    details: dict[str, Document] = field(default_factory=dict)
    """By path: answer of the API. The summary is not among these."""


@dataclass(frozen=True, slots=True)
class View:
    """Tab of `llmtap top`: the documents that it needs, and the function that makes its table."""

    name: str
    title: str
    table: Callable[[Documents], ViewTable]
    by: str = "none"
    """Labels by which the summary must be split: value of the parameter `by` of the API."""
    path: str | None = None
    """Path of a document that the view needs in addition to the summary."""
    query: Mapping[str, str] = field(default_factory=dict)
    shows_exchanges: bool = False
    """Whether the rows are exchanges, so that the user can open the events of one."""


def _percentile_column(key: str, title: str, metric: str, statistic: str) -> Column:
    return column_of(key, title, partial(figure_cell, statistic=statistic), "metrics", metric)


def _failed_cell(part: object) -> Cell:
    outcomes = at(part, "outcomes")
    return count_cell(outcomes and sum(n for name, n in outcomes.items() if name in FAILED))


_FIGURES: Final = (
    column_of("n", "\nn", count_cell, "n"),
    column_of("rps", "\nreq/s", number_cell, "load", "achieved_rps"),
    _percentile_column("ttft_p50", "TTFT\np50", "ttft", "p50"),
    _percentile_column("ttft_p99", "TTFT\np99", "ttft", "p99"),
    _percentile_column("itl_p50", "ITL\np50", "itl", "p50"),
    _percentile_column("itl_p99", "ITL\np99", "itl", "p99"),
    _percentile_column("idle_p99", "idle\np99", "user_idle", "p99"),
    column_of("good", "SLO\nmet", share_cell, "goodput", "attainment"),
    column_of("smooth", "smooth\ntok/s", number_cell, "smooth_goodput", "tokens_per_second"),
    Column("failed", "\nfail", _failed_cell),
    column_of("refused", "re-\nfused", count_cell, "refusals", "n"),
    column_of("output", "output\ntok/s", number_cell, "tokens", "output_per_second"),
)


def _series_table(documents: Documents, label: str) -> ViewTable:
    summary = documents.summary
    columns = (text_column("name", f"\n{label}", "name"), *_FIGURES)
    parts = at(summary, "by", label) or {}
    rows = [row_of(name, columns, {"name": name, **part}) for name, part in parts.items()]
    return ViewTable(columns, sort_rows(rows, 1, largest_first=True), (_caption_text(summary),))


def _arms_table(documents: Documents) -> ViewTable:
    table = _series_table(documents, "arm")
    if EXPERIMENT not in documents.details:
        return table
    lines = (visible_text(line, 400) for line in experiment_lines(documents.details[EXPERIMENT]))
    return ViewTable(table.columns, table.rows, (*lines, *(table.notes if table.rows else ())))


def _caption_text(summary: Mapping[str, Any]) -> str:
    speed = at(summary, "smooth_goodput", "speed_tokens_per_second")
    reader = "several speeds" if speed is None else f"{speed:g} tok/s"
    option, window = at(summary, "metrics", "itl", "option"), at(summary, "window", "name")
    return (
        f"ms, window {visible_text(window)}; ITL ({visible_text(option)}); idle: reader of {reader};"
        " * fewer than ten samples beyond it"
    )


def _arrival_cell(x: Any) -> Cell:
    try:
        wall_s = datetime.fromisoformat(str(x.get("arrival"))).timestamp()
    except (ValueError, OverflowError):
        return Cell(NOTHING)
    return Cell(clock_time(wall_s), wall_s)


def _token_time_column(key: str, title: str) -> Column:
    """Return a column of a time between tokens, which is empty for answers that are not streams."""
    return Column(key, title, lambda x: ms_cell(at(x, "metrics", key) if x.get("stream", True) else None))


_EXCHANGE_COLUMNS: Final = (
    Column("arrival", "\narrival", _arrival_cell, False),
    text_column("tenant", "\ntenant", "tenant"),
    text_column("model", "\nmodel", "model"),
    text_column("outcome", "\noutcome", "outcome"),
    _token_time_column("ttft", "TTFT\nms"),
    _token_time_column("tpot", "TPOT\nms"),
    column_of("idle", "idle\nms", ms_cell, "metrics", "user_idle"),
    column_of("e2e", "E2E\nms", ms_cell, "metrics", "e2e"),
    column_of("tokens", "\ntokens", count_cell, "tokens", "output"),
    column_of("status", "\nstatus", count_cell, "status"),
    text_column("path", "\npath", "path"),
    text_column("arm", "\narm", "arm"),
    text_column("refusal", "\nrefused by", "refusal", "kind"),
    text_column("finish", "\nfinish", "finish_reason"),
    text_column("id", "\nid", "id", chars=48),
)


def _exchanges_table(documents: Documents) -> ViewTable:
    exchanges = at(documents.details.get(EXCHANGES), "exchanges") or ()
    return ViewTable(_EXCHANGE_COLUMNS, [row_of(x.get("id"), _EXCHANGE_COLUMNS, x) for x in exchanges])


def _kinds_cell(part: Any) -> Cell:
    kinds = at(part, "refusals", "kinds") or {}
    return name_cell(", ".join(f"{kind} {n:,}" for kind, n in kinds.items()), 48)


_REFUSAL_COLUMNS: Final = (
    text_column("name", "\ntenant", "name"),
    column_of("n", "\nn", count_cell, "n"),
    column_of("refused", "re-\nfused", count_cell, "refusals", "n"),
    column_of("share", "\nshare", share_cell, "refusals", "share"),
    Column("kinds", "\nby whom", _kinds_cell, is_number=False),
    column_of("tokens_chunk", "tokens/\nchunk", number_cell, "chunking", "tokens_per_chunk_mean"),
    column_of("single", "single\ntoken", share_cell, "chunking", "single_token_share"),
    column_of("events_read", "events/\nread", number_cell, "chunking", "events_per_read"),
    column_of("bursts", "\nbursts", count_cell, "chunking", "bursts", "n"),
    column_of("held", "held\nms", ms_cell, "chunking", "bursts", "hold_max"),
    _percentile_column("tbc_p99", "TBC\np99", "tbc", "p99"),
)


def _refusals_table(documents: Documents) -> ViewTable:
    summary = documents.summary
    # Use an empty key for the row `all`, because a tenant can also be called `all`.
    rows = [row_of("", _REFUSAL_COLUMNS, {**summary, "name": "all"})] if "refusals" in summary else []
    for name, part in (at(summary, "by", "tenant") or {}).items():
        rows.append(row_of(f"tenant {name}", _REFUSAL_COLUMNS, {"name": name, **part}))
    note = "held: longest silence before a burst of events"
    return ViewTable(_REFUSAL_COLUMNS, rows, (f"{_caption_text(summary)}; {note}",))


TEXT_CHARS: Final = 160
Line = tuple[str, str, Cell, str]
"""Row of the view on llmtap itself: subject, name, value and description."""


def _tap_cell_of(index: int) -> Callable[[Line], Cell]:
    return lambda line: Cell(visible_text(line[index], TEXT_CHARS) if line[index] else "", str(line[index]))


_TAP_COLUMNS: Final = (
    Column("of", "\nof", _tap_cell_of(0), False),
    Column("what", "\nwhat", _tap_cell_of(1), False),
    Column("value", "\nvalue", lambda line: line[2]),
    Column("about", "\nabout", _tap_cell_of(3), False),
)
_POINTS: Final = {
    "request": "request: last byte read to last byte written",
    "first_chunk": "response: first read to its write",
    "chunk": "response: each read to its write",
}
_COUNTS: Final = {
    "opened": "exchanges started",
    "measured": "acknowledged by the meter",
    "unsettled": "running, or not acknowledged yet",
    "connections": "open client connections",
    "streams": "responses in progress",
    "refused": "rejected connections",
}


def _tap_table(documents: Documents) -> ViewTable:
    rows = [row_of(f"{line[0]}/{line[1]}", _TAP_COLUMNS, line) for line in _tap_lines(documents.summary)]
    note = "added: latency added by llmtap, in ms; lag: delay of its event loops"
    return ViewTable(_TAP_COLUMNS, rows, (note,))


def _tap_lines(summary: Mapping[str, Any]) -> Iterator[Line]:
    for point, about in _POINTS.items():
        figures = at(summary, "added", point)
        for statistic in ("p50", "p99", "max"):
            about_ = f"ms; {about}; n {at(figures, 'n') or 0:,}"
            yield "added", f"{point.replace('_', ' ')} {statistic}", figure_cell(figures, statistic), about_
    yield "stamps", "uncertainty", ms_cell(summary.get("uncertainty")), "ms; largest error of a token's time"
    uncertain, limit = at(summary, "uncertain", "n"), at(summary, "uncertain", "limit")
    yield "stamps", "uncertain", count_cell(uncertain), f"exchanges above {milliseconds(limit)} ms"
    yield "loops", "lag max", ms_cell(at(summary, "window", "lag_max")), "ms; of any relay in the window"
    relays = summary.get("relays") or {}
    ended = [name for name, relay in relays.items() if _has_ended(relay)]
    for name, relay in relays.items():
        for part, value, about in () if name in ended else _relay_lines(relay):
            yield f"{at(relay, 'vantage') or 'relay'} {name}", part, value, about
    if ended:
        measured = sum(relays[name]["measured"] for name in ended)
        yield "relays", "ended", count_cell(len(ended)), f"not listed; {measured:,} measured exchanges"
    for kind, n in (summary.get("meter_errors") or {}).items():
        yield "meter", f"errors: {kind}", count_cell(n), "exchanges or values not measured"
    for name, value in (summary.get("capture") or {}).items():
        if isinstance(value, int | float | str) and value != "":
            yield "capture", name, Cell(visible_text(value, TEXT_CHARS), str(value)), ""


def _has_ended(relay: Mapping[str, Any]) -> bool:
    """Return whether a relay ended in order, as after a reload: all its exchanges were measured."""
    is_known = not relay.get("connected") and "opened" in relay
    return is_known and not relay.get("lost") and not any(relay["dropped"].values())


def _relay_lines(relay: Mapping[str, Any]) -> Iterator[tuple[str, Cell, str]]:
    connected, age = relay.get("connected"), relay.get("status_age")
    spoke = "no report yet" if age is None else f"reported {age:.1f} s ago"
    clock = f"{relay.get('clock') or '?'} clock, pid {relay.get('pid') or '?'}"
    yield "state", Cell("connected" if connected else "GONE", str(connected)), f"{spoke}; {clock}"
    if lost := relay.get("lost"):
        yield "lost", count_cell(lost), f"counted as tap_error: {relay.get('lost_reason') or ''}"
    for name, about in _COUNTS.items():
        if (n := relay.get(name)) is not None:
            yield name, count_cell(sum(n.values()) if isinstance(n, Mapping) else n), about
    for kind, n in (relay.get("packets") or {}).items():
        yield f"packets {kind}", count_cell(n), "lost: the kernel had no room for them"
    for kind, n in (relay.get("watched") or {}).items():
        yield f"watched {kind}", count_cell(n), "connections, by kind"
    if (missing := relay.get("missing_bytes")) is not None:
        about = f"bytes in no packet; side: {relay.get('side') or 'unknown'}"
        yield "missing", Cell(format_bytes(missing), missing), about
    for name, none in (("dropped", "no exchange dropped"), ("skipped", "no request that is not inference")):
        if (counts := relay.get(name)) is not None:
            reasons = ", ".join(f"{reason} {n:,}" for reason, n in counts.items() if n)
            yield name, count_cell(sum(counts.values())), reasons or none
    for url, up in (relay.get("upstreams") or {}).items():
        age = at(relay, "upstream_ages", url)
        when = "" if age is None else f", {age:.0f} s ago"
        yield f"upstream {url}", Cell("up" if up else "DOWN", str(up)), f"at the latest connection{when}"
    yield "lag max", ms_cell(relay.get("lag_max")), "ms; since its last report"
    if (pending := relay.get("tap_pending_bytes")) is not None:
        yield "pending", Cell(format_bytes(pending), pending), "queued for the meter"
    if (rss := relay.get("rss_bytes")) is not None:
        yield (
            "memory",
            Cell(format_bytes(rss), rss),
            f"resident; {number(relay.get('cpu'), 3)} s of CPU so far",
        )


_ALARM_COLUMNS: Final = (
    text_column("class", "\nclass", "class"),
    text_column("state", "\nstate", "state", chars=40),
    text_column("severity", "\nseverity", "severity"),
    column_of("limit", "\nlimit", number_cell, "burn_rate"),
    text_column("long", "burn rate,\nlong window", "long_rate", chars=40),
    text_column("short", "burn rate,\nshort window", "short_rate", chars=40),
    column_of("counted", "counted,\nlong window", count_cell, "counted"),
    column_of("not_judged", "not judged,\nlong window", count_cell, "not_judged"),
    column_of("own_faults", "own faults,\nlong window", count_cell, "own_faults"),
    text_column("objectives", "\nobjectives", "objectives", chars=TEXT_CHARS),
    column_of("target", "\ntarget", share_cell, "target"),
)


def _slo_table(documents: Documents) -> ViewTable:
    """Return a row for each burn-rate alarm of each class of tenants; firing alarms first."""
    rows = []
    for name, slo, alarm, long, short in alarms(documents.summary):
        counted = at(slo, "windows", alarm["long"], "counted")
        if alarm["ringing"]:
            state = "FIRING"
        elif not alarm["reachable"]:
            state = "cannot fire at this target"
        elif counted < alarm["events_min"]:
            state = f"quiet until {alarm['events_min']:,} counted"
        else:
            state = "quiet"
        values = {
            **slo,
            **alarm,
            "class": name,
            "state": state,
            "long_rate": long,
            "short_rate": short,
            "counted": counted,
            **{name: at(slo, "windows", alarm["long"], name) for name in UNCOUNTED},
        }
        rows.append(row_of(f"{name} {alarm['long']}", _ALARM_COLUMNS, values))
    rows.sort(key=lambda row: row.cells[1].text != "FIRING")
    note = "burn rate 1 uses exactly the error budget; an alarm fires if both windows are above its limit"
    none = "no class of tenants has objectives: [slo.NAME] in the configuration"
    return ViewTable(_ALARM_COLUMNS, rows, (note if rows else none,))


def _table_of_document(
    documents: Documents, path: str, table: Callable[[Mapping[str, Any]], ViewTable]
) -> ViewTable:
    return table(documents.details.get(path) or {})


_NEWEST: Final = {"limit": "200"}
VIEWS: Final = (
    View("tenants", "Tenants", partial(_series_table, label="tenant"), by="tenant"),
    View("models", "Models", partial(_series_table, label="model"), by="model"),
    View("arms", "Arms", _arms_table, by="arm", path=EXPERIMENT),
    View(
        "streams",
        "Streams",
        partial(_table_of_document, path=STREAMS, table=streams_table),
        path=STREAMS,
        query=_NEWEST,
    ),
    View("exchanges", "Exchanges", _exchanges_table, path=EXCHANGES, query=_NEWEST, shows_exchanges=True),
    View("refusals", "Refusals", _refusals_table, by="tenant"),
    View("tap", "Tap", _tap_table),
    View("slo", "SLO", _slo_table),
    View(
        "silences",
        "Silent",
        partial(_table_of_document, path=SILENCES, table=silences_table),
        path=SILENCES,
        query=_NEWEST,
    ),
)

EVENTS_MAX: Final = 1_000
"""Maximum number of events of one exchange that are shown."""
OUTPUT_CLASSES: Final = frozenset({"content", "tool_call", "reasoning", "refusal"})


def reader_ns_per_token(summary: Mapping[str, Any]) -> int:
    """Return the time in ns that the meter's assumed reader needs for a token; default: 20 tokens/s."""
    speed = at(summary, "smooth_goodput", "speed_tokens_per_second")
    return round(1e9 / speed) if speed else READER_NS_PER_TOKEN


_EVENT_COLUMNS: Final = (
    column_of("i", "\n#", count_cell, "i"),
    column_of("t", "since\nsubmit ms", ms_cell, "since"),
    column_of("gap", "gap\nms", ms_cell, "gap"),
    text_column("class", "\nclass", "class"),
    Column("tokens", "\ntokens", lambda event: event["tokens"]),
    column_of("bytes", "\nbytes", count_cell, "bytes"),
    column_of("due", "needed\nat ms", ms_cell, "due"),
    Column("reader", "\nreader", lambda event: text_cell(event["reader"]), is_number=False),
)


def event_table(x: Mapping[str, Any], v_ns: int = READER_NS_PER_TOKEN) -> ViewTable:
    """Return the table of the events of an exchange (JSON of `/api/v1/exchanges`).

    `v_ns`: time in ns that the assumed reader needs for a token.
    """
    events, submit = x.get("events") or [], at(x, "timeline", "submit")
    origin_ns, first = _seconds_to_ns(submit or 0), at(x, "timeline", "first_token")
    due_ns: dict[int, int] = {}
    if submit is not None and first is not None:
        places = [i for i, e in enumerate(events) if e["class"] in OUTPUT_CLASSES and e["t"] >= first]
        due_ns = dict(zip(places, _due_times_ns(x, [events[i] for i in places], v_ns), strict=False))
    by_chunks = at(x, "tokens", "source") == "chunks"
    rows, waited_ns, before = [], 0, None
    for i, event in enumerate(events[:EVENTS_MAX]):
        since_ns, tokens = _seconds_to_ns(event["t"]) - origin_ns, count_cell(event["tokens"])
        values = {**event, "i": i, "since": since_ns / 1e9, "reader": ""}
        values["gap"] = None if before is None else event["t"] - before
        before = event["t"]
        if i in due_ns:
            needed_ns = due_ns[i] + waited_ns
            waited_ns += max(0, since_ns - needed_ns)
            values |= {"due": needed_ns / 1e9, "reader": _reader_text(needed_ns - since_ns)}
            if by_chunks and event["tokens"] is None:
                tokens = Cell("~1", 1)
        rows.append(row_of(i, _EVENT_COLUMNS, values | {"tokens": tokens}))
    reader = f"a reader of {1e9 / v_ns:g} tokens/s, from submit on"
    notes = [reader if submit is not None else "never submitted"]
    if len(events) > EVENTS_MAX:
        notes.append(f"the first {EVENTS_MAX:,} of {len(events):,} events")
    if by_chunks:
        notes.append("~1: no token count declared, counts as one")
    return ViewTable(_EVENT_COLUMNS, rows, ("; ".join(notes),))


def _due_times_ns(x: Mapping[str, Any], output: Sequence[Mapping[str, Any]], v_ns: int) -> Iterator[int]:
    """Return for each event with output when the reader needs it, in ns after the first token.

    This follows from the number of tokens before the event: as the server declares it, or estimated from the
    mean tokens per event. For the mean, reasoning that was not sent is subtracted from the provider's total.
    """
    sizes = [event["tokens"] for event in output]
    if sizes and None not in sizes and any(sizes):
        return (v_ns * read for read in accumulate(sizes, initial=0))
    total, hidden, pace = at(x, "tokens", "output"), at(x, "tokens", "reasoning"), 1.0
    if total is not None and output and at(x, "tokens", "source") not in ("none", "chunks"):
        if hidden and not any(event["class"] == "reasoning" for event in output):
            total = max(0, total - hidden)
        pace = max(1.0, total / len(output))
    return (round(v_ns * pace) * i for i in range(len(output)))


def _reader_text(ahead_ns: int) -> str:
    if ahead_ns < 0:
        return f"WAITS {milliseconds(-ahead_ns / 1e9)} ms"
    return f"{milliseconds(ahead_ns / 1e9)} ms ahead" if ahead_ns else "just in time"


def _seconds_to_ns(seconds: float) -> int:
    return round(seconds * 1e9)


def fact_lines(x: Mapping[str, Any]) -> Iterator[str]:
    """Yield the facts about one exchange (JSON of `/api/v1/exchanges`) for the header of its events."""
    yield f"{visible_text(x.get('id'))}: {visible_text(x.get('outcome'))}"
    yield f"{visible_text(x.get('method'))} {visible_text(x.get('path'), 60)} {visible_text(x.get('status'))}"
    for name in ("tenant", "model", "arm", "dialect", "finish_reason"):
        if x.get(name) is not None:
            yield f"{name.replace('_', ' ')} {visible_text(x[name])}"
    metrics = x.get("metrics") or {}
    whole = not x.get("stream", True)
    for metric in shown_on(Surface.FACTS):
        value = metrics.get(metric.name)
        if value is not None and not (whole and metric.answers is Answers.STREAMS):
            is_time = metric.unit is Unit.SECONDS
            yield f"{metric.title} {milliseconds(value)} ms" if is_time else f"{metric.title} {value:.3g}"
    output, source = at(x, "tokens", "output"), at(x, "tokens", "source")
    if output is not None:
        yield f"{output:,} output tokens by {visible_text(source)}"
    for name in ("refusal", "guardrail"):
        verdict = x.get(name)
        if isinstance(verdict, Mapping):
            kind = verdict.get("kind") or verdict.get("action")
            by = verdict.get("source") or verdict.get("signal")
            yield f"{name}: {visible_text(kind)} by {visible_text(by)}"
    if x.get("error") is not None:
        yield f"error: {visible_text(x['error'], 120)}"
    added = at(x, "added", "chunk_max")
    if added is not None:
        yield f"added by the tap at most {milliseconds(added)} ms a chunk"
    if holds := x.get("held"):
        yield f"held by the client {milliseconds(x.get('paused'))} ms"
        for name, title in (("tbc_max", "longest pause"), ("tpot", "TPOT")):
            delivered, server = (
                milliseconds(holds.get(f"{name}_{side}")) for side in ("delivered", "server")
            )
            yield f"{title} delivered {delivered} ms, of the server alone at least {server} ms"
    if x.get("trace_url") is not None:
        yield f"trace {printable(x['trace_url'])}"
    if x.get("uncertainty") is not None:
        yield f"uncertainty {milliseconds(x['uncertainty'])} ms"
