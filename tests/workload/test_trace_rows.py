"""What is taken of a trace beside its lengths, where somebody asks: names, bodies, rows without a time."""

import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmtap.capture.schema import CaptureInfo
from llmtap.capture.store.parquet import write_parquet
from llmtap.errors import ConfigError
from llmtap.traces.convert import convert
from llmtap.traces.format import batch_of
from llmtap.workload.trace import Trace, load_trace
from llmtap.workload.trace_rows import TraceParts, TraceTurns

S = 1_000_000_000
US = 1_000_000
"""Microseconds in a second."""


def capture(path: Path, *rows: dict[str, object], **info: object) -> str:
    names = sorted({name for row in rows for name in row})
    columns = {name: [row.get(name) for row in rows] for name in names}
    columns.setdefault("input_tokens", [10] * len(rows))
    described = CaptureInfo(arrivals="trace", **info)  # type: ignore[arg-type]
    write_parquet(path, described, [batch_of(len(rows), columns)])
    return str(path)


def row(at_s: float | None, session: str | None = None, **columns: object) -> dict[str, object]:
    return {"arrival_ns": None if at_s is None else round(at_s * S), "session": session} | columns


def loaded(tmp_path: Path, *rows: dict[str, object]) -> Trace:
    return load_trace(capture(tmp_path / "c.parquet", *rows), parts=TraceParts(conversations=True))


STREAM = {"stream": True}


def links(trace: Trace) -> list[tuple[int, float]]:
    """Of each row, whom it follows, and after how many seconds."""
    requests = trace.requests
    return [(row, ns / S) for row, ns in zip(requests.after, requests.think_ns, strict=True)]


def test_a_row_follows_its_parent_after_the_time_that_was_told(tmp_path: Path) -> None:
    trace = loaded(
        tmp_path,
        row(1, "a", id="x", turn=0),
        row(9, "a", id="z", turn=1, parent="x", think_us=5 * US),
        row(8, "a", id="y", turn=1, parent="x", think_us=4 * US),  # a branch, out of order
        row(2, "b", id="w", turn=0),
        row(20, "a", id="v", turn=2, parent="y", think_us=3 * US),
    )
    assert links(trace) == [(-1, 0), (-1, 0), (0, 4), (0, 5), (2, 3)]
    assert list(trace.sessions) == [0, 1, 0, 0, 0]
    assert trace.notes == []


def test_a_row_joins_the_subagents_that_had_ended_when_it_arrived(tmp_path: Path) -> None:
    trace = loaded(
        tmp_path,
        row(0, "main", id="a", turn=0, response_end_us=US),
        row(2, "one", id="b", turn=0, parent="a", response_end_us=US),
        row(2, "two", id="c", turn=0, parent="a", response_end_us=2 * US),
        row(4, "one", id="d", turn=1, parent="b", response_end_us=US),
        row(2, "background", id="e", turn=0, parent="a", response_end_us=20 * US),
        row(8, "main", id="f", turn=1, parent="a", think_us=7 * US, response_end_us=US),
        row(12, "main", id="g", turn=2, parent="f", think_us=3 * US),
    )
    assert trace.requests.joins == {5: (4, 2)}  # in the order of arrivals: a b c e d f g
    assert links(trace)[5:] == [(0, 3), (5, 3)]
    assert trace.first_rows(6).requests.joins == trace.requests.joins
    again = trace.requests_at(count=13)
    assert again.joins == {5: (4, 2), 12: (11, 9)}


def test_without_a_parent_the_turn_decides(tmp_path: Path) -> None:
    trace = loaded(
        tmp_path,
        row(0, "a", turn=0, response_end_us=US),
        row(5, "a", turn=1, response_end_us=US),
        row(6, "a", turn=1, response_end_us=2 * US),
        row(11, "a", turn=2),
        row(12, "a", turn=0),  # begun anew
        row(13, "a", turn=4, think_us=9),
    )
    # Of two turns 1 the latest; of turn 4 the nearest is 2, and its think time was of another answer.
    assert links(trace) == [(-1, 0), (0, 4), (0, 5), (2, 3), (-1, 0), (3, 9e-6)]
    assert list(trace.sessions) == [0, 0, 0, 0, 0, 0]


