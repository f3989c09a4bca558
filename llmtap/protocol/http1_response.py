"""Find the head of an HTTP/1 response, and the end of its body, in bytes that are cut at any place. No IO.

For all that read responses from a connection: relay, passive vantage, load generator. Built on `http1.py`.
"""

from llmtap.errors import PeerProtocolError
from llmtap.protocol import http1

# By name: each would be looked up in its class for every response.
NONE, LENGTH = http1.Framing.NONE, http1.Framing.LENGTH


def next_response_head(
    data: bytes, method: bytes, *, bytes_max: int, fields_max: int
) -> tuple[http1.ResponseHead, int] | None:
    """Return the head (1xx, too) at the start of `data` and its end; None if it is incomplete. `method` is
    the request's. Raises PeerProtocolError."""
    end = data.find(b"\r\n\r\n") + 4
    if not 4 <= end <= bytes_max:
        if len(data) > bytes_max or not data.startswith(b"HTTP/1."[: len(data)]):
            raise PeerProtocolError("the response head is malformed or too long", 502)
        return None
    head = http1.parse_response_head(data[:end], method)
    if len(head.headers) > fields_max:
        raise PeerProtocolError("the response head has too many fields", 502)
    return head, end


def begin_response_body(
    head: http1.ResponseHead, data: bytes, start: int
) -> tuple[int, http1.BodyScanner | None]:
    """Return where the body at `start` of `data` ends, or -1 and the scanner that reads on. Raises
    PeerProtocolError."""
    if head.framing is NONE:
        return start, None
    if head.framing is LENGTH and len(data) - start >= head.length:
        return start + head.length, None
    scanner = http1.scanner_for(head.framing, head.length, refused_trailers=http1.FRAMING_TRAILERS)
    found = scanner.feed(data[start:]) if len(data) > start else -1
    return (start + found if found >= 0 else -1), scanner
