"""`llmtap inspect`: a saved answer, explained event by event."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from llmtap.cli.main import app
from llmtap.errors import ConfigError

__all__ = ["inspect"]

FILE_BYTES_MAX = 512 << 20
"""A million tokens at 250 bytes each, twice."""

EPILOG = """FILE is an event stream, NDJSON or JSON body, a whole HTTP response (chunked framing, gzip, br and
zstd are undone), or a HAR file; - reads standard input.

Examples:

  curl -sN http://127.0.0.1:8080/v1/chat/completions -d @ask.json | llmtap inspect -

  curl -siN --raw http://127.0.0.1:8080/v1/chat/completions -d @ask.json > a.http; llmtap inspect a.http

  llmtap inspect session.har --entry 3 --json"""


@app.command(short_help="Explain a saved stream, event by event.", epilog=EPILOG)
def inspect(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A saved answer, or - for standard input.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the exchange as JSON, with its events.")
    ] = False,
    path: Annotated[
        str, typer.Option(help="Path of the request, where the file does not tell: it breaks ties.")
    ] = "/",
    request_body: Annotated[
        str, typer.Option(help="The request's JSON, or @FILE: it names the model.", metavar="JSON|@FILE")
    ] = "",
    entry: Annotated[int | None, typer.Option(help="Entry of a HAR file, counted from 0.", min=0)] = None,
    text: Annotated[bool, typer.Option("--text/--no-text", help="Show what the events say.")] = True,
) -> None:
    """Explain a saved stream: each event's class, bytes, text and tokens, and what they come to."""
    import msgspec

    from llmtap.exchange.saved import SavedError, explain, read_saved
    from llmtap.report.stream import explained_to_dict

    name = "standard input" if file == "-" else file
    data = _read(file)
    asked = _read(request_body[1:]) if request_body.startswith("@") else request_body.encode()
    try:
        saved = read_saved(data, path=path, request_body=asked, entry=entry)
    except SavedError as exc:
        raise ConfigError(name, str(exc), exc.hint) from None
    explained = explain(saved)
    if as_json:
        told = msgspec.json.encode(explained_to_dict(saved, explained, text=text))
        print(msgspec.json.format(told).decode())
    else:
        _show(saved, explained, text=text)


def _read(file: str) -> bytes:
    name = "standard input" if file == "-" else file
    try:
        if file == "-":
            data = sys.stdin.buffer.read(FILE_BYTES_MAX + 1)
        else:
            with Path(file).open("rb") as opened:
                data = opened.read(FILE_BYTES_MAX + 1)
    except OSError as exc:
        raise ConfigError(name, f"cannot be read: {exc.strerror}") from None
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(name, f"is longer than {FILE_BYTES_MAX >> 20} MiB")
    return data


def _show(saved: Any, explained: Any, *, text: bool) -> None:
    from llmtap.report.stream import EVENT_COLUMNS, event_cells, headline, story

    rows = event_cells(explained.events, text=text)
    if not sys.stdout.isatty():
        # For grep and awk: no wrapping, no lines, columns by tabs.
        print(headline(saved, explained))
        for cells in (EVENT_COLUMNS, *rows):
            print("\t".join(cells))
        for subject, said in story(saved, explained):
            print(f"{subject}: {said}")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    console.print(Text(headline(saved, explained), style="bold"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in EVENT_COLUMNS:
        number = column in ("#", "bytes", "tokens")
        table.add_column(column, justify="right" if number else "left", no_wrap=column != "adds")
    for cells in rows:
        table.add_row(*map(Text, cells))
    console.print(table)
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="bold", no_wrap=True)
    for subject, said in story(saved, explained):
        facts.add_row(Text(subject), Text(said))
    console.print(facts)