def test_without_turns_the_order_of_arrivals_decides(tmp_path: Path) -> None:
    trace = loaded(
        tmp_path,
        row(7, "a", response_end_us=US),
        row(3, "b", response_end_us=10 * US),
        row(0, "a", response_end_us=2 * US),
        row(4, "b"),
        row(5),
    )
    # Rows in order: a at 0, b at 3, b at 4 (who did not wait), nobody's at 5, a at 7.
    assert links(trace) == [(-1, 0), (-1, 0), (1, 0), (-1, 0), (0, 5)]
    assert list(trace.sessions) == [0, 1, 1, 2, 0]
    assert trace.notes == ["1 turns did not wait for the previous answer: think time 0"]


def test_an_answer_ends_where_the_client_had_it(tmp_path: Path) -> None:
    ends = {"delivered_us": 3 * US, "response_end_us": 2 * US, "last_token_us": US}
    for first, left in (("delivered_us", 7), ("response_end_us", 8), ("last_token_us", 9)):
        trace = loaded(tmp_path, row(0, "a", **ends), row(10, "a"))
        assert links(trace)[1] == (0, left)
        del ends[first]
    trace = loaded(tmp_path, row(0, "a"), row(10, "a"))
    assert links(trace)[1] == (0, 10)
    assert trace.notes == [
        "1 turns follow an answer with an unknown end: think time is from arrival to arrival"
    ]


def test_a_parent_that_is_not_there_gives_way_to_the_session(tmp_path: Path) -> None:
    trace = loaded(
        tmp_path,
        row(0, "a", id="x", turn=0, response_end_us=US),
        row(9, "a", id="z", turn=2, parent="y", think_us=1),
        row(10, "b", id="q", turn=3, parent="p", think_us=1),
        row(11, None, id="r", parent="o"),
    )
    # Since y is away, from the end of x.
    assert links(trace) == [(-1, 0), (0, 8), (-1, 0), (-1, 0)]
    assert trace.notes == ["2 turns continue a turn that the trace does not have: each begins a conversation"]


def test_names_mean_nothing_in_another_capture(tmp_path: Path) -> None:
    trace = loaded(
        tmp_path,
        row(0, "a", id="x", capture="one"),
        row(1, "a", id="x", capture="two"),
        row(2, "a", parent="x", capture="two", think_us=7),
        row(3, "a", capture="one"),
        row(4, parent="x", capture="one", think_us=7),
        row(5, parent="x", capture="three"),
    )
    assert [after for after, _ in links(trace)] == [-1, -1, 1, 0, 0, -1]
    assert list(trace.sessions) == [0, 1, 1, 0, 0, 2]


def test_a_turn_without_a_time_comes_when_its_conversation_would_go_on(tmp_path: Path) -> None:
    # As AIPerf writes them: a time for the first turn, then delays.
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"timestamp": 1000, "session_id": "s", "input_length": 5, "output_length": 1}\n'
        '{"timestamp": 2000, "session_id": "t", "input_length": 6, "output_length": 1}\n'
        '{"delay": 4000, "session_id": "s", "input_length": 7, "output_length": 1}\n'
        '{"delay": 500, "session_id": "s", "input_length": 8, "output_length": 1}\n'
        '{"delay": 1, "session_id": "u", "input_length": 9, "output_length": 1}\n'
    )
    trace = load_trace(str(path), source_format="aiperf", parts=TraceParts(conversations=True))
    assert [t / S for t in trace.requests.arrival_ns] == [1, 2, 5, 5.5]
    assert list(trace.requests.input) == [5, 6, 7, 8]
    assert links(trace) == [(-1, 0), (-1, 0), (0, 4), (2, 0.5)]
    assert trace.notes == [
        "1 rows have no arrival time: left out",
        "2 rows have no arrival time: they arrive after the previous answer",
    ]
    alone = load_trace(str(path), source_format="aiperf")
    assert list(alone.requests.input) == [5, 6]


NAMES = st.one_of(st.none(), st.sampled_from("abc"))
ROWS = st.lists(
    st.tuples(
        st.integers(0, 20),
        NAMES,
        st.one_of(st.none(), st.integers(0, 4)),
        NAMES,
        NAMES,
        st.one_of(st.none(), st.integers(0, 9)),
        st.one_of(st.none(), st.integers(0, 9)),
    ),
    max_size=25,
)


# A row that waited for a subagent, but not for the answer before.
NOT_WAITED = [
    (0, "a", None, "a", None, None, 1),
    (0, "b", None, None, "a", None, 0),
    (1, "a", None, None, None, None, None),
]


