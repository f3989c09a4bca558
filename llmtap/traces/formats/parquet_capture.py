"""llmtap's captures: Parquet in the columns of `capture/schema.py`, one file or many.

The integrity of a capture needs the numbers of its rows and the ledger of its relays
(`capture/read/integrity.py`). A file has one ledger: rows of several captures, or of a format without a
ledger, are written without one and without their relays.
"""

from collections.abc import Callable, Iterator
from typing import BinaryIO, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from llmtap import __version__
from llmtap.capture.read.reader import read
from llmtap.capture.schema import VERSION, CaptureInfo, CaptureLedger, CaptureVersionError, info_of, migrate
from llmtap.capture.store.parquet import write_parquet
from llmtap.traces.format import (
    ASPECTS,
    ROWS_PER_BATCH,
    FormatError,
    TraceFormat,
    TraceSource,
    TraceWriter,
    replaced,
)  # fmt: skip

__all__ = ["FORMAT", "read_many"]

_BATCH_BYTES: Final = 16 << 20
"""Rows read at once; those with bodies are fewer."""
_MAGIC: Final = b"PAR1"


def _read(file: BinaryIO) -> TraceSource:
    parquet, info = _open(file)
    return TraceSource(info, _batches(parquet, info))


def read_many(
    where: str, progress: Callable[[int, int | None], None] | None = None
) -> tuple[TraceSource, int]:
    """Return the rows of a folder, a pattern or a URL as one source, and their bytes.

    `progress` is called with the approximate bytes so far and their total. Raises ConfigError or FormatError.
    """
    try:
        capture = read(where)
    except CaptureVersionError as exc:
        raise FormatError(str(exc)) from None
    info = capture.info
    if not info.arrivals:
        raise FormatError(
            "some files count arrivals from 1970, others from a trace's zero: convert them apart"
        )
    size = sum(file.bytes for file in capture.files)

    def batches() -> Iterator[pa.RecordBatch]:
        rows = 0
        for batch in capture.batches():
            yield batch
            rows += batch.num_rows
            if progress is not None:
                progress(size * rows // max(1, len(capture)), size)

    return TraceSource(info, batches()), size


def _open(file: BinaryIO) -> tuple[pq.ParquetFile, CaptureInfo]:
    try:
        # Without read-ahead: a row group may be larger than what we want to hold.
        parquet = pq.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
        info = info_of(parquet.schema_arrow)
    except (pa.ArrowException, OSError) as exc:
        raise FormatError(f"cannot be read as Parquet: {str(exc).splitlines()[0]}") from None
    except msgspec.MsgspecError as exc:
        raise FormatError(f"what it says of itself is not as it should be: {exc}") from None
    if info is None:
        raise FormatError("is Parquet, but not a capture of llmtap's")
    return parquet, info


def _batches(parquet: pq.ParquetFile, info: CaptureInfo) -> Iterator[pa.RecordBatch]:
    rows, size = parquet.metadata.num_rows, 0
    for i in range(parquet.metadata.num_row_groups):
        size += parquet.metadata.row_group(i).total_byte_size
    # By what rows take on average, with room for those that take more.
    wanted = max(64, min(ROWS_PER_BATCH, _BATCH_BYTES * max(1, rows) // max(1, size)))
    try:
        for batch in parquet.iter_batches(batch_size=wanted):
            yield migrate(batch, info.schema_version)
    except (pa.ArrowException, OSError) as exc:
        raise FormatError(f"damaged Parquet: {str(exc).splitlines()[0]}") from None
    except CaptureVersionError as exc:
        raise FormatError(str(exc)) from None


def _write(writer: TraceWriter) -> None:
    info, numbered = writer.info, 0
    whole = bool(info.capture)

    def rows() -> Iterator[pa.RecordBatch]:
        nonlocal numbered
        for batch in writer.with_model(writer.batches):
            if not whole:
                known = pc.and_(pc.is_valid(batch.column("seq")), pc.is_valid(batch.column("relay")))
                numbered += known.true_count
                batch = replaced(batch, "relay", pa.nulls(batch.num_rows, pa.string()))
            writer.count(batch)
            yield batch

    info = msgspec.structs.replace(
        info, schema_version=VERSION, tap_version=info.tap_version or __version__,
        ledger=info.ledger if whole else CaptureLedger(),
    )  # fmt: skip
    writer.rows = write_parquet(writer.out, info, rows())
    writer.note(
        numbered,
        "rows are of several captures, or came without a ledger: `relay` is left out, so "
        "that missing exchanges are not reported; check the integrity of captures before they are merged",
    )


FORMAT: Final = TraceFormat(
    name="llmtap",
    title="llmtap capture (Parquet)",
    extensions=(".parquet",),
    holds=frozenset(ASPECTS),
    sniff=lambda head, name: head.startswith(_MAGIC),
    opens=_read,
    writes=_write,
)
