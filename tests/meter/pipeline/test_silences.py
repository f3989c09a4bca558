"""`/api/v1/silences`: streams that send no token now, found among others by their frames alone."""

import asyncio
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.parser import text_string_to_metric_families

from llmtap.channel.frames import Assigned, FrameKind, Hello
from llmtap.channel.status import RelayStatus
from llmtap.clock import ManualClock
from llmtap.exchange.outcome import Outcome
from llmtap.meter.admin.server import admin_app
from llmtap.meter.options import MeterOptions
from llmtap.meter.pipeline.assembler import Assembler
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from llmtap.units import Duration
from tests.meter.admin.test_openapi import fits
from tests.support.traffic.relay_status import relay_status
from tests.support.traffic.streams import streamed
from tests.support.traffic.tap_frames import MS, Script

S = 1_000 * MS
UPSTREAM = "http://gateway:8000"


class Stage:
    """A meter with one relay, whose clock stands still between scripts."""

    def __init__(self, threshold_s: float = 5.0) -> None:
        self.clock = ManualClock(now_ns=0)
        options = MeterOptions(silence_threshold=Duration(round(threshold_s * S)))
        self.pipeline = ExchangePipeline(options, self.clock)
        hello = Hello(relay="r0", pid=1, clock="mono", anchor_mono_ns=0, anchor_wall_ns=0)
        self.pipeline.relays.join(hello)
        self.assembler = Assembler(hello, self.pipeline)
        self.pipeline.streams.join(self.assembler)

    def play(self, script: Script, now_ms: int | None = None) -> None:
        self.assembler.digest(script.frames())
        if now_ms is not None:
            self.clock.now_ns = now_ms * MS

    def status(self, **fields: Any) -> None:
        script = Script().status(RelayStatus(upstreams={UPSTREAM: True}, **fields))
        self.assembler.digest(script.frames())

    def get(self, path: str) -> Any:
        async def run() -> Any:
            async with (
                TestClient(TestServer(admin_app(self.pipeline))) as client,
                client.get(path) as answer,
            ):
                is_json = answer.content_type == "application/json"
                return await answer.json() if is_json else await answer.text()

        return asyncio.run(run())

    def silences(self, query: str = "") -> Any:
        answer = self.get("/api/v1/silences" + query)
        fits(answer, "Silences")
        return answer

    def silent(self) -> dict[str, float]:
        return {one["id"]: one["silent"] for one in self.silences()["streams"]}


def keep_alive(script: Script, seq: int, t_ms: int) -> Script:
    payload = b": keep-alive\n\n"
    return script.frame(FrameKind.RESPONSE_DATA, seq, t_ms * MS, 0, b"%x\r\n%b\r\n" % (len(payload), payload))


def begun(seq: int, words: int = 20) -> Script:
    """A stream of words, from 100 ms on one every 20 ms."""
    script = Script().request(seq).head(seq, 90)
    for i in range(words):
        script.word(seq, 100 + 20 * i, f"word{i}")
    return script


def test_a_stream_is_silent_from_the_threshold_to_its_next_token() -> None:
    stage = Stage()
    stage.status()
    stage.play(begun(1), now_ms=5_479)
    assert stage.silences() == {
        "threshold": 5.0,
        "running": 1,
        "not_judged": 0,
        "count": 0,
        "groups": [],
        "streams": [],
    }
    # The last token came at 480 ms. Keep-alives are no tokens.
    stage.play(keep_alive(Script(), 1, 5_300), now_ms=5_480)
    answer = stage.silences()
    (one,) = answer["streams"]
    past = one.pop("past")
    assert one == {
        "id": "r0-1",
        "kind": "next_token",
        "tenant": "default",
        "model": "tiny",
        "upstream": UPSTREAM,
        "arm": None,
        "age": 5.48,
        "silent": 5.0,
        "since_read": 0.18,
        "tokens": 20,
    }
    assert (past["silence"], past["n"], past["resumed"], past["share"]) == (5.0, 0, 0, None)
    assert answer["groups"] == [
        {
            "kind": "next_token",
            "tenant": "default",
            "model": "tiny",
            "upstream": UPSTREAM,
            "n": 1,
            "longest": 5.0,
        }
    ]
    stage.play(Script().word(1, 9_000, "again"), now_ms=9_001)
    assert stage.silent() == {}


