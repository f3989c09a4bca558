"""Prompts of exact lengths in tokens: texts, tokenizers, and fitting of texts to a length."""
