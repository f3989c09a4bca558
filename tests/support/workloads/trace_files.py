"""Traces of tests/data, and reading and writing by a format in memory."""

import gzip
import io
import json
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from llmtap.capture.schema import CaptureInfo
from llmtap.traces.format import TraceFormat, TraceSource, TraceWriter, batch_of
from tests.support.data import TRACES


def trace(name: str) -> bytes:
    """A shared file, decompressed."""
    path = TRACES / name
    return gzip.decompress(path.read_bytes()) if name.endswith(".gz") else path.read_bytes()


def stats(name: str) -> dict[str, Any]:
    """The numbers that are held for a shared file."""
    folder, file = name.split("/")
    found: list[dict[str, Any]] = json.loads((TRACES / folder / "stats.json").read_text(encoding="utf-8"))
    return next(entry for entry in found if entry["file"] == file)


def read(fmt: TraceFormat, data: bytes) -> tuple[TraceSource, list[pa.RecordBatch]]:
    """The source and all its batches."""
    source = fmt.read(io.BytesIO(data))
    return source, list(source.batches)


def write(
    fmt: TraceFormat, info: CaptureInfo, batches: Iterable[pa.RecordBatch]
) -> tuple[bytes, TraceWriter]:
    """What a format makes of the batches."""
    out = io.BytesIO()
    written = fmt.write(out, info, batches)
    return out.getvalue(), written


def rows(batches: Iterable[pa.RecordBatch], *names: str) -> list[tuple[Any, ...]]:
    """Some columns, row by row."""
    return [
        row
        for batch in batches
        for row in zip(*(batch.column(name).to_pylist() for name in names), strict=True)
    ]


def from_trace(source: str, columns: Mapping[str, Any], **info: Any) -> tuple[CaptureInfo, pa.RecordBatch]:
    """A batch of these columns, as if it came from a trace."""
    length = len(next(iter(columns.values())))
    return CaptureInfo(source=source, arrivals="trace", blocks="trace", **info), batch_of(length, columns)
