"""Places where exchanges are seen: the relay, and the middleware inside an app."""
