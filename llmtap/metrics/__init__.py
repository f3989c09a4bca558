"""Metrics of Exchanges (request and response): pure functions, each defined in DEFINITIONS.md."""
