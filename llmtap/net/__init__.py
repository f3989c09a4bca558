"""Asyncio sockets: streams, listeners, the upstream pool, TLS."""
