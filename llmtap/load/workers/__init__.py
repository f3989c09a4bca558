"""Sending processes, on this machine and on a Ray cluster."""
