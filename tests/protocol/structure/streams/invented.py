"""Streams of invented APIs: each wraps the pieces of any text."""

from tests.protocol.structure.streams.forms import DONE, Envelope, Out, named, out, so_far

INVENTED: dict[str, Envelope] = {
    "flat_token": lambda t: [*out([{"token": x} for x in t]), DONE],
    "flat_text_done": lambda t: [*out([{"text": x, "done": False} for x in t]), {"text": "", "done": True}],
    "typed_token": lambda t: [
        {"type": "start", "id": "s1"},
        *out([{"type": "token", "text": x} for x in t]),
        {"type": "end"},
    ],
    "numbered_kinds": lambda t: [
        {"k": 0, "v": "sess-81"},
        *out([{"k": 3, "v": x} for x in t]),
        {"k": 9, "v": "ok", "usage": {"in": 9, "out": len(t)}},
    ],
    "plain_events": lambda t: [
        ("log", b"Loading the weights"),
        *named("piece", [x.encode() for x in t]),
        ("log", b"Ready"),
    ],
    "event_data": lambda t: [
        *named("token", [{"data": x} for x in t]),
        ("done", {"data": "", "elapsed": 1.25}),
    ],
    "nested_usage_end": lambda t: [
        ("session.open", {"session": {"id": "9f8e7d6c", "region": "eu-2"}}),
        *named(
            "answer.delta",
            [{"answer": {"parts": [{"kind": "text", "value": x}]}, "seq": i} for i, x in enumerate(t)],
        ),
        (
            "answer.completed",
            {
                "answer": {"parts": [{"kind": "text", "value": "".join(t)}]},
                "usage": {"tokens_in": 9, "tokens_out": len(t)},
            },
        ),
    ],
    "cumulative_lines": lambda t: [
        *out([{"id": "a1", "model": "fjord-2", "answer": x, "finished": False} for x in so_far(t)]),
        {
            "id": "a1",
            "model": "fjord-2",
            "answer": "".join(t),
            "finished": True,
            "stats": {"input_tokens": 9, "output_tokens": 5},
        },
    ],
    "langserve": lambda t: [
        ("metadata", {"run_id": "1f0a9c1e-6b7e-4df0-8b8e-2f2f9b9f1c3d"}),
        *named("data", [{"content": x, "type": "AIMessageChunk", "id": "run-1"} for x in t]),
        ("end", b""),
    ],
    "langgraph": lambda t: [
        ("metadata", {"run_id": "1f0a9c1e-6b7e-4df0-8b8e-2f2f9b9f1c3d", "attempt": 1}),
        *named(
            "messages",
            [
                [
                    {"content": x, "type": "AIMessageChunk", "id": "run--1", "tool_calls": []},
                    {"langgraph_step": 1, "langgraph_node": "model", "thread_id": "t-1"},
                ]
                for x in t
            ],
        ),
    ],
    "dify": lambda t: [
        *out(
            [
                {
                    "event": "message",
                    "task_id": "0a1b",
                    "message_id": "m1",
                    "answer": x,
                    "created_at": 1767000000,
                }
                for x in t
            ]
        ),
        {
            "event": "message_end",
            "task_id": "0a1b",
            "message_id": "m1",
            "metadata": {
                "usage": {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14, "latency": 0.8}
            },
        },
    ],
    "dashscope": lambda t: [
        *named(
            "result",
            [
                {
                    "output": {"finish_reason": "null", "text": x},
                    "usage": {"total_tokens": 9 + i, "input_tokens": 9, "output_tokens": i + 1},
                    "request_id": "c0ffee00-0000-4000-8000-000000000001",
                }
                for i, x in enumerate(so_far(t))
            ],
        ),
    ],
    "hunyuan": lambda t: [
        *out(
            [
                {
                    "Note": "generated",
                    "Choices": [{"Delta": {"Role": "assistant", "Content": x}, "FinishReason": ""}],
                    "Created": 1767000000,
                    "Id": "h1",
                    "Usage": {"PromptTokens": 3, "CompletionTokens": i + 1, "TotalTokens": 4 + i},
                }
                for i, x in enumerate(t)
            ]
        ),
    ],
    "ernie": lambda t: [
        *out(
            [
                {
                    "id": "as-1",
                    "object": "chat.completion",
                    "created": 1767000000,
                    "sentence_id": i,
                    "is_end": False,
                    "is_truncated": False,
                    "result": x,
                    "need_clear_history": False,
                    "usage": {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3},
                }
                for i, x in enumerate(t)
            ]
        ),
    ],
    "flowise": lambda t: [
        {"event": "start", "data": ""},
        *out([{"event": "token", "data": x} for x in t]),
        {"event": "metadata", "data": {"chatId": "0b1f", "memoryType": "Buffer Memory"}},
        {"event": "end", "data": "[DONE]"},
    ],
    "langflow": lambda t: [
        {
            "event": "add_message",
            "data": {"text": "hello", "sender": "User", "sender_name": "User", "id": "u1"},
        },
        *out(
            [
                {"event": "token", "data": {"chunk": x, "id": "m1", "timestamp": "2026-11-20 10:00:00 UTC"}}
                for x in t
            ]
        ),
        {"event": "end", "data": {"result": {"session_id": "s"}}},
    ],
    "poe": lambda t: [
        ("meta", {"content_type": "text/markdown"}),
        *named("text", [{"text": x} for x in t]),
        ("done", {}),
    ],
    "replicate": lambda t: [*[("output", Out(x.encode())) for x in t], ("done", {})],
    "json_strings": lambda t: [*out(list(t)), DONE],
    "workers_ai": lambda t: [
        *out([{"response": x, "p": "abcdefghij"[: 3 + i % 5]} for i, x in enumerate(t)]),
        {
            "response": "",
            "usage": {"prompt_tokens": 9, "completion_tokens": len(t), "total_tokens": 9 + len(t)},
        },
        DONE,
    ],
    "triton": lambda t: [
        *out(
            [
                {
                    "model_name": "ensemble",
                    "model_version": "1",
                    "sequence_end": False,
                    "sequence_id": 0,
                    "text_output": x,
                }
                for x in t
            ]
        ),
    ],
    "ai_sdk": lambda t: [
        {"type": "start", "messageId": "m1"},
        {"type": "start-step"},
        {"type": "text-start", "id": "t1"},
        *out([{"type": "text-delta", "id": "t1", "delta": x} for x in t]),
        {"type": "text-end", "id": "t1"},
        {"type": "finish-step"},
        {"type": "finish"},
        DONE,
    ],
    "ag_ui": lambda t: [
        {"type": "RUN_STARTED", "threadId": "t", "runId": "r"},
        {"type": "TEXT_MESSAGE_START", "messageId": "m", "role": "assistant"},
        *out([{"type": "TEXT_MESSAGE_CONTENT", "messageId": "m", "delta": x} for x in t]),
        {"type": "TEXT_MESSAGE_END", "messageId": "m"},
        {"type": "RUN_FINISHED", "threadId": "t", "runId": "r"},
    ],
    "assistants": lambda t: [
        ("thread.run.created", {"id": "run_a", "object": "thread.run", "status": "queued", "model": "m"}),
        *named(
            "thread.message.delta",
            [
                {
                    "id": "msg_a",
                    "object": "thread.message.delta",
                    "delta": {
                        "content": [{"index": 0, "type": "text", "text": {"value": x, "annotations": []}}]
                    },
                }
                for x in t
            ],
        ),
        (
            "thread.message.completed",
            {
                "id": "msg_a",
                "object": "thread.message",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "text", "text": {"value": "".join(t), "annotations": []}}],
            },
        ),
        ("done", DONE),
    ],
    "mistral_conversations": lambda t: [
        (
            "conversation.response.started",
            {"type": "conversation.response.started", "conversation_id": "conv_1"},
        ),
        *named(
            "message.output.delta",
            [
                {
                    "type": "message.output.delta",
                    "id": "msg_1",
                    "model": "m",
                    "role": "assistant",
                    "output_index": 0,
                    "content": x,
                }
                for x in t
            ],
        ),
        (
            "conversation.response.done",
            {
                "type": "conversation.response.done",
                "usage": {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11},
            },
        ),
    ],
    "a2a": lambda t: [
        {
            "jsonrpc": "2.0",
            "id": 1,
            "result": {"kind": "task", "id": "t1", "contextId": "c1", "status": {"state": "submitted"}},
        },
        {
            "jsonrpc": "2.0",
            "id": 1,
            "result": {
                "kind": "status-update",
                "taskId": "t1",
                "status": {"state": "working"},
                "final": False,
            },
        },
        *out(
            [
                {
                    "jsonrpc": "2.0",
                    "id": 1,
                    "result": {
                        "kind": "artifact-update",
                        "taskId": "t1",
                        "append": True,
                        "artifact": {"artifactId": "a", "parts": [{"kind": "text", "text": x}]},
                    },
                }
                for x in t
            ]
        ),
        {
            "jsonrpc": "2.0",
            "id": 1,
            "result": {
                "kind": "status-update",
                "taskId": "t1",
                "status": {"state": "completed"},
                "final": True,
            },
        },
    ],
    "interactions": lambda t: [
        {
            "event_type": "interaction.created",
            "interaction": {"id": "i1", "status": "in_progress", "model": "g"},
        },
        {"event_type": "step.start", "index": 0, "step": {"type": "thought"}},
        *out(
            [
                {
                    "event_type": "step.delta",
                    "index": 0,
                    "delta": {"type": "thought_summary", "content": {"type": "text", "text": "Weigh it."}},
                }
            ],
            "reasoning",
        ),
        *out([{"event_type": "step.delta", "index": 1, "delta": {"type": "text", "text": x}} for x in t]),
        {
            "event_type": "interaction.completed",
            "interaction": {
                "id": "i1",
                "status": "completed",
                "usage": {"total_input_tokens": 9, "total_output_tokens": 7},
            },
        },
    ],
    "reasoning_channel": lambda t: [
        *out([{"channel": "analysis", "delta": x} for x in ("Think", " about", " it")], "reasoning"),
        *out([{"channel": "final", "delta": x} for x in t]),
        {"channel": "final", "end": True},
    ],
    "reasoning_beside": lambda t: [
        *out(
            [
                {"output": {"reasoning_content": x, "content": ""}, "model": "m"}
                for x in ("Hm", ", let", " me see")
            ],
            "reasoning",
        ),
        *out([{"output": {"reasoning_content": "", "content": x}, "model": "m"} for x in t]),
        {"output": {}, "finish": "stop"},
    ],
    "openai_like_inside": lambda t: [
        *out(
            [
                {"code": 0, "msg": "ok", "data": {"choices": [{"delta": {"content": x}, "index": 0}]}}
                for x in t
            ]
        ),
        {
            "code": 0,
            "msg": "ok",
            "data": {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}},
        },
    ],
    "gateway_wrapper": lambda t: [
        {"status": 200, "stage": "routing", "message": "selected provider b"},
        *out([{"status": 200, "chunk": {"id": "c1", "body": {"content": x}}} for x in t]),
        {"status": 200, "final": True},
    ],
    "letters": lambda t: [*out([{"i": i, "c": x} for i, x in enumerate(t)]), {"end": 1}],
    "grpc_gateway": lambda t: [
        *out([{"result": {"responseId": "r", "generation": {"outputText": x}}} for x in t])
    ],
    "reka": lambda t: [
        *out(
            [
                {
                    "id": "r1",
                    "responses": [{"message": {"content": x, "role": "assistant"}}],
                    "usage": {"input_tokens": 7, "output_tokens": i + 1},
                }
                for i, x in enumerate(so_far(t))
            ]
        ),
    ],
    "sagemaker_tokens": lambda t: [
        *out(
            [
                {
                    "token": {"id": 300 + i, "text": x, "logprob": -0.1, "special": False},
                    "generated_text": None,
                    "details": None,
                }
                for i, x in enumerate(t)
            ]
        ),
    ],
    "dust": lambda t: [
        {"eventId": "1-0", "data": {"type": "agent_message_new", "created": 1767000000, "messageId": "am1"}},
        *out(
            [
                {
                    "eventId": f"1-{i}",
                    "data": {
                        "type": "generation_tokens",
                        "created": 1767000001,
                        "messageId": "am1",
                        "text": x,
                        "classification": "tokens",
                    },
                }
                for i, x in enumerate(t)
            ]
        ),
        {
            "eventId": "1-99",
            "data": {"type": "agent_message_success", "created": 1767000009, "messageId": "am1"},
        },
    ],
    "tool_then_text": lambda t: [
        *out(
            [
                {
                    "type": "tool_call",
                    "tool_call": {"id": "c1", "name": "tide", "arguments": '{"port": "Brest"}'},
                }
            ],
            "tool_call",
        ),
        {"type": "tool_result", "tool_call_id": "c1", "content": "High water at six."},
        *out([{"type": "text", "text": x} for x in t]),
        {"type": "done"},
    ],
    "progress_first": lambda t: [
        *[
            {"type": "progress", "step": i, "message": m}
            for i, m in enumerate(("Queued", "Loading model", "Warming up"))
        ],
        *out([{"type": "output", "text": x} for x in t]),
        {"type": "progress", "step": 9, "message": "Finished"},
    ],
}
