"""The meter (analysis process): turns frames into measured Exchanges, and serves, exports, captures them.

Frames come from relays, passive vantages and apps with the middleware (`channel/`). `process.py` is the
program, `pipeline/` the path of an exchange, `admin/` the HTTP port with `/metrics`, API and dashboard.
"""
