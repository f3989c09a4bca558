"""Exposition of metrics in the formats of Prometheus."""
