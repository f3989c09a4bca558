"""Samples -> tables: medians over rounds, range, and the ratio to nginx within the same round.

The ratio is taken round by round and its median shown, because the machine's own mood changes between rounds
more than the proxies do, and a round's runs stand next to each other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from scenarios import Sample

REFERENCE = "nginx"


@dataclass(slots=True)
class Round:
    """One sample with where it belongs."""

    number: int
    scenario: str
    sample: Sample


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of a table. `ratio` adds a column against nginx, `over` subtracts another target's."""

    heading: str
    metric: str
    digits: int = 0
    spread: bool = False
    ratio: bool = False
    over: str = ""


COLUMNS: dict[str, list[Column]] = {
    "paced": [
        Column("events/s", "events_per_s"),
        Column("CPU us/event", "cpu_us_per_event", 1, spread=True, ratio=True),
        Column("one-way p50 us", "p50_us", spread=True, ratio=True),
        Column("added p50 us", "p50_us", over="direct"),
        Column("p99 us", "p99_us", spread=True),
        Column("p99.9 us", "p99.9_us"),
        Column("gap error p99 us", "gap_error_p99_us"),
        Column("waited %", "cpu_waited_percent", 1),
    ],
    "short": [
        Column("CPU us/request", "cpu_us_per_request", 1, spread=True, ratio=True),
        Column("requests/s", "requests_per_s"),
        Column("busy p99 us", "busy_p99_us"),
        Column("quiet p50 us", "quiet_p50_us"),
        Column("added p50 us", "quiet_p50_us", over="direct", spread=True),
        Column("waited %", "cpu_waited_percent", 1),
    ],
    "idle": [
        Column("KiB/stream", "kb_per_stream", 1, spread=True, ratio=True),
        Column("MiB before", "idle_mb", 1),
        Column("MiB with streams", "held_mb", 1),
        Column("streams", "streams"),
    ],
    "soak": [
        Column("MiB first", "first_mb", 1),
        Column("MiB last", "last_mb", 1),
        Column("MiB max", "max_mb", 1),
        Column("growth KiB/min", "growth_kb_per_min", 1),
        Column("worst p99 us", "p99_us"),
        Column("CPU us/event", "cpu_us_per_event", 1),
    ],
}
COLUMNS["gateway"] = COLUMNS["paced"]


def _by_target(rounds: Iterable[Round]) -> dict[str, dict[int, Sample]]:
    found: dict[str, dict[int, Sample]] = {}
    for entry in rounds:
        found.setdefault(entry.sample.target, {})[entry.number] = entry.sample
    return found


def _values(column: Column, target: str, by_target: dict[str, dict[int, Sample]]) -> dict[int, float]:
    """The column's figure of each round in which it can be told."""
    values = {n: s.metrics[column.metric] for n, s in by_target[target].items() if column.metric in s.metrics}
    if not column.over:
        return values
    base = {n: s.metrics.get(column.metric) for n, s in by_target.get(column.over, {}).items()}
    return {n: value - base[n] for n, value in values.items() if base.get(n) is not None}


def _ratio(column: Column, target: str, by_target: dict[str, dict[int, Sample]]) -> float | None:
    own = _values(column, target, by_target)
    reference = _values(column, REFERENCE, by_target) if REFERENCE in by_target else {}
    ratios = [value / reference[n] for n, value in own.items() if reference.get(n)]
    return median(ratios) if ratios else None


def _cell(column: Column, values: dict[int, float]) -> str:
    if not values:
        return "-"
    text = f"{median(values.values()):,.{column.digits}f}"
    if column.spread and len(values) > 1:
        low, high = min(values.values()), max(values.values())
        text += f" ({low:,.{column.digits}f}-{high:,.{column.digits}f})"
    return text


def _order(targets: Iterable[str], wanted: list[str]) -> list[str]:
    """As asked for; a target's parts right behind it."""
    return sorted(targets, key=lambda name: (wanted.index(name.partition(":")[0]), ":" in name))


def _table(scenario: str, rounds: list[Round], wanted: list[str]) -> list[list[str]]:
    columns = COLUMNS[scenario]
    by_target = _by_target(rounds)
    heading = ["target"]
    for column in columns:
        heading += [column.heading, "x nginx"] if column.ratio else [column.heading]
    lines = [[*heading, "whole"]]
    for target in _order(by_target, wanted):
        line = [target]
        for column in columns:
            line.append(_cell(column, _values(column, target, by_target)))
            if column.ratio:
                ratio = _ratio(column, target, by_target)
                line.append("-" if ratio is None else f"{ratio:.2f}")
        damaged = sum(not sample.whole for sample in by_target[target].values())
        line.append("yes" if not damaged else f"no, {damaged} of {len(by_target[target])}")
        lines.append(line)
    return lines


def _render(titles: dict[str, str], rounds: list[Round], wanted: list[str], draw: Callable) -> str:
    parts = []
    for scenario, title in titles.items():
        of_scenario = [entry for entry in rounds if entry.scenario == scenario]
        if of_scenario:
            count = len({entry.number for entry in of_scenario})
            parts.append(draw(title, count, _table(scenario, of_scenario, wanted)))
    return "\n".join(parts)


def terminal(titles: dict[str, str], rounds: list[Round], wanted: list[str]) -> str:
    """Tables for a terminal."""

    def draw(title: str, count: int, lines: list[list[str]]) -> str:
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        rows = [
            "  ".join(
                cell.ljust(w) if i == 0 else cell.rjust(w)
                for i, (cell, w) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        ]
        return f"\n{title} ({count} rounds: median, min-max)\n" + "\n".join(rows)

    return _render(titles, rounds, wanted, draw)


def markdown(titles: dict[str, str], rounds: list[Round], wanted: list[str], about: dict) -> str:
    """The same as a page of Markdown, with where it was measured."""

    def draw(title: str, count: int, lines: list[list[str]]) -> str:
        head, *rows = ["| " + " | ".join(line) + " |" for line in lines]
        rule = "|---|" + "---:|" * (len(lines[0]) - 1)
        return "\n".join([f"\n**{title}**, {count} rounds, median (min-max)\n", head, rule, *rows])

    facts = "\n".join(f"- {name}: {value}" for name, value in about.items())
    return f"# Relay benchmark\n\n{facts}\n{_render(titles, rounds, wanted, draw)}\n"


def write_results(folder: Path, stem: str, page: str, rounds: list[Round], about: dict) -> Path:
    """Writes STEM.md and STEM.json; returns the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.md").write_text(page)
    document = {"about": about, "rounds": [asdict(entry) for entry in rounds]}
    path = folder / f"{stem}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path
