"""Invariants: the text of a model is found by structure, nothing else is, and no event makes it raise."""

import json
import random
import time
from collections.abc import Sequence
from typing import Any

import pytest

from llmtap.protocol.delta import Delta, EventClass, Reading, ReadingLimit
from llmtap.protocol.dialects.chooser import EVENTS_KEPT_MAX, DialectChooser
from llmtap.protocol.dialects.registry import Dialects
from llmtap.protocol.sse import SseEvent
from llmtap.protocol.structure import InferredReader, Structure, infer
from llmtap.protocol.structure.structure import PLACES_MAX
from llmtap.protocol.structure.tables import make_table
from tests.protocol.dialects.events import event
from tests.protocol.structure.streams.bodies import BODIES, SILENT_BODIES
from tests.protocol.structure.streams.forms import LAKE, Stream, stream
from tests.protocol.structure.streams.invented import INVENTED
from tests.protocol.structure.streams.little_known import STREAMS
from tests.protocol.structure.streams.silent import SILENT

RATE_MIN = 0.95
"""Of all streams with text; those of very few or very plain pieces may be missed."""


def read(
    events: Sequence[SseEvent], first: int = EVENTS_KEPT_MAX
) -> tuple[InferredReader | None, list[Delta]]:
    """Return the reader of an answer, and its events as the chooser has them read."""
    reader = infer(events[:first], whole=len(events) <= first)
    if reader is None:
        return None, []
    deltas = []
    for e in events:
        delta = reader.read_event(e)
        deltas.append(delta if delta.parsed else reader.learn(e, delta))
    return reader, deltas


def is_exact(s: Stream, first: int = EVENTS_KEPT_MAX) -> bool:
    _, deltas = read(s.events, first)
    output = [i for i, d in enumerate(deltas) if d.output]
    content = [i for i, d in enumerate(deltas) if d.content]
    return output == s.output and content[:1] == s.content[:1]


@pytest.mark.parametrize("name", [s.name for s in STREAMS if s.name.endswith("-lake")])
def test_the_text_of_an_unknown_stream_is_found(name: str) -> None:
    (found,) = [s for s in STREAMS if s.name == name]
    assert is_exact(found) or name in ("zed-lake", "youchat-lake")


@pytest.mark.parametrize("first", [EVENTS_KEPT_MAX, 4])
def test_short_streams_and_unusual_pieces_are_found_too(first: int) -> None:
    exact = sum(is_exact(s, first) for s in STREAMS)
    assert exact / len(STREAMS) >= (RATE_MIN if first == EVENTS_KEPT_MAX else 0.85)


@pytest.mark.parametrize("name", [s.name for s in STREAMS if s.name.endswith("-lake")])
def test_no_known_dialect_hides_the_text_of_a_stream(name: str) -> None:
    (found,) = [s for s in STREAMS if s.name == name]
    chooser = DialectChooser("/x")
    deltas = []
    for e in found.events:
        deltas += [r.delta for r in chooser.offer(e, 1, 0)] if chooser.open else [chooser.read_event(e)]
    deltas += [r.delta for r in chooser.conclude()]
    assert [i for i, delta in enumerate(deltas) if delta.output][:1] == found.output[:1]


@pytest.mark.parametrize("name", [s.name for s in SILENT])
def test_no_output_is_found_in_a_stream_without_text(name: str) -> None:
    (silent,) = [s for s in SILENT if s.name == name]
    reader, deltas = read(silent.events)
    assert not any(d.output for d in deltas)
    assert reader is None or not reader.knows_output


@pytest.mark.parametrize("name", BODIES)
def test_the_text_of_a_whole_answer_is_found(name: str) -> None:
    value, counts = BODIES[name]
    body = json.dumps(value).encode()
    reader = infer([event(body)], whole=True)
    assert reader is not None
    delta = reader.read_body(body)
    assert delta.output and delta.text.startswith("The lake")
    assert (delta.counts and (delta.counts.input, delta.counts.output)) == counts


