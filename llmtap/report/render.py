"""Render blocks for a terminal (with rich), and documents as Markdown and as HTML pages.

`terminal` takes blocks; `markdown` and `page_html` take a `ReportDocument` (`document.py`). Markdown has no
charts. A page loads no other file: it contains the script that draws its charts (`plot.js`), and its security
policy forbids requests. The template `page.html` escapes every text, and the script inserts all its data as
text.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Final

import msgspec
from markupsafe import Markup
from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from llmtap.errors import printable
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
from llmtap.report.values import is_words

if TYPE_CHECKING:
    from jinja2 import Template

_TERM_WIDTH: Final = 14
_TEMPLATE_ID_PREFIX: Final = "page-"
"""Prefix of the ids in `page.html` itself. Ids of sections and plots must not begin with it."""
_GAP: Final = 2
"""Number of spaces between two columns in a terminal."""


def terminal(blocks: Iterable[Block]) -> RenderableType:
    """Return the blocks for a rich Console. Omit charts, tiles, and tables without rows and caption."""
    parts: list[RenderableType] = []

    def line(text: str, style: str = "") -> None:
        parts.append(Text(printable(text), style=style))

    for block in blocks:
        match block:
            case Note():
                line(f"{block.lead} {block.text}".rstrip() if block.lead else block.text, block.style)
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


def rich_table(table: Table) -> RichTable:
    """Return a table for a rich Console: words are aligned left, figures right."""
    shown = RichTable(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for i, head in enumerate(table.heads):
        is_left = i == 0 or is_words(row[i] for row in table.rows)
        shown.add_column(
            Text("\n".join(map(printable, head.split("\n")))),
            justify="left" if is_left else "right",
            no_wrap=table.nowrap,
        )
    for row in table.rows:
        shown.add_row(*(Text(printable(cell), style=table.styles.get(cell, "")) for cell in row))
    return shown


def tables_that_fit(table: Table, width: int) -> list[Table]:
    """Divide the columns of a table into tables of at most `width` characters, so that no figure is cut.

    Each part begins with the key columns.
    """
    widths = [
        max(len(line) for cell in cells for line in cell.split("\n")) + _GAP
        for cells in zip(table.heads, *table.rows, strict=True)
    ]
    keys = list(range(table.key_columns))
    parts: list[list[int]] = []
    remaining = 0
    for i in range(table.key_columns, len(widths)):
        if not parts or widths[i] > remaining:
            parts.append(keys.copy())
            remaining = width + _GAP - sum(widths[k] for k in keys)
        parts[-1].append(i)
        remaining -= widths[i]
    return [
        replace(
            table, heads=[table.heads[i] for i in part], rows=[[row[i] for i in part] for row in table.rows]
        )
        for part in parts
    ]


def markdown(document: ReportDocument, *, special: str = "\\|*_`") -> str:
    """Return the document as Markdown, without a final line end. `special`: characters to escape."""

    def text(source: str) -> str:
        shown = printable(source.replace("\n", " "))
        for character in special:
            shown = shown.replace(character, f"\\{character}")
        return shown.replace("<", "&lt;")

    def list_text(items: Sequence[str]) -> str:
        return "\n".join(f"- {text(item)}" for item in items)

    def table_text(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
        lines = [heads, ["---"] * len(heads), *rows]
        return "\n".join(f"| {' | '.join(map(text, line))} |" for line in lines)

    def block_texts(blocks: Iterable[Block]) -> Iterator[str]:
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
                        yield list_text(block.items)
                case ItemList():
                    yield list_text(block.items)
                case Table():
                    if block.caption:
                        yield f"**{text(block.caption)}**"
                    yield table_text(block.heads, block.rows)
                    if block.footnote:
                        yield text(block.footnote)
                case TableGroup():
                    yield from block_texts(block.tables)
                case TermTable():
                    yield table_text(["", ""], block.rows)
                case Compliance():
                    if block.caption:
                        yield f"**{text(block.caption)}**"
                    names = ("id", "level", "says", "status", "evidence")
                    rows = [[row[name] for name in names] for row in block.rows]
                    yield table_text(["Id", "Level", "What is demanded", "Status", "Evidence"], rows)
                case Preformatted():
                    yield f"```\n{block.text}\n```"
                case _:
                    pass

    paragraphs = [f"# {text(document.title)}", *block_texts(document.summary)]
    for section in document.sections:
        paragraphs += [f"{'#' * section.level} {text(section.heading)}", *block_texts(section.blocks)]
    return "\n\n".join(paragraphs)


def page_html(document: ReportDocument, *assets: str) -> str:
    """Return the document as an HTML page. `assets`: additional files (.css, .js) of this folder.

    Ids of elements are the keys of sections and plots. Raises ValueError if a key is empty, occurs twice, or
    begins with `_TEMPLATE_ID_PREFIX`.
    """
    drawn = [
        (f"{figure.key}-{i}", panel.plot)
        for figure in document.figures()
        for i, panel in enumerate(figure.panels)
    ]
    ids = ["settings"] * bool(document.settings)
    ids += [section.key for section in document.sections] + [key for key, _ in drawn]
    if len(set(ids)) < len(ids) or any(not key or key.startswith(_TEMPLATE_ID_PREFIX) for key in ids):
        raise ValueError(
            f"each id of the page must be unique and not begin with {_TEMPLATE_ID_PREFIX!r}, got {ids}"
        )
    plots = dict(drawn)
    return _page_template().render(
        doc=document,
        style=_page_parts("curves.css", "plot.css", *(name for name in assets if name.endswith(".css"))),
        script=_page_parts("plot.js", "curves.js", *(name for name in assets if name.endswith(".js"))),
        data=_json_markup({"lines": [line.settings for line in document.lines], "plots": plots}),
    )


@cache
def _page_template() -> "Template":
    from jinja2 import Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("llmtap.report", ""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_escape_html,
    )
    environment.filters["json"] = lambda value: str(_json_markup(value))
    return environment.get_template("page.html")


def _escape_html(value: object) -> Markup:
    """Escape text as `html.escape` does everywhere else; MarkupSafe would write other entities for quotes."""
    return value if isinstance(value, Markup) else Markup(escape(str(value)))


def _page_parts(*names: str) -> Markup:
    return Markup(
        "".join(files("llmtap.report").joinpath(name).read_text(encoding="utf-8") for name in names)
    )


def _json_markup(value: object) -> Markup:
    """Return a value as JSON for a script element, without `<`, which could begin the element's end tag."""
    return Markup(msgspec.json.encode(value).decode().replace("<", "\\u003c"))
