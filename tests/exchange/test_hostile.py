"""Answers made to hurt whoever reads them: the observer never raises, and its memory stays bounded.

Memory is what Python allocates, peak less what was there before; the bounds are those of the code (one
event, one decoded read), not of this machine.
"""

import gzip
import random
import tracemalloc
import zlib
from collections.abc import Iterator

import brotli
import pytest
import zstandard

from llmtap.exchange.exchange import Exchange
from llmtap.exchange.observer import EVENTS_MAX, Observer
from llmtap.exchange.outcome import Outcome
from llmtap.protocol.sse import EVENT_BYTES_MAX

MIB = 1 << 20
PATHS = [
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat", "/v2/chat",
    "/generate_stream", "/generate", "/completion", "/api/v1/chat", "/unknown",
]  # fmt: skip
SSE = b"text/event-stream"
JSON = b"application/json"
NDJSON = b"application/x-ndjson"


def observe(
    body: Iterator[bytes] | list[bytes],
    *,
    path: str = PATHS[0],
    kind: bytes = SSE,
    coding: bytes | None = None,
    request: bytes = b"{}",
) -> Exchange:
    """The exchange of an answer that came in these reads, one every ms."""
    head = f"POST {path} HTTP/1.1\r\nhost: g\r\ncontent-length: {len(request)}\r\n\r\n"
    o = Observer("r", 1, 0, 0, head.encode())
    o.request_data(request, 0)
    o.request_end(0)
    o.submitted(0, 0)
    fields = b"content-type: " + kind + (b"\r\ncontent-encoding: " + coding if coding else b"")
    o.response_head(b"HTTP/1.1 200 OK\r\n" + fields + b"\r\n\r\n", 0, 0)
    t_ns = 0
    for data in body:
        t_ns += 1_000_000
        o.response_data(data, t_ns, 0)
    o.response_end(t_ns)
    return o.finish(t_ns, Outcome.COMPLETE.value, None, None, 0, 0, 0, 0)


def nested(n: int) -> list[bytes]:
    """JSON values that nest deeper than anyone means."""
    deep = b"[" * n + b"]" * n
    inner = b'{"a":' * n + b"1" + b"}" * n
    return [
        deep,
        b'{"choices":' + deep + b"}",
        b'{"choices":[{"index":0,"delta":{"content":' + deep + b"}}]}",
        b'{"choices":[{"index":0,"delta":{"tool_calls":' + deep + b"}}],"
        b'"usage":' + inner + b',"error":' + deep + b',"model":' + inner + b"}",
        b'{"type":"content_block_delta","delta":' + inner + b"}",
        b'{"type":"response.output_text.delta","delta":' + inner + b"}",
        inner,
        b"[" * n,
    ]


@pytest.mark.parametrize("kind", [SSE, JSON, NDJSON], ids=["sse", "json", "ndjson"])
@pytest.mark.parametrize("path", PATHS)
def test_depth_bombs(path: str, kind: bytes) -> None:
    for value in nested(100_000):
        body = b"data: " + value + b"\n\n" if kind == SSE else value + b"\n"
        x = observe([body[i : i + 65_536] for i in range(0, len(body), 65_536)], path=path, kind=kind)
        assert x.timeline.first_byte_ns == 1_000_000
        observe([b"data: [DONE]\n\n"], path=path, request=value)


