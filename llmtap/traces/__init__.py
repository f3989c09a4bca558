"""Trace formats of llmtap and of other tools: reading, writing, and the conversion between them."""
