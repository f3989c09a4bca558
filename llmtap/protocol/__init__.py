"""Pure parsers: HTTP/1 framing, content encodings, SSE, dialects. No socket, clock, file or log."""
