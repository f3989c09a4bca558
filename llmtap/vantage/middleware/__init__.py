"""Middleware that measures requests inside an application, and sends frames to a meter as a relay does.

`asgi.py` and `aiohttp.py` are the two middlewares; `exchange.py` makes the frames and sends them to the
meter. Applications import the middlewares from `llmtap.middleware`.
"""
