"""The result of a soak as tables in a terminal, and as a page with its curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from llmtap.report.document import (
    Axis,
    FigureBlock,
    LegendKey,
    Look,
    Mark,
    Panel,
    Plot,
    PlotSeries,
    ReportDocument,
    Section,
)
from llmtap.report.render import page_html

COLOURS = {"supervisor": "c6", "relay": "c0", "meter": "c1"}
UNITS = {"rss": "RSS, MiB", "pss": "PSS, MiB", "files": "open files"}


def show(result: dict[str, Any], console: Console) -> None:
    about, clients, accounts = result["about"], result["clients"], result["accounts"]
    console.print(
        f"\n{about['hours of the day']:.1f} hours of {about['requests per second of the day']:g} requests/s"
        f" in {clients['seconds'] / 60:.1f} minutes: {about['requests']:,} requests, {about['tokens']:,}"
        f" tokens, {clients['under_way_max']:,} at once; {about['machine']}, {about['date']}"
    )
    console.print(_growths(result["growth"]))
    rest = ", ".join(
        f"{role} {a} before and {b} after" for role, (a, b) in result["growth"]["files_at_rest"].items()
    )
    console.print(f"open files at rest: {rest}")
    ended = ", ".join(f"{how} {n:,}" for how, n in sorted(clients["outcomes"].items()))
    acts = ", ".join(f"{act['what']} at {act['t_s']:.0f} s" for act in result["watched"]["acts"])
    console.print(f"answers: {ended}\nacts: {acts}; files rotated every {result['rotate_s']:g} s")
    scrapes = result["watched"]["scrapes"]
    if scrapes:
        worst = max(scrapes, key=lambda one: one["took_s"])
        console.print(
            f"scrapes: {len(scrapes):,}, {result['watched']['failed_scrapes']} without answer, at most"
            f" {worst['took_s'] * 1e3:.0f} ms and {max(one['bytes'] for one in scrapes):,} bytes;"
            f" folded into `other`: {scrapes[-1]['sums']['llmtap_label_overflow_total']:,.0f}"
        )
    table = Table(
        "asked", "began", "rows", "dropped", "not kept", "lost (at most)", "both", "files", "compared"
    )
    table.add_row(
        f"{accounts['asked']:,}" + (f" + {accounts['retried']} again" if accounts["retried"] else ""),
        f"{accounts['opened']:,}",
        f"{accounts['rows']:,}",
        _counts(accounts["dropped"]),
        _counts(accounts["not_kept"]),
        f"{accounts['lost']:,} ({accounts['lost_max']:,})",
        f"{accounts['twice']:,}",
        f"{accounts['files']:,} of {accounts['meters']} meters",
        f"{accounts['compared']:,} streams",
    )
    console.print(table)
    for name, key in (("/metrics of the last meter", "counters"), ("files of the last meter", "kept")):
        sums = accounts[key]
        exchanges, output = sum(sums["exchanges"].values()), _counts(sums["output"])
        console.print(f"{name}: {exchanges:,} exchanges, output tokens {output}, input {sums['input']:,}")
    for complaint in result["wrong"]:
        console.print(f"[bold]WRONG[/bold]: {complaint}", highlight=False)
    console.print("failed" if result["wrong"] else "flat, and all counts agree")


def _growths(growth: dict[str, Any]) -> Table:
    table = Table(
        "process",
        "figure",
        "first third",
        "middle",
        "last third",
        "grown",
        "may grow",
        "slope per minute (95 %)",
    )
    for role, figures in growth["by_role"].items():
        for name, one in figures.items():
            bound = f"{growth['bounds_mib'][role]:g}" if name == "rss" else ""
            table.add_row(
                role,
                UNITS[name],
                *(f"{one[key]:,.2f}" for key in ("first", "middle", "last")),
                f"{one['grown']:+.2f}",
                bound,
                f"{one['slope']:+.3f} ({one['low']:+.3f} to {one['high']:+.3f})",
            )
    return table


def _counts(found: dict[str, int]) -> str:
    return ", ".join(f"{name} {n:,}" for name, n in sorted(found.items())) or "0"


def write_page(result: dict[str, Any], place: Path) -> None:
    """Resident memory and open files of every process over the run, its acts as marks."""
    lives: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for one in result["watched"]["looks"]:
        lives.setdefault((one["role"], one["pid"]), []).append(one)
    marks = [Mark(act["t_s"], act["what"]) for act in result["watched"]["acts"]]
    legend = [LegendKey(role, Look(colour)) for role, colour in COLOURS.items()]

    def panel(title: str, series: list[PlotSeries]) -> Panel:
        plot = Plot(series, Axis("s"), Axis(), "{y} at {x} s", marks, timed=True)
        return Panel(title, f"{title}, over the run.", plot)

    def of_processes(title: str, name: str, factor: float) -> Panel:
        series = []
        for (role, _), looks in lives.items():
            x, y = [one["t_s"] for one in looks], [one[name] * factor for one in looks]
            series.append(PlotSeries(name=role, x=x, y=y, ink=COLOURS[role]))
        return panel(title, series)

    scrapes = result["watched"]["scrapes"]
    ended = [one["sums"]["llmtap_exchanges_total"] for one in scrapes]
    exchanges = PlotSeries(name="exchanges", x=[one["t_s"] for one in scrapes], y=ended, ink="c2")
    panels = [
        of_processes("Resident memory, MiB", "rss", 1 / 1024),
        of_processes("Open files", "files", 1),
        panel("Exchanges ended, as /metrics tells", [exchanges]),
    ]
    about = result["about"]
    title = f"Soak: {about['hours of the day']:.1f} hours in {about['minutes']:g} minutes, {about['date']}"
    figure = FigureBlock("processes", "Processes over the run", panels, [], legend=legend)
    document = ReportDocument(title, sections=[Section(figure.key, figure.heading, [figure])])
    place.write_text(page_html(document), encoding="utf-8")
