"""Tables of the running streams for `llmtap top`: all of them, and those that are silent.

`streams_table` and `silences_table` take the JSON of `/api/v1/streams` and `/api/v1/silences`.
"""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any, Final

from llmtap.report.values import at
from llmtap.top.table import (
    NOTHING,
    Cell,
    Column,
    ViewTable,
    column_of,
    count_cell,
    ms_cell,
    number_cell,
    row_of,
    share_cell,
    text_column,
)

LEVELS: Final = "▁▂▃▄▅▆▇█"
"""Characters of a sparkline, from few tokens to many."""
SILENT: Final = "·"
"""Character of a sparkline for a part of the time in which no tokens arrived."""
SPARK_CELLS: Final = 24


def _sparkline_cell(stream: Any) -> Cell:
    """Return a sparkline of the tokens of a stream over the answer's window (its latest seconds)."""
    age, window = stream.get("age"), stream.get("window")
    if age is None or window is None:
        return Cell("")
    return Cell(sparkline(stream.get("timeline") or (), SPARK_CELLS, max(0.0, age - window), age))


def sparkline(timeline: Sequence[Any], cells: int, since: float, until: float) -> str:
    """Draw the time from `since` to `until` in `cells` equal parts, each as a bar of its number of tokens.

    The highest bar is that of the most tokens. `timeline` has pairs `[t, tokens]`, with t in seconds.
    """
    sums = [0.0] * cells
    for t, tokens in timeline:
        if since <= t <= until:
            sums[min(int((t - since) / ((until - since) or 1) * cells), cells - 1)] += tokens
    largest = max(sums)
    return "".join(LEVELS[ceil(n / largest * len(LEVELS)) - 1] if n > 0 else SILENT for n in sums)


_STREAM_COLUMNS: Final = (
    text_column("tenant", "\ntenant", "tenant"),
    text_column("model", "\nmodel", "model"),
    column_of("age", "age\ns", number_cell, "age"),
    column_of("ttft", "TTFT\nms", ms_cell, "ttft"),
    column_of("events", "\nevents", count_cell, "events"),
    column_of("tokens", "\ntokens", count_cell, "tokens"),
    column_of("silent", "silent\nms", ms_cell, "since_last"),
    Column("timeline", "\ntokens over time", _sparkline_cell, is_number=False),
    text_column("arm", "\narm", "arm"),
    text_column("dialect", "\ndialect", "dialect"),
    text_column("id", "\nid", "id"),
)


def streams_table(answer: Mapping[str, Any]) -> ViewTable:
    streams, window, count = answer.get("streams") or (), answer.get("window"), answer.get("count")
    rows = [row_of(one.get("id"), _STREAM_COLUMNS, {**one, "window": window}) for one in streams]
    if count is None:
        return ViewTable(_STREAM_COLUMNS, rows)
    newest = f", the {len(rows):,} newest below" if count > len(rows) else ""
    note = (
        f"{count:,} stream{'' if count == 1 else 's'} under way{newest}; tokens over the last {window:g} s,"
        f" each line by its own largest; {SILENT} no token"
    )
    return ViewTable(_STREAM_COLUMNS, rows, (note,))


_WAITS: Final = {"first_token": "first token", "next_token": "next token"}


def _past_cell(stream: Any) -> Cell:
    """Return how many of the model's finished streams went on after a silence of at least this length."""
    n, resumed, share = (at(stream, "past", name) for name in ("n", "resumed", "share"))
    if not n:
        return Cell(NOTHING)
    limits = " to ".join(share_cell(at(stream, "past", name)).text for name in ("low", "high"))
    estimate = "" if share is None else f", {share_cell(share).text} ({limits})"
    return Cell(f"{resumed:,} of {n:,}{estimate}", resumed / n)


_SILENCE_COLUMNS: Final = (
    text_column("tenant", "\ntenant", "tenant"),
    text_column("model", "\nmodel", "model"),
    column_of("silent", "silent\ns", number_cell, "silent"),
    Column("waits", "waits\nfor", lambda one: Cell(_WAITS.get(one.get("kind"), NOTHING)), is_number=False),
    column_of("read", "last\nbytes s", number_cell, "since_read"),
    Column("past", "went on after\nas long a silence", _past_cell, is_number=False),
    column_of("tokens", "\ntokens", count_cell, "tokens"),
    column_of("age", "age\ns", number_cell, "age"),
    text_column("upstream", "\nupstream", "upstream"),
    text_column("arm", "\narm", "arm"),
    text_column("id", "\nid", "id"),
)


def silences_table(answer: Mapping[str, Any]) -> ViewTable:
    streams, count, threshold = answer.get("streams") or (), answer.get("count"), answer.get("threshold")
    rows = [row_of(one.get("id"), _SILENCE_COLUMNS, one) for one in streams]
    if count is None or threshold is None:
        return ViewTable(_SILENCE_COLUMNS, rows)
    not_judged = answer.get("not_judged") or 0
    unread = f", {not_judged:,} not judged: answers not understood" if not_judged else ""
    note = (
        f"{count:,} of {answer.get('running') or 0:,} running streams sent no token for {threshold:g} s or"
        f" longer{unread}; went on: silences of finished streams of the model, share with 95 % interval"
    )
    return ViewTable(_SILENCE_COLUMNS, rows, (note,))
