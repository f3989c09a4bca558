"""Exports to other systems: metrics for Prometheus, metrics and spans for OpenTelemetry, alert rules."""
