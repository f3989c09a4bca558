"""A trace is read in the order of its arrivals, repeated, scaled, cut and thinned by whole conversations."""

import gzip
import json
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.capture.schema import CaptureInfo
from llmtap.capture.store.parquet import write_parquet
from llmtap.errors import ConfigError
from llmtap.traces.convert import convert
from llmtap.traces.format import batch_of
from llmtap.workload.requests import Requests
from llmtap.workload.trace import Trace, load_trace
from llmtap.workload.trace_rows import TraceParts
from tests.support.workloads.batch_runs import S, workload

SHAREGPT = '[{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]'
HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def burst(path: Path, *rows: tuple[float, int, int]) -> Path:
    lines = [f"{t},ChatGPT,{n},{m},{n + m},API log\n" for t, n, m in rows]
    path.write_text(HEADER + "".join(lines))
    return path


def result(requests: Requests) -> list[tuple[float, int, int]]:
    times = [t / S for t in requests.arrival_ns]
    return list(zip(times, requests.input, requests.output, strict=True))


def test_a_trace_is_read_in_the_order_of_its_arrivals(tmp_path: Path) -> None:
    path = burst(tmp_path / "a.csv", (7, 1, 2), (5.5, 3, 0), (9, 4, 5))
    trace = load_trace(str(path))
    assert (trace.format, len(trace), trace.span_ns) == ("burstgpt", 3, 3.5 * S)
    assert trace.notes == ["1 rows have no response tokens: failed requests"]
    assert result(trace.requests) == [(5.5, 3, 0), (7, 1, 2), (9, 4, 5)]
    assert result(trace.requests_at(count=3)) == [(0, 3, 0), (1.5, 1, 2), (3.5, 4, 5)]


def test_what_the_reader_leaves_out_is_in_the_notes(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    row = {"timestamp": 0, "input_length": 3, "output_length": 4, "hash_ids": [], "priority": 1}
    path.write_text(json.dumps(row) + "\n")
    notes = load_trace(str(path), source_format="mooncake").notes
    assert "1 rows with a field 'priority' that is not kept" in notes


def test_only_the_rows_wanted_are_read(tmp_path: Path) -> None:
    rows = [(i, i, i) for i in range(25_000)]
    path = burst(tmp_path / "a.csv", *rows)
    with open(path, "a") as file:
        file.write("not,a,row\n")  # so far nobody reads
    assert result(load_trace(str(path), count=12_345).requests) == rows[:12_345]
    with pytest.raises(ConfigError, match=r"line 25,?002"):
        load_trace(str(path))


@pytest.mark.parametrize("kind", ["a.csv.gz", "captures"])
def test_compression_and_folders_of_captures_are_read(kind: str, tmp_path: Path) -> None:
    rows = [(1.0, 3, 4), (2.5, 5, 0)]
    plain = burst(tmp_path / "a.csv", *rows)
    place = tmp_path / kind
    if kind == "a.csv.gz":
        place.write_bytes(gzip.compress(plain.read_bytes()))
    else:
        place.mkdir()
        convert(str(plain), str(place / "x.parquet"))
    trace = load_trace(str(place))
    assert result(trace.requests_at(count=len(trace))) == [(t - 1, n, m) for t, n, m in rows]


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("empty.csv", "", "the file is empty"),
        ("header.csv", HEADER, "has no rows"),
        ("odd.csv", "a,b\n1,2\n", "the format of the file is not known"),
        ("broken.csv", HEADER + "1,x,2,y,4,z\n", "line 2"),
        ("lengths.json", SHAREGPT, "has an arrival time"),
    ],
)
def test_what_is_no_trace_is_refused_by_name(
    name: str, text: str | None, problem: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=problem) as caught:
        load_trace(str(path))
    assert str(path) in str(caught.value)


def trace_of(*rows: tuple[float, int, int]) -> Trace:
    return Trace(workload(rows))


def test_a_trace_that_is_too_short_begins_again_a_mean_gap_after_its_end() -> None:
    trace = trace_of((10, 1, 1), (11, 2, 2), (16, 3, 3))
    # The span is 6 s and the mean gap 3 s: it comes again every 9 s.
    assert [t for t, _, _ in result(trace.requests_at(count=8))] == [0, 1, 6, 9, 10, 15, 18, 19]
    assert [n for _, n, _ in result(trace.requests_at(count=8))] == [1, 2, 3, 1, 2, 3, 1, 2]
    assert trace.rate_rps == 1 / 3