@pytest.mark.parametrize("name", SILENT_BODIES)
def test_no_output_is_found_in_other_json(name: str) -> None:
    body = json.dumps(SILENT_BODIES[name]).encode()
    reader = infer([event(body)], whole=True)
    assert reader is None or not reader.read_body(body).output


def test_usage_at_the_end_is_read_and_repeated_text_is_no_output() -> None:
    s = stream("x", INVENTED["nested_usage_end"](LAKE))
    reader, deltas = read(s.events)
    assert reader is not None and reader.name is None and not reader.end_certain
    assert deltas[-1].counts is not None and not deltas[-1].output
    assert (deltas[-1].counts.input, deltas[-1].counts.output) == (9, len(LAKE))


def test_usage_and_reasons_that_come_after_the_first_events_are_learned() -> None:
    head = [{"text": x, "done": False} for x in LAKE * 4]
    s = stream(
        "x",
        [
            *head,
            {
                "text": "",
                "done": True,
                "finish_reason": "stop",
                "usage": {"input_tokens": 5, "output_tokens": 70},
            },
        ],
    )
    _, deltas = read(s.events)
    assert [d.output for d in deltas] == [True] * len(head) + [False]
    assert deltas[-1].finish_reason == "stop"
    assert deltas[-1].counts is not None and deltas[-1].counts.output == 70


def test_content_behind_long_reasoning_is_learned() -> None:
    thoughts = [{"type": "thinking.delta", "delta": x} for x in LAKE * 3]
    s = stream("x", [*thoughts, *({"type": "answer.delta", "delta": x} for x in LAKE)])
    _, deltas = read(s.events)
    assert [d.event_class for d in deltas] == [EventClass.REASONING] * len(thoughts) + [
        EventClass.CONTENT
    ] * len(LAKE)


def test_text_behind_many_silent_events_is_read_if_its_name_is_sure() -> None:
    status = [{"type": "status", "message": f"Loading shard {i} of 40"} for i in range(40)]
    s = stream("x", [*status, *({"type": "token", "token": x} for x in LAKE)])
    reader, deltas = read(s.events)
    assert reader is not None and reader.knows_output
    assert [i for i, d in enumerate(deltas) if d.output] == list(range(40, 40 + len(LAKE)))


def test_nothing_inferred_is_a_refusal() -> None:
    items = [{"delta": {"content": x}, "finish_reason": None} for x in LAKE]
    for end in ("content_filter", "refusal", "safety", "SAFETY", "guardrail_intervened"):
        _, deltas = read(stream("x", [*items, {"delta": {"content": "."}, "finish_reason": end}]).events)
        assert all(d.verdict is None and not d.refusal for d in deltas)
        assert {d.event_class for d in deltas}.isdisjoint({EventClass.GUARDRAIL, EventClass.REFUSAL})
        assert deltas[-1].finish_reason == end and deltas[-1].text == "."
    _, deltas = read(stream("x", [{"refusal_delta": {"refusal": x}} for x in LAKE]).events)
    assert all(d.output and not d.refusal for d in deltas)


def test_errors_are_errors() -> None:
    s = stream("x", [*({"text": x} for x in LAKE), {"error": {"type": "overloaded", "message": "m"}}])
    _, deltas = read(s.events)
    assert deltas[-1].event_class is EventClass.ERROR and deltas[-1].error_type == "overloaded"


# ---------------------------------------------------------------- hostile input

