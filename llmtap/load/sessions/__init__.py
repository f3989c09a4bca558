"""Targets other than HTTP requests: Realtime over WebSocket, gRPC."""
