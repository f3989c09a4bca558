"""A small chat gateway as a FastAPI app; with the tap in it where LLMTAP_TEST_SOCKET names a meter's socket.

python -m uvicorn tests.vantage.middleware.chat_app:app
"""

import os
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from llmtap.middleware.asgi import LlmtapMiddleware
from tests.vantage.middleware.chat_words import REFUSED, compressed, streamed, whole

app = FastAPI()


@app.post("/v1/chat/completions")
async def chat(request: Request) -> Any:
    asked = await request.json()
    model, how = asked["model"], asked.get("how", "")
    if how == "raise":
        raise RuntimeError("planted")
    if how == "refuse":
        return JSONResponse(REFUSED, status_code=429)
    if asked.get("stream"):
        events, more = streamed(model, how), {}
        if how == "gzip":
            events, more = compressed(events), {"content-encoding": "gzip"}
        return StreamingResponse(events, media_type="text/event-stream", headers=more)
    return await whole(model)


@app.get("/health")
def health() -> str:
    return "ok"


if (_socket := os.environ.get("LLMTAP_TEST_SOCKET")) is not None:
    app.add_middleware(LlmtapMiddleware, socket=_socket)
