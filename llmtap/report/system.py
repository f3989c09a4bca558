"""What a run took, as a table in the terminal: CPU, memory and GPUs, and what the server said of itself.

Takes the public JSON of `TimeSeries.summary`. What could not be watched is said with its reason.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from llmtap.report.capture import harmless
from llmtap.units import format_bytes, format_ns

__all__ = [
    "render_system", "scraped_said", "series_title", "series_value", "system_text", "system_warnings",
]  # fmt: skip

_FIGURES: Final = ("mean", "p50", "p95", "max")
_TITLES: Final = {
    "sender_cpu": "sender, CPU",
    "sender_memory": "sender, memory",
    "server_cpu": "server, CPU",
    "server_memory": "server, memory",
    "host_cpu": "host, CPU",
    "host_stolen": "host, stolen",
    "host_memory": "host, memory",
    "running": "running",
    "waiting": "waiting",
    "kv_use": "KV use",
    "prefix_hit_share": "prefix hits",
    "preemptions": "preemptions",
    "prompt_tokens": "prompt tokens",
    "generation_tokens": "output tokens",
}
_UNTOLD: Final = frozenset({"prefix_queries", "prefix_hits"})
"""Their share is."""
_STOLEN_SHARE_MAX: Final = 0.01
"""Above this, others on the same hardware took a part of the CPU that shows in latencies."""


def render_system(told: Mapping[str, Any]) -> RenderableType:
    """The summary as something a rich Console prints. Parts that are missing are left out."""
    table = _table(told)
    parts: list[RenderableType] = [table] if table.row_count else []
    parts += [Text(harmless(line)) for line in _lines(told)]
    parts += [Text(harmless(line), style="yellow") for line in system_warnings(told)]
    return Group(*parts)


def system_text(told: Mapping[str, Any], width: int = 80) -> str:
    """The same as plain text without colours."""
    console = Console(width=width, no_color=True, force_terminal=False, highlight=False)
    with console.capture() as capture:
        console.print(render_system(told))
    return capture.get()


def _table(told: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("during the run", no_wrap=True)
    for name in ("n", *_FIGURES):
        table.add_column(name, justify="right", no_wrap=True)
    for part in ("system", "server"):
        for name, figures in (told.get(part) or {}).items():
            if figures.get("n") and figures["kind"] in ("interval", "gauge"):
                cells = [series_value(figures.get(figure), figures["unit"]) for figure in _FIGURES]
                table.add_row(series_title(name), f"{figures['n']:,}", *cells)
    return table


def _lines(told: Mapping[str, Any]) -> Iterator[str]:
    server = told.get("server") or {}
    counted = []
    for name, figures in server.items():
        if name in _UNTOLD or figures.get("total") is None:
            continue
        said = f"{series_title(name)} {series_value(figures['total'], figures['unit'])}"
        rate = figures.get("per_second")
        counted.append(said + (f" ({_number(rate)}/s)" if rate else ""))
    if counted:
        yield "server     " + " · ".join(counted)
    energy = told.get("energy")
    if energy:
        yield "energy     " + " · ".join(_energy(energy))
    for side, processes in (told.get("processes") or {}).items():
        if processes:
            names = ", ".join(dict.fromkeys(process["name"] for process in processes))
            yield f"{side:<11}{len(processes)} process{'' if len(processes) == 1 else 'es'}: {names}"
    if (told.get("gpu") or {}).get("devices"):
        yield "GPUs       " + ", ".join(told["gpu"]["devices"])
    if scraped := scraped_said(told):
        yield f"scraped    {scraped}"
    for what, why in (told.get("why_not") or {}).items():
        yield f"{what:<11}not sampled: {why}"


def _energy(energy: Mapping[str, Any]) -> Iterator[str]:
    yield f"{_number(energy['joules'])} J in {format_ns(energy['seconds'] * 1e9)}"
    yield f"{_number(energy['power'])} W on average"
    if energy.get("joules_per_token") is not None:
        yield f"{_number(energy['joules_per_token'])} J per token of {energy['tokens']:,}"
    if energy.get("counted_power") is not None:
        yield f"by the GPUs' own count {_number(energy['counted_power'])} W"


def system_warnings(told: Mapping[str, Any]) -> Iterator[str]:
    """What makes figures of the run doubtful."""
    missing = (told.get("energy") or {}).get("seconds_missing") or 0
    if missing:
        yield f"power is not known of {format_ns(missing * 1e9)}: more energy was used than is said"
    stolen = ((told.get("system") or {}).get("host_stolen") or {}).get("mean") or 0
    if stolen > _STOLEN_SHARE_MAX:
        yield f"the hypervisor gave {stolen:.1%} of this host's CPU time to others, which shows in latencies"
    scrape = told.get("scrape") or {}
    if scrape.get("failed") and not scrape.get("gave_up"):
        reasons = ", ".join(f"{reason} {n:,}" for reason, n in scrape["failures"].items())
        yield f"{scrape['failed']:,} of {scrape['scrapes']:,} scrapes of the server failed: {reasons}"


def scraped_said(told: Mapping[str, Any]) -> str:
    """Where the server's own metrics come from; empty where nobody was asked."""
    scrape = told.get("scrape") or {}
    if not scrape.get("url") or not scrape.get("scrapes"):
        return ""
    if scrape.get("gave_up"):
        return f"nothing: {scrape['url']} was asked once ({', '.join(scrape['failures'])})"
    return f"{scrape['url']}, {scrape['scrapes']:,} times"


def series_title(name: str) -> str:
    """A series in words; its name, where it is not one of ours."""
    device, _, what = name.partition("_")
    if device.startswith("gpu") and device[3:].isdecimal():
        return f"GPU {device[3:]}, {what}"
    return _TITLES.get(name, name)


def series_value(value: float | None, unit: str) -> str:
    """A figure with its unit."""
    if value is None:
        return "-"
    match unit:
        case "bytes":
            return format_bytes(value)
        case "share":
            return f"{value:.1%}"
        case "cpus":
            return f"{value:.2f}"
        case "celsius":
            return f"{value:.0f} °C"
        case "watts":
            return f"{_number(value)} W"
    return _number(value)


def _number(value: float) -> str:
    """Three significant digits, more before the point, never in powers of ten."""
    if value and abs(value) < 0.001:
        return f"{value:.6f}"
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"
