"""Queries of finished exchanges that are kept, and of those under way."""

import asyncio
import json
from array import array
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given
from hypothesis import strategies as st

from llmtap.channel.frames import Assigned, FrameKind, Hello
from llmtap.clock import ManualClock
from llmtap.exchange.exchange import Exchange, RequestShape
from llmtap.exchange.outcome import Outcome
from llmtap.export.sinks import SeriesKey
from llmtap.meter.admin.server import admin_app
from llmtap.meter.options import MeterOptions
from llmtap.meter.pipeline import exchanges as kept_module
from llmtap.meter.pipeline.assembler import Assembler
from llmtap.meter.pipeline.exchanges import (
    POINTS_MAX,
    Query,
    RecentExchanges,
    StreamsQuery,
    thin_out,
    weight_bytes,
)
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from llmtap.metrics.latency import measure
from tests.meter.admin.test_openapi import fits
from tests.meter.sinks import CollectingSink
from tests.support.traffic.experiments import an_experiment
from tests.support.traffic.streams import streamed
from tests.support.traffic.tap_frames import MS, Script


def add(kept: RecentExchanges, x: Exchange) -> None:
    kept.on_end(x, measure(x), SeriesKey("t", "m"), None)


def ring(n: int, exchanges_max: int = 100, **limits: int) -> RecentExchanges:
    kept = RecentExchanges(exchanges_max, **limits)
    for seq in range(1, n + 1):
        add(kept, streamed(100, 140, seq=seq))
    return kept


def answer(kept: RecentExchanges, **fields: str | None) -> Any:
    """The answer to these query parameters."""
    query = Query.parse({name: value for name, value in fields.items() if value is not None})
    return json.loads(kept.to_json(kept.find(query), query))


def page(kept: RecentExchanges, **fields: str | None) -> tuple[list[int], str | None]:
    """Numbers of the exchanges of an answer, and its cursor."""
    found = answer(kept, **fields)
    return [x["seq"] for x in found["exchanges"]], found["next"]


def test_the_ring_is_bounded_in_exchanges_and_bytes() -> None:
    assert page(ring(7, exchanges_max=3)) == ([7, 6, 5], None)
    each = weight_bytes(streamed(100, 140))
    kept = ring(7, bytes_max=2 * each)
    assert page(kept) == ([7, 6], None)
    assert kept.weight_bytes == 2 * each


def test_every_part_of_an_exchange_has_weight() -> None:
    bare = weight_bytes(streamed(100, 140))
    for field, value, n_bytes in (
        ("model", "m" * 1_100, 1_000),
        ("request_id", "i" * 1_000, 1_000),
        ("usage", {"u" * 1_000: "v" * 1_000}, 2_000),
        ("server_timing", [{"name": "n" * 1_000}], 1_000),
        ("server_gaps_ns", array("q", [40_000_000] * 1_000), 8_000),
        ("shape", RequestShape(roles=["user"] * 1_000), 8_000),
    ):
        x = streamed(100, 140)
        setattr(x, field, value)
        assert bare + n_bytes <= weight_bytes(x), field
    many = streamed(*range(100, 1_100))
    assert weight_bytes(many) >= bare + 998 * (8 + 1 + array("l").itemsize * 2 + 1 + 8)


def test_cursors_walk_through_all_of_it_also_while_it_turns() -> None:
    kept = ring(7)
    assert page(kept, limit="3") == ([7, 6, 5], "5")
    add(kept, streamed(100, seq=8))
    assert page(kept, limit="3", next="5") == ([4, 3, 2], "2")
    assert page(kept, limit="3", next="2") == ([1], None)


def test_filters_match_by_an_exchanges_own_names() -> None:
    kept = RecentExchanges(10)
    first, second, third = streamed(1, seq=1), streamed(1, seq=2), streamed(1, seq=3)
    first.tenant, first.request_id = "acme", "abc"
    second.outcome, second.uncertain = Outcome.TRUNCATED, True
    third.status, third.model = 500, "big"
    for x in (first, second, third):
        add(kept, x)
    for field, value, expected in (
        ("outcome", "truncated", [2]),
        ("status", "200", [2, 1]),
        ("status", "500", [3]),
        ("model", "big", [3]),
        ("model", "none", []),
        ("tenant", "acme", [1]),
        ("stream", "1", [3, 2, 1]),
        ("path", "/v1/chat/completions", [3, 2, 1]),
        ("id", "r-2", [2]),
        ("seq", "3", [3]),
        ("request_id", "abc", [1]),
        ("certain", "1", [3, 1]),
        ("certain", "0", [3, 2, 1]),
        ("uncertain", "1", [2]),
    ):
        assert page(kept, **{field: value})[0] == expected, field
    assert page(kept, tenant="acme", seq="2")[0] == []


