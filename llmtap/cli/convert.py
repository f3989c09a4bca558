"""`llmtap convert`: traces from one format to another, and what was lost on the way."""

import os
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Final

import typer

from llmtap.cli.main import app
from llmtap.errors import ConfigError

__all__ = ["convert"]

EPILOG = """IN is a file, a capture's folder, a pattern of its files, or - for standard input; OUT is a file
or -. What ends in .gz or .zst is compressed. Formats are told by content and name; --list shows them.
A new file can be read by its owner alone (mode 0600); one that replaces another keeps that one's mode.

Styles, by format (`--list NAME` says what each means):

{styles}

Examples:

  llmtap convert conversation_trace.jsonl trace.parquet

  llmtap convert captures/ workload.jsonl.gz --to mooncake

  llmtap convert session.har batch.jsonl --to openai-batch --model acme-8b

  llmtap convert session.har session.parquet --redact email,card,phone,key

  zcat BurstGPT_1.csv.gz | llmtap convert - - --from burstgpt --to azure > azure.csv"""

STYLES: Final[Mapping[str, str]] = {"aiperf": "content", "har": "llmtap"}
"""As the formats have them, written down again because help must not wait for them to be imported."""
_LIST_CHARS: Final = 80
"""A line of `--list NAME`."""
_BAR_AFTER_NS: Final = 1_000_000_000
"""What is done by then needs no bar."""


@app.command(
    short_help="Convert a trace, a dataset or a capture.",
    epilog=EPILOG.format(styles="\n\n".join(f"  {name}: {keys}" for name, keys in STYLES.items())),
)
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
        list[str] | None,
        typer.Option(metavar="K=V", help="How to write what has several spellings; see below."),
    ] = None,
    redact: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE",
            help="Redact bodies and answers by the rules of capture.redact: email, card, phone, key (with "
            "commas between), re:PATTERN; may be repeated. Without it text goes over as it is.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it is there.")] = False,
    show_list: Annotated[
        bool, typer.Option("--list", help="List the formats; with a name for IN, all about that one.")
    ] = False,
) -> None:
    """Convert a trace, a dataset or a capture, and say what was kept, what was lost and why."""
    if show_list:
        with _quiet_pipe():
            _show_formats(source, as_json=as_json)
        return
    if not source or not target:
        raise ConfigError("IN OUT" if not source else "OUT", "is missing", "llmtap convert --help")
    if override_model and model is None:
        raise ConfigError("--override-model", "needs --model")
    from llmtap.traces.convert import convert as convert_file

    with _quiet_pipe(), _ended_in_order(), _progress() as progress:
        report = convert_file(
            source, target, source_format=source_format, target_format=target_format, model=model,
            override_model=override_model, style=_styles(style or []), redact=_rules(redact or []),
            force=force, progress=progress,
        )  # fmt: skip
    # What was asked for goes to standard output; where that is the trace itself, the report goes beside it.
    with _quiet_pipe():
        _show_report(report, as_json=as_json, beside=target == "-")


def _styles(given: list[str]) -> dict[str, str]:
    styles = {}
    for one in given:
        key, found, value = one.partition("=")
        if not found or not key:
            raise ConfigError("--style", f"expected key=value, got {one!r}")
        styles[key] = value
    return styles


def _rules(given: list[str]) -> tuple[str, ...]:
    """Names may stand together, with commas; a regular expression may have some of its own."""
    from llmtap.capture.options import OWN_RULE

    rules: list[str] = []
    for one in given:
        rules += [one] if one.startswith(OWN_RULE) else [name.strip() for name in one.split(",")]
    return tuple(rules)


@contextmanager
def _quiet_pipe() -> Iterator[None]:
    """Who reads us may stop when they have enough (`| head`): that is no error, and nothing is said."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more at its end, and would complain.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        sys.exit(128 + signal.SIGPIPE)


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
    """A bar of the bytes read, where there is somebody to see it, and it is known how many there are."""
    if not sys.stderr.isatty():
        yield None
        return
    from contextlib import ExitStack

    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from llmtap.clock import SystemClock

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task("converting", total=None)
    began_ns = SystemClock.mono_ns()
    with ExitStack() as stack:

        def told(done: int, total: int | None) -> None:
            if total is None or SystemClock.mono_ns() - began_ns < _BAR_AFTER_NS:
                return
            bar.update(task, completed=done, total=total)
            if not bar.live.is_started:  # with its numbers: it is drawn at once
                stack.enter_context(bar)

        yield told


def _show_formats(name: str, *, as_json: bool) -> None:
    """The formats, or the one of that name."""
    from llmtap.traces.format import ASPECTS, FormatError
    from llmtap.traces.registry import FORMATS, by_name

    try:
        formats = (by_name(name),) if name else FORMATS
    except FormatError as exc:
        raise ConfigError("--list", str(exc)) from None
    listed: list[dict[str, Any]] = [
        {
            "name": f.name, "title": f.title, "extensions": list(f.extensions),
            "does": ["read", "write"],
            "holds": [aspect for aspect in ASPECTS if aspect in f.holds],
            "needs": [aspect for aspect in ASPECTS if aspect in f.needs],
            "why": dict(f.why), "styles": dict(f.styles),
        }
        for f in formats
    ]  # fmt: skip
    if as_json:
        _print_json({"formats": listed})
        return
    if name:
        _show_format(listed[0])
        return
    columns: tuple[str, ...] = ("name", "title", "extensions", "does", "holds", "needs", "styles")
    if sys.stdout.isatty():  # the rest is too much for its width
        columns = columns[:3]
    _show_table(columns, [[_cell(f[c]) for c in columns] for f in listed], beside=False)
    if sys.stdout.isatty():
        print("\nllmtap convert --list NAME tells what one holds, needs, and the styles it has.")


def _show_format(told: Mapping[str, Any]) -> None:
    """All about one format."""
    print(f"{told['name']}: {told['title']}")
    facts = {key: _cell(told[key]) for key in ("extensions", "does", "holds", "needs")}
    facts |= {f"about {aspect}": why for aspect, why in told["why"].items()}
    facts |= {f"style {key}": help_ for key, help_ in told["styles"].items()}
    width = max(map(len, facts)) + 2
    for key, value in facts.items():
        lines = textwrap.wrap(value, max(30, _LIST_CHARS - width), break_long_words=False) or [""]
        for label, line in zip([key, *[""] * len(lines)], lines, strict=False):
            print(f"{label:{width}}{line}")


def _cell(value: Any) -> str:
    from llmtap.traces.format import ASPECTS

    if isinstance(value, str):
        return value
    return "everything" if len(value) == len(ASPECTS) else ", ".join(value) or "-"


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
    cells = [[a.name, f"{a.written:,} of {a.rows:,}", a.fate, a.why or ""] for a in told]
    _show_table(("aspect", "rows", "fate", "why"), cells, beside=beside)
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
    styles = {"lost": "yellow", "partly": "yellow", "changed": "yellow", "kept": "green"}
    for cells in rows:
        table.add_row(*(Text(cell, style=styles.get(cell, "")) for cell in cells))
    Console(file=out, highlight=False).print(table)
