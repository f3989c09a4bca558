"""Exposition of the meter's metrics on `/metrics`: names, counts, and the formats of Prometheus."""
