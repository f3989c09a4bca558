"""Open exchanges: what is kept of each counts against one limit, and long reads come in slices."""

import gzip
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from llmtap import native
from llmtap.exchange.bounds import Budget
from llmtap.exchange.observer import SLICE_BYTES, Observer
from llmtap.exchange.outcome import Outcome
from llmtap.protocol.websocket import frame

BYTES = 1 << 20
PART = 300_000
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nContent-Length: 0\r\n\r\n"
WORD = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'


def answer(kind: bytes, more: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: " + kind + b"\r\n" + more + b"\r\n"


def event_stream(o: Observer) -> None:
    o.response_head(answer(b"text/event-stream"), 1, 0)
    o.response_data(b"data: " + b"x" * PART, 2, 0)


def many_data_lines(o: Observer) -> None:
    o.response_head(answer(b"text/event-stream"), 1, 0)
    o.response_data(b"data:\n" * (PART // 48), 2, 0)


def event_name(o: Observer) -> None:
    o.response_head(answer(b"text/event-stream"), 1, 0)
    o.response_data(b"event: " + b"x" * PART + b"\n", 2, 0)


def compressed(o: Observer) -> None:
    o.response_head(answer(b"text/event-stream", b"Content-Encoding: gzip\r\n"), 1, 0)
    c = zlib.compressobj(9, zlib.DEFLATED, 31)
    blob = b"data: " + b"".join(b"%d" % i for i in range(PART // 5))
    o.response_data(c.compress(blob) + c.flush(zlib.Z_SYNC_FLUSH), 2, 0)


def lines(o: Observer) -> None:
    o.response_head(answer(b"application/x-ndjson"), 1, 0)
    o.response_data(b'{"a":"' + b"x" * PART, 2, 0)


def array(o: Observer) -> None:
    o.response_head(answer(b"application/x-ndjson"), 1, 0)
    o.response_data(b'{"a":["' + b"x" * PART, 2, 0)


def body(o: Observer) -> None:
    o.response_head(answer(b"application/json"), 1, 0)
    o.response_data(b'{"a":"' + b"x" * PART, 2, 0)


def tunnel(o: Observer) -> None:
    o.on_upgrade(1)
    o.tunnel(None, frame(b"x" * PART)[:-1], 2, 0)


def event_log(o: Observer) -> None:
    o.response_head(answer(b"text/event-stream"), 1, 0)
    for i in range(PART // 34 // 100 + 11):
        o.response_data(WORD * 100, 2 + i, 0)


@pytest.mark.parametrize(
    "keep", [event_stream, many_data_lines, event_name, compressed, lines, array, body, tunnel, event_log]
)
def test_all_that_is_kept_of_open_exchanges_has_one_limit(keep: Callable[[Observer], None]) -> None:
    shortages: list[int] = []
    budget = Budget(BYTES, lambda: shortages.append(1))
    observers = [Observer("r", i, 0, 0, HEAD, bodies=budget) for i in range(8)]
    for n, o in enumerate(observers, 1):
        o.request_end(0)
        keep(o)
        if n == 1:
            assert BYTES - budget.free_bytes >= 0.9 * PART
    assert shortages and 0 <= budget.free_bytes < BYTES - 2 * PART
    for o in observers:
        assert o.finish(9, "complete", None, None, 0, 0, 0, 0).outcome in (
            Outcome.COMPLETE,
            Outcome.TRUNCATED,
        )
    assert budget.free_bytes == BYTES


def test_a_stream_without_room_continues_with_its_next_event() -> None:
    budget = Budget(10_000, lambda: None)
    o = Observer("r", 1, 0, 0, HEAD, bodies=budget)
    o.request_end(0)
    o.response_head(answer(b"text/event-stream"), 1, 0)
    o.response_data(b"data: " + b"x" * 20_000, 2, 0)
    o.response_data(b"\n\n" + WORD, 3, 0)
    x = o.finish(9, "complete", None, None, 0, 0, 0, 0)
    assert (x.unparsed_events, x.timeline.first_content_ns) == (1, 3)


def test_a_captured_text_counts_and_ends_where_there_is_no_room() -> None:
    budget = Budget(100_000, lambda: None)
    o = Observer("r", 1, 0, 0, HEAD, on_request=lambda *_: True, bodies=budget)
    o.request_end(0)
    o.response_head(answer(b"text/event-stream"), 1, 0)
    for i in range(20):
        o.response_data(WORD * 200, 2 + i, 0)
    assert budget.free_bytes >= 0
    x = o.finish(9, "complete", None, None, 0, 0, 0, 0)
    assert x.text is not None and 500 < len(x.text.response_text or "") < 1_500
    assert x.tokens.output == 4_000, "the figures are those of all events"


@pytest.mark.parametrize("coded", [False, True])
def test_a_long_read_is_processed_in_slices(coded: bool) -> None:
    stream = b"".join(WORD.replace(b'"a"', b'"%d"' % i) for i in range(20_000))
    more = b"Content-Encoding: gzip\r\n" if coded else b""
    whole, sliced = (Observer("r", 1, 0, 0, HEAD) for _ in range(2))
    for o in (whole, sliced):
        o.request_end(0)
        o.response_head(answer(b"text/event-stream", more), 1, 0)
    data = gzip.compress(stream) if coded else stream
    whole.response_data(data, 2, 0)
    steps, events_max, before = 0, 0, 0
    for _ in sliced.response_slices(data, 2, 0):
        events = sliced.running_state().events
        steps, events_max, before = steps + 1, max(events_max, events - before), events
    assert steps >= len(stream) // SLICE_BYTES
    assert 0 < events_max <= SLICE_BYTES // len(WORD) + 1
    found = [o.finish(9, "complete", None, None, 0, 0, 0, 0) for o in (whole, sliced)]
    assert found[0] == found[1]
    assert (found[0].reads, found[0].tokens.output) == (1, 20_000)


def test_an_exchange_that_is_given_up_between_slices_is_timed_and_not_read_further() -> None:
    stream = b"".join(WORD.replace(b'"a"', b'"%d"' % i) for i in range(20_000))
    o = Observer("r", 1, 0, 0, HEAD)
    o.request_end(0)
    o.response_head(answer(b"text/event-stream", b"Content-Encoding: gzip\r\n"), 1, 0)
    for step, _ in enumerate(o.response_slices(gzip.compress(stream), 2, 0)):
        if step == 3:
            assert o.give_up("its parsing took too much CPU time")
    x = o.finish(9, "complete", None, None, 0, 0, 0, 0)
    assert 0 < len(x.timeline.events) < 2_000
    assert x.error is not None and "CPU time" in x.error


@pytest.mark.parametrize("implementation", [pytest.param(native.compiled, id="compiled"), None])
@pytest.mark.parametrize("characters", [16, 3_900])
def test_events_that_are_set_aside_count_against_the_limit(
    monkeypatch: pytest.MonkeyPatch, implementation: Any, characters: int
) -> None:
    monkeypatch.setattr(native, "compiled", implementation)
    shortages: list[int] = []
    budget = Budget(BYTES // 2, lambda: shortages.append(1))
    # One character beyond the BMP makes each of the others take 4 bytes.
    word = WORD.replace(b'"a"', b'"%b"' % ("\U0001f600" + characters * "x").encode())
    tracemalloc.start()
    try:
        observers = []
        for i in range(40):
            o = Observer("r", i, 0, 0, HEAD, on_request=lambda *_: True, bodies=budget)
            o.request_end(0)
            o.response_head(answer(b"text/event-stream"), 1, 0)
            observers.append(o)
        before = tracemalloc.get_traced_memory()[0]
        for n in range(40):
            for o in observers:
                o.response_data(word, 2 + n, 0)
        kept_bytes = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert shortages and budget.free_bytes >= 0
    assert kept_bytes < BYTES // 2 + 40 * 8_000, "the rest is what each open exchange takes without any text"
    for o in observers:
        assert o.finish(9, "complete", None, None, 0, 0, 0, 0).tokens.output == 40
    assert budget.free_bytes == BYTES // 2
