"""Fetch all views once and print plain tables (`llmtap top --once`), for scripts and simple terminals.

`fetched` also runs before the interactive view starts, to report an admin port that does not answer. The
tables are those of `views.py`; no textual is needed.
"""

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any, Final

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from llmtap.errors import ConfigError, LlmtapError
from llmtap.top.client import TOKEN_ENV, Admin, Denied, Document, NotThere, TopOptions, Trouble, Untrusted
from llmtap.top.table import Column, ViewTable, facts, firing, fitting, flowed, shown, troubles
from llmtap.top.views import EXCHANGES, EXPERIMENT, STREAMS, VIEWS, Shown

ROWS_MAX: Final = 20
PIPED_CELLS: Final = 240
"""Width without a terminal; a table may be wider."""
_APART: Final = 2
_BY: Final = "tenant,model,arm"


async def probe(options: TopOptions, admin: Admin) -> Document:
    """Return a first summary. Raises ConfigError with a hint."""
    try:
        summary = await admin.get("summary", window=options.window, by=_BY)
        if not isinstance(summary.get("metrics"), dict):
            raise NotThere("the server is no admin port of llmtap: its answer is no summary")
        return summary
    except Denied as exc:
        raise ConfigError(
            "--token-env", f"{options.url}: {exc}",
            f"put the tap's meter.admin_token into ${TOKEN_ENV}, or name another variable, or --token-file",
        ) from None  # fmt: skip
    except Untrusted as exc:
        raise ConfigError(
            "--ca", f"{options.url}: {exc}",
            "the file with the CA that signed its certificate: --ca FILE; and ask by a name that it has",
        ) from None  # fmt: skip
    except NotThere as exc:
        raise ConfigError("--admin", f"{options.url}: {exc}") from None
    except Trouble as exc:
        start = "start the tap: llmtap proxy --upstream URL; or name its admin port: --admin http://HOST:9464"
        raise ConfigError("--admin", f"{options.url}: {exc}", exc.hint or start) from None


def fetched(options: TopOptions) -> dict[str, Any]:
    """Return all documents by name; None for paths that this llmtap does not have. Raises as `probe`."""

    async def fetch() -> dict[str, Any]:
        async with Admin(options.url, options.token, options.tls()) as admin:
            documents: dict[str, Any] = {"admin": options.url, "summary": await probe(options, admin)}
            limits = {STREAMS: "200", EXCHANGES: str(ROWS_MAX)}
            for path in (EXPERIMENT, STREAMS, EXCHANGES):
                query = {"limit": limits[path]} if path in limits else {}
                try:
                    documents[path] = await admin.get(path, **query)
                except NotThere:
                    documents[path] = None
                except Trouble as exc:
                    raise LlmtapError(f"{options.url}: {exc}") from None
            return documents

    return asyncio.run(fetch())


def render_once(documents: dict[str, Any], width: int, *, whole: bool = False) -> RenderableType:
    """Return the header and all tables with rows; `whole`: with columns that do not fit."""
    summary = documents["summary"]
    beside = {path: documents.get(path) for path in (EXPERIMENT, STREAMS, EXCHANGES)}
    told = Shown(summary, beside)
    parts: list[RenderableType] = [Text(f"llmtap top {shown(documents['admin'], 200)}", style="bold")]
    parts += [Text(trouble, style="bold") for trouble in [*troubles(summary), *firing(summary)]]
    parts += _lines(flowed(facts(summary), width))
    for view in VIEWS:
        table = view.table(told, width)
        notes = [note for note in table.notes if table.rows or view.path is not None]
        if table.rows or notes:
            parts.append(Text(f"\n{view.title}", style="bold"))
            parts += _lines(notes)
        if table.rows:
            parts += _table(table, None if whole else width, limited=view.name != "tap")
    return Group(*parts)


def print_once(documents: dict[str, Any], *, terminal: bool) -> None:
    """Print to standard output; if that is no terminal, nothing is wrapped or left out."""
    if terminal:
        console = Console(highlight=False)
        console.print(render_once(documents, console.width))
    else:
        # rich cuts a table that is wider than its console.
        console = Console(highlight=False, width=10_000, no_color=True)
        console.print(render_once(documents, PIPED_CELLS, whole=True), soft_wrap=True)


def _lines(lines: Iterable[str]) -> list[RenderableType]:
    return [Text(line) for line in lines]


def _table(table: ViewTable, room: int | None, *, limited: bool) -> Iterator[RenderableType]:
    """Yield the table; columns that do not fit are named below it."""
    rows = table.rows[:ROWS_MAX] if limited else table.rows
    titles = [_title(column) for column in table.columns]
    widths = [
        max(cell_len(titles[i]), *(cell_len(row.cells[i].text) for row in rows)) + _APART
        for i in range(len(titles))
    ]
    places = range(len(titles)) if room is None else fitting(table.columns, widths, room + _APART)
    drawn = RichTable(box=None, pad_edge=False, padding=(0, _APART, 0, 0), header_style="bold")
    for i in places:
        number = table.columns[i].number
        drawn.add_column(Text(titles[i]), justify="right" if number else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(row.cells[i].text) for i in places))
    yield drawn
    if len(rows) < len(table.rows):
        yield Text(f"... {len(table.rows) - len(rows):,} more")
    hidden = [title for i, title in enumerate(titles) if i not in places]
    if hidden:
        yield Text(f"({room} columns have no room for: {', '.join(hidden)}; `| cat` shows all)")


def _title(column: Column) -> str:
    return column.title.strip().replace("-\n", "").replace("/\n", "/").replace("\n", " ")
