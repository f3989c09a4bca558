"""What two small chat gateways for tests say, on FastAPI and on aiohttp; `how` asks for mishaps."""

import asyncio
import json
import zlib
from collections.abc import AsyncIterator
from typing import Any

WORDS = ["What", " passes", " through", " a", " tap", "?"]
USAGE = {"prompt_tokens": 7, "completion_tokens": len(WORDS), "total_tokens": 7 + len(WORDS)}
REFUSED = {"error": {"message": "slow down", "type": "rate_limit"}}
TTFT_S = 0.02
ITL_S = 0.002


def _event(about: dict[str, Any]) -> bytes:
    return f"data: {json.dumps({'id': 'c1', 'object': 'chat.completion.chunk', **about})}\n\n".encode()


def _word(model: str, word: str) -> bytes:
    return _event({"model": model, "choices": [{"index": 0, "delta": {"content": word}}]})


async def streamed(model: str, how: str) -> AsyncIterator[bytes]:
    """A stream's events, one at a time; `break` raises midway, `for ever` does not end."""
    await asyncio.sleep(TTFT_S)
    while how == "for ever":
        yield _word(model, "more")
        await asyncio.sleep(ITL_S)
    for i, word in enumerate(WORDS):
        if how == "break" and i == 3:
            raise RuntimeError("planted")
        yield _word(model, word)
        await asyncio.sleep(ITL_S)
    yield _event({"model": model, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    yield _event({"model": model, "choices": [], "usage": USAGE})
    yield b"data: [DONE]\n\n"


async def compressed(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same bytes with gzip, each event flushed."""
    gzip = zlib.compressobj(wbits=31)
    async for event in events:
        yield gzip.compress(event) + gzip.flush(zlib.Z_SYNC_FLUSH)
    yield gzip.flush()


async def whole(model: str) -> dict[str, Any]:
    """An answer in one piece."""
    await asyncio.sleep(TTFT_S)
    message = {"role": "assistant", "content": "".join(WORDS)}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {"id": "c1", "object": "chat.completion", "model": model, "choices": [choice], "usage": USAGE}
