"""A UTF-8 byte order mark before an answer, or before a saved file, changes nothing of what is read."""

import json
from typing import Any

import pytest

from llmtap.exchange.answer import AnswerReader
from llmtap.exchange.saved import explain, read_saved

BOM = b"\xef\xbb\xbf"
CHAT = "/v1/chat/completions"
WHOLE = {"object": "chat.completion", "choices": [{"index": 0, "message": {"content": "a"}}]}
SSE = b'data: {"object":"chat.completion.chunk","choices":[{"delta":{"content":"a"}}]}\n\ndata: [DONE]\n\n'
LINES = b'{"model":"l","created_at":"d","message":{"content":"a"},"done":false}\n{"model":"l","done":true}\n'
JSON = json.dumps(WHOLE).encode()


def response(kind: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (kind, len(body), body)


def har(text: str) -> bytes:
    request = {"method": "POST", "url": f"http://h{CHAT}"}
    content = {"mimeType": "application/json", "text": text}
    entry: dict[str, Any] = {"request": request, "response": {"status": 200, "content": content}}
    return json.dumps({"log": {"entries": [entry]}}).encode()


@pytest.mark.parametrize(
    ("data", "marked"),
    [
        (JSON, BOM + JSON),
        (SSE, BOM + SSE),
        (LINES, BOM + LINES),
        (har(JSON.decode()), BOM + har("\ufeff" + JSON.decode())),
        (response(b"application/json", JSON), BOM + response(b"application/json", BOM + JSON)),
        (response(b"application/x-ndjson", LINES), response(b"application/x-ndjson", BOM + LINES)),
        (response(b"text/event-stream", SSE), BOM + response(b"text/event-stream", BOM + SSE)),
        (response(b"text/plain", JSON), response(b"text/plain", BOM + JSON)),
    ],
    ids=["json", "sse", "ndjson", "har", "http json", "http ndjson", "http sse", "http text"],
)
def test_a_saved_file_with_a_mark_is_read_as_one_without(data: bytes, marked: bytes) -> None:
    plain, other = (explain(read_saved(one, path=CHAT)) for one in (data, marked))
    assert other.exchange.dialect == plain.exchange.dialect is not None
    assert [(e.delta.event_class, e.delta.text) for e in other.events] == [
        (e.delta.event_class, e.delta.text) for e in plain.events
    ]


def test_a_mark_that_comes_in_pieces_is_read_as_one() -> None:
    reader = AnswerReader(b"application/json", CHAT)
    for i in range(len(BOM + JSON)):
        assert reader.feed((BOM + JSON)[i : i + 1]) == []
    (delta,) = reader.close(whole=True)
    assert (delta.text, delta.size) == ("a", len(BOM + JSON))
