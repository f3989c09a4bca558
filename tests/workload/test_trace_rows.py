"""What is taken of a trace beside its lengths, where somebody asks: names, bodies, rows without a time."""

import json
from pathlib import Path

import pytest

from llmtap.errors import ConfigError
from llmtap.workload.trace import load_trace
from llmtap.workload.trace_rows import tie_note, ties
from tests.workload.test_trace_turns import S, capture, row

GAPS = "the gaps between arrivals are 0"
BODIES = ('{"model": "m", "messages": []}', '{"prompt": "caf\u00e9"}')


def test_bodies_come_as_they_are(tmp_path: Path) -> None:
    place = capture(
        tmp_path / "c.parquet",
        row(2, request_body=BODIES[1], input_tokens=3),
        row(1, request_body=BODIES[0], input_tokens=None),
        row(3, request_body=None, input_tokens=4),
        row(4, request_body=None, input_tokens=None),
    )
    trace = load_trace(place, bodies=True)
    assert trace.requests.bodies == [BODIES[0].encode(), BODIES[1].encode(), b""]
    assert list(trace.requests.input) == [0, 3, 4]
    assert trace.notes == [
        "1 rows have no count of input tokens: left out",
        "1 rows have a body and no count of input tokens: taken for 0",
    ]
    # Who does not ask for bodies has no use for rows of which they are all there is.
    alone = load_trace(place)
    assert (list(alone.requests.input), alone.requests.bodies) == ([3, 4], [])


def test_names_come_where_they_are_known(tmp_path: Path) -> None:
    place = capture(
        tmp_path / "c.parquet", row(2, tenant="t", model=None), row(1, tenant=None, model="m"), row(3)
    )
    trace = load_trace(place, names=True)
    assert trace.requests.tenants == ["", "t", ""]
    assert trace.requests.models == ["m", "", ""]
    assert (load_trace(place).requests.tenants, load_trace(place).requests.models) == ([], [])
    nobody = load_trace(capture(tmp_path / "d.parquet", row(1)), names=True, bodies=True)
    assert (nobody.requests.tenants, nobody.requests.models, nobody.requests.bodies) == ([], [], [])


