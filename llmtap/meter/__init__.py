"""The meter (analysis process): builds Exchanges from frames; rolling windows, /metrics and the admin API."""
