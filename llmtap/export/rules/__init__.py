"""Recording rules and alerts for Prometheus, generated from the configured objectives."""
