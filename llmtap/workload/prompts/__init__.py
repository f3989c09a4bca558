"""Prompts of exact lengths in tokens."""