def test_as_json_an_exchange_has_its_metrics_and_on_request_its_events() -> None:
    kept = ring(2)
    found = answer(kept, limit="1", events="1")
    assert found["next"] == "2"
    (x,) = found["exchanges"]
    assert "events_start" not in x
    metrics = x["metrics"]
    assert (x["id"], x["outcome"], metrics["ttft"], metrics["tbc_max"]) == ("r-2", "complete", 0.1, 0.04)
    assert x["chunking"]["content_events"] == 2
    assert [event["t"] for event in x["events"]] == [0.1, 0.14]
    assert "events" not in answer(kept, limit="1")["exchanges"][0]


TRACE = "0af7651916cd43dd8448eb211c80319c"


def test_an_exchange_with_a_traceparent_links_to_its_trace() -> None:
    kept = RecentExchanges(10, trace_url="https://traces.example/t/{trace_id}?q={trace_id}")
    for seq, parent in enumerate((f"00-{TRACE}-b7ad6b7169203331-01", "garbage", None), 1):
        x = streamed(100, seq=seq)
        x.trace_parent = parent
        add(kept, x)
    links = [x["trace_url"] for x in answer(kept)["exchanges"]]
    assert links == [None, None, f"https://traces.example/t/{TRACE}?q={TRACE}"]
    assert answer(ring(1))["exchanges"][0]["trace_url"] is None


def walk(kept: RecentExchanges, **fields: str) -> list[Any]:
    """All answers, from the newest exchange on."""
    answers = [answer(kept, **fields)]
    while (cursor := answers[-1]["next"]) is not None:
        answers.append(answer(kept, **fields, next=cursor))
    return answers


def joined(answers: list[Any]) -> list[Any]:
    """The exchanges of all answers, each with all its events."""
    out: list[Any] = []
    for x in (x for one in answers for x in one["exchanges"]):
        start = x.pop("events_start", 0)
        if start:
            assert out[-1]["id"] == x["id"]
            assert len(out[-1]["events"]) == start
            out[-1]["events"] += x["events"]
        else:
            out.append(x)
    return out


@pytest.mark.parametrize("bytes_max", [1, 70_000, 1 << 30])
@pytest.mark.parametrize("limit", ["2", "1000"])
def test_pages_bounded_in_bytes_hold_every_event_once(
    monkeypatch: pytest.MonkeyPatch, bytes_max: int, limit: str
) -> None:
    kept = RecentExchanges(100)
    for seq, events in enumerate((3, 2_500, 999, 1_000, 1_001, 1), 1):
        add(kept, streamed(*range(1, events + 1), seq=seq))
    (whole,) = walk(kept, events="1")
    monkeypatch.setattr(kept_module, "PAGE_BYTES_MAX", bytes_max)
    answers = walk(kept, events="1", limit=limit)
    # At most one exchange without its events, and one slice of events, more than the bound.
    head, slice_ = 2_000, 80 * kept_module.EVENTS_SLICE
    assert max(len(msgspec.json.encode(one)) for one in answers) < bytes_max + head + slice_
    assert all(len(one["exchanges"]) <= int(limit) for one in answers)
    assert all(one["exchanges"] for one in answers)
    assert joined(answers) == whole["exchanges"]


def test_an_exchange_that_left_the_ring_within_a_walk_is_passed_over() -> None:
    kept = ring(3, exchanges_max=3)
    add(kept, streamed(100, 140, seq=4))
    assert page(kept, events="1", next="1.1") == ([], None)
    (x, *others) = answer(kept, events="1", next="3.1")["exchanges"]
    assert (x["seq"], x["events_start"], len(x["events"])) == (3, 1, 1)
    assert [(other["seq"], "events_start" in other) for other in others] == [(2, False)]


S = 1_000_000_000


