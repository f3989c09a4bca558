"""Turn the JSON of a Summary, and of the resources of a run, into tables for a terminal.

The input is public JSON (`Summary.to_dict` of `metrics/summary.py`, `/api/v1/summary`, `TimeSeries.summary`).
`llmtap watch --read` prints `render_summary`. The reports of replays and captures contain `summary_blocks`
(latencies, outcomes, tokens, relays). The reports of replays also contain `system_blocks` (CPU, memory, GPUs,
server metrics).
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rich.console import RenderableType

from llmtap.metrics.catalogue import Surface, shown_on
from llmtap.metrics.latency import SPREAD_NS, arrives_in_bursts, chunks_at_a_time
from llmtap.metrics.statistics import share_range
from llmtap.report.document import Note, Table
from llmtap.report.labels import label_lines
from llmtap.report.render import terminal
from llmtap.report.values import (
    FEW,
    at,
    burst_sentences,
    count_with_noun,
    counts_text,
    eq4_text,
    figure_text,
    figures_text,
    is_marked,
    milliseconds,
    number,
    percentile_titles,
)
from llmtap.units import NS_PER_S, format_bytes, format_ns

_ADDED: Final = {"request": "added, request", "first_chunk": "added, first chunk", "chunk": "added, chunk"}
_FIGURES: Final = ("mean", "p50", "p90", "p99", "max")
_SERIES_FIGURES: Final = ("mean", "p50", "p95", "max")
_SERIES_TITLES: Final = {
    "sender_cpu": "sender, CPU",
    "sender_memory": "sender, memory",
    "server_cpu": "server, CPU",
    "server_memory": "server, memory",
    "host_cpu": "host, CPU",
    "host_stolen": "host, stolen",
    "host_memory": "host, memory",
    "kv_use": "KV cache use",
    "prefix_hit_share": "prefix cache hit rate",
    "prompt_tokens": "prompt tokens",
    "generation_tokens": "output tokens",
    "ttft_mean": "mean TTFT by the server",
    "itl_mean": "mean ITL by the server",
    "queue_mean": "mean queue wait by the server",
    "prefill_mean": "mean prefill by the server",
    "running": "requests running",
    "waiting": "requests waiting",
    "preempted": "requests preempted",
    "recovered": "requests completed after preemption",
    "preempted_tokens": "tokens discarded by preemption",
    "swapped_tokens": "tokens swapped",
    "swapped": "requests swapped out",
    "prefix_queries": "prefix cache, tokens looked up",
    "prefix_hits": "prefix cache, tokens found",
    "ttft_seconds": "TTFT, sum",
    "ttft_values": "TTFT, count",
    "itl_seconds": "ITL, sum",
    "itl_values": "ITL, count",
    "queue_seconds": "queue wait, sum",
    "queue_values": "queue wait, count",
    "prefill_seconds": "prefill, sum",
    "prefill_values": "prefill, count",
}
"""Titles of series whose names alone would not be clear."""
_RATIO_PARTS: Final = frozenset(
    {"prefix_queries", "prefix_hits"}
    | {name for name in _SERIES_TITLES if name.endswith(("_seconds", "_values"))}
)
"""Series that the table does not show, because it shows their ratio: sum and count, or hits and queries."""
_STOLEN_SHARE_MAX: Final = 0.01
"""Share of stolen CPU time above which a report has a warning: other virtual machines on the same hardware
then change latencies noticeably."""
_Json = Mapping[str, Any]


def render_summary(summary: _Json) -> RenderableType:
    return terminal(summary_blocks(summary))


def summary_blocks(summary: _Json) -> Iterator[Note | Table]:
    """Yield a headline, the table of latencies, and notes on the parts that the summary has."""
    yield Note(_headline_text(summary), "bold")
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
    yield from map(Note, _summary_lines(summary))
    if caution := bursts_caution(summary):
        yield Note(f"caution: {caution}", "yellow")
    if is_marked(rows) or at(summary, "uncertainties", "marks"):
        yield Note(FEW, "yellow")


def _headline_text(summary: _Json) -> str:
    window, load = summary.get("window") or {}, summary.get("load") or {}
    parts = [f"window {window.get('name', '?')} ({window.get('seconds', 0.0):.1f} s)", f"n {summary['n']:,}"]
    if load.get("achieved_rps") is not None:
        parts.append(f"{number(load['achieved_rps'], 3)} req/s ended ({load.get('mode', '?')})")
    parts.append(f"ITL option {at(summary, 'metrics', 'itl', 'option') or '-'}")
    parts.append(f"tokens by {', '.join(at(summary, 'tokens', 'source') or ()) or '-'}")
    if stamps := at(summary, "uncertainties", "n") and summary["uncertainties"]:
        p50, p99 = (figure_text(stamps, name) for name in ("p50", "p99"))
        parts.append(f"uncertainty p50 {p50}, p99 {p99} ms")
    return " · ".join(parts)


def _summary_lines(summary: _Json) -> Iterator[str]:
    if summary.get("outcomes"):
        yield "outcomes   " + counts_text(summary["outcomes"], " · ")
    tokens = summary.get("tokens") or {}
    parts = [
        f"{name} {tokens[name]:,}" for name in ("input", "output", "reasoning", "cached") if tokens.get(name)
    ]
    if parts:
        rates = {name: tokens.get(f"{name}_per_second") for name in ("input", "output")}
        parts += [f"{number(rate, 3)} {name}/s" for name, rate in rates.items() if rate is not None]
        yield "tokens     " + " · ".join(parts)
    smooth = summary.get("smooth_goodput") or {}
    if smooth.get("tokens_per_second") is not None:
        basis = "several readers"
        if smooth["alpha"] is not None:
            basis = f"alpha {smooth['alpha']:g}, reader {smooth['speed_tokens_per_second']:g} tokens/s"
        rate = number(smooth["tokens_per_second"], 3)
        yield f"smooth     {rate} tokens/s goodput ({basis}{eq4_text(smooth)})"
    if goodput := goodput_text(summary):
        yield f"goodput    {goodput}"
    if text := without_dialect_text(summary):
        yield f"format     {text}"
    chunking = summary.get("chunking") or {}
    if chunking.get("events"):
        parts = [f"{chunking['content_events']:,} of {chunking['events']:,} events carry output"]
        known = chunking.get("chunks_with_known_tokens") or 0
        if chunking.get("tokens_per_chunk_mean") is not None and known >= chunking["content_events"] / 2:
            basis = "" if known == chunking["content_events"] else f" (of {known:,} with a known count)"
            parts.append(f"{chunking['tokens_per_chunk_mean']:.3g} tokens a chunk{basis}")
            parts.append(f"{chunking['single_token_share']:.1%} single")
        if chunking.get("events_per_read") is not None:
            parts.append(f"{chunking['events_per_read']:.3g} events a read")
        yield "chunking   " + " · ".join(parts)
    if at(summary, "refusals", "n"):
        yield f"refusals   {summary['refusals']['n']:,}: {counts_text(summary['refusals']['kinds'], ' · ')}"
    for line in label_lines(summary.get("labels")):
        yield f"labels     {line}"
    if upstream := summary.get("upstream"):
        parts = [
            f"{series_title(name)} {series_value_text(upstream['values'][name], unit)}"
            for name, unit in (("running", "requests"), ("waiting", "requests"), ("kv_use", "share"))
            if name in upstream["values"]
        ]
        yield "upstream   " + (" · ".join(parts) or f"not known: {upstream['problem']}")
    for name, relay in (summary.get("relays") or {}).items():
        yield f"relay      {name}: {_relay_text(relay)}"


def bursts_caution(summary: _Json) -> str:
    """Return a caution if the chunks of a summary arrive in bursts; else an empty text."""
    n, gap = chunks_at_a_time(summary.get("chunking") or {}), at(summary, "metrics", "tbc", "p50")
    if n is None or gap is None or gap * NS_PER_S > SPREAD_NS or not arrives_in_bursts(n, 1):
        return ""
    return " ".join(burst_sentences(n))


def not_judged_text(goodput: _Json) -> str:
    """Return the numbers of exchanges that the attainment excludes, by reason; empty if it includes all."""
    reasons = {
        "not_judged": "not judged, since their answers were not understood",
        "own_faults": "left out, since llmtap itself failed",
    }
    return "; ".join(f"{n:,} {reason}" for name, reason in reasons.items() if (n := goodput.get(name)))


def without_dialect_text(summary: _Json) -> str:
    """Return a text on the responses in no known dialect: their share, the main source, and the command that
    helps; empty if there are none."""
    places = summary.get("without_dialect") or []
    if not places:
        return ""
    parts = [
        f"{number(n / summary['n'] * 100, 2)} % {what}"
        for reading, what in (("none", "not understood"), ("inferred", "inferred"))
        if (n := sum(place["n"] for place in places if place["reading"] == reading))
    ]
    largest = places[0]
    place_text = f"{largest['path']} {largest['content_type'] or 'without a content type'}"
    return (
        f"{', '.join(parts)}; most: {place_text} ({largest['n']:,}); next: llmtap inspect FILE --draft NAME"
    )


def goodput_text(summary: _Json) -> str:
    """Return the goodput, and the share of requests that met the objectives with its 95 % interval.

    Empty if there are no objectives.
    """
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


def _relay_text(relay: _Json) -> str:
    if "opened" not in relay:
        return "no status yet"
    dropped = sum(relay["dropped"].values())
    parts = [f"opened {relay['opened']:,}", f"measured {relay['measured']:,}", f"not measured {dropped:,}"]
    if skipped := sum(relay.get("skipped", {}).values()):
        parts.append(f"not inference {skipped:,}")
    if relay.get("vantage") == "passive":
        packets = relay["packets"]
        parts.append(f"packets {packets.get('captured', 0):,}, lost {packets.get('lost', 0):,}")
        parts.append(f"missing bytes {relay['missing_bytes']:,}")
        parts.append(f"connections: {counts_text(relay['watched'], ', ') or 'none'}")
        if relay.get("side"):
            parts.append(f"seen at the {relay['side']}")
    else:
        parts.append(f"lag max {milliseconds(relay.get('lag_max'))} ms")
    if dropped:
        parts.append(f"dropped: {counts_text(relay['dropped'], ', ')}")
    return " · ".join(parts + ([] if relay.get("connected") else ["gone"]))


def system_blocks(resources: _Json) -> Iterator[Note | Table]:
    """Yield the table of CPU, memory, GPUs and server metrics, and notes: energy, processes, GPUs, and why a
    source has no samples."""
    yield system_table(resources)
    if energy := resources.get("energy"):
        yield Note("energy     " + " · ".join(_energy_parts(energy)))
    for side, processes in (resources.get("processes") or {}).items():
        if processes:
            names = ", ".join(dict.fromkeys(process["name"] for process in processes))
            yield Note(f"{side:<11}{count_with_noun(len(processes), 'process', 'processes')}: {names}")
    if devices := at(resources, "gpu", "devices"):
        yield Note("GPUs       " + ", ".join(devices))
    for source, reason in (resources.get("why_not") or {}).items():
        yield Note(f"{source:<11}not sampled: {reason}")


def system_table(resources: _Json, owner: str = "", caption: str = "") -> Table:
    """Return the table of the series that were sampled during the run.

    The last column has the growth of counters. `owner`: include only series of the `host`, the `server` or
    the `gpu`; empty: include all.
    """
    rows = []
    for part in ("system", "server"):
        for name, figures in (resources.get(part) or {}).items():
            series_owner = "server" if part == "server" else "gpu" if name.startswith("gpu") else "host"
            if (
                name in _RATIO_PARTS
                or owner not in ("", series_owner)
                or not (figures.get("n") or figures.get("total"))
            ):
                continue
            unit, rate = figures["unit"], figures.get("per_second")
            cells = [series_value_text(figures.get(f), unit) for f in _SERIES_FIGURES]
            if figures["kind"] == "counter":
                cells[0] = f"{number(rate, 3)}/s"
            total = series_value_text(figures.get("total"), unit)
            rows.append([series_title(name), f"{figures['n']:,}" if "n" in figures else "-", *cells, total])
    return Table(("", "n", *_SERIES_FIGURES, "in all"), rows, caption, nowrap=True)


def _energy_parts(energy: _Json) -> Iterator[str]:
    yield f"{number(energy['joules'], 3)} J in {format_ns(energy['seconds'] * 1e9)}"
    yield f"{number(energy['power'], 3)} W on average"
    if energy.get("joules_per_token") is not None:
        yield f"{number(energy['joules_per_token'], 3)} J per token of {energy['tokens']:,}"


def system_warnings(resources: _Json) -> Iterator[str]:
    """Yield warnings on missing samples of power, stolen CPU time, and failed scrapes of the server."""
    missing = at(resources, "energy", "seconds_missing") or 0
    if missing:
        yield f"power is not known of {format_ns(missing * 1e9)}: more energy was used than this figure"
    stolen = at(resources, "system", "host_stolen", "mean") or 0
    if stolen > _STOLEN_SHARE_MAX:
        yield f"the hypervisor gave {stolen:.1%} of this host's CPU time to others, which shows in latencies"
    scrape = resources.get("scrape") or {}
    if scrape.get("failed") and not scrape.get("gave_up"):
        reasons = counts_text(scrape["failures"])
        yield f"{scrape['failed']:,} of {scrape['scrapes']:,} scrapes of the server failed: {reasons}"


def scrape_text(resources: _Json) -> str:
    """Return the URL of the server metrics and the number of scrapes; empty if there was no scrape."""
    scrape = resources.get("scrape") or {}
    if not scrape.get("url") or not scrape.get("scrapes"):
        return ""
    if scrape.get("gave_up"):
        return f"nothing: {scrape['url']} was read once ({', '.join(scrape['failures'])})"
    missing = ", ".join(map(series_title, scrape.get("missing") or ()))
    return f"{scrape['url']}, {scrape['scrapes']:,} times" + (f"; not there: {missing}" if missing else "")


def series_title(name: str) -> str:
    """Return the title of a series, or its name if llmtap has no title for it."""
    device, _, quantity = name.partition("_")
    if device.startswith("gpu") and device[3:].isdecimal():
        return f"GPU {device[3:]}, {quantity}"
    return _SERIES_TITLES.get(name, name)


def series_value_text(value: float | None, unit: str) -> str:
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
