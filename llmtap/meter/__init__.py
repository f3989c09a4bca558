"""The meter (analysis process): makes measured Exchanges of frames, and serves, exports, captures them.

Frames come from relays, passive vantages and apps with the middleware (`channel/`). `process.py` is the
program, `pipeline/` the path of an exchange, `admin/` the HTTP port with `/metrics`, API and dashboard.
"""
