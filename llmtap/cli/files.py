"""`llmtap convert` and `llmtap inspect`: convert traces, and explain one saved answer.

`convert` also lists the formats (`traces/`). `inspect` also lists the exchanges of a packet capture and
explains one of them.
"""

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct

from llmtap.cli.flags import command
from llmtap.cli.main import app
from llmtap.cli.options import Json, TokenOptions
from llmtap.cli.shared import print_json, print_line, print_message, print_table
from llmtap.clock import SystemClock
from llmtap.errors import ConfigError
from llmtap.load.options import OwnDialects
from llmtap.options.fields import opt
from llmtap.report.document import Table

if TYPE_CHECKING:
    from llmtap.exchange.exchange import Exchange
    from llmtap.protocol.dialects.table.declaration import DialectTable
    from llmtap.traces.convert import Report


_CONVERT_EPILOG = """\
IN is a file, a capture folder, or - for standard input; OUT is a file or -. Input whose name ends in .gz or
.zst is decompressed; output with such a name is compressed. Formats are detected from content and name;
--list shows them. A new file is readable only by its owner (mode 0600); an overwritten file keeps its mode.

Examples:

  llmtap convert conversation_trace.jsonl trace.parquet

  llmtap convert captures/ workload.jsonl.gz --to mooncake

  llmtap convert session.har batch.jsonl --to openai-batch

  llmtap convert session.har session.parquet --redact email,card,phone,key

  zcat BurstGPT_1.csv.gz | llmtap convert - - --from burstgpt --to azure > azure.csv"""


@command(app, short_help="Convert a trace, a dataset or a capture.", epilog=_CONVERT_EPILOG)
def convert(
    source: Annotated[
        str, opt("Input file or capture folder; - is standard input.", "IN", argument=True)
    ] = "",
    target: Annotated[str, opt("Output file; - is standard output.", "OUT", argument=True)] = "",
    source_format: Annotated[
        str | None, opt("Format of IN (default: detected from its content).", "NAME", "--from")
    ] = None,
    target_format: Annotated[
        str | None, opt("Format of OUT (default: detected from its name).", "NAME", "--to")
    ] = None,
    redact: Annotated[
        list[str] | None,
        opt(
            "Redaction of bodies. RULE: email, card, phone, key (comma-separated) or re:PATTERN, as in "
            "capture.redact; may be repeated (default: text is copied unmodified).",
            "RULE",
        ),
    ] = None,
    json: Json = None,
    force: Annotated[bool, opt("Overwrite OUT if it exists.")] = False,
    show_list: Annotated[bool, opt("List the formats.", None, "--list")] = False,
) -> None:
    """Convert a trace, a dataset or a capture, and report which fields were kept or lost, and why."""
    if show_list:
        with _quiet_pipe():
            _show_formats(json)
        return
    if not source or not target:
        raise ConfigError(
            "IN OUT" if not source else "OUT", "is missing", "`llmtap convert --help` shows the arguments"
        )
    from llmtap.traces.convert import convert as convert_file

    with _quiet_pipe(), _sigterm_as_exit(), _progress_bar() as progress:
        report = convert_file(
            source,
            target,
            source_format=source_format,
            target_format=target_format,
            redact=_read_rules(redact or []),
            force=force,
            progress=progress,
        )
    # If OUT is `-`, the trace itself is on standard output, so the report must be on stderr.
    with _quiet_pipe():
        _show_report(report, json=json, to_stderr=target == "-")


def _read_rules(values: list[str]) -> tuple[str, ...]:
    """Return the rules of all `--redact` options. A comma separates names of rules; in an option with
    `re:PATTERN`, a comma is part of the pattern."""
    from llmtap.capture.options import PATTERN_PREFIX

    rules: list[str] = []
    for value in values:
        rules += [value] if value.startswith(PATTERN_PREFIX) else [name.strip() for name in value.split(",")]
    return tuple(rules)


