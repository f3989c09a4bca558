"""Parsers of stream dialects (the answer formats of LLM APIs), one file each, from events to Deltas.

`registry.py` chooses one for each answer. ADDING.md describes how to add one.
"""
