"""Streams of little known APIs, and all streams with text."""

from tests.protocol.structure.streams.forms import TEXTS, Item, Out, stream
from tests.protocol.structure.streams.invented import INVENTED


def little_known(t: list[str]) -> dict[str, list[Item]]:
    return {
        "llama_stack": [
            {"event": {"event_type": "start", "delta": {"type": "text", "text": ""}}},
            *[Out({"event": {"event_type": "progress", "delta": {"type": "text", "text": x}}}) for x in t],
            {
                "event": {
                    "event_type": "complete",
                    "delta": {"type": "text", "text": ""},
                    "stop_reason": "end_of_turn",
                }
            },
        ],
        "gen": [Out({"outputs": [{"generated_text": x}]}) for x in t],
        "ws": [
            Out({"type": "reply", "payload": {"kind": "partial", "body": x}, "seq": i})
            for i, x in enumerate(t)
        ]
        + [{"type": "reply", "payload": {"kind": "eot"}}],
        "nova": [Out({"contentBlockDelta": {"contentBlockIndex": 0, "delta": {"text": x}}}) for x in t]
        + [
            {"messageStop": {"stopReason": "end_turn"}},
            {"metadata": {"usage": {"inputTokens": 3, "outputTokens": 4}}},
        ],
        "palm": [Out({"candidates": [{"output": x, "safetyRatings": []}]}) for x in t],
        "youchat": [("youChatToken", Out({"youChatToken": x})) for x in t]
        + [("done", "I'm Mr. Meeseeks. Look at me.")],
        "copilot": [Out({"type": "content", "body": x}) for x in t]
        + [{"type": "complete", "turnCount": 1, "body": ""}],
        "minimax": [
            Out(
                {
                    "created": 1,
                    "model": "m",
                    "reply": "",
                    "choices": [{"messages": [{"sender_type": "BOT", "sender_name": "MM", "text": x}]}],
                    "base_resp": {"status_code": 0, "status_msg": ""},
                }
            )
            for x in t
        ],
        "spark": [
            Out(
                {
                    "header": {"code": 0, "message": "Success", "sid": "cht1", "status": 1},
                    "payload": {
                        "choices": {
                            "status": 1,
                            "seq": i,
                            "text": [{"content": x, "role": "assistant", "index": 0}],
                        }
                    },
                }
            )
            for i, x in enumerate(t)
        ],
        "coze": [
            (
                "conversation.message.delta",
                Out(
                    {
                        "id": "1",
                        "conversation_id": "2",
                        "role": "assistant",
                        "type": "answer",
                        "content": x,
                        "content_type": "text",
                        "chat_id": "3",
                    }
                ),
            )
            for x in t
        ]
        + [
            (
                "conversation.message.completed",
                {
                    "id": "1",
                    "role": "assistant",
                    "type": "answer",
                    "content": "".join(t),
                    "content_type": "text",
                },
            ),
            (
                "conversation.chat.completed",
                {
                    "id": "3",
                    "status": "completed",
                    "usage": {"token_count": 20, "output_count": 8, "input_count": 12},
                },
            ),
            ("done", b"[DONE]"),
        ],
        "rasa": [Out({"recipient_id": "u", "text": x}) for x in t],
        "letta": [
            Out(
                {
                    "message_type": "assistant_message",
                    "content": x,
                    "id": "message-1",
                    "date": "2026-11-20T10:00:00Z",
                }
            )
            for x in t
        ]
        + [
            {"message_type": "stop_reason", "stop_reason": "end_turn"},
            {
                "message_type": "usage_statistics",
                "completion_tokens": 5,
                "prompt_tokens": 9,
                "total_tokens": 14,
                "step_count": 1,
            },
        ],
        "haystack": [
            Out({"chunk": {"content": x, "meta": {"model": "m", "index": i}}}) for i, x in enumerate(t)
        ],
        "autogen": [
            Out(
                {
                    "type": "ModelClientStreamingChunkEvent",
                    "source": "assistant",
                    "content": x,
                    "metadata": {},
                }
            )
            for x in t
        ]
        + [
            {
                "type": "TextMessage",
                "source": "assistant",
                "content": "".join(t),
                "models_usage": {"prompt_tokens": 5, "completion_tokens": 6},
            }
        ],
        "openwebui": [
            Out({"type": "chat:completion", "data": {"choices": [{"delta": {"content": x}}]}}) for x in t
        ]
        + [{"type": "chat:completion", "data": {"done": True}}],
        "zed": [Out({"k": "t", "t": x}) for x in t] + [{"k": "e"}],
        "words": [Out({"n": i, "word": x}) for i, x in enumerate(t)],
        "xml": [Out({"frag": x}) for x in t],
        "cumul_nested": [
            Out(
                {
                    "msg": {
                        "content": {"parts": ["".join(t[: i + 1])]},
                        "author": {"role": "assistant"},
                        "status": "in_progress",
                    }
                }
            )
            for i in range(len(t))
        ],
        "patch": [Out({"p": "/message/content/parts/0", "o": "append", "v": x}) for x in t],
        "bot": [Out({"bot": {"say": x}}) for x in t] + [{"bot": {"bye": True}}],
        "transl": [Out({"translation": x, "final": False}) for x in t],
        "speech_text": [Out({"type": "transcript.text.delta", "delta": x}) for x in t]
        + [{"type": "transcript.text.done", "text": "".join(t)}],
        "think": [
            Out({"phase": "think", "text": "I must "}, "reasoning"),
            Out({"phase": "think", "text": "look it up."}, "reasoning"),
            *[Out({"phase": "answer", "text": x}) for x in t],
        ],
        "thinkflag": [
            Out({"text": "I must ", "is_thinking": True}, "reasoning"),
            Out({"text": "look it up.", "is_thinking": True}, "reasoning"),
            *[Out({"text": x, "is_thinking": False}) for x in t],
        ],
        "stop_flag": [Out({"content": x, "stop": False, "slot_id": 0}) for x in t]
        + [
            {
                "content": "",
                "stop": True,
                "tokens_predicted": 5,
                "tokens_evaluated": 9,
                "timings": {"predicted_ms": 3.5},
            }
        ],
        "agentx": [
            {"event": "agent_thought", "data": {"thought": "", "tool": "search"}},
            *[Out({"event": "agent_message", "data": {"answer": x}}) for x in t],
            {"event": "message_end"},
        ],
        "sonar": [
            Out(
                {
                    "id": "a",
                    "object": "x.chunk",
                    "choices": [
                        {
                            "index": 0,
                            "delta": {"content": x},
                            "message": {"role": "assistant", "content": "".join(t[: i + 1])},
                        }
                    ],
                    "citations": ["https://example.org"],
                }
            )
            for i, x in enumerate(t)
        ],
    }


STREAMS = [
    stream(f"{name}-{text}", items)
    for text, pieces in TEXTS.items()
    for name, items in {
        **{n: envelope(pieces) for n, envelope in INVENTED.items()},
        **little_known(pieces),
    }.items()
]
