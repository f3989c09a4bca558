"""A capture summed up, for a terminal: what it is, its Summary, the shape of its workload.

Takes the public JSON (`llmtap report --json`). Names in it were sent by others: none may move the cursor.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from llmtap.report.integrity import broken_lines, headline
from llmtap.report.terminal import render_summary
from llmtap.units import format_bytes

__all__ = ["render_capture"]

_GROUPS_SHOWN: Final = 20
_GROUP_COLUMNS: Final = ("n", "TTFT p50", "TTFT p99", "TBC p99", "E2E p50", "out tok", "goodput")
_NAME_CHARS: Final = 40


def render_capture(told: Mapping[str, Any]) -> RenderableType:
    """All of it. Parts that are missing are left out."""
    parts: list[RenderableType] = [Text(line, style="bold") for line in _heading(told)]
    parts.append(render_summary(told))
    parts += [Text(harmless(line)) for line in _workload(told.get("workload") or {})]
    if told.get("integrity"):
        parts.append(Text(harmless(f"integrity  {headline(told['integrity'])}")))
    parts += [Text(harmless(line)) for line in broken_lines((told.get("capture") or {}).get("broken") or ())]
    for label, groups in (told.get("by") or {}).items():
        parts += [Text(""), _group_table(label, groups)]
        if len(groups) > _GROUPS_SHOWN:
            parts.append(Text(f"and {len(groups) - _GROUPS_SHOWN:,} more (--json has up to 1,000)"))
    return Group(*parts)


def harmless(text: str) -> str:
    """The text with what is not printable spelt out."""
    return text if text.isprintable() else "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)


def _heading(told: Mapping[str, Any]) -> Iterator[str]:
    capture, window = told.get("capture") or {}, told.get("window") or {}
    said = [f"{capture.get('rows', 0):,} exchanges"]
    if "files" in capture:
        files = f"{capture['files']:,} file" + ("" if capture["files"] == 1 else "s")
        if capture.get("spools"):
            files += f" ({capture['spools']:,} still in the spool)"
        said.append(f"{files}, {format_bytes(capture['bytes'])}")
    if len(capture.get("captures") or ()) > 1:
        said.append(f"{len(capture['captures']):,} captures, summed up as one")
    for name, title in (("source", "from"), ("level", "level"), ("tap_version", "llmtap")):
        if capture.get(name):
            said.append(f"{title} {', '.join(capture[name])}")
    yield harmless(" · ".join(said))
    if window.get("start"):
        yield f"{window['start']} to {window['end']}"


def _workload(workload: Mapping[str, Any]) -> Iterator[str]:
    arrivals = workload.get("arrivals") or {}
    if arrivals.get("rate_rps") is not None:
        # Not the rate above: that one counts what ended, over a time that lasts until the last end.
        said = [
            f"{arrivals['rate_rps']:.3g} req/s arrived in {_duration(arrivals['seconds'])}, first to last"
        ]
        if arrivals["gap_cv"] is not None:
            said.append(f"CV of gaps {arrivals['gap_cv']:.3g}")
        if arrivals["ties"]:
            said.append(f"{arrivals['ties']:.1%} at the moment of the one before")
        yield "arrivals   " + " · ".join(said)
    elapsed = workload.get("elapsed")
    if elapsed:
        spread = ", ".join(f"{p} {_duration(elapsed[p])}" for p in ("p50", "p90", "p99", "max"))
        yield f"elapsed    {spread} from arrival to end, n {elapsed['n']:,} (no E2E: `submit` is not known)"
    early = workload.get("before_submit") or {}
    if any(early.values()):
        yield (
            f"left out   before their request was all sent, {early['first_byte']:,} answers had begun"
            f" (no TTFB, no TTFT) and {early['response_end']:,} had ended (no E2E)"
        )
    for name in ("input", "output"):
        figures = workload.get(f"{name}_tokens") or {}
        if figures.get("n"):
            shown = " · ".join(f"{p} {figures[p]:,.0f}" for p in ("p50", "p90", "p99", "max"))
            source = ", ".join(f"{source} {n:,}" for source, n in figures["source"].items())
            yield f"{name:10} {figures['mean']:,.0f} tokens mean · {shown} · by {source or '-'}"
    for prefix in workload.get("prefix") or ():
        of = f"{prefix['hits']:,} of {prefix['blocks']:,} blocks"
        size = f"{prefix['block_size'] or '?'} {prefix['unit'] or ''}".strip()
        yield f"prefixes   {prefix['share']:.1%} shared, in a cache without end: {of} of {size}"
    sessions = workload.get("sessions")
    if sessions:
        turns = sessions["turns"]
        said = [
            f"{sessions['n']:,} conversations",
            f"turns mean {turns['mean']:.3g}, p90 {turns['p90']:.3g}, max {turns['max']:,.0f}",
            f"{sessions['single_turn_share']:.1%} of one turn",
        ]
        if sessions["tool_turn_share"] is not None:
            said.append(f"{sessions['tool_turn_share']:.1%} of turns by tools")
        yield "sessions   " + " · ".join(said)
        for who, title in (("human", "people"), ("tool", "tools")):
            think = sessions["think"].get(who) or {}
            if think.get("n"):
                spread = ", ".join(f"{p} {_duration(think[p])}" for p in ("p50", "p90", "p99"))
                yield f"think time {title}: {spread} (n {think['n']:,})"


def _group_table(label: str, groups: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(label, no_wrap=True)
    for name in _GROUP_COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for name, summary in list(groups.items())[:_GROUPS_SHOWN]:
        metrics = summary["metrics"]
        shown = (("ttft", "p50"), ("ttft", "p99"), ("tbc", "p99"), ("e2e", "p50"))
        output, attained = summary["tokens"]["output"], (summary["goodput"] or {}).get("attainment")
        table.add_row(
            Text(harmless(name)[:_NAME_CHARS]), f"{summary['n']:,}",
            *(_duration(metrics[metric][figure]) for metric, figure in shown),
            "-" if output is None else f"{output:,}", "-" if attained is None else f"{attained:.1%}",
        )  # fmt: skip
    return table


def _duration(seconds: float | None) -> str:
    """For people: `12.3 ms`, `4.5 s`, `3 h 20 min`."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
