"""Middleware for aiohttp. Its code is in `llmtap/vantage/middleware/aiohttp.py`."""

from llmtap.vantage.middleware.aiohttp import setup

__all__ = ["setup"]