@given(
    st.lists(st.integers(0, 10**9), min_size=2, max_size=30).filter(lambda t: max(t) > min(t)),
    st.integers(1, 100),
    st.sampled_from([0.3, 1.0, 7.0, 100.0]),
)
def test_rows_stay_in_order_and_bursts_stay_bursts(times: list[int], count: int, scale: float) -> None:
    times.sort()
    n = len(times)
    trace = Trace(Requests(array("q", times), array("q", range(n)), array("q", range(n)), array("q")))
    made = trace.requests_at(count=count, scale=scale)
    assert len(made) == count == len(made.input)
    assert list(made.arrival_ns) == sorted(made.arrival_ns)
    assert list(made.input) == [i % n for i in range(count)]
    for i in range(min(count, n)):
        assert abs(made.arrival_ns[i] * scale - (times[i] - times[0])) <= scale
    for i in range(n, count):
        # Each round is like the first, to a nanosecond of rounding.
        here = made.arrival_ns[i] - made.arrival_ns[i - i % n]
        assert abs(here - made.arrival_ns[i % n]) <= 1


def mooncake(path: Path, *rows: tuple[int, int, list[int] | None]) -> str:
    """Rows of milliseconds, input tokens and ids of blocks of 512."""
    lines = []
    for at_ms, n, ids in rows:
        row = {"timestamp": at_ms, "input_length": n, "output_length": 1}
        lines.append(json.dumps(row if ids is None else row | {"hash_ids": ids}))
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_delays_that_add_up_to_too_much_are_refused(tmp_path: Path) -> None:
    place = tmp_path / "a.jsonl"
    rows = [{"session_id": "a", "timestamp": 9e12, "input_length": 5}]
    rows.append({"session_id": "a", "delay": 9e12, "input_length": 5})
    place.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match="a conversation add up to more"):
        load_trace(str(place), parts=TraceParts(conversations=True))


def test_prompts_bring_their_blocks_and_the_last_need_not_be_full(tmp_path: Path) -> None:
    place = mooncake(
        tmp_path / "m.jsonl", (9, 1_100, [7, 8, 9]), (5, 512, [7, 8]), (7, 100, [3]), (8, 5, None)
    )
    trace = load_trace(place, source_format="mooncake")
    assert trace.requests.block_tokens == 512
    assert trace.requests.blocks == [(7,), (3,), (), (7, 8, 9)]  # 512 tokens have no second block
    assert trace.notes == [
        "1 rows have no hash_ids",
        "1 rows have another number of hash_ids than blocks of 512 tokens",
    ]


def captured(path: Path, *rows: tuple[int | None, int, list[int], int, str, int]) -> str:
    """Rows of arrival, input tokens, ids, block size, unit and bytes of the prompt, as a capture."""
    names = ("arrival_ns", "input_tokens", "blocks", "block_size", "block_unit", "prompt_bytes")
    columns = dict(zip(names, zip(*rows, strict=True), strict=True))
    write_parquet(path, CaptureInfo(capture="c"), [batch_of(len(rows), columns)])
    return str(path)


def test_blocks_of_bytes_are_taken_for_tokens_by_the_mean(tmp_path: Path) -> None:
    place = captured(
        tmp_path / "c.parquet",
        (S, 500, [1, 2], 1_000, "bytes", 2_000),
        (2 * S, 1_250, [1, 2, 3, 4], 1_000, "bytes", 5_000),
        (None, 9, [8], 1_000, "bytes", 9_999),
    )
    trace = load_trace(place)
    assert (trace.requests.block_tokens, trace.requests.blocks) == (250, [(1, 2), (1, 2, 3, 4)])
    assert trace.notes == [
        "1 rows have no arrival time: left out",
        "prompt blocks of 1,000 bytes are taken for 250 tokens, by the mean",
    ]


@pytest.mark.parametrize("scale", [1.0, 50.0])
def test_what_has_dates_begins_at_its_first(scale: float, tmp_path: Path) -> None:
    at_ns = 1_700_000_000 * S
    place = captured(tmp_path / "c.parquet", (at_ns + S, 1, [], 0, "", 0), (at_ns, 1, [], 0, "", 0))
    assert load_trace(place).requests_at(count=4, scale=scale).epoch_ns == at_ns
    undated = burst(tmp_path / "a.csv", (5, 1, 2), (9, 1, 2))
    assert load_trace(str(undated)).requests_at(count=2).epoch_ns == 0


def talk(*rows: tuple[float, int]) -> Trace:
    """Rows of an arrival and whom it follows (-1: nobody), each with its number as its length."""
    times = array("q", (round(t * S) for t, _ in rows))
    after = array("q", (before for _, before in rows))
    think_ns = array("q", (0 if before < 0 else S + row for row, (_, before) in enumerate(rows)))
    numbers = array("q", range(len(rows)))
    sessions = array("q")
    for row, before in enumerate(after):
        sessions.append(row if before < 0 else sessions[before])
    names = [f"n{row}" for row in numbers]
    requests = Requests(
        times,
        numbers,
        numbers,
        after=after,
        think_ns=think_ns,
        tenants=names,
        bodies=[name.encode() for name in names],
        models=names,
    )
    return Trace(requests, sessions=sessions)


TALK = ((10, -1), (11, 0), (12, -1), (16, 1), (16, 2), (20, -1))


