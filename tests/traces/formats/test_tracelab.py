"""Rounds of coding agents (TraceLab), and requests that ServeGen generated. The rows are our own."""

import json
from typing import Any

import pytest

from llmtap.traces.format import FormatError
from llmtap.traces.registry import format_named
from tests.support.workloads.trace_files import read, rows

TRACELAB, REPLAY, SERVEGEN = (
    format_named("tracelab"),
    format_named("tracelab-replay"),
    format_named("servegen"),
)
MS = 1_000_000


def event(kind: str, second: str) -> dict[str, Any]:
    return {"event_type": kind, "timestamp": f"1970-01-01T00:00:{second}Z", "source": "x"}


def round_of(index: int, *events: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "session_id": "claude:a",
        "round_index": index,
        "round_id": f"r{index}",
        "model": "m",
        "input_tokens_total": 100.0,
        "prefix_tokens": 60,
        "newly_append_tokens": 40,
        "output_tokens": 7,
        "reasoning_output_tokens": None,
        "timing_events": list(events),
        "tools": [{"tool_name": "Bash"}],
        **more,
    }


def lines(*values: object) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def test_a_round_arrives_with_its_last_input_and_ends_with_its_last_output() -> None:
    data = lines(
        round_of(
            0,
            event("user_message", "01.000"),
            event("reasoning", "02.500"),
            event("text", "03.250"),
            event("usage_report", "09.000"),
        ),
        round_of(
            1, event("tool_result", "04.000"), event("tool_result", "05.000"), event("tool_call", "05.125")
        ),
        round_of(2, event("text", "06.000"), event("tool_result", "07.000")),
        round_of(3, event("user_message", "08.000"), timing=1),
    )
    source, batches = read(TRACELAB, data)
    columns = ("arrival_ns", "response_end_us", "turn", "session", "input_tokens", "cached_tokens")
    assert rows(batches, *columns) == [
        (1_000 * MS, 2_250_000, 0, "claude:a", 100, 60),
        (5_000 * MS, 125_000, 1, "claude:a", 100, 60),
        (None, None, 2, "claude:a", 100, 60),
        (8_000 * MS, None, 3, "claude:a", 100, 60),
    ]
    counts = sorted(note.split()[0] for note in source.notes)
    assert counts == ["1", "1", "1", "4", "4"]
    assert any("'timing'" in note for note in source.notes)


@pytest.mark.parametrize(
    ("changed", "place"),
    [
        ({"timing_events": [{"event_type": "text", "timestamp": "soon"}]}, r"timing_events\[0\].timestamp"),
        ({"timing_events": [event("text", "01")], "input_tokens_total": 1.5}, "input_tokens_total"),
        ({"round_index": -1}, "round_index"),
    ],
)
def test_a_field_of_a_round_that_does_not_fit_is_named(changed: dict[str, Any], place: str) -> None:
    with pytest.raises(FormatError, match=f"line 1: {place}"):
        read(TRACELAB, lines(round_of(0, **changed)))


def test_a_replay_table_has_the_whole_context_and_the_wait_before_each_round() -> None:
    data = (
        b"session_id,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms\n"
        b"0,0,12461,5875,124,182\n0,1,18333,13570,15950,28.5\n1,0,0,5,6,\n"
    )
    columns = ("session", "turn", "arrival_ns", "think_us", "input_tokens", "output_tokens")
    assert rows(read(REPLAY, data)[1], *columns) == [
        ("0", 0, 0, None, 18336, 124),
        ("0", 1, None, 182_000, 31903, 15950),
        ("1", 0, 0, None, 5, 6),
    ]
    other = (
        b"id,input_len,output_len,arrival_time,round_idx,tool_wait_after_ms,prefix_len\na,1,2,1500.5,0,5,3\n"
    )
    assert rows(read(REPLAY, other)[1], "session", "arrival_ns", "input_tokens") == [("a", 1_500_500_000, 4)]
    with pytest.raises(FormatError, match="session_id"):
        read(REPLAY, data.replace(b"session_id", b"name"))


def test_rounds_of_a_replay_table_that_are_not_in_order_are_refused() -> None:
    header = b"session_id,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms\n"
    assert len(rows(read(REPLAY, header + b"a,0,0,5,6,7\nb,0,0,5,6,7\na,2,11,5,6,7\n")[1], "turn")) == 3
    with pytest.raises(FormatError, match="row 3: round_idx"):
        read(REPLAY, header + b"a,1,11,5,6,7\nb,0,0,5,6,7\na,0,0,5,6,7\n")


def test_requests_of_servegen_are_read_from_lines_and_from_an_array() -> None:
    reasoning = {
        "request_id": 3,
        "timestamp": 0.5,
        "data": {"input_tokens": 10, "output_tokens": 5, "reason_ratio": 0.4},
    }
    images = {
        "timestamp": 2,
        "data": {
            "text_tokens": 10.0,
            "image_tokens": [3, 4],
            "audio_tokens": [2],
            "video_tokens": [],
            "output_tokens": 5,
        },
    }
    columns = ("id", "arrival_ns", "input_tokens", "output_tokens", "reasoning_tokens", "images")
    expected = [("3", 500 * MS, 10, 5, 2, None), (None, 2_000 * MS, 19, 5, None, 2)]
    assert rows(read(SERVEGEN, lines(reasoning, images))[1], *columns) == expected
    assert rows(read(SERVEGEN, json.dumps([reasoning, images], indent=1).encode())[1], *columns) == expected


@pytest.mark.parametrize(
    ("data", "place"),
    [
        (b"0,2.53,1.003,Gamma,0.99,0.39\r\n", "parameters of a ServeGen client"),
        (b'{"0": {"input_tokens": "{23: 0.5}"}}', "parameters of a ServeGen client"),
        (lines({"timestamp": 1, "data": {"output_tokens": 5}}), "line 1: data.input_tokens"),
        (lines({"timestamp": -1, "data": {"output_tokens": 5, "input_tokens": 1}}), "line 1: timestamp"),
        (b'[{"timestamp": 1, "data": {"output_tokens": 1.5}}]', "request 1: data.output_tokens"),
        (b'[{"timestamp": "soon", "data": {"output_tokens": 1, "input_tokens": 1}}]', "request 1: timestamp"),
    ],
)
def test_what_is_no_request_of_servegen_is_refused(data: bytes, place: str) -> None:
    with pytest.raises(FormatError, match=place):
        read(SERVEGEN, data)
