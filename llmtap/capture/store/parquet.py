"""Rows as a Parquet file: small, and read by everything as it lies.

Weighed with streams of 200 tokens about 20 ms apart (jitter 1 to 2 ms), 8,000 exchanges in one row group,
zstd level 3, bytes per event:

    column         PLAIN   dictionary   DELTA_BINARY_PACKED   BYTE_STREAM_SPLIT
    event_us       2.32    2.50         2.71                  2.14
    event_bytes    0.51    0.41         0.81                  0.46
    event_class    0.002   0.0004       -                     -
    event_tokens   0.014   0.0002       0.0003                0.001
    event_flags    0.010   0.0002       0.0003                0.001

The jitter alone is 1.6 bytes of `event_us`. Deltas do worse than plain because each list begins with a step
back of seconds, which sets the width of the whole block of 128. BYTE_STREAM_SPLIT would save another 8 %, but
few readers know it for integers (Spark's vectorised one does not: SPARK-56894), and DELTA needs Spark 3.3. So
everything is PLAIN, or a dictionary where values repeat, which every reader has: 2.73 bytes per event in all.

All other columns take 95 bytes per exchange with the best encoding of each, and 109 like this. zstd level 1
costs 2 % more bytes; level 9 finds false matches in the noise, costs 9 % more and five times the CPU; level
15 gains nothing for seventy times. Pages of version 2 keep the list levels unpacked: 0.025 bytes more per
event and column.

A file has a footer of 8 KB: statistics only of columns one filters by (all of them would be 3 KB more, and
bring people's text there), and no copy of the Arrow schema, another 8 KB that tell nothing new. With it and
the heads of 100 column chunks, a file of 50 exchanges takes 440 bytes for each beside its events, one of
1,000 takes 125.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from llmtap.capture.schema import META_KEY, SCHEMA, CaptureInfo

__all__ = ["write_parquet"]

GROUP_BYTES: Final = 32 << 20
"""Of a row group, in memory: some 4,000 exchanges of 200 events. It bounds what a writer or a reader holds;
between half and twice of it, the file's size differs by 1 %."""
_LEVEL: Final = 3

_PLAIN: Final = frozenset((
    "seq", "id", "arrival_ns", "arrival", "unit", "request_id", "trace_parent", "message_bytes",
    "prompt_bytes", "request_bytes", "blocks", "parent", "think_us", "scheduled_us", "request_end_us",
    "submit_us", "head_us", "first_byte_us", "first_any_us", "first_token_us", "first_reasoning_us",
    "first_tool_call_us", "first_refusal_us", "first_content_us", "last_token_us", "response_end_us",
    "delivered_us", "paused_us", "dispatch_late_us", "added_request_us", "connect_us", "added_first_chunk_us",
    "added_chunk_max_us", "uncertainty_us", "event_us", "server_gap_us", "response_bytes", "server_timing",
    "request_body", "response_text",
))  # fmt: skip
"""Columns whose values hardly repeat: a dictionary of them costs 1 to 2 bytes more per value."""
_STATISTICS: Final = (
    "relay", "seq", "arrival_ns", "arrival", "tenant", "model", "route", "arm", "endpoint", "level",
    "session", "status", "outcome",
)  # fmt: skip
"""Columns by which readers skip row groups. Never text."""


def write_parquet(where: Path | BinaryIO, info: CaptureInfo, batches: Iterable[pa.RecordBatch]) -> int:
    """Writes the rows in their order; how many there were. A row group is in memory at a time.

    Raises OSError where the disk does not take it: what is written until then is no Parquet file.
    """
    rows = 0
    writer = pq.ParquetWriter(
        where, SCHEMA, compression="zstd", compression_level=_LEVEL, store_schema=False,
        use_dictionary=[_leaf(field) for field in SCHEMA if field.name not in _PLAIN],
        write_statistics=list(_STATISTICS), write_page_checksum=True,
    )  # fmt: skip
    try:
        for group in _groups(batches):
            rows += group.num_rows
            writer.write_table(group, row_group_size=group.num_rows)
        writer.add_key_value_metadata({META_KEY: msgspec.json.encode(info)})
    finally:
        writer.close()
    return rows


def _groups(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if batch.num_rows == 0:
            continue
        held.append(batch)
        size += batch.nbytes
        if size >= GROUP_BYTES:
            yield pa.Table.from_batches(held, SCHEMA)
            held, size = [], 0
    if held:
        yield pa.Table.from_batches(held, SCHEMA)


def _leaf(field: pa.Field) -> str:
    """Its column's path in Parquet: a list's values lie two levels down."""
    return f"{field.name}.list.element" if pa.types.is_list(field.type) else str(field.name)
