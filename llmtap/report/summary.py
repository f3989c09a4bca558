"""Turn the JSON of a Summary, and of the resources of a run, into tables for a terminal.

Takes the public JSON (`Summary.to_dict` of `metrics/summary.py`, `/api/v1/summary`, `TimeSeries.summary`).
`llmtap watch --read` prints `render_summary`; the reports of replays and captures contain `summary_blocks`
(latencies, outcomes, tokens, relays), those of replays also `system_blocks` (CPU, memory, GPUs, server
metrics).
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rich.console import RenderableType

from llmtap.metrics.catalogue import Surface, shown_on
from llmtap.metrics.latency import SPREAD_NS, chunks_at_a_time, come_in_bursts
from llmtap.metrics.statistics import share_range
from llmtap.report.document import Note, Table
from llmtap.report.render import terminal
from llmtap.report.values import (
    FEW,
    at,
    bursts_said,
    counted,
    figure_text,
    figures_text,
    is_marked,
    joined,
    milliseconds,
    number,
    percentile_titles,
)
from llmtap.units import NS_PER_S, format_bytes, format_ns

_ADDED: Final = {"request": "added, request", "first_chunk": "added, first chunk", "chunk": "added, chunk"}
_FIGURES: Final = ("mean", "p50", "p90", "p99", "max")
_SERIES_FIGURES: Final = ("mean", "p50", "p95", "max")
_SERIES_TITLES: Final = {
    "sender_cpu": "sender, CPU", "sender_memory": "sender, memory", "server_cpu": "server, CPU",
    "server_memory": "server, memory", "host_cpu": "host, CPU", "host_stolen": "host, stolen",
    "host_memory": "host, memory", "kv_use": "KV cache use", "prefix_hit_share": "prefix cache hit rate",
    "prompt_tokens": "prompt tokens", "generation_tokens": "output tokens",
    "ttft_mean": "mean TTFT by the server", "itl_mean": "mean ITL by the server",
    "running": "requests running", "waiting": "requests waiting",
    "preempted": "requests preempted", "recovered": "requests completed after preemption",
    "preempted_tokens": "tokens discarded by preemption", "swapped_tokens": "tokens swapped",
    "swapped": "requests swapped out", "prefix_queries": "prefix cache, tokens looked up",
    "prefix_hits": "prefix cache, tokens found", "ttft_seconds": "TTFT, sum",
    "ttft_values": "TTFT, count", "itl_seconds": "ITL, sum", "itl_values": "ITL, count",
}  # fmt: skip
"""Of those whose name does not say it."""
_UNTOLD: Final = frozenset(
    {"prefix_queries", "prefix_hits", "ttft_seconds", "ttft_values", "itl_seconds", "itl_values"}
)
"""Their ratio is reported."""
_STOLEN_SHARE_MAX: Final = 0.01
"""Above this, others on the same hardware took a part of the CPU that shows in latencies."""
_Json = Mapping[str, Any]


def render_summary(summary: _Json) -> RenderableType:
    return terminal(summary_blocks(summary))


def summary_blocks(summary: _Json) -> Iterator[Note | Table]:
    """Parts that are missing are left out."""
    yield Note(_headline(summary), "bold")
    rows = []
    shown = percentile_titles(summary.get("metrics") or {}, {name: name for name in _FIGURES})
    metrics = {metric.name: metric.title for metric in shown_on(Surface.TABLE)}
    for group, titles in (("metrics", metrics), ("added", _ADDED)):
        for name, title in titles.items():
            figures = at(summary, group, name)
            if figures is not None and figures["n"]:
                option = figures.get("option")
                rows.append([f"{title} ({option})" if option else title, *figures_text(figures, shown)])
                if to_end := figures.get("to_end"):
                    rows.append([f"{title}, to the end", *figures_text(to_end, shown)])
    yield Table(("ms", "n", *shown.values()), rows, nowrap=True)
    yield from map(Note, _lines(summary))
    if caution := bursts_caution(summary):
        yield Note(f"caution: {caution}", "yellow")
    if is_marked(rows) or at(summary, "uncertainties", "marks"):
        yield Note(FEW, "yellow")


def _headline(summary: _Json) -> str:
    window, load = summary.get("window") or {}, summary.get("load") or {}
    said = [f"window {window.get('name', '?')} ({window.get('seconds', 0.0):.1f} s)", f"n {summary['n']:,}"]
    if load.get("achieved_rps") is not None:
        said.append(f"{number(load['achieved_rps'], 3)} req/s ended ({load.get('mode', '?')})")
    said.append(f"ITL option {at(summary, 'metrics', 'itl', 'option') or '-'}")
    said.append(f"tokens by {', '.join(at(summary, 'tokens', 'source') or ()) or '-'}")
    if stamps := at(summary, "uncertainties", "n") and summary["uncertainties"]:
        p50, p99 = (figure_text(stamps, name) for name in ("p50", "p99"))
        said.append(f"uncertainty p50 {p50}, p99 {p99} ms")
    return " · ".join(said)


def _lines(summary: _Json) -> Iterator[str]:
    if summary.get("outcomes"):
        yield "outcomes   " + joined(summary["outcomes"], " · ")
    tokens = summary.get("tokens") or {}
    said = [
        f"{name} {tokens[name]:,}" for name in ("input", "output", "reasoning", "cached") if tokens.get(name)
    ]
    if said:
        rates = {name: tokens.get(f"{name}_per_second") for name in ("input", "output")}
        said += [f"{number(rate, 3)} {name}/s" for name, rate in rates.items() if rate is not None]
        yield "tokens     " + " · ".join(said)
    smooth = summary.get("smooth_goodput") or {}
    if smooth.get("tokens_per_second") is not None:
        of = "several readers"
        if smooth["alpha"] is not None:
            of = f"alpha {smooth['alpha']:g}, reader {smooth['speed_tokens_per_second']:g} tokens/s"
        yield f"smooth     {number(smooth['tokens_per_second'], 3)} tokens/s goodput ({of})"
    if goodput := goodput_said(summary):
        yield f"goodput    {goodput}"
    if text := without_dialect_text(summary):
        yield f"format     {text}"
    chunking = summary.get("chunking") or {}
    if chunking.get("events"):
        said = [f"{chunking['content_events']:,} of {chunking['events']:,} events carry output"]
        known = chunking.get("chunks_with_known_tokens") or 0
        if chunking.get("tokens_per_chunk_mean") is not None and known >= chunking["content_events"] / 2:
            of = "" if known == chunking["content_events"] else f" (of {known:,} with a known count)"
            said.append(f"{chunking['tokens_per_chunk_mean']:.3g} tokens a chunk{of}")
            said.append(f"{chunking['single_token_share']:.1%} single")
        if chunking.get("events_per_read") is not None:
            said.append(f"{chunking['events_per_read']:.3g} events a read")
        yield "chunking   " + " · ".join(said)
    if at(summary, "refusals", "n"):
        yield f"refusals   {summary['refusals']['n']:,}: {joined(summary['refusals']['kinds'], ' · ')}"
    if upstream := summary.get("upstream"):
        said = [
            f"{series_title(name)} {series_value(upstream['values'][name], unit)}"
            for name, unit in (("running", "requests"), ("waiting", "requests"), ("kv_use", "share"))
            if name in upstream["values"]
        ]
        yield "upstream   " + (" · ".join(said) or f"not known: {upstream['problem']}")
    for name, relay in (summary.get("relays") or {}).items():
        yield f"relay      {name}: {_relay(relay)}"


def bursts_caution(summary: _Json) -> str:
    """A caution if the chunks of a summary come in bursts; empty otherwise."""
    n, gap = chunks_at_a_time(summary.get("chunking") or {}), at(summary, "metrics", "tbc", "p50")
    if n is None or gap is None or gap * NS_PER_S > SPREAD_NS or not come_in_bursts(n, 1):
        return ""
    return " ".join(bursts_said(n))


def not_judged_text(goodput: _Json) -> str:
    """The number of exchanges that stand beside the share as not judged; empty without any."""
    n = goodput.get("not_judged") or 0
    return f"{n:,} not judged, since their answers were not understood" if n else ""


def without_dialect_text(summary: _Json) -> str:
    """The share of answers of no known dialect, where most of them come from, and the next step."""
    places = summary.get("without_dialect") or []
    if not places:
        return ""
    said = [
        f"{number(n / summary['n'] * 100, 2)} % {what}"
        for reading, what in (("none", "not understood"), ("inferred", "inferred"))
        if (n := sum(place["n"] for place in places if place["reading"] == reading))
    ]
    most = places[0]
    where = f"{most['path']} {most['content_type'] or 'without a content type'}"
    return f"{', '.join(said)}; most: {where} ({most['n']:,}); next: llmtap inspect FILE --draft NAME"


def goodput_said(summary: _Json) -> str:
    """Goodput, and the share of requests that met the objectives, with its interval; empty without any."""
    goodput = summary.get("goodput") or {}
    if goodput.get("attainment") is None:
        return not_judged_text(goodput)
    met, whole = goodput["met"], goodput["counted"]
    parts = (met / whole, *share_range(met / whole, whole))
    share, low, high = (number(part * 100, 3) for part in parts)
    judged = "; refusals without output are not counted" if at(summary, "outcomes", "refused") else ""
    if unknown := not_judged_text(goodput):
        judged += f"; {unknown}"
    return (
        f"{number(goodput['requests_per_second'], 3)} req/s, {met:,} of {whole:,} met"
        f" {goodput['objectives']} ({share} %, 95 % interval {low} to {high}{judged})"
    )


def _relay(relay: _Json) -> str:
    if "opened" not in relay:
        return "no status yet"
    dropped = sum(relay["dropped"].values())
    said = [f"opened {relay['opened']:,}", f"measured {relay['measured']:,}", f"not measured {dropped:,}"]
    if skipped := sum(relay.get("skipped", {}).values()):
        said.append(f"not inference {skipped:,}")
    if relay.get("vantage") == "passive":
        packets = relay["packets"]
        said.append(f"packets {packets.get('captured', 0):,}, lost {packets.get('lost', 0):,}")
        said.append(f"missing bytes {relay['missing_bytes']:,}")
        said.append(f"connections: {joined(relay['watched'], ', ') or 'none'}")
        if relay.get("side"):
            said.append(f"seen at the {relay['side']}")
    else:
        said.append(f"lag max {milliseconds(relay.get('lag_max'))} ms")
    if dropped:
        said.append(f"dropped: {joined(relay['dropped'], ', ')}")
    return " · ".join(said + ([] if relay.get("connected") else ["gone"]))


def system_blocks(told: _Json) -> Iterator[Note | Table]:
    """Yield CPU, memory and GPUs, and the server's own figures; what was not sampled, with its reason."""
    yield system_table(told)
    if energy := told.get("energy"):
        yield Note("energy     " + " · ".join(_energy(energy)))
    for side, processes in (told.get("processes") or {}).items():
        if processes:
            names = ", ".join(dict.fromkeys(process["name"] for process in processes))
            yield Note(f"{side:<11}{counted(len(processes), 'process', 'processes')}: {names}")
    if devices := at(told, "gpu", "devices"):
        yield Note("GPUs       " + ", ".join(devices))
    for what, why in (told.get("why_not") or {}).items():
        yield Note(f"{what:<11}not sampled: {why}")


