"""Benchmarks by the IETF draft: tests, runs, reports and the compliance with its requirements."""
