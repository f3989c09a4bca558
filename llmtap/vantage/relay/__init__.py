"""The relay process: accepts clients, forwards their requests to the gateway, and timestamps every read.

`relay.py` is the program, `connection.py` a client's connection, `flow.py` one exchange (with `upload.py` for
its request, `tunnel.py` after an upgrade). The frames go through `channel/` to the meter.
"""
