"""Round the sizes and times of capture rows at the level `coarse`, so that they reveal less of the text.

`store/rows.py` passes the columns of new rows to `coarsen`. From exact values, an attacker could guess text
by the lengths of tokens or by the times of keystrokes.

- Offsets and think times are rounded down to steps of `time_us`, arrivals to steps of `arrival_us`.
- Sizes and token counts are rounded up to a multiple of the step `bytes` or `tokens`, and to a multiple of
  half the largest power of two that is not above the value. A value grows by at most 50 % or one step, and
  between a size and its double there are at most two rounded values.
- Events of one class in the same step of time become one event, whose size is the sum of theirs.
- Columns that would show such values exactly (counts of events and reads, usage, server times) are null.

`capture/columns.py` declares the coarse content of a column. `benchmarks/privacy` tests it by attacks.
"""

from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from llmtap.capture.columns import COLUMNS, Coarse

STEPS: Final = {"arrival_us": 1_000_000, "time_us": 100_000, "bytes": 1_024, "tokens": 16}
"""Steps of rounding; a file's metadata has them, too. Steps of sizes and token counts are powers of two."""

_SIZE_MAX: Final = 1 << 60
"""Maximum size. Larger sizes are replaced by it, so that rounding up cannot exceed 64 bits."""
_BLANK: Final = 1
"""Bit of `event_flags`: the event has only blank text."""


def coarsen(columns: dict[str, pa.Array]) -> None:
    """Replace the columns of new rows, which have the exact values of the level `shape`, by coarse ones."""
    step = STEPS["time_us"]
    for column in COLUMNS:
        name = column.name
        if column.coarse is Coarse.TIME:
            columns[name] = _round_down(columns[name], step)
        elif column.coarse in (Coarse.BYTES, Coarse.TOKENS):
            columns[name] = _round_up(columns[name], STEPS[column.coarse.value])
    columns["arrival_ns"] = _round_down(columns["arrival_ns"], STEPS["arrival_us"] * 1_000)
    us = pc.divide(columns["arrival_ns"], 1_000)
    columns["arrival"] = us.cast(pa.timestamp("us", "UTC"))
    columns["uncertainty_us"] = pc.add(columns["uncertainty_us"], step)
    columns["uncertain"] = pa.array([True] * len(us))
    messages = columns["message_bytes"]
    columns["message_bytes"] = pa.ListArray.from_arrays(
        messages.offsets, _round_up(messages.values, STEPS["bytes"]), mask=messages.is_null()
    )
    _merge_events(columns)


def floor_divide(values: pa.Array, step: int) -> pa.Array:
    """Divide integers and round down. Arrow alone would round negative values up, towards 0."""
    quotients = pc.divide(values, step)
    least = pc.min(values).as_py()
    if least is not None and least < 0:
        below = pc.divide(pc.subtract(values, step - 1), step)
        quotients = pc.if_else(pc.less(values, 0), below, quotients)
    return quotients


def _round_down(values: pa.Array, step: int) -> pa.Array:
    return pc.multiply(floor_divide(values, step), step)


def _round_up(sizes: pa.Array, step: int) -> pa.Array:
    """Round sizes up to a multiple of `step`, and of half the largest power of two that is not above them."""
    sizes = pc.min_element_wise(sizes, pa.scalar(_SIZE_MAX, pa.int64()), skip_nulls=False)
    magnitude = pc.floor(pc.log2(pc.max_element_wise(sizes, 1, skip_nulls=False).cast(pa.float64())))
    digits = pc.max_element_wise(pc.subtract(magnitude.cast(pa.int64()), 1), step.bit_length() - 1)
    unit = pc.shift_left(pa.scalar(1, pa.int64()), digits)
    return pc.multiply(pc.divide(pc.add(sizes, pc.subtract(unit, 1)), unit), unit)


def _merge_events(columns: dict[str, pa.Array]) -> None:
    """Replace successive events of one class in the same step of time by one event."""
    times, classes = columns["event_us"], columns["event_class"]
    if not len(times.values):
        return
    rows = pc.list_parent_indices(times).to_numpy()
    kinds = classes.values.dictionary_encode().indices.to_numpy()
    us = _round_down(times.values, STEPS["time_us"]).to_numpy()
    first = np.ones(len(rows), bool)
    first[1:] = np.any([np.diff(part) != 0 for part in (rows, us, kinds)], axis=0)
    starts = np.flatnonzero(first)
    flags = columns["event_flags"].values.to_numpy()
    blank = np.bitwise_and.reduceat(flags, starts) & _BLANK
    sizes = np.add.reduceat(columns["event_bytes"].values.to_numpy(), starts)
    counts = np.bincount(rows[starts], minlength=len(times))
    offsets = pa.array(np.concatenate(([0], np.cumsum(counts))), pa.int32())
    merged: dict[str, Any] = {
        "event_us": us[starts],
        "event_class": classes.values.take(pa.array(starts)),
        "event_bytes": _round_up(pa.array(sizes), STEPS["bytes"]),
        "event_flags": np.bitwise_or.reduceat(flags, starts) & ~np.uint8(_BLANK) | blank,
    }
    for name, values in merged.items():
        columns[name] = pa.ListArray.from_arrays(offsets, pa.array(values))
