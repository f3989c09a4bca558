"""Targets that are no plain HTTP: Realtime over WebSocket, gRPC."""