def system_table(told: _Json, of: str = "", caption: str = "") -> Table:
    """Return what was sampled in the window of the run; of counters how much they grew. `of`: only series of
    the `host`, the `server` or the `gpu`."""
    rows = []
    for part in ("system", "server"):
        for name, figures in (told.get(part) or {}).items():
            who = "server" if part == "server" else "gpu" if name.startswith("gpu") else "host"
            if name in _UNTOLD or of not in ("", who) or not (figures.get("n") or figures.get("total")):
                continue
            unit, rate = figures["unit"], figures.get("per_second")
            cells = [series_value(figures.get(f), unit) for f in _SERIES_FIGURES]
            if figures["kind"] == "counter":
                cells[0] = f"{number(rate, 3)}/s"
            total = series_value(figures.get("total"), unit)
            rows.append([series_title(name), f"{figures['n']:,}" if "n" in figures else "-", *cells, total])
    return Table(("", "n", *_SERIES_FIGURES, "in all"), rows, caption, nowrap=True)


def _energy(energy: _Json) -> Iterator[str]:
    yield f"{number(energy['joules'], 3)} J in {format_ns(energy['seconds'] * 1e9)}"
    yield f"{number(energy['power'], 3)} W on average"
    if energy.get("joules_per_token") is not None:
        yield f"{number(energy['joules_per_token'], 3)} J per token of {energy['tokens']:,}"


