"""Invariant: frames come out as they went in, however the batches are cut; anything else is refused."""

import struct
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.channel.frames import (
    BATCH_BYTES_MAX,
    FRAME_BYTES,
    BatchReader,
    FrameKind,
    PythonFrameRows,
    make_frame_rows,
    pack_batch,
)

Row = tuple[int, int, int, int, bytes]

KINDS = [kind for name, kind in vars(FrameKind).items() if name.isupper()]
STAMP = st.integers(-(2**63), 2**63 - 1)
ROW = st.tuples(
    st.sampled_from(KINDS),
    st.integers(0, 2**63 - 1),
    STAMP,
    STAMP,
    st.binary(max_size=50),
)
BATCH = st.tuples(st.integers(0, 2**64 - 1), st.lists(ROW, max_size=8))


def packed(batch_no: int, rows: list[Row]) -> bytes:
    flat: list[Any] = []
    for row in rows:
        flat += row
    return pack_batch(batch_no, flat)


def read_cut(stream: bytes, cuts: list[int]) -> list[tuple[int, list[Row]]]:
    reader = BatchReader()
    edges = [0, *sorted(c % (len(stream) + 1) for c in cuts), len(stream)]
    return [(n, list(frames)) for a, b in pairwise(edges) for n, frames in reader.feed(stream[a:b])]


@given(st.lists(BATCH, max_size=5), st.lists(st.integers(0), max_size=12))
def test_every_cut_gives_the_batches_back(batches: list[tuple[int, list[Row]]], cuts: list[int]) -> None:
    stream = b"".join(packed(number, rows) for number, rows in batches)
    assert read_cut(stream, cuts) == batches


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\0" * 64, b"\xff" * 64],
    ids=["http", "zeros", "ones"],
)
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(ValueError, match="expected a batch of frames that begins with"):
        list(BatchReader().feed(garbage))


def test_a_batch_beyond_the_bound_is_refused_before_it_is_read() -> None:
    head = bytearray(packed(1, []))
    struct.pack_into("=I", head, 8, BATCH_BYTES_MAX + 1)  # the length of the payload
    with pytest.raises(ValueError, match="expected a batch of at most"):
        list(BatchReader().feed(bytes(head)))


# ---------------------------------------------------------------- the rows of the next batch

NEWS: Row = (FrameKind.ANCHOR, 0, 5, -7, b"{}")
EACH = pytest.mark.parametrize("make", [PythonFrameRows, make_frame_rows])
"""The Python implementation, and the one that runs."""


@EACH
@given(st.lists(ROW, max_size=30), st.booleans(), st.booleans())
def test_rows_come_out_as_they_went_in_with_news_behind_the_hello(
    make: Callable[[], PythonFrameRows], frames: list[Row], news: bool, hello: bool
) -> None:
    kept = make()
    expected = [(FrameKind.HELLO, 0, 0, 0, b"{}"), *frames] if hello else list(frames)
    for row in expected:
        kept.put(*row)
    assert (len(kept), kept.size) == (len(expected), sum(len(row[4]) + FRAME_BYTES for row in expected))
    if news:
        expected.insert(int(bool(expected) and expected[0][0] == FrameKind.HELLO), NEWS)
    assert kept.pack(9, NEWS if news else None) == packed(9, expected)
    assert (len(kept), kept.size) == (0, 0)
    kept.put(*NEWS)
    assert kept.pack(10) == packed(10, [NEWS]), "nothing of the last batch is left"


@EACH
def test_rows_are_added_behind_others_and_up_to_the_bound(make: Callable[[], PythonFrameRows]) -> None:
    kept = make()
    kept.bound = 3 * FRAME_BYTES + 10
    row: Row = (FrameKind.RESPONSE_DATA, 1, 2, 3, b"12345")
    assert not kept.add(*row), "for the first one a timer has to be set"
    kept.put(*row)
    assert kept.add(*row)
    assert not kept.add(*row), "beyond the bound"
    assert kept.add(*row[:4], b"")
    assert kept.pack(1) == packed(1, [row, row, (*row[:4], b"")])
    kept.put(*row)
    kept.clear()
    assert (len(kept), kept.size) == (0, 0)
    assert not kept.add(*row)


@EACH
@pytest.mark.parametrize(
    "row", [(256, 1, 2, 3, b""), (-1, 1, 2, 3, b""), (8, 2**63, 2, 3, b""), (8, 1, 2, 2**63, b"")]
)
def test_what_no_frame_can_hold_raises(make: Callable[[], PythonFrameRows], row: Row) -> None:
    with pytest.raises((OverflowError, ValueError)):
        kept = make()
        kept.put(*row)
        kept.pack(1)
