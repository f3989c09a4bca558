"""What a batch can hold of requests survives write and read, number by number."""

import io
import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.capture.schema import CaptureInfo
from llmtap.traces.format import FormatError, TraceWriter, batch_of
from llmtap.traces.formats import openai_batch

READ, WRITE = openai_batch.FORMAT.read, openai_batch.FORMAT.write
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 7}


def question(name: str = "a", body: Any = BODY, **more: Any) -> str:
    return json.dumps(
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body, **more}
    )


def rows_of(data: bytes | str) -> tuple[list[dict[str, Any]], list[str]]:
    source = READ(io.BytesIO(data.encode() if isinstance(data, str) else data))
    return [row for batch in source.batches for row in batch.to_pylist()], source.notes


def written(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], TraceWriter, bytes]:
    names = sorted({name for row in rows for name in row})
    columns: Mapping[str, Any] = {name: [row.get(name) for row in rows] for name in names}
    out = io.BytesIO()
    result = WRITE(out, CaptureInfo(), [batch_of(len(rows), columns)])
    return [json.loads(line) for line in out.getvalue().splitlines()], result, out.getvalue()


def test_a_request_is_read_with_its_shape() -> None:
    (row,), notes = rows_of(question())
    assert notes == []
    assert (row["id"], row["method"], row["path"]) == ("a", "POST", "/v1/chat/completions")
    assert (row["endpoint"], row["model"], row["max_tokens"]) == ("chat.completions", "m", 7)
    assert (row["message_roles"], row["message_bytes"], row["prompt_bytes"]) == (["user"], [2], 2)
    assert json.loads(row["request_body"]) == BODY
    assert row["stream"] is False
    assert row["response_text"] is row["arrival_ns"] is None


def test_a_whole_url_gives_its_path() -> None:
    (row,), _ = rows_of(question(url="https://gateway.example/v1/embeddings"))
    assert (row["path"], row["endpoint"]) == ("/v1/embeddings", "embeddings")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (question() + "\n{", "line 2: "),
        (json.dumps({"custom_id": 7, "url": "/", "body": {}}), "line 1: custom_id: expected str, got int"),
        (question(body=3), "line 1: body: expected a JSON object"),
        (b'\n\n{"custom_id": "\xff"}', "line 3: "),
    ],
)
def test_what_does_not_fit_is_told_with_its_line(data: bytes | str, problem: str) -> None:
    with pytest.raises(FormatError, match=problem):
        rows_of(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 53), 1 << 53) | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
BODIES = st.dictionaries(st.sampled_from(["model", "messages", "max_tokens", "x", "tools"]), JSON, max_size=5)


@given(st.lists(BODIES, min_size=1, max_size=6))
def test_requests_survive(bodies: list[Any]) -> None:
    lines = [question(f"id-{i}", body) for i, body in enumerate(bodies)]
    rows, _ = rows_of("\n".join(lines))
    found, result, data = written(rows)
    assert found == [json.loads(line) for line in lines]
    assert result.rows == len(lines)
    back, _ = rows_of(data)
    for row in (*rows, *back):
        row["request_body"] = json.loads(row["request_body"])
    assert back == rows


def test_what_a_batch_cannot_have_is_taken_out_and_told() -> None:
    streamed = json.dumps({**BODY, "stream": True, "stream_options": {"include_usage": True}}, indent=2)
    lines, result, _ = written(
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
        "/proxy/v1/chat/completions",
        "/v1/chat/completions",
        "/v1/completions",
    ]
    assert len({line["custom_id"] for line in lines}) == 3
    assert result.dropped == {
        "no request body": 1,
        "request body is no JSON object": 1,
        "the destination of the request is unknown": 1,
    }
    notes = " ".join(result.notes)
    assert "1 requests asked for a stream" in notes
    assert "1 ids were not unique" in notes


def test_numbers_keep_their_digits() -> None:
    body = '{"model":"m","x":1.10,"y":123456789012345678901234567890,\n "z":1e400}'
    _, _, data = written([{"id": "a", "request_body": body, "path": "/x"}])
    assert data.endswith(b'"body":{"model":"m","x":1.10,"y":123456789012345678901234567890,"z":1e400}}\n')
