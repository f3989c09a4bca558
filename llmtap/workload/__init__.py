"""Workloads: which requests are sent, when, and with which prompts."""
