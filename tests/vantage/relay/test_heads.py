"""Heads on their way through: what stays as it was, what stops at this hop, what is added."""

import json

import pytest

from llmtap.errors import PeerProtocolError
from llmtap.protocol.http1 import RequestHead, parse_request_head, parse_response_head
from llmtap.vantage.relay.heads import added_fields, own_answer, request_lines, response_lines, target_of
from llmtap.vantage.relay.options import RelayOptions
from tests.support.servers.peer import scene
from tests.support.servers.proxy import stage
from tests.support.servers.raw_client import request
from tests.support.servers.upstream import answers, says, upstream


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
    method: bytes = b"GET",
    keep_alive: bool = True,
    client_11: bool = True,
    dechunk: bool = False,
) -> list[bytes]:
    head = parse_response_head(b"\r\n".join([first, *lines, b"", b""]), method)
    raw = response_lines(head, keep_alive=keep_alive, client_11=client_11, dechunk=dechunk)
    assert raw.endswith(b"\r\n\r\n")
    return raw.removesuffix(b"\r\n\r\n").split(b"\r\n")


# ---------------------------------------------------------------- requests


def test_an_ordinary_request_changes_in_its_host_only() -> None:
    head = asked(
        b"X-b: 2", b"x-A: 1", b"X-b: 3", b"Content-Length: 5", b"X-Empty:", first=b"POST /v1?q HTTP/1.1"
    )
    assert sent_on(head) == [
        b"POST /v1?q HTTP/1.1", b"Host: gw.test:80", b"X-b: 2", b"x-A: 1", b"X-b: 3", b"Content-Length: 5",
        b"X-Empty: ",
    ]  # fmt: skip


def test_the_clients_host_may_be_kept() -> None:
    assert sent_on(asked(), authority=None) == [b"GET /x HTTP/1.1", b"Host: a.test"]


