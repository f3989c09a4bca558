"""Parse HTTP/1.1 heads, and find the end of bodies: strict, incremental, sans-IO.

llhttp (httptools) tokenises heads, and this module applies the rules of framing. An ambiguous head raises
PeerProtocolError, and so does the first malformed byte of a chunked body, so the relay forwards neither of
them. Scanners (relay, load generator) find the end of a body without storing its payload; `ChunkedDecoder`
returns the payload to `exchange/`.

Source: RFC 9110, RFC 9112; comments name the sections.
"""

import re
from enum import Enum
from typing import Final, Protocol

import httptools
import msgspec

from llmtap.errors import PeerProtocolError
from llmtap.native import compiled

Headers = list[tuple[bytes, bytes]]

LENGTH_DIGITS_MAX: Final = 18
"""Maximum number of digits of a Content-Length, so that it fits a signed 64-bit integer."""
SIZE_DIGITS_MAX: Final = 15
"""Maximum number of digits of a chunk size after its leading zeros."""
LINE_BYTES_MAX: Final = 8_192
"""Maximum length of a chunk-size line, or of a trailer line; nginx has the same limit for header lines."""
EXTENSION_BYTES_MAX: Final = 16_384
"""Maximum number of bytes by which the chunk extensions of a body can exceed the payload of their chunks. A
body that consists of extensions would take much time to parse without any payload."""
TRAILER_LINES_MAX: Final = 128
TRAILER_BYTES_MAX: Final = 65_536
"""Maximum length of all trailer lines of a body together, as for a head (`relay.head_bytes`)."""
METHOD_CHARS_MAX: Final = 32

