"""What a batch can hold of requests survives write and read, number by number; so do its answers."""

import io
import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.capture.schema import CaptureInfo
from llmtap.protocol.delta import USAGE_TOKENS_MAX
from llmtap.traces.format import FormatError, TraceFormat, TraceWriter, WriteOptions, batch_of
from llmtap.traces.formats import openai_batch
from llmtap.traces.formats.openai_batch import FORMATS

QUESTIONS, ANSWERS = FORMATS
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 7}


def question(name: str = "a", body: Any = BODY, **more: Any) -> str:
    return json.dumps(
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body, **more}
    )


def answer(name: str = "a", **more: Any) -> str:
    body = {
        "id": "chatcmpl-1", "object": "chat.completion", "model": "m-2026",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }  # fmt: skip
    response = {"status_code": 200, "request_id": "req-1", "body": body}
    return json.dumps({"id": "b1", "custom_id": name, "response": response, "error": None, **more})


def rows_of(fmt: TraceFormat, data: bytes | str) -> tuple[list[dict[str, Any]], list[str]]:
    source = fmt.read(io.BytesIO(data.encode() if isinstance(data, str) else data))
    return [row for batch in source.batches for row in batch.to_pylist()], source.notes


def written(
    fmt: TraceFormat, rows: list[dict[str, Any]], **options: Any
) -> tuple[list[dict[str, Any]], TraceWriter, bytes]:
    names = sorted({name for row in rows for name in row})
    columns: Mapping[str, Any] = {name: [row.get(name) for row in rows] for name in names}
    out = io.BytesIO()
    told = fmt.write(out, CaptureInfo(), [batch_of(len(rows), columns)], WriteOptions(**options))
    return [json.loads(line) for line in out.getvalue().splitlines()], told, out.getvalue()


def test_a_request_is_read_with_its_shape() -> None:
    (row,), notes = rows_of(QUESTIONS, question())
    assert notes == []
    assert (row["id"], row["method"], row["path"]) == ("a", "POST", "/v1/chat/completions")
    assert (row["endpoint"], row["model"], row["max_tokens"]) == ("chat.completions", "m", 7)
    assert (row["message_roles"], row["message_bytes"], row["prompt_bytes"]) == (["user"], [2], 2)
    assert json.loads(row["request_body"]) == BODY
    assert row["stream"] is False
    assert row["response_text"] is row["arrival_ns"] is None


def test_what_a_provider_would_refuse_is_noted() -> None:
    lines = [question("a"), question("b", {**BODY, "model": "n"}), question("c", {**BODY, "stream": True})]
    rows, notes = rows_of(QUESTIONS, "\n".join(lines))
    assert [row["stream"] for row in rows] == [False, False, True]
    assert [note.split(" ")[0] for note in notes] == ["1", "there"]


def test_an_answer_is_read_as_if_it_had_passed() -> None:
    (row,), notes = rows_of(ANSWERS, answer())
    assert notes == []
    assert (row["id"], row["request_id"], row["status"], row["outcome"]) == ("a", "req-1", 200, "complete")
    assert (row["response_text"], row["finish_reason"], row["response_model"]) == ("hello", "stop", "m-2026")
    assert (row["input_tokens"], row["output_tokens"], row["token_source"]) == (3, 2, "usage")
    assert json.loads(row["usage"])["total_tokens"] == 5
    assert row["request_body"] is None


def test_failures_are_rows_without_text() -> None:
    refused = {
        "status_code": 429,
        "request_id": "",
        "body": {"error": {"type": "rate_limit", "message": "x"}},
    }
    rows, notes = rows_of(
        ANSWERS,
        "\n".join([answer("a", response=refused), answer("b", response=None, error={"code": "expired"})]),
    )
    assert [(row["status"], row["outcome"]) for row in rows] == [
        (429, "upstream_error"), (None, "upstream_error"),
    ]  # fmt: skip
    assert rows[1]["error"] == "the batch says that it failed (expired)"
    assert rows[0]["response_text"] is None
    assert notes == ["1 requests failed"]


@pytest.mark.parametrize(
    ("fmt", "data", "problem"),
    [
        (QUESTIONS, question() + "\n{", "line 2: "),
        (QUESTIONS, "[]", "line 1: "),
        (QUESTIONS, question(body=3), "line 1: body: expected a JSON object"),
        (QUESTIONS, '{"custom_id": "a", "url": "/"}', "line 1: .*body"),
        (QUESTIONS, b'\n\n{"custom_id": "\xff"}', "line 3: "),
        (ANSWERS, answer()[:-5], "line 1: "),
        (ANSWERS, answer(response={"status_code": 20, "body": {}}), "line 1: status_code"),
    ],
)
def test_what_does_not_fit_is_told_with_its_line(fmt: TraceFormat, data: bytes | str, problem: str) -> None:
    with pytest.raises(FormatError, match=problem):
        rows_of(fmt, data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 53), 1 << 53) | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
BODIES = st.dictionaries(st.sampled_from(["model", "messages", "max_tokens", "x", "tools"]), JSON, max_size=5)


