"""Recording rules and alerts for Prometheus, made from the configured objectives (`llmtap slo generate`)."""
