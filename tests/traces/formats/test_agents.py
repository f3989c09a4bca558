"""Traces of agents by Weka, OpenTelemetry and Dynamo: lengths, times, and the tree of requests."""

import json
from typing import Any

import pytest

from llmtap.traces.format import FormatError
from llmtap.traces.registry import format_named
from tests.support.workloads.trace_files import read, rows

WEKA, OTLP, DYNAMO = format_named("weka"), format_named("otlp"), format_named("dynamo")
TREE = ("id", "session", "turn", "parent", "think_us")


def query(t: float, *ids: int, **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "model": "m", "in": 100, "out": 5, "hash_ids": ids, "stop": "", **more}


def conversation(name: str, **more: Any) -> dict[str, Any]:
    agent = {"type": "subagent", "agent_id": "agent_001", "subagent_type": "Explore", "duration_ms": 9}
    return {
        "id": name,
        "models": ["m"],
        "block_size": 64,
        "hash_id_scope": "local",
        "tool_tokens": 8,
        "requests": [
            query(0.0, 1, 2, type="s", ttft=0.25, api_time=1.5, think_time=0.0, stop="tool_use"),
            {**agent, "t": 2.5, "requests": [query(2.5, 3), query(4.125, 3, 4, think_time=0.125)]},
            query(32.0, 1, 2, 5),
        ],
        **more,
    }


def test_a_weka_trace_is_a_tree_of_sessions_with_lengths_and_blocks() -> None:
    data = b"".join(json.dumps(conversation(name)).encode() + b"\n" for name in "ab")
    source, batches = read(WEKA, data)
    assert (source.info.arrivals, source.info.block_unit) == ("trace", "tokens")
    assert rows(batches, *TREE)[:4] == [
        ("a#0", "a", 0, None, 0),
        ("a/agent_001#0", "a/agent_001", 0, "a#0", None),
        ("a/agent_001#1", "a/agent_001", 1, "a/agent_001#0", 125_000),
        ("a#1", "a", 1, "a#0", None),
    ]
    columns = ("arrival_ns", "input_tokens", "output_tokens", "stream", "first_token_us", "response_end_us")
    assert rows(batches, *columns)[0] == (0, 100, 5, True, 250_000, 1_500_000)
    assert rows(batches, "arrival_ns")[2] == (4_125_000_000,)
    blocks = [ids for (ids,) in rows(batches, "blocks")]
    assert len(set(blocks[0]) & set(blocks[3])) == 2 and not set(blocks[0]) & set(blocks[4])
    unnamed = read(WEKA, data.replace(b'"agent_id": "agent_001"', b'"agent_id": null'))[1]
    assert rows(unnamed, "session")[1] == ("a/1",)
    shared = read(WEKA, data.replace(b'"local"', b'"global"'))[1]
    assert rows(shared, "blocks")[0] == rows(shared, "blocks")[4] == ([1, 2],)


@pytest.mark.parametrize(
    ("change", "place"), [({"block_size": 0}, "block_size"), ({"requests": [query(-1.0)]}, "requests")]
)
def test_a_field_of_a_weka_trace_that_does_not_fit_is_named(change: dict[str, Any], place: str) -> None:
    with pytest.raises(FormatError, match=rf"line 1: {place}"):
        read(WEKA, json.dumps(conversation("a", **change)).encode())


S = 1_000_000_000


def span(name: str, parent: str, start_s: float, end_s: float, **attributes: Any) -> dict[str, Any]:
    kinds = {str: "stringValue", float: "doubleValue", bool: "boolValue"}
    values = [
        {
            "key": key.replace("__", "."),
            "value": {"intValue": str(value)} if type(value) is int else {kinds[type(value)]: value},
        }
        for key, value in attributes.items()
    ]
    return {
        "traceId": "t1",
        "spanId": name,
        "parentSpanId": parent,
        "name": "x",
        "kind": 3,
        "startTimeUnixNano": str(round(start_s * S)),
        "endTimeUnixNano": str(round(end_s * S)),
        "attributes": values,
        "status": {},
    }


