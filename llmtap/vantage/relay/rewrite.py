"""What an arm may change about a request: header fields, or top-level fields of its JSON body.

The only place of the relay where a request becomes another one. What is not named stays: header fields keep
order, case and repeats; of the body, every other value keeps its bytes.
"""

from collections.abc import Mapping

import msgspec

from llmtap.protocol.http1 import Headers, RequestHead

__all__ = ["body_with", "headers_with_length", "set_fields"]

_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def set_fields(head: RequestHead, fields: Headers) -> None:
    """Set these header fields: each replaces all of its name, at the end.

    A client that names one in Connection cannot have it left out: RFC 9110 7.6.1 lets it name only its own.
    """
    names = {name.lower() for name, _ in fields}
    head.headers = [(n, v) for n, v in head.headers if n.lower() not in names] + fields
    head.connection = tuple(name for name in head.connection if name not in names)


def headers_with_length(headers: Headers, length: int) -> Headers:
    """The headers of a message whose body has become `length` bytes in one piece.

    RFC 9112 6.2: Content-Length stands in the place of whichever field framed the body before; a
    Trailer field announces nothing any more.
    """
    out: Headers = []
    for name, value in headers:
        lower = name.lower()
        if lower == b"content-length":
            out.append((name, b"%d" % length))
        elif lower == b"transfer-encoding":
            out.append((b"Content-Length", b"%d" % length))
        elif lower != b"trailer":
            out.append((name, value))
    return out


def body_with(body: bytes, fields: Mapping[str, msgspec.Raw]) -> bytes | None:
    """The JSON object in `body` with these fields set, or None when it is none.

    Known fields keep their place, new ones follow; white space between top-level fields is lost, and of a
    field that came twice the last value counts, as for most readers (RFC 8259 4).
    """
    try:
        asked = _decode_fields(body)
    except (ValueError, RecursionError):
        return None
    asked.update(fields)
    return msgspec.json.encode(asked)
