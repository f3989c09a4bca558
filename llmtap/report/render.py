"""Render blocks for a terminal (with rich), and documents as Markdown and as HTML pages.

`terminal` takes blocks; `markdown` and `page_html` take a `ReportDocument` (`document.py`). Markdown has no
charts. A page loads nothing: plotly is in it, and its policy forbids requests. The template `page.html`
escapes every text; texts for plotly are escaped before, since it reads tags in them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

import msgspec
from markupsafe import Markup
from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from llmtap.report.document import (
    COLOURS,
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

if TYPE_CHECKING:
    from jinja2 import Template

_TERM_WIDTH: Final = 14
_GAP: Final = 2
"""Blanks between two columns."""
_DASH_ARRAYS: Final = {
    "solid": "", "dash": "7 4", "dot": "2 3", "dashdot": "7 3 2 3", "longdash": "11 4",
    "longdashdot": "11 3 2 3",
}  # fmt: skip
"""Plotly's dashes in SVG."""
_SHAPES: Final = {
    "circle": Markup('<circle cx="20" cy="7" r="4.5"/>'),
    "square": Markup('<path d="M16 3h8v8h-8z"/>'),
    "diamond": Markup('<path d="M20 1.5 25.5 7 20 12.5 14.5 7z"/>'),
    "triangle-up": Markup('<path d="M20 1.5 25.5 11.5h-11z"/>'),
    "cross": Markup('<path d="M18 2h4v3h3v4h-3v3h-4v-3h-3v-4h3z"/>'),
    "x": Markup('<path d="m17 2 3 3 3-3 2.5 2.5L22.5 7.5l3 3L23 13l-3-3-3 3-2.5-2.5 3-3-3-3z"/>'),
}
"""Plotly's symbols in SVG."""


def terminal(blocks: Iterable[Block]) -> RenderableType:
    """Return what a rich Console prints; charts, tiles, and tables without rows and caption are left out."""
    parts: list[RenderableType] = []

    def line(text: str, style: str = "") -> None:
        parts.append(Text(harmless(text), style=style))

    for block in blocks:
        match block:
            case Note():
                line(f"{block.lead} {block.text}" if block.lead else block.text, block.style)
            case VerdictBox():
                style = "red" if not block.good else "yellow" if block.items else "green"
                line(f"{block.lead} {block.text}", style)
                for item in block.items:
                    line(f"- {item}", style)
            case ItemList():
                for item in block.items:
                    line(f"- {item}")
            case TermTable():
                for term, *cells in block.rows:
                    line(f"{term:<{_TERM_WIDTH}} {' '.join(cells)}")
            case TableGroup():
                parts.append(terminal(block.tables))
            case Table():
                if block.caption:
                    line(block.caption, "italic")
                if block.rows or block.caption:
                    parts.append(rich_table(block))
                if block.footnote:
                    line(block.footnote, "yellow")
    return Group(*parts)


def terminal_text(blocks: Iterable[Block], width: int = 80) -> str:
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


def page_html(document: ReportDocument, *assets: str) -> str:
    """Return the page; `assets` are style sheets and scripts of this folder beside those of every page."""
    from plotly.offline import get_plotlyjs  # imported late: it takes its time, and only pages need it

    plots = {
        f"{figure.key}-{i}": {"data": panel.data, "layout": panel.layout}
        for figure in document.figures()
        for i, panel in enumerate(figure.panels)
    }
    lines: list[Mapping[str, Any]] = [{"of": line.of, "colour": line.colour} for line in document.lines]
    lines = lines or [{"of": {}, "colour": i} for i in range(COLOURS)]
    return _template().render(
        doc=document,
        dashes=_DASH_ARRAYS,
        shapes=_SHAPES,
        style=_parts("curves.css", *(name for name in assets if name.endswith(".css"))),
        script=_parts("curves.js", *(name for name in assets if name.endswith(".js"))),
        figures=_json({"lines": lines, "plots": plots}),
        plotly=Markup(get_plotlyjs()),
    )


@cache
def _template() -> "Template":
    from jinja2 import Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("llmtap.report", ""), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, finalize=_escaped,
    )  # fmt: skip
    environment.filters["json"] = lambda value: str(_json(value))
    return environment.get_template("page.html")


def _escaped(value: object) -> Markup:
    """Spell quotes as Python's standard library does."""
    return value if isinstance(value, Markup) else Markup(escape(str(value)))


def _parts(*names: str) -> Markup:
    return Markup(
        "".join(files("llmtap.report").joinpath(name).read_text(encoding="utf-8") for name in names)
    )


def _json(value: object) -> Markup:
    """For inside a script element: without a `<` that could end it."""
    return Markup(msgspec.json.encode(value).decode().replace("<", "\\u003c"))
