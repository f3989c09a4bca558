"""What a BurstGPT file holds comes back byte for byte, of either form."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.capture.schema import CaptureInfo
from llmtap.traces.format import FormatError, batch_of
from llmtap.traces.formats.burstgpt import FORMAT
from tests.support import trace_stats
from tests.support.trace_files import read, rows, stats, trace, write

FILES = [
    "burstgpt/BurstGPT_1.rows_1_280.csv",
    "burstgpt/BurstGPT_3.rows_1_280.csv",
    "burstgpt_like_synth/synth_seed42_n100000.csv.gz",
]
V1 = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
V3 = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"


@pytest.mark.parametrize("name", FILES)
def test_a_shared_trace_has_the_statistics_held_for_it(name: str) -> None:
    _, batches = read(FORMAT, trace(name))
    held = stats(name)
    times, read_, made, models, kinds, outcomes = (
        trace_stats.column(batches, c)
        for c in ("arrival_ns", "input_tokens", "output_tokens", "model", "route", "outcome")
    )
    assert trace_stats.arrivals(times) == held["arrivals"]
    assert trace_stats.counts(read_) == held["input_tokens"]
    assert trace_stats.counts(made) == held["output_tokens"]
    assert trace_stats.counts([a + b for a, b in zip(read_, made, strict=True)]) == held["total_tokens"]
    assert outcomes.count("upstream_error") == held["rows_with_zero_output"]
    if "models" in held:
        assert {m: models.count(m) for m in set(models)} == held["models"]
        assert {k: kinds.count(k) for k in set(kinds)} == held["log_types"]
        assert [times[0] / 1e9, times[-1] / 1e9] == held["timestamp_first_last_s"]
    if "sessions" in held:
        sessions = [s for s in trace_stats.column(batches, "session") if s is not None]
        sizes = [sessions.count(s) for s in set(sessions)]
        assert held["sessions"] == {
            "rows_with_session": len(sessions), "sessions": len(sizes), "longest_session_rows": max(sizes),
            "single_row_sessions": sizes.count(1),
        }  # fmt: skip
        elapsed = [us // 1_000_000 for us in trace_stats.column(batches, "response_end_us")]
        assert trace_stats.counts(elapsed) == held["elapsed_s"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("cut", ["whole", "its later rows", "without its last newline"])
def test_a_shared_trace_comes_back_byte_for_byte(name: str, cut: str) -> None:
    data = trace(name)
    if cut == "its later rows":
        lines = data.splitlines(keepends=True)
        data = b"".join([lines[0], *lines[150:]])
    elif cut == "without its last newline":
        data = data.rstrip(b"\n")
    assert FORMAT.sniff(data[:65_536], "trace.csv")
    source, batches = read(FORMAT, data)
    again, written = write(FORMAT, source.info, batches)
    assert again == data
    assert (written.dropped, written.notes) == ({}, [])


OTHERS = {
    "another total": f"{V1}\n5,ChatGPT,472,18,491,Conversation log\n6,GPT-4,1,2,3,API log\n",
    "missing responses": f"{V1}\n5,ChatGPT,472,,472,Conversation log\n6,GPT-4,0,0,,API log\n",
    "lines of Windows": f"{V1}\r\n5,ChatGPT,472,18,490,Conversation log\r\n",
    "fractions": f"{V3}\n5.25,,1.5,GPT-4,1,2,3,API log\n6.0,a,0.0,GPT-4,1,2,3,\n",
    "only what is needed": "Timestamp,Request tokens,Response tokens\n0.5,1,2\n",
    "a quoted name": f'{V1}\n5,"a,""b""",472,18,490,API log\n',
}


@pytest.mark.parametrize("data", OTHERS.values(), ids=OTHERS)
def test_other_spellings_come_back_as_they_were(data: str) -> None:
    source, batches = read(FORMAT, data.encode())
    assert write(FORMAT, source.info, batches)[0] == data.encode()


