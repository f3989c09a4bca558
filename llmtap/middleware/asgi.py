"""Public import path of `LlmtapMiddleware` for ASGI; code in `llmtap/vantage/middleware/asgi.py`."""

from llmtap.vantage.middleware.asgi import LlmtapMiddleware

__all__ = ["LlmtapMiddleware"]
