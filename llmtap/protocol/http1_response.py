"""Find the head of an HTTP/1 response, and the end of its body, in bytes that are cut at any place. No IO.

Used by the readers of responses: relay, passive vantage and load generator. Built on `http1.py`.
"""

from typing import Final

from llmtap.errors import PeerProtocolError
from llmtap.protocol import http1

# Module-level names save a look-up in the class for every response.
NONE, LENGTH = http1.Framing.NONE, http1.Framing.LENGTH


INTERIM_HEADS_MAX: Final = 64
"""Maximum number of interim (1xx) heads before a final one. Each second of waiting allows one more, because
some servers send a 102 or 103 every few seconds to keep a connection open."""


def is_interim_flood(interims: int, waited_ns: int) -> bool:
    """Return whether a server sent more interim heads than are allowed in this time."""
    return interims > INTERIM_HEADS_MAX + waited_ns // 1_000_000_000


def next_response_head(
    data: bytes, method: bytes, *, bytes_max: int, fields_max: int, interims: int = 0, waited_ns: int = 0
) -> tuple[http1.ResponseHead, int, int] | None:
    """Return the head at the start of `data`, interim or final, with its start and end in `data`; None if it
    is incomplete.

    `method`: method of the request. `interims`: number of interim heads of the same response so far, in
    `waited_ns`. An empty line after an interim head is ignored: some servers send it. Raises
    PeerProtocolError.
    """
    if interims > INTERIM_HEADS_MAX and is_interim_flood(interims, waited_ns):
        raise PeerProtocolError(
            f"the server sent over {INTERIM_HEADS_MAX} interim (1xx) responses before the final one",
            502,
        )
    start = 2 if interims and data.startswith(b"\r\n") else 0
    end = data.find(b"\r\n\r\n", start) + 4
    if not 4 <= end <= bytes_max:
        if data.count(b"\n") > data.count(b"\r\n"):
            raise PeerProtocolError(
                "the response head has bare line feeds, expected CR LF at the end of each line", 502
            )
        line = b"HTTP/1."[: len(data) - start]
        if not (data.startswith(line, start) or (interims and data == b"\r")):
            raise PeerProtocolError(
                "the response does not begin with 'HTTP/1.': is it an HTTP/1.1 server?", 502
            )
        if len(data) > bytes_max:
            raise PeerProtocolError(f"the response head is longer than {bytes_max} bytes, the maximum", 502)
        return None
    head = http1.parse_response_head(data[start:end], method)
    if len(head.headers) > fields_max:
        raise PeerProtocolError(f"the response head has more than {fields_max} fields, the maximum", 502)
    return head, start, end


def begin_response_body(
    head: http1.ResponseHead, data: bytes, start: int
) -> tuple[int, http1.BodyScanner | None]:
    """Return the end in `data` of the body that begins at `start`. If the body is longer: -1, and the scanner
    that finds its end in later reads. Raises PeerProtocolError."""
    if head.framing is NONE:
        return start, None
    if head.framing is LENGTH and len(data) - start >= head.length:
        return start + head.length, None
    scanner = http1.scanner_for(head.framing, head.length, refused_trailers=http1.FRAMING_TRAILERS)
    body_end = scanner.feed(data[start:]) if len(data) > start else -1
    return (start + body_end if body_end >= 0 else -1), scanner
