"""Invariant: what is read back from a row is the exchange that was written, in whole microseconds; nothing
that comes from outside can stop a row.
"""

from array import array
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtap.capture.columns import COLUMNS, Conversion
from llmtap.capture.schema import SCHEMA
from llmtap.capture.store.rows import exchanges_of, to_batch
from llmtap.exchange.exchange import CapturedText, Exchange, RequestShape, Tokens, Turn
from llmtap.exchange.outcome import EventClass, Outcome, TokenSource
from tests.support.traffic.exchanges import US, WALL_NS, any_exchange, streamed

POINTS = [
    column.part_and_name[1]
    for column in COLUMNS
    if column.conversion is Conversion.OFFSET and column.part_and_name[0]
]
SAME = ["arrival_wall_ns", "path", "refusal", "guardrail", "usage", "server_timing", "text"]
SAME += [
    column.path for column in COLUMNS if column.conversion is Conversion.SAME and column.path.isidentifier()
]


def rows_of(*exchanges: Exchange, level: str = "shape") -> list[dict[str, Any]]:
    batch, failed = to_batch(exchanges, capture="c1", level=level)
    assert not failed
    batch.validate(full=True)
    assert batch.schema.equals(SCHEMA)
    rows: list[dict[str, Any]] = batch.to_pylist()
    return rows


def row_of(x: Exchange, level: str = "shape") -> dict[str, Any]:
    (row,) = rows_of(x, level=level)
    return row


