"""Invariant: a head is read in one way or refused. Long because its tables follow the rules of RFC 9112."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmtap.errors import PeerProtocolError
from llmtap.protocol.http1 import (
    Framing,
    header_value,
    parse_request_head,
    parse_response_head,
)

# ---------------------------------------------------------------- request lines


@pytest.mark.parametrize(
    ("line", "method", "target", "version"),
    [
        (b"GET / HTTP/1.1", b"GET", b"/", (1, 1)),
        (b"GET / HTTP/1.0", b"GET", b"/", (1, 0)),
        (
            b"POST /v1/chat/completions?x=1&y=%7B%22a%22%7D HTTP/1.1",
            b"POST",
            b"/v1/chat/completions?x=1&y=%7B%22a%22%7D",
            (1, 1),
        ),
        (b"GET /a//b/./../c;d=1/%2F%e2%82 HTTP/1.1", b"GET", b"/a//b/./../c;d=1/%2F%e2%82", (1, 1)),
        (b"OPTIONS * HTTP/1.1", b"OPTIONS", b"*", (1, 1)),  # RFC 9112 3.2.4
        (b"GET http://elsewhere.test/x?y HTTP/1.1", b"GET", b"http://elsewhere.test/x?y", (1, 1)),  # 3.2.2
        # RFC 9110 9.1: the list of methods is open, and a method is case-sensitive.
        (b"X-!#$%&'*+.^_`|~09az / HTTP/1.1", b"X-!#$%&'*+.^_`|~09az", b"/", (1, 1)),
    ],
)
def test_a_request_line_is_taken_apart(
    line: bytes, method: bytes, target: bytes, version: tuple[int, int]
) -> None:
    head = parse_request_head(line + b"\r\nHost: a.test\r\n\r\n")
    assert (head.method, head.target, head.version) == (method, target, version)


@pytest.mark.parametrize(
    ("line", "statuses"),
    [
        # RFC 9112 3: one space between the parts, and nothing before the method.
        (b"GET  / HTTP/1.1", {400, 505}),
        (b"GET /  HTTP/1.1", {400, 505}),
        (b"GET\t/ HTTP/1.1", {400}),
        (b" GET / HTTP/1.1", {400}),
        (b"GET /a b HTTP/1.1", {400}),
        (b"GET / HTTP/1.1\r", {400}),
        (b"GET /a\rb HTTP/1.1", {400}),
        (b"GET /\x00 HTTP/1.1", {400}),
        (b"GET /\x80 HTTP/1.1", {400}),
        (b"GET /#top HTTP/1.1", {400}),  # 3.2: a fragment is no part of a target
        (b"GET ?q HTTP/1.1", {400}),
        (b"GET host.test:80 HTTP/1.1", {400}),  # 3.2.3: authority-form is for CONNECT
        (b"G(T / HTTP/1.1", {400}),
        (b"", {400}),
        (b"GET /", {400, 505}),  # HTTP/0.9
        (b"GET / http/1.1", {400}),  # 2.3: the protocol's name is case-sensitive
        (b"GET / HTTP/1", {400}),
        (b"GET / HTTP/2.0", {400, 505}),
        (b"PRI * HTTP/2.0", {505}),  # RFC 9113 3.4
        (b"CONNECT db.internal:22 HTTP/1.1", {405}),  # RFC 9110 9.3.6: a tunnel is not ours to offer
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", {400}),  # a TLS hello
    ],
)
def test_a_malformed_request_line_is_refused(line: bytes, statuses: set[int]) -> None:
    with pytest.raises(PeerProtocolError) as refused:
        parse_request_head(line + b"\r\nHost: a.test\r\n\r\n")
    assert refused.value.status in statuses


# ---------------------------------------------------------------- request fields


def head_with(*lines: bytes, version: bytes = b"1.1", host: bytes | None = b"Host: a.test") -> bytes:
    first = [b"POST /x HTTP/" + version] + ([host] if host is not None else [])
    return b"\r\n".join([*first, *lines, b"", b""])


def test_order_case_and_repeats_of_fields_stay() -> None:
    head = parse_request_head(head_with(b"X-b: 2", b"x-A: 1", b"X-B: 3", b"ACCEPT: */*"))
    assert head.headers == [
        (b"Host", b"a.test"),
        (b"X-b", b"2"),
        (b"x-A", b"1"),
        (b"X-B", b"3"),
        (b"ACCEPT", b"*/*"),
    ]
    assert header_value(head.headers, b"x-b") == b"2"
    assert header_value(head.headers, b"x-c") is None


@pytest.mark.parametrize(
    ("line", "value"),
    [
        (b"X:", b""),  # RFC 9112 5.1: white space around a value is no part of it
        (b"X: ", b""),
        (b"X: \t v", b"v"),
        (b"X: a  b\tc", b"a  b\tc"),
        (b"X: na\xc3\xafve-\xe6\x97\xa5", b"na\xc3\xafve-\xe6\x97\xa5"),  # RFC 9110 5.5: obs-text is opaque
        (b"X: " + b"v" * 8_000, b"v" * 8_000),
    ],
)
def test_a_value_is_kept_byte_for_byte(line: bytes, value: bytes) -> None:
    head = parse_request_head(head_with(line, b"Y: after"))
    assert head.headers[1:] == [(b"X", value), (b"Y", b"after")]


@pytest.mark.parametrize("space", [b" ", b"\t", b" \t "])
def test_white_space_behind_a_value_means_nothing(space: bytes) -> None:
    lines = [b"Connection: close", b"Content-Length: 3", b"Expect: 100-continue", b"Upgrade: websocket"]
    plain, spaced = (parse_request_head(head_with(*(n + s for n in lines))) for s in (b"", space))
    assert [v.rstrip(b" \t") for _, v in spaced.headers] == [v for _, v in plain.headers]
    spaced.headers = plain.headers
    assert spaced == plain


@pytest.mark.parametrize(
    "line",
    [
        b"X : 1",  # RFC 9112 5.1: no white space between name and colon
        b" X: 1",
        b": 1",
        b"X",
        b"X Y: 1",
        b"X(: 1",
        b"X\x00: 1",
        b"X: a\x00b",  # RFC 9110 5.5: CR, LF and NUL are dangerous
        b"X: a\rb",
        b"X: a\nb",
        b"X: a\x7fb",
        b"X: a\r\n folded",  # RFC 9112 5.2: obs-fold
        b"X:\r\n folded",
        b"Host: b.test",  # RFC 9112 3.2: more than one Host
    ],
)
def test_a_malformed_field_is_refused(line: bytes) -> None:
    with pytest.raises(PeerProtocolError) as refused:
        parse_request_head(head_with(line))
    assert refused.value.status == 400


@pytest.mark.parametrize("host", [b"a.test:8080", b"[::1]:8080", b"a_b-c.test", b""])
def test_host_is_one_authority(host: bytes) -> None:
    assert parse_request_head(head_with(host=b"Host: " + host)).headers == [(b"Host", host)]


@pytest.mark.parametrize(
    "host",
    [
        b"a.test/path",
        b"user@a.test",
        b"a.test:80:80",
        b"a.test:x",
        b"a b",
        b"[::1",
        b"a?b",
        b"a#b",
        b"caf\xc3\xa9",
        b'"a"',
    ],
)
def test_any_other_host_is_refused(host: bytes) -> None:
    with pytest.raises(PeerProtocolError) as refused:
        parse_request_head(head_with(host=b"Host: " + host))
    assert refused.value.status == 400


# ---------------------------------------------------------------- request framing


@pytest.mark.parametrize(
    ("lines", "framing", "length"),
    [
        ([], Framing.NONE, 0),  # RFC 9112 6.3 rule 7: a request without either has no body
        ([b"Content-Length: 0"], Framing.NONE, 0),
        ([b"Content-Length: 5"], Framing.LENGTH, 5),
        ([b"Content-Length: 0005"], Framing.LENGTH, 5),
        ([b"Content-Length: 999999999999999999"], Framing.LENGTH, 10**18 - 1),
        ([b"Transfer-Encoding: chunked"], Framing.CHUNKED, 0),
        ([b"transfer-encoding:\tChUnKeD "], Framing.CHUNKED, 0),  # 7: coding names are case-insensitive
        ([b"Content_Length: 5"], Framing.NONE, 0),  # another name altogether
        ([b"X-Content-Length: 5", b"Content-Length-X: 6"], Framing.NONE, 0),
    ],
)
def test_a_requests_framing_is_told_by_its_fields(lines: list[bytes], framing: Framing, length: int) -> None:
    head = parse_request_head(head_with(*lines))
    assert (head.framing, head.length) == (framing, length)


CL, TE = b"Content-Length: ", b"Transfer-Encoding: "


@pytest.mark.parametrize(
    ("lines", "statuses"),
    [
        # RFC 9112 6.3 rule 3: both may be an attempt at request smuggling.
        ([CL + b"4", TE + b"chunked"], {400}),
        ([CL + b"4", TE + b"identity"], {400}),
        # 6.3 rule 5: an invalid Content-Length.
        ([CL + b"3", CL + b"5"], {400}),
        ([CL + b"3", CL + b"3"], {400}),
        ([CL + b"3, 3"], {400}),
        ([CL + b"+3"], {400}),
        ([CL + b"0x3"], {400}),
        ([CL + b"3 4"], {400}),
        ([CL + b"\xb2"], {400}),  # a superscript two in Latin-1
        ([CL], {400}),
        ([CL + b"9999999999999999999"], {400}),
        ([b"Content-Length : 3"], {400}),
        # 6.1 and 6.3 rule 4: 400 when chunked is not the last coding, 501 for one not understood.
        ([TE + b"chunked, gzip"], {400}),
        ([TE + b"identity"], {400, 501}),
        ([TE + b'"chunked"'], {400, 501}),
        ([TE + b"gzip, chunked"], {400, 501}),
        ([TE + b"chunked, chunked"], {400, 501}),
        ([TE], {400, 501}),
        ([TE + b"\x0bchunked"], {400}),
        ([TE + b"chunked\t"], {400}),  # another coding to llhttp
        ([TE + b"chunked", TE + b"chunked"], {400, 501}),
        ([b"Transfer-Encoding : chunked"], {400}),
        ([b"Transfer-Encoding:", b" chunked"], {400}),
        ([b"X: 1\n" + TE + b"chunked"], {400}),
        ([b"X: 1\r" + TE + b"chunked"], {400}),
    ],
)
def test_ambiguous_framing_of_a_request_is_refused(lines: list[bytes], statuses: set[int]) -> None:
    with pytest.raises(PeerProtocolError) as refused:
        parse_request_head(head_with(*lines))
    assert refused.value.status in statuses


@pytest.mark.parametrize(
    ("version", "host", "lines"),
    [(b"1.1", None, []), (b"1.0", b"Host: a.test", [b"Transfer-Encoding: chunked"])],  # RFC 9112 3.2, 6.1
)
def test_what_a_version_forbids_is_refused(version: bytes, host: bytes | None, lines: list[bytes]) -> None:
    with pytest.raises(PeerProtocolError) as refused:
        parse_request_head(head_with(*lines, version=version, host=host))
    assert refused.value.status == 400
    assert parse_request_head(head_with(host=None, version=b"1.0")).headers == []


@pytest.mark.parametrize(
    ("version", "lines", "keep"),
    [
        (b"1.1", [], True),  # RFC 9112 9.3
        (b"1.1", [b"Connection: close"], False),
        (b"1.1", [b"Connection: keep-alive, Close"], False),
        (b"1.1", [b"Connection: x", b"Connection: close"], False),
        (b"1.1", [b"Connection: closed"], True),
        (b"1.0", [], False),
        (b"1.0", [b"Connection: keep-alive"], True),
        (b"1.0", [b"Connection: keep-alive, close"], False),  # 9.3: close counts
    ],
)
def test_persistence_follows_version_and_connection(version: bytes, lines: list[bytes], keep: bool) -> None:
    assert parse_request_head(head_with(*lines, version=version)).keep_alive is keep


@pytest.mark.parametrize(
    ("lines", "upgrade"),
    [
        ([b"Connection: Upgrade", b"Upgrade: websocket"], b"websocket"),
        ([b"Connection: keep-alive, upgrade", b"Upgrade: WebSocket"], b"WebSocket"),
        ([b"Upgrade: websocket"], None),  # RFC 9110 7.8: Connection has to name it
        ([b"Connection: upgrade"], None),
        ([b"Connection: x-upgrade", b"Upgrade: websocket"], None),
    ],
)
def test_an_upgrade_counts_when_connection_names_it(lines: list[bytes], upgrade: bytes | None) -> None:
    assert parse_request_head(head_with(*lines)).upgrade == upgrade


@given(st.binary(max_size=300))
@example(b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n")
def test_any_bytes_are_a_head_or_refused(raw: bytes) -> None:
    raw = raw.replace(b"\r\n\r\n", b"") + b"\r\n\r\n"
    try:
        head = parse_request_head(raw)
    except PeerProtocolError as exc:
        assert exc.status in (400, 405, 501, 505)
    else:
        assert raw.startswith(head.method + b" " + head.target + b" HTTP/1.")


FIELD_BITS = st.lists(
    st.sampled_from(
        [
            b"Content-Length: ",
            b"Transfer-Encoding: ",
            b"Host: ",
            b"Connection: ",
            b"3",
            b"5",
            b"chunked",
            b"gzip",
            b", ",
            b"\r\n",
            b"\r",
            b"\n",
            b" ",
            b"\t",
            b"\x00",
            b":",
            b"X: ",
            b"close",
            b"0",
            b"\x0b",
        ]
    ),
    max_size=14,
)


@settings(max_examples=400)
@given(FIELD_BITS)
def test_what_is_taken_could_not_be_read_otherwise(bits: list[bytes]) -> None:
    """A naive reader that sees more in the same head than we did would be a way to smuggle."""
    raw = b"POST / HTTP/1.1\r\nHost: a\r\n" + b"".join(bits) + b"\r\n\r\n"
    raw = raw[: raw.find(b"\r\n\r\n") + 4]
    try:
        head = parse_request_head(raw)
    except PeerProtocolError:
        return
    assert b"\r" not in raw.replace(b"\r\n", b"")
    assert b"\n" not in raw.replace(b"\r\n", b"")
    assert b"\x00" not in raw
    lines = raw[:-4].split(b"\r\n")[1:]
    assert len(lines) == len(head.headers)
    naive = [(n, v.strip(b" \t")) for n, _, v in (line.partition(b":") for line in lines)]
    assert naive == [(n, v.rstrip(b" \t")) for n, v in head.headers]
    framing = [n.lower() for n, _ in naive if n.lower() in (b"content-length", b"transfer-encoding")]
    assert len(framing) <= 1


# ---------------------------------------------------------------- responses


def answer_with(*lines: bytes, first: bytes = b"HTTP/1.1 200 OK") -> bytes:
    return b"\r\n".join([first, *lines, b"", b""])


@pytest.mark.parametrize(
    ("method", "first", "lines", "framing", "length", "keep"),
    [
        (b"GET", b"HTTP/1.1 200 OK", [b"Content-Length: 5"], Framing.LENGTH, 5, True),
        (b"GET", b"HTTP/1.1 200 OK", [b"Content-Length: 0"], Framing.NONE, 0, True),
        (b"GET", b"HTTP/1.1 200 OK", [b"Transfer-Encoding: chunked"], Framing.CHUNKED, 0, True),
        (b"GET", b"HTTP/1.1 200 OK", [b"Transfer-Encoding: Chunked"], Framing.CHUNKED, 0, True),
        (b"GET", b"HTTP/1.1 200 OK", [], Framing.CLOSE, 0, False),  # RFC 9112 6.3 rule 8
        (b"GET", b"HTTP/1.1 200 OK", [b"Content-Length: 5", b"Connection: close"], Framing.LENGTH, 5, False),
        (b"GET", b"HTTP/1.0 200 OK", [b"Content-Length: 5"], Framing.LENGTH, 5, False),
        (
            b"GET",
            b"HTTP/1.0 200 OK",
            [b"Content-Length: 5", b"Connection: keep-alive"],
            Framing.LENGTH,
            5,
            True,
        ),
        (b"GET", b"HTTP/1.0 200 OK", [], Framing.CLOSE, 0, False),
        # 6.3 rule 1: these have no body, whatever their fields say.
        (b"HEAD", b"HTTP/1.1 200 OK", [b"Content-Length: 1234"], Framing.NONE, 1234, True),
        (b"HEAD", b"HTTP/1.1 200 OK", [b"Transfer-Encoding: chunked"], Framing.NONE, 0, True),
        (b"HEAD", b"HTTP/1.1 200 OK", [], Framing.NONE, 0, True),
        (b"GET", b"HTTP/1.1 204 No Content", [], Framing.NONE, 0, True),
        (b"GET", b"HTTP/1.1 304 Not Modified", [b"Content-Length: 99"], Framing.NONE, 99, True),
        (b"GET", b"HTTP/1.1 100 Continue", [], Framing.NONE, 0, True),
        (b"GET", b"HTTP/1.1 103 Early Hints", [b"Link: </a>"], Framing.NONE, 0, True),
        (
            b"GET",
            b"HTTP/1.1 101 Switching Protocols",
            [b"Connection: upgrade", b"Upgrade: websocket"],
            Framing.NONE,
            0,
            True,
        ),
        (b"GET", b"HTTP/1.1 446 Hooks Failed", [b"Content-Length: 2"], Framing.LENGTH, 2, True),
        (b"GET", b"HTTP/1.1 205 Reset Content", [b"Content-Length: 0"], Framing.NONE, 0, True),
    ],
)
def test_a_responses_framing(
    method: bytes, first: bytes, lines: list[bytes], framing: Framing, length: int, keep: bool
) -> None:
    head = parse_response_head(answer_with(*lines, first=first), method)
    assert (head.framing, head.length, head.keep_alive) == (framing, length, keep)
    assert head.status == int(first.split(b" ")[1])


@pytest.mark.parametrize(
    ("first", "status", "reason"),
    [
        (b"HTTP/1.1 200 OK", 200, b"OK"),
        (b"HTTP/1.1 200 ", 200, b""),  # RFC 9112 4: the reason may be empty
        (b"HTTP/1.1 404 Not  Found", 404, b"Not  Found"),
    ],
)
def test_a_status_line(first: bytes, status: int, reason: bytes) -> None:
    head = parse_response_head(answer_with(b"Content-Length: 0", first=first), b"GET")
    assert (head.status, head.reason) == (status, reason)


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"\r\n\r\n",
        b"HTTP/2.0 200 OK\r\n\r\n",
        b"HTTP/1.1 20 OK\r\n\r\n",
        b"HTTP/1.1 2x0 OK\r\n\r\n",
        b"HTTP/1.1  200 OK\r\n\r\n",
        b"http/1.1 200 OK\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        answer_with(b"Content-Length: 3", b"Content-Length: 5"),
        answer_with(b"Content-Length: -1"),
        answer_with(b"Content-Length: 9999999999999999999"),
        answer_with(b"Content-Length: 3", b"Transfer-Encoding: chunked"),
        answer_with(b"Transfer-Encoding: gzip, chunked"),
        answer_with(b"Transfer-Encoding: chunked, gzip"),
        answer_with(b"Transfer-Encoding: chunked\t"),
        answer_with(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"),
        answer_with(b"Transfer-Encoding: chunked", first=b"HTTP/1.0 200 OK"),  # RFC 9112 6.1
        answer_with(b"X: a\x00b"),
        answer_with(b"X: a\nY: b"),
        answer_with(b"X: a\r\n folded"),
        b"HTTP/1.1 200 OK\nContent-Length: 0\r\n\r\n",
    ],
)
def test_a_malformed_or_ambiguous_response_is_refused(raw: bytes) -> None:
    with pytest.raises(PeerProtocolError) as refused:
        parse_response_head(raw, b"GET")
    # Whoever turns the error's status into an answer must not tell the client that it was at fault.
    assert refused.value.status == 502
