"""Admin port: API, dashboard, access control."""
