"""Middleware that measures requests inside an application, and sends frames to a meter as a relay does.

`asgi.py` and `aiohttp.py` are the two middlewares, `exchange.py` makes the frames of one request,
`emitter.py` is the connection to the meter. Applications import them from `llmtap.middleware`.
"""