def system_warnings(told: _Json) -> Iterator[str]:
    """What makes figures of the run doubtful."""
    missing = at(told, "energy", "seconds_missing") or 0
    if missing:
        yield f"power is not known of {format_ns(missing * 1e9)}: more energy was used than is said"
    stolen = at(told, "system", "host_stolen", "mean") or 0
    if stolen > _STOLEN_SHARE_MAX:
        yield f"the hypervisor gave {stolen:.1%} of this host's CPU time to others, which shows in latencies"
    scrape = told.get("scrape") or {}
    if scrape.get("failed") and not scrape.get("gave_up"):
        reasons = joined(scrape["failures"])
        yield f"{scrape['failed']:,} of {scrape['scrapes']:,} scrapes of the server failed: {reasons}"


def scraped_said(told: _Json) -> str:
    """Source of the server's own metrics; empty where none was asked."""
    scrape = told.get("scrape") or {}
    if not scrape.get("url") or not scrape.get("scrapes"):
        return ""
    if scrape.get("gave_up"):
        return f"nothing: {scrape['url']} was asked once ({', '.join(scrape['failures'])})"
    missing = ", ".join(map(series_title, scrape.get("missing") or ()))
    return f"{scrape['url']}, {scrape['scrapes']:,} times" + (f"; not there: {missing}" if missing else "")


def series_title(name: str) -> str:
    """A series in words; its name, where it is not one of ours."""
    device, _, what = name.partition("_")
    if device.startswith("gpu") and device[3:].isdecimal():
        return f"GPU {device[3:]}, {what}"
    return _SERIES_TITLES.get(name, name)


def series_value(value: float | None, unit: str) -> str:
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
            return f"{number(value, 3)} W"
        case "seconds":
            return f"{milliseconds(value)} ms"
    return number(value, 3)