def test_a_stream_that_waits_for_its_first_token_is_of_its_own_kind() -> None:
    stage = Stage()
    stage.play(Script().request(1).request(2, 4_000), now_ms=5_001)
    stage.play(keep_alive(Script().head(1, 50), 1, 4_900))
    answer = stage.silences()
    assert [(one["id"], one["kind"], one["silent"]) for one in answer["streams"]] == [
        ("r0-1", "first_token", 5.0)
    ]
    assert (answer["running"], answer["not_judged"]) == (2, 0)


def test_the_planted_silences_of_200_streams_are_found_and_no_others() -> None:
    stage = Stage()
    planted = {7, 90, 133}
    script = Script()
    for seq in range(1, 201):
        script.request(seq).head(seq, 90)
    for t_ms in range(100, 12_000, 400):
        for seq in range(1, 201):
            if seq in planted and t_ms > 4_000:
                keep_alive(script, seq, t_ms)
            else:
                script.word(seq, t_ms + seq, f"word{t_ms}")
    stage.play(script, now_ms=12_300)
    assert stage.silences()["running"] == 200
    # The last words came at 3,700 ms and a ms for each number.
    assert stage.silent() == {f"r0-{seq}": (8_600 - seq) / 1_000 for seq in planted}


def test_ended_streams_whole_answers_and_uploads_are_not_silent() -> None:
    stage = Stage()
    body = b'{"model":"tiny","messages":[]}'
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nContent-Length: %d\r\n\r\n" % len(body)
    whole = Script().frame(FrameKind.SENT, 1, MS, 2 * MS, head + body)
    upload = Script().frame(FrameKind.OPEN, 2, MS, 0, head).frame(FrameKind.REQUEST_DATA, 2, MS, 0, body[:5])
    ended = begun(3).end(3, 600, 20)
    call = b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"look"}}'
    head = (
        b"POST /mcp HTTP/1.1\r\nHost: g\r\nMcp-Method: tools/call\r\nAccept: text/event-stream\r\n"
        b"Content-Length: %d\r\n\r\n" % len(call)
    )
    mcp = Script().frame(FrameKind.SENT, 4, MS, 2 * MS, head + call)
    for script in (whole, upload, ended, mcp):
        stage.play(script)
    stage.clock.now_ns = 60 * S
    assert len(stage.assembler) == 4
    answer = stage.silences()
    assert (answer["running"], answer["count"]) == (0, 0)


def test_streams_that_are_not_understood_are_counted_and_not_judged() -> None:
    stage = Stage()
    stage.play(Script().request(1).head(1, 50))
    for i in range(40):
        stage.play(Script().events(1, 60 + i, f'{{"kind":"progress","percent":{i}}}'))
    # One event is kept until the dialect is certain: it may be a token.
    stage.play(Script().request(2).head(2, 50).events(2, 60, '{"kind":"speak","fragment":"The"}'))
    stage.clock.now_ns = 60 * S
    answer = stage.silences()
    assert (answer["running"], answer["not_judged"], answer["count"]) == (2, 2, 0)


def test_a_meter_that_is_behind_reports_no_stream_as_silent() -> None:
    stage = Stage()
    stage.status(t_ns=1 * S)
    stage.play(begun(1), now_ms=30_000)
    # The relay's last status is 29 s old: its tokens may wait in the channel.
    assert stage.silent() == {}
    stage.status(t_ns=29_900 * MS)
    assert stage.silent() == {"r0-1": 29.52}


