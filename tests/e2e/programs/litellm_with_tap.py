"""LiteLLM's proxy with the tap in it; runs in the gateway's environment.

CONFIG_FILE_PATH=litellm.yaml python litellm_with_tap.py PORT SOCKET
"""

from __future__ import annotations

import sys

import uvicorn
from litellm.proxy.proxy_server import app

from llmtap.middleware.asgi import LlmtapMiddleware

app.add_middleware(LlmtapMiddleware, socket=sys.argv[2])

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
