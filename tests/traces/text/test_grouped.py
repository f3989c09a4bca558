"""However records come, each group has its own, in order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.traces.text import grouped
from llmtap.traces.text.grouped import Grouped


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-3, 3), st.binary(max_size=9)), max_size=60))
def test_groups_come_as_first_seen_and_sorted(records: list[tuple[int, int, bytes]]) -> None:
    with Grouped() as groups:
        for key, order, record in records:
            groups.add(key, order, record)
        found = [list(group) for group in groups.groups()]
    keys = list(dict.fromkeys(key for key, _, _ in records))
    expected = []
    for key in keys:
        own = [(order, record) for k, order, record in records if k == key]
        expected.append([record for _, record in sorted(own, key=lambda one: one[0])])
    assert found == expected


def test_more_than_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "_MEMORY_BYTES", 1_000)
    with Grouped() as groups:
        for i in range(1_000):
            groups.add(i % 3, -i, b"%d" % i * 5)
        found = [list(group) for group in groups.groups()]
    assert [len(group) for group in found] == [334, 333, 333]
    assert found[1][:2] == [b"997" * 5, b"994" * 5]
