"""A replay's result for a terminal: what was sent, the Summary, how late it left, and what speaks against it.

Takes the public JSON (`llmtap replay --json`).
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from llmtap.report.baseline import baseline_lines, baseline_table
from llmtap.report.capture import harmless
from llmtap.report.replay_terms import clocks_said, process_said
from llmtap.report.system import render_system
from llmtap.report.terminal import milliseconds, render_summary

__all__ = ["render_replay"]

_CORRECTED: Final = {"ttft": "TTFT", "e2e": "E2E", "user_idle": "user idle"}
_FIGURES: Final = ("mean", "p50", "p90", "p99", "max")


def render_replay(result: Mapping[str, Any]) -> RenderableType:
    """All of it. Parts that are missing are left out."""
    parts: list[RenderableType] = [Text(line, style="bold") for line in _heading(result)]
    parts.append(render_summary(result))
    parts.append(_sending(result))
    parts += [Text(line) for line in _lines(result)]
    baseline = result.get("baseline")
    if baseline:
        table = baseline_table(baseline)
        parts += [table] if table.row_count else []
        parts += [Text(harmless(line)) for line in baseline_lines(baseline)]
    system = result.get("system")
    if system and system.get("summary"):
        parts.append(render_system(system["summary"]))
    parts += [Text(f"note: {note}") for note in (result.get("plan") or {}).get("notes") or ()]
    parts += [_finding(one) for one in result["verdict"]["findings"]]
    return Group(*parts)


def _finding(one: Mapping[str, Any]) -> Text:
    grave = one.get("invalidates", True)
    return Text(f"{'NOT VALID' if grave else 'mind'}: {one['says']}", style="red" if grave else "yellow")


def _heading(result: Mapping[str, Any]) -> Iterator[str]:
    plan, load = result.get("plan") or {}, result["load"]
    name = plan.get("trace") or (plan.get("workload") or {}).get("name") or "?"
    arrivals = plan.get("arrivals") or {}
    how = f"arrivals {process_said(arrivals)}" if arrivals else "closed loop"
    if arrivals.get("rate_rps"):
        # What chance made of it is the rate planned.
        how += f" at {arrivals['rate_rps']:.4g} req/s"
    said = [f"{name} to {plan.get('target', '?')}", how, f"{load['sent']:,} of {load['planned']:,} sent"]
    if load.get("planned_rps") is not None:
        of = " (first turns)" if plan.get("conversations") else ""
        said.append(f"{load['offered_rps']:.4g} of {load['planned_rps']:.4g} req/s planned{of}")
    if load.get("skipped"):
        said.append(f"{load['skipped']:,} skipped: too many in flight")
    if (load.get("retries") or {}).get("n"):
        said.append(f"{load['retries']['n']:,} retries")
    if load.get("stopped"):
        said.append(f"stopped: {load['stopped']}")
    yield " · ".join(said)


def _sending(result: Mapping[str, Any]) -> RenderableType:
    """Dispatch lateness, and latencies from the scheduled time, as rows under the Summary's."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("ms", no_wrap=True)
    for name in ("n", *_FIGURES):
        table.add_column(name, justify="right", no_wrap=True)
    rows = {"dispatch lateness": result.get("dispatch_lateness") or {}}
    corrected = result.get("corrected") or {}
    rows |= {f"{title}, from schedule": corrected.get(name) or {} for name, title in _CORRECTED.items()}
    for title, figures in rows.items():
        if figures.get("n"):
            table.add_row(title, f"{figures['n']:,}", *(milliseconds(figures.get(f)) for f in _FIGURES))
    return table if table.row_count else Text("")


def _lines(result: Mapping[str, Any]) -> Iterator[str]:
    sender = result["sender"]
    cpu = sum(p["cpu_seconds"] for p in sender["processes"])
    said = [f"{len(sender['processes'])} process" + ("es" if len(sender["processes"]) != 1 else "")]
    said.append(f"{cpu:.2f} s of CPU")
    if sender["cpu_seconds_per_1000_tokens"] is not None:
        said.append(f"{sender['cpu_seconds_per_1000_tokens'] * 1e3:.3g} ms per 1,000 tokens")
    said.append(f"stamps by {sender['clock']}")
    opened = sum(p["connections_opened"] for p in sender["processes"])
    said.append(f"{opened:,} connections")
    yield "sending    " + " · ".join(said)
    if clocks := clocks_said(sender):
        yield f"clocks     {harmless(clocks)}"
    for error, n in list((result.get("errors") or {}).items())[:5]:
        yield f"failed     {n:,}: {harmless(error)}"
    warm = result.get("warmup") or {}
    if warm.get("requests"):
        stable = "latency stable" if warm.get("stable") else "latency NOT stable"
        yield f"warm-up    {warm['requests']:,} requests, {warm['tokens']:,} tokens, {stable}"
    elif warm.get("skipped"):
        yield f"warm-up    none: {warm['skipped']}"
    lengths = (result.get("plan") or {}).get("prompts") or {}
    if lengths.get("n"):
        ways = ", ".join(lengths["ways"])
        yield f"prompts    {lengths['exact']:,} of {lengths['n']:,} of exact length by {ways}"
    told = result.get("lengths") or {}
    if told.get("input_told"):
        line = f"{told['input_exact']:,} of {told['input_told']:,} prompts as long as planned"
        if told["input_off_max"]:
            line += f" (at most {told['input_off_max']:,} tokens off)"
        if told["output_told"]:
            line += f", {told['output_exact']:,} of {told['output_told']:,} answers"
            line += "" if told["output_wanted"] else " (which the server was not told to keep to)"
        yield f"usage      by the server's own count: {line}"
    if "capture" in result:
        yield f"capture    {result['capture']['rows']:,} exchanges in {result['capture']['to']}"
