"""A head that is recalled says, and becomes, what it would if it were read anew."""

import re
from dataclasses import replace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.errors import PeerProtocolError
from llmtap.net.pool import Pool, parse_origin
from llmtap.relay import recall
from llmtap.relay.heads import request_lines, response_lines
from llmtap.relay.recall import RequestRecall, ResponseRecall
from llmtap.relay.route import Route
from llmtap.wire.http1 import RequestHead, ResponseHead, parse_request_head, parse_response_head

NO_POOL = cast(Pool, None)
ROUTE = Route(parse_origin("http://gateway:8000/v2", "relay.upstream"), b"gateway:8000", NO_POOL)
LENGTHS = ["1", "12", "0", "007", "+5", "5 ", "999999999999999999", "1234567890123456789", "", "x"]
NAMES = ["Content-Length", "content-length", "Content-length", "CONTENT-LENGTH"]
REQUEST_FIELDS = [
    "Host: a", "Host: b", "Authorization: Bearer k", "Connection: keep-alive", "Connection: close",
    "Connection: x-secret, content-length", "X-Secret: 1", "Transfer-Encoding: chunked", "TE: trailers",
    "Expect: 100-continue", "X-Content-Length: 5", "X:Content-Length: 5", " folded", "Bad Name: 1",
    "Upgrade: websocket", "Connection: upgrade", "X-Request-Id: 1", "Empty:", "Spaced: v  ",
]  # fmt: skip
RESPONSE_FIELDS = [
    "Date: now", "Date: then", "Connection: close", "Connection: keep-alive", "Transfer-Encoding: chunked",
    "X-Id: 1", "X-Id: 2", "Set-Cookie: a", "Trailer: x", "Upgrade: h2c", " folded", "Bad Name: 1",
]  # fmt: skip
STATUS = ["HTTP/1.1 200 OK", "HTTP/1.0 200 OK", "HTTP/1.1 204 None", "HTTP/1.1 304 Same", "HTTP/1.1 500 "]
STARTS = [
    f"{line}\r\nHost: a"
    for line in ("POST /v1/x HTTP/1.1", "POST /v1/x HTTP/1.0", "GET http://h/x HTTP/1.1", "PUT * HTTP/1.1")
] + ["GET /ws HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket"]


def heads(starts: list[str], fields: list[str]) -> st.SearchStrategy[list[bytes]]:
    """Heads of a kind or two, so that most come again; with lengths good and bad."""
    shape = st.tuples(
        st.sampled_from(starts),
        st.lists(st.sampled_from(fields), max_size=3),
        st.integers(0, 3),
        st.sampled_from(NAMES),
    )
    length = st.sampled_from(["1", "12", "345", "6789"]) | st.sampled_from(LENGTHS)

    def write(shape: tuple[str, list[str], int, str], length: str) -> bytes:
        start, some, at, name = shape
        lines = [start, *some[:at], f"{name}: {length}", *some[at:]]
        return "\r\n".join([*lines, "", ""]).encode()

    def sequence(shapes: list[tuple[str, list[str], int, str]]) -> st.SearchStrategy[list[bytes]]:
        return st.lists(st.builds(write, st.sampled_from(shapes), length), min_size=6, max_size=20)

    return st.lists(shape, min_size=1, max_size=2).flatmap(sequence)


def asked(data: bytes) -> RequestHead | str:
    try:
        return parse_request_head(data)
    except PeerProtocolError as exc:
        return f"{exc.status} {exc}"


def answered(data: bytes, method: bytes) -> ResponseHead | str:
    try:
        return parse_response_head(data, method)
    except PeerProtocolError as exc:
        return f"{exc.status} {exc}"


def the_long_way(head: RequestHead, route: Route, upgrade: bool, extra: list[tuple[bytes, bytes]]) -> bytes:
    prefix, authority = route.origin.prefix, route.authority
    return request_lines(head, prefix=prefix, authority=authority, upgrade=upgrade, extra=extra)