@pytest.mark.parametrize(
    "lines",
    [
        [b"Connection: close"],
        [b"Connection: keep-alive", b"Keep-Alive: timeout=5"],
        [b"keep-alive: timeout=5"],  # whether Connection names it or not
        [b"Proxy-Connection: keep-alive"],
        [b"Connection: x-hop", b"X-Hop: 1"],
        [b"Connection: X-HOP , close", b"x-hop: 1", b"X-Hop: 2"],
        [b"connection: x-a", b"Connection: x-b", b"X-A: 1", b"X-B: 1"],
        [b"Connection: upgrade", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk"],
        [b"Upgrade: websocket"],
        [b"TE: gzip"],
    ],
)
def test_what_is_for_this_hop_stops_here(lines: list[bytes]) -> None:
    """RFC 9110 7.6.1."""
    head = asked(*lines, b"X-Stay: 1")
    assert sent_on(head) == [b"GET /x HTTP/1.1", b"Host: gw.test:80", b"X-Stay: 1"]


def test_connection_cannot_take_away_what_the_message_needs() -> None:
    lines = [b"Content-Length: 5", b"Content-Type: text/plain"]
    head = asked(b"Connection: host, content-length, content-type, transfer-encoding", *lines)
    assert sent_on(head)[1:] == [b"Host: gw.test:80", *lines]


def test_trailers_are_wanted_of_the_upstream_too() -> None:
    # RFC 9110 10.1.4: TE is for one hop, so it is said anew, with the Connection option it needs.
    assert sent_on(asked(b"TE: trailers, deflate;q=0.5", b"Connection: TE"))[2:] == [
        b"Connection: TE", b"TE: trailers",
    ]  # fmt: skip


def test_an_upgrade_that_is_wanted_is_said_anew() -> None:
    head = asked(b"Connection: keep-alive, Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Key: k")
    assert sent_on(head, upgrade=True)[2:] == [
        b"Sec-WebSocket-Key: k", b"Connection: Upgrade", b"Upgrade: websocket",
    ]  # fmt: skip
    assert sent_on(head, upgrade=False)[2:] == [b"Sec-WebSocket-Key: k"]


def test_an_http10_request_goes_on_as_http11_with_a_host() -> None:
    head = asked(b"X: 1", first=b"GET /x HTTP/1.0", host=None)
    assert sent_on(head) == [b"GET /x HTTP/1.1", b"Host: gw.test:80", b"X: 1"]
    with_host = asked(b"X: 1", first=b"GET /x HTTP/1.0")
    assert sent_on(with_host) == [b"GET /x HTTP/1.1", b"Host: gw.test:80", b"X: 1"]


def test_an_http11_request_always_has_a_host() -> None:
    """RFC 9112 3.2: also when the client's own is kept and an HTTP/1.0 client sent none."""
    lines = sent_on(asked(first=b"GET /x HTTP/1.0", host=None), authority=None)
    assert [line for line in lines if line.lower().startswith(b"host:")] != []


@pytest.mark.parametrize(
    ("lines", "makes"),
    [([], True), ([b"X-Request-ID: r"], False), ([b"X-Request-Id: r", b"Connection: X-Request-Id"], True)],
)
def test_a_request_id_is_made_where_none_reaches_the_upstream(lines: list[bytes], makes: bool) -> None:
    assert added_fields(asked(*lines), RelayOptions(), b"") == []
    made = [added_fields(asked(*lines), RelayOptions(request_id="make"), b"") for _ in range(2)]
    assert [[name for name, _ in fields] for fields in made] == [[b"X-Request-Id"] * makes] * 2
    assert (made[0] != made[1]) is makes


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_via_and_forwarded_for_name_the_client(version: bytes) -> None:
    head = asked(first=b"GET /x HTTP/" + version)
    fields = added_fields(head, RelayOptions(via=True, forwarded_for=True), b"::1")
    assert fields == [(b"X-Forwarded-For", b"::1"), (b"Via", version + b" llmtap")]


def test_what_the_options_add_stands_at_the_end() -> None:
    extra = [(b"X-Request-Id", b"r"), (b"X-Forwarded-For", b"::1"), (b"Via", b"1.1 llmtap")]
    head = asked(b"Via: 1.0 first", b"X-Forwarded-For: 10.0.0.1")
    assert sent_on(head, extra=extra)[2:] == [
        b"Via: 1.0 first", b"X-Forwarded-For: 10.0.0.1", b"X-Request-Id: r", b"X-Forwarded-For: ::1",
        b"Via: 1.1 llmtap",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("target", "origin_form"),
    [
        (b"/", b"/"),
        (b"/a//b/../%2F?x=1&&", b"/a//b/../%2F?x=1&&"),
        (b"//double", b"//double"),
        # RFC 9112 3.2.2: the absolute form is understood, where it points to is not followed.
        (b"http://other.test/p?q", b"/p?q"),
        (b"HTTPS://other.test:1/p", b"/p"),
        (b"http://other.test", b"/"),
        (b"http://other.test?q=/p", b"/?q=/p"),
        (b"http://user:pw@other.test/p", b"/p"),
        (b"ftp://other.test/p", b""),
    ],
)
def test_the_target_in_origin_form(target: bytes, origin_form: bytes) -> None:
    assert target_of(asked(first=b"GET " + target + b" HTTP/1.1")) == origin_form


def test_asterisk_form_is_for_the_whole_server() -> None:
    head = asked(first=b"OPTIONS * HTTP/1.1")
    assert sent_on(head, prefix=b"/base")[0] == b"OPTIONS * HTTP/1.1"


def test_the_absolute_form_of_a_server_wide_options_becomes_the_asterisk() -> None:
    """RFC 9112 3.2.4: the last proxy MUST send "*" when the URI has neither path nor query."""
    assert target_of(asked(first=b"OPTIONS http://a.test HTTP/1.1")) == b"*"
    assert target_of(asked(first=b"OPTIONS http://a.test/ HTTP/1.1")) == b"/"


def test_only_an_asterisk_is_the_asterisk_form() -> None:
    """RFC 9112 3.2: a target that is none of the four forms is no target."""
    assert target_of(asked(first=b"GET *x HTTP/1.1")) == b""


def test_a_url_without_a_host_is_no_target() -> None:
    """RFC 9110 4.2.1: a recipient MUST reject an http URI with an empty host."""
    try:
        head = asked(first=b"GET http:///x HTTP/1.1")
    except PeerProtocolError:
        return
    assert target_of(head) == b""


def test_the_host_of_an_absolute_form_is_its_authority_without_userinfo() -> None:
    """RFC 9112 3.2 and 3.2.2."""
    head = asked(first=b"GET http://user:pw@real.test:81/x HTTP/1.1")
    assert sent_on(head, authority=None)[1] == b"Host: real.test:81"
    assert sent_on(head)[1] == b"Host: gw.test:80"


def test_a_prefix_stands_before_the_path() -> None:
    assert sent_on(asked(first=b"GET /x?y HTTP/1.1"), prefix=b"/base")[0] == b"GET /base/x?y HTTP/1.1"
    absolute = asked(first=b"GET http://a.test?y HTTP/1.1")
    assert sent_on(absolute, prefix=b"/base")[0] == b"GET /base/?y HTTP/1.1"


def test_a_spelling_seen_before_is_treated_the_same() -> None:
    """Names are remembered as sent; what is remembered of one message must not colour another."""
    for _ in range(2):
        assert sent_on(asked(b"X-Thing: 1", b"Connection: x-thing"))[2:] == []
        assert sent_on(asked(b"X-Thing: 1"))[2:] == [b"X-Thing: 1"]


# ---------------------------------------------------------------- responses


def test_an_ordinary_answer_passes_as_it_came() -> None:
    lines = [b"Content-Length: 5", b"Set-Cookie: a=1", b"x-A: 1", b"set-cookie: b=2", b"Host: odd"]
    assert answered(*lines) == [b"HTTP/1.1 200 OK", *lines]


@pytest.mark.parametrize(
    "lines",
    [
        [b"Connection: close"],
        [b"Connection: keep-alive", b"Keep-Alive: timeout=5, max=9"],
        [b"Keep-Alive: timeout=5"],
        [b"Connection: x-hop", b"X-Hop: 1"],
        [b"Proxy-Connection: close"],
    ],
)
def test_what_the_upstream_says_for_its_hop_stops_here(lines: list[bytes]) -> None:
    assert answered(*lines, b"Content-Length: 0", b"X-Stay: 1") == [
        b"HTTP/1.1 200 OK", b"Content-Length: 0", b"X-Stay: 1",
    ]  # fmt: skip


def test_an_http10_answer_becomes_ours() -> None:
    """RFC 9110 6.2: an intermediary sends its own version."""
    assert (
        answered(b"Content-Length: 0", first=b"HTTP/1.0 404 Gone Fishing")[0] == b"HTTP/1.1 404 Gone Fishing"
    )


@pytest.mark.parametrize(
    ("keep_alive", "client_11", "said"),
    [
        (True, True, []),
        (False, True, [b"Connection: close"]),
        (True, False, [b"Connection: keep-alive"]),
        (False, False, [b"Connection: close"]),
    ],
)
def test_persistence_is_said_where_it_is_not_the_versions_own(
    keep_alive: bool, client_11: bool, said: list[bytes]
) -> None:
    assert answered(b"Content-Length: 0", keep_alive=keep_alive, client_11=client_11)[2:] == said


def test_an_interim_answer_says_nothing_of_persistence() -> None:
    first = b"HTTP/1.1 103 Early Hints"
    assert answered(b"Link: </a>", first=first, keep_alive=False) == [first, b"Link: </a>"]


def test_a_switch_keeps_its_upgrade() -> None:
    first = b"HTTP/1.1 101 Switching Protocols"
    lines = answered(b"Upgrade: websocket", b"Connection: upgrade", b"Sec-WebSocket-Accept: x", first=first)
    assert lines == [first, b"Upgrade: websocket", b"Sec-WebSocket-Accept: x", b"Connection: Upgrade"]


def test_an_unchunked_answer_names_no_coding_and_no_trailers() -> None:
    lines = answered(b"Transfer-Encoding: chunked", b"Trailer: X-T", b"X: 1", dechunk=True, keep_alive=False)
    assert lines == [b"HTTP/1.1 200 OK", b"X: 1", b"Connection: close"]


def test_426_says_what_to_upgrade_to() -> None:
    """RFC 9110 15.5.22: a server MUST send Upgrade in a 426."""
    first = b"HTTP/1.1 426 Upgrade Required"
    lines = answered(b"Upgrade: websocket", b"Connection: upgrade", b"Content-Length: 0", first=first)
    assert b"Upgrade: websocket" in lines


# ---------------------------------------------------------------- our own answers


@pytest.mark.parametrize("status", [400, 405, 408, 431, 501, 502, 503, 504, 505])
def test_our_own_answer_is_in_openais_form(status: int) -> None:
    raw = own_answer(status, "some_code", "what happened", [(b"Retry-After", b"1")], close=True, body=True)
    head, _, body = raw.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0].startswith(b"HTTP/1.1 %d " % status)
    assert lines[1:] == [
        b"Content-Type: application/json", b"Content-Length: %d" % len(body), b"X-Llmtap-Error: some_code",
        b"Retry-After: 1", b"Connection: close",
    ]  # fmt: skip
    kind = "api_error" if status >= 500 else "invalid_request_error"
    said = {"message": "llmtap: what happened", "type": kind, "param": None, "code": "some_code"}
    assert json.loads(body) == {"error": said}


