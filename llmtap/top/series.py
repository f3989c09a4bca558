"""Tenants, models and arms in a table: one line each, of the summary's window."""

from collections.abc import Mapping
from typing import Any, Final

from llmtap.report.experiment import experiment_lines
from llmtap.top.table import (
    Cell,
    Column,
    Row,
    Table,
    at,
    count_cell,
    figure_cell,
    name_cell,
    name_chars,
    number_cell,
    ordered,
    share_cell,
    shown,
)
from llmtap.top.view import Shown

__all__ = ["EXPERIMENT", "arms_table", "models_table", "tenants_table"]

EXPERIMENT: Final = "experiment"
"""Path of the document that arms are explained by."""
FINE: Final = frozenset({"complete", "refused", "client_cancelled"})
"""Outcomes that are nobody's failure; all others are the upstream's, or ours."""
_FIGURES: Final = (
    Column("n", "\nn"), Column("rps", "\nreq/s"),
    Column("ttft_p50", "TTFT\np50"), Column("ttft_p99", "TTFT\np99"),
    Column("itl_p50", "ITL\np50"), Column("itl_p99", "ITL\np99"), Column("idle_p99", "idle\np99"),
    Column("good", "SLO\nmet"), Column("smooth", "smooth\ntok/s"), Column("failed", "\nfail"),
    Column("refused", "re-\nfused"), Column("output", "output\ntok/s"),
)  # fmt: skip


def tenants_table(documents: Shown, width: int) -> Table:
    return _series(documents, width, "tenant")


def models_table(documents: Shown, width: int) -> Table:
    return _series(documents, width, "model")


def arms_table(documents: Shown, width: int) -> Table:
    """With what the experiment has come to above it."""
    table = _series(documents, width, "arm")
    if EXPERIMENT not in documents.beside:
        return table
    told = documents.beside[EXPERIMENT]
    lines = ("this tap does not tell of experiments",) if told is None else tuple(experiment_lines(told))
    return Table(table.columns, table.rows, tuple(shown(line, 400) for line in lines) + table.notes)


def _series(documents: Shown, width: int, label: str) -> Table:
    summary = documents.summary
    parts = at(summary, "by", label)
    rows = [
        Row(str(name), (name_cell(name, name_chars(width)), *_cells(part)))
        for name, part in (parts.items() if isinstance(parts, Mapping) else ())
    ]
    busiest = ordered(rows, 1, largest_first=True)
    return Table((Column("name", f"\n{label}", number=False), *_FIGURES), busiest, (caption(summary),))


def caption(summary: Mapping[str, Any]) -> str:
    """What figures of a table rest on."""
    option = at(summary, "metrics", "itl", "option")
    window = at(summary, "window", "name")
    return (
        f"ms, window {shown(window)}; ITL {shown(option)}; idle: reader of {reader(summary)};"
        " * p99 of < 1,000 samples"
    )


def reader(summary: Mapping[str, Any]) -> str:
    """Whose idle time is told."""
    speed = at(summary, "smooth_goodput", "speed_tokens_per_second")
    return f"{speed:g} tok/s" if isinstance(speed, int | float) else "several speeds"


def _cells(part: object) -> tuple[Cell, ...]:
    outcomes = at(part, "outcomes")
    failed = None
    if isinstance(outcomes, Mapping):
        failed = sum(n for name, n in outcomes.items() if name not in FINE and isinstance(n, int))
    return (
        count_cell(at(part, "n")), number_cell(at(part, "load", "achieved_rps")),
        figure_cell(at(part, "metrics", "ttft"), "p50"), figure_cell(at(part, "metrics", "ttft"), "p99"),
        figure_cell(at(part, "metrics", "itl"), "p50"), figure_cell(at(part, "metrics", "itl"), "p99"),
        figure_cell(at(part, "metrics", "user_idle"), "p99"), share_cell(at(part, "goodput", "attainment")),
        number_cell(at(part, "smooth_goodput", "tokens_per_second")), count_cell(failed),
        count_cell(at(part, "refusals", "n")), number_cell(at(part, "tokens", "output_per_second")),
    )  # fmt: skip
