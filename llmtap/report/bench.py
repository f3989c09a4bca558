"""A benchmark for a terminal: each test's tables, what a reader has to know, and which demands were met.

Takes the public JSON (`llmtap bench --json`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from llmtap.report.capture import harmless
from llmtap.report.terminal import is_words

__all__ = ["compliance_said", "findings_said", "render_bench", "render_table"]

UNMET_SHOWN: Final = 6
"""Of the requirements that a test does not meet; pages and Markdown have all."""


def render_bench(document: Mapping[str, Any], *, minimum_follows: bool = False) -> RenderableType:
    """All of it. Parts that are missing are left out.

    Args:
        minimum_follows: the minimum report (C.1) comes next, and tells each finding itself.
    """
    parts: list[RenderableType] = []
    for report in document.get("tests") or ():
        parts += [Text(f"{report['section']} {report['title']}", style="bold"), *_report(report), Text("")]
    for one in document.get("not_run") or ():
        hint = f"\n           {one['hint']}" if one.get("hint") else ""
        parts.append(Text(harmless(f"not run    {one['test']}: {one['why']}") + hint, style="yellow"))
    said = findings_said((document.get("verdict") or {}).get("findings") or ())
    if said and minimum_follows:
        said = ["some figures are not to be relied on: the notes at the end say which, and why"]
    parts += [Text(harmless(f"NOT VALID: {one}"), style="red") for one in said]
    return Group(*parts)


def findings_said(findings: Sequence[Mapping[str, Any]]) -> list[str]:
    """What speaks against figures: each kind of a test once, with its first load and how many more."""
    alike: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for finding in findings:
        alike.setdefault((finding["test"], finding["what"]), []).append(finding)
    said = []
    for (test, _), (first, *others) in alike.items():
        more = f" and {len(others):,} other load{'' if len(others) == 1 else 's'}" if others else ""
        said.append(f"{test}, {first['step']}{more}: {first['says']}")
    return said


def compliance_said(report: Mapping[str, Any]) -> str:
    """`conditionally compliant (61 of 61 MUST, 14 of 16 SHOULD); lacking: 4.6.3-2, 4.7.3-1`."""
    told = report.get("compliance") or {}
    if not told:
        return "not judged"
    must, should = told["must"], told["should"]
    counts = f"{must['satisfied']} of {must['n']} MUST, {should['satisfied']} of {should['n']} SHOULD"
    why = list(told["why"])
    more = f" and {len(why) - UNMET_SHOWN:,} more" if len(why) > UNMET_SHOWN else ""
    lacking = f"; lacking: {', '.join(why[:UNMET_SHOWN])}{more}" if why else ""
    return f"{told['level']} ({counts}){lacking}"


def render_table(table: Mapping[str, Any]) -> Table:
    """One of a report's tables, without its caption: texts to the left, figures to the right."""
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i, head in enumerate(table["heads"]):
        left = i == 0 or is_words(row[i] for row in table["rows"])
        shown.add_column(Text(harmless(head)), justify="left" if left else "right")
    for row in table["rows"]:
        shown.add_row(*(Text(harmless(cell)) for cell in row))
    return shown


def _report(report: Mapping[str, Any]) -> Iterator[RenderableType]:
    configuration = " · ".join(f"{k}: {v}" for k, v in (report.get("configuration") or {}).items())
    if configuration:
        yield Text(harmless(configuration))
    for table in report.get("tables") or ():
        yield Text(harmless(table["caption"]), style="italic")
        yield render_table(table)
    for note in report.get("notes") or ():
        yield Text(harmless(f"note: {note}"))
    for said in report.get("deviations") or ():
        yield Text(harmless(f"deviation: {said}"), style="yellow")
    if report.get("forfeits"):
        yield Text(f"--quick gives up: {', '.join(report['forfeits'])}", style="yellow")
    yield from _compliance(report.get("compliance") or {})


def _compliance(told: dict[str, Any]) -> Iterator[RenderableType]:
    """The status, and what is in the way of a better one."""
    if not told:
        return
    yield Text(compliance_said({"compliance": told | {"why": ()}}), style="bold")
    rows: Sequence[Mapping[str, Any]] = [row for row in told["rows"] if row["id"] in told["why"]]
    for row in rows[:UNMET_SHOWN]:
        said = f"  {row['id']} {row['level']}, {row['status']}: {row['says']} {row['evidence']}"
        yield Text(harmless(said), style="yellow")
    if len(rows) > UNMET_SHOWN:
        yield Text(f"  and {len(rows) - UNMET_SHOWN:,} more: they are in report.md and on the page")
