"""The table of maximum lengths: complete, applied, and the one that SECURITY.md shows."""

import json
import re
import tracemalloc
import types
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtap.exchange.bounds import BOUNDS, Budget, Share, bound, bounded, holds_key
from llmtap.exchange.exchange import Exchange
from llmtap.exchange.observer import Observer
from llmtap.exchange.request import RequestReader
from tests.support.traffic.exchanges import any_exchange, streamed

SECURITY = Path(__file__).parents[2] / "SECURITY.md"
KEY = "sk-Ab3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0eF3hJ6kL9nO2"
CLEANED = [name for name, limits in BOUNDS.items() if limits.fit is not BOUNDS["relay"].fit]


def string_fields(kind: Any, name: str = "") -> set[str]:
    """Names of the fields that hold strings, in lists, objects and nested records too."""
    if get_origin(kind) in (Union, types.UnionType):
        return set().union(*(string_fields(one, name) for one in get_args(kind)))
    if is_dataclass(kind):
        hints = get_type_hints(kind, localns={"array": list})  # an array of numbers has no strings
        inner = (string_fields(hints[f.name], f"{name}.{f.name}" if name else f.name) for f in fields(kind))
        return set().union(*inner)
    holds = kind is str or (get_origin(kind) in (list, dict, tuple, set) and str(kind).find("str") >= 0)
    return {name} if holds else set()


def section(title: str) -> list[list[str]]:
    """Rows of the table below a heading of SECURITY.md, without its head."""
    text = SECURITY.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_every_string_of_an_exchange_has_a_bound() -> None:
    assert string_fields(Exchange) == set(BOUNDS)


def test_the_table_in_the_security_page_is_the_one_in_the_code() -> None:
    shown = {row[0].strip("`"): (row[1], row[2], row[3]) for row in section("Bounds of strings")}
    assert shown == {
        name: (
            limits.chosen_by,
            f"{limits.chars:,}",
            "" if limits.members == 1 else f"{limits.members:,}",
        )
        for name, limits in BOUNDS.items()
    }


def test_every_promise_of_the_security_page_has_a_test() -> None:
    promises = section("Promises and their tests")
    assert len(promises) >= 10
    for _, named in promises:
        for place in re.findall(r"`([^`]+)`", named):
            file, _, test = place.partition("::")
            path = SECURITY.parent / file
            assert path.is_file(), place
            assert re.search(rf"^(?:async )?def {re.escape(test)}\(", path.read_text(), re.MULTILINE), place


def test_every_field_that_a_peer_chooses_is_searched_for_keys() -> None:
    peers = {name for name, limits in BOUNDS.items() if limits.chosen_by in ("client", "upstream")}
    # A tenant's key becomes its hash (test_tenants.py); a body is redacted (test_redaction.py).
    assert set(CLEANED) == peers - {"tenant", "said.request_body", "said.response_text"}


