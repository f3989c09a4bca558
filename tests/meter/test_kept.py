import json
from array import array

import pytest

from llmtap.meter.kept import BadQuery, Kept, Query, weight_bytes
from llmtap.metrics.deadlines import Benefit
from llmtap.record.asked import Asked, Said
from llmtap.record.exchange import Exchange
from llmtap.record.outcome import Outcome
from tests.support.streams import streamed


def ring(n: int, exchanges_max: int = 100, **limits: int) -> Kept:
    kept = Kept(exchanges_max, **limits)
    for seq in range(1, n + 1):
        kept.add(streamed(100, 140, seq=seq))
    return kept


def seqs(found: list[Exchange]) -> list[int]:
    return [x.seq for x in found]


def test_the_newest_come_first_and_the_oldest_go() -> None:
    found, cursor = ring(7, exchanges_max=3).find(Query())
    assert (seqs(found), cursor) == ([7, 6, 5], None)


def test_the_ring_is_bounded_by_bytes_too() -> None:
    each = weight_bytes(streamed(100, 140))
    kept = ring(7, bytes_max=2 * each)
    assert seqs(kept.find(Query())[0]) == [7, 6]
    assert kept.weight_bytes == 2 * each


def test_every_part_of_an_exchange_has_weight() -> None:
    bare = weight_bytes(streamed(100, 140))
    for field, value, n_bytes in (
        ("model", "m" * 1_100, 1_000),
        ("request_id", "i" * 1_000, 1_000),
        ("usage", {"u" * 1_000: "v" * 1_000}, 2_000),
        ("server_timing", [{"name": "n" * 1_000}], 1_000),
        ("server_gaps_ns", array("q", [40_000_000] * 1_000), 8_000),
        ("asked", Asked(roles=["user"] * 1_000), 8_000),
    ):
        x = streamed(100, 140)
        setattr(x, field, value)
        assert bare + n_bytes <= weight_bytes(x), field
    many = streamed(*range(100, 1_100))
    assert weight_bytes(many) >= bare + 998 * (8 + 1 + array("l").itemsize * 2 + 1 + 8)


def test_what_a_capture_counts_itself_has_no_weight_here() -> None:
    x = streamed(100, 140)
    x.said = Said("q" * 10_000, "a" * 10_000)
    assert weight_bytes(x) == weight_bytes(streamed(100, 140))


def test_an_exchange_larger_than_the_ring_is_not_kept() -> None:
    assert len(ring(1, bytes_max=1_000)) == 0


def test_a_ring_of_nothing_keeps_nothing() -> None:
    assert len(ring(3, exchanges_max=0)) == 0


def test_cursors_walk_through_all_of_it_also_while_it_turns() -> None:
    kept = ring(7)
    found, cursor = kept.find(Query(limit=3))
    assert (seqs(found), cursor) == ([7, 6, 5], "5")
    kept.add(streamed(100, seq=8))
    found, cursor = kept.find(Query.parse({"limit": "3", "next": cursor or ""}))
    assert (seqs(found), cursor) == ([4, 3, 2], "2")
    found, cursor = kept.find(Query.parse({"limit": "3", "next": cursor or ""}))
    assert (seqs(found), cursor) == ([1], None)


def test_a_full_page_at_the_very_end_has_no_cursor() -> None:
    assert ring(3).find(Query(limit=3))[1] is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({"outcome": "truncated"}, [2]), ({"status": "200"}, [2, 1]), ({"status": "500"}, [3]),
     ({"model": "big"}, [3]),
     ({"tenant": "acme"}, [1]), ({"path": "/v1/chat/completions"}, [3, 2, 1]), ({"stream": "1"}, [3, 2, 1]),
     ({"id": "r-2"}, [2]), ({"seq": "3"}, [3]), ({"request_id": "abc"}, [1]),
     ({"tenant": "acme", "seq": "2"}, []),
     ({"model": "none"}, [])],
)  # fmt: skip
def test_filters_match_by_an_exchanges_own_names(fields: dict[str, str], expected: list[int]) -> None:
    kept = Kept(10)
    first, second, third = streamed(1, seq=1), streamed(1, seq=2), streamed(1, seq=3)
    first.tenant, first.request_id = "acme", "abc"
    second.outcome = Outcome.TRUNCATED
    third.status, third.model = 500, "big"
    for x in (first, second, third):
        kept.add(x)
    assert seqs(kept.find(Query.parse(fields))[0]) == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [("limit", "0"), ("limit", "1001"), ("limit", "ten"), ("limit", "-1"), ("events", "maybe"), ("next", "x"),
     ("outcome", "fine"), ("status", "2xx"), ("stream", "2"), ("colour", "red"), ("seq", "9" * 30)],
)  # fmt: skip
def test_a_query_that_cannot_be_names_its_field(field: str, value: str) -> None:
    with pytest.raises(BadQuery) as caught:
        Query.parse({"limit": "5", field: value})
    assert caught.value.field == field


def test_as_json_an_exchange_has_its_metrics_and_on_request_its_events() -> None:
    kept = ring(2)
    found, cursor = kept.find(Query(limit=1))
    answer = json.loads(kept.to_json(found, cursor, events=True))
    assert answer["next"] == "2"
    (x,) = answer["exchanges"]
    assert (x["id"], x["outcome"], x["metrics"]["ttft"], x["metrics"]["tbc_max"]) == (
        "r-2",
        "complete",
        0.1,
        0.04,
    )
    assert x["chunking"]["content_events"] == 2
    assert [event["t"] for event in x["events"]] == [0.1, 0.14]
    assert "events" not in json.loads(kept.to_json(found, cursor, events=False))["exchanges"][0]


def test_what_is_uncertain_can_be_left_out_and_asked_for() -> None:
    kept = ring(3)
    for _, _, x in kept._ring:
        x.uncertain = x.seq == 2
    assert [x.seq for x in kept.find(Query.parse({"certain": "1"}))[0]] == [3, 1]
    assert [x.seq for x in kept.find(Query.parse({"certain": "0"}))[0]] == [3, 2, 1]
    assert [x.seq for x in kept.find(Query.parse({"uncertain": "1"}))[0]] == [2]


def test_a_reader_of_another_speed_waits_otherwise() -> None:
    kept = Kept(2, benefit=Benefit.at_speed(10.0))
    kept.add(streamed(100, 140))
    (x,) = json.loads(kept.to_json(*kept.find(Query()), events=False))["exchanges"]
    assert x["metrics"]["smooth_benefit"] == 2 - 5 * 0.1
