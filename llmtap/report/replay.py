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
from llmtap.report.replay_terms import clocks_said, connections_said, process_said, retries_said
from llmtap.report.replay_verdict import UNJUDGED, judged
from llmtap.report.system import render_system
from llmtap.report.terminal import milliseconds, render_summary

__all__ = ["render_replay", "render_verdicts"]

_CORRECTED: Final = {"ttft": "TTFT", "e2e": "E2E", "user_idle": "user idle"}
_FIGURES: Final = ("mean", "p50", "p90", "p99", "max")


def render_replay(result: Mapping[str, Any]) -> RenderableType:
    """All of it. Parts that are missing are left out."""
    parts: list[RenderableType] = [Text(harmless(line), style="bold") for line in _heading(result)]
    parts.append(render_summary(result))
    parts.append(_sending(result))
    parts += [Text(harmless(line)) for line in _lines(result)]
    baseline = result.get("baseline")
    if baseline:
        table = baseline_table(baseline)
        parts += [table] if table.row_count else []
        parts += [Text(harmless(line)) for line in baseline_lines(baseline)]
    system = result.get("system")
    if system and system.get("summary"):
        parts.append(render_system(system["summary"]))
    parts += [Text(harmless(f"note: {note}")) for note in (result.get("plan") or {}).get("notes") or ()]
    parts += _verdict(result.get("verdict"))
    return Group(*parts)


def render_verdicts(verdicts: Mapping[str, Mapping[str, Any]]) -> RenderableType:
    """Those of several replays, by the names of their results."""
    parts: list[Text] = []
    for name, verdict in verdicts.items():
        parts += [Text(harmless(f"replay     {name}"), style="bold"), *_verdict(verdict)]
    return Group(*parts)


def _verdict(verdict: Mapping[str, Any] | None) -> list[Text]:
    """Whether the figures may be believed, and what there is to be said of that."""
    if verdict is None:
        return [Text(f"verdict    {UNJUDGED}")]
    said = Text(f"verdict    {' '.join(judged(verdict))}", style="green" if verdict["valid"] else "red")
    return [said, *(_finding(one) for one in verdict.get("findings") or ())]


def _finding(one: Mapping[str, Any]) -> Text:
    grave = one.get("invalidates", True)
    says = harmless(str(one["says"]))
    return Text(f"{'NOT VALID' if grave else 'mind'}: {says}", style="red" if grave else "yellow")


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
        n = load["retries"]["n"]
        said.append(f"{n:,} retr{'y' if n == 1 else 'ies'}")
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
    said.append(connections_said(sender))
    yield "sending    " + " · ".join(said)
    if retries := retries_said(result.get("load") or {}):
        yield f"retries    {retries}"
    if clocks := clocks_said(sender):
        yield f"clocks     {clocks}"
    for error, n in list((result.get("errors") or {}).items())[:5]:
        yield f"failed     {n:,}: {error}"
    warm = result.get("warmup") or {}
    if warm.get("requests"):
        not_stable = "latency not probed" if warm.get("probes") == [] else "latency NOT stable"
        stable = "latency stable" if warm.get("stable") else not_stable
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
