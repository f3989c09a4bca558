"""External sort in bounded memory: rows by an integer column, and records grouped by a key.

The writers of trace formats use it: `sorted_by` takes and yields Arrow batches, `grouped` bytes with a key,
such as the turns of a session. Rows beyond RUN_BYTES are sorted in runs, which go to one temporary file in
small pieces and are merged.
"""

import os
import tempfile
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import IO, Final

import pyarrow as pa
import pyarrow.compute as pc

RUN_BYTES: Final = 64 << 20
"""A million rows without text."""
_PIECE_BYTES: Final = 1 << 18
"""Merging 64 GB holds a thousand of these."""
_PIECE_ROWS: Final = 8_192
_LAST: Final = (1 << 63) - 1
_KEY: Final = "sort key"

Piece = tuple[int, int]
"""Offset and length of a piece of a run in the temporary file."""


def sorted_by(
    column: str, batches: Iterable[pa.RecordBatch], *, run_bytes: int = RUN_BYTES
) -> Iterator[pa.RecordBatch]:
    """Yield the rows in the order of an integer column, nulls last, equal ones in the order of the source."""
    held: list[pa.RecordBatch] = []
    size = 0
    runs: list[list[Piece]] = []
    schema: pa.Schema | None = None
    # It has no name, so nothing is left behind however we end.
    spill: IO[bytes] | None = None
    try:
        for batch in batches:
            batch = batch.append_column(_KEY, pc.fill_null(batch.column(column), _LAST))
            schema = batch.schema
            held.append(batch)
            size += batch.nbytes
            if size > run_bytes:
                spill = spill or tempfile.TemporaryFile()  # noqa: SIM115 (closed below)
                runs.append(_spilled(spill, _sorted(held)))
                held, size = [], 0
        if not held and not runs:
            return
        last = _pieces(_sorted(held)) if held else iter(())
        if spill is None:
            merged = last
        else:
            assert schema is not None
            merged = _merged([*(_read(spill, run, schema) for run in runs), last])
        for batch in merged:
            yield batch.drop_columns([_KEY])
    finally:
        if spill is not None:
            spill.close()


def grouped(records: Iterable[tuple[object, int, bytes]]) -> Iterator[Iterator[bytes]]:
    """Yield records (key, 32-bit place in the group, bytes) by group, in the order of their first record."""
    groups: dict[object, int] = {}

    def batches() -> Iterator[pa.RecordBatch]:
        keys: list[int] = []
        datas: list[bytes] = []
        size = 0
        for key, place, data in records:
            keys.append((groups.setdefault(key, len(groups)) << 32) + place + (1 << 31))
            datas.append(data)
            size += len(data)
            if len(keys) == _PIECE_ROWS or size >= _PIECE_BYTES:
                yield pa.record_batch({"key": keys, "data": pa.array(datas, pa.large_binary())})
                keys, datas, size = [], [], 0
        if keys:
            yield pa.record_batch({"key": keys, "data": pa.array(datas, pa.large_binary())})

    rows = (
        row
        for batch in sorted_by("key", batches())
        for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)
    )
    for _, group in groupby(rows, key=lambda row: row[0] >> 32):
        yield map(itemgetter(1), group)


def _sorted(held: list[pa.RecordBatch]) -> pa.Table:
    table = pa.Table.from_batches(held)
    keys = table.column(_KEY)
    if len(keys) < 2 or pc.all(pc.less_equal(keys.slice(0, len(keys) - 1), keys.slice(1))).as_py():
        return table  # most traces are in order
    return table.take(pc.sort_indices(keys))  # stable


def _pieces(table: pa.Table) -> Iterator[pa.RecordBatch]:
    rows = max(1, min(_PIECE_ROWS, _PIECE_BYTES * max(1, table.num_rows) // max(1, table.nbytes)))
    yield from table.to_batches(max_chunksize=rows)


def _spilled(spill: IO[bytes], table: pa.Table) -> list[Piece]:
    run = []
    for batch in _pieces(table):
        data = batch.serialize()
        run.append((spill.tell(), data.size))
        spill.write(data)
    spill.flush()
    return run


def _read(spill: IO[bytes], run: list[Piece], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for offset, length in run:
        data = os.pread(spill.fileno(), length, offset)
        yield pa.ipc.read_record_batch(pa.py_buffer(data), schema)


def _merged(runs: list[Iterator[pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
    """Merge sorted runs by ranges of keys; rows of one key come in the order of the runs."""
    heads: list[tuple[int, pa.RecordBatch]] = []
    left = dict(enumerate(runs))
    for i, run in list(left.items()):
        if (batch := _next(run)) is not None:
            heads.append((i, batch))
    while heads:
        bound, at = min((batch.column(_KEY)[-1].as_py(), i) for i, batch in heads)
        taken, rest = [], []
        for i, batch in heads:
            keys = batch.column(_KEY)
            below = pc.less_equal(keys, bound) if i <= at else pc.less(keys, bound)
            n = below.true_count
            if n:
                taken.append(batch.slice(0, n))
            remains: pa.RecordBatch | None = batch.slice(n)
            if n == batch.num_rows:
                remains = _next(left[i])
            if remains is not None:
                rest.append((i, remains))
        heads = rest
        yield from _sorted(taken).to_batches()


def _next(run: Iterator[pa.RecordBatch]) -> pa.RecordBatch | None:
    return next((batch for batch in run if batch.num_rows), None)
