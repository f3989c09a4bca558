"""Replay a capture, a trace or a workload against a server."""
