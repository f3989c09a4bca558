"""External sort in bounded memory: rows by an integer column, and records grouped by a key.

The writers of trace formats use this module: `sort_batches` sorts Arrow batches, and `group_records` groups
records of bytes by a key, such as the turns of a session. If the rows have more than RUN_BYTES, they are
divided into runs. Each run is sorted, and written to a temporary file in small pieces; then the runs are
merged. A trace of 64 GB needs a thousand files.
"""

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

RUN_BYTES: Final = 64 << 20
"""Size of a run that is sorted in memory: a million rows without text."""
_PIECE_BYTES: Final = 1 << 18
"""Size of the piece of each run that is in memory during a merge. A trace of 64 GB has a thousand runs."""
_PIECE_ROWS: Final = 8_192
_NULL_KEY: Final = (1 << 63) - 1
"""Sort key of a null, so that nulls are last."""
_KEY: Final = "sort key"
"""Name of the column that is added for the sort."""


def sort_batches(
    column: str, batches: Iterable[pa.RecordBatch], *, run_bytes: int = RUN_BYTES
) -> Iterator[pa.RecordBatch]:
    """Yield the rows sorted by an integer column: nulls last, and rows of equal values in their order."""
    run: list[pa.RecordBatch] = []
    size = 0
    runs: list[Iterator[pa.RecordBatch]] = []
    with ExitStack() as files:
        for batch in batches:
            run.append(batch.append_column(_KEY, pc.fill_null(batch.column(column), _NULL_KEY)))
            size += run[-1].nbytes
            if size > run_bytes:
                # The file has no name, so that no file remains, even if this process is killed.
                runs.append(_spill_run(files.enter_context(tempfile.TemporaryFile()), _sorted_table(run)))
                run, size = [], 0
        if run:
            table = _sorted_table(run)
            runs.append(iter(table.to_batches(max_chunksize=_piece_rows(table))))
        for batch in _merge_runs(runs):
            yield batch.drop_columns([_KEY])


def group_records(records: Iterable[tuple[object, int, bytes]]) -> Iterator[Iterator[bytes]]:
    """Yield an iterator of bytes for each group (all records of one key).

    `records`: key, position in the group (32 bits), and bytes of each record. Groups are in the order of
    their first record; inside a group, records are sorted by position.
    """
    groups: dict[object, int] = {}

    def batches() -> Iterator[pa.RecordBatch]:
        keys: list[int] = []
        datas: list[bytes] = []
        size = 0
        for key, position, data in records:
            keys.append((groups.setdefault(key, len(groups)) << 32) + position + (1 << 31))
            datas.append(data)
            size += len(data)
            if len(keys) == _PIECE_ROWS or size >= _PIECE_BYTES:
                yield pa.record_batch({"key": keys, "data": pa.array(datas, pa.large_binary())})
                keys, datas, size = [], [], 0
        if keys:
            yield pa.record_batch({"key": keys, "data": pa.array(datas, pa.large_binary())})

    rows = (
        row
        for batch in sort_batches("key", batches())
        for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)
    )
    for _, group in groupby(rows, key=lambda row: row[0] >> 32):
        yield map(itemgetter(1), group)


def _sorted_table(batches: list[pa.RecordBatch]) -> pa.Table:
    table = pa.Table.from_batches(batches)
    keys = table.column(_KEY)
    if len(keys) < 2 or pc.all(pc.less_equal(keys.slice(0, len(keys) - 1), keys.slice(1))).as_py():
        return table  # The rows are already in order, as in most traces.
    return table.take(pc.sort_indices(keys))  # This sort keeps the order of rows with equal keys.


def _piece_rows(table: pa.Table) -> int:
    """Return the number of rows for each piece that is merged."""
    row_bytes = int(table.nbytes) // max(1, int(table.num_rows))
    return max(1, min(_PIECE_ROWS, _PIECE_BYTES // max(1, row_bytes)))


def _spill_run(file: Any, table: pa.Table) -> Iterator[pa.RecordBatch]:
    """Write a run to a file, and return an iterator that reads it back."""
    with pa.ipc.new_stream(file, table.schema) as out:
        out.write_table(table, max_chunksize=_piece_rows(table))
    file.seek(0)
    return iter(pa.ipc.open_stream(file))


def _merge_runs(runs: list[Iterator[pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
    """Merge sorted runs, one range of keys after the other. Equal keys are in the order of the runs."""
    heads = [(i, batch) for i, run in enumerate(runs) if (batch := _next_batch(run)) is not None]
    while heads:
        bound, bound_run = min((batch.column(_KEY)[-1].as_py(), i) for i, batch in heads)
        range_batches, next_heads = [], []
        for i, batch in heads:
            is_in_range = (pc.less_equal if i <= bound_run else pc.less)(batch.column(_KEY), bound)
            range_batches.append(batch.slice(0, is_in_range.true_count))
            rest = batch.slice(is_in_range.true_count)
            head = rest if rest.num_rows else _next_batch(runs[i])
            if head is not None:
                next_heads.append((i, head))
        heads = next_heads
        yield from _sorted_table(range_batches).to_batches()


def _next_batch(run: Iterator[pa.RecordBatch]) -> pa.RecordBatch | None:
    return next((batch for batch in run if batch.num_rows), None)
