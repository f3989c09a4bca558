"""Metrics of Exchanges (request and response), and statistics of them. DEFINITIONS.md defines each metric.

`latency.py` computes the metrics of one Exchange; `summary.py`, `histogram.py`, `objectives.py` and
`experiment.py` accumulate the metrics of many. No IO and no clock.
"""
