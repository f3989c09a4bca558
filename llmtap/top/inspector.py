"""Make the table of one exchange's events: time, deadline and wait of the reader for each event.

The input is the JSON of an exchange (`/api/v1/exchanges`, `inspected`) or of one that still runs
(`/api/v1/streams`, `watched`); the output is a `ViewTable`, and lines about the exchange (`story`).
`EventScreen` of `app.py` shows them. The waits add up to the user idle latency (smooth goodput paper, eq. 4
and 6).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from llmtap.metrics.deadlines import READER_NS_PER_TOKEN
from llmtap.report.values import milliseconds
from llmtap.top.table import (
    NOTHING,
    Cell,
    Column,
    Row,
    ViewTable,
    at,
    count_cell,
    ms_cell,
    number_cell,
    shown,
)

EVENTS_MAX: Final = 1_000
"""Maximum number of rows of one exchange."""
OUTPUT: Final = frozenset({"content", "tool_call", "reasoning", "refusal"})
_COUNTED_BY_CHUNKS: Final = frozenset({"none", "chunks"})
_COLUMNS: Final = (
    Column("i", "\n#"), Column("t", "since\nsubmit ms"), Column("gap", "gap\nms"),
    Column("class", "\nclass", number=False), Column("tokens", "\ntokens"), Column("bytes", "\nbytes"),
    Column("due", "needed\nat ms"), Column("reader", "\nreader", number=False),
)  # fmt: skip


_SO_FAR: Final = (
    Column("t", "since\narrival ms"), Column("gap", "gap\nms"), Column("tokens", "\ntokens"),
    Column("due", "needed\nat ms"), Column("reader", "\nreader", number=False),
)  # fmt: skip
TOKENS: Final = 4


def reader_ns(summary: Mapping[str, Any]) -> int:
    """Return V (ns per token) of the reader of the meter; of 20 tokens/s if it reports none."""
    speed = at(summary, "smooth_goodput", "speed_tokens_per_second")
    return round(1e9 / speed) if isinstance(speed, int | float) and speed > 0 else READER_NS_PER_TOKEN


@dataclass(frozen=True, slots=True)
class _Reading:
    needed_ns: int
    ahead_ns: int


def inspected(x: Mapping[str, Any], v_ns: int = READER_NS_PER_TOKEN) -> ViewTable:
    events = [event for event in x.get("events") or () if isinstance(event, Mapping)]
    submit = at(x, "timeline", "submit")
    origin_ns = _ns(submit) if submit is not None else 0
    readings = _readings(x, events, origin_ns, v_ns) if submit is not None else {}
    by_chunks = at(x, "tokens", "source") == "chunks"
    rows: list[Row] = []
    before: float | None = None
    for i, event in enumerate(events[:EVENTS_MAX]):
        t, reading, tokens = event.get("t"), readings.get(i), count_cell(event.get("tokens"))
        if by_chunks and tokens.value is None and reading is not None:
            tokens = Cell("~1", 1)
        gap = None if before is None or t is None else t - before
        before = t if t is not None else before
        rows.append(
            Row(
                str(i),
                (
                    Cell(str(i), i), ms_cell(None if t is None else t - origin_ns / 1e9), ms_cell(gap),
                    Cell(shown(event.get("class"))), tokens,
                    count_cell(event.get("bytes")),
                    ms_cell(None if reading is None else reading.needed_ns / 1e9), Cell(_reader(reading)),
                ),
            )
        )  # fmt: skip
    notes = [f"a reader of {1e9 / v_ns:g} tokens/s, from submit on"]
    if submit is None:
        notes = ["never submitted"]
    elif len(events) > EVENTS_MAX:
        notes.append(f"the first {EVENTS_MAX:,} of {len(events):,} events")
    columns: tuple[Column, ...] = _COLUMNS
    if any(row.cells[TOKENS].text != NOTHING for row in rows):
        if any(row.cells[TOKENS].text == "~1" for row in rows):
            notes.append("~1: no token count declared, counts as one")
    else:
        columns = _COLUMNS[:TOKENS] + _COLUMNS[TOKENS + 1 :]
        rows = [Row(row.key, row.cells[:TOKENS] + row.cells[TOKENS + 1 :]) for row in rows]
        notes.append("no event declares its tokens")
    return ViewTable(columns, rows, ("; ".join(notes),))


def watched(told: Mapping[str, Any], v_ns: int = READER_NS_PER_TOKEN) -> ViewTable:
    """Return the table of a running exchange from `/api/v1/streams`, newest first.

    v_ns: ns per token of the reader. Output before the timeline is one row. Classes and bytes are known at
    the end only.
    """
    events, readings = _so_far(told, v_ns)
    rows: list[Row] = []
    of_read = 0
    for i, event in enumerate(events):
        reading = readings[i]
        of_read = of_read + 1 if i and event["t"] == events[i - 1]["t"] else 0
        gap = event["t"] - events[i - 1]["t"] if i else None
        rows.append(
            Row(
                f"{event['t']} {of_read}",  # the place among all would change while the oldest become one
                (
                    ms_cell(event["t"]), ms_cell(gap), count_cell(event["tokens"]),
                    ms_cell(reading.needed_ns / 1e9), Cell(_reader(reading)),
                ),
            )
        )  # fmt: skip
    reader = f"a reader of {1e9 / v_ns:g} tokens/s, from arrival on"
    return ViewTable(
        _SO_FAR, rows[::-1], (f"{reader}; newest first; what came before the last minute is one",)
    )


def story_so_far(told: Mapping[str, Any], v_ns: int = READER_NS_PER_TOKEN) -> Iterator[str]:
    yield f"{shown(told.get('id'))}: UNDER WAY, {number_cell(told.get('age')).text} s old"
    for name in ("tenant", "model", "arm", "dialect"):
        if told.get(name) is not None:
            yield f"{name} {shown(told[name])}"
    if told.get("ttft") is not None:
        yield f"TTFT {milliseconds(told['ttft'])} ms"
    tokens, count = count_cell(told.get("tokens")).text, count_cell(told.get("events")).text
    yield f"{tokens} tokens in {count} events so far"
    if told.get("since_last") is not None:
        yield f"silent for {milliseconds(told['since_last'])} ms"
    events, readings = _so_far(told, v_ns)
    age = told.get("age")
    if not events or not isinstance(age, int | float):
        return
    last, reading = events[-1], readings[len(events) - 1]
    free_ns = max(reading.needed_ns, _ns(last["t"])) + v_ns * (last["tokens"] or 1)
    left_s = free_ns / 1e9 - age
    if left_s > 0:
        yield f"the reader has {milliseconds(left_s)} ms to read"
    else:
        yield f"the reader WAITS, {milliseconds(-left_s)} ms by now"


def _so_far(told: Mapping[str, Any], v_ns: int) -> tuple[list[dict[str, Any]], dict[int, _Reading]]:
    points = [p for p in told.get("timeline") or () if isinstance(p, list) and len(p) == 2]
    events = [{"t": t, "tokens": n, "class": "content"} for t, n in points if isinstance(t, int | float)]
    ttft, tokens = told.get("ttft"), told.get("tokens")
    if ttft is not None and isinstance(tokens, int):
        earlier = tokens - sum(e["tokens"] for e in events if isinstance(e["tokens"], int))
        if earlier > 0:
            events.insert(0, {"t": ttft, "tokens": earlier, "class": "content"})
    if not events:
        return [], {}
    submitted = {"timeline": {"submit": 0.0, "first_token": events[0]["t"]}}
    return events, _readings(submitted, events, 0, v_ns)


def _readings(
    x: Mapping[str, Any], events: Sequence[Mapping[str, Any]], origin_ns: int, v_ns: int
) -> dict[int, _Reading]:
    first = at(x, "timeline", "first_token")
    if first is None:
        return {}
    places = [i for i, e in enumerate(events) if e.get("class") in OUTPUT and (e.get("t") or 0.0) >= first]
    readings: dict[int, _Reading] = {}
    waited_ns = 0
    for i, due_ns in zip(places, _due_ns(x, [events[i] for i in places], v_ns), strict=False):
        ahead_ns = due_ns + waited_ns - (_ns(events[i]["t"]) - origin_ns)
        readings[i] = _Reading(due_ns + waited_ns, ahead_ns)
        waited_ns += max(0, -ahead_ns)
    return readings


def _due_ns(x: Mapping[str, Any], output: Sequence[Mapping[str, Any]], v_ns: int) -> Iterator[int]:
    """Yield the deadline of each event since submit, by the tokens before it, known or on average."""
    declared = [e.get("tokens") for e in output]
    sizes = [n for n in declared if isinstance(n, int)]
    if len(sizes) == len(declared) and any(sizes):
        return (v_ns * read for read in accumulate(sizes, initial=0))
    total, pace = _streamed(x, output), 1.0
    if total is not None and output:
        pace = max(1.0, total / len(output))
    return (round(v_ns * pace) * i for i in range(len(output)))


def _streamed(x: Mapping[str, Any], output: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the tokens of all events: a provider's total includes reasoning that it may not have sent."""
    total, hidden = at(x, "tokens", "output"), at(x, "tokens", "reasoning")
    if not isinstance(total, int) or at(x, "tokens", "source") in _COUNTED_BY_CHUNKS:
        return None
    if isinstance(hidden, int) and not any(e.get("class") == "reasoning" for e in output):
        return max(0, total - hidden)
    return total


