"""Heads on their way through: what stays as it was, what stops at this hop, what is added."""

import json

import pytest

from llmtap.errors import PeerProtocolError
from llmtap.protocol.http1 import RequestHead, parse_request_head, parse_response_head
from llmtap.vantage.relay.heads import (
    added_fields,
    make_request_id,
    measured_head,
    own_answer,
    request_lines,
    response_lines,
    target_of,
)
from llmtap.vantage.relay.options import RelayOptions
from tests.support.servers.proxy import stage
from tests.support.servers.raw_client import request
from tests.support.servers.upstream import answers, upstream

GATEWAY = b"Host: gw.test:80"
HTTP10 = b"GET /x HTTP/1.0"


def asked(
    *lines: bytes, first: bytes = b"GET /x HTTP/1.1", host: bytes | None = b"Host: a.test"
) -> RequestHead:
    fields = [host, *lines] if host is not None else list(lines)
    return parse_request_head(b"\r\n".join([first, *fields, b"", b""]))


def sent_on(
    head: RequestHead,
    *,
    prefix: bytes = b"",
    authority: bytes | None = b"gw.test:80",
    upgrade: bool = False,
    extra: list[tuple[bytes, bytes]] | None = None,
) -> list[bytes]:
    raw = request_lines(head, prefix=prefix, authority=authority, upgrade=upgrade, extra=extra or [])
    assert raw.endswith(b"\r\n\r\n")
    return raw.removesuffix(b"\r\n\r\n").split(b"\r\n")


def answered(
    *lines: bytes,
    first: bytes = b"HTTP/1.1 200 OK",
    keep_alive: bool = True,
    client_11: bool = True,
    dechunk: bool = False,
) -> list[bytes]:
    head = parse_response_head(b"\r\n".join([first, *lines, b"", b""]), b"GET")
    raw = response_lines(head, keep_alive=keep_alive, client_11=client_11, dechunk=dechunk)
    assert raw.endswith(b"\r\n\r\n")
    return raw.removesuffix(b"\r\n\r\n").split(b"\r\n")


# ---------------------------------------------------------------- requests

ORDINARY = [b"X-b: 2", b"x-A: 1", b"X-b: 3", b"Content-Length: 5", b"X-Empty: "]
NEEDED = [b"Content-Length: 5", b"Content-Type: text/plain"]


