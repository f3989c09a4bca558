"""guidellm's inputs: traces with times in seconds, and plain datasets of prompts and lengths.

`guidellm` is what `--profile kind=replay` reads: JSON Lines of `timestamp`, `input_length`, `output_length`,
and either `hash_ids` of 512-token blocks (its kind `mooncake`) or none (`trace_synthetic`), which may have a
`duration`. All times are SECONDS: a Mooncake file replayed as it is runs a thousand times too slowly. Of the
kind `mooncake` it rejects rows that do not have ceil(input_length / 512) ids.

`guidellm-data` is a plain dataset: JSON Lines (written), or CSV (read, too), with a `prompt` and counts,
under any of the names by which guidellm finds them.

Source: shared/traces/formats.md 1.7 (guidellm 0.8.1).
"""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO, Final

import msgspec
import pyarrow as pa

from llmtap.capture.schema import CaptureInfo
from llmtap.traces.bodies import TextRows, asked_columns, compact
from llmtap.traces.format import FormatError, TraceFormat, TraceSource, TraceWritten, WriteOptions
from llmtap.traces.formats.timed_lengths import STYLES, LengthReading, looks, read_lengths, write_lengths
from llmtap.traces.prompts import JOINED, PromptTexts, prompt_body
from llmtap.traces.text.csv_text import csv_header
from llmtap.traces.text.jsonl import BODY_BYTES_MAX, COUNT_MAX, first_objects
from llmtap.traces.text.lines import LINE_STYLES, LineReader, LineWriter, Style, clipped
from llmtap.traces.writer import Outgoing

__all__ = ["DATASET", "FORMAT", "FORMATS"]

_READING: Final = LengthReading(name="guidellm", places=9, spelling="float", sizes=(512,), durations=True)

_PROMPTS: Final = (
    "prompt", "instruction", "question", "input", "context", "content", "conversation", "turn", "text",
)  # fmt: skip
_INPUTS: Final = ("prompt_tokens_count", "input_tokens_count")
_OUTPUTS: Final = ("output_tokens_count", "completion_tokens_count")


def _read(stream: BinaryIO) -> TraceSource:
    return read_lengths(stream, _READING)


def _write(
    out: BinaryIO, info: CaptureInfo, batches: Iterable[pa.RecordBatch], options: WriteOptions
) -> TraceWritten:
    return write_lengths(out, info, batches, options, _READING)


def _sniff(head: bytes, name: str) -> bool:
    found, fractions = looks(head)
    return found and fractions


# ---------------------------------------------------------------- plain datasets


def _read_dataset(stream: BinaryIO) -> TraceSource:
    lines = LineReader(stream, line_bytes_max=BODY_BYTES_MAX)
    as_json = lines.peek().lstrip().startswith(b"{")
    # What is written is JSON Lines, so no spelling of the source would mean anything.
    source = TraceSource(CaptureInfo(level="full", arrivals="trace", source="guidellm-data"), iter(()))
    source.batches = _dataset_rows(_json_rows(lines) if as_json else _csv_rows(lines), source.notes)
    return source


def _json_rows(lines: LineReader) -> Iterator[tuple[int, Mapping[str, Any]]]:
    decoder = msgspec.json.Decoder(dict[str, Any])
    for block in lines:
        for number, line in enumerate(block.lines(), block.first):
            if not line.strip():
                continue
            try:
                yield number, decoder.decode(line)
            except (ValueError, RecursionError):
                raise FormatError(f"line {number}: not a JSON object") from None


def _csv_rows(lines: LineReader) -> Iterator[tuple[int, Mapping[str, Any]]]:
    def texts() -> Iterator[str]:
        for block in lines:
            try:
                # Line ends within quotes belong to the prompt.
                yield from io.StringIO(block.data.decode(), newline="")
            except UnicodeDecodeError as exc:
                number = block.first + block.data.count(b"\n", 0, exc.start)
                raise FormatError(f"line {number}: not UTF-8") from None

    csv.field_size_limit(BODY_BYTES_MAX)  # of the process: the default is less than a long prompt
    reader = csv.reader(texts(), strict=True)
    try:
        header = next(reader, [])
        for row in reader:
            if not row:
                continue
            if len(row) != len(header):
                raise FormatError(f"line {reader.line_num}: expected {len(header)} columns, got {len(row)}")
            yield reader.line_num, dict(zip(header, row, strict=True))
    except csv.Error as exc:
        raise FormatError(f"line {reader.line_num}: {exc}") from None


