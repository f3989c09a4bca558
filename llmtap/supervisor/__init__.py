"""The process that starts, restarts, drains and reloads relays and meter."""