def _reader(reading: _Reading | None) -> str:
    if reading is None:
        return ""
    if reading.ahead_ns < 0:
        return f"WAITS {milliseconds(-reading.ahead_ns / 1e9)} ms"
    return f"{milliseconds(reading.ahead_ns / 1e9)} ms ahead" if reading.ahead_ns else "just in time"


def _ns(seconds: Any) -> int:
    return round(float(seconds) * 1e9)


def story(x: Mapping[str, Any]) -> Iterator[str]:
    yield f"{shown(x.get('id'))}: {shown(x.get('outcome'))}"
    yield f"{shown(x.get('method'))} {shown(x.get('path'), 60)} {shown(x.get('status'))}"
    for name in ("tenant", "model", "arm", "dialect", "finish_reason"):
        if x.get(name) is not None:
            yield f"{name.replace('_', ' ')} {shown(x[name])}"
    metrics = x.get("metrics") or {}
    whole = not x.get("stream", True)
    for name, title in (("ttft", "TTFT"), ("tpot", "TPOT"), ("e2e", "E2E"), ("user_idle", "user idle")):
        if metrics.get(name) is not None and not (whole and name in ("ttft", "tpot")):
            yield f"{title} {milliseconds(metrics[name])} ms"
    output, source = at(x, "tokens", "output"), at(x, "tokens", "source")
    if output is not None:
        yield f"{output:,} output tokens by {shown(source)}"
    for name in ("refusal", "guardrail"):
        told = x.get(name)
        if isinstance(told, Mapping):
            said = told.get("kind") or told.get("action")
            yield f"{name}: {shown(said)} by {shown(told.get('source') or told.get('signal'))}"
    if x.get("error") is not None:
        yield f"error: {shown(x['error'], 120)}"
    added = at(x, "added", "chunk_max")
    if added is not None:
        yield f"added by the tap at most {milliseconds(added)} ms a chunk"
    if x.get("uncertainty") is not None:
        yield f"uncertainty {milliseconds(x['uncertainty'])} ms"