@given(st.lists(BODIES, min_size=1, max_size=6))
def test_requests_survive(bodies: list[Any]) -> None:
    lines = [question(f"id-{i}", body) for i, body in enumerate(bodies)]
    rows, _ = rows_of(QUESTIONS, "\n".join(lines))
    found, told, data = written(QUESTIONS, rows)
    assert found == [json.loads(line) for line in lines]
    assert told.rows == len(lines)
    back, _ = rows_of(QUESTIONS, data)
    for row in (*rows, *back):
        row["request_body"] = json.loads(row["request_body"])
    assert back == rows


@given(
    st.lists(
        st.tuples(st.text(st.characters(codec="utf-8"), min_size=1), st.integers(0, USAGE_TOKENS_MAX)),
        max_size=5,
    )
)
def test_answers_survive(said: list[tuple[str, int]]) -> None:
    rows = [
        {"id": f"id-{i}", "status": 200, "outcome": "complete", "response_text": text, "response_model": "m",
         "finish_reason": "stop", "input_tokens": n, "output_tokens": 1}
        for i, (text, n) in enumerate(said)
    ]  # fmt: skip
    if not rows:
        return
    _, told, data = written(ANSWERS, rows)
    assert told.rows == len(rows)
    found, _ = rows_of(ANSWERS, data)
    for row, back in zip(rows, found, strict=True):
        # Counts of nothing are what servers send that do not count (dialects.md section 5).
        assert {name: back[name] for name in row} == row


def test_what_a_batch_cannot_have_is_taken_out_and_told() -> None:
    streamed = json.dumps({**BODY, "stream": True, "stream_options": {"include_usage": True}}, indent=2)
    lines, told, _ = written(
        QUESTIONS,
        [
            {"id": "a", "request_body": streamed, "path": "/proxy/v1/chat/completions"},
            {"id": "a", "request_body": json.dumps({**BODY, "model": "n"})},
            {"request_body": json.dumps({"prompt": "p"}), "method": "POST"},
            {"request_body": None},
            {"request_body": "[]"},
            {"request_body": "{}"},
        ],
    )
    assert lines[0]["body"] == BODY
    assert [line["url"] for line in lines] == [
        "/proxy/v1/chat/completions", "/v1/chat/completions", "/v1/completions",
    ]  # fmt: skip
    assert len({line["custom_id"] for line in lines}) == 3
    assert told.dropped == {
        "no request body": 1, "request body is no JSON object": 1,
        "the destination of the request is unknown": 1,
    }  # fmt: skip
    notes = " ".join(told.notes)
    assert "1 requests asked for a stream" in notes
    assert "more than one model" in notes
    assert "1 ids were not unique" in notes


@pytest.mark.parametrize(
    ("options", "models"),
    [({}, ["m", None]), ({"model": "x"}, ["m", "x"]), ({"model": "x", "override_model": True}, ["x", "x"])],
)  # fmt: skip
def test_a_model_can_be_given(options: dict[str, Any], models: list[str | None]) -> None:
    without = {"messages": BODY["messages"]}
    rows = [{"id": str(i), "request_body": json.dumps(body)} for i, body in enumerate((BODY, without))]
    lines, _, _ = written(QUESTIONS, rows, **options)
    assert [line["body"].get("model") for line in lines] == models


def test_numbers_keep_their_digits() -> None:
    body = '{"model":"m","x":1.10,"y":123456789012345678901234567890,\n "z":1e400}'
    _, _, data = written(QUESTIONS, [{"id": "a", "request_body": body, "path": "/x"}])
    assert data.endswith(b'"body":{"model":"m","x":1.10,"y":123456789012345678901234567890,"z":1e400}}\n')


def test_limits_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_batch, "LINES_MAX", 2)
    monkeypatch.setattr(openai_batch, "BYTES_MAX", 100)
    rows = [{"id": str(i), "request_body": json.dumps(BODY)} for i in range(3)]
    _, told, _ = written(QUESTIONS, rows)
    assert [note for note in told.notes if note.startswith("3 lines")]
    assert [note for note in told.notes if "MB" in note]


def test_who_gave_up_did_not_fail_and_a_failure_says_how() -> None:
    outcomes = ["client_cancelled", "truncated", "upstream_error", "upstream_timeout", "complete", "rejected"]
    statuses = [200, 200, 503, None, 200, 429]
    texts = [None, None, None, None, "hi", None]
    batch = batch_of(6, {"outcome": outcomes, "status": statuses, "response_text": texts})
    out = io.BytesIO()
    written = ANSWERS.write(out, CaptureInfo(), [batch], WriteOptions())
    errors = [line["error"] for line in map(json.loads, out.getvalue().splitlines())]
    assert errors == [
        {
            "code": "truncated",
            "message": "the answer began with the status 200 and was not whole (truncated)",
        },
        {"code": "upstream_error", "message": "the answer had the status 503"},
        {"code": "upstream_timeout", "message": "there was no answer"},
        None,
        {"code": "rejected", "message": "the answer had the status 429"},
    ]
    assert (written.rows, written.dropped) == (5, {"no response text": 1})
    assert (written.told["response text"], written.told["outcome and status"]) == (1, 5)