def test_a_batch_of_bodies_has_no_times_and_can_be_had_without(tmp_path: Path) -> None:
    path = tmp_path / "batch.jsonl"
    with open(path, "w") as file:
        for i in range(3):
            body = {"model": "m", "messages": [{"role": "user", "content": f"question {i}"}]}
            line = {"custom_id": f"q{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    with pytest.raises(ConfigError, match="none of its rows has an arrival time"):
        load_trace(str(path), bodies=True)
    trace = load_trace(str(path), bodies=True, names=True, timed=False)
    assert list(trace.requests.arrival_ns) == [0, 0, 0]
    assert [json.loads(body)["messages"][0]["content"][-1] for body in trace.requests.bodies] == [
        "0",
        "1",
        "2",
    ]
    assert trace.requests.models == ["m"] * 3
    assert trace.notes == [
        "3 rows have a body and no count of input tokens: taken for 0",
        "3 rows have no arrival time: they come with the row before",
    ]


def test_a_har_is_bodies_and_times(tmp_path: Path) -> None:
    def entry(second: int) -> dict[str, object]:
        body = {"model": "m", "messages": [{"role": "user", "content": str(second)}]}
        return {
            "startedDateTime": f"2026-01-01T00:00:{second:02}.000Z", "time": 1_000,
            "request": {
                "method": "POST", "url": "http://h/v1/chat/completions", "headers": [],
                "postData": {"mimeType": "application/json", "text": json.dumps(body)},
            },
            "response": {
                "status": 200, "headers": [], "content": {"mimeType": "application/json", "text": "{}"},
            },
        }  # fmt: skip

    path = tmp_path / "a.har"
    path.write_text(json.dumps({"log": {"version": "1.2", "creator": {}, "entries": [entry(9), entry(4)]}}))
    trace = load_trace(str(path), bodies=True, conversations=True)
    assert [json.loads(body)["messages"][0]["content"] for body in trace.requests.bodies] == ["4", "9"]
    assert trace.span_ns == 5 * S
    assert trace.dated


def test_conversations_without_times_go_on_turn_by_turn(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    turns = [{"from": who, "value": who} for who in ("human", "gpt", "human", "gpt")]
    path.write_text(
        json.dumps([{"id": "c", "conversations": turns}, {"id": "d", "conversations": turns[:2]}])
    )
    trace = load_trace(str(path), bodies=True, conversations=True, timed=False)
    assert list(trace.requests.after) == [-1, 0, -1]
    assert list(trace.requests.think_ns) == [0, 0, 0]
    assert [len(json.loads(body)["messages"]) for body in trace.requests.bodies] == [1, 3, 1]


def test_a_row_without_a_time_comes_with_the_one_before(tmp_path: Path) -> None:
    place = capture(tmp_path / "c.parquet", row(None), row(5), row(None), row(None), row(6))
    trace = load_trace(place, timed=False)
    assert [t / S for t in trace.requests.arrival_ns] == [5, 5, 5, 5, 6]


@pytest.mark.parametrize(
    ("times", "share", "notes"),
    [
        ([], 0, []),
        ([4], 0, []),
        ([1, 2, 3], 0, []),
        ([0, 0, 3 * S, 3 * S, 3 * S, 6 * S], 3 / 5,
         [f"60.0% of {GAPS} (the others have a median of 3 s): such rows stay together"]),
        ([7, 7], 1, [f"100.0% of {GAPS}: such rows stay together"]),
    ],
)  # fmt: skip
def test_ties_are_told(times: list[int], share: float, notes: list[str]) -> None:
    assert ties(times) == share
    assert tie_note(times) == notes


def test_each_row_knows_its_place_in_the_source(tmp_path: Path) -> None:
    place = capture(
        tmp_path / "c.parquet",
        row(5, input_tokens=50),
        row(None, input_tokens=1),
        row(2, input_tokens=20),
        row(3, input_tokens=None),
        row(2, input_tokens=21),
        row(1, input_tokens=10, response_end_us=7),
        row(4, input_tokens=40),
    )
    trace = load_trace(place, places=True)
    assert (list(trace.requests.input), list(trace.places)) == ([10, 20, 21, 40, 50], [5, 2, 4, 6, 0])
    assert list(load_trace(place, places=True, timed=False).places) == [5, 2, 4, 6, 0, 1]
    assert list(load_trace(place, places=True, count=3).places) == [2, 4, 0]
    assert list(trace.first(2).places) == [5, 2]
    assert list(trace.window(S, 2 * S).places) == [2, 4]
    thin = trace.thinned(0.5, 3)
    assert [n for n in trace.requests.input if n in thin.requests.input] == list(thin.requests.input)
    assert dict(zip(thin.requests.input, thin.places, strict=True)).items() <= (
        dict(zip(trace.requests.input, trace.places, strict=True)).items()
    )
    alone = load_trace(place)
    assert (list(alone.places), list(alone.window(S).places), alone.answered) == ([], [], False)


@pytest.mark.parametrize(
    ("told", "answered"),
    [
        ({}, False),
        ({"first_byte_us": 3, "submit_us": 1}, False),
        ({"response_end_us": 3}, True),
        ({"first_content_us": 3}, True),
        ({"event_us": [3]}, True),
    ],
)
def test_whether_a_source_tells_when_answers_came_is_known(
    told: dict[str, object], answered: bool, tmp_path: Path
) -> None:
    rows = (row(1, input_tokens=1), row(2, input_tokens=1, **told), row(3, input_tokens=None))
    place = capture(tmp_path / "c.parquet", *rows)
    assert load_trace(place, places=True).answered is answered