@given(heads(STARTS, REQUEST_FIELDS), st.data())
def test_a_request_is_read_and_sent_on_as_if_nothing_were_recalled(
    some: list[bytes], data: st.DataObject
) -> None:
    memory = RequestRecall()
    routes = [ROUTE, replace(ROUTE, authority=None)]
    for raw in some:
        try:
            head: RequestHead | str = memory.parse(raw)
        except PeerProtocolError as exc:
            head = f"{exc.status} {exc}"
        assert head == asked(raw)
        if isinstance(head, RequestHead):
            route = data.draw(st.sampled_from(routes))
            upgrade = head.upgrade is not None and data.draw(st.booleans())
            extra = data.draw(st.sampled_from([[], [], [], [(b"Via", b"1.1 llmtap")]]))
            lines = memory.lines(head, route, upgrade=upgrade, extra=extra)
            assert lines == the_long_way(head, route, upgrade, extra)


@given(heads(STATUS, RESPONSE_FIELDS), st.data())
def test_an_answer_is_read_and_handed_on_as_if_nothing_were_recalled(
    some: list[bytes], data: st.DataObject
) -> None:
    memory = ResponseRecall()
    for raw in some:
        method = data.draw(st.sampled_from([b"POST", b"GET", b"HEAD"]))
        try:
            head: ResponseHead | str = memory.parse(raw, method)
        except PeerProtocolError as exc:
            head = f"{exc.status} {exc}"
        assert head == answered(raw, method)
        if isinstance(head, ResponseHead):
            how = {name: data.draw(st.booleans()) for name in ("keep_alive", "client_11", "dechunk")}
            assert memory.lines(head, **how) == response_lines(head, **how)


def request(length: int, more: bytes = b"") -> bytes:
    return b"POST /v1/x HTTP/1.1\r\nHost: a\r\n%bContent-Length: %d\r\nX: 1\r\n\r\n" % (more, length)


def test_the_third_of_its_kind_is_recalled_whatever_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = RequestRecall()
    for length in (1, 22):
        memory.parse(request(length))
    assert len(memory) == 1
    expected = parse_request_head(request(333))
    monkeypatch.setattr(recall, "parse_request_head", lambda raw: pytest.fail("read the long way"))
    assert memory.parse(request(333)) == expected


def test_fields_that_were_changed_on_their_way_are_what_is_sent() -> None:
    memory = RequestRecall()
    for length in (1, 2, 3):
        head = memory.parse(request(length))
        memory.lines(head, ROUTE, upgrade=False, extra=[])
    head = memory.parse(request(4))
    head.headers = [*head.headers, (b"X-Arm", b"b")]
    assert b"X-Arm: b" in memory.lines(head, ROUTE, upgrade=False, extra=[])
    assert b"X-Arm" not in memory.lines(memory.parse(request(5)), ROUTE, upgrade=False, extra=[])


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recall, "HEADS_MAX", 8)
    monkeypatch.setattr(recall, "MISSES_MAX", 1_000)
    memory = RequestRecall()
    for i in range(20):
        for _ in range(3):
            memory.parse(request(7, b"X-Id: %d\r\n" % i))
            assert len(memory) <= 8
    long = b"X-Long: " + b"x" * recall.HEAD_BYTES_MAX + b"\r\n"
    kept = len(memory)
    for _ in range(3):
        memory.parse(request(7, long))
    assert len(memory) == kept


def test_where_no_head_comes_again_none_is_looked_for_but_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = RequestRecall()
    looked: list[bytes] = []

    class Look:
        def search(self, raw: bytes) -> re.Match[bytes] | None:
            looked.append(raw)
            return digits.search(raw)

    digits = recall._DIGITS
    monkeypatch.setattr(recall, "_DIGITS", Look())
    for i in range(1_000):
        memory.parse(request(7, b"X-Id: %d\r\n" % i))
    assert len(looked) < 150
    for _ in range(recall.REST + 3):
        memory.parse(request(7))
    assert len(memory) == 1
