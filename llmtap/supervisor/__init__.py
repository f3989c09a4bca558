"""Parent processes of `llmtap proxy` and `llmtap watch`, which start, restart and stop their children.

`supervisor.py` is the parent process of the proxy, `watching.py` that of `llmtap watch`. `alone.py` runs
`llmtap meter`, which has only one process. All three use `child.py`, `ports.py`, `run.py` and `checks.py`.
"""
