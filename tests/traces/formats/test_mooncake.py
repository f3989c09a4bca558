"""What a Mooncake file holds comes back byte for byte; a capture keeps its sharing and its gaps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.capture.schema import CaptureInfo
from llmtap.traces.format import FormatError, batch_of
from llmtap.traces.formats.mooncake import FORMAT
from tests.support import capture_rows, trace_stats
from tests.support.trace_files import from_trace, read, rows, stats, trace, write

FILES = [
    f"mooncake/{name}.jsonl.gz" for name in ("conversation_trace.rows_1_8000", "synthetic_trace.rows_1_2500")
]
SHORT = (
    b'{"timestamp": 27482, "input_length": 6955, "output_length": 52, '
    b'"hash_ids": [46, 47, 2353, 9, 11, 3, 4, 1, 12, 13, 14, 15, 16, 17]}\n'
    b'{"timestamp": 30535, "input_length": 513, "output_length": 26, "hash_ids": [46, 90]}\n'
)


@pytest.mark.parametrize("name", FILES)
def test_a_shared_trace_has_the_statistics_held_for_it(name: str) -> None:
    source, batches = read(FORMAT, trace(name))
    held = stats(name)
    times, read_, made = (
        trace_stats.column(batches, c) for c in ("arrival_ns", "input_tokens", "output_tokens")
    )
    assert trace_stats.arrivals(times) == held["arrivals"]
    assert trace_stats.counts(read_) == held["input_tokens"]
    assert trace_stats.counts(made) == held["output_tokens"]
    assert trace_stats.counts([a + b for a, b in zip(read_, made, strict=True)]) == held["total_tokens"]
    assert trace_stats.correlation(read_, made) == held["corr_input_output"]
    assert trace_stats.prefix(trace_stats.column(batches, "blocks"), read_, 512) == held["prefix"]
    assert [times[0], times[-1]] == [1_000_000 * ms for ms in held["timestamp_ms_first_last"]]
    assert source.notes == []


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("cut", ["whole", "its later rows", "without its last newline"])
def test_a_shared_trace_comes_back_byte_for_byte(name: str, cut: str) -> None:
    data = trace(name)
    if cut == "its later rows":  # times and ids that begin in the middle
        data = b"".join(data.splitlines(keepends=True)[1500:])
    elif cut == "without its last newline":
        data = data.rstrip(b"\n")
    assert FORMAT.sniff(data[:65_536], "trace.jsonl")
    source, batches = read(FORMAT, data)
    again, written = write(FORMAT, source.info, batches)
    assert again == data
    assert (written.dropped, written.notes) == ({}, [])


@pytest.mark.parametrize(
    "data",
    [
        SHORT,
        SHORT.replace(b"\n", b"\r\n"),
        b"\xef\xbb\xbf" + SHORT,
        SHORT.replace(b", ", b",").replace(b": ", b":"),
        b'{"hash_ids": [7], "output_length": 1, "input_length": 2, "timestamp": 3}\n',
        b'{"timestamp": 0, "input_length": 5, "output_length": 1}\n',
        b'{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}\n',
        b'{"timestamp": 0.25, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n',
        b"",
    ],
)
def test_other_spellings_come_back_as_they_were(data: bytes) -> None:
    source, batches = read(FORMAT, data)
    assert write(FORMAT, source.info, batches)[0] == data


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b'{"timestamp": 1, "input_length": 1, "output_length": "x"}', "line 2: output_length: expected int"),
        (b'{"timestamp": 1, "input_length": -1, "output_length": 1}', "line 2: input_length: expected int >"),
        (b'{"timestamp": -1, "input_length": 1, "output_length": 1}', "line 2: timestamp: is negative"),
        (b'{"timestamp": 1e400, "input_length": 1, "output_length": 1}', "line 2: timestamp: "),
        (b'{"timestamp": 1e99999999, "input_length": 1, "output_length": 1}', "line 2: timestamp: "),
        (b'{"timestamp": 10000000000000, "input_length": 1, "output_length": 1}', "line 2: timestamp: is no"),
        (b'{"timestamp": NaN, "input_length": 1, "output_length": 1}', "line 2: not JSON: "),
        (b'{"timestamp": 1, "input_length": 1}', "line 2: output_length: is missing"),
        (b'{"timestamp": 1, "input_length": 1.5, "output_length": 1}', "line 2: input_length: expected int"),
        (b'{"timestamp": 1, "input_length": %s, "output_length": 1}' % (b"9" * 10_000), "line 2: input_leng"),
        (b'{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [-9223372036854775809]}',
         "line 2: hash_ids[0]: "),
        (b'{"timestamp": 1, "input_length": 1, "outp', "line 2: not JSON: input data was truncated"),
        (b"[1]", "line 2: expected object"),
    ],
)  # fmt: skip
def test_an_error_names_line_and_field(line: bytes, told: str) -> None:
    good = b'{"timestamp": 1, "input_length": 1, "output_length": 1}\n'
    with pytest.raises(FormatError) as caught:
        read(FORMAT, good + line + b"\n" + good)
    assert str(caught.value).startswith(told)
    assert len(str(caught.value)) < 200


def test_what_is_odd_is_noted() -> None:
    data = (
        b'{"timestamp": 1, "input_length": 513, "output_length": 1, "hash_ids": [1]}\n\n'
        b'{"timestamp": 1, "input_length": 1, "output_length": 1, "level": 3}\n'
    )
    source, batches = read(FORMAT, data)
    assert rows(batches, "blocks", "block_size") == [([1], 512), (None, None)]
    assert source.notes == [
        "1 rows with a field 'level' that is not kept",
        "1 blank lines left out",
        "1 rows have no hash_ids",
        "1 rows have another number of hash_ids than blocks of 512 tokens",
    ]


@pytest.mark.parametrize(
    ("line", "ours"),
    [
        (b'{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [1]}', True),
        (b'{"timestamp": 1, "input_length": 1, "output_length": 1}', True),
        (b'{"timestamp": 0.5, "input_length": 1, "output_length": 1, "hash_ids": [1]}', False),
        (b'{"timestamp": 1, "input_length": 1, "output_length": 1, "duration": 3}', False),
        (b'{"timestamp": 1, "input_length": 1, "output_length": 1, "session_id": "a"}', False),
        (b'{"chat_id": 1, "timestamp": 1, "input_length": 1, "output_length": 1, "turn": 1}', False),
        (b"timestamp,input_length,output_length", False),
        (b"", False),
    ],
)
def test_its_fields_and_no_others_tell_it(line: bytes, ours: bool) -> None:
    assert FORMAT.sniff(line + b"\n" + line[:20], "x.jsonl") is ours


def test_a_capture_is_sorted_and_counts_from_its_smallest_arrival() -> None:
    info = CaptureInfo(arrivals="wall", level="shape")
    day = 1_700_158_546_680_590_000
    batches = [
        batch_of(2, {"arrival_ns": [day + 5_000_000, None], "input_tokens": [1, 1], "output_tokens": [1, 1]}),
        batch_of(2, {"arrival_ns": [day, day + 2_900_000], "input_tokens": [2, 3], "output_tokens": [1, None],
                     "outcome": ["complete", "upstream_error"]}),
    ]  # fmt: skip
    data, written = write(FORMAT, info, batches)
    assert data.splitlines() == [
        b'{"timestamp": 0, "input_length": 2, "output_length": 1}',
        b'{"timestamp": 5, "input_length": 1, "output_length": 1}',
    ]
    assert written.dropped == {"no arrival time": 1, "failed request": 1}
    assert written.rows == 2
    assert written.notes[0] == "arrivals count from the smallest one, 2023-11-16T18:15:46.680590000Z"


def test_a_capture_keeps_its_sharing_under_small_numbers() -> None:
    batches = [capture_rows.batch(300, 7), capture_rows.batch(300, 8, start=301)]
    hashes = dict(rows(batches, "id", "blocks"))
    ordered = sorted(rows(batches, "arrival_ns", "id"))
    data, written = write(FORMAT, CaptureInfo(arrivals="wall", block_unit="tokens", block_size=512), batches)
    _, again = read(FORMAT, data)
    numbers = [ids for (ids,) in rows(again, "blocks")]
    there = [hashes[name] for _, name in ordered if hashes[name] is not None][: len(numbers)]
    assert written.rows == len(numbers) == len(there)
    flat = [i for ids in numbers for i in ids]
    assert sorted(set(flat)) == list(range(len(set(flat))))
    assert list(dict.fromkeys(flat)) == list(range(len(set(flat))))
    pairs = {(h, n) for hs, ns in zip(there, numbers, strict=True) for h, n in zip(hs, ns, strict=True)}
    assert len(pairs) == len({h for h, _ in pairs}) == len({n for _, n in pairs})


LENGTHS = st.integers(0, 10**18 - 1)
BLOCKS = st.none() | st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5)
ROWS = st.lists(st.tuples(st.integers(0, 9 * 10**12), LENGTHS, LENGTHS, BLOCKS), max_size=30)


@given(ROWS)
def test_what_it_can_hold_survives(table: list[tuple[int, int, int, list[int] | None]]) -> None:
    names = ("arrival_ns", "input_tokens", "output_tokens", "blocks")
    columns = [[ms * 1_000_000 for ms, *_ in table], *([row[i] for row in table] for i in (1, 2, 3))]
    info, batch = from_trace("mooncake", dict(zip(names, columns, strict=True)))
    data, _ = write(FORMAT, info, [batch])
    assert rows(read(FORMAT, data)[1], *names) == rows([batch], *names)
