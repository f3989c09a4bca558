"""What is under way is told as it stands, and asking changes nothing of what comes of it."""

import asyncio
from typing import Any

import msgspec
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given
from hypothesis import strategies as st

from llmtap.channel.frames import Assigned, FrameKind, Hello
from llmtap.clock import ManualClock
from llmtap.meter.admin.server import admin_app
from llmtap.meter.options import MeterOptions
from llmtap.meter.pipeline.assembler import Assembler
from llmtap.meter.pipeline.exchanges import POINTS_MAX, StreamsQuery, thinned
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from llmtap.metrics.latency import measure
from tests.meter.admin.test_openapi import fits
from tests.meter.sinks import CollectingSink
from tests.support.traffic.experiments import an_experiment
from tests.support.traffic.tap_frames import MS, Script

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

    def told(self, query: str = "") -> Any:
        async def run() -> Any:
            async with (
                TestClient(TestServer(admin_app(self.tally))) as client,
                client.get("/api/v1/streams" + query) as answer,
            ):
                assert answer.status == 200, await answer.text()
                return await answer.json()

        told = asyncio.run(run())
        fits(told, "Streams")
        return told


def test_a_stream_is_told_from_its_arrival_to_its_end() -> None:
    stage = Stage()
    assert stage.told() == {"count": 0, "window": 10.0, "streams": []}
    stage.play(Script().request(1))
    stage.clock.now_ns = 50 * MS
    (one,) = stage.told()["streams"]
    assert {
        "id": "r0-1", "model": "tiny", "endpoint": "chat.completions", "stream": True, "age": 0.05,
        "ttft": None, "since_last": None, "tokens": 0, "timeline": [],
    }.items() <= one.items()  # fmt: skip
    stage.play(Script().head(1, 90).word(1, 101).word(1, 121).word(1, 161))
    stage.clock.now_ns = 200 * MS
    (one,) = stage.told()["streams"]
    assert (one["age"], one["ttft"], one["since_last"]) == (0.2, 0.1, 0.039)
    assert (one["events"], one["tokens"], one["dialect"]) == (3, 3, "openai.chat")
    assert one["timeline"] == [[0.101, 1], [0.121, 1], [0.161, 1]]
    stage.play(Script().end(1, 210, 3).close(1, 211))
    assert stage.told() == {"count": 0, "window": 10.0, "streams": []}


def test_one_can_be_asked_for_by_its_id() -> None:
    stage = Stage(experiment=an_experiment())
    stage.play(Script().request(1).frame(
        FrameKind.ARM, 1, 0, 0, msgspec.json.encode(Assigned(arm="marked", unit="ab"))
    ))  # fmt: skip
    stage.play(Script().request(2))

    def ids(query: str) -> list[str]:
        return [one["id"] for one in stage.told(query)["streams"]]

    assert ids("") == ["r0-2", "r0-1"]
    assert ids("?id=r0-1") == ids("?id=r0-1&limit=1") == ["r0-1"]
    assert ids("?id=r0-9") == []
    assert stage.told("?id=r0-1")["streams"][0]["arm"] == "marked"
    assert stage.told("?id=r0-9")["count"] == 2


def test_asking_changes_nothing_of_what_comes_of_a_stream() -> None:
    def played(*, asked: bool) -> Any:
        stage = Stage()
        sink = CollectingSink()
        stage.tally.sinks.append(sink)
        stage.play(Script().request(1).head(1, 50))
        for i in range(200):
            stage.play(Script().word(1, 60 + 10 * i, f"word{i}"))
            if asked and i % 7 == 0:
                stage.clock.now_ns = (60 + 10 * i) * MS
                (copied,) = asyncio.run(stage.tally.streams.find(StreamsQuery()))
                assert copied.to_dict()["tokens"] == i + 1
        stage.play(Script().end(1, 3_000, 200).close(1, 3_001))
        (x,) = sink.exchanges
        return x.to_dict(measure(x).metrics(), {}, events=True)

    assert played(asked=True) == played(asked=False)


POINTS = st.lists(st.tuples(st.integers(0, 10 * S), st.integers(0, 9)), max_size=700).map(sorted)


@given(POINTS)
def test_thinning_loses_no_token_and_hides_no_long_pause(points: list[tuple[int, int]]) -> None:
    thin = thinned(points, 0, 10 * S)
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
