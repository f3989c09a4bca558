"""Rows as a capture of real traffic has them, at the level `shape`: streams of an engine, from a seed.

A token about every 20 ms with a jitter of one or two, events as long as words make them, prompts of some
1,254 tokens with three salted block hashes, ids and usage as providers send them. For tests that weigh files,
and for those that need many rows in which most columns are in use.
"""

import json
import random
import uuid
from typing import Any

import pyarrow as pa

from llmtap.capture.schema import SCHEMA

_WORDS = (1, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 6, 6, 7, 8, 9, 11)
"""Bytes of a token's text, about as often as in English."""
_EVENT_BYTES = 187
"""Of a chat completion's chunk around the text."""


def rows(n: int, seed: int, *, start: int = 1, tokens: int = 200, began_ns: int = 0) -> list[dict[str, Any]]:
    """`n` exchanges numbered from `start`, each with `tokens` content events; began_ns 0 is a day in 2023."""
    rng = random.Random(seed)
    arrival_ns = began_ns or 1_700_000_000_123_456_789
    made = []
    for seq in range(start, start + n):
        arrival_ns += int(rng.expovariate(20.0) * 1e9)
        made.append(_row(rng, seq, arrival_ns, tokens))
    return made


def batch(n: int, seed: int, *, start: int = 1, tokens: int = 200, began_ns: int = 0) -> pa.RecordBatch:
    """The same as a record batch in SCHEMA."""
    return pa.RecordBatch.from_pylist(
        rows(n, seed, start=start, tokens=tokens, began_ns=began_ns), schema=SCHEMA
    )


def _row(rng: random.Random, seq: int, arrival_ns: int, tokens: int) -> dict[str, Any]:
    submit = rng.randrange(150, 400)
    head = submit + int(rng.lognormvariate(12.0, 0.4))
    t = head + rng.randrange(30, 90)
    # What an engine's stream is made of: the role, a token an event, the finish, the usage, the end.
    at, kinds, sizes, counts = [t], ["role"], [_EVENT_BYTES + 15], [0]
    t += rng.randrange(200, 20_000)
    for _ in range(tokens):
        at.append(t)
        kinds.append("content")
        sizes.append(_EVENT_BYTES + rng.choice(_WORDS))
        counts.append(1)
        jitter = rng.gauss(0, 1_500) if rng.random() < 0.9 else rng.lognormvariate(7.5, 0.6)
        t += max(0, round(20_000 + jitter))
    for kind, size in (("metadata", _EVENT_BYTES + 20), ("usage", 260), ("done", 12)):
        t += rng.randrange(20, 200)
        at.append(t)
        kinds.append(kind)
        sizes.append(size)
        counts.append(0)
    prompt = round(rng.gauss(1_254, 200))
    first, last = at[1], at[-4]
    session = rng.randrange(1, 1 + seq // 3 + 1)
    return {
        "capture": "k3v9q2",
        "relay": "r0-k3v9q2",
        "seq": seq,
        "id": f"r0-k3v9q2-{seq}",
        "arrival_ns": arrival_ns,
        "arrival": arrival_ns // 1_000,
        "anchor": 0,
        "tenant": rng.choice(("search", "support", "batch", "default")),
        "model": "llama-3.1-70b-instruct",
        "response_model": "llama-3.1-70b-instruct",
        "endpoint": "chat.completions",
        "dialect": "openai_chat",
        "method": "POST",
        "path": "/v1/chat/completions",
        "request_id": str(uuid.UUID(int=rng.getrandbits(128))),
        "level": "shape",
        "stream": True,
        "max_tokens": rng.choice((256, 512, 1024)),
        "temperature": rng.choice((0.0, 0.7, 1.0)),
        "top_p": 1.0,
        "tools": 0,
        "images": 0,
        "message_roles": ["system", "user"],
        "message_bytes": [3_120, prompt * 4 - 3_120 + rng.randrange(40)],
        "prompt_bytes": prompt * 4 + 17,
        "request_bytes": prompt * 4 + rng.randrange(900, 1_000),
        "blocks": [rng.getrandbits(64) - (1 << 63) for _ in range(3)],
        "block_size": 512,
        "block_unit": "tokens",
        "session": f"s-{session:012x}",
        "session_source": "prefix",
        "turn": rng.randrange(6),
        "parent": f"r0-k3v9q2-{max(1, seq - rng.randrange(1, 200))}",
        "think_us": int(rng.lognormvariate(16, 1)),
        "turn_by": rng.choice(("human", "tool")),
        "request_end_us": rng.randrange(20, 140),
        "submit_us": submit,
        "head_us": head,
        "first_byte_us": at[0],
        "first_any_us": at[0],
        "first_token_us": first,
        "first_content_us": first,
        "last_token_us": last,
        "response_end_us": at[-1],
        "delivered_us": at[-1] + rng.randrange(20, 60),
        "paused_us": 0,
        "added_request_us": rng.randrange(80, 250),
        "added_first_chunk_us": rng.randrange(15, 60),
        "added_chunk_max_us": rng.randrange(60, 900),
        "clock": "kernel",
        "uncertainty_us": rng.randrange(80, 1_200),
        "uncertain": False,
        "event_us": at,
        "event_class": kinds,
        "event_bytes": sizes,
        "event_tokens": counts,
        "event_flags": [2 if kind == "content" else 0 for kind in kinds],
        "reads": len(at) - 1,
        "response_bytes": sum(sizes) + 6 * len(at),
        "unparsed_events": 0,
        "unlogged_events": 0,
        "status": 200,
        "outcome": "complete",
        "finish_reason": rng.choice(("stop", "stop", "length")),
        "retries": 0,
        "input_tokens": prompt,
        "input_token_source": "usage",
        "output_tokens": tokens,
        "cached_tokens": rng.randrange(0, prompt, 16),
        "token_source": "usage",
        "usage": json.dumps(
            {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens},
            separators=(",", ":"),
        ),
    }
