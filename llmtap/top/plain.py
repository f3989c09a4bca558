"""Fetch all views once and print plain tables (`llmtap top --once`), for scripts and simple terminals.

`fetch_documents` also runs before the interactive view starts, to report an admin port that does not answer.
The tables are those of `views.py`; textual is not needed.
"""

import asyncio
from collections.abc import Iterator
from io import StringIO
from typing import Final

from rich.console import Console, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from llmtap.errors import ConfigError, LlmtapError
from llmtap.top.client import TOKEN_ENV, Admin, Denied, TopOptions, Trouble, Untrusted
from llmtap.top.table import ViewTable, facts, firing_sentences, flow_lines, visible_text, warnings_of
from llmtap.top.views import VIEWS, Document, Documents

ROWS_MAX: Final = 20
"""Maximum number of rows of a printed table, except for the view on llmtap itself, which is complete."""
PIPED_CELLS: Final = 240
"""Width (number of characters) of the header's lines if the output is not a terminal."""
_COLUMN_GAP: Final = 2
_LABELS: Final = "tenant,model,arm"
"""Labels by which the requested summary is split, so that it has the data of all views."""


async def probe(options: TopOptions, admin: Admin) -> Document:
    """Check the address and the token: return a summary, or raise ConfigError with a hint."""
    try:
        return await admin.summary(options.window, _LABELS)
    except Denied as exc:
        raise ConfigError(
            "--token-env",
            f"{options.url}: {exc}",
            f"put the value of meter.admin_token into ${TOKEN_ENV}, or use --token-env or --token-file",
        ) from None
    except Untrusted as exc:
        raise ConfigError(
            "--ca",
            f"{options.url}: {exc}",
            "give the CA of the server's certificate with --ca FILE, and use a host name of the certificate",
        ) from None
    except Trouble as exc:
        raise ConfigError("--admin", f"{options.url}: {exc}", exc.hint) from None


def fetch_documents(options: TopOptions) -> Documents:
    """Return the data of all views. Raises the errors of `probe`, and LlmtapError."""

    async def fetch() -> Documents:
        async with Admin(options.url, options.token, options.tls()) as admin:
            data = Documents(await probe(options, admin))
            for view in VIEWS:
                if view.path is None:
                    continue
                query = {**view.query, "limit": str(ROWS_MAX)} if view.shows_exchanges else view.query
                try:
                    data.details[view.path] = await admin.get(view.path, **query)
                except Trouble as exc:
                    raise LlmtapError(f"{options.url}: {exc}") from None
            return data

    return asyncio.run(fetch())


def render_once(url: str, data: Documents, width: int) -> list[RenderableType]:
    """Return the header in lines of this width, and all tables that have rows; tables can be wider."""
    summary = data.summary
    lines = [f"llmtap top {visible_text(url, 200)}", *warnings_of(summary), *firing_sentences(summary)]
    parts: list[RenderableType] = [Text(line, style="bold") for line in lines]
    parts += map(Text, flow_lines(facts(summary), width))
    for view in VIEWS:
        table = view.table(data)
        notes = [note for note in table.notes if table.rows or view.path is not None]
        if table.rows or notes:
            parts += [Text(f"\n{view.title}", style="bold"), *map(Text, notes)]
        if table.rows:
            parts += _plain_table(table, len(table.rows) if view.name == "tap" else ROWS_MAX)
    return parts


def print_once(url: str, data: Documents, *, terminal: bool) -> None:
    """Print the header and the tables on standard output.

    On a terminal, lines of tables are cut at its width, and other lines are wrapped. Otherwise all lines stay
    whole.
    """
    console = Console(highlight=False, emoji=False)
    for part in render_once(url, data, console.width if terminal else PIPED_CELLS):
        if not isinstance(part, RichTable):
            console.print(part, soft_wrap=not terminal)
            continue
        out = StringIO()
        # Use a very wide console, because rich makes a table as narrow as the console.
        Console(file=out, highlight=False, width=10_000, no_color=True).print(part, soft_wrap=True)
        for line in out.getvalue().splitlines():
            console.print(
                line.rstrip(), markup=False, soft_wrap=True, overflow="ellipsis" if terminal else "ignore"
            )


def _plain_table(table: ViewTable, rows_max: int) -> Iterator[RenderableType]:
    drawn = RichTable(box=None, pad_edge=False, padding=(0, _COLUMN_GAP, 0, 0), header_style="bold")
    for column in table.columns:
        title = column.title.strip().replace("-\n", "").replace("/\n", "/").replace("\n", " ")
        drawn.add_column(Text(title), justify="right" if column.is_number else "left", overflow="fold")
    for row in table.rows[:rows_max]:
        drawn.add_row(*(Text(cell.text) for cell in row.cells))
    yield drawn
    if rows_max < len(table.rows):
        yield Text(f"... {len(table.rows) - rows_max:,} more")
