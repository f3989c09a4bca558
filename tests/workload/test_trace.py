import gzip
import json
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.capture.convert import convert
from llmtap.capture.formats.format import batch_of
from llmtap.capture.parquet import write_parquet
from llmtap.capture.schema import CaptureInfo
from llmtap.errors import ConfigError
from llmtap.workload.requests import Requests
from llmtap.workload.trace import Trace, load_trace
from tests.support.flights import S, workload

SHAREGPT = '[{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]'
HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def burst(path: Path, *rows: tuple[float, int, int]) -> Path:
    lines = [f"{t},ChatGPT,{n},{m},{n + m},API log\n" for t, n, m in rows]
    path.write_text(HEADER + "".join(lines))
    return path


def told(requests: Requests) -> list[tuple[float, int, int]]:
    times = [t / S for t in requests.arrival_ns]
    return list(zip(times, requests.input, requests.output, strict=True))


def test_a_trace_is_read_in_the_order_of_its_arrivals(tmp_path: Path) -> None:
    path = burst(tmp_path / "a.csv", (7, 1, 2), (5.5, 3, 0), (9, 4, 5))
    trace = load_trace(str(path))
    assert (trace.format, len(trace), trace.span_ns, trace.notes) == ("burstgpt", 3, 3.5 * S, [])
    assert told(trace.requests) == [(5.5, 3, 0), (7, 1, 2), (9, 4, 5)]
    assert told(trace.requests_at(count=3)) == [(0, 3, 0), (1.5, 1, 2), (3.5, 4, 5)]


def test_only_the_rows_wanted_are_read(tmp_path: Path) -> None:
    rows = [(i, i, i) for i in range(25_000)]
    path = burst(tmp_path / "a.csv", *rows)
    with open(path, "a") as file:
        file.write("not,a,row\n")  # so far nobody reads
    assert told(load_trace(str(path), count=12_345).requests) == rows[:12_345]
    with pytest.raises(ConfigError, match=r"line 25,?002"):
        load_trace(str(path))


@pytest.mark.parametrize("kind", ["a.csv.gz", "b.parquet", "captures", "c.jsonl"])
def test_any_format_and_compression_of_ours_is_read(kind: str, tmp_path: Path) -> None:
    rows = [(1.0, 3, 4), (2.5, 5, 0)]
    plain = burst(tmp_path / "a.csv", *rows)
    place = tmp_path / kind
    if kind == "a.csv.gz":
        place.write_bytes(gzip.compress(plain.read_bytes()))
    elif kind == "captures":
        place.mkdir()
        convert(str(plain), str(place / "x.parquet"))
    else:
        convert(str(plain), str(place), target_format="mooncake" if kind == "c.jsonl" else None)
    trace = load_trace(str(place))
    kept = rows[:1] if kind == "c.jsonl" else rows  # Mooncake has no place for a failed request
    assert told(trace.requests_at(count=len(trace)))[: len(kept)] == [(t - 1, n, m) for t, n, m in kept]


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("none.csv", None, "cannot be read: No such file"),
        ("empty.csv", "", "the file is empty"),
        ("header.csv", HEADER, "has no rows"),
        ("odd.csv", "a,b\n1,2\n", "none of the formats known"),
        ("broken.csv", HEADER + "1,x,2,y,4,z\n", "line 2"),
        ("lengths.json", SHAREGPT, "has an arrival time"),
    ],
)  # fmt: skip
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
    assert [t for t, _, _ in told(trace.requests_at(count=8))] == [0, 1, 6, 9, 10, 15, 18, 19]
    assert [n for _, n, _ in told(trace.requests_at(count=8))] == [1, 2, 3, 1, 2, 3, 1, 2]
    assert trace.rate_rps == 1 / 3


def test_a_period_that_is_not_whole_is_rounded_once() -> None:
    trace = Trace(Requests(array("q", [0, 5, 7, 10]), *(array("q", [1] * 4) for _ in range(3))))
    # 10 + 10 / 3 ns.
    assert list(trace.requests_at(count=16).arrival_ns)[::4] == [0, 13, 26, 40]


def test_scaling_divides_all_distances() -> None:
    trace = trace_of((10, 1, 1), (11, 2, 2), (16, 3, 3))
    assert [t for t, _, _ in told(trace.requests_at(count=4, scale=100))] == [0, 0.01, 0.06, 0.09]
    assert [t for t, _, _ in told(trace.requests_at(count=2, scale=0.5))] == [0, 2]


def test_who_all_come_at_once_cannot_come_again() -> None:
    trace = trace_of((3, 1, 1), (3, 1, 1))
    assert trace.rate_rps is None
    assert len(trace.requests_at(count=2)) == 2
    with pytest.raises(ValueError, match="no gap"):
        trace.requests_at(count=3)


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


def test_prompts_bring_the_whole_blocks_that_they_begin_with(tmp_path: Path) -> None:
    place = mooncake(tmp_path / "m.jsonl", (9, 1_100, [7, 8, 9]), (5, 512, [7]), (7, 100, [3]), (8, 5, None))
    trace = load_trace(place)
    assert trace.requests.block_tokens == 512
    assert trace.requests.blocks == [(7,), (), (), (7, 8)]  # the third of three is a part of one
    assert trace.notes == []


def test_a_prompt_that_comes_again_is_the_same_prompt(tmp_path: Path) -> None:
    place = mooncake(tmp_path / "m.jsonl", (0, 512, [1]), (10, 1_024, [1, 2]), (20, 512, [4]))
    again = load_trace(place).requests_at(count=5, scale=2)
    assert again.blocks == [(1,), (1, 2), (4,), (1,), (1, 2)]
    assert again.block_tokens == 512
    assert load_trace(place, count=2).requests_at(count=2).blocks == [(1,), (1, 2)]


def test_without_blocks_there_are_none(tmp_path: Path) -> None:
    made = load_trace(str(burst(tmp_path / "a.csv", (1, 600, 2)))).requests_at(count=1)
    assert (made.blocks, made.block_tokens) == ([], 0)


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


def test_blocks_of_another_size_mean_nothing_beside_the_first(tmp_path: Path) -> None:
    place = captured(tmp_path / "c.parquet", (1, 40, [1, 2], 16, "tokens", 9), (2, 40, [1], 32, "tokens", 9))
    trace = load_trace(place)
    assert (trace.requests.block_tokens, trace.requests.blocks) == (16, [(1, 2), ()])
    assert trace.notes == ["1 rows have prompt blocks of another size: taken for unknown"]


@pytest.mark.parametrize("scale", [1.0, 50.0])
def test_what_has_dates_begins_at_its_first(scale: float, tmp_path: Path) -> None:
    at_ns = 1_700_000_000 * S
    place = captured(tmp_path / "c.parquet", (at_ns + S, 1, [], 0, "", 0), (at_ns, 1, [], 0, "", 0))
    assert load_trace(place).requests_at(count=4, scale=scale).epoch_ns == at_ns
    undated = burst(tmp_path / "a.csv", (5, 1, 2), (9, 1, 2))
    assert load_trace(str(undated)).requests_at(count=2).epoch_ns == 0
