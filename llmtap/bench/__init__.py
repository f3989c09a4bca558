"""Benchmarks of LLM servers by the IETF draft: its ten tests, their runs, reports, and compliance with it."""
