"""Dialects (the formats of the answers of LLM APIs): each has a parser or a table that turns events into
Deltas.

`chooser.py` chooses the dialect of each answer. ADDING.md describes how to add a dialect.
"""
