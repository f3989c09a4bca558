"""ASGI middleware. Its code is in `llmtap/vantage/middleware/asgi.py`."""

from llmtap.vantage.middleware.asgi import LlmtapMiddleware

__all__ = ["LlmtapMiddleware"]
