"""Spans and metrics by OTLP."""
