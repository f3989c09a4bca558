"""Render notes and tables for a terminal (with rich), and documents as Markdown, without their charts.

`terminal` takes notes and tables, `markdown` a `ReportDocument` (`document.py`). `page.py` renders HTML.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from llmtap.report.document import (
    Block,
    Compliance,
    ItemList,
    Note,
    Preformatted,
    ReportDocument,
    Table,
    TableGroup,
    TermTable,
    VerdictBox,
)
from llmtap.report.values import harmless, is_words

_GAP = 2
"""Blanks between two columns."""


def terminal(blocks: Iterable[Note | Table]) -> RenderableType:
    """Return what a rich Console prints; tables without rows and caption are left out."""
    parts: list[RenderableType] = []
    for block in blocks:
        if isinstance(block, Note):
            parts.append(Text(harmless(block.text), style=block.style))
            continue
        if block.caption:
            parts.append(Text(harmless(block.caption), style="italic"))
        if block.rows or block.caption:
            parts.append(rich_table(block))
        if block.footnote:
            parts.append(Text(block.footnote, style="yellow"))
    return Group(*parts)


def terminal_text(blocks: Iterable[Note | Table], width: int = 80) -> str:
    console = Console(width=width, no_color=True, force_terminal=False, highlight=False)
    with console.capture() as capture:
        console.print(terminal(blocks))
    return capture.get()


def rich_table(table: Table) -> RichTable:
    """Words are aligned left, figures right."""
    shown = RichTable(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for i, head in enumerate(table.heads):
        left = i == 0 or is_words(row[i] for row in table.rows)
        shown.add_column(
            Text("\n".join(map(harmless, head.split("\n")))),
            justify="left" if left else "right",
            no_wrap=table.nowrap,
        )
    for row in table.rows:
        shown.add_row(*(Text(harmless(cell), style=table.styles.get(cell, "")) for cell in row))
    return shown


def tables_that_fit(table: Table, width: int) -> list[Table]:
    """Divide the columns so that no figure is cut; each part begins with the key columns."""
    widths = [max(len(line) for cell in cells for line in cell.split("\n")) + _GAP
              for cells in zip(table.heads, *table.rows, strict=True)]  # fmt: skip
    keys = list(range(table.keys))
    parts: list[list[int]] = []
    left = 0
    for i in range(table.keys, len(widths)):
        if not parts or widths[i] > left:
            parts.append(keys.copy())
            left = width + _GAP - sum(widths[k] for k in keys)
        parts[-1].append(i)
        left -= widths[i]
    return [
        replace(
            table, heads=[table.heads[i] for i in part], rows=[[row[i] for i in part] for row in table.rows]
        )
        for part in parts
    ]


def markdown(document: ReportDocument, *, special: str = "\\|*_`") -> str:
    """Return the text without an end of line at its end; `special` are the characters that are escaped."""

    def text(of: str) -> str:
        shown = harmless(of.replace("\n", " "))
        for character in special:
            shown = shown.replace(character, f"\\{character}")
        return shown.replace("<", "&lt;")

    def listed(items: Sequence[str]) -> str:
        return "\n".join(f"- {text(item)}" for item in items)

    def tabled(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
        lines = [heads, ["---"] * len(heads), *rows]
        return "\n".join(f"| {' | '.join(map(text, line))} |" for line in lines)

    def parts(blocks: Iterable[Block]) -> Iterator[str]:
        for block in blocks:
            match block:
                case Note():
                    yield (
                        f"**{text(block.lead)}** {text(block.text)}".strip()
                        if block.lead
                        else text(block.text)
                    )
                case VerdictBox():
                    yield f"**{block.lead}** {block.text}"
                    if block.items:
                        yield listed(block.items)
                case ItemList():
                    yield listed(block.items)
                case Table():
                    if block.caption:
                        yield f"**{text(block.caption)}**"
                    yield tabled(block.heads, block.rows)
                    if block.footnote:
                        yield text(block.footnote)
                case TableGroup():
                    yield from parts(block.tables)
                case TermTable():
                    yield tabled(["", ""], block.rows)
                case Compliance():
                    if block.caption:
                        yield f"**{text(block.caption)}**"
                    names = ("id", "level", "says", "status", "evidence")
                    rows = [[row[name] for name in names] for row in block.rows]
                    yield tabled(["Id", "Level", "What is demanded", "Status", "Evidence"], rows)
                case Preformatted():
                    yield f"```\n{block.text}\n```"
                case _:
                    pass

    found = [f"# {text(document.title)}", *parts(document.summary)]
    for section in document.sections:
        found += [f"{'#' * section.level} {text(section.heading)}", *parts(section.blocks)]
    return "\n\n".join(found)
