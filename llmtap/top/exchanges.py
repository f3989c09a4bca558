"""The newest exchanges, and what refused and how answers were cut."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from llmtap.top.series import caption
from llmtap.top.table import (
    Cell,
    Column,
    Row,
    Table,
    at,
    clock_time,
    count_cell,
    figure_cell,
    ms_cell,
    name_cell,
    name_chars,
    number_cell,
    share_cell,
    unique,
)
from llmtap.top.view import Shown

__all__ = ["EXCHANGES", "exchanges_table", "refusals_table"]

EXCHANGES: Final = "exchanges"
ALL: Final = "all"
_COLUMNS: Final = (
    Column("arrival", "\narrival", number=False), Column("tenant", "\ntenant", number=False),
    Column("model", "\nmodel", number=False), Column("outcome", "\noutcome", number=False),
    Column("ttft", "TTFT\nms"), Column("tpot", "TPOT\nms"), Column("idle", "idle\nms"),
    Column("e2e", "E2E\nms"), Column("tokens", "output\ntokens"), Column("status", "\nstatus"),
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


def exchanges_table(documents: Shown, width: int) -> Table:
    found = at(documents.beside.get(EXCHANGES), "exchanges")
    rows = [_row(x, width) for x in found or () if isinstance(x, dict)]
    return Table(_COLUMNS, unique(rows))


def _row(x: dict[str, Any], width: int) -> Row:
    chars = name_chars(width) - 4
    return Row(
        str(x.get("id")),
        (
            _arrival(x.get("arrival")), name_cell(x.get("tenant"), chars), name_cell(x.get("model"), chars),
            name_cell(x.get("outcome")), ms_cell(at(x, "metrics", "ttft")), ms_cell(at(x, "metrics", "tpot")),
            ms_cell(at(x, "metrics", "user_idle")), ms_cell(at(x, "metrics", "e2e")),
            count_cell(at(x, "tokens", "output")), Cell(*_status(x.get("status"))),
            name_cell(x.get("arm"), chars), name_cell(at(x, "refusal", "kind")),
            name_cell(x.get("finish_reason")), name_cell(x.get("id")),
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


def refusals_table(documents: Shown, width: int) -> Table:
    """Of all, and of each tenant."""
    summary = documents.summary
    parts = at(summary, "by", "tenant")
    # A tenant may be called `all`, too.
    rows = [_cut_row("", Cell(ALL, ""), summary)] if "refusals" in summary else []
    for name, part in parts.items() if isinstance(parts, Mapping) else ():
        rows.append(_cut_row(f"tenant {name}", name_cell(name, name_chars(width)), part))
    held = "held: longest silence before a burst of events"
    return Table(_CUT_COLUMNS, rows, (f"{caption(summary)}; {held}",))


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