@contextmanager
def _quiet_pipe() -> Iterator[None]:
    """Exit without a message if the reader of standard output closes the pipe early (`| head`)."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes standard output again when it exits, which would print an error. To prevent it,
        # redirect standard output to /dev/null.
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)
        sys.exit(128 + signal.SIGPIPE)


@contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """Raise SystemExit at SIGTERM in this context, so that the conversion removes its incomplete files."""

    def exit_at_signal(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, exit_at_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _progress_bar() -> Iterator[Callable[[int, int | None], None] | None]:
    """Yield a function that shows a progress bar of the bytes read, or None if stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("converting", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _show_formats(json: str | None) -> None:
    from llmtap.traces.format import ASPECTS
    from llmtap.traces.registry import FORMATS

    listed: list[dict[str, Any]] = [
        {
            "name": f.name,
            "title": f.title,
            "extensions": list(f.extensions),
            "does": ["read", *(["write"] if f.write_rows is not None else [])],
            "holds": [aspect for aspect in ASPECTS if aspect in f.aspects],
            "needs": [aspect for aspect in ASPECTS if aspect in f.required_aspects],
            "why": dict(f.remarks),
        }
        for f in FORMATS
    ]
    if json is not None:
        print_json({"formats": listed}, json)
        return
    columns = ("name", "title", "extensions", "does")
    cells = [[f["name"], f["title"], ", ".join(f["extensions"]), ", ".join(f["does"])] for f in listed]
    print_table(Table(columns, cells))


def _show_report(report: "Report", *, json: str | None, to_stderr: bool) -> None:
    from llmtap.units import format_bytes

    out = sys.stderr if to_stderr else sys.stdout
    if json is not None:
        print_json(report, json, out)
        return
    rate = report.rows_read / report.seconds if report.seconds else 0
    print(
        f"{report.source_format} to {report.target_format}: "
        f"{report.rows_written:,} of {report.rows_read:,} rows, "
        f"{format_bytes(report.bytes_in)} to {format_bytes(report.bytes_out)}, "
        f"{report.seconds:.1f} s ({rate:,.0f} rows/s)",
        file=out,
    )
    aspects = [a for a in report.aspects if a.fate != "absent"]
    cells = [[a.name, f"{a.written:,} of {a.rows:,}", a.fate, a.why or "", a.keep or ""] for a in aspects]
    fates = {"lost": "yellow", "partly": "yellow", "changed": "yellow", "kept": "green"}
    print_table(Table(("aspect", "rows", "fate", "why", "to keep it"), cells, styles=fates), out)
    for reason, n in report.dropped.items():
        print_line(f"dropped: {n:,} rows: {reason}", out)
    for note in (*report.notes_read, *report.notes_written):
        print_line(f"note: {note}", out)


# ---------------------------------------------------------------- llmtap inspect

FILE_BYTES_MAX = 512 << 20
"""Maximum size of a saved response: an answer of a million tokens with 250 bytes each needs half of it."""

_INSPECT_EPILOG = """\
FILE is an event stream, an NDJSON or JSON body, a complete HTTP response (chunked framing, gzip, br
and zstd are decoded), a HAR file, or a packet capture (pcap, pcapng); - is standard input. The exchanges of a
packet capture are listed; --entry selects one to explain.

With --admin, FILE is the id of an exchange that the meter of a running llmtap keeps, or its X-Request-Id, the
id of its response, or its trace id. The output divides the wait for the first token into parts, and names the
part that is unusual compared with the streams of the last hour.

Examples:

  curl -sN http://127.0.0.1:8080/v1/chat/completions --json @ask.json | llmtap inspect -

  curl -siN --raw http://127.0.0.1:8080/v1/chat/completions --json @ask.json > a.http; llmtap inspect a.http

  llmtap inspect session.har --entry 3 --json

  llmtap inspect traffic.pcap; llmtap inspect traffic.pcap --entry 3

  llmtap inspect stream.sse --draft acme --out acme.toml

  llmtap inspect 1.0.1-7 --admin http://127.0.0.1:9464"""


class _ReadOptions(Struct, frozen=True, kw_only=True):
    """Options that select the saved response, and decide how it is read."""

    path: Annotated[
        str, opt("Path of the request, if the file does not contain it; used to identify the API.")
    ] = "/"
    entry: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        opt("Number of the entry in a HAR file, or of the exchange in a packet capture; the first is 0."),
    ] = None
    text: Annotated[bool, opt("Show the text of the events.", None, "--text/--no-text")] = True
    dialects: OwnDialects = ()


