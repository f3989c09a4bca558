"""Lengths with or without arrivals survive, and the columns that follow from them are made anew."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.capture.schema import CaptureInfo
from llmtap.traces.format import FormatError, batch_of
from llmtap.traces.formats.vidur import FORMAT
from tests.support import trace_stats
from tests.support.trace_files import from_trace, read, rows, stats, trace, write

FILE = "sharegpt_lengths/sharegpt_8k_filtered_stats_llama2_tokenizer.rows_1_20000.csv.gz"


def test_the_shared_lengths_have_the_statistics_held_for_them() -> None:
    data = trace(FILE)
    assert FORMAT.sniff(data[:65_536], "lengths.csv")
    source, batches = read(FORMAT, data)
    held = stats(FILE)
    prefill, decode = (trace_stats.column(batches, c) for c in ("input_tokens", "output_tokens"))
    assert trace_stats.counts(prefill) == held["prefill_tokens"]
    assert trace_stats.counts(decode) == held["decode_tokens"]
    assert trace_stats.counts([a + b for a, b in zip(prefill, decode, strict=True)]) == held["total_tokens"]
    assert trace_stats.correlation(prefill, decode) == held["corr"]
    assert source.notes == []


def test_the_shared_lengths_come_back_but_for_the_last_digit_of_ratios() -> None:
    data = trace(FILE).decode()
    source, batches = read(FORMAT, data.encode())
    again = write(FORMAT, source.info, batches)[0].decode()
    before, after = ([line.rsplit(",", 1) for line in text.splitlines()] for text in (data, again))
    assert [a for a, _ in before] == [a for a, _ in after]
    ratios = zip(before[1:], after[1:], strict=True)
    assert all(abs(float(a) - float(b)) <= 1e-15 * max(1.0, float(a)) for (_, a), (_, b) in ratios)


@pytest.mark.parametrize(
    "data",
    [
        "num_prefill_tokens,num_decode_tokens\n74,918\n290,0\n",
        "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,1,2\n0.125,3,4",
        "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n1,2,3,0.5\n4,0,4,inf\n",
    ],
)
def test_each_form_comes_back_as_it_was(data: str) -> None:
    source, batches = read(FORMAT, data.encode())
    assert write(FORMAT, source.info, batches)[0] == data.encode()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("num_prefill_tokens\n1\n", "line 1: num_decode_tokens: the column is missing"),
        (
            "num_prefill_tokens,num_decode_tokens\n1,2.0\n",
            "line 2: num_decode_tokens: expected a whole number",
        ),
        ("arrived_at,num_prefill_tokens,num_decode_tokens\n-1,1,2\n", "line 2: arrived_at: expected seconds"),
    ],
)
def test_an_error_names_line_and_column(text: str, told: str) -> None:
    with pytest.raises(FormatError) as caught:
        read(FORMAT, text.encode())
    assert str(caught.value).startswith(told)


def test_another_total_is_told() -> None:
    source, _ = read(FORMAT, b"num_prefill_tokens,num_decode_tokens,num_total_tokens\n1,2,4\n1,2,3\n")
    assert source.notes == ["1 rows have another total than the sum, which is not kept"]


def test_rows_without_arrivals_need_a_header_without_them() -> None:
    info, batch = from_trace("vllm-custom", {"input_tokens": [1, 2], "output_tokens": [3, 4]})
    assert write(FORMAT, info, [batch])[1].dropped == {"no arrival time": 2}
    data, _ = write(FORMAT, info, [batch], style={"columns": "num_prefill_tokens,num_decode_tokens"})
    assert data == b"num_prefill_tokens,num_decode_tokens\n1,3\n2,4\n"


COUNT = st.integers(0, 10**18 - 1)


@given(st.lists(st.tuples(st.integers(0, 9 * 10**18), COUNT, COUNT), max_size=20))
def test_what_it_can_hold_survives(table: list[tuple[int, int, int]]) -> None:
    names = ("arrival_ns", "input_tokens", "output_tokens")
    columns = {name: [row[i] for row in table] for i, name in enumerate(names)}
    batch = batch_of(len(table), columns)
    data, _ = write(FORMAT, CaptureInfo(source="vidur", arrivals="trace"), [batch])
    assert rows(read(FORMAT, data)[1], *names) == rows([batch], *names)
