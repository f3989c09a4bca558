"""llmtap: a tap for LLM traffic. ARCHITECTURE.md is the map of the rooms below."""

__version__ = "0.1.0"
