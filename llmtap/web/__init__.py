"""The dashboard: a page and its parts, as files. It holds no data and asks the admin API for all it shows."""