class _WriteOptions(Struct, frozen=True, kw_only=True):
    """Options for output in addition to the explanation of the response."""

    draft: Annotated[
        str | None,
        opt("Name of a dialect: output is a table for the configuration, drafted from the events.", "NAME"),
    ] = None
    fixture: Annotated[
        str | None,
        opt("Name of a test fixture: the bytes as NAME.sse, the result of each event as NAME.json.", "NAME"),
    ] = None
    out: Annotated[
        str | None,
        opt(
            "File for --draft (default: standard output), or folder for --fixture (default: this one).",
            "PATH",
        ),
    ] = None


@command(app, short_help="Explain a saved response, event by event.", epilog=_INSPECT_EPILOG)
def inspect(
    file: Annotated[
        str,
        opt(
            "File with a saved response; - is standard input. With --admin: an id of an exchange.",
            "FILE",
            argument=True,
        ),
    ],
    *,
    json: Json = None,
    admin: Annotated[
        str | None,
        opt("URL of an admin port: explain the wait of one of its exchanges for the first token.", "URL"),
    ] = None,
    token: TokenOptions,
    reading: _ReadOptions,
    output: _WriteOptions,
) -> None:
    """Explain a saved response: class, bytes, text and tokens of each event, and the totals.

    Or explain why the first token of a measured exchange was slow.
    """
    if admin is not None:
        from llmtap.cli.inspect_exchange import show_exchange

        show_exchange(file, token.connection(admin), json=json)
        return
    from llmtap.cli.dialect_files import read_fixture, write_draft, write_fixture
    from llmtap.exchange.saved import Explained, SavedError, events_of, explain, read_saved
    from llmtap.protocol.dialects.registry import Dialects
    from llmtap.protocol.dialects.table.notes import notes_on
    from llmtap.report.stream import explained_to_dict
    from llmtap.vantage.passive.file_vantage import is_packet_file

    draft, fixture, entry, dialects = output.draft, output.fixture, reading.entry, reading.dialects
    if draft is not None and (fixture is not None or json is not None):
        raise ConfigError("--draft", "cannot be combined with --fixture or --json", "use only one of them")
    if fixture is not None and json is not None:
        raise ConfigError("--fixture", "cannot be combined with --json", "use only one of them")
    if output.out is not None and draft is None and fixture is None:
        raise ConfigError("--out", "has no effect without --draft or --fixture", "leave out --out")
    name = "standard input" if file == "-" else file
    known = Dialects(dialects)
    path = reading.path
    measured: Exchange | None = None
    data = _read_file(file)
    if is_packet_file(data):
        exchanges = _exchanges_in(name, data, dialects)
        if entry is None:
            _list_exchanges(exchanges, json=json)
            return
        if entry >= len(exchanges):
            raise ConfigError(
                "--entry",
                f"there is no exchange {entry}: {name} has {len(exchanges)} exchanges, numbered from 0",
                "leave out --entry to list them",
            )
        measured, data = exchanges[entry]
        path = measured.path
    known_fixture = read_fixture(file, data)
    try:
        saved = read_saved(data, path=path, entry=entry) if known_fixture is None else known_fixture[1]
    except SavedError as exc:
        raise ConfigError(name, str(exc), exc.hint) from None
    explained = explain(saved, known, SystemClock().thread_cpu_ns)
    if draft is not None:
        write_draft(draft, saved, explained, name, output.out, text=reading.text)
        return
    if fixture is not None:
        write_fixture(fixture, saved, explained, name, output.out, known_fixture and known_fixture[0])
        return
    if measured is not None:
        explained = Explained(measured, explained.events, has_times=True)
    if json is not None:
        print_json(explained_to_dict(saved, explained, text=reading.text), json)
    else:
        _show_explanation(saved, explained, text=reading.text)
    for table in dialects:
        for note in notes_on(table, events_of(saved).events):
            print_message(f"note: {note}")


