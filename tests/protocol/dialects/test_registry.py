"""Invariant: an object that names its dialect is claimed by it; the path only breaks a tie."""

from typing import Any

import pytest

from llmtap.protocol.dialects.registry import BUILT_IN, DIALECTS, Dialects
from llmtap.protocol.dialects.table.declaration import DialectTable, Rule
from llmtap.protocol.dialects.table.reader import TableDialect

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize(
    ("value", "path", "name"),
    [
        ({"object": "chat.completion.chunk", "choices": []}, "/x", "openai.chat"),
        ({"object": "chat.completion", "choices": []}, COMPLETIONS, "openai.chat"),
        ({"object": "text_completion", "choices": []}, CHAT, "openai.completions"),
        ({"choices": [{"delta": {}}]}, COMPLETIONS, "openai.chat"),
        ({"choices": [{"text": "a"}]}, CHAT, "openai.completions"),
        ({"choices": [{"text": "a", "delta": {"content": "a"}}]}, COMPLETIONS, "openai.chat"),
        ({"choices": []}, CHAT, "openai.chat"),
        ({"choices": []}, COMPLETIONS, "openai.completions"),
        ({"choices": []}, "/x", None),
        ({"error": {}}, COMPLETIONS, "openai.completions"),
        ({"type": "message_start"}, CHAT, "anthropic"),
        ({"type": "message", "content": []}, "/x", "anthropic"),
        ({"type": "ping"}, "/x", None),
        ({"error": {}}, "/v1/messages", "anthropic"),
        ({"type": "error", "error": {}}, "/v1/responses", "openai.responses"),
        ({"type": "error", "error": {}}, "/x", None),
        ({"type": "response.created", "response": {}}, "/x", "openai.responses"),
        ({"type": "response.created"}, "/v1/realtime", "openai.realtime"),
        ({"type": "error", "error": {}}, "/v1/realtime", "openai.realtime"),
        ({"type": "session.created"}, "/v1/realtime", "openai.realtime"),
        ({"type": "session.info"}, "/v1/realtime", None),
        ({"type": "conversation.response.started"}, "/v1/conversations", "mistral.conversations"),
        ({"object": "response", "output": []}, "/x", "openai.responses"),
        ({"token": {"text": "a"}}, "/x", "tgi.native"),
        ({"generated_text": "a", "details": None}, "/", "tgi.native"),
        ({"error": "m", "error_type": "overloaded"}, "/generate_stream", "tgi.native"),
        ({"error": "m", "error_type": "validation"}, CHAT, "openai.chat"),
        ({"content": "a", "stop": False}, "/x", "llamacpp.native"),
        ({"content": "a", "stop": True, "tokens_predicted": 3}, CHAT, "llamacpp.native"),
        ({"error": {}}, "/completion", "llamacpp.native"),
        ({"content": "a"}, "/x", None),
        ({"message": {"content": "a"}, "done": False}, "/x", "ollama.native"),
        ({"response": "a", "done": False, "created_at": "d"}, CHAT, "ollama.native"),
        ({"error": "m"}, "/api/chat", "ollama.native"),
        ({"status": "pulling manifest"}, "/api/pull", None),
        ({"text": "a", "meta_info": {}}, "/generate", "sglang.native"),
        ({"type": "message-start"}, "/x", "cohere.v2"),
        ({"finish_reason": "COMPLETE", "message": {"content": []}}, "/x", "cohere.v2"),
        ({"id": "1", "message": "no such model"}, "/v2/chat", "cohere.v2"),
        ({"messageStart": {}}, "/x", "bedrock.converse"),
        ({"metadata": {"run_id": "r"}}, "/x", None),
        ({"choices": [{"delta": {}}], "metadata": {}}, "/x", "openai.chat"),
        ({"outputText": "a"}, "/model/m/invoke-with-response-stream", "bedrock.invoke"),
        ({"generation": "a"}, "/x", None),
        ({"type": "message.delta"}, "/v1/messages", "lmstudio.native"),
        ({"output": [], "stats": {}, "model_instance_id": "m"}, "/x", "lmstudio.native"),
        ({"error": {}}, "/api/v1/chat", "lmstudio.native"),
        ({"type": 3}, CHAT, None),
        ({"type": "acme"}, "/v1/messages", None),
        ([], CHAT, None),
        (None, CHAT, None),
    ],
)
def test_who_takes_an_answer(value: Any, path: str, name: str | None) -> None:
    claims = list(BUILT_IN.claims_of(value, path))
    assert (DIALECTS[claims[0][0]]().name if claims else None) == name


def test_a_failure_belongs_to_the_dialect_of_the_path() -> None:
    assert [DIALECTS[order]().name for order, _ in BUILT_IN.claims_of({"error": "m"}, "/v1/messages")] == [
        "anthropic"
    ]


VALUES: list[tuple[Any, bytes | None]] = [
    (None, None),
    ([], None),
    ({}, None),
    ({"error": {}}, None),
    ({"choices": [{"delta": {}}], "object": "chat.completion.chunk"}, None),
    ({"type": "message_start"}, b"message_start"),
    ({"type": "message.delta"}, None),
    ({"type": "session.created", "candidates": [{"content": {"parts": [{"text": "a"}]}}]}, None),
    ({"outputText": "a", "done": True, "response": "a", "messageStart": {}}, None),
    ([{"generated_text": "a"}], None),
    ({"object": "response", "content": "a", "stop": False, "text": "a", "meta_info": {}}, b"message"),
]
PATHS = (
    CHAT,
    "/v1/messages",
    "/v1/responses",
    "/v1/realtime",
    "/api/chat",
    "/model/m/converse-stream",
    "/model/m/invoke-with-response-stream",
    "/v1beta/models/g:streamGenerateContent",
    "/x",
)
OWN = DialectTable(name="acme.chat", source="acme.example", end="none", rules=(Rule(content="response"),))


@pytest.mark.parametrize("dialects", [BUILT_IN, Dialects([OWN])], ids=["built-in", "own"])
@pytest.mark.parametrize("path", PATHS)
def test_lazy_claims_are_those_of_all_dialects_in_order(dialects: Dialects, path: str) -> None:
    for value, name in VALUES:
        first = value[0] if isinstance(value, list) and value else value
        claims = []
        for order, dialect in enumerate(dialects.entries):
            if isinstance(dialect, TableDialect):
                claim = dialect.claim(value, path, name)
            else:
                claim = dialect.claim(first, path) if isinstance(first, dict) else 0
            if claim:
                claims.append((order, claim))
        claims.sort(key=lambda c: (dialects.is_own(*c), c[1]), reverse=True)
        assert list(dialects.claims_of(value, path, name)) == claims


def test_an_event_that_names_its_dialect_asks_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr(TableDialect, "claim", lambda self, *_: tried.append(self.name) or 0)
    dialects = Dialects()
    assert dialects.owners(CHAT)
    tried.clear()
    order, claim = next(iter(dialects.claims_of({"object": "chat.completion.chunk", "choices": []}, CHAT)))
    assert (dialects.entries[order]().name, claim, tried) == ("openai.chat", 3, [])
