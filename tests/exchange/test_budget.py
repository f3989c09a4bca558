"""Invariant: whatever an exchange took is given back when it is over, in whichever way."""

import json
from collections.abc import Callable

import pytest

from llmtap.exchange.bounds import Budget, Share
from llmtap.exchange.exchange import Exchange
from llmtap.exchange.observer import Observer

BYTES = 10_000
MB = 1 << 20
UPLOAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nContent-Length: %d\r\n\r\n"
JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
ASKED = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "x" * 3_000}]}).encode()
SAID = {
    "object": "chat.completion",
    "model": "tiny-1",
    "choices": [{"index": 0, "message": {"content": "y"}}],
}


class Bodies:
    """A budget that knows what is left of it and how often it was short."""

    def __init__(self, bytes_max: int = BYTES) -> None:
        self.shortages = 0
        self.budget = Budget(bytes_max, self._short)

    def _short(self) -> None:
        self.shortages += 1

    @property
    def left(self) -> int:
        return self.budget.left


def observer(bodies: Bodies, head: bytes = UPLOAD % len(ASKED)) -> Observer:
    return Observer("r", 1, 0, 0, head, bodies=bodies.budget)


def end(o: Observer) -> Exchange:
    return o.finish(9, "complete", None, None, 0, 0, 0, 0)


def test_a_share_takes_what_is_there_and_gives_it_back_once() -> None:
    bodies = Bodies(10)
    one, other = Share(bodies.budget), Share(bodies.budget)
    assert one.take(6) and not other.take(5) and other.take(4)
    assert (bodies.left, bodies.shortages) == (0, 1)
    one.give(2)
    one.close()
    one.close()
    assert bodies.left == 6
    alone = Share()
    assert alone.take(1 << 60)


def test_uploads_under_way_take_no_more_than_there_is() -> None:
    bodies = Bodies(20 * MB)
    uploads = [observer(bodies, UPLOAD % (8 * MB)) for _ in range(20)]
    for _ in range(100):
        for o in uploads:
            o.request_data(bytes(65_536), 1)
    held = sum(sum(map(len, o._request._body)) for o in uploads)
    assert 3 * 100 * 65_536 == held <= 20 * MB, "those that find room can go on, as others let go of theirs"
    assert bodies.shortages == 17, "each is told once"
    for o in uploads:
        o.abandon()
    assert bodies.left == 20 * MB


def test_small_pieces_count_for_what_they_take() -> None:
    bodies = Bodies()
    o = observer(bodies)
    for _ in range(1_000):
        o.request_data(b"ab", 1)
    assert len(o._request._body) < 200 and bodies.shortages == 1


def test_a_request_that_finds_no_room_is_measured_without_its_body() -> None:
    bodies = Bodies(1_000)
    o = observer(bodies)
    o.request_data(ASKED, 1)
    o.request_end(1)
    o.response_head(JSON % len(json.dumps(SAID)), 2, 1)
    o.response_data(json.dumps(SAID).encode(), 3, 1)
    x = end(o)
    assert (x.model, x.response_model, x.unparsed_events) == ("tiny-1", "tiny-1", 0)
    assert (bodies.left, bodies.shortages) == (1_000, 1)


def test_an_answer_that_finds_no_room_is_counted_and_not_understood() -> None:
    bodies = Bodies()
    others = Share(bodies.budget)
    assert others.take(BYTES - 50)
    o = observer(bodies)
    o.response_head(JSON % 100, 2, 1)
    for _ in range(4):
        o.response_data(b'{"a":"' + b"x" * 20, 3, 1)
    x = end(o)
    assert (x.unparsed_events, x.timeline.events.sizes.tolist(), x.reads) == (1, [104], 4)
    assert (bodies.left, bodies.shortages) == (50, 1)


def _asked_in_part(o: Observer) -> None:
    o.request_data(ASKED[:500], 1)


def _asked(o: Observer) -> None:
    o.request_data(ASKED, 1)
    o.request_end(1)


def _answered_in_part(o: Observer) -> None:
    _asked(o)
    o.response_head(JSON % 1_000, 2, 1)
    o.response_data(json.dumps(SAID).encode()[:-5], 3, 1)


def _answered_twice(o: Observer) -> None:
    _answered_in_part(o)
    _answered_in_part(o)


def _answered_by_the_line(o: Observer) -> None:
    _answered_in_part(o)
    o.response_data(b"\n", 3, 1)


def _answered_and_lost(o: Observer) -> None:
    o.response_head(
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n", 2, 1
    )
    o.response_data(b'4\r\n{"a"\r\n', 3, 1)
    o.response_data(b"no chunk", 4, 1)


def _answered_more_than_all(o: Observer) -> None:
    _answered_in_part(o)
    o.response_end(4)
    o.response_data(b"{}", 5, 1)
    _asked_in_part(o)


@pytest.mark.parametrize(
    "work",
    [_asked_in_part, _asked, _answered_in_part, _answered_twice, _answered_by_the_line, _answered_and_lost,
     _answered_more_than_all],
)  # fmt: skip
@pytest.mark.parametrize("head", [UPLOAD % len(ASKED), b"not HTTP\r\n\r\n"])
@pytest.mark.parametrize("over", [end, Observer.abandon])
def test_all_is_given_back(
    work: Callable[[Observer], None], head: bytes, over: Callable[[Observer], object]
) -> None:
    bodies = Bodies()
    o = observer(bodies, head)
    work(o)
    over(o)
    assert (bodies.left, bodies.shortages) == (BYTES, 0)


def test_a_whole_request_holds_nothing_while_its_answer_runs() -> None:
    bodies = Bodies()
    _asked(observer(bodies))
    assert bodies.left == BYTES