_TOKEN: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_HOST: Final = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[0-9A-Za-z!$&'()*+,;=._~%-]*)(?::[0-9]*)?")
# RFC 9112 7.1.1: chunk-ext = *( BWS ";" BWS token [ BWS "=" BWS ( token / quoted-string ) ] ).
_NAME: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_QUOTED_PART: Final = rb'"(?:[\t \x21\x23-\x5b\x5d-\x7e\x80-\xff]|\\[\t\x20-\x7e\x80-\xff])*'
_SIZE_DIGITS: Final = rb"0*[0-9A-Fa-f]{1,%d}" % SIZE_DIGITS_MAX
_EXTENSIONS: Final = rb'(?:[ \t]*;[ \t]*%b(?:[ \t]*=[ \t]*(?:%b|%b"))?)*' % (_NAME, _NAME, _QUOTED_PART)
_SIZE_LINE: Final = re.compile(rb"(%b)%b\r\n" % (_SIZE_DIGITS, _EXTENSIONS))
_TRAILER_LINE: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*\r\n")
_REASON: Final = re.compile(rb"(?: [\t\x20-\x7e\x80-\xff]*)?")
# `_SIZE_LINE_PART` and `_TRAILER_LINE_PART` match any beginning of a line, because a read can end within it.
_SIZE_LINE_PART: Final = re.compile(
    rb"%b%b(?:\r|[ \t]*(?:;[ \t]*(?:%b[ \t]*(?:=[ \t]*(?:%b\\?)?)?)?)?)"
    % (_SIZE_DIGITS, _EXTENSIONS, _NAME, _QUOTED_PART)
)
_TRAILER_LINE_PART: Final = re.compile(rb"\r|[!#$%&'*+\-.^_`|~0-9A-Za-z]+(?::[\t\x20-\x7e\x80-\xff]*\r?)?")
NO_TRAILERS: Final = frozenset(
    {
        b"api-key",
        b"authorization",
        b"cache-control",
        b"connection",
        b"content-encoding",
        b"content-length",
        b"content-range",
        b"content-type",
        b"cookie",
        b"expect",
        b"forwarded",
        b"host",
        b"keep-alive",
        b"max-forwards",
        b"proxy-authorization",
        b"proxy-connection",
        b"range",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"via",
        b"x-api-key",
        b"x-goog-api-key",
        b"x-real-ip",
    }
)
"""Fields that a request must not have as trailers: framing, routing, control, authentication, content format
(RFC 9110 6.5.1). A recipient that merges trailers into the head would read another request than llmtap."""
NO_TRAILER_WORDS: Final = frozenset(
    {
        b"apikey",
        b"auth",
        b"authentication",
        b"authorization",
        b"cookie",
        b"credential",
        b"credentials",
        b"forwarded",
        b"key",
        b"llm",
        b"mcp",
        b"password",
        b"secret",
        b"session",
        b"tenant",
        b"token",
        b"user",
    }
)
"""A field with one of these words in its name (`x-litellm-api-key`, `X-Forwarded-For`) is also a credential,
an identity or a route, so it must not be a trailer. The words of a name are separated by `-` or `_`."""
FRAMING_TRAILERS: Final = frozenset({b"content-length", b"transfer-encoding"})
"""Fields that must not be trailers: they change the end of the body for a recipient that merges them."""
NEVER_REMOVED: Final = frozenset(
    {
        b"content-encoding",
        b"content-length",
        b"content-type",
        b"host",
        b"keep-alive",
        b"te",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""Fields that stay even if Connection names them: the next hop needs them, or the relay has its own rule."""
_USUAL_METHODS: Final = frozenset({b"GET", b"POST", b"HEAD", b"PUT", b"DELETE", b"OPTIONS", b"PATCH"})
# Kinds of fields by their meaning for framing and routing. `_seen_kinds` caches the kind by the name as sent,
# so that a known name costs one dict access.
_LENGTH, _CODING, _CONNECTION, _HOSTS, _UPGRADE, _EXPECT, _PLAIN = range(7)
_KINDS: Final = {
    b"connection": _CONNECTION,
    b"content-length": _LENGTH,
    b"transfer-encoding": _CODING,
    b"host": _HOSTS,
    b"upgrade": _UPGRADE,
    b"expect": _EXPECT,
}
_seen_kinds: dict[bytes, int] = {}
_seen_hosts: set[bytes] = set()
SEEN_MAX: Final = 1_024
"""Maximum number of entries of `_seen_kinds` and of `_seen_hosts`, so that peers cannot fill the memory."""


def _kind_of(name: bytes) -> int:
    """Return whether a header field is special for the head of a message; the result is cached."""
    kind = _KINDS.get(name.lower(), _PLAIN)
    if len(_seen_kinds) < SEEN_MAX and len(name) <= 64:
        _seen_kinds[name] = kind
    return kind


class Framing(Enum):
    """How the length of a body is known."""

    NONE = 0
    LENGTH = 1
    CHUNKED = 2
    CLOSE = 3


# Module-level names, because access to a member of an Enum costs as much as a small call in Python 3.11.
_NONE, _BY_LENGTH, _CHUNKED, _CLOSE = Framing

# Compiled parsers of plain heads, which need none of the rules below; None without compiled code. They accept
# a subset of the heads that the Python parser accepts, with the same result (tests/native/test_heads.py).
_plain_request = None if compiled is None else compiled.plain_request
_plain_response = None if compiled is None else compiled.plain_response
KEEP_ALIVE: Final = (b"keep-alive",)


class RequestHead(msgspec.Struct):
    """Head of a request. `headers` has no fields that Connection names: these fields end at this hop (RFC
    9110 7.6.1), so the relay does not forward them. llmtap does not read them either, so that it decides by
    the same head as the gateway."""

    method: bytes
    target: bytes
    version: tuple[int, int]
    headers: Headers
    framing: Framing
    """How the length of the body is known."""
    length: int
    """Length of the body if `framing` is LENGTH, else 0."""
    keep_alive: bool
    """Whether the connection can carry another request."""
    connection: tuple[bytes, ...]
    """Options of the Connection field, in lower case."""
    upgrade: bytes | None
    """Protocol to which the client wants to switch; None: to none."""
    expects_continue: bool
    """Whether the client sends the body only after status 100."""


class ResponseHead(msgspec.Struct):
    """Head of a response. `headers`, `length` and `connection` are as in RequestHead."""

    status: int
    reason: bytes
    version: tuple[int, int]
    headers: Headers
    framing: Framing
    """How the length of the body is known."""
    length: int
    keep_alive: bool
    """Whether the connection can carry another request."""
    connection: tuple[bytes, ...]


def header_value(headers: Headers, name: bytes) -> bytes | None:
    for key, value in headers:
        if key.lower() == name:
            return value.strip(b" \t")
    return None


def sole_value(headers: Headers, name: bytes) -> bytes | None:
    """Return the value of a field that identifies the sender; None if the field is absent or ambiguous.

    It is ambiguous if it has several lines with different values: some recipients use the first value, some
    the last, some the joined values (RFC 9110 5.3).
    """
    sole: bytes | None = None
    for key, value in headers:
        if key.lower() == name:
            value = value.strip(b" \t")
            if sole is not None and value != sole:
                return None
            sole = value
    return sole


def spelling_key(name: bytes) -> bytes:
    """Return the same key for names that CGI does not distinguish (RFC 3875 4.1.18), such as `X_Tenant`."""
    return name.lower().replace(b"_", b"-")


def _without_connection_fields(headers: Headers, connection: tuple[bytes, ...]) -> Headers:
    """Return the fields without those that the Connection field names (RFC 9110 7.6.1)."""
    named = frozenset(connection) - NEVER_REMOVED
    return [(n, v) for n, v in headers if n.lower() not in named] if named else headers


class _HeadCollector:
    """Collects the parts of a head that httptools reports."""

    __slots__ = ("headers", "is_complete", "target")

    def __init__(self) -> None:
        self.target = b""
        self.headers: Headers = []
        self.is_complete = False
        """Whether the parser has reached the end of the head."""

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.is_complete = True


def _tokenise_request(raw: bytes, method: bytes) -> _HeadCollector:
    """Return the fields of a request head, split by llhttp."""
    fields = _HeadCollector()
    try:
        try:
            httptools.HttpRequestParser(fields).feed_data(raw)
        except httptools.HttpParserError as exc:
            # HTTP allows any token as the method (RFC 9110 9.1), but llhttp accepts only a fixed list. Let
            # llhttp parse the rest of the head with a usual method.
            if "nvalid method" not in _error_reason(exc):
                raise
            fields = _HeadCollector()
            httptools.HttpRequestParser(fields).feed_data(b"POST" + raw[len(method) :])
    except httptools.HttpParserUpgrade:
        pass  # llhttp raises this after the head of a request for an upgrade, when it has read all fields.
    except httptools.HttpParserError as exc:
        raise PeerProtocolError(f"malformed request head: {_error_reason(exc)}") from None
    if not fields.is_complete:
        raise PeerProtocolError("the request head is incomplete: it must end with an empty line")
    return fields


def parse_request_head(raw: bytes) -> RequestHead:
    """Return the request head in `raw`, which ends with the empty line. Raises PeerProtocolError with the
    status for the client: 400, 405, 501 or 505."""
    if _plain_request is not None and (plain := _plain_request(raw)) is not None:
        method, target, headers, host, length, chunked, keep_alive = plain
        if host not in _seen_hosts:
            _check_host(host)
        framing = _CHUNKED if chunked else _BY_LENGTH if length > 0 else _NONE
        connection = KEEP_ALIVE if keep_alive else ()
        return RequestHead(
            method, target, (1, 1), headers, framing, max(length, 0), True, connection, None, False
        )
    return _parse_request_head(raw)


def _parse_request_head(raw: bytes) -> RequestHead:
    """Parse any request head. For the heads that the compiled parser accepts, the result is the same."""
    method = raw[: raw.find(b" ")]
    if method not in _USUAL_METHODS:
        # RFC 9110 9.1: a method is a token. Check this here, because llhttp skips line ends before it.
        if _TOKEN.fullmatch(method) is None:
            raise PeerProtocolError("the method must be a token (RFC 9110 9.1), such as POST")
        if len(method) > METHOD_CHARS_MAX:
            raise PeerProtocolError(f"the method is over {METHOD_CHARS_MAX} characters, the maximum", 501)
    if raw.startswith(b"PRI * HTTP/2"):  # RFC 9113 3.4: HTTP/2. llhttp would report a malformed head.
        raise PeerProtocolError("HTTP/2 is not supported: use HTTP/1.1", 505)
    if method == b"CONNECT":
        raise PeerProtocolError("the method CONNECT is not supported: this is a reverse proxy", 405)
    fields = _tokenise_request(raw, method)
    target = fields.target
    # Compare the bytes, because llhttp also accepts the protocols ICE/ and RTSP/, and other versions.
    protocol_at = len(method) + 1 + len(target)
    is_11 = raw.startswith(b" HTTP/1.1\r\n", protocol_at)
    if not is_11 and not raw.startswith(b" HTTP/1.0\r\n", protocol_at):
        raise PeerProtocolError("the HTTP version is not supported: use HTTP/1.1 or HTTP/1.0", 505)
    if b"#" in target:
        raise PeerProtocolError("the request target must not have a fragment (RFC 9112 3.2)")

    lengths, codings, options, hosts, upgrades, expectations = _routing_values(fields.headers)
    connection = tuple(options)
    # RFC 9112 3.2: answer 400 to an HTTP/1.1 request without Host, and to any request with two or more.
    if len(hosts) > 1 or (is_11 and not hosts):
        raise PeerProtocolError(f"the request must have exactly one Host field, got {len(hosts)}")
    if hosts and hosts[0] not in _seen_hosts:
        _check_host(hosts[0])
    framing, length = _NONE, 0
    if codings:
        if lengths:
            raise PeerProtocolError("the request has both Content-Length and Transfer-Encoding: send one")
        if not is_11:
            raise PeerProtocolError("an HTTP/1.0 request must not have Transfer-Encoding (RFC 9112 6.1)")
        if len(codings) > 1 or codings[0].lower() != b"chunked":
            raise PeerProtocolError("the request must not have a transfer coding other than chunked", 501)
        framing = _CHUNKED
    elif lengths:
        length = _content_length(lengths)
        if length:
            framing = _BY_LENGTH
    return RequestHead(
        method,
        target,
        (1, 1) if is_11 else (1, 0),
        _without_connection_fields(fields.headers, connection) if connection else fields.headers,
        framing,
        length,
        _stays_open(is_11, connection),
        connection,
        upgrades[-1] if upgrades and b"upgrade" in connection else None,
        bool(expectations) and expectations[-1].lower() == b"100-continue" and b"expect" not in connection,
    )


def _routing_values(headers: Headers, status: int = 400) -> tuple[list[bytes], ...]:
    """Return the lists of values of Content-Length, Transfer-Encoding, Connection (options in lower case),
    Host, Upgrade and Expect. Raises PeerProtocolError with `status`."""
    values: tuple[list[bytes], ...] = ([], [], [], [], [], [])
    for name, value in headers:
        kind = _seen_kinds.get(name, -1)
        if kind < 0:
            kind = _kind_of(name)
        if kind == _PLAIN:
            continue
        if kind == _CODING and b"\t" in value:
            # RFC 9110 5.5 allows a tab around a value, but llhttp does not recognise `chunked` then: refuse
            # it.
            raise PeerProtocolError("the Transfer-Encoding field contains a tab: send only `chunked`", status)
        # RFC 9110 5.5: white space after a value is not part of it, but llhttp returns it.
        value = value.rstrip(b" \t")
        values[kind].extend(_connection_options(value) if kind == _CONNECTION else (value,))
    return values


def _check_host(value: bytes) -> None:
    if _HOST.fullmatch(value) is None:
        raise PeerProtocolError("the Host field must be a host name or address with an optional port")
    if len(_seen_hosts) < SEEN_MAX and len(value) <= 256:
        _seen_hosts.add(value)


def parse_response_head(raw: bytes, method: bytes) -> ResponseHead:
    """Return the response head in `raw`, which ends with the empty line. `method`: that of the request.
    Raises PeerProtocolError (502)."""
    if _plain_response is not None and method != b"HEAD" and (plain := _plain_response(raw)) is not None:
        status, reason, headers, length, chunked, keep_alive = plain
        if chunked:
            framing = _CHUNKED
        elif length < 0:
            framing = _CLOSE
        else:
            framing = _BY_LENGTH if length else _NONE
        connection = KEEP_ALIVE if keep_alive else ()
        return ResponseHead(
            status, reason, (1, 1), headers, framing, max(length, 0), framing is not _CLOSE, connection
        )
    return _parse_response_head(raw, method)


def _parse_response_head(raw: bytes, method: bytes) -> ResponseHead:
    """Parse any response head. For the heads that the compiled parser accepts, the result is the same."""
    fields = _HeadCollector()
    try:
        httptools.HttpResponseParser(fields).feed_data(raw)
    except httptools.HttpParserUpgrade:
        pass
    except httptools.HttpParserError as exc:
        what = _error_reason(exc)
        if raw[9:12] == b"101" and "Upgrade" in what:
            # After a 101 response, llhttp raises HttpParserUpgrade if the response has the fields Connection:
            # Upgrade and Upgrade, else this error.
            what = "status 101 without the fields Connection: Upgrade and Upgrade (RFC 9110 7.8)"
        raise PeerProtocolError(f"malformed response head: {what}", 502) from None
    if not fields.is_complete:
        raise PeerProtocolError("the response head is incomplete: it must end with an empty line", 502)
    is_11 = raw.startswith(b"HTTP/1.1 ")
    if not is_11 and not raw.startswith(b"HTTP/1.0 "):
        got = raw[: raw.find(b" ")].decode("latin-1")
        raise PeerProtocolError(f"expected a response of HTTP/1.1 or HTTP/1.0, got {got!r}", 502)
    headers = fields.headers
    status = int(raw[9:12])  # llhttp accepts only three digits here.
    if status < 100:  # RFC 9110 15: a status code is 100 or above
        raise PeerProtocolError(f"the response status {status} is below 100, expected 100 to 999", 502)
    if _REASON.fullmatch(raw, 12, raw.find(b"\r\n")) is None:
        raise PeerProtocolError("the reason phrase of the response has characters that are not allowed", 502)

    lengths, codings, options, *_ = _routing_values(headers, 502)
    connection = tuple(options)
    if codings:
        if lengths:
            raise PeerProtocolError(
                "the response must not have both Content-Length and Transfer-Encoding", 502
            )
        if not is_11:
            raise PeerProtocolError("an HTTP/1.0 response must not have Transfer-Encoding", 502)
        if len(codings) > 1 or codings[0].lower() != b"chunked":
            raise PeerProtocolError("the response must not have a transfer coding other than chunked", 502)
    length = _content_length(lengths, 502) if lengths else 0
    if method == b"HEAD" or status < 200 or status in (204, 304):
        framing = _NONE
    elif codings:
        framing = _CHUNKED
    elif lengths:
        framing = _BY_LENGTH if length else _NONE
    else:
        framing = _CLOSE
    return ResponseHead(
        status,
        raw[13 : raw.find(b"\r\n")],
        (1, 1) if is_11 else (1, 0),
        _without_connection_fields(headers, connection) if connection else headers,
        framing,
        length,
        framing is not _CLOSE and _stays_open(is_11, connection),
        connection,
    )


def _error_reason(exc: Exception) -> str:
    return str(exc) or type(exc).__name__


def _connection_options(value: bytes) -> list[bytes]:
    return [o for part in value.lower().split(b",") if (o := part.strip(b" \t"))]


def _stays_open(is_11: bool, connection: tuple[bytes, ...]) -> bool:
    """Return whether the connection can carry another request."""
    # RFC 9112 9.3: `close` decides first. Otherwise HTTP/1.1 stays open, and HTTP/1.0 only with `keep-alive`.
    return b"close" not in connection and (is_11 or b"keep-alive" in connection)


def _content_length(values: list[bytes], status: int = 400) -> int:
    # RFC 9110 8.6 allows merging equal values. Refuse them, because recipients read them differently.
    value = values[0]
    if len(values) > 1 or not value.isdigit() or not value.isascii() or len(value) > LENGTH_DIGITS_MAX:
        problem = f"expected one Content-Length with at most {LENGTH_DIGITS_MAX} digits"
        raise PeerProtocolError(problem, status)
    return int(value)


class BodyScanner(Protocol):
    """Finds the end of a body."""

    def feed(self, data: bytes) -> int:
        """Scan the next bytes. Return -1 if the body continues, else the offset in `data` of its end."""
        ...


class LengthScanner:
    """Scanner of a body with a Content-Length."""

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left
        """Number of bytes of the body that have not arrived."""

    def feed(self, data: bytes) -> int:
        left = self.left - len(data)
        if left > 0:
            self.left = left
            return -1
        self.left = 0
        return len(data) + left


class CloseScanner:
    """Scanner of a body that ends when the connection closes."""

    __slots__ = ()

    def feed(self, data: bytes) -> int:
        return -1


_SIZES: dict[bytes, int] = {}
"""Cache of sizes by chunk-size line without extensions. A stream of tokens repeats a few dozen of them."""
_SIZES_MAX: Final = 4_096


class ChunkedScanner:
    """Scanner of a chunked body with its trailers (RFC 9112 7.1). Each line must end in CR LF. If a read ends
    in a line, the part so far is checked, so that no byte of a malformed line is forwarded. `refused`: names
    of refused trailers, as `spelling_key` returns them. `refused_words`: words that refused trailers have in
    their names."""

    __slots__ = (
        "_extension_excess_bytes",
        "_refused_names",
        "_refused_words",
        "_trailer_bytes",
        "left",
        "line_part",
        "trailer_lines",
        "trailers",
    )

    def __init__(
        self,
        trailers: list[bytes] | None = None,
        *,
        refused: frozenset[bytes] = frozenset(),
        refused_words: frozenset[bytes] = frozenset(),
    ) -> None:
        self._refused_names = refused
        """Names that no trailer may have."""
        self._refused_words = refused_words
        """Words that no trailer name may contain."""
        self._extension_excess_bytes = 0
        """Number of bytes by which the chunk extensions exceed the payload of their chunks."""
        self._trailer_bytes = 0
        """Size of all trailers so far, for a limit."""
        self.trailers = trailers
        self.left = 0
        """Number of bytes that remain of the current chunk, including its CR LF."""
        self.line_part = b""
        """First part of a line, if the previous read ended in a line."""
        self.trailer_lines = -1
        """Number of trailer lines so far; -1 before the last chunk."""

    @property
    def is_between_chunks(self) -> bool:
        return not (self.left or self.line_part) and self.trailer_lines < 0

    def whole_chunk_payload(self, data: bytes) -> bytes:
        """Return the payload if `data` is one whole chunk with a cached size line; else b"": call `feed`."""
        if not self.is_between_chunks:
            return b""
        start = data.find(b"\n") + 1
        size = _SIZES.get(data[:start], 0)
        if size and start + size + 2 == len(data) and data.endswith(b"\r\n"):
            return data[start:-2]
        return b""

    def feed(self, data: bytes, pieces: list[bytes] | None = None) -> int:
        """Scan as `BodyScanner.feed`, and append the payload to `pieces`. Raises PeerProtocolError."""
        at, end, left = 0, len(data), self.left
        while True:
            if left:
                if left > end - at:
                    if pieces is not None and left > 2:
                        pieces.append(data[at : min(end, at + left - 2)])
                    left -= end - at
                    if left == 1 and data[-1:] != b"\r" and end > at:
                        raise PeerProtocolError("a chunk must have the length of its size line, then CR LF")
                    self.left = left
                    return -1
                stop = at + left
                if data[max(at, stop - 2) : stop] != b"\r\n"[-left:]:
                    raise PeerProtocolError("a chunk must have the length of its size line, then CR LF")
                if pieces is not None and left > 2:
                    pieces.append(data[at : stop - 2])
                at = stop
                left = 0
            if at == end:
                self.left = 0
                return -1
            stop = data.find(b"\n", at) + 1
            if not stop:
                self.line_part += data[at:]
                if len(self.line_part) > LINE_BYTES_MAX:
                    raise PeerProtocolError(
                        f"a line between chunks has over {LINE_BYTES_MAX} bytes, the maximum"
                    )
                self._check_line_part(self.line_part)
                self.left = 0
                return -1
            line = data[at:stop]
            if self.line_part:
                line = self.line_part + line
                self.line_part = b""
            at = stop
            if self.trailer_lines >= 0:
                if line == b"\r\n":
                    return at
                self.trailer_lines += 1
                if _TRAILER_LINE.fullmatch(line) is None or len(line) > LINE_BYTES_MAX:
                    raise PeerProtocolError(
                        f"expected a trailer `NAME: VALUE` of up to {LINE_BYTES_MAX} bytes, got {len(line)}"
                    )
                self._trailer_bytes += len(line)
                if self.trailer_lines > TRAILER_LINES_MAX or self._trailer_bytes > TRAILER_BYTES_MAX:
                    limits = f"{TRAILER_LINES_MAX} lines or {TRAILER_BYTES_MAX} bytes"
                    raise PeerProtocolError(f"the trailer section has more than {limits}, the maximum")
                self._check_trailer_name(line)
                if self.trailers is not None:
                    self.trailers.append(line)
                continue
            size = _SIZES.get(line, -1)
            if size < 0:
                if len(line) > LINE_BYTES_MAX:
                    raise PeerProtocolError(f"a chunk size line has over {LINE_BYTES_MAX} bytes, the maximum")
                size = self._size_of(line)
            if not size:
                self.trailer_lines = 0
                continue
            left = size + 2
            stop = at + left
            if stop <= end and data.startswith(b"\r\n", stop - 2):
                if pieces is not None:
                    pieces.append(data[at : stop - 2])
                at, left = stop, 0

    def _size_of(self, line: bytes) -> int:
        m = _SIZE_LINE.fullmatch(line)
        if m is None:
            raise PeerProtocolError(f"expected a hexadecimal chunk size, got {len(line)} other bytes")
        size = int(m[1], 16)
        extension = len(line) - m.end(1) - 2
        if extension:
            self._extension_excess_bytes = max(0, self._extension_excess_bytes + extension - size)
            if self._extension_excess_bytes > EXTENSION_BYTES_MAX:
                raise PeerProtocolError(
                    f"chunk extensions may exceed the payload by at most {EXTENSION_BYTES_MAX} bytes"
                )
        elif len(line) <= 10 and len(_SIZES) < _SIZES_MAX:
            _SIZES[line] = size
        return size

    def _check_line_part(self, line: bytes) -> None:
        if self.trailer_lines < 0:
            if _SIZE_LINE_PART.fullmatch(line) is None:
                raise PeerProtocolError(f"expected a hexadecimal chunk size, got {len(line)} other bytes")
            return
        if _TRAILER_LINE_PART.fullmatch(line) is None:
            raise PeerProtocolError("a trailer line is malformed: expected `NAME: VALUE`")
        self._check_trailer_name(line)

    def _check_trailer_name(self, line: bytes) -> None:
        """Raise PeerProtocolError if the trailer in `line` is refused. The end of the line can be missing."""
        name, colon, _ = line.partition(b":")
        if self._refused_names and colon:
            name = spelling_key(name)
            if name in self._refused_names or not self._refused_words.isdisjoint(name.split(b"-")):
                raise PeerProtocolError("the trailer section has a field that belongs in the head")


class ChunkedDecoder:
    """Decoder of a chunked body."""

    __slots__ = ("_scanner", "done", "trailers")

    def __init__(self) -> None:
        self.trailers: list[bytes] = []
        """Lines of the trailer section as received, at most `TRAILER_LINES_MAX`."""
        self._scanner = ChunkedScanner(self.trailers)
        self.done = False
        """Whether the body has ended."""

    @property
    def is_between_chunks(self) -> bool:
        return self._scanner.is_between_chunks

    def feed(self, data: bytes) -> bytes:
        payload = self._scanner.whole_chunk_payload(data)
        if payload or self.done:
            return payload
        pieces: list[bytes] = []
        self.done = self._scanner.feed(data, pieces) >= 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def scanner_for(
    framing: Framing,
    length: int,
    *,
    refused_trailers: frozenset[bytes] = frozenset(),
    refused_words: frozenset[bytes] = frozenset(),
) -> BodyScanner:
    if framing is _CHUNKED:
        return ChunkedScanner(refused=refused_trailers, refused_words=refused_words)
    return LengthScanner(length) if framing is _BY_LENGTH else CloseScanner()