DEEP = b'{"a":' * 5_000 + b"1" + b"}" * 5_000
BOMBS: dict[str, list[Any]] = {
    "deep": [DEEP] * 16,
    "very deep": [b"[" * 60_000],
    "wide": [{f"m{i}": f"the text {i}" for i in range(300)}] * 16,
    "new names": [{f"m{k}_{i}": " piece" for i in range(300)} for k in range(16)],
    "new types": [{"type": f"type.{chr(97 + k)}", "delta": " x" * 2_000} for k in range(16)],
    "long text": [{"text": "a1b2" * 15_000}],
    "blank text": [{"text": " " * 60_000}],
    "digits": [{"text": "1" * 60_000}],
    "lists": [{"a": [[[[["x"] * 8] * 8] * 8] * 8]}] * 16,
    "marks": [{f"t{i}": {"type": f"k{i}", "text": " a"} for i in range(100)}] * 16,
    "odd names": [
        {"": " a", ".": " b", "a[0]": " c", "a=b": " d", "\n": " e", "x" * 900: " f", "\ud800": " g"}
    ]
    * 16,
    "odd marks": [{"type": "a]b", "text": " a"}, {"type": "a.b*", "text": " b"}, {"type": "[", "text": " c"}]
    * 4,
    "numbers": [
        {"usage": {"output_tokens": 1 << 70, "input_tokens": -1}, "text": " a"},
        {"usage": {"output_tokens": 0.5}},
    ]
    * 4,
    "broken": [b'{"text": "a', b"\xff\xfe", b"", b"null", b"[]", b"{}", b"[DONE]", b'"', b"\x00"] * 2,
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_hostile_stream_raises_nothing_and_costs_little(name: str) -> None:
    events = [event(value) for value in BOMBS[name]]
    began = time.thread_time()
    for whole in (False, True):
        reader = infer(events, whole=whole)
        for e in events if reader is not None else ():
            assert reader is not None
            delta = reader.read_event(e)
            assert delta.output == bool(delta.choices)
            reader.learn(e, delta)
            reader.read_body(e.data or b"")
    assert time.thread_time() - began < 2, "about 0.1 s on a quiet machine"


def test_what_is_learned_of_an_answer_is_bounded() -> None:
    reader = infer([event({"token": x}) for x in LAKE], whole=False)
    assert reader is not None
    rng = random.Random(1)
    for k in range(3_000):
        e = event(
            {
                f"k{k}": {f"m{rng.randrange(9_999)}": " text" for _ in range(40)},
                "type": f"t{chr(97 + k % 26)}{k}",
            }
        )
        reader.learn(e, reader.read_event(e))
    structure = reader._structure
    assert reader.limits == (ReadingLimit.STRUCTURE_PLACES, ReadingLimit.STRUCTURE_TABLES)
    assert max(map(len, (structure.kinds, structure.places, structure.counters, structure.flags))) <= 256
    assert reader.read_event(event({"token": " on"})).output


def test_values_are_bounded_across_events() -> None:
    structure = Structure()
    for _ in range(1_000):
        structure.add(event({f"m{i}": 1 for i in range(200)}))
    assert structure.values_left == 0
    assert structure.limits == (ReadingLimit.STRUCTURE_VALUES,)


def test_places_beyond_the_bound_are_reported() -> None:
    structure = Structure()
    for i in range(PLACES_MAX):
        structure.add(event({"type": f"t{chr(97 + i % 26)}{i}"}))
    assert structure.limits == ()
    structure.add(event({"type": "one.more"}))
    assert structure.limits == (ReadingLimit.STRUCTURE_PLACES,)


def test_the_table_of_a_stream_of_arrays_claims_its_events() -> None:
    """The user adds the drafted table, and the next answer is read by it."""
    structure = Structure()
    events = [event([{"k": "bit", "out": word}]) for word in LAKE]
    for e in (*events, event([{"k": "stop", "tokens_read": 7, "tokens_written": 11}])):
        structure.add(e)
    table = make_table(structure, whole=True, name="stack", source="stack.sse")
    assert table is not None
    assert (table.counts.input, table.counts.output) == (("tokens_read",), ("tokens_written",))
    chooser = DialectChooser("/stack/say", Dialects([table]))
    released = chooser.offer(events[0], 40, 0)
    assert (chooser.name, chooser.reading) == ("stack", Reading.DIALECT)
    assert released[0].delta.output
