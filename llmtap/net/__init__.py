"""Networking for relay, load generator and servers: sockets, listeners, connection pool, TLS, timers, Ray."""
