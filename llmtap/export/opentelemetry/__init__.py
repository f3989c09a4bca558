"""OpenTelemetry: one span for each exchange, and metrics, sent by OTLP."""
