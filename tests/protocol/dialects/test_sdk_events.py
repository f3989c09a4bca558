"""Each event type that an SDK declares is read as output, usage, error or end, or is listed with a reason.

A new release of an SDK with a new event makes this test fail: read the event, or add its name to
`tests/data/sdk_events.toml`.
"""

import json
import tomllib
from typing import Any

import pytest
from google.genai.types import FinishReason

from llmtap.protocol.delta import Delta, EventClass
from llmtap.protocol.dialects.registry import DIALECTS
from llmtap.protocol.sse import SseEvent
from tests.support.data import DATA
from tests.support.sdk_types import examples, load

SDK_EVENTS = {
    "openai.chat": ["openai.types.chat:ChatCompletionChunk", "openai.types.chat:ChatCompletion"],
    "openai.completions": ["openai.types:Completion"],
    "openai.responses": ["openai.types.responses:ResponseStreamEvent", "openai.types.responses:Response"],
    "openai.realtime": ["openai.types.realtime:RealtimeServerEvent"],
    "openai.live": ["openai.types.live.connect_server_event:ConnectServerEvent"],
    "openai.agents": ["openai.types.beta.agent_session_event:AgentSessionEvent"],
    "openai.assistants": ["openai.types.beta.assistant_stream_event:AssistantStreamEvent"],
    "openai.transcription": ["openai.types.audio.transcription_stream_event:TranscriptionStreamEvent"],
    "openai.images": [
        "openai.types.image_gen_stream_event:ImageGenStreamEvent",
        "openai.types.image_edit_stream_event:ImageEditStreamEvent",
    ],
    "openai.decisions": ["openai.types.decision:Decision"],
    "embeddings": ["openai.types:CreateEmbeddingResponse", "cohere.types:EmbedByTypeResponse"],
    "anthropic": [
        "anthropic.types:RawMessageStreamEvent",
        "anthropic.types.beta:BetaRawMessageStreamEvent",
    ],
    "anthropic.sessions": ["anthropic.types.beta.sessions:BetaManagedAgentsStreamSessionEvents"],
    "gemini": ["google.genai.types:GenerateContentResponse"],
    "gemini.live": ["google.genai.types:LiveServerMessage"],
    "gemini.interactions": [
        "google.genai._gaos.types.interactions.interactionsseevent:InteractionSSEEvent",
        "google.genai._gaos.types.interactions.interaction:Interaction",
    ],
    "mistral.conversations": [
        "mistralai.client.models.conversationevents:ConversationEventsData",
        "mistralai.client.models.conversationresponse:ConversationResponse",
    ],
    "cohere.v2": ["cohere.v2.types:V2ChatStreamResponse"],
    "a2a": ["a2a.compat.v0_3.types:SendStreamingMessageSuccessResponse"],
}
"""Unions of events, and models of whole answers, by dialect."""
WITHOUT_OUTPUT: dict[str, dict[str, list[str]]] = tomllib.loads((DATA / "sdk_events.toml").read_text("utf-8"))
READERS = {dialect().name: dialect for dialect in DIALECTS}
NOT_AN_EVENT = "UNKNOWN"
"""Name of the model that some SDKs return for an event that they do not know."""


def read(dialect: str, value: dict[str, Any]) -> Delta:
    name = None
    if dialect == "openai.assistants":  # this SDK models the `event:` line beside the data
        name, value = value["event"].encode(), value["data"]
    return READERS[dialect]().read_event(SseEvent(0, 0, json.dumps(value).encode(), name))


GEMINI_REASONS: dict[str, tuple[str, ...]] = {
    "output_guardrail": (
        "SAFETY",
        "RECITATION",
        "BLOCKLIST",
        "PROHIBITED_CONTENT",
        "SPII",
        "LANGUAGE",
        "IMAGE_SAFETY",
        "IMAGE_PROHIBITED_CONTENT",
        "IMAGE_RECITATION",
        "MODEL_ARMOR",
    ),
    "input_guardrail": ("ESCALATION", "PUP_LIMITED_DISABLED"),
    # The answer ended, or the model failed to write what was wanted.
    "no verdict": (
        "FINISH_REASON_UNSPECIFIED",
        "STOP",
        "MAX_TOKENS",
        "CONTINUATION",
        "OTHER",
        "MALFORMED_FUNCTION_CALL",
        "MALFORMED_RESPONSE",
        "UNEXPECTED_TOOL_CALL",
        "TOO_MANY_TOOL_CALLS",
        "MISSING_THOUGHT_SIGNATURE",
        "IMAGE_OTHER",
        "NO_IMAGE",
    ),
}


def test_each_finish_reason_of_gemini_has_a_meaning() -> None:
    known = {reason: kind for kind, reasons in GEMINI_REASONS.items() for reason in reasons}
    assert {reason.value for reason in FinishReason} == known.keys()
    for reason, kind in known.items():
        delta = read("gemini", {"candidates": [{"finishReason": reason}]})
        assert delta.finish_reason == reason
        assert (delta.verdict.kind if delta.verdict else "no verdict") == kind, reason


def says_nothing(delta: Delta) -> bool:
    return delta.event_class is EventClass.METADATA and delta.usage is None


@pytest.mark.parametrize("dialect", SDK_EVENTS)
def test_every_event_type_of_an_sdk_is_read_or_listed_with_a_reason(dialect: str) -> None:
    silent: set[str] = set()
    unparsed = set()
    for union in map(load, SDK_EVENTS[dialect]):
        names: dict[str, list[Delta]] = {}
        for optional in (False, True):
            for example in examples(union, optional=optional):
                if NOT_AN_EVENT not in example.name:
                    names.setdefault(example.name, []).append(read(dialect, example.value))
        silent |= {name for name, deltas in names.items() if all(map(says_nothing, deltas))}
        # A model whose members are all optional says nothing if it has none of them.
        unparsed |= {name for name, deltas in names.items() if not deltas[-1].parsed}
    listed = [name for names in WITHOUT_OUTPUT.get(dialect, {}).values() for name in names]
    assert sorted(unparsed) == []
    assert sorted(silent) == sorted(listed)
    assert len(listed) == len(set(listed))
