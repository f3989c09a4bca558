"""What an experiment has come to: its arms in a table; in lines its state, its split, and the differences
that are significant.

Takes the public JSON of `/api/v1/experiment`. A difference is reported when its p, right at every look, is
below the risk divided by the number of comparisons; among so many others, some look large by chance.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from llmtap.metrics.experiment import FIRST_LOOK
from llmtap.report.document import Table
from llmtap.report.values import METRIC_TITLES, figure_text, joined, milliseconds, number

__all__ = ["arms_table", "experiment_lines"]

_COUNTS: Final = {"tokens_per_chunk": "tokens per chunk", "output_tokens": "output tokens"}
_SHARES: Final = {"refused": "share refused", "failed": "share failed", "cancelled": "share cancelled"}
_TITLES: Final = {
    **METRIC_TITLES, "ttft_any": "TTFT of any token", "user_idle": "user idle latency", **_COUNTS, **_SHARES,
}  # fmt: skip
_COLUMNS: Final = (
    ("ttft", "p50", "TTFT p50"), ("ttft", "p95", "p95"), ("tbc", "p50", "TBC p50"), ("tbc", "p95", "p95"),
    ("tbc_max", "p50", "longest pause p50"), ("e2e", "p50", "E2E p50"),
)  # fmt: skip
_BURSTY: Final = 2.0
"""From this multiple of the control's chunks in a read, bursts are reported."""
_Json = Mapping[str, Any]


def experiment_lines(told: _Json) -> list[str]:
    """The first line says what runs, the last whether more has to be seen."""
    if told.get("state") in (None, "none"):
        return ["no experiment is configured"]
    return [_heading(told), *_stopped(told), _split(told), *_findings(told), *_bursts(told)]


def arms_table(told: _Json) -> Table:
    """A row for each arm, times in ms; without rows where there is no experiment."""
    rows = []
    for name, arm in (told.get("arms") or {}).items():
        figures = [figure_text(arm["metrics"].get(metric) or {}, figure) for metric, figure, _ in _COLUMNS]
        a_read = arm["chunking"].get("events_per_read")
        refused = f"{sum(arm['refusals'].values()):,}"
        rows.append([name, f"{arm['ended']:,}", *figures, number(a_read, 3) if a_read else "-", refused])
    titles = (title for _, _, title in _COLUMNS)
    return Table(["ms, by arm", "ended", *titles, "chunks a read", "refused"], rows, nowrap=True)


def _heading(told: _Json) -> str:
    arms = told.get("arms") or {}
    ended = ", ".join(f"{name} {arm['ended']:,} of {arm['assigned']:,} ended" for name, arm in arms.items())
    aa = " (A/A: nothing is changed)" if told.get("aa") else ""
    dealt = f"dealt by {told.get('unit')}, control {told.get('control')}"
    return f"experiment {told.get('name')}: {told['state']}{aa}, {dealt}; {ended}"


def _stopped(told: _Json) -> Iterator[str]:
    if stopped := told.get("stopped"):
        metric = stopped["figure"].partition(".")[0]
        more = _signed(metric, stopped.get("difference"))
        yield f"stopped: {stopped['arm']} was worse in {stopped['figure']} ({more}) at {stopped['at']}"


def _split(told: _Json) -> str:
    ratio = told.get("sample_ratio") or {}
    units, p = joined(ratio.get("units") or {}), ratio.get("p")
    if ratio.get("alarm"):
        return f"ALARM: units {units} are not the shares that were dealt; nothing below may be believed"
    return f"split: {units} units, as it was dealt" + ("" if p is None else f" (p {p:.2g})")


def _findings(told: _Json) -> Iterator[str]:
    found = told.get("findings") or []
    for one in found:
        yield _finding(told, one)
    few = {name: arm["units"] for name, arm in (told.get("arms") or {}).items() if arm["units"] < FIRST_LOOK}
    if few:
        said = ", ".join(f"{name} has {n:,}" for name, n in few.items())
        yield f"means are compared from {FIRST_LOOK} units an arm on: {said}"
    elif not found:
        yield f"no difference stands in {told.get('comparisons')} comparisons so far"


def _bursts(told: _Json) -> Iterator[str]:
    """Arms whose chunks come several at once: a wait for the first one, and none for the others."""
    a_read = {name: arm["chunking"].get("events_per_read") for name, arm in (told.get("arms") or {}).items()}
    usual = a_read.get(told.get("control"))
    for name, n in a_read.items():
        if usual and n and n >= _BURSTY * usual:
            yield (
                f"{name}: chunks come {number(n, 3)} at a time ({told['control']}: {number(usual, 3)}),"
                " so most gaps are 0: its TBC, ITL and TPOT flatter it, its TTFT and longest pause do not"
            )


def _finding(told: _Json, one: _Json) -> str:
    arm, metric = one["arm"], one["metric"]
    name = "share" if metric in _SHARES else "mean"
    by = told["differences"][arm][metric].get(name) or {}
    said = f"{arm}: {_TITLES.get(metric, metric)} {_signed(metric, by.get('difference'))}"
    if name == "mean":
        said += " in the mean"
    if by.get("anytime_interval") is not None:
        low, high = (_signed(metric, end) for end in by["anytime_interval"])
        said += f" ({100 * (1 - told.get('alpha', 0.05)):g} %: {low} to {high})"
    return f"{said}, p {one['p']:.1g} at every look"


def _signed(metric: str, value: float | None) -> str:
    if value is None:
        return "?"
    sign = "-" if value < 0 else "+"
    if metric in _SHARES:
        return f"{sign}{abs(value):.1%}"
    return f"{sign}{number(abs(value), 3) if metric in _COUNTS else f'{milliseconds(abs(value))} ms'}"
