"""Recording rules and alerts for Prometheus, made from the objectives of the configuration."""
