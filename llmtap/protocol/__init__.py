"""Pure parsers: HTTP/1 framing, encodings, SSE, WebSocket, dialects. No socket, clock, file or log."""