@pytest.mark.parametrize(
    ("lines", "passed"),
    [
        (ORDINARY, ORDINARY),
        # RFC 9110 7.6.1: fields for this hop, named by Connection or not.
        ([b"Connection: close"], []),
        ([b"Connection: keep-alive", b"Keep-Alive: timeout=5"], []),
        ([b"keep-alive: timeout=5"], []),
        ([b"Proxy-Connection: keep-alive"], []),
        ([b"Connection: X-HOP , close", b"x-hop: 1", b"X-Hop: 2"], []),
        ([b"connection: x-a", b"Connection: x-b", b"X-A: 1", b"X-B: 1"], []),
        ([b"Connection: upgrade", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk"], []),
        ([b"Upgrade: websocket"], []),
        ([b"TE: gzip"], []),
        # Connection cannot take away what the message needs.
        ([b"Connection: host, content-length, content-type, transfer-encoding", *NEEDED], NEEDED),
        # RFC 9110 10.1.4: TE is for one hop, so it is repeated with the Connection option that it needs.
        ([b"TE: trailers, deflate;q=0.5", b"Connection: TE"], [b"Connection: TE", b"TE: trailers"]),
        # The label is for llmtap, with any value and spelling of its letters.
        ([b"x-llmtap-label: should-refuse", b"X-a: 1"], [b"X-a: 1"]),
        ([b"X-LLMTAP-Label: x", b"X-Llmtap-Label: y"], []),
        ([b"x_llmtap_label: x", b"X-Llmtap-Labels: y"], [b"x_llmtap_label: x", b"X-Llmtap-Labels: y"]),
        # Names are remembered as sent; those of one message must not change another.
        ([b"X-Thing: 1", b"Connection: x-thing"], []),
        ([b"X-Thing: 1"], [b"X-Thing: 1"]),
    ],
)
def test_fields_of_a_request(lines: list[bytes], passed: list[bytes]) -> None:
    assert sent_on(asked(*lines)) == [b"GET /x HTTP/1.1", GATEWAY, *passed]


def test_an_upgrade_that_is_wanted_is_said_anew() -> None:
    head = asked(b"Connection: keep-alive, Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Key: k")
    assert sent_on(head, upgrade=True)[2:] == [
        b"Sec-WebSocket-Key: k",
        b"Connection: Upgrade",
        b"Upgrade: websocket",
    ]
    assert sent_on(head, upgrade=False)[2:] == [b"Sec-WebSocket-Key: k"]


@pytest.mark.parametrize(
    ("first", "host", "authority", "expected"),
    [
        (b"GET /x HTTP/1.1", b"Host: a.test", None, b"Host: a.test"),
        (HTTP10, None, b"gw.test:80", GATEWAY),
        (HTTP10, b"Host: a.test", b"gw.test:80", GATEWAY),
        # RFC 9112 3.2 and 3.2.2: the authority of an absolute form without its userinfo.
        (b"GET http://user:pw@real.test:81/x HTTP/1.1", b"Host: a.test", None, b"Host: real.test:81"),
        (b"GET http://user:pw@real.test:81/x HTTP/1.1", b"Host: a.test", b"gw.test:80", GATEWAY),
    ],
)
def test_the_host_of_a_request(
    first: bytes, host: bytes | None, authority: bytes | None, expected: bytes
) -> None:
    assert sent_on(asked(b"X: 1", first=first, host=host), authority=authority) == [
        b"GET /x HTTP/1.1",
        expected,
        b"X: 1",
    ]


def test_an_http11_request_always_has_a_host() -> None:
    """RFC 9112 3.2: also when the client's own is kept and an HTTP/1.0 client sent none."""
    lines = sent_on(asked(first=HTTP10, host=None), authority=None)
    assert [line for line in lines if line.lower().startswith(b"host:")] != []


@pytest.mark.parametrize(
    ("lines", "makes"),
    [([], True), ([b"X-Request-ID: r"], False), ([b"X-Request-Id: r", b"Connection: X-Request-Id"], True)],
)
def test_a_request_id_is_made_where_none_reaches_the_upstream(lines: list[bytes], makes: bool) -> None:
    first, second = (make_request_id(asked(*lines)) for _ in range(2))
    assert (bool(first), first != second) == (makes, makes)
    assert added_fields(asked(*lines), RelayOptions(), b"") == []
    added = added_fields(asked(*lines), RelayOptions(), b"", b"made")
    assert added == [(b"X-Request-Id", b"made")] * makes


def test_the_meter_gets_a_request_head_with_the_made_id() -> None:
    raw = b"POST /x HTTP/1.1\r\nHost: a\r\n\r\n"
    assert measured_head(raw, b"") == raw
    assert measured_head(raw, b"made") == b"POST /x HTTP/1.1\r\nHost: a\r\nX-Request-Id: made\r\n\r\n"


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_via_and_forwarded_for_name_the_client_and_stand_at_the_end(version: bytes) -> None:
    head = asked(b"Via: 1.0 first", b"X-Forwarded-For: 10.0.0.1", first=b"GET /x HTTP/" + version)
    extra = added_fields(head, RelayOptions(via=True, forwarded_for=True), b"::1")
    assert extra == [(b"X-Forwarded-For", b"::1"), (b"Via", version + b" llmtap")]
    assert sent_on(head, extra=extra)[2:] == [
        b"Via: 1.0 first",
        b"X-Forwarded-For: 10.0.0.1",
        b"X-Forwarded-For: ::1",
        b"Via: %b llmtap" % version,
    ]


@pytest.mark.parametrize(
    ("target", "origin_form"),
    [
        (b"/a//b/../%2F?x=1&&", b"/a//b/../%2F?x=1&&"),
        (b"//double", b"//double"),
        # RFC 9112 3.2.2: the absolute form is understood, where it points to is not followed.
        (b"http://other.test/p?q", b"/p?q"),
        (b"HTTPS://other.test:1/p", b"/p"),
        (b"http://other.test", b"/"),
        (b"http://other.test?q=/p", b"/?q=/p"),
        (b"http://user:pw@other.test/p", b"/p"),
        (b"ftp://other.test/p", b""),
        (b"*x", b""),  # RFC 9112 3.2: none of the four forms
        (b"http:///x", b""),  # RFC 9110 4.2.1: a recipient MUST reject an empty host
    ],
)
def test_the_target_in_origin_form(target: bytes, origin_form: bytes) -> None:
    try:
        head = asked(first=b"GET " + target + b" HTTP/1.1")
    except PeerProtocolError:
        assert origin_form == b""
        return
    assert target_of(head) == origin_form


@pytest.mark.parametrize(
    ("first", "line"),
    [
        (b"OPTIONS * HTTP/1.1", b"OPTIONS * HTTP/1.1"),
        # RFC 9112 3.2.4: the last proxy MUST send "*" when the URI has neither path nor query.
        (b"OPTIONS http://a.test HTTP/1.1", b"OPTIONS * HTTP/1.1"),
        (b"OPTIONS http://a.test/ HTTP/1.1", b"OPTIONS /base/ HTTP/1.1"),
        (b"GET /x?y HTTP/1.1", b"GET /base/x?y HTTP/1.1"),
        (b"GET http://a.test?y HTTP/1.1", b"GET /base/?y HTTP/1.1"),
    ],
)
def test_a_prefix_stands_before_the_path_and_before_no_asterisk(first: bytes, line: bytes) -> None:
    assert sent_on(asked(first=first), prefix=b"/base")[0] == line


# ---------------------------------------------------------------- responses

OK = b"HTTP/1.1 200 OK"
EARLY = b"HTTP/1.1 103 Early Hints"
SWITCH = b"HTTP/1.1 101 Switching Protocols"
COOKIES = [b"Content-Length: 5", b"Set-Cookie: a=1", b"x-A: 1", b"set-cookie: b=2", b"Host: odd"]
CODED = [b"Transfer-Encoding: chunked", b"Trailer: X-T", b"X: 1"]
STAY = [b"Content-Length: 0", b"X-Stay: 1"]
CLOSES = b"Connection: close"


@pytest.mark.parametrize(
    ("first", "lines", "how", "expected"),
    [
        (OK, COOKIES, {}, [OK, *COOKIES]),
        (OK, [b"Connection: close", *STAY], {}, [OK, *STAY]),
        (OK, [b"Connection: keep-alive", b"Keep-Alive: timeout=5, max=9", *STAY], {}, [OK, *STAY]),
        (OK, [b"Keep-Alive: timeout=5", *STAY], {}, [OK, *STAY]),
        (OK, [b"Connection: x-hop", b"X-Hop: 1", *STAY], {}, [OK, *STAY]),
        (OK, [b"Proxy-Connection: close", *STAY], {}, [OK, *STAY]),
        # RFC 9110 6.2: an intermediary sends its own version.
        (b"HTTP/1.0 404 Gone  Fishing", STAY, {}, [b"HTTP/1.1 404 Gone  Fishing", *STAY]),
        # Persistence is said where it is not the version's own.
        (OK, STAY, {"keep_alive": False}, [OK, *STAY, CLOSES]),
        (OK, STAY, {"client_11": False}, [OK, *STAY, b"Connection: keep-alive"]),
        (OK, STAY, {"keep_alive": False, "client_11": False}, [OK, *STAY, CLOSES]),
        (EARLY, [b"Link: </a>"], {"keep_alive": False}, [EARLY, b"Link: </a>"]),
        (
            SWITCH,
            [b"Upgrade: websocket", b"Connection: upgrade", b"X: 1"],
            {},
            [SWITCH, b"Upgrade: websocket", b"X: 1", b"Connection: Upgrade"],
        ),
        (OK, CODED, {"dechunk": True, "keep_alive": False}, [OK, b"X: 1", CLOSES]),
    ],
)
def test_the_head_of_an_answer(
    first: bytes, lines: list[bytes], how: dict[str, bool], expected: list[bytes]
) -> None:
    assert answered(*lines, first=first, **how) == expected


def test_426_says_what_to_upgrade_to() -> None:
    """RFC 9110 15.5.22: a server MUST send Upgrade in a 426."""
    first = b"HTTP/1.1 426 Upgrade Required"
    lines = answered(b"Upgrade: websocket", b"Connection: upgrade", b"Content-Length: 0", first=first)
    assert b"Upgrade: websocket" in lines


@pytest.mark.parametrize(("status", "kind"), [(400, "invalid_request_error"), (503, "api_error")])
def test_our_own_answer_is_in_openais_form(status: int, kind: str) -> None:
    raw = own_answer(status, "some_code", "what happened", [(b"Retry-After", b"1")], close=True, body=True)
    head, _, body = raw.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0].startswith(b"HTTP/1.1 %d " % status)
    assert lines[1:] == [
        b"Content-Type: application/json",
        b"Content-Length: %d" % len(body),
        b"X-Llmtap-Error: some_code",
        b"Retry-After: 1",
        b"Connection: close",
    ]
    said = {"message": "llmtap: what happened", "type": kind, "param": None, "code": "some_code"}
    assert json.loads(body) == {"error": said}


def test_our_own_answer_to_head_has_no_body_but_its_length() -> None:
    raw = own_answer(502, "c", "m", [], close=False, body=False)
    assert raw.endswith(b"\r\n\r\n") and b"Connection" not in raw
    assert own_answer(502, "c", "m", [], close=False, body=True).startswith(raw)


# ---------------------------------------------------------------- through a relay


@pytest.mark.parametrize("method", ["PROPFIND", "get", "M-SEARCH"])
@pytest.mark.parametrize(
    "tail", ["/%2Fa%20b//c/./d/../e;x=1?q=%7B%22a%22%3A1%7D&y=a+b&&", "?" + "a" * 7_000, '/|^`{}"<>[]\\']
)
async def test_method_and_target_arrive_byte_for_byte(tail: str, method: str) -> None:
    async with stage() as (up, tap):
        path = up.on(answers())
        assert (await tap.ask(request(method, path + tail, body=b"b"))).status == 200
        call = up.call(path)
        assert (call.method, call.target) == (method.encode(), (path + tail).encode())


async def test_neither_connect_nor_the_absolute_form_leads_elsewhere() -> None:
    async with upstream() as elsewhere, stage() as (up, tap):
        target = f"127.0.0.1:{elsewhere.port}"
        client = await tap.client()
        assert (await client.ask(request("CONNECT", target, host=target))).status == 405
        assert (await client.to_end())[0] == b""
        path = up.on(answers(b"mine"))
        assert (await tap.ask(request("GET", f"http://{target}{path}", host=target))).data == b"mine"
        assert elsewhere.connections == 0


@pytest.mark.parametrize(
    ("method", "value", "passed"),
    [
        ("OPTIONS", "5", "4"),
        ("TRACE", "10 ", "9"),
        ("TRACE", "1", "0"),
        ("GET", "5", "5"),
        ("GET", "0", "0"),
        ("OPTIONS", "0", None),
        ("TRACE", "00", None),
        ("TRACE", "\t0", None),
        ("TRACE", "x", "x"),
        ("OPTIONS", "-1", "-1"),
        ("OPTIONS", "9" * 5_000, "9" * 5_000),
    ],
)
async def test_max_forwards_counts_down_to_an_answer_of_our_own(
    method: str, value: str, passed: str | None
) -> None:
    """RFC 9110 7.6.2: each intermediary MUST decrement it, for OPTIONS and TRACE."""
    async with stage() as (up, tap):
        path = up.on(answers())
        answer = await tap.ask(request(method, path, f"Max-Forwards: {value}"))
        if passed is None:
            assert answer.status == (200 if method == "OPTIONS" else 405)
            assert up.calls == []
        else:
            assert up.call(path).head.get("max-forwards") == passed.encode()