def _dataset_rows(
    found: Iterator[tuple[int, Mapping[str, Any]]], notes: list[str]
) -> Iterator[pa.RecordBatch]:
    rows, others = TextRows(), dict[str, None]()
    for number, row in found:
        name = next((n for n in _PROMPTS if n in row), None)
        prompt = None if name is None else row[name]
        if prompt is not None and not isinstance(prompt, str):
            raise FormatError(f"line {number}: {name}: expected text")
        body = None if prompt is None else prompt_body(prompt)
        read, made = (_count(row, names, number) for names in (_INPUTS, _OUTPUTS))
        if body is None and read is None:
            raise FormatError(f"line {number}: prompt: neither it nor prompt_tokens_count is there")
        others.update(dict.fromkeys(k for k in row if k != name and k not in (*_INPUTS, *_OUTPUTS)))
        text = {} if body is None else {"request_body": compact(body), "level": "full", **asked_columns(body)}
        yield from rows.add(input_tokens=read, output_tokens=made, **text)
    yield from rows.rest()
    if others:
        notes.append(f"columns that are not kept: {', '.join(others)}")


def _count(row: Mapping[str, Any], names: tuple[str, ...], number: int) -> int | None:
    name = next((n for n in names if n in row), None)
    value = None if name is None else row[name]
    if value is None or value == "":
        return None
    text = str(value)
    if isinstance(value, bool) or len(text) > 18 or not text.isdecimal() or int(text) > COUNT_MAX:
        raise FormatError(f"line {number}: {name}: expected a whole number, got {clipped(text)}")
    return int(text)


def _write_dataset(
    out: BinaryIO, info: CaptureInfo, batches: Iterable[pa.RecordBatch], options: WriteOptions
) -> TraceWritten:
    written, texts = TraceWritten(), PromptTexts()
    lines = LineWriter(out, Style("guidellm-data", info, options))
    columns = ("request_body", "input_tokens", "output_tokens")
    needs = {"request_body": "no request body"}
    going = Outgoing("guidellm-data", info, written, columns=columns, needs=needs, times="none")
    for batch in going.batches(batches):
        prompts = texts.of_all(batch, written)
        wanted = (batch.column(name).to_pylist() for name in ("input_tokens", "output_tokens"))
        for prompt, read, made in zip(prompts, *wanted, strict=True):
            if prompt is None:
                continue
            row = {"prompt": prompt, "prompt_tokens_count": read, "output_tokens_count": made}
            lines.add([compact({name: value for name, value in row.items() if value is not None})])
    lines.close()
    texts.report(written)
    return written


def _sniff_dataset(head: bytes, name: str) -> bool:
    # A count under one of its own names: a bare `prompt` could be anybody's.
    counts = {*_INPUTS, *_OUTPUTS}
    objects = first_objects(head)
    return any(counts & o.keys() for o in objects[:1]) or bool(counts & {*csv_header(head)})


FORMAT: Final = TraceFormat(
    name="guidellm",
    title="guidellm trace (JSON Lines, seconds)",
    extensions=(".jsonl",),
    holds=frozenset({"arrival", "input tokens", "output tokens", "prefix blocks", "end of the answer"}),
    needs=frozenset({"arrival", "input tokens", "output tokens"}),
    why={
        "prefix blocks": "blocks of 512 tokens: it rejects rows whose number of ids is another",
        "outcome and status": "a failed request has no place: it is left out, and counted",
    },
    styles=STYLES,
    sniff=_sniff,
    read=_read,
    write=_write,
)

DATASET: Final = TraceFormat(
    name="guidellm-data",
    title="guidellm dataset (JSON Lines or CSV)",
    extensions=(".jsonl", ".csv"),
    holds=frozenset({"input tokens", "output tokens", "request body"}),
    needs=frozenset({"request body"}),
    why={
        "request body": JOINED,
        "arrival": "guidellm sends a dataset by a rate of its own",
        "outcome and status": "a failed request has no place: it is left out, and counted",
    },
    styles=LINE_STYLES,
    sniff=_sniff_dataset,
    read=_read_dataset,
    write=_write_dataset,
)

FORMATS: Final = (FORMAT, DATASET)
