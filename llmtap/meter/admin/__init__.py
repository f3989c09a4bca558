"""Admin port of the meter: `/metrics`, health checks, JSON API, live events, dashboard, access control."""
