"""Public import path of the middleware: `llmtap.middleware.asgi` and `llmtap.middleware.aiohttp`."""
