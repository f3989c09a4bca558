"""Metrics of Exchanges: pure functions, each defined in DEFINITIONS.md."""