def kept(x: Exchange) -> dict[str, Any]:
    """What a row keeps of an exchange: times in whole us, since the arrival."""
    t, log, asked, turn = x.timeline, x.timeline.events, x.shape, x.turn

    def us(ns: int | None) -> int | None:
        return None if ns is None else ns // US

    def since(ns: int | None) -> int | None:
        return None if ns is None else (ns - t.arrival_ns) // US

    by_tokenizer = None if asked is None else asked.tokens
    return {
        **{name: getattr(x, name) for name in SAME},
        **{name: since(getattr(t, name)) for name in POINTS},
        **{name: us(getattr(x.added, name)) for name in ("request_ns", "first_chunk_ns", "chunk_max_ns")},
        **{name: us(getattr(x, name)) for name in ("slo_ttft_ns", "slo_tpot_ns", "dispatch_late_ns")},
        "scheduled": since(x.scheduled_ns),
        "paused": us(t.paused_ns),
        "uncertainty": -(-x.uncertainty_ns // US),
        "events": ([since(ns) for ns in log.t_ns], log.classes, log.sizes, log.tokens, log.flags, log.chars),
        "text_blocks": x.text_blocks,
        "gaps": None if x.server_gaps_ns is None else [us(ns) for ns in x.server_gaps_ns],
        "tokens": replace(x.tokens, input=by_tokenizer if x.tokens.input is None else x.tokens.input),
        "shape": None if asked is None else replace(asked, tokens=None),
        "turn": None if turn is None else replace(turn, think_ns=us(turn.think_ns)),
    }


# ---------------------------------------------------------------- there and back


@settings(max_examples=40)
@given(st.lists(any_exchange(), max_size=3))
def test_what_is_read_back_is_what_was_written(exchanges: list[Exchange]) -> None:
    batch, failed = to_batch(exchanges, capture="c1", level="full")
    assert not failed
    found = list(exchanges_of(batch))
    assert [y.timeline.arrival_ns for y in found] == [x.arrival_wall_ns for x in exchanges]
    # An input count has no source of its own in an exchange: it is the usage's or the tokenizer's.
    assert [kept(y) for y in found] == [kept(x) for x in exchanges]


def test_a_part_of_a_batch_reads_as_that_part() -> None:
    xs = [streamed(i, words=i) for i in range(5)]
    xs[2].shape = RequestShape(roles=["user"], sizes=array("q", [7]))
    batch, _ = to_batch(xs, capture="c1", level="shape")
    part = list(exchanges_of(batch.slice(2, 2)))
    assert [x.seq for x in part] == [2, 3]
    assert part[1].timeline.events.t_ns[0] - part[1].timeline.arrival_ns == 100_000 * US
    assert [len(x.timeline.events) for x in part] == [3, 4]
    assert part[0].shape.sizes == array("q", [7])


def test_a_row_of_nulls_is_an_exchange_of_which_nothing_is_known() -> None:
    nulls = pa.RecordBatch.from_arrays([pa.nulls(2, field.type) for field in SCHEMA], schema=SCHEMA)
    x, _ = exchanges_of(nulls)
    assert (x.relay, x.seq, x.arrival_wall_ns, x.outcome) == ("", 0, 0, Outcome.COMPLETE)
    assert x.shape is x.turn is x.text is x.refusal is x.usage is None
    assert x.tokens == Tokens()
    assert not len(x.timeline.events)


# ---------------------------------------------------------------- values


def test_offsets_are_whole_microseconds_rounded_down() -> None:
    x = streamed(words=1)
    a = x.timeline.arrival_ns
    x.timeline.submit_ns = a + 1_999
    x.scheduled_ns = a - 1
    x.timeline.events.t_ns[0] = a + 5_999
    x.uncertainty_ns = 1_001
    row = row_of(x)
    assert (row["submit_us"], row["scheduled_us"], row["event_us"][0]) == (1, -1, 5)
    assert row["uncertainty_us"] == 2
    assert row["arrival_ns"] == WALL_NS
    assert row["arrival"].timestamp() == WALL_NS / 1e9


def test_event_lists_hold_names_and_null_for_tokens_that_nobody_told() -> None:
    row = row_of(streamed(words=2))
    assert {name: value for name, value in row.items() if name == "id" or name.startswith("event_")} == {
        "id": "run.0.1-1",
        "event_class": ["content", "content", "done"],
        "event_tokens": [1, 1, None],
        "event_us": [100_000, 120_000, 121_000],
        "event_bytes": [181, 181, 12],
        "event_flags": [2, 2, 0],
        "event_chars": None,
    }


def test_the_source_of_the_input_count_is_told() -> None:
    asked = RequestShape(tokens=42)
    by_usage = row_of(streamed(shape=asked))
    by_tokenizer = row_of(streamed(shape=asked, tokens=Tokens(output=3, source=TokenSource.CHUNKS)))
    by_nobody = row_of(streamed(tokens=Tokens()))
    told = [(row["input_tokens"], row["input_token_source"]) for row in (by_usage, by_tokenizer, by_nobody)]
    assert told == [(100, "usage"), (42, "tokenizer"), (None, None)]
    assert [row["token_source"] for row in (by_usage, by_tokenizer, by_nobody)] == ["usage", "chunks", None]


HUGE = 10**30
HOSTILE: list[tuple[str, Any, str, Any]] = [
    ("model", "a\ud800b", "model", "a?b"),
    ("model", "nul\x00 and \x1b[2J", "model", "nul\x00 and \x1b[2J"),
    ("model", 17, "model", "17"),
    ("status", HUGE, "status", None),
    ("request_bytes", -HUGE, "request_bytes", None),
    ("tokens", Tokens(HUGE, HUGE, HUGE, HUGE, TokenSource.USAGE), "output_tokens", None),
    ("tokens", Tokens(True, 1.5), "input_tokens", 1),  # type: ignore[arg-type]
    ("shape", RequestShape(max_tokens=HUGE), "max_tokens", None),
    ("shape", RequestShape(temperature=10**400), "temperature", None),
    ("shape", RequestShape(temperature="hot"), "temperature", None),  # type: ignore[arg-type]
    (
        "shape",
        RequestShape(roles=["user", "my word is x", "\ud800"]),
        "message_roles",
        ["user", "other", "other"],
    ),
    ("turn", Turn("\ud800", "explicit", 2**40, think_ns=HUGE), "think_us", None),
    ("usage", {"n": HUGE}, "usage", '{"n":' + str(HUGE) + "}"),
    ("usage", {"n": "\ud800"}, "usage", '{"n":"?"}'),
    ("usage", {"n": object()}, "usage", None),
    ("usage", {"n": "x" * 70_000, "m": 1}, "usage", '{"n":null,"m":1}'),
    ("usage", {str(i): i for i in range(9_999)}, "usage", None),
    ("usage", {"said": "a whole sentence", "tier": "standard"}, "usage", '{"said":null,"tier":"standard"}'),
    ("usage", {'said "that"': 1, "m": [1, {"x": "a\nb"}]}, "usage", '{"m":[1,{"x":null}]}'),
    ("server_timing", [{"name": "what he wrote", "ms": 1.5}], "server_timing", '[{"name":null,"ms":1.5}]'),
    ("path", "/v1/keys/sk-live_abcdef/chat", "path", "/v1/keys/*/chat"),
    (
        "path",
        "/openai/deployments/gpt-4.1-mini-2025-04-14/chat",
        "path",
        "/openai/deployments/gpt-4.1-mini-2025-04-14/chat",
    ),
    ("path", "/v1/responses/resp_68af4030592c81938ec0a5fbab4a3e9f", "path", "/v1/responses/*"),
    ("path", "/" + "x" * 9_999 + "/\ud800", "path", "/*/*"),
]


@pytest.mark.parametrize(("attribute", "value", "column", "written"), HOSTILE)
def test_nothing_from_outside_stops_a_row(attribute: str, value: Any, column: str, written: Any) -> None:
    good = streamed(1)
    row, other = rows_of(streamed(2, **{attribute: value}), good)
    assert row[column] == written
    assert other == row_of(good)


def test_an_exchange_that_cannot_be_a_row_costs_no_other() -> None:
    broken = streamed(2)
    broken.timeline.events.t_ns.pop()
    batch, failed = to_batch([streamed(1), broken, streamed(3)], capture="c1", level="shape")
    assert batch.column("seq").to_pylist() == [1, 3]
    (error,) = failed
    assert "but the log has 3 events" in str(error)


# ---------------------------------------------------------------- privacy


def revealing() -> Exchange:
    asked = RequestShape(
        max_tokens=9,
        tools=2,
        roles=["system", "user"],
        sizes=array("q", [30, 12]),
        blocks=array("q", [17, 4]),
        block_size=16,
        block_unit="bytes",
    )
    return streamed(shape=asked, turn=Turn("s1", "prefix", 2, "run.0.1-9", 5 * US, "tool"))


def test_the_level_none_keeps_a_conversation_that_named_itself() -> None:
    row = row_of(streamed(turn=Turn("mine", "explicit", 1, None, 7 * US, "human")), "none")
    assert (row["session"], row["turn"], row["think_us"]) == ("mine", 1, 7)


@pytest.mark.parametrize("level", ["none", "shape"])
def test_below_the_level_full_nothing_that_was_said_is_written(level: str) -> None:
    x = revealing()
    x.text = CapturedText("SECRET asked", "SECRET answered", 2)
    row = row_of(x, level)
    assert "SECRET" not in str(row)
    assert row["redactions"] is None
    assert row["level"] == level


def test_an_unknown_class_of_a_later_version_is_metadata() -> None:
    batch, _ = to_batch([streamed(words=1)], capture="c1", level="shape")
    at = SCHEMA.get_field_index("event_class")
    column = pa.array([["content", "telepathy"]], SCHEMA.field("event_class").type)
    (x,) = exchanges_of(batch.set_column(at, SCHEMA.field("event_class"), column))
    assert list(x.timeline.events.classes) == [EventClass.CONTENT, EventClass.METADATA]
