"""Workloads: which requests are sent, when, and with which prompts. Generated, of data sets, or of traces."""
