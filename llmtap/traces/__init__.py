"""Trace formats of other tools, and the conversion between them."""
