"""Processes that send load, on this machine and on a Ray cluster."""
