"""Bytes to meaning: HTTP/1 framing, content encodings, SSE, dialects. Pure: no socket, clock, file or log."""
