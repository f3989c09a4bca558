"""Rows come by key, records by group, equal ones in the order of the source, whatever fits in memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.capture.schema import SCHEMA
from llmtap.traces import sorting
from llmtap.traces.format import batch_of
from llmtap.traces.sorting import group_records, sort_batches
from tests.support.workloads.trace_files import rows

TIMES = st.none() | st.integers(-3, 3) | st.integers(-(2**62), 2**62)


@given(st.lists(st.lists(TIMES, max_size=8), max_size=8), st.sampled_from([0, 100, 1 << 20]))
def test_any_rows_are_sorted_stably_with_nulls_last(table: list[list[int | None]], run_bytes: int) -> None:
    numbered = [(t, n) for n, t in enumerate(t for times in table for t in times)]
    at, batches = 0, []
    for times in table:
        columns = {"arrival_ns": times, "seq": list(range(at, at + len(times))), "model": ["m"] * len(times)}
        batches.append(batch_of(len(times), columns))
        at += len(times)
    found = list(sort_batches("arrival_ns", batches, run_bytes=run_bytes))
    expected = sorted(numbered, key=lambda row: (row[0] is None, row[0] or 0))
    assert rows(found, "arrival_ns", "seq") == expected
    assert all(batch.schema.equals(SCHEMA) for batch in found)


@pytest.mark.parametrize("step", [7_919, 1])
def test_many_runs_of_many_pieces_are_merged(step: int) -> None:
    n, per = 60_000, 5_000
    keys = [i * step % n // 3 for i in range(n)]  # of each three equal ones
    batches = (
        batch_of(
            per,
            {
                "arrival_ns": keys[at : at + per],
                "seq": list(range(at, at + per)),
                "request_body": ["x" * 100] * per,
            },
        )
        for at in range(0, n, per)
    )
    wanted = ("arrival_ns", "seq", "request_body")
    found = list(sort_batches("arrival_ns", batches, run_bytes=1 << 20))
    assert [row[:2] for row in rows(found, *wanted)] == sorted(zip(keys, range(n), strict=True))
    assert max(batch.num_rows for batch in found) < n


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-3, 3), st.binary(max_size=9)), max_size=60))
def test_groups_come_as_first_seen_and_sorted(records: list[tuple[int, int, bytes]]) -> None:
    expected = []
    for key in dict.fromkeys(key for key, _, _ in records):
        own = [(order, record) for k, order, record in records if k == key]
        expected.append([record for _, record in sorted(own, key=lambda one: one[0])])
    assert [list(group) for group in group_records(records)] == expected


def test_groups_of_more_than_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorting, "_PIECE_BYTES", 100)
    monkeypatch.setattr(sorting, "RUN_BYTES", 1_000)
    found = [list(group) for group in group_records((i % 3, -i, b"%d" % i * 5) for i in range(1_000))]
    assert [len(group) for group in found] == [334, 333, 333]
    assert found[1][:2] == [b"997" * 5, b"994" * 5]
