"""A reader reads a token once it is there and the one before has been read; idle is who waits."""

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from llmtap.bench.report.documents import BenchStep, LoadTasks
from llmtap.bench.report.report import reading_times_ns, stream_charts, task_times
from llmtap.bench.run.measurement import Measurement
from llmtap.metrics.deadlines import READER_NS_PER_TOKEN, user_idle_ns

MS = 1_000_000


def measured(*streams: tuple[int | None, list[int], int, str]) -> Measurement:
    first, gaps, tokens, outcomes = zip(*streams, strict=True) if streams else ((), (), (), ())
    table = pa.table(
        {
            "ttft_any_ns": pa.array(first, pa.int64()),
            "gaps_ns": pa.array(gaps, pa.list_(pa.int64())),
            "output_tokens": pa.array(tokens, pa.int64()),
            "outcome": pa.array(outcomes, pa.string()),
        }
    )
    return Measurement("load", "", {}, table)


def test_what_waits_is_read_late_and_what_is_there_is_read_in_turn() -> None:
    assert reading_times_ns([10, 11, 12, 100], 5) == [10, 15, 20, 100]
    assert reading_times_ns([], 5) == []


@given(st.lists(st.integers(0, 300 * MS), min_size=1, max_size=40))
def test_the_longest_wait_is_how_far_the_reader_is_behind_at_the_end(gaps_ns: list[int]) -> None:
    """Who waited for nothing would be through at V for each token before; every wait puts that off."""
    times_ns, t_ns = [], 0
    for gap_ns in gaps_ns:
        t_ns += gap_ns
        times_ns.append(t_ns)
    behind_ns = (
        reading_times_ns(times_ns, READER_NS_PER_TOKEN)[-1] - (len(times_ns) - 1) * READER_NS_PER_TOKEN
    )
    assert behind_ns == user_idle_ns(times_ns, 0)


def test_the_usual_and_the_worst_are_chosen_by_their_readers_waits() -> None:
    usual, worst = stream_charts(
        measured(
            (40 * MS, [10 * MS] * 3, 4, "complete"),
            (90 * MS, [10 * MS] * 3, 4, "complete"),
            (50 * MS, [10 * MS, 900 * MS, 10 * MS], 4, "complete"),
            (9_000 * MS, [10 * MS], 2, "upstream_reset"),
        )
    )
    assert usual.title == (
        "A stream, the usual: its reader waits 90 ms in all; with token i due at V i (001, eq. 4), 40 ms"
    )
    assert worst.title == (
        "A stream, the worst: its reader waits 860 ms in all; with token i due at V i (001, eq. 4), 810 ms"
    )
    delivered, read, wanted = worst.series
    assert delivered.x == [0.05, 0.06, 0.96, 0.97]
    assert read.x == [0.05, 0.1, 0.96, 1.01]
    assert wanted.x == [0.0, 0.05, 0.1, 0.15]
    assert delivered.y == read.y == wanted.y == [1.0, 2.0, 3.0, 4.0]


def test_a_chunk_of_several_tokens_takes_as_long_to_read() -> None:
    (usual, _) = stream_charts(measured((50 * MS, [10 * MS], 8, "complete")))
    assert usual.series[0].y == [4.0, 8.0]
    assert usual.series[1].x == [0.05, 0.25]


def test_a_task_is_a_conversation_or_else_a_request() -> None:
    e2e, whole = ({"n": n, "p50": p50} for n, p50 in ((9, 2.0), (3, 7.5)))
    steps = [
        BenchStep(name="load", result={"n": 10, "metrics": {"e2e": e2e}, "tasks": None}),
        BenchStep(
            name="talk", result={"n": 12, "metrics": {"e2e": e2e}, "tasks": {"n": 4, "duration": whole}}
        ),
    ]
    assert task_times(steps) == [
        LoadTasks("load", "request", 10, e2e),
        LoadTasks("talk", "conversation", 4, whole),
    ]


def test_a_load_without_streams_has_no_chart() -> None:
    assert stream_charts(measured()) == []
    assert stream_charts(measured((None, [], 0, "complete"))) == []
