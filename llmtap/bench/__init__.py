"""Benchmarks of LLM servers, by the IETF draft (its ten tests) and by exo-bench, and the self-test.

Has the bench file, the tests and their runs, reports, comparisons, and compliance with the draft.
"""
