"""The process that starts relays and meter, restarts what dies, drains and reloads."""