def test_our_own_answer_to_head_has_no_body_but_its_length() -> None:
    raw = own_answer(502, "c", "m", [], close=False, body=False)
    whole = own_answer(502, "c", "m", [], close=False, body=True)
    assert raw.endswith(b"\r\n\r\n")
    assert whole.startswith(raw)
    assert b"Connection" not in raw


# ---------------------------------------------------------------- heads, seen from outside


@scene
async def test_an_answers_head_arrives_with_order_case_and_repeats() -> None:
    async with stage() as (up, tap):
        head = (
            b"HTTP/1.1 446 Hooks  Failed\r\nSet-Cookie: a=1\r\nX-b: 1\r\nset-cookie: b=2\r\nContent-Length: 2"
            b"\r\nX-U: caf\xc3\xa9 \xff\r\nx-A:\r\n\r\n"
        )
        answer = await (await tap.client()).get(up.on(says(head + b"{}")))
        assert answer.head.line == b"HTTP/1.1 446 Hooks  Failed"
        assert answer.head.fields == [
            (b"Set-Cookie", b"a=1"), (b"X-b", b"1"), (b"set-cookie", b"b=2"), (b"Content-Length", b"2"),
            (b"X-U", b"caf\xc3\xa9 \xff"), (b"x-A", b""),
        ]  # fmt: skip