def reads_of_one_event(size: int) -> Iterator[bytes]:
    yield b'data: {"choices":[{"index":0,"delta":{"content":"'
    piece = b"x" * 65_536
    for _ in range(size // len(piece)):
        yield piece
    yield b'"}}]}\n\ndata: {"choices":[{"index":0,"delta":{"content":"after"}}]}\n\n'


def test_an_event_of_100_mb_costs_one_events_bound() -> None:
    tracemalloc.start()
    try:
        x = observe(reads_of_one_event(100 * MIB))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The buffer grows by doubling at most, and holds no more than one event's bound.
    assert peak < 3 * EVENT_BYTES_MAX
    assert x.unparsed_events == 1
    assert x.timeline.first_content_ns is not None, "what comes after is understood again"


@pytest.mark.parametrize("kind", [JSON, NDJSON], ids=["json", "ndjson"])
def test_a_json_body_of_100_mb_costs_one_events_bound(kind: bytes) -> None:
    tracemalloc.start()
    try:
        x = observe((b'{"a":"' if i == 0 else b"x" * 65_536 for i in range(1_600)), kind=kind)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * EVENT_BYTES_MAX
    assert x.unparsed_events >= 1


def bombs(size: int) -> dict[bytes, bytes]:
    """Bodies that decode to `size` bytes of one line or one event, by coding."""
    plain = b'data: {"choices":[{"index":0,"delta":{"content":"' + b"x" * size + b'"}}]}\n\n'
    return {
        b"gzip": gzip.compress(plain, 9), b"deflate": zlib.compress(plain, 9),
        b"br": brotli.compress(plain, quality=5), b"zstd": zstandard.ZstdCompressor(level=9).compress(plain),
        b"gzip, gzip": gzip.compress(gzip.compress(plain, 9), 9),
    }  # fmt: skip


@pytest.mark.parametrize("coding", [b"gzip", b"deflate", b"br", b"zstd", b"gzip, gzip"])
def test_decompression_bombs(coding: bytes) -> None:
    body = bombs(100 * MIB)[coding]
    tracemalloc.start()
    try:
        x = observe([body[i : i + 65_536] for i in range(0, len(body), 65_536)], coding=coding)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * EVENT_BYTES_MAX
    assert x.timeline.first_byte_ns == 1_000_000
    assert x.error is not None, "said, and timed by reads from there on"
    assert x.outcome is Outcome.COMPLETE, "what we cannot read is no fault of the answer"


@pytest.mark.parametrize("coding", [b"gzip", b"br", b"zstd", b"deflate"])
def test_broken_compression(coding: bytes) -> None:
    rng = random.Random(7)
    whole = bombs(5_000)[coding]
    for _ in range(60):
        broken = bytearray(whole)
        for _ in range(rng.randrange(1, 8)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        cut = rng.randrange(len(broken))
        x = observe([bytes(broken[:cut]), bytes(broken[cut:])], coding=coding)
        assert x.timeline.first_byte_ns is not None


@pytest.mark.parametrize("path", PATHS)
def test_bytes_that_are_no_text(path: str) -> None:
    rng = random.Random(path)
    for kind in (SSE, JSON, NDJSON):
        for _ in range(40):
            noise = rng.randbytes(rng.randrange(1, 400))
            bad = b'{"choices":[{"index":0,"delta":{"content":"' + noise + b'"}}]}'
            body = b"data: " + bad + b"\n\n" + noise if kind == SSE else bad + b"\n" + noise
            x = observe([body], path=path, kind=kind)
            assert x.reads == 1


def test_endless_tiny_events_have_a_bounded_log() -> None:
    many = b": \n\n" * 16_384
    x = observe([many] * (EVENTS_MAX // 16_384 + 3))
    assert len(x.timeline.events) == EVENTS_MAX
    assert x.unlogged_events == 3 * 16_384


def test_a_stream_without_end_costs_no_more_memory_than_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten million events cost what the first EVENTS_MAX do; here with a smaller log, and events for many."""
    events_max = 1 << 13
    monkeypatch.setattr("llmtap.exchange.observer.EVENTS_MAX", events_max)
    read = b'data: {"choices":[{"index":0,"delta":{"content":"word"}}]}\n\n' * 1_024
    peaks = []
    for reads in (16, 320):
        tracemalloc.start()
        try:
            x = observe(read for _ in range(reads))
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        assert len(x.timeline.events) == events_max
        assert x.unlogged_events == reads * 1_024 - events_max, "and it says so"
        assert x.timeline.last_token_ns == reads * 1_000_000, "the points still move"
    assert peaks[1] < peaks[0] * 1.1 + 8 * (320 - 16), "a stamp of each read is kept as well"


ODD_EVENTS = [
    b'{"choices":[{"index":0,"delta":{"content":"w"}}],"usage":{"completion_tokens":1'
    + b"0" * 10_000
    + b"}}",
    b'{"choices":[{"index":' + b"9" * 10_000 + b',"delta":{"content":"w"}}]}',
    b'{"choices":[{"index":0,"delta":{"content":"w"}}],' + b'"id":"x",' * 10_000 + b'"id":"y"}',
    b'{"choices":[{"index":0,"delta":{"content":"w\x00"}}]}',
    b'{"choices":[{"index":0,"delta":{"content":"\xff\xfe"}}]}',
    b"\x00" * 10_000,
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("event", range(len(ODD_EVENTS)))
def test_odd_numbers_keys_and_bytes_are_events_like_others_or_counted(path: str, event: int) -> None:
    data = b"data: " + ODD_EVENTS[event] + b"\n\n"
    word = b'data: {"choices":[{"index":0,"delta":{"content":"w"}}]}\n\n'
    x = observe([data, data + word, b"data: [DONE]\n\n"], path=path, request=ODD_EVENTS[event])
    assert (x.reads, x.outcome) == (3, Outcome.COMPLETE)
    assert len(x.timeline.events) >= 3
    assert x.tokens.output is None or x.tokens.output < 1 << 53
