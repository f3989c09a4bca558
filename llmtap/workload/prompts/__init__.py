"""Prompts of exact token lengths."""
