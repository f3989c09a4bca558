"""Streams under way, newest first, each with its tokens over time."""

from collections.abc import Sequence
from math import ceil
from typing import Any, Final

from llmtap.top.table import (
    Cell,
    Column,
    Row,
    Table,
    count_cell,
    ms_cell,
    name_cell,
    name_chars,
    number_cell,
    unique,
)
from llmtap.top.view import Shown

__all__ = ["STREAMS", "sparkline", "streams_table"]

STREAMS: Final = "streams"
OLDER: Final = "this tap is older: it does not tell of streams under way (no /api/v1/streams)"
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


def streams_table(documents: Shown, width: int) -> Table:
    told = documents.beside.get(STREAMS, {})
    if told is None:
        return Table(_COLUMNS, [], (OLDER,))
    streams, window = told.get("streams"), told.get("window")
    rows = unique(_row(one, width, window) for one in streams or () if isinstance(one, dict))
    count = told.get("count")
    notes = []
    if isinstance(count, int):
        said = f"{count:,} stream{'' if count == 1 else 's'} under way"
        notes.append(said + (f", the {len(rows):,} newest below" if count > len(rows) else ""))
    if isinstance(window, int | float):
        notes.append(f"tokens over the last {window:g} s, each line by its own largest; {SILENT} no token")
    return Table(_COLUMNS, rows, ("; ".join(notes),) if notes else ())


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
    """Tokens in each of `cells` equal parts of the time from `since` to `until`, by the largest of them.

    `timeline` has `[t, tokens]`, in seconds; where tokens are not known an event counts as one.
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
