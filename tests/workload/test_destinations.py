import pytest

from llmtap.workload.destinations import endpoint_of_body, reason_unsendable

CHAT = "/v1/chat/completions"
SENDABLE = [
    ("POST", CHAT, "chat.completions", '{"messages":[]}'),
    ("POST", "/v1/embeddings", "embeddings", '{"input":"x"}'),
    ("POST", "/v1/rerank?x=1", None, '{"query":"q"}'),
    (None, "/v1/messages", "messages", '{"messages":[]}'),
    (None, "/v1.1/...?path=/../x", None, '{"messages":[]}'),
    (None, None, None, '{"prompt":"x"}'),
    (None, None, None, None),
    ("POST", CHAT, "chat.completions", None),
    ("POST", "/v1/messages", "messages", None),
    ("GET", "/v1/realtime", "realtime", None),
]
UNSENDABLE = [
    ("GET", CHAT, "chat.completions", '{"messages":[]}', "GET"),
    ("POST", "/v1/a b", None, "{}", "path"),
    ("POST", "https://api.example/v1/chat/completions", None, "{}", "path"),
    ("POST", CHAT, "chat.completions", '{"messages":[', "JSON object"),
    ("POST", "/../admin", None, "{}", ".."),
    ("POST", "/v1/%2E%2e/admin", None, "{}", ".."),
    ("POST", "/v1/.", None, "{}", ".."),
    ("POST", "/v1/audio/transcriptions", None, "--boundary", "JSON object"),
    ("POST", CHAT, "chat.completions", "[1]", "JSON object"),
    (None, None, None, '{"query":"q"}', "without messages"),
    ("POST", "/v1/embeddings", "embeddings", None, "embeddings"),
    ("POST", "/v1/embeddings", None, None, "embeddings"),
    ("POST", "/v1/rerank", None, None, "/v1/rerank"),
    ("POST", "/mcp", "mcp", None, "mcp"),
]


@pytest.mark.parametrize("row", SENDABLE)
def test_a_request_with_a_path_or_a_prompt_is_sent(row: tuple[str | None, ...]) -> None:
    assert reason_unsendable(*row) is None


@pytest.mark.parametrize("row", UNSENDABLE)
def test_what_cannot_be_sent_is_left_out_with_its_reason(row: tuple[str | None, ...]) -> None:
    *columns, why = row
    assert why is not None and why in (reason_unsendable(*columns) or "")


def test_the_members_of_a_body_decide_where_it_goes() -> None:
    bodies = (b'{"messages":[],"input":1}', b'{"prompt":""}', b'{"input":""}', b'{"query":""}', b"[]", b"{")
    assert [endpoint_of_body(body) for body in bodies] == [
        "chat.completions",
        "completions",
        "responses",
        None,
        None,
        None,
    ]
