"""guidellm's times are seconds; its datasets have a prompt, or a length, a line."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.capture.schema import CaptureInfo
from llmtap.traces.format import FormatError, batch_of
from llmtap.traces.formats import guidellm, mooncake
from llmtap.traces.formats.guidellm import DATASET, FORMAT
from tests.support.trace_files import from_trace, read, rows, trace, write

NAMES = ("arrival_ns", "input_tokens", "output_tokens", "blocks")


def test_a_mooncake_trace_becomes_seconds_and_back() -> None:
    data = trace("mooncake/synthetic_trace.rows_1_2500.jsonl.gz")
    source, batches = read(mooncake.FORMAT, data)
    seconds, written = write(FORMAT, source.info, batches)
    assert seconds.splitlines()[2].startswith(b'{"timestamp": 0.04, "input_length": 23769, ')
    assert (written.rows, written.notes) == (2_500, [])
    assert FORMAT.sniff(seconds[:65_536], "x.jsonl")
    assert not mooncake.FORMAT.sniff(seconds[:65_536], "x.jsonl")
    source, again = read(FORMAT, seconds)
    assert rows(again, *NAMES) == rows(batches, *NAMES)
    assert write(mooncake.FORMAT, source.info, again)[0] == data


def test_ids_of_another_number_than_guidellm_expects_are_told() -> None:
    info, batch = from_trace("x", {
        "arrival_ns": [0, 1, 2], "input_tokens": [1024, 40, 600], "output_tokens": [1, 1, 1],
        "blocks": [list(range(64)), [64, 65, 66], [1, 2]], "block_size": [16, 16, 2048],
        "block_unit": ["tokens", "tokens", "bytes"],
    })  # fmt: skip
    data, written = write(FORMAT, info, [batch])
    assert rows(read(FORMAT, data)[1], "blocks") == [([31, 63],), ([66],), ([1, 2],)]
    assert written.changed["prefix blocks"].startswith(
        "2 rows had smaller blocks: of their ids every n-th, and the last; "
        "blocks of 2,048 bytes go out as ids of 512 tokens: 0 rows "
    )


def test_a_duration_is_the_end_of_the_answer() -> None:
    data = b'{"timestamp": 1.5, "input_length": 3, "output_length": 4, "duration": 0.25}\n'
    source, batches = read(FORMAT, data)
    assert rows(batches, "arrival_ns", "response_end_us") == [(1_500_000_000, 250_000)]
    assert write(FORMAT, source.info, batches)[0] == data


@given(
    st.lists(
        st.tuples(
            st.integers(0, 9 * 10**18), st.integers(0, 10**17), st.integers(0, 10**17),
            st.none() | st.lists(st.integers(0, 2**63 - 1), max_size=3), st.none() | st.integers(0, 10**14),
        ),
        max_size=20,
    )
)  # fmt: skip
def test_what_a_trace_can_hold_survives(table: list[tuple[Any, ...]]) -> None:
    names = (*NAMES, "response_end_us")
    batch = batch_of(len(table), {name: [row[i] for row in table] for i, name in enumerate(names)})
    info = CaptureInfo(source="guidellm", arrivals="trace", blocks="trace")
    data, _ = write(FORMAT, info, [batch])
    assert rows(read(FORMAT, data)[1], *names) == rows([batch], *names)


def test_a_dataset_of_either_form_is_read_by_the_names_of_its_columns() -> None:
    as_json = b'{"question": "Why?", "prompt_tokens_count": 3, "id": 7, "output_tokens_count": 5}\n'
    as_csv = b'id,prompt,output_tokens_count,prompt_tokens_count\r\n1,"a, ""b""\r\nc",5,3\r\n2,d,,\r\n'
    assert DATASET.sniff(as_json, "x.jsonl")
    assert DATASET.sniff(as_csv, "x.csv")
    source, batches = read(DATASET, as_json)
    body = '{"messages":[{"role":"user","content":"Why?"}]}'
    assert rows(batches, "request_body", "input_tokens", "output_tokens") == [(body, 3, 5)]
    assert source.notes == ["columns that are not kept: id"]
    _, batches = read(DATASET, as_csv)
    assert rows(batches, "input_tokens", "output_tokens") == [(3, 5), (None, None)]
    assert '"a, \\"b\\"\\r\\nc"' in rows(batches, "request_body")[0][0]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b'{"prompt": "a"}\n{"prompt": 3}\n', "line 2: prompt: expected text"),
        (
            b'{"prompt": "a", "prompt_tokens_count": -1}\n',
            "line 1: prompt_tokens_count: expected a whole number",
        ),
        (b'{"other": 1}\n', "line 1: prompt: neither it nor"),
        (b'{"prompt": "a"\n', "line 1: not a JSON object"),
        (b"prompt,output_tokens_count\na,5\nb\n", "line 3: expected 2 columns, got 1"),
        (b"prompt,output_tokens_count\na,many\n", "line 2: output_tokens_count: expected a whole number"),
        (b'prompt,output_tokens_count\n"a,5\n', "line 2: "),
        (b"prompt,output_tokens_count\n\xff,5\n", "line 2: not UTF-8"),
    ],
)
def test_an_error_of_a_dataset_names_the_line(data: bytes, told: str) -> None:
    with pytest.raises(FormatError) as caught:
        read(DATASET, data)
    assert str(caught.value).startswith(told)


@given(st.lists(st.tuples(st.text(min_size=1), st.none() | st.integers(0, 10**17)), max_size=10))
def test_what_a_dataset_can_hold_survives(table: list[tuple[str, int | None]]) -> None:
    prompts = [guidellm.prompt_body(prompt) for prompt, _ in table]
    bodies = [guidellm.compact(body) for body in prompts]
    counts = [n for _, n in table]
    columns = {"request_body": bodies, "input_tokens": counts, "output_tokens": counts}
    batch = batch_of(len(table), columns)
    data, written = write(DATASET, CaptureInfo(), [batch])
    assert written.rows == len(table)
    names = ("request_body", "input_tokens", "output_tokens")
    assert rows(read(DATASET, data)[1], *names) == rows([batch], *names)
