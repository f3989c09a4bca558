"""Our own captures as a format among the others: Parquet in the columns of `capture/schema.py`.

A capture may be one file or many (`capture/reader.py`); what comes by a pipe, or compressed, is one.
"""

from collections.abc import Iterable, Iterator
from typing import BinaryIO, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from llmtap import __version__
from llmtap.capture.formats.format import (
    ASPECTS,
    ROWS_PER_BATCH,
    Format,
    FormatError,
    Source,
    WriteOptions,
    Written,
)
from llmtap.capture.migrations import CaptureVersionError, migrate
from llmtap.capture.parquet import write_parquet
from llmtap.capture.reader import read
from llmtap.capture.schema import VERSION, CaptureInfo, info_of

__all__ = ["FORMAT", "read_many"]

_BATCH_BYTES: Final = 16 << 20
"""Of rows read at once; those with bodies are fewer."""
_MAGIC: Final = b"PAR1"


def _read(file: BinaryIO) -> Source:
    parquet, info = _open(file)
    return Source(info, _batches(parquet, info))


def read_many(where: str) -> tuple[Source, int]:
    """The rows of a folder's files, or a pattern's, or at a URL, as one source; and how many bytes they have.

    Raises ConfigError, or FormatError, for what is no capture.
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
    return Source(info, capture.batches()), sum(file.bytes for file in capture.files)


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


def _write(
    file: BinaryIO, info: CaptureInfo, batches: Iterable[pa.RecordBatch], options: WriteOptions
) -> Written:
    # The very style, not a copy: a reader completes it when its last row is through.
    info = msgspec.structs.replace(info, schema_version=VERSION, tap_version=info.tap_version or __version__)
    return Written(write_parquet(file, info, batches))


def _sniff(head: bytes, name: str) -> bool:
    return head.startswith(_MAGIC)


FORMAT: Final = Format(
    name="llmtap",
    title="llmtap capture (Parquet)",
    extensions=(".parquet",),
    holds=frozenset(ASPECTS),
    sniff=_sniff,
    read=_read,
    write=_write,
)
