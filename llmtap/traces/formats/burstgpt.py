"""BurstGPT: CSV of seconds, model, token counts and the kind of log a request is from.

Files 1 and 2 have six columns, file 3 has `Session ID` and `Elapsed time` inserted behind the first: columns
are found by name. What each becomes:

- `Timestamp`: `arrival_ns`, counted from the trace's own zero (file 3 begins at 19,440,110 s).
- `Session ID`: `session`; empty on `API log` rows. `Elapsed time`: `response_end_us`, of the whole answer.
- `Model`: `model`. `Log Type`: `route`, the way by which a request came in. Rows of other sources are written
  as `Conversation log` where they have a session and as `API log` otherwise.
- `Response tokens` 0, or nothing: a failed request, `outcome` upstream_error; other rows are complete.
- `Total tokens` is the sum, and made anew; where a file says otherwise, `usage` keeps what it says.

Style: `columns` (the header), `timestamp` and `elapsed` (spellings of `decimals.py`), those of `lines.py`.

Source: shared/traces/formats.md 1.3; HPMLL/BurstGPT (CC-BY-4.0).
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from llmtap.capture.schema import CaptureInfo
from llmtap.traces.format import FormatError, TraceFormat, TraceSource, TraceWritten, WriteOptions, batch_of
from llmtap.traces.text.csv_text import COUNT, TEXT, CsvBlock, CsvColumn, CsvReader, csv_header, quoted
from llmtap.traces.text.decimals import (
    NUMBER_STYLE,
    SECONDS,
    checked_spelling,
    decimal_text,
    seconds_ns,
    spelling_of,
)
from llmtap.traces.text.lines import LINE_STYLES, LineWriter, Style
from llmtap.traces.writer import FAILED, Outgoing

__all__ = ["FORMAT"]

_TIME: Final = "Timestamp"
_HEADER: Final = (
    _TIME, "Session ID", "Elapsed time", "Model", "Request tokens", "Response tokens", "Total tokens",
    "Log Type",
)  # fmt: skip
_REQUIRED: Final = {_TIME, "Request tokens", "Response tokens"}
_MAYBE: Final = r"(?:\d{1,18})?", "a whole number of at most 18 digits, or nothing"
_COLUMNS: Final = (
    CsvColumn(_TIME, *SECONDS),
    CsvColumn("Session ID", *TEXT, required=False),
    CsvColumn("Elapsed time", f"(?:{SECONDS[0]})?", f"{SECONDS[1]}, or nothing", required=False),
    CsvColumn("Model", *TEXT, required=False),
    CsvColumn("Request tokens", *COUNT),
    CsvColumn("Response tokens", *_MAYBE),
    CsvColumn("Total tokens", *_MAYBE, required=False),
    CsvColumn("Log Type", *TEXT, required=False),
)
_TEXTS: Final = {"Session ID": "session", "Model": "model", "Log Type": "route"}
_WANTED: Final = (
    "arrival_ns", "session", "response_end_us", "model", "input_tokens", "output_tokens", "route", "usage",
)  # fmt: skip
_ASPECT_OF: Final = {
    "Session ID": "session and turn", "Elapsed time": "end of the answer", "Model": "model",
}  # fmt: skip
"""What a header without these columns does not tell."""
_CONVERSATION, _API = "Conversation log", "API log"


class _Usage(msgspec.Struct):
    total_tokens: int | None = None


def _read(stream: BinaryIO) -> TraceSource:
    reader = CsvReader(stream, _COLUMNS)
    blocks = iter(reader)
    first = next(blocks, None)
    style = reader.style
    style["timestamp"] = spelling_of(first.columns[_TIME]) if first else "short"
    if "Elapsed time" in reader.header:
        style["elapsed"] = spelling_of(first.columns["Elapsed time"]) if first else "short"
    source = TraceSource(CaptureInfo(source="burstgpt", arrivals="trace", style=style), iter(()))

    def batches() -> Iterator[pa.RecordBatch]:
        block, failed, totals, odd = first, 0, 0, 0
        while block is not None:
            columns = _columns(block)
            failed += sum(not n for n in columns["output_tokens"])
            totals += sum(usage is not None for usage in columns.get("usage", ()))
            odd += _spelled_otherwise(block.columns[_TIME], columns["arrival_ns"], style["timestamp"])
            yield batch_of(block.rows, columns)
            block = next(blocks, None)
        source.notes += reader.notes()
        told = (
            (failed, "rows have no response tokens: failed requests"),
            (totals, "rows have another total than the sum: it is kept in usage"),
            (odd, "times are spelled otherwise than the first ones: only their value is kept"),
        )
        source.notes += [f"{n:,} {what}" for n, what in told if n]

    source.batches = batches()
    return source


def _columns(block: CsvBlock) -> dict[str, Sequence[Any]]:
    given = block.columns
    read = list(map(int, given["Request tokens"]))
    made = [int(n) if n else None for n in given["Response tokens"]]
    columns: dict[str, Sequence[Any]] = {
        "arrival_ns": seconds_ns(given[_TIME]),
        "input_tokens": read,
        "output_tokens": made,
        "outcome": ["complete" if n else "upstream_error" for n in made],
    }
    for theirs, ours in _TEXTS.items():
        if theirs in given:
            columns[ours] = [text or None for text in given[theirs]]
    if "session" in columns:
        columns["session_source"] = [None if s is None else "explicit" for s in columns["session"]]
    if "Elapsed time" in given:
        columns["response_end_us"] = [
            seconds_ns([text])[0] // 1_000 if text else None for text in given["Elapsed time"]
        ]
    if "Total tokens" in given:
        totals = [int(n) if n else None for n in given["Total tokens"]]
        sums = [a + (b or 0) for a, b in zip(read, made, strict=True)]
        if totals != sums:
            columns["usage"] = [
                None if total == right else msgspec.json.encode(_Usage(total)).decode()
                for total, right in zip(totals, sums, strict=True)
            ]
    return columns


def _spelled_otherwise(texts: Sequence[str], times_ns: Sequence[int], spelling: str) -> int:
    return sum(decimal_text(ns, 9, spelling) != text for text, ns in zip(texts, times_ns, strict=True))


def _write(
    out: BinaryIO, info: CaptureInfo, batches: Iterable[pa.RecordBatch], options: WriteOptions
) -> TraceWritten:
    written, style = TraceWritten(), Style("burstgpt", info, options)
    header = [name for name in style.get("columns", ",".join(_HEADER)).split(",") if name in _HEADER]
    if not {*header} >= _REQUIRED:
        raise FormatError(f"style columns={','.join(header)}: needs {', '.join(sorted(_REQUIRED))}")
    time = checked_spelling(style.get("timestamp", "float"), "timestamp")
    elapsed = checked_spelling(style.get("elapsed", "short"), "elapsed")
    own = info.source == "burstgpt"
    needs = {"arrival_ns": "no arrival time", "input_tokens": "no count of input tokens"}
    if not own:  # a file of this format may have rows without
        needs["output_tokens"] = "no count of output tokens"
    going = Outgoing("burstgpt", info, written, columns=_WANTED, needs=needs, times="zero", failed=True)
    lines, nameless, cut = LineWriter(out, style), 0, 0
    lines.add([",".join(header)])
    for batch in going.batches(batches if own else map(_failed_as_zero, batches)):
        column = {name: batch.column(name).to_pylist() for name in _WANTED}
        fields: dict[str, list[str]] = {
            _TIME: [decimal_text(ns, 9, time) for ns in column["arrival_ns"]],
            "Session ID": [quoted(text or "") for text in column["session"]],
            "Elapsed time": [
                "" if us is None else decimal_text(us, 6, elapsed) for us in column["response_end_us"]
            ],
            "Model": [quoted(text) for text in _models(column["model"], options)],
            "Request tokens": [str(n) for n in column["input_tokens"]],
            "Response tokens": ["" if n is None else str(n) for n in column["output_tokens"]],
            "Total tokens": _totals(column, own),
            "Log Type": _log_types(column, own),
        }
        nameless += fields["Model"].count("")
        if time not in ("short", "float"):
            unit = 10 ** (9 - int(time))
            cut += sum(ns % unit > 0 for ns in column["arrival_ns"])
        lines.add(map(",".join, zip(*(fields[name] for name in header), strict=True)))
    lines.close()
    for name, aspect in _ASPECT_OF.items():
        if name not in header:
            written.told.pop(aspect, None)
    if options.override_model and options.model is not None:
        written.changed["model"] = "--model in every row"
    if nameless and "Model" in header and not own:
        written.notes.append(f"{nameless:,} rows have no model; vLLM reads only those of GPT-4")
    if cut:
        written.notes.append(f"{cut:,} arrivals lost what is finer than {time} digits of a second")
    return written


def _failed_as_zero(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Failed requests have no tokens here: 0, where nothing is known."""
    failed = pc.is_in(batch.column("outcome"), pa.array(FAILED))
    for name in ("input_tokens", "output_tokens"):
        column = batch.column(name)
        filled = pc.if_else(pc.and_(failed, pc.is_null(column)), 0, column)
        batch = batch.set_column(batch.schema.get_field_index(name), name, filled)
    return batch


