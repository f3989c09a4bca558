"""Load targets other than plain HTTP: Responses and Realtime over WebSocket, and gRPC."""
