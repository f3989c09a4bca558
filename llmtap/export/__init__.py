"""Numbers for other systems: the Prometheus exposition."""