def test_what_comes_again_has_its_own_conversations() -> None:
    trace = talk(*TALK)
    made = trace.requests_at(count=15, scale=2)
    assert list(made.after) == [-1, 0, -1, 1, 2, -1, -1, 6, -1, 7, 8, -1, -1, 12, -1]
    assert list(made.think_ns) == list((trace.requests.think_ns * 3)[:15])
    assert made.tenants == (trace.requests.tenants * 3)[:15] == made.models
    assert made.bodies == (trace.requests.bodies * 3)[:15]
    assert list(made.arrival_ns[:6]) == [0, S // 2, S, 3 * S, 3 * S, 5 * S]


@pytest.mark.parametrize(
    ("from_s", "for_s", "rows", "after"),
    [
        (1, 5, [1, 2], [-1, -1]),
        (1, 6, [1, 2, 3, 4], [-1, -1, 0, 1]),
        (6, None, [3, 4, 5], [-1, -1, -1]),
        (9.5, 100, [5], [-1]),
    ],
)
def test_a_window_is_what_arrives_in_it(
    from_s: float, for_s: float | None, rows: list[int], after: list[int]
) -> None:
    trace = talk(*TALK).window(round(from_s * S), None if for_s is None else round(for_s * S))
    assert list(trace.requests.input) == rows
    assert list(trace.requests.after) == after
    assert list(trace.sessions) == [talk(*TALK).sessions[row] for row in rows]
    # Who begins a conversation has nothing to think about.
    assert all((ns == 0) == (row < 0) for ns, row in zip(trace.requests.think_ns, after, strict=True))
    assert trace.requests_at(count=1).arrival_ns[0] == 0


@pytest.mark.parametrize(("from_ns", "for_ns"), [(10 * S + 1, None), (0, 0)])
def test_a_window_in_which_nothing_arrives_is_refused(from_ns: int, for_ns: int | None) -> None:
    with pytest.raises(ValueError, match="no row"):
        talk(*TALK).window(from_ns, for_ns)


CONVERSATIONS = st.lists(st.integers(0, 30), min_size=1, max_size=60).map(
    # Each row follows an earlier one, or nobody.
    lambda rows: talk(*((place, before if before < place else -1) for place, before in enumerate(rows)))
)


@given(CONVERSATIONS, st.floats(0.01, 1), st.floats(0, 1), st.integers())
def test_thinning_takes_whole_conversations_in_their_order(
    trace: Trace, share: float, less: float, seed: int
) -> None:
    def kept(share: float) -> Trace | None:
        try:
            return trace.sample_conversations(share, seed)
        except ValueError:
            return None

    thin = kept(share)
    rows = [] if thin is None else list(thin.requests.input)
    assert rows == sorted(rows)
    left = {trace.sessions[row] for row in rows}
    assert rows == [row for row, number in enumerate(trace.sessions) if number in left]
    if thin is not None:
        # All turns are there, so all follow whom they followed.
        assert [rows[before] if before >= 0 else -1 for before in thin.requests.after] == [
            trace.requests.after[row] for row in rows
        ]
        assert list(thin.sessions) == [trace.sessions[row] for row in rows]
        assert list(thin.requests.arrival_ns) == [trace.requests.arrival_ns[row] for row in rows]
    # Who stays at a share stays at every larger one.
    thinner = kept(max(share * less, 1e-9))
    assert thinner is None or set(thinner.requests.input) <= set(rows)


@pytest.mark.parametrize("share", [0, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        talk(*TALK).sample_conversations(share, 1)


def test_ties_are_kept_and_told_of_the_rows_that_are_left(tmp_path: Path) -> None:
    place = mooncake(tmp_path / "m.jsonl", (0, 5, None), (0, 6, None), (3_000, 7, None), (9_000, 8, None))
    trace = load_trace(place)
    assert trace.tied_share == 1 / 3
    result = (
        "{} of the gaps between arrivals are 0 (the others have a median of {} s): such rows stay together"
    )
    bare = "4 rows have no hash_ids"
    assert trace.notes == [bare, result.format("33.3%", "4.5")]
    assert list(trace.requests_at(count=4, scale=3).arrival_ns) == [0, 0, S, 3 * S]
    assert trace.first_rows(3).notes == [bare, result.format("50.0%", "3")]
    later = trace.window(1)
    assert (later.tied_share, later.notes) == (0, [bare])


def test_rows_without_output_tokens_are_counted(tmp_path: Path) -> None:
    place = tmp_path / "a.jsonl"
    place.write_text(
        '{"timestamp": 0, "input_length": 5}\n{"timestamp": 9.5, "input_length": 6.0, "output_length": 2}\n'
    )
    trace = load_trace(str(place))
    assert list(trace.requests.arrival_ns) == [0, 9_500_000] and list(trace.requests.output) == [0, 2]
    assert trace.notes == ["1 rows have no count of output tokens: taken for 0"]
