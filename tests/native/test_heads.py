"""The compiled parser and writer of plain heads against their Python twins.

Invariant: where the compiled code gives an answer, it is the Python code's answer. It may always give none.
"""

import pytest

from llmtap.native import REASON, compiled
from llmtap.protocol import http1
from tests.native.messages import REQUESTS, RESPONSES, request_twins, response_twins

pytestmark = pytest.mark.skipif(compiled is None, reason=f"the compiled path does not run: {REASON}")

UNUSUAL = [
    b"GET / HTTP/1.0\r\nHost: a\r\n\r\n",
    b"PUT / HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET http://a/ HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +1\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nTE: trailers\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nX : y\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nX: y\r\n z\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nX: \xe9\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\nX: y\r\n\r\n",
    b"GET /a#b HTTP/1.1\r\nHost: a\r\n\r\n",
    b"HTTP/1.1 204 No Content\r\nContent-Length: 3\r\n\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n",
    b"HTTP/1.1 099 Odd\r\n\r\n",
    b"HTTP/1.1 200\r\nx: y\r\n\r\n",
    b"",
    b"\r\n\r\n",
]


@pytest.mark.parametrize("raw", REQUESTS)
def test_heads_of_usual_clients_are_plain(raw: bytes) -> None:
    assert request_twins(raw)


@pytest.mark.parametrize("raw", RESPONSES)
@pytest.mark.parametrize("method", [b"POST", b"GET", b"HEAD"])
def test_heads_of_usual_servers_are_plain(raw: bytes, method: bytes) -> None:
    assert response_twins(raw, method)


@pytest.mark.parametrize("raw", UNUSUAL)
def test_python_reads_what_is_unusual(raw: bytes) -> None:
    assert not request_twins(raw)
    assert not response_twins(raw)


def test_more_fields_than_the_compiled_parser_holds_go_to_python() -> None:
    raw = b"GET / HTTP/1.1\r\nHost: a\r\n" + b"x: y\r\n" * 64 + b"\r\n"
    assert not request_twins(raw)
    assert len(http1.parse_request_head(raw).headers) == 65


def test_a_writer_refuses_what_is_no_list_of_pairs() -> None:
    assert compiled is not None
    for fields in ([b"x"], [(b"x", "y")], [("x", b"y")]):
        with pytest.raises(TypeError):
            compiled.write_head(b"", fields, None, b"")
