"""Answers made to hurt whoever reads them: the observer never raises, and its memory stays bounded.

Memory is what Python allocates, peak less what was there before; the bounds are those of the code (one
event, one decoded read), not of this machine.
"""

import tracemalloc
from collections.abc import Iterator

import pytest

from llmtap.exchange.exchange import Exchange
from llmtap.exchange.observer import Observer
from llmtap.exchange.outcome import Outcome
from llmtap.protocol.sse import EVENT_BYTES_MAX

MIB = 1 << 20
SSE = b"text/event-stream"
JSON = b"application/json"
NDJSON = b"application/x-ndjson"


def observe(body: Iterator[bytes], *, kind: bytes = SSE) -> Exchange:
    """The exchange of an answer that came in these reads, one every ms."""
    o = Observer("r", 1, 0, 0, b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\n\r\n")
    o.request_end(0)
    o.on_submit(0, 0)
    o.response_head(b"HTTP/1.1 200 OK\r\ncontent-type: " + kind + b"\r\n\r\n", 0, 0)
    t_ns = 0
    for data in body:
        t_ns += 1_000_000
        o.response_data(data, t_ns, 0)
    o.response_end(t_ns)
    return o.finish(t_ns, Outcome.COMPLETE.value, None, None, 0, 0, 0, 0)


def reads_of_one_event(size: int) -> Iterator[bytes]:
    yield b'data: {"choices":[{"index":0,"delta":{"content":"'
    piece = b"x" * 65_536
    for _ in range(size // len(piece)):
        yield piece
    yield b'"}}]}\n\ndata: {"choices":[{"index":0,"delta":{"content":"after"}}]}\n\n'


@pytest.mark.parametrize("kind", [SSE, JSON, NDJSON], ids=["sse", "json", "ndjson"])
def test_an_event_of_100_mb_costs_one_events_bound(kind: bytes) -> None:
    body = reads_of_one_event(100 * MIB)
    tracemalloc.start()
    try:
        x = observe(
            body if kind is SSE else (b'{"a":"' if i == 0 else b"x" * 65_536 for i in range(1_600)), kind=kind
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The buffer grows by doubling at most, and holds no more than one event's bound.
    assert peak < 3 * EVENT_BYTES_MAX
    assert x.unparsed_events == 1
    assert kind is not SSE or x.timeline.first_content_ns is not None, "what comes after is understood again"


def test_a_stream_without_end_costs_no_more_memory_than_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten million events cost what the first EVENTS_MAX do; here with a smaller log, and events for many."""
    events_max = 1 << 13
    monkeypatch.setattr("llmtap.exchange.observer.EVENTS_MAX", events_max)
    read = b'data: {"choices":[{"index":0,"delta":{"content":"word"}}]}\n\n' * 1_024
    peaks = []
    for reads in (16, 160):
        tracemalloc.start()
        try:
            x = observe(read for _ in range(reads))
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        assert len(x.timeline.events) == events_max
        assert x.unlogged_events == reads * 1_024 - events_max, "and it says so"
        assert x.timeline.last_token_ns == reads * 1_000_000, "the points still move"
    assert peaks[1] < peaks[0] * 1.1 + 8 * (160 - 16), "a stamp of each read is kept as well"
