"""A replay's figures as rows of texts: the same for its page and for Markdown.

Takes the public JSON (`llmtap replay --json`); what is missing, or of nothing, is left out.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from llmtap.metrics.statistics import SAMPLES_MIN
from llmtap.report.figures import MARK
from llmtap.report.sweep import number
from llmtap.report.terminal import milliseconds
from llmtap.units import format_share

__all__ = ["FEW", "FIGURE_HEADS", "Row", "at", "experience_rows", "latency_rows", "outcome_rows"]

Row = tuple[str, list[str]]
"""What stands before a row, and its cells."""
FEW: Final = (
    f"{MARK} p99 of fewer than {SAMPLES_MIN['p99']:,} samples, or p99.9 of fewer than"
    f" {SAMPLES_MIN['p999']:,} (IETF 5.1.4.3)"
)
"""What a marked cell means."""
_FIGURES: Final = {
    "mean": "mean", "p50": "p50", "p90": "p90", "p95": "p95", "p99": "p99", "p999": "p99.9", "max": "max",
}  # fmt: skip
FIGURE_HEADS: Final = ("", "n", *_FIGURES.values())
"""Of latencies and of what readers had."""
_LATENCIES: Final = (
    ("TTFT", ("metrics", "ttft")), ("TTFT, from schedule", ("corrected", "ttft")),
    ("TTFT, any token", ("metrics", "ttft_any")), ("TTFT, reasoning", ("metrics", "ttft_reasoning")),
    ("TTFT, tool call", ("metrics", "ttft_tool_call")), ("TTFB", ("metrics", "ttfb")),
    ("TBC", ("metrics", "tbc")), ("ITL", ("metrics", "itl")), ("ITL, server", ("metrics", "itl_server")),
    ("TPOT", ("metrics", "tpot")), ("E2E", ("metrics", "e2e")),
    ("E2E, from schedule", ("corrected", "e2e")), ("user idle", ("metrics", "user_idle")),
    ("user idle, from schedule", ("corrected", "user_idle")), ("longest pause", ("metrics", "tbc_max")),
    ("jitter", ("metrics", "jitter")), ("dispatch lateness", ("dispatch_lateness",)),
)  # fmt: skip
_SHARES: Final = {
    "fluidity_index_doc": "fluidity index, document", "fluidity_index_code": "fluidity index, code",
    "qoe_area_step": "area ratio", "smooth_benefit": "smooth benefit, tokens",
}  # fmt: skip


def latency_rows(result: Mapping[str, Any]) -> list[Row]:
    """Cells as FIGURE_HEADS; ms, marked where too few samples carry them."""
    rows: list[Row] = []
    for title, place in _LATENCIES:
        figures = at(result, place)
        if figures.get("n"):
            option = figures.get("option")
            cells = [_marked(figures, name, milliseconds(figures.get(name))) for name in _FIGURES]
            rows.append((f"{title} (option {option})" if option else title, [f"{figures['n']:,}", *cells]))
    return rows


def experience_rows(result: Mapping[str, Any]) -> list[Row]:
    """What readers had of the answers; cells as FIGURE_HEADS."""
    rows: list[Row] = []
    for name, title in _SHARES.items():
        figures = at(result, ("metrics", name))
        if figures.get("n"):
            cells = [_marked(figures, f, number(figures.get(f))) for f in _FIGURES]
            rows.append((title, [f"{figures['n']:,}", *cells]))
    return rows


def outcome_rows(counts: Mapping[str, int], whole: int) -> list[Row]:
    """How many, and which part of the whole."""
    return [(name, [f"{n:,}", format_share(n, whole) if whole else "-"]) for name, n in counts.items()]


def at(result: Mapping[str, Any], place: Sequence[str]) -> Mapping[str, Any]:
    """The part of a result that lies there; empty where there is none."""
    found: Any = result
    for name in place:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _marked(figures: Mapping[str, Any], name: str, text: str) -> str:
    return text + (MARK if name in (figures.get("marks") or ()) and text != "-" else "")
