"""Public import path of `setup` for aiohttp.web; code in `llmtap/vantage/middleware/aiohttp.py`."""

from llmtap.vantage.middleware.aiohttp import setup

__all__ = ["setup"]
