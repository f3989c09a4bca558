"""What an experiment has come to, in lines: its state, its split, and the differences that stand.

Takes the public JSON of `/api/v1/experiment`. A difference stands when its p, right at every look, is below
the risk divided by the number of comparisons; all others are left out, because among so many some look large
by chance.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from llmtap.metrics.sequential import FIRST_LOOK
from llmtap.report.terminal import milliseconds, number_text

__all__ = ["experiment_lines"]

_PLAIN: Final = frozenset({"tokens_per_chunk", "output_tokens"})
_SHARES: Final = frozenset({"refused", "failed", "cancelled"})
_NAMES: Final = {
    "ttft": "TTFT", "ttft_any": "TTFT of any token", "tpot": "TPOT", "tbc": "TBC", "itl": "ITL",
    "tbc_max": "longest pause", "user_idle": "user idle latency", "e2e": "E2E",
    "tokens_per_chunk": "tokens per chunk", "output_tokens": "output tokens", "refused": "share refused",
    "failed": "share failed", "cancelled": "share cancelled",
}  # fmt: skip


def experiment_lines(told: Mapping[str, Any]) -> list[str]:
    """One line each; the first says what runs, the last whether more has to be seen."""
    if told.get("state") in (None, "none"):
        return ["no experiment is configured"]
    return [_heading(told), _split(told), *_findings(told)]


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