def _models(models: list[str | None], options: WriteOptions) -> list[str]:
    if options.override_model and options.model is not None:
        return [options.model] * len(models)
    return [model or options.model or "" for model in models]


def _totals(column: dict[str, list[Any]], own: bool) -> list[str]:
    totals = [str(a + (b or 0)) for a, b in zip(column["input_tokens"], column["output_tokens"], strict=True)]
    if own:
        for row, usage in enumerate(column["usage"]):
            if usage is not None:
                said = msgspec.json.decode(usage, type=_Usage).total_tokens
                totals[row] = "" if said is None else str(said)
    return totals


def _log_types(column: dict[str, list[Any]], own: bool) -> list[str]:
    if own:
        return [quoted(text or "") for text in column["route"]]
    return [_API if session is None else _CONVERSATION for session in column["session"]]


def _sniff(head: bytes, name: str) -> bool:
    return {*csv_header(head)} >= _REQUIRED


FORMAT: Final = TraceFormat(
    name="burstgpt",
    title="BurstGPT trace (CSV)",
    extensions=(".csv",),
    holds=frozenset(
        {
            "arrival", "input tokens", "output tokens", "model", "session and turn", "end of the answer",
            "outcome and status",
        }
    ),
    needs=frozenset({"arrival", "input tokens", "output tokens"}),
    why={
        "outcome and status": "only whether it failed: such a row has no response tokens",
        "session and turn": "the session; its turns are in the order of their times",
        "tenant": "its Log Type says only whether a request is part of a conversation",
    },
    styles={
        "columns": "the header, of " + ",".join(_HEADER),
        "timestamp": NUMBER_STYLE,
        "elapsed": NUMBER_STYLE,
        **LINE_STYLES,
    },
    sniff=_sniff,
    read=_read,
    write=_write,
)  # fmt: skip
