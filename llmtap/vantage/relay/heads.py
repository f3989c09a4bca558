"""Write HTTP heads: those forwarded to upstream or client, and the relay's own error answers.

Forwarded fields keep their order and spelling. Hop-by-hop fields (RFC 9110 7.6.1) are removed; `protocol/
http1.py` has already removed those that Connection names. `x-llmtap-label` is removed, because it is meant
for llmtap alone. Host becomes that of the upstream, unless `relay.host` is `client`. Connection and the
fields that the options ask for are added. Framing fields stay, because the body passes with its framing; only
HTTP/1.0 clients get no chunks.
"""

import os
from typing import Final

from llmtap.exchange.label import LABEL_FIELD
from llmtap.native import compiled
from llmtap.net.listener import ERROR_FIELD
from llmtap.protocol.http1 import KEEP_ALIVE, Headers, RequestHead, ResponseHead, header_value
from llmtap.vantage.relay.options import RelayOptions

_PASS, _HOP, _HOST, _TE, _UPGRADE = range(5)
_KINDS: Final = {
    b"connection": _HOP,
    b"keep-alive": _HOP,
    b"proxy-connection": _HOP,
    b"http2-settings": _HOP,
    b"upgrade": _UPGRADE,
    b"te": _TE,
    b"host": _HOST,
    LABEL_FIELD: _HOP,
}
_write_head = None if compiled is None else compiled.write_head
"""Compiled function that writes heads without special cases. If it is None, Python writes all heads."""
_CLOSE_END: Final = b"Connection: close\r\n\r\n"
_PLAIN_CONNECTIONS: Final = ((), KEEP_ALIVE)
"""Values of Connection that name no field, so that no other field must be removed."""

_REASONS: Final = {
    200: b"OK",
    400: b"Bad Request",
    405: b"Method Not Allowed",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    501: b"Not Implemented",
    502: b"Bad Gateway",
    503: b"Service Unavailable",
    504: b"Gateway Timeout",
    505: b"HTTP Version Not Supported",
}


def target_of(head: RequestHead) -> bytes:
    """Return the target in origin form (or `*`), byte for byte as the client wrote its path and query; b"" if
    the target is invalid."""
    target = head.target
    if target.startswith(b"/") or target == b"*":
        return target
    # RFC 9112 3.2.2: a server must accept the absolute form. Its host does not decide the upstream.
    scheme, _, rest = target.partition(b"://")
    authority = _authority_of(target)
    if scheme.lower() not in (b"http", b"https") or not authority.rpartition(b"@")[2]:
        return b""  # RFC 9110 4.2.1: a URI without a host is invalid
    path = rest[len(authority) :]
    if not path and head.method == b"OPTIONS":
        # RFC 9112 3.2.4: OPTIONS without a path asks about the whole server. Its target is `*`.
        return b"*"
    return path if path.startswith(b"/") else b"/" + path


def _authority_of(target: bytes) -> bytes:
    """Return user, host and port of a target in absolute form (RFC 9112 3.2)."""
    return target.partition(b"://")[2].partition(b"/")[0].partition(b"?")[0]


def make_request_id(head: RequestHead) -> bytes:
    """Return a new request id; b"" if the head has one."""
    return b"" if header_value(head.headers, b"x-request-id") is not None else os.urandom(16).hex().encode()


def measured_head(raw: bytes, request_id: bytes) -> bytes:
    """Return a request head for the meter: the client's bytes and, unless it is b"", the X-Request-Id."""
    return b"%bX-Request-Id: %b\r\n\r\n" % (raw[:-2], request_id) if request_id else raw


def added_fields(
    head: RequestHead, options: RelayOptions, address: bytes, request_id: bytes = b""
) -> Headers:
    """Return the fields that are added to a request of the client at `address`.

    `request_id`: new value of X-Request-Id, which is added if the head has none; b"": do not add it.
    """
    extra: Headers = []
    if request_id and header_value(head.headers, b"x-request-id") is None:
        extra.append((b"X-Request-Id", request_id))
    if options.forwarded_for:
        extra.append((b"X-Forwarded-For", address))
    if options.via:
        extra.append((b"Via", b"1.%d llmtap" % head.version[1]))
    return extra


def request_lines(
    head: RequestHead, *, prefix: bytes, authority: bytes | None, upgrade: bool, extra: Headers
) -> bytes:
    """Return the request head for the upstream.

    `authority` replaces the value of Host; None keeps the client's Host, or adds an empty one if it is
    missing (RFC 9112 3.2). `extra` fields are appended, so X-Forwarded-For and Via extend the client's own
    lists (RFC 9110 5.3).
    """
    if (
        _write_head is not None
        and not extra
        and not upgrade
        and head.connection in _PLAIN_CONNECTIONS
        and head.version == (1, 1)  # such a head has a Host field, so no field is added
        and head.target.startswith(b"/")
    ):
        start = b"%b %b%b HTTP/1.1\r\n" % (head.method, prefix, head.target)
        lines: bytes | None = _write_head(start, head.headers, authority, b"\r\n")
        if lines is not None:
            return lines
    return _request_lines_in_python(head, prefix=prefix, authority=authority, upgrade=upgrade, extra=extra)


