"""Asyncio sockets without opinions: streams, listeners, the upstream pool, TLS."""
