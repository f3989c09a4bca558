"""The analysis plane: builds Exchanges from frames; windows, /metrics and the admin API."""