class Stage:
    """A meter with relays that play scripts."""

    def __init__(self, **about: Any) -> None:
        self.clock = ManualClock(now_ns=0)
        self.tally = ExchangePipeline(MeterOptions(), self.clock, **about)
        self.relays: dict[str, Assembler] = {}

    def play(self, script: Script, relay: str = "r0") -> None:
        if relay not in self.relays:
            hello = Hello(relay=relay, pid=1, clock="mono", anchor_mono_ns=0, anchor_wall_ns=0)
            self.relays[relay] = Assembler(hello, self.tally)
            self.tally.streams.join(self.relays[relay])
        self.relays[relay].digest(script.frames())

    def streams(self, query: str = "") -> Any:
        async def run() -> Any:
            async with (
                TestClient(TestServer(admin_app(self.tally))) as client,
                client.get("/api/v1/streams" + query) as answer,
            ):
                assert answer.status == 200, await answer.text()
                return await answer.json()

        result = asyncio.run(run())
        fits(result, "Streams")
        return result


def test_a_stream_is_told_from_its_arrival_to_its_end() -> None:
    stage = Stage()
    assert stage.streams() == {"count": 0, "window": 10.0, "streams": []}
    stage.play(Script().request(1))
    stage.clock.now_ns = 50 * MS
    (one,) = stage.streams()["streams"]
    assert {
        "id": "r0-1",
        "model": "tiny",
        "endpoint": "chat.completions",
        "stream": True,
        "age": 0.05,
        "ttft": None,
        "since_last": None,
        "tokens": 0,
        "timeline": [],
    }.items() <= one.items()
    stage.play(Script().head(1, 90).word(1, 101).word(1, 121).word(1, 161))
    stage.clock.now_ns = 200 * MS
    (one,) = stage.streams()["streams"]
    assert (one["age"], one["ttft"], one["since_last"]) == (0.2, 0.1, 0.039)
    assert (one["events"], one["tokens"], one["dialect"]) == (3, 3, "openai.chat")
    assert one["timeline"] == [[0.101, 1], [0.121, 1], [0.161, 1]]
    stage.play(Script().end(1, 210, 3).close(1, 211))
    assert stage.streams() == {"count": 0, "window": 10.0, "streams": []}


def test_one_can_be_asked_for_by_its_id() -> None:
    stage = Stage(experiment=an_experiment())
    stage.play(
        Script()
        .request(1)
        .frame(FrameKind.ARM, 1, 0, 0, msgspec.json.encode(Assigned(arm="marked", unit="ab")))
    )
    stage.play(Script().request(2))

    def ids(query: str) -> list[str]:
        return [one["id"] for one in stage.streams(query)["streams"]]

    assert ids("") == ["r0-2", "r0-1"]
    assert ids("?id=r0-1") == ids("?id=r0-1&limit=1") == ["r0-1"]
    assert ids("?id=r0-9") == []
    assert stage.streams("?id=r0-1")["streams"][0]["arm"] == "marked"
    assert stage.streams("?id=r0-9")["count"] == 2


def test_asking_changes_nothing_of_what_comes_of_a_stream() -> None:
    def played(*, wanted: bool) -> Any:
        stage = Stage()
        sink = CollectingSink()
        stage.tally.sinks.append(sink)
        stage.play(Script().request(1).head(1, 50))
        for i in range(200):
            stage.play(Script().word(1, 60 + 10 * i, f"word{i}"))
            if wanted and i % 7 == 0:
                stage.clock.now_ns = (60 + 10 * i) * MS
                (copied,) = asyncio.run(stage.tally.streams.find(StreamsQuery()))
                assert copied.to_dict()["tokens"] == i + 1
        stage.play(Script().end(1, 3_000, 200).close(1, 3_001))
        (x,) = sink.exchanges
        return x.to_dict(measure(x).metrics(), {}, events=True)

    assert played(wanted=True) == played(wanted=False)


POINTS = st.lists(st.tuples(st.integers(0, 10 * S), st.integers(0, 9)), max_size=700).map(sorted)


@given(POINTS)
def test_thinning_loses_no_token_and_hides_no_long_pause(points: list[tuple[int, int]]) -> None:
    thin = thin_out(points, 0, 10 * S)
    assert len(thin) <= POINTS_MAX
    assert sum(n for _, n in thin) == sum(n for _, n in points)
    times = [t for t, _ in points]
    assert {t for t, _ in thin} <= set(times)
    if points:
        assert thin[0][0] == times[0]
    # Each event lies less than a piece behind the point that stands for it.
    stands = [t for t, _ in thin]
    for t in times:
        assert min(t - before for before in stands if before <= t) <= 10 * S // POINTS_MAX