@pytest.mark.parametrize("name", CLEANED)
def test_a_key_is_removed_wherever_it_begins(name: str) -> None:
    most = BOUNDS[name].chars
    for at in {0, 5, most // 2, *range(max(0, most - 50), most + 3), 1_100}:
        text = "/" * at + KEY + "." * 2_000
        found = bounded(name, text)
        assert len(found) <= most
        assert not any(KEY[i : i + 6] in found for i in range(len(KEY) - 6)), at
        assert bounded(name, found) == found


@given(st.text("sk-_hgpt.eyJ01aZ/ :", max_size=700), st.sampled_from(CLEANED))
def test_a_bounded_string_fits_and_has_no_key(text: str, name: str) -> None:
    found = bounded(name, text)
    assert len(found) <= BOUNDS[name].chars
    assert not holds_key(found) or name == "path"  # whose own tests are in test_paths.py


@settings(max_examples=30)
@given(any_exchange())
def test_a_usual_exchange_stays_as_it_is(x: Exchange) -> None:
    before = {f.name: getattr(x, f.name) for f in fields(x)}
    bound(x)
    assert {f.name: getattr(x, f.name) for f in fields(x)} == before


def test_lists_and_objects_are_cut_in_all_that_they_hold() -> None:
    x = streamed(1)
    many = {f"n{i}": {"inner": i, KEY: "v" * 9_000} for i in range(500)}
    x.usage, x.server_timing = many, [{"name": "n" * 9_000} for _ in range(5_000)]
    bound(x)
    assert 0 < sum(1 for _ in members(x.usage)) <= BOUNDS["usage"].members
    assert 0 < sum(1 for _ in members(x.server_timing)) <= BOUNDS["server_timing"].members
    texts = [one for one in (*members(x.usage), *members(x.server_timing)) if isinstance(one, str)]
    assert max(map(len, texts)) <= 64
    assert KEY not in str(x.usage)


def members(value: object) -> Any:
    """Every value in lists and objects, and none of their names."""
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield one if not isinstance(one, dict | list) else None
            yield from members(one)


@pytest.mark.parametrize(("method", "shown"), [("X" * 32, "X" * 32), ("X" * 33, ""), (KEY[:32], "*")])
def test_a_method_is_short_and_no_key(method: str, shown: str) -> None:
    x = streamed(1)
    x.method = ""
    RequestReader(x, f"{method} /v1/completions HTTP/1.1\r\nhost: g\r\n\r\n".encode())
    assert x.method == shown


@pytest.mark.parametrize(
    ("path", "event"),
    [
        ("/v1/chat/completions", {"model": "M", "choices": [{"index": 0, "delta": {"content": "a"}}]}),
        ("/v1/completions", {"model": "M", "choices": [{"index": 0, "text": "a"}]}),
        ("/v1/responses", {"type": "response.created", "response": {"id": "r", "model": "M"}}),
        ("/v1/messages", {"type": "message_start", "message": {"id": "m", "model": "M"}}),
        ("/api/chat", {"model": "M", "message": {"role": "assistant", "content": "a"}, "done": False}),
        ("/completion", {"model": "M", "content": "a", "stop": False}),
        ("/api/v1/chat", {"type": "chat.start", "model_instance_id": "M"}),
    ],
)
def test_an_open_stream_does_not_hold_a_long_name(path: str, event: dict[str, Any]) -> None:
    o = Observer("r", 1, 0, 0, f"POST {path} HTTP/1.1\r\nhost: g\r\n\r\n".encode())
    o.request_end(0)
    o.response_head(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n", 1, 0)
    name = event.get("type", "message")
    data = f"event: {name}\ndata: {json.dumps(event)}\n\n".replace('"M"', f'"{"m" * 8_000_000}"').encode()
    tracemalloc.start()
    try:
        o.response_data(data, 2, 0)
        held_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held_bytes < 1_000_000
    x = o.finish(3, "complete", None, None, 0, 0, 0, 0)
    assert x.response_model == x.model == "m" * 256


BYTES = 10_000
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

    def __init__(self) -> None:
        self.shortages = 0
        self.budget = Budget(BYTES, self._short)

    def _short(self) -> None:
        self.shortages += 1


def observer(bodies: Bodies, head: bytes = UPLOAD % len(ASKED)) -> Observer:
    return Observer("r", 1, 0, 0, head, bodies=bodies.budget)


def end(o: Observer) -> Exchange:
    return o.finish(9, "complete", None, None, 0, 0, 0, 0)


def test_small_pieces_count_for_what_they_take() -> None:
    bodies = Bodies()
    o = observer(bodies)
    for _ in range(1_000):
        o.request_data(b"ab", 1)
    assert len(o._request._body) < 200 and bodies.shortages == 1, "it is told once"


@pytest.fixture
def short() -> Iterator[Bodies]:
    """Bodies with room for 50 bytes; others give theirs back in the end."""
    bodies = Bodies()
    others = Share(bodies.budget)
    assert others.take(BYTES - 50)
    yield bodies
    assert (bodies.budget.left, bodies.shortages) == (50, 1)
    others.close()
    assert bodies.budget.left == BYTES


def test_a_request_that_finds_no_room_is_measured_without_its_body(short: Bodies) -> None:
    o = observer(short)
    _asked(o)
    o.response_head(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 2, 1)
    x = end(o)
    assert (x.model, x.status) == (None, 200)


def test_an_answer_that_finds_no_room_is_counted_and_not_understood(short: Bodies) -> None:
    o = observer(short)
    o.response_head(JSON % 100, 2, 1)
    for _ in range(4):
        o.response_data(b'{"a":"' + b"x" * 20, 3, 1)
    x = end(o)
    assert (x.unparsed_events, x.timeline.events.sizes.tolist(), x.reads) == (1, [104], 4)


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
@pytest.mark.parametrize("over", [end, Observer.abandon])
def test_all_is_given_back(work: Callable[[Observer], None], over: Callable[[Observer], object]) -> None:
    for head in (UPLOAD % len(ASKED), b"not HTTP\r\n\r\n"):
        bodies = Bodies()
        o = observer(bodies, head)
        work(o)
        over(o)
        assert (bodies.budget.left, bodies.shortages) == (BYTES, 0)
