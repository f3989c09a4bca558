"""Workloads: arrivals, lengths, shared prefixes, conversations, texts of exact length."""
