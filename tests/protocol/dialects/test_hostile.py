"""Invariant: nothing in place of any field, and no bytes, make a dialect raise, and its Delta stays sane."""

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llmtap.exchange.answer import is_named_line
from llmtap.protocol.delta import Delta, EventClass, TokenSource
from llmtap.protocol.dialects.chooser import DialectChooser
from llmtap.protocol.dialects.openai_shapes import read_json
from llmtap.protocol.dialects.registry import BUILT_IN, DIALECTS
from llmtap.protocol.sse import LineParser, MessageStreamParser, SseParser
from tests.protocol.dialects.events import encode, event
from tests.support.data import CORPUS

Sample = tuple[Any, bytes | None]
"""The value of an event, and the event's name."""
REALTIME: list[Sample] = [
    ({"type": "session.created", "session": {"model": "m"}}, None),
    ({"type": "response.text.delta", "delta": "a"}, None),
    (
        {
            "type": "response.done",
            "response": {
                "status": "incomplete",
                "usage": {"input_tokens": 3},
                "status_details": {"reason": "r", "error": {"type": "t"}},
            },
        },
        None,
    ),
    ({"type": "error", "error": {"type": "invalid_request_error", "message": "m"}}, None),
]


def recorded(path: Path) -> list[Sample]:
    """The JSON values of a fixture."""
    body = path.with_suffix(".sse").read_bytes()
    framing = json.loads(path.read_text(encoding="utf-8"))["body"]["framing"]
    if framing == "json":
        return [(read_json(body), None)]
    lines = LineParser(1 << 20, named=is_named_line(body) is not None)
    parser = {"ndjson": lines, "eventstream": MessageStreamParser()}.get(framing, SseParser())
    return [(read_json(e.data), e.event) for e in parser.feed(body) if e.data]


def samples() -> dict[str, list[Sample]]:
    """Values of each dialect: those of fixtures, and what they lack."""
    found: dict[str, list[Sample]] = {dialect.name: [] for dialect in DIALECTS}
    found["openai.realtime"] = REALTIME
    for path in sorted(CORPUS.glob("*.json")):
        asked = json.loads(path.read_text(encoding="utf-8"))["request"]["path"]
        values = [sample for sample in recorded(path) if isinstance(sample[0], dict | list)]
        claims = next(
            filter(None, (list(BUILT_IN.claims_of(value, asked, name)) for value, name in values)), []
        )
        found[DIALECTS[claims[0][0]]().name if claims else "openai.chat"] += values
    return found


SAMPLES = samples()
PLACES_MIN = 2
"""Places in the samples of a dialect: an event with one member has two."""
BY_NAME = {dialect.name: dialect for dialect in DIALECTS}
ODD = [
    None,
    True,
    -1,
    1 << 70,
    0.5,
    math.nan,
    math.inf,
    "",
    "x" * 300,
    "\ud800",
    "error",
    [],
    [None],
    {},
    [{"a": []}],
    {"type": {"type": []}},
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


def put(value: Any, path: tuple[Any, ...], odd: Any) -> Any:
    if not path:
        return odd
    out = copy.deepcopy(value)
    holder = out
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = odd
    return out


def check(delta: Delta) -> None:
    is_marker = not delta.output and delta.event_class in (EventClass.ROLE, EventClass.METADATA)
    assert delta.output == bool(delta.choices) or is_marker
    assert delta.output or not delta.text
    assert not (delta.content and delta.blank)
    assert delta.tokens == -1 or (delta.tokens > 0) == (delta.token_source is not TokenSource.NONE)
    assert isinstance(delta.finish_reason, str | None) and isinstance(delta.model, str | None)
    assert isinstance(delta.error_type, str | None) and isinstance(delta.error_message, str | None)
    assert delta.usage is None or isinstance(delta.usage, dict)
    ranked = [also for also in delta.also if also is not EventClass.ROLE]  # a role may come last
    assert ranked == sorted({*ranked}) and len(delta.also) - len(ranked) <= 1
    if delta.counts is not None:
        assert all(n is None or 0 <= n <= 1 << 50 for n in msgspec.structs.astuple(delta.counts))
    assert all(type(t.ms) is float or type(t.ms) is int for t in delta.server_times)


@pytest.mark.parametrize("name", SAMPLES)
def test_an_odd_value_in_any_place_raises_nothing(name: str) -> None:
    dialect = BY_NAME[name]()
    seen: set[tuple[Any, ...]] = set()
    for sample, kind in SAMPLES[name]:
        for path in places(sample):
            place = tuple(0 if isinstance(key, int) else key for key in path)
            if place in seen:
                continue
            seen.add(place)
            for odd in ODD:
                data = encode(put(sample, path, odd))
                check(dialect.read_event(event(data, kind)))
                check(dialect.read_event(event(data, b"error")))
                check(BY_NAME[name]().read_body(b"[" + data + b"," + data + b"]"))
                check(BY_NAME[name]().read_body(data))
                chooser = DialectChooser("/v1/messages")
                for released in chooser.offer(event(data), 1, 0) + chooser.conclude():
                    check(released.delta)
    assert len(seen) >= PLACES_MIN, "a sample of each dialect"


BOMBS = [
    b"[" * 200_000,
    b'{"type":' + b"[" * 200_000,
    b'{"delta":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
    b'{"unknown":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"type":"\xff\xfe"}',
    b'{"index":1' + b"0" * 5_000 + b"}",
    b'{"type":"x","type":"y"',
    b"{" + b'"a":1,' * 50_000 + b'"b":2}',
    b"\x00",
    b"{\x00}",
]


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_bombs_raise_nothing(name: str) -> None:
    dialect = BY_NAME[name]()
    for bomb in BOMBS:
        check(dialect.read_event(event(bomb)))
        check(dialect.read_body(bomb))
        for sample in [sample for sample, _ in SAMPLES[name] if isinstance(sample, dict)][:4]:
            key, rest = next(iter(sample)), encode(sample)[1:]
            check(dialect.read_event(event(b'{"%b":%b,%b' % (key.encode(), b"[" * 50_000, rest))))
