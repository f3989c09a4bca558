"""Dynamo's request traces: fields, agent sessions and block ids are read."""

import json
from typing import Any

import pyarrow as pa
import pytest

from llmtap.traces.format import FormatError
from llmtap.traces.registry import by_name
from tests.support.workloads.trace_files import read

DYNAMO = by_name("dynamo")
MS = 1_000_000


def record(name: str, received_ms: int, session: str | None = None, **more: Any) -> dict[str, Any]:
    parent = more.pop("parent", None)
    context = None if session is None else {"session_id": session, "trajectory_id": session}
    if context is not None and parent is not None:
        context["parent_trajectory_id"] = parent
    return {
        "schema": "dynamo.request.trace.v1", "event_type": "request_end", "event_source": "dynamo",
        "event_time_unix_ms": received_ms + 900, "agent_context": context,
        "request": {
            "request_id": name, "model": "m", "input_tokens": 70, "output_tokens": 9, "cached_tokens": 64,
            "request_received_ms": received_ms, "ttft_ms": 12.5, "total_time_ms": 900.25, "queue_depth": 3,
            **more,
        },
    }  # fmt: skip


def lines(*records: dict[str, Any], wrapped: bool = True) -> bytes:
    return b"".join(
        json.dumps({"timestamp": i, "event": r} if wrapped else r).encode() + b"\n"
        for i, r in enumerate(records)
    )


REPLAY = {"trace_block_size": 64, "input_length": 70, "input_sequence_hashes": [5, 2**64 - 3]}
AGENTS = (
    record("a1", 1_000, "root", replay=REPLAY),
    record("s1", 2_000, "sub", parent="root"),
    record("s2", 3_000, "sub", parent="root"),
    record("a2", 4_000, "root"),
    record("x", 5_000),
)
TOOL = {
    "schema": "dynamo.request.trace.v1", "event_type": "tool_end", "event_time_unix_ms": 1,
    "agent_context": {"session_id": "root"}, "tool": {"tool_call_id": "c", "tool_class": "bash"},
}  # fmt: skip


def rows(batches: list[pa.RecordBatch]) -> list[dict[str, Any]]:
    return [row for batch in batches for row in batch.to_pylist()]


@pytest.mark.parametrize("wrapped", [True, False])
def test_sessions_and_subagents_are_a_tree_of_requests(wrapped: bool) -> None:
    source, batches = read(DYNAMO, lines(*AGENTS, TOOL, wrapped=wrapped))
    found = rows(batches)
    assert [(r["id"], r["session"], r["turn"], r["parent"]) for r in found] == [
        ("a1", "root", 0, None), ("s1", "sub", 0, "a1"), ("s2", "sub", 1, "s1"), ("a2", "root", 1, "a1"),
        ("x", None, None, None),
    ]  # fmt: skip
    first = found[0]
    assert source.info.arrivals == "wall"
    times = (first["arrival_ns"], first["first_token_us"], first["response_end_us"])
    assert times == (1_000 * MS, 12_500, 900_250)
    assert (first["input_tokens"], first["output_tokens"], first["cached_tokens"]) == (70, 9, 64)
    assert (first["blocks"], first["block_size"], first["block_unit"]) == ([5, -3], 64, "tokens")
    assert source.notes == ["1 records that are not of finished requests"]


@pytest.mark.parametrize(
    ("more", "place"),
    [
        ({"request_received_ms": None}, "request.request_received_ms"),
        ({"input_tokens": -1}, "event.request.input_tokens"),
        ({"replay": {**REPLAY, "input_sequence_hashes": [-1]}}, "event.request.replay.input_sequence_hashes"),
        ({"replay": {**REPLAY, "trace_block_size": 0}}, "event.request.replay.trace_block_size"),
    ],
)
def test_a_field_that_does_not_fit_is_named(more: dict[str, Any], place: str) -> None:
    with pytest.raises(FormatError, match=rf"line 1: {place}"):
        read(DYNAMO, lines(record("a", 1, **more)))
