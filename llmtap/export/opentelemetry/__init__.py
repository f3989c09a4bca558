"""OpenTelemetry: spans of exchanges and metrics, sent by OTLP."""
