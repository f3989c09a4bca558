"""One screen as plain tables: for scripts, and for terminals that are none."""

import asyncio
from collections.abc import Iterable
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from llmtap.errors import ConfigError, LlmtapError
from llmtap.top.client import Admin, Denied, Document, NotThere, Trouble, Untrusted
from llmtap.top.exchanges import EXCHANGES
from llmtap.top.header import facts, flowed, silent_relays
from llmtap.top.options import TOKEN_ENV, TopOptions
from llmtap.top.series import EXPERIMENT
from llmtap.top.streams import STREAMS
from llmtap.top.table import Table, shown
from llmtap.top.view import Shown
from llmtap.top.views import VIEWS

__all__ = ["fetched", "print_once", "probe", "render_once"]

ROWS_MAX: Final = 20
"""Of each table: one screen is to be read, not paged through."""
_BY: Final = "tenant,model,arm"


async def probe(options: TopOptions, admin: Admin) -> Document:
    """A first answer, or one sentence on what to do. Raises ConfigError."""
    try:
        summary = await admin.get("summary", window=options.window, by=_BY)
        if not isinstance(summary.get("metrics"), dict):
            raise NotThere("what answers there is no admin port of llmtap: it sends no summary")
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
        hint = "start the tap: llmtap proxy --upstream URL; or name its admin port: --admin http://HOST:9464"
        raise ConfigError("--admin", f"{options.url}: {exc}", hint) from None


def fetched(options: TopOptions) -> dict[str, Any]:
    """All documents, by name; None for what this tap does not know. Raises as `probe`."""

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


def render_once(documents: dict[str, Any], width: int) -> RenderableType:
    """The header and all tables that have lines."""
    summary = documents["summary"]
    beside = {path: documents.get(path) for path in (EXPERIMENT, STREAMS, EXCHANGES)}
    told = Shown(summary, beside)
    parts: list[RenderableType] = [Text(f"llmtap top {shown(documents['admin'], 200)}", style="bold")]
    trouble = silent_relays(summary)
    parts += [Text(trouble, style="bold")] if trouble is not None else []
    parts += _lines(flowed(facts(summary), width))
    for view in VIEWS:
        table = view.table(told, width)
        notes = [note for note in table.notes if table.rows or view.path is not None]
        if table.rows or notes:
            parts.append(Text(f"\n{view.title}", style="bold"))
            parts += _lines(notes)
        if table.rows:
            parts.append(_table(table, limited=view.name != "tap"))
    return Group(*parts)


def print_once(documents: dict[str, Any], *, terminal: bool) -> None:
    """On standard output; where that is no terminal, nothing is wrapped."""
    console = Console(highlight=False) if terminal else Console(highlight=False, width=240, no_color=True)
    console.print(render_once(documents, console.width), soft_wrap=not terminal)


def _lines(lines: Iterable[str]) -> list[RenderableType]:
    return [Text(line) for line in lines]


def _table(table: Table, *, limited: bool) -> RenderableType:
    drawn = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in table.columns:
        title = column.title.strip().replace("-\n", "").replace("/\n", "/").replace("\n", " ")
        drawn.add_column(Text(title), justify="right" if column.number else "left", no_wrap=True)
    rows = table.rows[:ROWS_MAX] if limited else table.rows
    for row in rows:
        drawn.add_row(*(Text(cell.text) for cell in row.cells))
    if len(rows) < len(table.rows):
        return Group(drawn, Text(f"... {len(table.rows) - len(rows):,} more"))
    return drawn