def _exchanges_in(name: str, data: bytes, tables: "Sequence[DialectTable]") -> "list[tuple[Exchange, bytes]]":
    """Return the exchanges in a packet capture, each with the bytes of its response. Raises ConfigError."""
    from llmtap.channel.frames import Frame, FrameKind
    from llmtap.config import Settings
    from llmtap.meter.process import OfflineMeter
    from llmtap.protocol.inference import SkipRules
    from llmtap.supervisor.run import fresh_meter_setup
    from llmtap.vantage.passive.file_vantage import FileVantage, PcapError
    from llmtap.vantage.passive.options import WatchOptions

    parts: dict[int, list[bytes]] = {}
    exchanges: list[tuple[Exchange, bytes]] = []

    def digest(frames: Sequence[Frame], now_ns: int) -> None:
        for kind, seq, _, _, part in frames:
            if kind in (FrameKind.RESPONSE_HEAD, FrameKind.RESPONSE_DATA, FrameKind.ANSWER):
                parts.setdefault(seq, []).append(part)
        meter.digest(frames, now_ns)

    vantage = FileVantage(WatchOptions(skip=()), digest)
    meter = OfflineMeter(
        fresh_meter_setup(Settings(dialects={table.name: table for table in tables})),
        vantage.hello,
        lambda x: exchanges.append((x, b"".join(parts.pop(x.seq, ())))),
    )
    try:
        vantage.read(io.BytesIO(data))
    except PcapError as exc:
        raise ConfigError(name, str(exc)) from None
    if vantage.cut_at is not None:
        print_message(f"warning: {name}: ends within a packet, at byte {vantage.cut_at:,}")
    if vantage.damage:
        print_message(f"warning: {name}: {vantage.damage}; the rest is not listed")
    skips = SkipRules(WatchOptions().skip)
    others = sum(not x.stream and skips.rule_of(x.method, x.path) is not None for x, _ in exchanges)
    status = vantage.status()
    kinds = ", ".join(f"{n:,} {kind}" for kind, n in sorted(status.watched.items())) or "none"
    dropped = "".join(f", {n:,} dropped as {reason}" for reason, n in sorted(status.dropped.items()))
    dropped += f", {others:,} not inference" if others else ""
    measured = len(exchanges) - others
    print_message(f"connections: {kinds}; exchanges: {measured:,} measured{dropped}")
    return exchanges


def _list_exchanges(exchanges: "list[tuple[Exchange, bytes]]", *, json: str | None) -> None:
    """Print the exchanges of a packet capture as a table or as JSON."""
    from llmtap.errors import printable
    from llmtap.metrics.latency import chunking_of, measure, metrics_of
    from llmtap.report.values import milliseconds

    if json is not None:
        print_json([x.to_dict(metrics_of(x), chunking_of(x)) for x, _ in exchanges], json)
        return
    began_ns = min((x.timeline.arrival_ns for x, _ in exchanges), default=0)
    rows = []
    for i, (x, _) in enumerate(exchanges):
        m = measure(x)
        ttft, e2e = (milliseconds(None if ns is None else ns / 1e9) for ns in (m.ttft_ns, m.e2e_ns))
        at = f"{(x.timeline.arrival_ns - began_ns) / 1e9:.6f}"
        rows.append(
            [
                str(i),
                at,
                printable(f"{x.method} {x.path}"),
                str(x.status or "-"),
                x.outcome.value,
                ttft,
                e2e,
                str(len(x.timeline.events)),
                str(x.tokens.output or "-"),
            ]
        )
    columns = ("#", "at s", "request", "status", "outcome", "TTFT ms", "E2E ms", "events", "tokens")
    print_table(Table(columns, rows))


def _read_file(file: str) -> bytes:
    name = "standard input" if file == "-" else file
    try:
        if file == "-":
            data = sys.stdin.buffer.read(FILE_BYTES_MAX + 1)
        else:
            with Path(file).open("rb") as opened:
                data = opened.read(FILE_BYTES_MAX + 1)
    except OSError as exc:
        raise ConfigError(
            name, f"cannot be read: {exc.strerror}", "check the path and its permissions"
        ) from None
    if len(data) > FILE_BYTES_MAX:
        problem = f"is longer than {FILE_BYTES_MAX >> 20} MiB"
        raise ConfigError(name, problem, "save a single response to a file")
    return data


def _show_explanation(saved: Any, explained: Any, *, text: bool) -> None:
    from llmtap.report.stream import event_cells, event_columns, fact_lines, headline

    print_line(headline(saved, explained))
    print_table(Table(event_columns(explained), list(event_cells(explained, text=text))))
    facts = list(fact_lines(saved, explained))
    width = max(len(subject) for subject, _ in facts) + 2
    for subject, value in facts:
        print_line(f"{subject:{width}}{value}" if sys.stdout.isatty() else f"{subject}: {value}")
