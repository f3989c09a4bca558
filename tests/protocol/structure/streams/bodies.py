"""Whole JSON answers, with text of a model and without."""

LAKE = "The lake is deep and cold, so few fish live there."
BODIES: dict[str, tuple[object, tuple[int | None, int | None] | None]] = {
    "chat": (
        {
            "id": "c",
            "choices": [{"message": {"role": "assistant", "content": LAKE}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12},
        },
        (3, 9),
    ),
    "answer": ({"id": "a", "answer": {"text": LAKE}, "usage": {"tokens_in": 3, "tokens_out": 9}}, (3, 9)),
    "output": (
        {"output": {"text": LAKE, "finish_reason": "stop"}, "usage": {"input_tokens": 3, "output_tokens": 9}},
        (3, 9),
    ),
    "parts": (
        {
            "message": {"role": "assistant", "content": [{"type": "text", "text": LAKE}]},
            "usage": {"inputTokens": 3, "outputTokens": 9},
        },
        (3, 9),
    ),
    "completion": ({"completion": LAKE, "stop_reason": "stop"}, None),
    "reply": ({"reply": LAKE, "tokens": {"prompt": 3, "completion": 9}}, (3, 9)),
}
"""Whole answers with text: the value, and their counts of input and output."""
SILENT_BODIES: dict[str, object] = {
    "user": {"id": 1, "name": "Ann", "email": "a@example.org", "bio": LAKE},
    "article": {"title": "Lakes", "content": LAKE, "author": "Ann"},
    "post": {"id": 1, "text": LAKE, "user": "ann"},
    "search": {"results": [{"title": "a", "snippet": LAKE, "url": "https://example.org"}]},
    "documents": {"documents": [{"id": 1, "text": LAKE, "score": 0.4}]},
    "rerank": {
        "results": [{"index": 0, "relevance_score": 0.9, "document": {"text": LAKE}}],
        "usage": {"total_tokens": 9},
    },
    "models": {
        "object": "list",
        "data": [{"id": "m", "object": "model", "owned_by": "x", "description": LAKE}],
    },
    "error": {"error": {"message": LAKE, "type": "invalid"}},
    "flat_error": {"message": LAKE, "code": 400},
    "detail": {"detail": LAKE},
    "embeddings": {
        "object": "list",
        "data": [{"object": "embedding", "embedding": [0.1], "index": 0}],
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    },
    "moderation": {"id": "m", "results": [{"flagged": False, "categories": {"hate": False}}]},
    "token_count": {"input_tokens": 9},
    "tokens": {"tokens": ["The", " lake"], "ids": [1, 2]},
    "health": {"status": "ok", "message": "all good"},
    "settings": {"prompt": LAKE, "model": "m", "temperature": 0.3},
    "graph": {"data": {"user": {"name": "Ann", "about": LAKE}}},
    "image": {"created": 1, "data": [{"b64_json": "AAAA" * 30, "revised_prompt": LAKE}]},
    "job": {"id": "j", "status": "done", "result": {"message": LAKE}},
    "user_message": {
        "id": "t",
        "object": "thread.message",
        "role": "user",
        "content": [{"type": "text", "text": {"value": LAKE}}],
    },
    "history": {"data": [{"id": "m1", "role": "user", "content": LAKE}]},
    "translations": {"welcome": "Welcome to the lake", "bye": "See you soon"},
    "weather": {"current": {"text": "Sunny", "temp": 19}},
    "comment": {"comment": {"body": LAKE, "author": "ann"}},
    "license": {"content": LAKE, "encoding": "utf-8", "path": "LICENSE"},
    "faq": {"items": [{"question": "Where?", "answer": "Brest"}]},
    "batch": {
        "id": "batch_1",
        "object": "batch",
        "endpoint": "/v1/chat/completions",
        "errors": None,
        "status": "validating",
    },
    "tool_result": {
        "jsonrpc": "2.0",
        "id": 1,
        "result": {"content": [{"type": "text", "text": LAKE}], "isError": False},
    },
}
