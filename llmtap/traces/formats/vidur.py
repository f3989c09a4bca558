"""Lengths as vidur and etalon have them: CSV of prefill and decode tokens, with or without arrivals.

`[arrived_at,]num_prefill_tokens,num_decode_tokens[,num_total_tokens,pd_ratio]`; `arrived_at` is in seconds.
The last two follow from the others and are made anew: a ratio's last digit may come out otherwise than in the
public file, which was rounded on its way.

Style: `columns` (the header; `num_prefill_tokens,num_decode_tokens` alone leaves the arrivals out),
`arrived_at` (a spelling of `decimals.py`), and those of `lines.py`.

Source: shared/traces/formats.md 1.13; project-etalon/etalon, data/processed_traces (Apache-2.0).
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO, Final

import pyarrow as pa

from llmtap.capture.schema import CaptureInfo
from llmtap.traces.format import FormatError, TraceFormat, TraceSource, TraceWritten, WriteOptions, batch_of
from llmtap.traces.text.csv_text import COUNT, CsvColumn, CsvReader, csv_header
from llmtap.traces.text.decimals import (
    NUMBER_STYLE,
    SECONDS,
    checked_spelling,
    decimal_text,
    seconds_ns,
    spelling_of,
)
from llmtap.traces.text.lines import LINE_STYLES, LineWriter, Style
from llmtap.traces.writer import Outgoing

__all__ = ["FORMAT"]

_TIME: Final = "arrived_at"
_PREFILL, _DECODE, _TOTAL, _RATIO = "num_prefill_tokens", "num_decode_tokens", "num_total_tokens", "pd_ratio"
_HEADER: Final = (_TIME, _PREFILL, _DECODE)
_KNOWN: Final = (*_HEADER, _TOTAL, _RATIO)
_COLUMNS: Final = (
    CsvColumn(_TIME, *SECONDS, required=False),
    CsvColumn(_PREFILL, *COUNT),
    CsvColumn(_DECODE, *COUNT),
    CsvColumn(_TOTAL, *COUNT, required=False),
    CsvColumn(_RATIO, r"\d{1,18}(?:\.\d{1,30})?(?:e[+-]?\d{1,3})?|inf|nan|", "a number", required=False),
)


def _read(stream: BinaryIO) -> TraceSource:
    reader = CsvReader(stream, _COLUMNS)
    blocks = iter(reader)
    first = next(blocks, None)
    if _TIME in reader.header:
        reader.style[_TIME] = spelling_of(first.columns[_TIME]) if first else "float"
    source = TraceSource(CaptureInfo(source="vidur", arrivals="trace", style=reader.style), iter(()))

    def batches() -> Iterator[pa.RecordBatch]:
        block, wrong = first, 0
        while block is not None:
            prefill, decode = (list(map(int, block.columns[name])) for name in (_PREFILL, _DECODE))
            columns: dict[str, Sequence[int]] = {"input_tokens": prefill, "output_tokens": decode}
            if _TIME in block.columns:
                columns["arrival_ns"] = seconds_ns(block.columns[_TIME])
            for total, a, b in zip(block.columns.get(_TOTAL, ()), prefill, decode, strict=False):
                wrong += int(total) != a + b
            yield batch_of(block.rows, columns)
            block = next(blocks, None)
        source.notes += reader.notes()
        if wrong:
            source.notes.append(f"{wrong:,} rows have another total than the sum, which is not kept")

    source.batches = batches()
    return source


def _write(
    out: BinaryIO, info: CaptureInfo, batches: Iterable[pa.RecordBatch], options: WriteOptions
) -> TraceWritten:
    written, style = TraceWritten(), Style("vidur", info, options)
    header = [name for name in style.get("columns", ",".join(_HEADER)).split(",") if name in _KNOWN]
    if not {_PREFILL, _DECODE} <= {*header}:
        raise FormatError(f"style columns={','.join(header)}: needs {_PREFILL},{_DECODE}")
    spelling = checked_spelling(style.get(_TIME, "float"), _TIME)
    needs = {"input_tokens": "no count of input tokens", "output_tokens": "no count of output tokens"}
    if _TIME in header:
        needs["arrival_ns"] = "no arrival time"
    columns = ("arrival_ns", "input_tokens", "output_tokens")
    times = "zero" if _TIME in header else "none"
    going = Outgoing("vidur", info, written, columns=columns, needs=needs, times=times)
    lines = LineWriter(out, style)
    lines.add([",".join(header)])
    for batch in going.batches(batches):
        prefill, decode = (batch.column(name).to_pylist() for name in columns[1:])
        pairs = list(zip(prefill, decode, strict=True))
        fields: dict[str, Iterable[str]] = {_PREFILL: map(str, prefill), _DECODE: map(str, decode)}
        if _TIME in header:
            fields[_TIME] = (decimal_text(ns, 9, spelling) for ns in batch.column("arrival_ns").to_pylist())
        fields[_TOTAL] = (str(a + b) for a, b in pairs)
        fields[_RATIO] = (repr(a / b) if b else "inf" for a, b in pairs)
        lines.add(map(",".join, zip(*(fields[name] for name in header), strict=True)))
    lines.close()
    if _TIME not in header:
        written.told.pop("arrival", None)
    return written


def _sniff(head: bytes, name: str) -> bool:
    return {_PREFILL, _DECODE} <= {*csv_header(head)}


FORMAT: Final = TraceFormat(
    name="vidur",
    title="vidur and etalon lengths (CSV)",
    extensions=(".csv",),
    holds=frozenset({"arrival", "input tokens", "output tokens"}),
    needs=frozenset({"input tokens", "output tokens"}),
    why={
        "arrival": "needed as well, unless the header is written without arrived_at",
        "outcome and status": "a failed request has no place: it is left out, and counted",
    },
    styles={
        "columns": "the header, of " + ",".join(_KNOWN) + "; without arrived_at there are no arrivals",
        _TIME: NUMBER_STYLE,
        **LINE_STYLES,
    },
    sniff=_sniff,
    read=_read,
    write=_write,
)
