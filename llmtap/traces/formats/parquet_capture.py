"""The trace format `llmtap`: captures as Parquet in the columns of `capture/schema.py`, read and written.

The format reads one file or a stream; `read_files` reads a whole capture: a folder, a pattern or a URL. A
file can have only one ledger (the counts of a capture's relays, for the integrity check). If the rows are
from several captures, or from a format without a ledger, they are written without a ledger and without the
names of the relays.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from llmtap.capture.read.reader import CaptureError, read
from llmtap.capture.schema import VERSION, CaptureLedger, CaptureVersionError
from llmtap.capture.store.parquet import write_parquet
from llmtap.traces import format
from llmtap.version import __version__

_MAGIC: Final = b"PAR1"
_COUNTS: Final = ("input_tokens", "output_tokens")
"""Columns that are checked for negative values, which a capture can have if another program changed it."""


def _read(file: BinaryIO) -> format.TraceSource:
    """Read a stream by means of a temporary copy, because Parquet is read from its end."""
    copy: Any = tempfile.NamedTemporaryFile(suffix=".parquet")  # noqa: SIM115 (closed after the last batch)
    shutil.copyfileobj(file, copy)
    copy.flush()

    def closing_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the batches, and close the copy at the end."""
        with copy, _without_copy_name():
            yield from batches

    with _without_copy_name():
        source, _ = read_files(copy.name)
    source.batches = closing_batches(source.batches)
    return source


@contextmanager
def _without_copy_name() -> Iterator[None]:
    """Convert a CaptureError to a FormatError, without the name of the temporary copy."""
    try:
        yield
    except CaptureError as exc:
        raise format.FormatError(exc.problem) from None


def read_files(
    where: str, progress: Callable[[int, int | None], None] | None = None
) -> tuple[format.TraceSource, int]:
    """Return the rows of a folder, a pattern or a URL as one source, and the total size of the files in
    bytes.

    `progress`: called with the bytes read so far and the total size. Raises ConfigError or FormatError.
    """
    try:
        capture = read(where)
    except CaptureVersionError as exc:
        raise format.FormatError(str(exc)) from None
    info = capture.info
    if not info.arrivals:
        raise format.FormatError(
            "some files count arrivals from 1970, others from the start of a trace: convert them separately"
        )
    size = sum(file.size_bytes for file in capture.files)

    def batches() -> Iterator[pa.RecordBatch]:
        rows = 0
        for batch in capture.batches():
            for name in _COUNTS:
                if pc.any(pc.less(batch.column(name), 0)).as_py():
                    raise format.FormatError(f"the column {name} has a negative value, expected 0 or more")
            yield batch
            rows += batch.num_rows
            if progress is not None:
                progress(size * rows // max(1, len(capture)), size)

    return format.TraceSource(info, batches()), size


def _write(writer: format.TraceWriter) -> None:
    info, numbered = writer.info, 0
    is_one_capture = bool(info.capture)

    def rows() -> Iterator[pa.RecordBatch]:
        nonlocal numbered
        for batch in writer.batches:
            if not is_one_capture:
                known = pc.and_(pc.is_valid(batch.column("seq")), pc.is_valid(batch.column("relay")))
                numbered += known.true_count
                batch = format.replace_column(batch, "relay", pa.nulls(batch.num_rows, pa.string()))
            writer.count(batch)
            yield batch

    info = msgspec.structs.replace(
        info,
        schema_version=VERSION,
        tap_version=info.tap_version or __version__,
        ledger=info.ledger if is_one_capture else CaptureLedger(),
    )
    writer.rows = write_parquet(writer.out, info, rows())
    writer.note(
        numbered,
        "rows are of several captures, or came without a ledger: `relay` is left out, so "
        "that missing exchanges are not reported; check the integrity of captures before they are merged",
    )


FORMAT: Final = format.TraceFormat(
    name="llmtap",
    title="llmtap capture (Parquet)",
    extensions=(".parquet",),
    aspects=frozenset(format.ASPECTS),
    sniff=lambda head, name: head.startswith(_MAGIC),
    open_source=_read,
    write_rows=_write,
)
