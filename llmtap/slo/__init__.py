"""Objectives for other people's alerting: rules for Prometheus, specifications for Sloth and OpenSLO."""