def test_columns_are_found_by_name() -> None:
    data = (
        f"{V3}\n19440110.0,s1,43,GPT-4,906,446,1352,Conversation log\n19440111.0,,0,ChatGPT,7,0,7,API log\n"
    )
    source, batches = read(FORMAT, data.encode())
    names = ("arrival_ns", "session", "response_end_us", "model", "input_tokens", "output_tokens", "outcome")
    assert rows(batches, *names, "route") == [
        (19_440_110 * 10**9, "s1", 43_000_000, "GPT-4", 906, 446, "complete", "Conversation log"),
        (19_440_111 * 10**9, None, 0, "ChatGPT", 7, 0, "upstream_error", "API log"),
    ]
    assert source.notes == ["1 rows have no response tokens: failed requests"]


def test_another_total_is_kept_and_told() -> None:
    source, batches = read(FORMAT, OTHERS["another total"].encode())
    assert rows(batches, "usage") == [('{"total_tokens":491}',), (None,)]
    assert source.notes == ["1 rows have another total than the sum: it is kept in usage"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("5,GPT-4,1,2,3", "line 2: expected 6 columns, got 5"),
        ("-5,GPT-4,1,2,3,API log", "line 2: Timestamp: expected seconds"),
        ("nan,GPT-4,1,2,3,API log", "line 2: Timestamp: expected seconds"),
        ("1e5,GPT-4,1,2,3,API log", "line 2: Timestamp: expected seconds"),
        ("99999999999,GPT-4,1,2,3,API log", "line 2: Timestamp: expected seconds"),
        ("5,GPT-4,x,2,3,API log", 'line 2: Request tokens: expected a whole number of at most 18'),
        ("5,GPT-4,1,2.5,3,API log", "line 2: Response tokens: expected a whole number"),
        ('5,"GPT-4,1,2,3,API log', "line 2: "),
    ],
)  # fmt: skip
def test_an_error_names_line_and_column(line: str, told: str) -> None:
    with pytest.raises(FormatError) as caught:
        read(FORMAT, f"{V1}\n{line}\n".encode())
    assert str(caught.value).startswith(told)


def test_a_capture_becomes_the_third_form() -> None:
    batch = batch_of(3, {
        "arrival_ns": [2_500_000_000, 1_000_000_000, 3_000_000_000], "input_tokens": [5, 7, None],
        "output_tokens": [6, None, None], "session": ["s,1", None, None],
        "response_end_us": [1_500_000, 7, None], "outcome": ["complete", "upstream_reset", "complete"],
        "route": ["a", "b", "c"], "usage": ['{"total_tokens": 99}', None, None],
    })  # fmt: skip
    data, written = write(FORMAT, CaptureInfo(arrivals="wall"), [batch], model="GPT-4")
    assert data.decode().splitlines() == [
        V3,
        "0.0,,0.000007,GPT-4,7,0,7,API log",
        '1.5,"s,1",1.5,GPT-4,5,6,11,Conversation log',
    ]
    assert written.dropped == {"no count of input tokens": 1}
    assert written.notes == ["arrivals count from the smallest one, 1970-01-01T00:00:01.000000000Z"]


NAMES = (
    "arrival_ns", "session", "response_end_us", "model", "input_tokens", "output_tokens", "route", "outcome",
)  # fmt: skip
TEXT = st.none() | st.text(
    st.characters(codec="utf-8", exclude_characters="\r\n\0", exclude_categories=("Cs",)), min_size=1
)
COUNT = st.integers(0, 10**17)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 9 * 10**18), TEXT, st.none() | st.integers(0, 10**15), TEXT, COUNT, COUNT, TEXT
        ),
        max_size=20,
    )
)
def test_what_it_can_hold_survives(table: list[tuple[Any, ...]]) -> None:
    table = [(*row, "complete" if row[5] else "upstream_error") for row in table]
    columns = {name: [row[i] for row in table] for i, name in enumerate(NAMES)}
    batch = batch_of(len(table), columns)
    data, _ = write(FORMAT, CaptureInfo(source="burstgpt", arrivals="trace"), [batch])
    assert rows(read(FORMAT, data)[1], *NAMES) == rows([batch], *NAMES)