@given(ROWS)
@example(NOT_WAITED)
def test_links_lead_back_and_think_times_are_not_below_zero(
    rows: list[tuple[int, str | None, int | None, str | None, str | None, int | None, int | None]],
) -> None:
    rows.sort(key=lambda r: r[0])
    names = ("arrival_ns", "session", "turn", "id", "parent", "think_us", "response_end_us")
    columns = dict(zip(names, zip(*rows, strict=True), strict=True)) if rows else {}
    turns = TraceTurns()
    turns.add(batch_of(len(rows), columns))
    found = turns.link_rows(range(len(rows)), [r[0] for r in rows])
    assert len(found.after) == len(found.think_ns) == len(found.session) == len(rows)
    for place, (before, think_ns) in enumerate(zip(found.after, found.think_ns, strict=True)):
        assert -1 <= before < place
        assert think_ns >= 0
        if before < 0:
            assert think_ns == 0
        else:
            # Of one conversation, by its session's name or by its parent's id.
            assert found.session[place] == found.session[before]
            same = rows[place][1] is not None and rows[place][1] == rows[before][1]
            assert same or (rows[place][4] is not None and rows[place][4] == rows[before][3])


BODIES = ('{"model": "m", "messages": []}', '{"prompt": "caf\u00e9"}')


def test_bodies_come_as_they_are(tmp_path: Path) -> None:
    place = capture(
        tmp_path / "c.parquet",
        row(2, request_body=BODIES[1], input_tokens=3),
        row(1, request_body=BODIES[0], input_tokens=None),
        row(3, request_body=None, input_tokens=4),
        row(4, request_body=None, input_tokens=None),
    )
    trace = load_trace(place, parts=TraceParts(bodies=True))
    assert trace.requests.bodies == [BODIES[0].encode(), BODIES[1].encode(), b""]
    assert list(trace.requests.input) == [0, 3, 4]
    assert trace.notes == [
        "1 rows have no count of input tokens: left out",
        "1 rows have a body and no count of input tokens: taken for 0",
    ]
    # Who does not ask for bodies has no use for rows of which they are all there is.
    alone = load_trace(place)
    assert (list(alone.requests.input), alone.requests.bodies) == ([3, 4], [])


def test_what_a_gateway_asks_its_engine_is_not_sent_again(tmp_path: Path) -> None:
    sides = [
        row(at, side=side, input_tokens=at, output_tokens=1)
        for at, side in enumerate(("front", "back", None, "back"), 1)
    ]
    assert list(load_trace(capture(tmp_path / "c.parquet", *sides)).requests.input) == [1, 3]
    report = convert(str(tmp_path / "c.parquet"), str(tmp_path / "c.jsonl"), target_format="mooncake")
    assert report.rows_read == 2


def test_rows_without_a_count_of_the_server_are_estimated_from_their_stream(tmp_path: Path) -> None:
    place = capture(
        tmp_path / "c.parquet",
        row(1, input_tokens=100, prompt_bytes=300, output_tokens=10, response_bytes=50, outcome="complete"),
        # A stream without usage: the meter counted its chunks.
        row(2, prompt_bytes=60, output_tokens=7, token_source="chunks", outcome="complete"),
        row(3, prompt_bytes=30, event_flags=[0, 2, 3, 1, 2], response_bytes=900, outcome="complete") | STREAM,
        row(4, prompt_bytes=30, response_bytes=45, outcome="complete"),
        row(5, prompt_bytes=1, response_bytes=45, outcome="upstream_error"),
        row(6, output_tokens=4),
        row(0, method="GET", response_bytes=45, outcome="complete"),
        row(7, input_tokens=8),
    )
    trace = load_trace(place, parts=TraceParts(bodies=True, row_numbers=True))
    assert list(trace.source_rows) == [0, 1, 2, 3, 4, 7]
    assert list(trace.requests.input) == [100, 20, 10, 10, 1, 8]
    assert list(trace.requests.output) == [10, 7, 3, 9, 0, 0]
    assert (trace.omitted_count, trace.estimated_count) == (1, 4)
    assert [note[:30] for note in trace.notes] == [
        "1 rows have no count of input ",
        "1 rows are no requests to a mo",
        "4 rows lack a token count: est",
    ]
    rows = (row(1, input_tokens=None, prompt_bytes=60), row(2, input_tokens=None, prompt_bytes=7))
    alone = load_trace(capture(tmp_path / "d.parquet", *rows))
    assert list(alone.requests.input) == [15, 2]  # by the assumed mean


def test_names_come_where_they_are_known(tmp_path: Path) -> None:
    place = capture(
        tmp_path / "c.parquet", row(2, tenant="t", model=None), row(1, tenant=None, model="m"), row(3)
    )
    trace = load_trace(place, parts=TraceParts(names=True))
    assert trace.requests.tenants == ["", "t", ""]
    assert trace.requests.models == ["m", "", ""]
    assert (load_trace(place).requests.tenants, load_trace(place).requests.models) == ([], [])
    nobody = load_trace(capture(tmp_path / "d.parquet", row(1)), parts=TraceParts(names=True, bodies=True))
    assert (nobody.requests.tenants, nobody.requests.models, nobody.requests.bodies) == ([], [], [])


