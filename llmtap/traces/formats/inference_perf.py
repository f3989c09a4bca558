"""inference-perf's trace replay: an Azure CSV, read by position.

It takes the first row as time zero, the first three columns as date, input and output whatever their names
are, six digits of the fraction, and no zone. So what is written is in time order, in exactly these columns,
to the microsecond. Its other input with lengths, `shared_prefix`, holds distributions and no requests: a
capture cannot be exported to it without loss, and is not.

Source: shared/traces/formats.md 1.8 (inference-perf 0.7.0).
"""

from collections.abc import Iterable
from typing import BinaryIO, Final

import pyarrow as pa

from llmtap.capture.schema import CaptureInfo
from llmtap.traces.format import TraceFormat, TraceWritten, WriteOptions
from llmtap.traces.formats import azure

__all__ = ["FORMAT"]


def _write(
    out: BinaryIO, info: CaptureInfo, batches: Iterable[pa.RecordBatch], options: WriteOptions
) -> TraceWritten:
    return azure.write_dated(out, info, batches, options, "inference-perf", digits="6")


def _sniff(head: bytes, name: str) -> bool:
    return False  # such a file is Azure's


FORMAT: Final = TraceFormat(
    name="inference-perf",
    title="inference-perf trace replay (Azure CSV)",
    extensions=(".csv",),
    holds=azure.FORMAT.holds,
    needs=azure.FORMAT.needs,
    why={**azure.FORMAT.why, "arrival": "to the microsecond; it takes the first row as its zero"},
    styles=azure.STYLES,
    sniff=_sniff,
    read=azure.FORMAT.read,
    write=_write,
)