def _request_lines_in_python(
    head: RequestHead, *, prefix: bytes, authority: bytes | None, upgrade: bool, extra: Headers
) -> bytes:
    """Return the request head for the upstream. Without special cases, compiled code writes the same."""
    target = target_of(head)
    if authority is None and not head.target.startswith((b"/", b"*")):
        # RFC 9112 3.2.2: with the absolute form, use the host of the target.
        authority = _authority_of(head.target).rpartition(b"@")[2]
    if prefix and target != b"*":
        target = prefix + target
    out = [head.method, b" ", target, b" HTTP/1.1\r\n"]
    had_host = had_te = False
    for name, value in head.headers:
        kind = _KINDS.get(name.lower(), _PASS)
        if kind == _PASS:
            out += (name, b": ", value, b"\r\n")
        elif kind == _HOST:
            had_host = True
            out += (name, b": ", value if authority is None else authority, b"\r\n")
        elif kind == _TE and not had_te and b"trailers" in value.lower():
            had_te = True
            out.append(b"Connection: TE\r\nTE: trailers\r\n")
    if not had_host:  # HTTP/1.0 needs no Host, but the request is forwarded as HTTP/1.1, which requires it
        out.insert(4, b"Host: " + (authority or b"") + b"\r\n")
    if upgrade and head.upgrade is not None:
        out += (b"Connection: Upgrade\r\nUpgrade: ", head.upgrade, b"\r\n")
    for name, value in extra:
        out += (name, b": ", value, b"\r\n")
    out.append(b"\r\n")
    return b"".join(out)


def response_lines(head: ResponseHead, *, keep_alive: bool, client_11: bool, dechunk: bool = False) -> bytes:
    """Return the response head for the client. With status 101 or 426, the field Upgrade stays.

    `dechunk` leaves out Transfer-Encoding and Trailer, which HTTP/1.0 does not know (RFC 9112 6.1).
    """
    if (
        _write_head is not None
        and client_11
        and not dechunk
        and head.connection in _PLAIN_CONNECTIONS
        and head.status >= 200
        and head.status not in (204, 426)
    ):
        start = b"HTTP/1.1 %d %b\r\n" % (head.status, head.reason)
        lines: bytes | None = _write_head(start, head.headers, None, b"\r\n" if keep_alive else _CLOSE_END)
        if lines is not None:
            return lines
    return _response_lines_in_python(head, keep_alive=keep_alive, client_11=client_11, dechunk=dechunk)


def _response_lines_in_python(
    head: ResponseHead, *, keep_alive: bool, client_11: bool, dechunk: bool
) -> bytes:
    """Return the response head for the client. Without special cases, compiled code writes the same."""
    out = [b"HTTP/1.1 %d " % head.status, head.reason, b"\r\n"]
    switching = head.status in (101, 426)
    drop: tuple[bytes, ...] = (b"transfer-encoding", b"trailer") if dechunk else ()
    if head.status == 204 or head.status < 200:
        # RFC 9110 8.6, RFC 9112 6.1: such a response has neither of these fields.
        drop = (b"transfer-encoding", b"content-length")
    for name, value in head.headers:
        kind = _KINDS.get(name.lower(), _PASS)
        if kind == _PASS:
            if not drop or name.lower() not in drop:
                out += (name, b": ", value, b"\r\n")
        elif kind == _HOST or (kind == _UPGRADE and switching):
            out += (name, b": ", value, b"\r\n")
    if switching:
        out.append(b"Connection: Upgrade\r\n")
    if head.status >= 200:
        if not keep_alive:
            out.append(b"Connection: close\r\n")
        elif not client_11:
            out.append(b"Connection: keep-alive\r\n")
    out.append(b"\r\n")
    return b"".join(out)


def own_answer(status: int, code: str, message: str, fields: Headers, *, close: bool, body: bool) -> bytes:
    """Return an error answer of the relay itself, in OpenAI's format, with a field that marks it as llmtap's.

    `message` must not contain anything that a client or upstream sent.
    """
    kind = "invalid_request_error" if status < 500 else "api_error"
    text = (
        f'{{"error":{{"message":"llmtap: {message}","type":"{kind}","param":null,"code":"{code}"}}}}'.encode()
    )
    lines = [
        b"HTTP/1.1 %d %b" % (status, _REASONS[status]),
        b"Content-Type: application/json",
        b"Content-Length: %d" % len(text),
        f"{ERROR_FIELD}: {code}".encode(),
    ]
    lines += [name + b": " + value for name, value in fields]
    if close:
        lines.append(b"Connection: close")
    lines.append(b"\r\n")
    return b"\r\n".join(lines) + (text if body else b"")
