"""Input made to cost time: 32 times the bytes take 32 times the CPU time of the parsers, not 1,024 times.

These are the only tests that measure time, because quadratic copies in C (`str +=`, `in` of a list, the rest
of a buffer) are not seen by any count of lines or calls. They read the thread's CPU clock, which does not
count other processes, and take the least of several alternating runs. This clock still runs up to three times
too fast while a core is shared with another machine; a factor of 32 and one of 1,024 differ by far more. The
garbage collector rests meanwhile, because its time depends on all objects of the process. What is linear and
yet too slow is tested by counting calls.
"""

import gc
import gzip
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import brotli
import pytest

from llmtap.capture.privacy.redaction import Redactor
from llmtap.exchange.exchange import Exchange
from llmtap.exchange.observer import LINES_FREE, LINES_PER_BYTE, Observer
from llmtap.exchange.prompt import PARTS_MAX, read_prompt
from llmtap.protocol.dialects.openai_shapes import EVENT_CHOICES_MAX, PIECES_MAX
from llmtap.protocol.encoding import Decoder
from llmtap.protocol.http1 import ChunkedDecoder, parse_request_head, parse_response_head
from llmtap.protocol.websocket import MessageParser

RUNS = 5
TIMES = 32
RATIO_MAX = 160
"""Reached where four fifths of the time of the larger input are quadratic."""
CHUNK = b'{"object":"chat.completion.chunk","choices":['
SSE = b"text/event-stream"
JSON = b"application/json"
NDJSON = b"application/x-ndjson"


def observe(
    reads: list[bytes], kind: bytes = SSE, path: str = "/v1/chat/completions", more: bytes = b""
) -> Exchange:
    o = Observer("r", 1, 0, 0, f"POST {path} HTTP/1.1\r\nhost: g\r\n\r\n".encode())
    o.request_end(0)
    o.response_head(b"HTTP/1.1 200 OK\r\ncontent-type: " + kind + more + b"\r\n\r\n", 0, 0)
    for data in reads:
        o.response_data(data, 1, 0)
    o.response_end(1)
    return o.finish(1, "complete", None, None, 0, 0, 0, 0)


def event(value: bytes) -> list[bytes]:
    return [b"data: " + value + b"\n\n"]


def cut(data: bytes, size: int = 16) -> list[bytes]:
    return [data[i : i + size] for i in range(0, len(data), size)]


def choices(n: int, step: int = 1) -> list[bytes]:
    found = (b'{"index":%d,"delta":{"content":"x"}}' % (i * step) for i in range(n))
    return event(CHUNK + b",".join(found) + b"]}")


def completions(n: int) -> list[bytes]:
    found = (b'{"index":%d,"text":"x"}' % i for i in range(n))
    return event(b'{"object":"text_completion","choices":[' + b",".join(found) + b"]}")


def in_delta(name: bytes, item: bytes, n: int) -> list[bytes]:
    return event(CHUNK + b'{"index":0,"delta":{"' + name + b'":[' + b",".join([item] * n) + b"]}}]}")


def calls(n: int) -> list[bytes]:
    return in_delta(b"tool_calls", b'{"function":{"name":"f","arguments":"' + b"0" * 100 + b'"}}', n)


def parts(n: int) -> list[bytes]:
    return in_delta(b"content", b'{"text":"' + b"0" * 20 + b'"}', n)


def head(n: int, first: bytes) -> bytes:
    return first + b"connection: a\r\n" * n + b"\r\n"


def prompt(n: int, form: bytes = b'{"messages":[{"role":"user","content":[%b]}]}') -> bytes:
    return form % b",".join([b'1,"a"'] * n)


