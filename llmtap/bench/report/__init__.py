"""Reports of the ten tests as JSON, as minimum and full text, and comparison of systems.

`llmtap/report/bench.py` renders the same JSON for terminal and HTML.
"""
