"""AIPerf's rows have a length or a body; a payload passes word for word, and no session has both."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.capture.schema import CaptureInfo
from llmtap.traces.bodies import compact_json
from llmtap.traces.format import FormatError, batch_of
from llmtap.traces.registry import format_named
from tests.support.workloads.trace_files import read, rows, write

FORMAT = format_named("aiperf")
LENGTHS = (
    b'{"session_id":"a","timestamp":0,"input_length":600,"output_length":4,"hash_ids":[1,2]}\n'
    b'{"session_id":"a","timestamp":1500.25,"delay":250.5,"input_length":5}\n'
)
PAYLOADS = (
    b'{"session_id":"a","timestamp":0,"payload":{"model":"m", "messages":[{"role":"user","content":"Hi"}],'
    b'"seed":1E5},"output_length":4}\n'
)
MESSAGES = (
    b'{"timestamp":3,"messages":[{"role":"user","content":"Hi"}],"tools":[{"a":1}],"extra":{"seed":7}}\n'
)
TEXTS = b'{"text_input":"Hi","output_length":4}\n'


@pytest.mark.parametrize("data", [LENGTHS, PAYLOADS])
def test_each_kind_of_row_comes_back_as_it_was(data: bytes) -> None:
    source, batches = read(FORMAT, data)
    assert write(FORMAT, source.info, batches)[0] == data


def test_messages_and_texts_become_payloads() -> None:
    source, batches = read(FORMAT, MESSAGES + TEXTS)
    assert write(FORMAT, source.info, batches)[0] == (
        b'{"timestamp":3,"payload":{"messages":[{"role":"user","content":"Hi"}],'
        b'"tools":[{"a":1}],"seed":7}}\n'
        b'{"payload":{"prompt":"Hi","max_tokens":4},"output_length":4}\n'
    )


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_limit_in_the_extra_fields_is_the_only_one(name: str) -> None:
    line = b'{"text_input":"Hi","output_length":4,"extra":{"%s":9}}\n' % name.encode()
    _, batches = read(FORMAT, line)
    assert rows(batches, "request_body", "max_tokens") == [(f'{{"prompt":"Hi","{name}":9}}', 9)]


def test_times_are_milliseconds() -> None:
    _, batches = read(FORMAT, LENGTHS)
    assert rows(batches, "arrival_ns", "think_us", "session", "input_tokens", "blocks") == [
        (0, None, "a", 600, [1, 2]),
        (1_500_250_000, 250_500, "a", 5, None),
    ]


@pytest.mark.parametrize(
    ("line", "result"),
    [
        (b'{"timestamp": 1}', "line 1: expected exactly one of input_length, payload, messages, text"),
        (b'{"input_length": 1, "text_input": "a"}', "line 1: expected exactly one of"),
        (b'{"payload": "text"}', "line 1: payload: expected a JSON object"),
    ],
)
def test_an_error_names_line_and_field(line: bytes, result: str) -> None:
    with pytest.raises(FormatError) as caught:
        read(FORMAT, line)
    assert str(caught.value).startswith(result)


def test_no_session_has_bodies_and_lengths() -> None:
    batch = batch_of(
        5,
        {
            "arrival_ns": [1, 2, 3, 4, 5],
            "session": ["a", "a", None, "b", None],
            "request_body": ['{"prompt":\n"x"}', None, None, None, "no JSON"],
            "input_tokens": [1, 2, 3, None, 5],
        },
    )
    data, written = write(FORMAT, CaptureInfo(), [batch])
    assert data.splitlines() == [
        b'{"session_id":"a","timestamp":0,"payload":{"prompt": "x"}}',
        b'{"timestamp":0.000002,"input_length":3}',
    ]
    assert written.dropped == {
        "its session began with rows of the other kind, with or without bodies": 1,
        "neither a body nor a count of input tokens": 1,
        "the body is no JSON object": 1,
    }
    assert written.rows == 2


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
BODY = st.none() | st.dictionaries(st.text(), JSON, max_size=3).map(compact_json)
COUNT = st.integers(0, 10**17)


@given(
    st.lists(
        st.tuples(
            st.none() | st.integers(0, 9 * 10**18),
            st.none() | st.integers(0, 9 * 10**15),
            BODY,
            COUNT,
            st.none() | COUNT,
            st.none() | st.lists(st.integers(0, 2**62), max_size=3),
        ),
        max_size=10,
    )
)
def test_what_it_can_hold_survives(table: list[tuple[Any, ...]]) -> None:
    names = ("arrival_ns", "think_us", "request_body", "input_tokens", "output_tokens", "blocks")
    columns: dict[str, Any] = {name: [row[i] for row in table] for i, name in enumerate(names)}
    columns["session"] = [f"s{i}" if i % 3 else None for i in range(len(table))]
    batch = batch_of(len(table), columns)
    data, _ = write(FORMAT, CaptureInfo(source="aiperf", arrivals="trace", blocks="trace"), [batch])
    # A row with a body has neither length nor blocks there.
    expected = [(*row[:3], *(((None, row[4], None)) if row[2] is not None else row[3:])) for row in table]
    assert rows(read(FORMAT, data)[1], *names) == expected