def test_the_past_is_that_of_finished_streams_of_the_model() -> None:
    stage = Stage()

    def end(seq: int, pause_ms: int, *, resumed: bool, model: str = "tiny") -> None:
        times = (100, 140, 140 + pause_ms) if resumed else (100, 140)
        x = streamed(*times, seq=seq, model=model)
        x.timeline.response_end_ns = (140 + pause_ms) * MS
        x.outcome = Outcome.COMPLETE if resumed else Outcome.TRUNCATED
        stage.pipeline.on_open()
        stage.pipeline.on_end(x)

    for seq in range(1, 4):
        end(seq, 8_000, resumed=True)
    for seq in range(4, 41):
        end(seq, 20_000, resumed=False)
    for seq in range(41, 61):
        end(seq, 20_000, resumed=True, model="other-model")
    stage.play(begun(1), now_ms=5_480)
    (one,) = stage.silences()["streams"]
    past = one["past"]
    assert (past["silence"], past["n"], past["resumed"], past["until"]) == (5.0, 40, 3, 20.0)
    assert past["share"] == pytest.approx(3 / 40)
    assert 0 < past["low"] < 3 / 40 < past["high"] < 0.25


def test_the_answer_has_the_longest_silences_and_groups_of_all() -> None:
    stage = Stage()
    for seq in range(1, 31):
        stage.play(Script().request(seq, 10 * seq))
    script = Script()
    for seq in (8, 9):
        script.frame(FrameKind.ARM, seq, 0, 0, msgspec.json.encode(Assigned(arm="marked", unit="ab")))
    stage.play(script, now_ms=60_000)
    answer = stage.silences("?limit=9")
    assert [one["id"] for one in answer["streams"]] == [f"r0-{seq}" for seq in range(1, 10)]
    assert [one["arm"] for one in answer["streams"]][6:] == [None, "marked", "marked"]
    assert answer["count"] == 30
    assert [(group["n"], group["longest"]) for group in answer["groups"]] == [(30, 59.989)]
    for query in ("?limit=0", "?limit=1001", "?kind=x"):
        fits(stage.get("/api/v1/silences" + query), "Error")


def test_metrics_have_the_number_of_silent_streams_by_kind_and_known_tenant() -> None:
    stage = Stage()
    known = streamed(100, tenant="acme")
    stage.pipeline.on_open()
    stage.pipeline.on_end(known)
    for seq in range(1, 4):
        stage.play(begun(seq))
    stage.play(Script().request(4))
    tenants = {1: "acme", 2: "acme", 3: "never seen", 4: "default"}
    for observer, _ in stage.assembler.running_exchanges():
        observer.exchange.tenant = tenants[observer.exchange.seq]
    stage.clock.now_ns = 60 * S

    def samples(name: str) -> dict[tuple[str, ...], float]:
        families = text_string_to_metric_families(stage.get("/metrics"))
        return {
            tuple(sample.labels.values()): sample.value
            for family in families
            for sample in family.samples
            if sample.name == name
        }

    assert samples("llmtap_silent_streams") == {
        ("next_token", "acme"): 2.0,
        ("next_token", "other"): 1.0,
        ("first_token", "default"): 1.0,
        ("next_token", "default"): 0.0,
    }
    assert samples("llmtap_silence_not_judged_streams") == {(): 0.0}
    stage.play(Script().word(1, 60_000).word(2, 60_000).word(3, 60_000).word(4, 60_000))
    assert samples("llmtap_silent_streams") == {
        ("first_token", "default"): 0.0,
        ("next_token", "default"): 0.0,
    }


def test_a_relay_with_several_upstreams_names_none() -> None:
    stage = Stage()
    stage.pipeline.on_status("r0", relay_status(upstreams={UPSTREAM: True, "http://b:8000": True}))
    stage.play(begun(1), now_ms=60_000)
    (one,) = stage.silences()["streams"]
    assert one["upstream"] is None