def test_a_batch_of_bodies_has_no_times_and_can_be_had_without(tmp_path: Path) -> None:
    path = tmp_path / "batch.jsonl"
    body = {"model": "m", "messages": [{"role": "user", "content": "question"}]}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    path.write_text("".join(json.dumps(line | {"custom_id": f"q{i}"}) + "\n" for i in range(3)))
    with pytest.raises(ConfigError, match="none of its rows has an arrival time"):
        load_trace(str(path), parts=TraceParts(bodies=True))
    trace = load_trace(str(path), parts=TraceParts(bodies=True, names=True, timed=False))
    assert list(trace.requests.arrival_ns) == [0, 0, 0]
    assert [json.loads(sent) for sent in trace.requests.bodies] == [body] * 3
    assert trace.requests.models == ["m"] * 3
    assert trace.notes == [
        "3 rows lack a token count: estimated from the events that carry output, and from bytes",
        "3 rows have no arrival time: they come with the row before",
    ]


def test_a_row_without_a_time_comes_with_the_one_before(tmp_path: Path) -> None:
    place = capture(tmp_path / "c.parquet", row(None), row(5), row(None), row(None), row(6))
    trace = load_trace(place, parts=TraceParts(timed=False))
    assert [t / S for t in trace.requests.arrival_ns] == [5, 5, 5, 5, 6]


def test_each_row_knows_its_place_in_the_source(tmp_path: Path) -> None:
    known = ((5, 50), (None, 1), (2, 20), (3, None), (2, 21), (1, 10), (4, 40))
    place = capture(
        tmp_path / "c.parquet", *(row(at_s, input_tokens=n, response_end_us=7) for at_s, n in known)
    )
    trace = load_trace(place, parts=TraceParts(row_numbers=True))
    assert (list(trace.requests.input), list(trace.source_rows)) == ([10, 20, 21, 40, 50], [5, 2, 4, 6, 0])
    assert list(load_trace(place, parts=TraceParts(row_numbers=True, timed=False)).source_rows) == [
        5,
        2,
        4,
        6,
        0,
        1,
    ]
    assert list(load_trace(place, parts=TraceParts(row_numbers=True), count=3).source_rows) == [2, 4, 0]
    assert list(trace.first_rows(2).source_rows) == [5, 2]
    assert list(trace.window(S, 2 * S).source_rows) == [2, 4]
    thin = trace.sample_conversations(0.5, 3)
    assert [n for n in trace.requests.input if n in thin.requests.input] == list(thin.requests.input)
    assert dict(zip(thin.requests.input, thin.source_rows, strict=True)).items() <= (
        dict(zip(trace.requests.input, trace.source_rows, strict=True)).items()
    )
    alone = load_trace(place)
    assert (list(alone.source_rows), list(alone.window(S).source_rows)) == ([], [])
    assert not alone.has_answer_times


def test_rows_with_bodies_keep_their_paths_and_what_cannot_be_sent_is_left_out(tmp_path: Path) -> None:
    chat = {"method": "POST", "path": "/v1/chat/completions", "endpoint": "chat.completions"}
    embeddings = {"method": "POST", "path": "/v1/embeddings", "endpoint": "embeddings"}
    place = capture(
        tmp_path / "c.parquet",
        row(1, request_body='{"messages":[]}', **chat),
        row(2, request_body='{"input":"x"}', **embeddings),
        row(3, **chat),
        row(4, **embeddings),
        row(5, request_body="--form", **chat),
        level="full",
    )
    trace = load_trace(place, parts=TraceParts(bodies=True))
    assert trace.requests.paths == ["/v1/chat/completions", "/v1/embeddings", ""]
    assert trace.requests.bodies == [b'{"messages":[]}', b'{"input":"x"}', b""]
    assert sum(trace.unsendable.values()) == 2 and len(trace.unsendable) == 2
    assert sum("not sent" in note for note in trace.notes) == 2
    again = trace.requests_at(count=5)
    assert again.paths == [*trace.requests.paths, *trace.requests.paths[:2]]
    assert load_trace(place, parts=TraceParts(bodies=True), count=3).requests.bodies == trace.requests.bodies
    assert len(load_trace(place)) == 5, "without bodies nothing is sent"
