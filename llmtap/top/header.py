"""The lines above everything: how it stands with the tap, and what came of the upstream in the window."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from rich.cells import cell_len

from llmtap.report.values import figure_text, milliseconds, number
from llmtap.top.table import at, shown

__all__ = ["facts", "flowed", "silent_relays"]

SILENT_S: Final = 5.0
"""Relays speak twice a second; the meter itself does not count on one that is silent for so long."""
_APART: Final = " · "
_OBJECTIVES_CHARS: Final = 60


def facts(summary: Mapping[str, Any]) -> Iterator[str]:
    """Each a figure with what it needs: its n, its window, its option, its parameters."""
    if "n" not in summary:
        return
    seconds = at(summary, "window", "seconds")
    long = f" ({seconds:.0f} s)" if isinstance(seconds, int | float) else ""
    yield f"window {shown(at(summary, 'window', 'name'))}{long}"
    rate = at(summary, "load", "achieved_rps")
    yield "req/s -" if rate is None else f"{number(rate, 3)} req/s"
    yield f"n {summary['n']:,}"
    yield _latency("TTFT", at(summary, "metrics", "ttft"))
    option = at(summary, "metrics", "itl", "option")
    yield _latency(f"ITL ({shown(option)})", at(summary, "metrics", "itl"))
    yield _goodput(at(summary, "goodput"))
    yield _smooth(at(summary, "smooth_goodput"))
    uncertainty = at(summary, "uncertainty")
    yield f"uncertainty {milliseconds(uncertainty)}" + ("" if uncertainty is None else " ms")


def _latency(title: str, figures: Any) -> str:
    if not at(figures, "n"):
        return f"{title} -"
    return (
        f"{title} p50 {figure_text(figures, 'p50')} p99 {figure_text(figures, 'p99')} ms (n {figures['n']:,})"
    )


def _goodput(goodput: Any) -> str:
    if at(goodput, "attainment") is None:
        return "goodput - (no objectives met or missed)"
    said = shown(goodput["objectives"], _OBJECTIVES_CHARS)
    if said.startswith("several"):
        said = "the objectives of their class"
    met = f"{goodput['met']:,} of {goodput['counted']:,} met {said}"
    return f"goodput {number(goodput['requests_per_second'], 3)} req/s ({met})"


def _smooth(smooth: Any) -> str:
    rate = at(smooth, "tokens_per_second")
    if rate is None:
        return "smooth goodput -"
    speed, alpha = at(smooth, "speed_tokens_per_second"), at(smooth, "alpha")
    of = "several readers" if speed is None else f"alpha {alpha:g}, reader {speed:g} tok/s"
    return f"smooth goodput {number(rate, 3)} tok/s ({of})"


def flowed(said: Iterable[str], width: int) -> list[str]:
    """The facts in lines of that width, none of them torn apart unless it alone is longer."""
    lines: list[str] = []
    for fact in said:
        joined = f"{lines[-1]}{_APART}{fact}" if lines else fact
        if lines and cell_len(joined) <= width:
            lines[-1] = joined
        else:
            lines.append(fact)
    return lines


def silent_relays(summary: Mapping[str, Any]) -> str | None:
    """What is wrong where nothing is being measured now; None where a relay speaks."""
    relays = summary.get("relays")
    if not isinstance(relays, Mapping):
        return None
    ages = [at(relay, "status_age") for relay in relays.values() if at(relay, "connected")]
    if any(isinstance(age, int | float) and age <= SILENT_S for age in ages):
        return None
    return "NO RELAY SPEAKS: what passes now is not measured"
