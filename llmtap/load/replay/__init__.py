"""Replay: a capture, a trace or a workload becomes a schedule, load sends it, the result is told."""
