"""Benchmarks of LLM servers: the ten tests of the IETF draft, exo-bench's grid, and the self-test.

Subpackages: bench file (`sut`), tests and their runs (`tests`, `run`), reports and comparison (`report`),
compliance with the draft (`compliance`), exo-bench (`exo`). `selftest.py` measures the error of llmtap's own
times.
"""
