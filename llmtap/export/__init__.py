"""Exports of metrics and spans to other systems: Prometheus and OpenTelemetry."""
