"""Chats keep their parents and their turns; sessions of others become chains of chats."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.capture.schema import CaptureInfo
from llmtap.traces.format import FormatError, batch_of
from llmtap.traces.formats.bailian import FORMAT
from tests.support.trace_files import from_trace, read, rows, write

DATA = (
    b'{"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 21, "output_length": 132, '
    b'"type": "text", "turn": 2, "hash_ids": [1089, 1090]}\n'
    b'{"chat_id": 160, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 3, "output_length": 1, '
    b'"type": "image", "turn": 1, "hash_ids": [7]}\n'
    b'{"chat_id": 161, "parent_chat_id": 159, "timestamp": 1700000000.123457, "input_length": 40, '
    b'"output_length": 2, "type": "text", "turn": 3, "hash_ids": [1089, 1090, 1091]}\n'
)


def test_a_file_comes_back_byte_for_byte() -> None:
    assert FORMAT.sniff(DATA, "x.jsonl")
    source, batches = read(FORMAT, DATA)
    assert write(FORMAT, source.info, batches)[0] == DATA
    assert (source.info.block_size, source.info.blocks) == (16, "trace")


def test_a_chat_is_of_the_session_of_its_root_and_its_time_is_exact() -> None:
    _, batches = read(FORMAT, DATA)
    assert rows(batches, "id", "parent", "session", "turn", "route", "arrival_ns") == [
        ("159", "55", "55", 1, "text", 61_114_000_000),
        ("160", None, "160", 0, "image", 61_500_000_000),
        ("161", "159", "55", 2, "text", 1_700_000_000_123_457_000),
    ]


def test_sessions_of_a_capture_become_chains() -> None:
    names = ("arrival_ns", "id", "parent", "session", "turn", "input_tokens", "output_tokens")
    table = [
        (10, "r-2", "r-1", "s", 1, 3, 4),
        (5, "r-1", None, "s", 0, 1, 2),
        (20, "r-4", "r-0", "s2", 3, 5, 6),
        (30, "r-5", None, "s", None, 7, 8),
        (40, "r-6", None, None, None, 9, 9),
    ]
    columns: dict[str, Any] = {name: [row[i] for row in table] for i, name in enumerate(names)}
    columns["arrival_ns"] = [s * 10**9 for s in columns["arrival_ns"]]
    data, written = write(FORMAT, CaptureInfo(arrivals="wall"), [batch_of(5, columns)])
    _, again = read(FORMAT, data)
    assert rows(again, "id", "parent", "session", "turn", "arrival_ns") == [
        ("0", None, "0", 0, 0),
        ("1", "0", "0", 1, 5 * 10**9),
        ("2", None, "2", 3, 15 * 10**9),
        ("3", "1", "0", 2, 25 * 10**9),
        ("4", None, "4", 0, 35 * 10**9),
    ]
    assert "1 rows follow an exchange that is not here: they begin a conversation" in written.notes


def test_blocks_of_512_tokens_go_over_and_are_told() -> None:
    info, batch = from_trace("mooncake", {
        "arrival_ns": [0], "input_tokens": [600], "output_tokens": [1], "blocks": [[4, 5]],
        "block_size": [512], "block_unit": ["tokens"],
    })  # fmt: skip
    data, written = write(FORMAT, info, [batch])
    assert b'"hash_ids": [4, 5]' in data
    assert written.changed["prefix blocks"] == (
        "blocks of 512 tokens go out as ids of 16 tokens: "
        "1 rows have another number of ids than ceil(input_length / 16)"
    )


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b'{"chat_id": 1, "timestamp": -5, "input_length": 1, "output_length": 1}', "line 1: timestamp: is "),
        (b'{"chat_id": "", "timestamp": 0, "input_length": 1, "output_length": 1}', "line 1: chat_id: "),
        (b'{"timestamp": 0, "input_length": 1, "output_length": 1}', "line 1: chat_id: is missing"),
        (b'{"chat_id": 1, "timestamp": 0, "input_length": 1, "output_length": 1, "turn": 0}', "line 1: tu"),
    ],
)  # fmt: skip
def test_an_error_names_line_and_field(line: bytes, told: str) -> None:
    with pytest.raises(FormatError) as caught:
        read(FORMAT, line)
    assert str(caught.value).startswith(told)


ID = st.integers(0, 2**60)
COUNT = st.integers(0, 10**17)


@given(
    st.lists(
        st.tuples(
            ID, st.none() | ID, st.integers(0, 9 * 10**18), COUNT, COUNT, st.integers(0, 1000),
            st.none() | st.text(), st.none() | st.lists(st.integers(0, 2**62), max_size=3),
        ),
        max_size=20,
    )
)  # fmt: skip
def test_what_it_can_hold_survives(table: list[tuple[Any, ...]]) -> None:
    names = ("id", "parent", "arrival_ns", "input_tokens", "output_tokens", "turn", "route", "blocks")
    columns: dict[str, Any] = {name: [row[i] for row in table] for i, name in enumerate(names)}
    for name in ("id", "parent"):
        columns[name] = [None if n is None else str(n) for n in columns[name]]
    batch = batch_of(len(table), columns)
    data, _ = write(FORMAT, CaptureInfo(source="bailian", arrivals="trace", blocks="trace"), [batch])
    assert rows(read(FORMAT, data)[1], *names) == rows([batch], *names)
