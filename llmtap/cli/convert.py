"""`llmtap convert`: traces from one format to another, and what was lost on the way."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from llmtap.cli.main import app
from llmtap.errors import ConfigError

__all__ = ["convert"]

EPILOG = """IN is a file, a capture's folder, a pattern of its files, or - for standard input; OUT is a file
or -. What ends in .gz or .zst is compressed. Formats are told by content and name; --list shows them.

Examples:

  llmtap convert conversation_trace.jsonl trace.parquet

  llmtap convert captures/ workload.jsonl.gz --to mooncake

  llmtap convert session.har batch.jsonl --to openai-batch --model acme-8b

  zcat BurstGPT_1.csv.gz | llmtap convert - - --from burstgpt --to azure > azure.csv"""


@app.command(epilog=EPILOG)
def convert(
    source: Annotated[str, typer.Argument(metavar="IN", help="What to read.")] = "",
    target: Annotated[str, typer.Argument(metavar="OUT", help="What to write.")] = "",
    source_format: Annotated[
        str | None,
        typer.Option("--from", metavar="NAME", help="Format of IN, where its content does not tell."),
    ] = None,
    target_format: Annotated[
        str | None, typer.Option("--to", metavar="NAME", help="Format of OUT, where its name does not tell.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model to write where a row names none.")] = None,
    override_model: Annotated[bool, typer.Option(help="Write --model in every row.")] = False,
    style: Annotated[
        list[str] | None, typer.Option(metavar="K=V", help="How to write what has several spellings.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it is there.")] = False,
    show_list: Annotated[bool, typer.Option("--list", help="List the formats, and what each holds.")] = False,
) -> None:
    """Convert a trace, a dataset or a capture, and say what was kept, what was lost and why."""
    if show_list:
        _show_formats(as_json=as_json)
        return
    if not source or not target:
        raise ConfigError("IN OUT" if not source else "OUT", "is missing", "llmtap convert --help")
    if override_model and model is None:
        raise ConfigError("--override-model", "needs --model")
    from llmtap.capture.convert import convert as convert_file

    with _ended_in_order(), _progress() as progress:
        report = convert_file(
            source, target, source_format=source_format, target_format=target_format, model=model,
            override_model=override_model, style=_styles(style or []), force=force, progress=progress,
        )  # fmt: skip
    # What was asked for goes to standard output; where that is the trace itself, the report goes beside it.
    _show_report(report, as_json=as_json, beside=target == "-")


def _styles(given: list[str]) -> dict[str, str]:
    styles = {}
    for one in given:
        key, found, value = one.partition("=")
        if not found or not key:
            raise ConfigError("--style", f"expected key=value, got {one!r}")
        styles[key] = value
    return styles


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """A SIGTERM ends us as Ctrl-C does: what is half written is taken away."""

    def end(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _progress() -> Iterator[Callable[[int, int | None], None] | None]:
    """A bar of the bytes read, where there is somebody to see it."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("converting", total=None)

        def told(done: int, total: int | None) -> None:
            bar.update(task, completed=done, total=total)

        yield told


def _show_formats(*, as_json: bool) -> None:
    from llmtap.capture.formats.format import ASPECTS
    from llmtap.capture.formats.registry import FORMATS

    listed = [
        {
            "name": f.name, "title": f.title, "extensions": list(f.extensions),
            "does": [word for word, does in (("read", f.read), ("write", f.write)) if does],
            "holds": [aspect for aspect in ASPECTS if aspect in f.holds],
            "needs": [aspect for aspect in ASPECTS if aspect in f.needs],
        }
        for f in FORMATS
    ]  # fmt: skip
    if as_json:
        _print_json({"formats": listed})
        return
    columns = ("name", "title", "extensions", "does", "holds", "needs")
    everything = len(ASPECTS)
    rows = []
    for f in listed:
        values = (f[c] for c in columns)
        cells = [v if isinstance(v, str) else ", ".join(v) or "-" for v in values]
        if len(f["holds"]) == everything:
            cells[4] = "everything"
        rows.append(cells)
    _show_table(columns, rows, beside=False)


def _show_report(report: Any, *, as_json: bool, beside: bool) -> None:
    from llmtap.units import format_bytes

    out = sys.stderr if beside else sys.stdout
    if as_json:
        _print_json(report.to_dict(), out)
        return
    rate = report.rows_read / report.seconds if report.seconds else 0
    print(
        f"{report.source_format} to {report.target_format}: "
        f"{report.rows_written:,} of {report.rows_read:,} rows, "
        f"{format_bytes(report.bytes_in)} to {format_bytes(report.bytes_out)}, "
        f"{report.seconds:.1f} s ({rate:,.0f} rows/s)",
        file=out,
    )
    told = [a for a in report.aspects if a.fate != "absent"]
    _show_table(
        ("aspect", "rows", "fate", "why"), [[a.name, f"{a.rows:,}", a.fate, a.why or ""] for a in told],
        beside=beside,
    )  # fmt: skip
    for reason, n in report.dropped.items():
        print(f"dropped: {n:,} rows: {reason}", file=out)
    for note in (*report.notes_read, *report.notes_written):
        print(f"note: {note}", file=out)


def _print_json(value: Any, out: Any = None) -> None:
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(value)).decode(), file=out or sys.stdout)


def _show_table(columns: tuple[str, ...], rows: list[list[str]], *, beside: bool) -> None:
    out = sys.stderr if beside else sys.stdout
    if not out.isatty():
        # For grep and awk: no wrapping, no lines, columns by tabs.
        for cells in (list(columns), *rows):
            print("\t".join(cells), file=out)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column == "rows" else "left")
    styles = {"lost": "yellow", "kept": "green"}
    for cells in rows:
        table.add_row(*(Text(cell, style=styles.get(cell, "")) for cell in cells))
    Console(file=out, highlight=False).print(table)
