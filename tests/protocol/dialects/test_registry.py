"""Invariant: the answer says which dialect it is; the path only breaks a tie, and nobody is guessed."""

from typing import Any

import pytest

from llmtap.protocol.delta import EventClass
from llmtap.protocol.dialects.registry import Undecided, choose
from llmtap.protocol.sse import SseEvent
from tests.protocol.dialects.events import event

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
    dialect = choose(value, path)
    assert (dialect and dialect.name) == name


def test_the_first_json_decides_and_what_came_before_is_understood_anyway() -> None:
    reader = Undecided(CHAT)
    assert reader.read_event(SseEvent(0, 4, None, None, True)).event_class is EventClass.KEEPALIVE
    assert reader.read_event(SseEvent(4, 8, None)).event_class is EventClass.METADATA
    assert reader.name is None
    assert reader.read_event(event({"choices": [{"delta": {"content": "a"}}]})).text == "a"
    assert reader.name == "openai.chat"
    assert reader.read_event(event({"choices": [{"text": "b"}]})).text == "", "it stays"


def test_a_stream_of_no_known_dialect_is_timed_and_counted() -> None:
    reader = Undecided("/x")
    for value in ({"type": "acme_start"}, {"type": "acme_delta"}, b"{broken"):
        delta = reader.read_event(event(value))
        assert (delta.event_class, delta.parsed, delta.output) == (EventClass.METADATA, False, False)
    assert reader.read_event(event({"type": "ping"}, b"ping")).event_class is EventClass.KEEPALIVE
    assert reader.read_event(event({"type": "ping"})).event_class is EventClass.KEEPALIVE
    assert reader.read_event(event(b"[DONE]")).event_class is EventClass.DONE
    assert reader.name is None


def test_an_error_is_an_error_in_any_dialect() -> None:
    delta = Undecided("/v1/messages").read_event(
        event({"type": "error", "error": {"type": "overloaded_error"}})
    )
    assert (delta.event_class, delta.error_type, delta.parsed) == (EventClass.ERROR, "overloaded_error", True)
    delta = Undecided("/v1/models").read_body(b'{"error": "nope"}')
    assert (delta.event_class, delta.error_message) == (EventClass.ERROR, "nope")
