"""Systems held against each other, for a terminal and as Markdown: the checklist first, then what differs.

Takes the public JSON (`llmtap report RESULTS --compare OTHER --json`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from llmtap.report.bench import render_table
from llmtap.report.capture import harmless

__all__ = [
    "compare_markdown",
    "fairness_said",
    "normalised_rows",
    "render_compare",
    "unlike_said",
    "unmet_rows",
]


def render_compare(told: Mapping[str, Any]) -> RenderableType:
    """All of it."""
    parts: list[RenderableType] = []
    for test in told["tests"]:
        parts += [Text(harmless(_heading(test)), style="bold"), *_test(test), Text("")]
    parts += [Text(harmless(said), style="yellow") for said in left_out_said(told)]
    return Group(*parts)


def compare_markdown(told: Mapping[str, Any]) -> str:
    """The same as Markdown, with the whole checklist."""
    parts = [f"# {_cell(' and '.join(one['label'] for one in told['systems']))}, compared"]
    for test in told["tests"]:
        parts += [f"## {_cell(_heading(test))}", *(f"**{_cell(said)}**" for said in unlike_said(test))]
        parts += [f"Fair comparison (section 6): {fairness_said(test)}."]
        parts += [
            f"**{_cell(table['caption'])}**\n\n{_table(table['heads'], table['rows'])}"
            for table in test["tables"]
        ]
        parts += ["\n".join(f"- {_cell(note)}" for note in test["notes"])] if test["notes"] else []
        heads, rates = normalised_rows(test)
        parts += [f"**Output rates, normalised (6.2)**\n\n{_table(heads, rates)}"] if rates else []
        rows = [
            [row[name] for name in ("id", "level", "says", "status", "evidence")]
            for row in test["checklist"]["rows"]
        ]
        parts += [f"**Checklist**\n\n{_table(['Demand', 'Level', 'What', 'Status', 'Evidence'], rows)}"]
    parts += [_cell(said) for said in left_out_said(told)]
    return "\n\n".join(parts)


def fairness_said(test: Mapping[str, Any]) -> str:
    """`4 of 4 MUST, 9 of 13 procedures; lacking: 6.3-p2, 6.4-p6`."""
    told = test["checklist"]
    must, steps = told["must"], [row for row in told["rows"] if row["level"] == "procedure"]
    lacking = [row["id"] for row in unmet_rows(test)]
    done = len(steps) - sum(row["level"] == "procedure" for row in unmet_rows(test))
    said = f"{must['satisfied']} of {must['n']} MUST, {done} of {len(steps)} procedures"
    return f"{said}; lacking: {', '.join(lacking)}" if lacking else said


def unlike_said(test: Mapping[str, Any]) -> list[str]:
    """How loads differ, and what that means; empty where they do not."""
    if not test["unlike"]:
        return []
    return ["loads differ, and figures of them are not tested:", *(f"  {one}" for one in test["unlike"])]


def unmet_rows(test: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Of the checklist: what was not met, or cannot be told."""
    return [row for row in test["checklist"]["rows"] if row["status"] in ("not met", "cannot tell")]


def left_out_said(told: Mapping[str, Any]) -> list[str]:
    """Tests that not all have."""
    return [
        f"left out: {one['test']}, of which only {', '.join(one['only'])} has results"
        for one in told["left_out"]
    ]


def normalised_rows(test: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of 6.2; no rows where nothing says by what."""
    told = test["normalised"]
    if all(one["tokens_per_gpu_second"] is None and one["tokens_per_currency"] is None for one in told):
        told = ()
    rows = [
        [
            one["label"], _number(one["output_tps_max"]), _number(one["tokens_per_gpu_second"]),
            _number(one["tokens_per_currency"]) + (f" per {one['currency']}" if one["currency"] else ""),
        ]
        for one in told
    ]  # fmt: skip
    return [
        "System",
        "Output tok/s, highest load, median of runs",
        "tok per GPU-second",
        "tok by price",
    ], rows


def _heading(test: Mapping[str, Any]) -> str:
    others = [f"{one['label']} ({one['runs']} run{'s' * (one['runs'] != 1)})" for one in test["systems"]]
    return f"{test['section']} {test['title']}: {', '.join(others[1:])} against {others[0]}"


def _test(test: Mapping[str, Any]) -> Iterator[RenderableType]:
    for said in unlike_said(test):
        yield Text(harmless(said), style="bold red")
    fair = not unmet_rows(test)
    yield Text(f"fair comparison: {fairness_said(test)}", style="none" if fair else "yellow")
    for row in unmet_rows(test):
        yield Text(
            harmless(f"  {row['id']} {row['status']}: {row['says']} {row['evidence']}"), style="yellow"
        )
    if not test["tables"]:
        yield Text("nothing could be compared: no load in common, or too few requests")
    for table in test["tables"]:
        yield Text(harmless(table["caption"]), style="italic")
        yield render_table(table)
    for note in test["notes"]:
        yield Text(harmless(f"note: {note}"))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    """What would end a cell or begin a tag is spelt out."""
    return harmless(text).replace("|", "\\|").replace("<", "&lt;")
