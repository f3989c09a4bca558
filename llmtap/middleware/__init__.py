"""Public import path of the middlewares: `llmtap.middleware.asgi` and `llmtap.middleware.aiohttp`.

They measure requests inside an application; the code is in `llmtap/vantage/middleware/`.
"""