redact = Redactor(("key", "email", "card", "phone")).text
Shape = tuple[Callable[[int], Any], Callable[[Any], object], int]
SHAPES: dict[str, Shape] = {
    "choices of an event": (choices, observe, 4_000),
    "choices with indexes of one hash": (lambda n: choices(n, (1 << 61) - 1), observe, 2_000),
    "choices of completions": (completions, observe, 4_000),
    "tool calls of an event": (calls, observe, 6_000),
    "content parts of an event": (parts, observe, 20_000),
    "an SSE line in small reads": (lambda n: cut(b"data: " + b"x" * n), observe, 40_000),
    "data lines of an event": (lambda n: [b"data: {\n" * n + b"\n"], observe, 5_000),
    "a JSON body in small reads": (lambda n: cut(b'{"a":"' + b"x" * n), lambda r: observe(r, JSON), 60_000),
    "an NDJSON line in small reads": (lambda n: cut(b"{" * n), lambda r: observe(r, NDJSON), 60_000),
    "nested JSON": (lambda n: event(b'{"a":' * n + b"}" * n), observe, 100_000),
    "gzip members": (lambda n: gzip.compress(b"", 9) * n, lambda b: Decoder(b"gzip").feed(b), 8_000),
    "a gzip body at once": (
        lambda n: gzip.compress(os.urandom(n), 1),
        lambda b: Decoder(b"gzip").feed(b),
        3_000_000,
    ),
    "a brotli body at once": (
        lambda n: brotli.compress(os.urandom(n), quality=1),
        lambda b: Decoder(b"br").feed(b),
        3_000_000,
    ),
    "chunks of one byte": (lambda n: b"1\r\nx\r\n" * n, lambda b: ChunkedDecoder().feed(b), 8_000),
    "Connection fields of a request": (
        lambda n: head(n, b"GET / HTTP/1.1\r\nhost: g\r\n"),
        parse_request_head,
        8_000,
    ),
    "Connection fields of a response": (
        lambda n: head(n, b"HTTP/1.1 200 OK\r\n"),
        lambda b: parse_response_head(b, b"GET"),
        8_000,
    ),
    "parts of a prompt": (prompt, lambda b: read_prompt(b, None), 20_000),
    "WebSocket fragments": (
        lambda n: b"\x01\x00" + b"\x00\x01x" * n,
        lambda b: MessageParser("u", masked=False).feed(b),
        1_500,
    ),
    "text like keys": (lambda n: "eyJa.password: 'sk-" * n, redact, 1_000),
    "text like numbers": (lambda n: "+1 4111-(415) 030/" * n, redact, 1_000),
}


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def cpu_ns(run: Callable[[Any], object], shape: Any) -> int:
    start_ns = time.thread_time_ns()
    run(shape)
    return time.thread_time_ns() - start_ns


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("name", SHAPES)
def test_the_time_grows_with_the_input(name: str) -> None:
    make, run, n = SHAPES[name]
    small, large = make(n // 16), make(n // 16 * TIMES)
    times = [(cpu_ns(run, small), cpu_ns(run, large)) for _ in range(RUNS)]
    small_ns, large_ns = (min(each) for each in zip(*times, strict=True))
    assert large_ns < RATIO_MAX * small_ns, f"{large_ns / small_ns:.2f} times, {large_ns / 1e6:.1f} ms"


def calls_of(run: Callable[[], object]) -> int:
    """Python functions that `run` calls."""
    n = 0

    def count(frame: object, what: str, arg: object) -> None:
        nonlocal n
        n += what == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(before)
    return n


def test_empty_websocket_fragments_are_skipped_and_counted() -> None:
    parser = MessageParser("u", masked=False)
    data = b"\x01\x01a" + b"\x00\x00" * 100_000 + b"\x00\x01b" + b"\x00\x00" * 100_000 + b"\x80\x01c"
    found: list[Any] = []
    assert calls_of(lambda: found.extend(parser.feed(data))) < 100
    assert [(m.payload, m.size) for m in found] == [(b"abc", len(data))]


def test_a_prompt_has_a_bounded_number_of_parts() -> None:
    n, form = PARTS_MAX, b'{"messages":[{"role":"user","content":[%b]}]}'
    found, other = (read_prompt(prompt(n, form) + b" " * i, None) for i in (0, 1))
    assert found.cut and sum(len(m.parts) for m in found.messages) == 1
    assert found.messages == other.messages
    fewer = read_prompt(prompt(100, form), None)
    assert fewer is not None and not fewer.cut and len(fewer.messages[0].parts) > 100


@pytest.mark.parametrize(
    ("make", "n"),
    [
        (choices, EVENT_CHOICES_MAX),
        (completions, EVENT_CHOICES_MAX),
        (calls, PIECES_MAX),
        (parts, PIECES_MAX),
    ],
)
def test_an_event_with_too_many_choices_or_pieces_counts_as_not_understood(
    make: Callable[[int], list[bytes]], n: int
) -> None:
    assert [observe(make(k)).unparsed_events for k in (n, n + 1)] == [0, 1]


@pytest.mark.parametrize("line", [b"\n", b":\n\n"], ids=["empty", "comments"])
def test_a_compressed_body_of_empty_lines_is_given_up(line: bytes) -> None:
    # Not quite the same again and again, or the bound on the ratio would end it.
    body = b"".join(line * 30 + b":%b\n\n" % os.urandom(2).hex().encode() for _ in range(30_000))
    coded = gzip.compress(body, 9)
    assert body.count(b"\n") > 2 * (LINES_FREE + LINES_PER_BYTE * len(coded))
    found: list[Exchange] = []
    reads, more = cut(coded, 4_096), b"\r\ncontent-encoding: gzip"
    calls_of(lambda: found.append(observe(reads, more=more)))
    assert found[0].error is not None and "lines per byte" in found[0].error
