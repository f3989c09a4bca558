"""Rows of older captures become rows of today's.

A version that only added columns needs no step: what is missing is null. One that renamed a column, or gave
it another meaning, has a step here, keyed by the version it takes, which makes rows of the next one; a batch
goes through all steps from its own version on. Columns that no version after knows fall away.
"""

from collections.abc import Callable, Mapping
from typing import Final

import pyarrow as pa

from llmtap.capture.schema import SCHEMA, VERSION
from llmtap.errors import ConfigError

__all__ = ["STEPS", "CaptureVersionError", "Step", "Steps", "migrate"]

Step = Callable[[pa.RecordBatch], pa.RecordBatch]
Steps = Mapping[int, Step]

STEPS: Final[Steps] = {}
"""By the version that a step takes."""


class CaptureVersionError(ConfigError):
    """A capture is newer than this llmtap."""

    def __init__(self, where: str, version: int, newest: int = VERSION) -> None:
        super().__init__(
            where, f"schema version {version}, and this llmtap reads up to {newest}",
            "read it with the llmtap that wrote it, or a newer one",
        )  # fmt: skip
        self.where = where
        self.version = version


def migrate(
    batch: pa.RecordBatch, version: int, *, steps: Steps = STEPS, schema: pa.Schema = SCHEMA,
    newest: int = VERSION, where: str = "capture",
) -> pa.RecordBatch:  # fmt: skip
    """The batch, written by `version`, in `schema`.

    Raises CaptureVersionError for a version that is yet to come, pa.ArrowInvalid for values that do not fit.
    """
    if version > newest:
        raise CaptureVersionError(where, version, newest)
    for number in range(version, newest):
        step = steps.get(number)
        if step is not None:
            batch = step(batch)
    if batch.schema.equals(schema):
        return batch
    columns = []
    for field in schema:
        at = batch.schema.get_field_index(field.name)
        if at < 0:
            columns.append(pa.nulls(batch.num_rows, field.type))
        else:
            column = batch.column(at)
            columns.append(column if column.type == field.type else column.cast(field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)
