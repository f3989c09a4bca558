"""What an Azure file holds comes back byte for byte, dates to the last digit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.capture.schema import CaptureInfo
from llmtap.traces.format import FormatError, batch_of
from llmtap.traces.formats.azure import FORMAT
from tests.support import trace_stats
from tests.support.trace_files import from_trace, read, rows, stats, trace, write

FILES = [
    f"azure_llm_2023/AzureLLMInferenceTrace_{name}.csv.gz"
    for name in ("conv.rows_1_12000", "code.rows_1_6000")
]
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


@pytest.mark.parametrize("name", FILES)
def test_a_shared_trace_has_the_statistics_held_for_it(name: str) -> None:
    source, batches = read(FORMAT, trace(name))
    held = stats(name)
    read_, made = (trace_stats.column(batches, c) for c in ("input_tokens", "output_tokens"))
    assert trace_stats.arrivals(trace_stats.column(batches, "arrival_ns")) == held["arrivals"]
    assert trace_stats.counts(read_) == held["input_tokens"]
    assert trace_stats.counts(made) == held["output_tokens"]
    assert trace_stats.counts([a + b for a, b in zip(read_, made, strict=True)]) == held["total_tokens"]
    assert trace_stats.correlation(read_, made) == held["corr_input_output"]
    assert source.info.arrivals == "wall"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("cut", ["whole", "its later rows", "without its last newline"])
def test_a_shared_trace_comes_back_byte_for_byte(name: str, cut: str) -> None:
    data = trace(name)
    if cut == "its later rows":
        lines = data.splitlines(keepends=True)
        data = b"".join([lines[0], *lines[4001:]])
    elif cut == "without its last newline":
        data = data.rstrip(b"\r\n")
    assert FORMAT.sniff(data[:65_536], "trace.csv")
    source, batches = read(FORMAT, data)
    assert write(FORMAT, source.info, batches)[0] == data


OTHERS = {
    "2024": f"{HEADER}\n2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:00.017335+00:00,2399,6\n",
    "2025": "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2025-01-01 00:00:00.123456,2,10,20\n",
    "no digits": f"{HEADER}\n2024-05-10 00:00:00,1,2\n",
    "nine digits": f"{HEADER}\r\n2024-05-10 00:00:00.123456789,1,2",
    "a mark": f"\ufeff{HEADER}\n2023-11-16 18:15:46.6805900,1,2\n",
    "Zulu": f"{HEADER}\n2023-11-16 18:15:46.680Z,1,2\n",
    "no rows": f"{HEADER}\r\n",
    "only a header": HEADER,
    "before 1970": f"{HEADER}\n1969-12-31 23:59:59.9999999,1,2\n",
}


@pytest.mark.parametrize("data", OTHERS.values(), ids=OTHERS)
def test_other_spellings_come_back_as_they_were(data: str) -> None:
    source, batches = read(FORMAT, data.encode())
    assert write(FORMAT, source.info, batches)[0] == data.encode()


def test_columns_are_found_by_name_and_dates_are_exact() -> None:
    data = (
        "GeneratedTokens,Extra,ContextTokens,TIMESTAMP,NumImages\n"
        "4,x,3,2023-11-16 18:15:46.6805901,2\n\n"
        "6,y,5,2023-11-16 19:15:46.5+01:00,0\n"
    )
    source, batches = read(FORMAT, data.encode())
    ns = 1_700_158_546_680_590_100
    assert rows(batches, "arrival_ns", "input_tokens", "output_tokens", "images") == [
        (ns, 3, 4, 2),
        (ns - 180_590_100, 5, 6, 0),
    ]
    assert str(rows(batches, "arrival")[0][0]) == "2023-11-16 18:15:46.680590+00:00"
    assert source.notes == [
        "columns that are not kept: Extra",
        "1 blank lines left out",
        "1 dates are spelled otherwise than the first: only their value is kept",
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"{HEADER}\n2023-11-16 18:15:46,1\n", "line 2: expected 3 columns, got 2"),
        (f"{HEADER}\n2023-11-16 18:15:46,1,2\n2023-11-16 18:1", "line 3: expected 3 columns, got 1"),
        (f"{HEADER}\n2023-11-16 18:15:46,1,\n", "line 2: GeneratedTokens: expected a whole number"),
        (f"{HEADER}\n2023-11-16 18:15:46,-1,1\n", "line 2: ContextTokens: expected a whole number"),
        (f"{HEADER}\n2023-11-16 18:15:46,nan,1\n", 'line 2: ContextTokens: expected a whole number'),
        (f"{HEADER}\n2023-11-16 18:15:46,{'9' * 10_000},1\n", "line 2: ContextTokens: expected a whole"),
        (f"{HEADER}\n2023-02-30 18:15:46,1,1\n", 'line 2: TIMESTAMP: there is no such date: "2023-02-30 18'),
        (f"{HEADER}\n9999-02-03 18:15:46,1,1\n", "line 2: TIMESTAMP: there is no such date"),
        (f"{HEADER}\n16.11.2023,1,1\n", 'line 2: TIMESTAMP: expected a date as 2023-11-16 18:15:46.'),
        ("TIMESTAMP,ContextTokens\n", "line 1: GeneratedTokens: the column is missing"),
        (f"{HEADER},ContextTokens\n", "line 1: ContextTokens: is there twice"),
        ("", "line 1: TIMESTAMP: the column is missing"),
        (f"{HEADER}\n{'x' * (5 << 20)}", "line 2: longer than 4 MiB"),
    ],
)  # fmt: skip
def test_an_error_names_line_and_column(text: str, told: str) -> None:
    with pytest.raises(FormatError) as caught:
        read(FORMAT, text.encode())
    assert str(caught.value).startswith(told)
    assert len(str(caught.value)) < 200


def test_a_capture_becomes_the_2023_form_in_time_order() -> None:
    ns = 1_700_158_546_680_590_099
    batch = batch_of(3, {"arrival_ns": [ns + 10**9, ns, ns], "input_tokens": [1, 2, 3],
                         "output_tokens": [4, 5, None]})  # fmt: skip
    data, written = write(FORMAT, CaptureInfo(arrivals="wall"), [batch])
    assert data.decode() == (
        f"{HEADER}\r\n2023-11-16 18:15:46.6805900,2,5\r\n2023-11-16 18:15:47.6805900,1,4\r\n"
    )
    assert written.dropped == {"no count of output tokens": 1}
    assert written.notes == ["2 arrivals lost what is finer than 7 digits of a second"]


def test_a_trace_without_dates_begins_with_1970() -> None:
    info, batch = from_trace("mooncake", {"arrival_ns": [27_482_000_000], "input_tokens": [1],
                                          "output_tokens": [2]})  # fmt: skip
    data, written = write(FORMAT, info, [batch], style={"digits": "6", "zone": "+00:00", "line_end": "lf"})
    assert data.decode() == f"{HEADER}\n1970-01-01 00:00:27.482000+00:00,1,2\n"
    assert written.notes == ["arrivals have no date: written as if the trace began with 1970"]


def test_a_style_that_is_none_is_refused() -> None:
    with pytest.raises(FormatError, match="style digits=10"):
        write(FORMAT, CaptureInfo(), [], style={"digits": "10"})


ROWS = st.lists(
    st.tuples(st.integers(-(9 * 10**16), 9 * 10**16), st.integers(0, 10**18 - 1), st.integers(0, 10**18 - 1)),
    max_size=30,
)


@given(ROWS)
def test_what_it_can_hold_survives(table: list[tuple[int, int, int]]) -> None:
    names = ("arrival_ns", "input_tokens", "output_tokens")
    columns = [[t * 100 for t, *_ in table], *([row[i] for row in table] for i in (1, 2))]
    batch = batch_of(len(table), dict(zip(names, columns, strict=True)))
    data, _ = write(FORMAT, CaptureInfo(source="azure", arrivals="wall"), [batch])
    assert rows(read(FORMAT, data)[1], *names) == rows([batch], *names)
