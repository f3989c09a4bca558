"""What an experiment has come to: its arms in a table; in lines its state, its split, and the differences
that stand.

Takes the public JSON of `/api/v1/experiment`. A difference stands when its p, right at every look, is below
the risk divided by the number of comparisons; all others are left out, because among so many some look large
by chance.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rich.table import Table

from llmtap.metrics.experiment import FIRST_LOOK
from llmtap.report.terminal import figure_text, milliseconds, number_text

__all__ = ["arms_table", "experiment_lines"]

_PLAIN: Final = frozenset({"tokens_per_chunk", "output_tokens"})
_SHARES: Final = frozenset({"refused", "failed", "cancelled"})
_NAMES: Final = {
    "ttft": "TTFT", "ttft_any": "TTFT of any token", "tpot": "TPOT", "tbc": "TBC", "itl": "ITL",
    "tbc_max": "longest pause", "user_idle": "user idle latency", "e2e": "E2E",
    "tokens_per_chunk": "tokens per chunk", "output_tokens": "output tokens", "refused": "share refused",
    "failed": "share failed", "cancelled": "share cancelled",
}  # fmt: skip
_COLUMNS: Final = (
    ("ttft", "p50", "TTFT p50"), ("ttft", "p95", "p95"), ("tbc", "p50", "TBC p50"), ("tbc", "p95", "p95"),
    ("tbc_max", "p50", "longest pause p50"), ("e2e", "p50", "E2E p50"),
)  # fmt: skip
_BURSTY: Final = 2.0
"""Times as many chunks a read as in the control, from where on it is said."""


def experiment_lines(told: Mapping[str, Any]) -> list[str]:
    """One line each; the first says what runs, the last whether more has to be seen."""
    if told.get("state") in (None, "none"):
        return ["no experiment is configured"]
    return [_heading(told), _split(told), *_findings(told), *_bursts(told)]


def arms_table(told: Mapping[str, Any]) -> Table:
    """A row for each arm, times in ms; without rows where there is no experiment."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("ms, by arm", no_wrap=True)
    for title in ("ended", *(title for _, _, title in _COLUMNS), "chunks a read", "refused"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, arm in (told.get("arms") or {}).items():
        figures = [figure_text(arm["metrics"].get(metric) or {}, figure) for metric, figure, _ in _COLUMNS]
        a_read = arm["chunking"].get("events_per_read")
        refused = f"{sum(arm['refusals'].values()):,}"
        table.add_row(name, f"{arm['ended']:,}", *figures, number_text(a_read) if a_read else "-", refused)
    return table


def _heading(told: Mapping[str, Any]) -> str:
    arms = told.get("arms") or {}
    ended = ", ".join(f"{name} {arm['ended']:,} of {arm['assigned']:,} ended" for name, arm in arms.items())
    aa = " (A/A: nothing is changed)" if told.get("aa") else ""
    dealt = f"dealt by {told.get('unit')}, control {told.get('control')}"
    return f"experiment {told.get('name')}: {told['state']}{aa}, {dealt}; {ended}"


def _split(told: Mapping[str, Any]) -> str:
    ratio = told.get("sample_ratio") or {}
    units = ", ".join(f"{name} {n:,}" for name, n in (ratio.get("units") or {}).items())
    p = ratio.get("p")
    if ratio.get("alarm"):
        return f"ALARM: units {units} are not the shares that were dealt; nothing below may be believed"
    return f"split: {units} units, as it was dealt" + ("" if p is None else f" (p {p:.2g})")


def _findings(told: Mapping[str, Any]) -> Iterator[str]:
    found = told.get("findings") or []
    for one in found:
        yield _finding(told, one)
    comparisons = told.get("comparisons")
    few = {name: arm["units"] for name, arm in (told.get("arms") or {}).items() if arm["units"] < FIRST_LOOK}
    if few:
        said = ", ".join(f"{name} has {n:,}" for name, n in few.items())
        yield f"means are compared from {FIRST_LOOK} units an arm on: {said}"
    elif not found:
        yield f"no difference stands in {comparisons} comparisons so far"


def _bursts(told: Mapping[str, Any]) -> Iterator[str]:
    """Where an arm's chunks come several at once: what is held is waited for once, and then costs nothing."""
    a_read = {name: arm["chunking"].get("events_per_read") for name, arm in (told.get("arms") or {}).items()}
    usual = a_read.get(told.get("control"))
    for name, n in a_read.items():
        if usual and n and n >= _BURSTY * usual:
            yield (
                f"{name}: chunks come {number_text(n)} at a time ({told['control']}: {number_text(usual)}),"
                " so most gaps are 0: its TBC, ITL and TPOT flatter it, its TTFT and longest pause do not"
            )


def _finding(told: Mapping[str, Any], one: Mapping[str, Any]) -> str:
    arm, metric = one["arm"], one["metric"]
    name = "share" if metric in _SHARES else "mean"
    by = told["differences"][arm][metric].get(name) or {}
    said = f"{arm}: {_NAMES.get(metric, metric)} {_signed(metric, by.get('difference'))}"
    if metric not in _SHARES:
        said += f" in the {name}"
    interval: Sequence[float] | None = by.get("anytime_interval")
    if interval is not None:
        sure = 100 * (1 - told.get("alpha", 0.05))
        low, high = (_signed(metric, end) for end in interval)
        said += f" ({sure:g} %: {low} to {high})"
    return f"{said}, p {one['p']:.1g} at every look"


def _signed(metric: str, value: float | None) -> str:
    if value is None:
        return "?"
    sign = "-" if value < 0 else "+"
    if metric in _SHARES:
        return f"{sign}{abs(value):.1%}"
    if metric in _PLAIN:
        return f"{sign}{number_text(abs(value))}"
    return f"{sign}{milliseconds(abs(value))} ms"
