"""Parent processes of `llmtap proxy` and `llmtap watch`, which start, restart and stop their children.

`supervisor.py` is that of the proxy, `watching.py` that of `llmtap watch`; `alone.py` runs `llmtap meter`,
which has one process. `child.py`, `ports.py`, `run.py` and `checks.py` are their parts.
"""
