"""A Summary as a table in the terminal: latencies in ms, to three significant digits.

Takes the public JSON form (`Summary.to_dict`, `/api/v1/summary`), so a summary read from a file or over
HTTP prints like one made here. Whatever makes a figure doubtful is printed beside it.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from llmtap.metrics.statistics import SAMPLES_MIN

__all__ = ["figure_text", "is_words", "milliseconds", "number_text", "render_summary", "summary_text"]

_ROWS: Final = {
    "ttft": "TTFT",
    "ttft_any": "TTFT, any token",
    "ttfb": "TTFB",
    "tbc": "TBC",
    "itl": "ITL",
    "tpot": "TPOT",
    "e2e": "E2E",
    "user_idle": "user idle",
    "tbc_max": "longest pause",
    "jitter": "jitter",
}
_ADDED: Final = {"request": "added, request", "first_chunk": "added, first chunk", "chunk": "added, chunk"}
_FIGURES: Final = ("mean", "p50", "p90", "p99", "max")
_MARK: Final = "*"
_UNIT_WORDS_MAX: Final = 2


def render_summary(summary: Mapping[str, Any]) -> RenderableType:
    """The summary as something a rich Console prints. Parts that are missing are left out."""
    parts: list[RenderableType] = [Text(_headline(summary), style="bold")]
    table = _table(summary)
    parts += [table] if table.row_count else []
    parts += [Text(line) for line in _lines(summary)]
    if _is_marked(summary):
        parts.append(
            Text(f"{_MARK} from fewer than {SAMPLES_MIN['p99']:,} samples (IETF 5.1.4.3)", style="yellow")
        )
    return Group(*parts)


def summary_text(summary: Mapping[str, Any], width: int = 80) -> str:
    """The same as plain text without colours."""
    console = Console(width=width, no_color=True, force_terminal=False, highlight=False)
    with console.capture() as capture:
        console.print(render_summary(summary))
    return capture.get()


def _headline(summary: Mapping[str, Any]) -> str:
    window, load = summary.get("window") or {}, summary.get("load") or {}
    option = ((summary.get("metrics") or {}).get("itl") or {}).get("option")
    sources = (summary.get("tokens") or {}).get("source") or {}
    said = [f"window {window.get('name', '?')} ({window.get('seconds', 0.0):.1f} s)", f"n {summary['n']:,}"]
    if load.get("achieved_rps") is not None:
        said.append(f"{number_text(load['achieved_rps'])} req/s ended ({load.get('mode', '?')})")
    said.append(f"ITL option {option or '-'}")
    said.append(f"tokens by {', '.join(sources) or '-'}")
    if summary.get("uncertainty") is not None:
        said.append(f"uncertainty {milliseconds(summary['uncertainty'])} ms")
    return " · ".join(said)


def _table(summary: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("ms", no_wrap=True)
    for name in ("n", *_FIGURES):
        table.add_column(name, justify="right", no_wrap=True)
    for group, rows in (("metrics", _ROWS), ("added", _ADDED)):
        for name, title in rows.items():
            figures = (summary.get(group) or {}).get(name)
            if figures is None or not figures["n"]:
                continue
            option = figures.get("option")
            cells = [figure_text(figures, figure) for figure in _FIGURES]
            table.add_row(f"{title} ({option})" if option else title, f"{figures['n']:,}", *cells)
    return table


def _lines(summary: Mapping[str, Any]) -> Iterator[str]:
    if summary.get("outcomes"):
        yield "outcomes   " + " · ".join(f"{name} {n:,}" for name, n in summary["outcomes"].items())
    tokens = summary.get("tokens") or {}
    counted = [
        f"{name} {tokens[name]:,}" for name in ("input", "output", "reasoning", "cached") if tokens.get(name)
    ]
    if counted:
        rate = tokens.get("output_per_second")
        said = [] if rate is None else [f"{number_text(rate)} output/s"]
        yield "tokens     " + " · ".join(counted + said)
    smooth = summary.get("smooth_goodput") or {}
    if smooth.get("tokens_per_second") is not None:
        of = "several readers"
        if smooth["alpha"] is not None:
            of = f"alpha {smooth['alpha']:g}, reader {smooth['speed_tokens_per_second']:g} tokens/s"
        yield f"smooth     {number_text(smooth['tokens_per_second'])} tokens/s goodput ({of})"
    goodput = summary.get("goodput") or {}
    if goodput.get("attainment") is not None:
        refused = (summary.get("outcomes") or {}).get("refused")
        judged = " (a refusal is judged by its times, too)" if refused else ""
        yield (
            f"goodput    {number_text(goodput['requests_per_second'])} req/s,"
            f" {goodput['met']:,} of {goodput['counted']:,} met {goodput['objectives']}{judged}"
        )
    chunking = summary.get("chunking") or {}
    if chunking.get("events"):
        said = [f"{chunking['content_events']:,} of {chunking['events']:,} events carry output"]
        if chunking.get("tokens_per_chunk_mean") is not None:
            said.append(f"{chunking['tokens_per_chunk_mean']:.3g} tokens a chunk")
            said.append(f"{chunking['single_token_share']:.1%} single")
        yield "chunking   " + " · ".join(said)
    if (summary.get("refusals") or {}).get("n"):
        kinds = " · ".join(f"{kind} {n:,}" for kind, n in summary["refusals"]["kinds"].items())
        yield f"refusals   {summary['refusals']['n']:,}: {kinds}"
    for name, relay in (summary.get("relays") or {}).items():
        yield f"relay      {name}: {_relay(relay)}"


def _relay(relay: Mapping[str, Any]) -> str:
    if "opened" not in relay:
        return "no status yet"
    dropped = sum(relay["dropped"].values())
    said = [f"opened {relay['opened']:,}", f"measured {relay['measured']:,}", f"not measured {dropped:,}"]
    said.append(f"lag max {milliseconds(relay.get('lag_max'))} ms")
    return " · ".join(said + ([] if relay.get("connected") else ["gone"]))


def figure_text(figures: Mapping[str, Any], name: str) -> str:
    """One statistic of a metric in ms, marked where too few samples carry it."""
    text = milliseconds(figures.get(name))
    return text + (_MARK if name in figures.get("marks", ()) and text != "-" else "")


def _is_marked(summary: Mapping[str, Any]) -> bool:
    return any(
        _MARK in figure_text(figures, "p99")
        for group, rows in (("metrics", _ROWS), ("added", _ADDED))
        for name, figures in (summary.get(group) or {}).items()
        if name in rows
    )


def is_words(column: Iterable[str]) -> bool:
    """Whether a table's column is to be read from the left: names, sentences, and no figures with units."""
    return any(
        cell[:1].isalpha()
        or sum(word[:1].isalpha() for word in cell.partition("(")[0].split()) > _UNIT_WORDS_MAX
        for cell in column
    )


def number_text(value: float) -> str:
    """Three significant digits, more before the point, never in powers of ten."""
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def milliseconds(seconds: float | None) -> str:
    """Milliseconds, three significant digits, never in powers of ten."""
    if seconds is None:
        return "-"
    ms = seconds * 1e3
    if abs(ms) >= 999.5:
        return f"{ms:,.0f}"
    for digits, limit in ((0, 99.95), (1, 9.995), (2, 0.9995), (3, 0.09995)):
        if abs(ms) >= limit:
            return f"{ms:.{digits}f}"
    return f"{ms:.4f}" if ms else "0"