def chat(name: str, parent: str, start_s: float, end_s: float, **more: Any) -> dict[str, Any]:
    return span(
        name,
        parent,
        start_s,
        end_s,
        gen_ai__operation__name="chat",
        gen_ai__request__model="m",
        gen_ai__usage__input_tokens=100,
        gen_ai__usage__output_tokens=5,
        **more,
    )


def agent(name: str, parent: str, start_s: float, end_s: float, **more: Any) -> dict[str, Any]:
    return span(name, parent, start_s, end_s, gen_ai__operation__name="invoke_agent", **more)


def line(*spans: dict[str, Any]) -> bytes:
    return (
        json.dumps({"resourceSpans": [{"resource": {}, "scopeSpans": [{"spans": spans}]}]}).encode() + b"\n"
    )


def test_a_span_without_a_start_is_left_out_and_counted() -> None:
    """0 is the default of OTLP's field. As a time it would be 1970, decades before the other spans."""
    source, batches = read(OTLP, line(chat("c1", "", 0, 0), chat("c2", "", 5, 6)))
    assert [row["arrival_ns"] for batch in batches for row in batch.to_pylist()] == [5 * S]
    assert source.notes == ["1 spans have no start time: left out"]


@pytest.mark.parametrize(("factor", "notes"), [(1, 0), (1_000, 1), (1_000_000, 1)])
def test_spans_with_times_in_another_unit_get_a_note(factor: int, notes: int) -> None:
    source, batches = read(OTLP, line(chat("a", "", 1.7e9 / factor, 1.7e9 / factor + 1)))
    assert rows(batches, "arrival_ns") == [(1_700_000_000 * S // factor,)]
    assert len(source.notes) == notes and all("larger unit" in note for note in source.notes)


@pytest.mark.parametrize("time", ["0.25", -0.25, "NaN"])
def test_a_time_to_the_first_token_that_is_none_is_counted(time: Any) -> None:
    source, batches = read(OTLP, line(chat("a", "", 5, 6, gen_ai__response__time_to_first_chunk=time)))
    assert rows(batches, "first_token_us") == [(None,)]
    assert len(source.notes) == 1 and source.notes[0].startswith("1 spans have a time to the first token")


def test_spans_are_rows_and_agents_their_tree() -> None:
    first = chat("c1", "root", 1, 2, gen_ai__response__time_to_first_chunk=0.25)
    data = line(chat("s1", "sub", 3, 4), chat("s2", "sub", 5, 6), first) + line(
        agent("sub", "tool", 2.5, 7),
        span("tool", "root", 2.5, 7, gen_ai__operation__name="execute_tool"),
        chat("c2", "root", 8, 9),
        agent("root", "", 0, 10, gen_ai__conversation__id="talk"),
        {**chat("lone", "", 20, 21, llmtap__tenant="acme"), "status": {"code": 2}},
        span("vllm", "", 30, 31, gen_ai__usage__prompt_tokens=7, gen_ai__latency__time_to_first_token=0.5),
    )
    source, batches = read(OTLP, data)
    assert rows(batches, *TREE) == [
        ("c1", "talk", 0, None, None),
        ("s1", "talk/sub", 0, "c1", 1_000_000),
        ("s2", "talk/sub", 1, "s1", 1_000_000),
        ("c2", "talk", 1, "c1", 6_000_000),
        ("lone", None, None, None, None),
        ("vllm", None, None, None, None),
    ]
    columns = ("arrival_ns", "model", "input_tokens", "output_tokens", "first_token_us", "response_end_us")
    assert rows(batches, *columns)[0] == (S, "m", 100, 5, 250_000, 1_000_000)
    assert rows(batches, "input_tokens", "first_token_us", "outcome")[5] == (7, 500_000, "complete")
    assert rows(batches, "tenant", "outcome")[4] == ("acme", "upstream_error")
    assert source.notes == ["3 spans are not inferences: left out"]


def test_a_time_that_is_none_is_named() -> None:
    with pytest.raises(FormatError, match="line 2: startTimeUnixNano"):
        read(OTLP, line() + line({**chat("a", "", 1, 2), "startTimeUnixNano": "soon"}))


def test_they_cannot_be_written() -> None:
    for name in ("weka", "otlp"):
        with pytest.raises(FormatError, match=f"can read the format {name}, but cannot write it"):
            format_named(name, writing=True)


MS = 1_000_000


def record(name: str, received_ms: float, session: str | None = None, **more: Any) -> dict[str, Any]:
    parent = more.pop("parent", None)
    context = None if session is None else {"session_id": session, "trajectory_id": session}
    if context is not None and parent is not None:
        context["parent_trajectory_id"] = parent
    return {
        "schema": "dynamo.request.trace.v1",
        "event_type": "request_end",
        "event_source": "dynamo",
        "event_time_unix_ms": received_ms + 900,
        "agent_context": context,
        "request": {
            "request_id": name,
            "model": "m",
            "input_tokens": 70,
            "output_tokens": 9,
            "cached_tokens": 64,
            "request_received_ms": received_ms,
            "ttft_ms": 12.5,
            "total_time_ms": 900.25,
            "queue_depth": 3,
            **more,
        },
    }


def dynamo_lines(*records: dict[str, Any], wrapped: bool = True) -> bytes:
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
    "schema": "dynamo.request.trace.v1",
    "event_type": "tool_end",
    "event_time_unix_ms": 1,
    "agent_context": {"session_id": "root"},
    "tool": {"tool_call_id": "c", "tool_class": "bash"},
}


@pytest.mark.parametrize("wrapped", [True, False])
def test_sessions_and_subagents_are_a_tree_of_requests(wrapped: bool) -> None:
    source, batches = read(DYNAMO, dynamo_lines(*AGENTS, TOOL, wrapped=wrapped))
    found = [row for batch in batches for row in batch.to_pylist()]
    assert [(r["id"], r["session"], r["turn"], r["parent"]) for r in found] == [
        ("a1", "root", 0, None),
        ("s1", "sub", 0, "a1"),
        ("s2", "sub", 1, "s1"),
        ("a2", "root", 1, "a1"),
        ("x", None, None, None),
    ]
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
        read(DYNAMO, dynamo_lines(record("a", 1, **more)))


def test_records_with_times_in_seconds_get_a_note() -> None:
    source, batches = read(DYNAMO, dynamo_lines(record("a", 1_700_000_000), record("b", 1_700_000_001)))
    assert rows(batches, "arrival_ns") == [(1_700_000_000 * MS,), (1_700_000_001 * MS,)]
    assert len(source.notes) == 1 and "larger unit" in source.notes[0]


def test_times_of_a_record_have_any_spelling_and_a_late_first_token_is_not_kept() -> None:
    source, batches = read(DYNAMO, dynamo_lines(record("a", 1_000.5, ttft_ms=1000), record("b", 2e3)))
    assert rows(batches, "arrival_ns", "first_token_us", "response_end_us", "stream") == [
        (1_000_500_000, None, 900_250, True),
        (2_000 * MS, 12_500, 900_250, True),
    ]
    assert len(source.notes) == 1 and source.notes[0].startswith("1 times to the first token")


def summed(name: str, parent: str, start_s: float, end_s: float, tokens: int, **more: Any) -> dict[str, Any]:
    return span(name, parent, start_s, end_s, gen_ai__usage__input_tokens=tokens, **more)


def attempt(name: str, parent: str, **more: Any) -> dict[str, Any]:
    return span(name, parent, 1, 2, gen_ai__operation__name="chat", **more)


@pytest.mark.parametrize(
    ("spans", "ids", "tokens"),
    [
        ([summed("run", "", 0, 9, 200), chat("a", "run", 1, 2), chat("b", "run", 3, 4)], "ab", 200),
        (  # a span without an operation in another one, around a step of the agent
            [
                summed("run", "", 0, 9, 100),
                summed("step", "run", 1, 8, 100),
                span("tool", "step", 1, 8, gen_ai__operation__name="execute_tool"),
                chat("a", "tool", 1, 2),
            ],
            "a",
            100,
        ),
        ([agent("run", "", 0, 9, gen_ai__usage__input_tokens=100), chat("a", "run", 1, 2)], "a", 100),
        (
            [
                span(
                    "run", "", 0, 9, gen_ai__operation__name="invoke_workflow", gen_ai__usage__input_tokens=9
                ),
                chat("a", "run", 1, 2),
            ],
            "a",
            100,
        ),
        (
            [chat("a", "", 1, 9), {**attempt("b", "a"), "status": {"code": 2}}, chat("c", "a", 3, 4)],
            "bc",
            100,
        ),
        ([chat("a", "", 1, 9), attempt("b", "a"), attempt("c", "a")], "a", 100),
        ([attempt("a", ""), attempt("b", "a")], "b", 0),
        ([chat("a", "", 1, 2), chat("a", "", 1, 2)], "a", 100),
        ([chat("a", "", 1, 2), {**chat("a", "", 3, 4), "traceId": "t2"}], "aa", 200),
        ([chat("a", "b", 1, 2), chat("b", "a", 1, 2)], "", 0),
        ([summed("a", "gone", 1, 2, 7)], "a", 7),
    ],
)
def test_no_token_is_counted_twice(spans: list[dict[str, Any]], ids: str, tokens: int) -> None:
    for ordered in (spans, spans[::-1]):
        source, batches = read(OTLP, line(*ordered))
        found = rows(batches, "id", "input_tokens")
        assert "".join(sorted(str(name) for name, _ in found)) == ids
        assert sum(n or 0 for _, n in found) == tokens
        left_out = sum(int(note.split()[0]) for note in source.notes)
        assert len(found) + left_out == len(spans)


@pytest.mark.parametrize("count", [7.0, "7", 7])
def test_a_count_of_a_span_has_any_spelling(count: Any) -> None:
    assert rows(read(OTLP, line(summed("a", "", 1, 2, count)))[1], "input_tokens") == [(7,)]


def test_a_first_token_after_the_end_is_in_another_unit() -> None:
    source, batches = read(OTLP, line(chat("a", "", 1, 2, gen_ai__response__time_to_first_chunk=250.0)))
    assert rows(batches, "first_token_us") == [(None,)] and len(source.notes) == 1


def test_counts_and_ends_that_cannot_be_read_are_counted() -> None:
    odd = span("b", "", 3, 2, gen_ai__operation__name="chat", gen_ai__usage__input_tokens="many")
    plain = span("a", "", 1, 2, gen_ai__operation__name="chat", gen_ai__usage__input_tokens=5)
    line = {"resourceSpans": [{"scopeSpans": [{"spans": [plain, odd]}]}]}
    source, batches = read(OTLP, json.dumps(line).encode())
    assert rows(batches, "input_tokens", "response_end_us") == [(5, 1_000_000), (None, None)]
    assert [note.split()[:3] for note in source.notes] == [["1", "spans", "have"]] * 2


def test_a_request_of_dynamo_that_is_there_twice_is_counted() -> None:
    record = {
        "schema": "dynamo.request.trace.v1",
        "event_type": "request_end",
        "request": {"request_id": "a", "request_received_ms": 5, "input_tokens": 1, "output_tokens": 2},
    }
    source, batches = read(DYNAMO, (json.dumps(record) + "\n").encode() * 2)
    assert len(rows(batches, "id")) == 2
    assert [note.split()[0] for note in source.notes] == ["1"]
