"""CSV of exchanges: a row for each exchange with every column of a capture, and the phases of a request.

Lists and structs are JSON text. The phases follow `timings` of HAR 1.2: the column `connect_us` (null if an
open connection was used), and the PHASES `send_us`, `wait_us` until the first body byte, and `receive_us`.
"""

import csv
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from llmtap.capture.schema import SCHEMA
from llmtap.user_files import open_private

PHASES: Final = ("send_us", "wait_us", "receive_us")
"""Columns of the CSV file that a capture does not have: durations in microseconds."""


def write_csv(path: Path, batches: Iterable[pa.RecordBatch]) -> int:
    """Write batches, whose columns are those of SCHEMA; return the number of rows. Raises OSError."""
    rows = 0
    with open(path, "w", encoding="utf-8", newline="", opener=open_private) as file:
        writer = csv.writer(file)
        writer.writerow([*SCHEMA.names, *PHASES])
        for batch in batches:
            for row in batch.to_pylist():
                writer.writerow([*map(_cell_value, row.values()), *map(_cell_value, _phase_durations(row))])
                rows += 1
    return rows


def _cell_value(value: Any) -> Any:
    match value:
        case list() | dict():
            return json.dumps(value, default=str)
        case bytes():
            return value.hex()
    return value


def _phase_durations(row: dict[str, Any]) -> Iterator[int | None]:
    """Yield the durations before sending, before the first byte, and until the end."""
    submit, first, end = (row[name] for name in ("submit_us", "first_byte_us", "response_end_us"))
    yield None if submit is None else max(0, submit - (row["connect_us"] or 0))
    yield None if submit is None or first is None else first - submit
    yield None if first is None or end is None else end - first