@pytest.mark.parametrize(
    "tail",
    [
        "/%2Fa%20b//c/./d/../e;x=1?q=%7B%22a%22%3A1%7D&y=a+b&z=%e2%82%ac&&",
        "?", "//", "/..", "/%00", "?a=?b", "?" + "a" * 7_000, "/|^`{}\"<>[]\\",
    ],
)  # fmt: skip
@scene
async def test_the_target_arrives_byte_for_byte(tail: str) -> None:
    async with stage() as (up, tap):
        path = up.on(answers())
        assert (await (await tap.client()).get(path + tail)).status == 200
        assert up.call(path).target == (path + tail).encode()


@pytest.mark.parametrize("method", ["PROPFIND", "QUERY", "PATCH", "DELETE", "TELEPORT", "get", "M-SEARCH"])
@scene
async def test_any_method_passes(method: str) -> None:
    async with stage() as (up, tap):
        path = up.on(answers())
        assert (await (await tap.client()).ask(request(method, path, body=b"b"))).status == 200
        call = up.call(path)
        assert call.method == method.encode()
        assert call.payload is not None
        assert call.payload.data == b"b"


# ---------------------------------------------------------------- where a request goes


@scene
async def test_the_absolute_form_goes_to_the_upstream_only() -> None:
    async with upstream() as elsewhere, stage() as (up, tap):
        path = up.on(answers(b"mine"))
        target = f"http://127.0.0.1:{elsewhere.port}{path}?x=1"
        answer = await (await tap.client()).ask(request("GET", target, host=f"127.0.0.1:{elsewhere.port}"))
        assert answer.data == b"mine"
        assert elsewhere.connections == 0
        assert up.call(path).target == f"{path}?x=1".encode()
        assert up.call(path).head.get("host") == b"127.0.0.1:%d" % up.port


@scene
async def test_connect_is_no_tunnel() -> None:
    async with upstream() as elsewhere, stage() as (up, tap):
        client = await tap.client()
        target = f"127.0.0.1:{elsewhere.port}"
        answer = await client.ask(request("CONNECT", target, host=target))
        assert answer.status == 405
        assert (await client.to_end())[0] == b""
        assert (elsewhere.connections, up.connections) == (0, 0)


@pytest.mark.parametrize("method", ["OPTIONS", "TRACE", "GET"])
@pytest.mark.parametrize(
    ("value", "passed"),
    [
        ("5", "4"), ("1", "0"), ("10 ", "9"), ("0", None), ("00", None), ("\t0", None), ("x", "x"),
        ("-1", "-1"), ("9" * 5_000, "9" * 5_000),
    ],
)  # fmt: skip
@scene
async def test_max_forwards_counts_down_to_an_answer_of_our_own(
    method: str, value: str, passed: str | None
) -> None:
    """RFC 9110 7.6.2: each intermediary MUST decrement it, for OPTIONS and TRACE."""
    async with stage() as (up, tap):
        path = up.on(answers())
        answer = await (await tap.client()).ask(request(method, path, f"Max-Forwards: {value}"))
        if method == "GET":
            passed = value.strip()
        if passed is None:
            assert answer.status == (200 if method == "OPTIONS" else 405)
            assert up.calls == []
        else:
            assert up.call(path).head.get("max-forwards") == passed.encode()
