"""The meter of a pair of relays: figures in the API, each request counted once, and what the capture gets."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from llmtap.channel.frames import Hello
from llmtap.channel.status import RelayStatus
from llmtap.clock import ManualClock
from llmtap.exchange.exchange import BACK, FRONT
from llmtap.meter.admin.server import admin_app
from llmtap.meter.admin.views import metrics_of
from llmtap.meter.options import MeterOptions, PairOptions
from llmtap.meter.pairs import PairBook
from llmtap.meter.pipeline.assembler import Assembler
from llmtap.meter.pipeline.cooperative_yield import CooperativeYield
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from llmtap.pairing.live import SLACK_NS, LiveMatcher
from tests.meter.admin.test_openapi import fits
from tests.meter.sinks import CollectingSink
from tests.support.traffic.tap_frames import MS, Script


class Stage:
    """A meter to which the relays of both sides report, with what its capture gets."""

    def __init__(self, exchanges_max: int = 10_000, turns: CooperativeYield | None = None) -> None:
        self.clock = ManualClock(wall_offset_ns=0)
        self.pipeline = t = ExchangePipeline(MeterOptions(), self.clock)
        self.pairs = PairBook(
            PairOptions(exchanges_max=exchanges_max), t.relays, t.streams, turns or t.cpu_yield, t.on_error
        )
        t.pair_with(self.pairs)
        self.captured = CollectingSink()
        t.last_sinks.append(self.captured)
        self.relays: dict[str, Assembler] = {}
        for side in (FRONT, BACK):
            self.join(side, side)

    def join(self, name: str, side: str) -> None:
        hello = Hello(relay=name, pid=1, clock="mono", anchor_mono_ns=0, anchor_wall_ns=0, side=side)
        self.pipeline.relays.join(hello)
        self.relays[name] = Assembler(hello, self.pipeline)
        self.pipeline.streams.join(self.relays[name])

    def play(self, side: str, script: Script) -> None:
        self.relays[side].digest(script.frames())

    def report(self, *sides: str, at_ms: int) -> None:
        self.clock.now_ns = at_ms * MS
        for side in sides:
            self.play(side, Script().status(RelayStatus(t_ns=at_ms * MS)))

    def answer(self, path: str, schema: str) -> Any:
        async def run() -> Any:
            async with TestClient(TestServer(admin_app(self.pipeline))) as client, client.get(path) as answer:
                assert answer.status == 200, await answer.text()
                return await answer.json()

        result = asyncio.run(run())
        fits(result, schema)
        return result


def stream(at_ms: int, seq: int = 1, added_ms: int = 0, words: int = 3) -> Script:
    """A request with the id `req-SEQ`, and an answer that takes `added_ms` longer."""
    script = Script().request(seq, at_ms).head(seq, at_ms + 100 + added_ms)
    for i in range(words):
        script.word(seq, at_ms + 101 + 20 * i + added_ms, f"word{i} of the answer ")
    end_ms = at_ms + 101 + 20 * words + added_ms
    return script.end(seq, end_ms, words).close(seq, end_ms + 1)


AFTER_MS = SLACK_NS // MS + 1_000


@pytest.fixture
def stage() -> Stage:
    """One request: 10 ms until the gateway forwards it, 5 ms more for each token."""
    stage = Stage()
    stage.play(FRONT, stream(0, added_ms=15))
    stage.play(BACK, stream(11))
    stage.report(FRONT, BACK, at_ms=AFTER_MS)
    return stage


def test_the_api_shows_both_sides_and_the_figures_of_the_pair(stage: Stage) -> None:
    result = stage.answer("/api/v1/exchanges", "Exchanges")
    front, back = sorted(result["exchanges"], key=lambda x: x["side"] == BACK)
    assert (front["pair"]["id"], front["pair"]["role"]) == (front["id"], None)
    assert (back["pair"]["id"], back["pair"]["role"]) == (front["id"], "delivered")
    assert back["pair"]["evidence"] == ["request_id", "text"]
    figures = {name: one["value"] for name, (one, *_) in front["pair"]["figures"].items()}
    expected = {"request": 0.01, "ttft": 0.015, "first_token": 0.004, "token": 0.004, "tokens_held": 1}
    assert {name: round(figures[name], 9) for name in expected} == expected
    (same,) = stage.answer(f"/api/v1/exchanges?side=back&pair_id={front['id']}", "Exchanges")["exchanges"]
    assert same == back


def test_the_pairs_have_counts_and_the_newest_ones(stage: Stage) -> None:
    pairs = stage.answer("/api/v1/pairs", "Pairs")
    assert pairs["counts"] == {
        "front": 1,
        "back": 1,
        "pairs": 1,
        "unpaired_front": 0,
        "unpaired_back": 0,
        "ambiguous_front": 0,
        "ambiguous_back": 0,
        "left_out_front": 0,
        "left_out_back": 0,
    }
    assert (pairs["text"], pairs["attempts"], pairs["waiting"]) == ({"equal": 1}, {"delivered": 1}, 0)
    assert pairs["figures"]["ttft"]["p50"]["value"] == pytest.approx(0.015)
    assert [one["front"] for one in pairs["recent"]] == ["front-1"]


def test_each_request_is_counted_once(stage: Stage) -> None:
    assert stage.answer("/api/v1/summary?window=all", "Summary")["n"] == 1
    text = metrics_of(stage.pipeline).render()[0].decode()
    assert 'llmtap_pair_exchanges_total{result="paired",side="back"} 1.0' in text
    assert 'llmtap_pair_evidence_total{evidence="request_id"} 1.0' in text
    assert 'llmtap_pair_held_tokens_count{model="tiny"} 1' in text
    counted = [line for line in text.splitlines() if line.startswith("llmtap_exchanges_total{")]
    assert sum(float(line.rpartition(" ")[2]) for line in counted) == 1


def test_the_capture_gets_an_exchange_when_its_pair_is_known_and_no_text(stage: Stage) -> None:
    assert [(x.side, x.pair_id) for x in stage.captured.exchanges] == [(FRONT, "front-1"), (BACK, "front-1")]
    assert all(x.text is None and not x.timeline.events.chars for x in stage.captured.exchanges)


def test_each_exchange_of_a_pair_knows_the_spans_of_the_others(stage: Stage) -> None:
    front, back = stage.captured.exchanges
    assert front.pair is not None and back.pair is not None
    assert (front.pair.partners, back.pair.partners) == ((back.span_ids,), (front.span_ids,))


def test_a_relay_that_has_not_reported_is_waited_for() -> None:
    stage = Stage()
    stage.play(FRONT, stream(0, added_ms=15))
    stage.play(BACK, stream(11))
    stage.report(FRONT, at_ms=AFTER_MS)
    assert not stage.captured.exchanges
    stage.report(BACK, at_ms=AFTER_MS)
    assert len(stage.captured.exchanges) == 2


def test_the_end_of_the_meter_decides_what_waits() -> None:
    stage = Stage()
    stage.play(FRONT, stream(0))
    stage.play(BACK, stream(11, seq=2))
    stage.pairs.close()
    assert [(x.side, x.pair_id) for x in stage.captured.exchanges] == [(BACK, None), (FRONT, None)]
    counts = stage.answer("/api/v1/pairs", "Pairs")["counts"]
    assert (counts["unpaired_front"], counts["unpaired_back"]) == (1, 1)


def test_pairs_are_sought_twice_a_second_and_only_for_relays_of_the_pair(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.join("other", "")
    stage.play(FRONT, Script().request(9, AFTER_MS))
    scans: list[int] = []
    scan = stage.pipeline.streams.open_exchanges

    def count() -> Iterator[Any]:
        scans.append(stage.clock.now_ns // MS)
        return scan()

    monkeypatch.setattr(stage.pipeline.streams, "open_exchanges", count)
    for at_ms in range(AFTER_MS + 100, AFTER_MS + 1_100, 100):
        stage.report(FRONT, BACK, "other", at_ms=at_ms)
    assert scans == [AFTER_MS + 500, AFTER_MS + 1_000]


class _ShortTurns(CooperativeYield):
    """Every step takes the whole turn of the event loop."""

    def __init__(self) -> None:
        super().__init__(lambda: 0, lambda: None)
        self.begun = 0

    def begin_turn(self) -> None:
        super().begin_turn()
        self.begun += 1

    def pause(self) -> int:
        self.loop_is_due = True
        return 0


def test_the_event_loop_runs_between_the_steps_of_a_long_search() -> None:
    turns = _ShortTurns()

    async def run() -> Stage:
        stage = Stage(turns=turns)
        for seq in range(1, 6):
            stage.play(FRONT, stream(10 * seq, seq, added_ms=15))
            stage.play(BACK, stream(10 * seq + 5, seq))
        stage.report(FRONT, BACK, at_ms=AFTER_MS)
        assert not stage.captured.exchanges
        stage.report(FRONT, at_ms=AFTER_MS + 500)  # begins no other search
        for _ in range(100):
            await asyncio.sleep(0)
        return stage

    stage = asyncio.run(run())
    assert len(stage.captured.exchanges) == 10
    assert turns.begun >= 10


def test_a_failed_search_is_counted_and_the_next_one_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()
    stage.play(FRONT, stream(0, added_ms=15))
    stage.play(BACK, stream(11))

    def fail(*args: Any) -> Any:
        raise ValueError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(LiveMatcher, "advance", fail)
        stage.report(FRONT, BACK, at_ms=AFTER_MS)
    assert stage.pipeline.errors == {"pairing": 1}
    stage.report(FRONT, BACK, at_ms=AFTER_MS + 500)
    assert len(stage.captured.exchanges) == 2


def test_a_pair_without_figures_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise ValueError("a bug")

    monkeypatch.setattr("llmtap.meter.pairs.figures_of", fail)
    stage = Stage()
    stage.play(FRONT, stream(0, added_ms=15))
    stage.play(BACK, stream(11))
    stage.report(FRONT, BACK, at_ms=AFTER_MS)
    assert stage.pipeline.errors == {"pairing": 1}
    assert [(x.side, x.pair_id) for x in stage.captured.exchanges] == [(FRONT, "front-1"), (BACK, "front-1")]


def test_a_capture_that_fails_loses_no_other_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()
    stage.pairs.sinks[:] = [CollectingSink(ValueError("full"))]
    stage.play(FRONT, stream(0, added_ms=15))
    stage.play(BACK, stream(11))
    stage.report(FRONT, BACK, at_ms=AFTER_MS)
    assert stage.pipeline.errors == {"listener": 2}
    assert stage.answer("/api/v1/pairs", "Pairs")["counts"]["pairs"] == 1


def test_what_is_left_out_is_captured_also_while_a_relay_has_not_reported() -> None:
    stage = Stage(exchanges_max=100)
    for seq in range(1, 104):
        stage.play(FRONT, stream(seq, seq))
    stage.report(FRONT, at_ms=AFTER_MS)
    assert [x.id for x in stage.captured.exchanges] == ["front-1", "front-2", "front-3"]


def test_the_requests_of_discarded_exchanges_are_forgotten_also_while_a_relay_has_not_reported() -> None:
    stage = Stage()
    stage.play(FRONT, Script().request(1, 0))
    assert stage.pairs._requests
    stage.relays[FRONT].discard()
    stage.report(FRONT, at_ms=AFTER_MS)
    assert not stage.pairs._requests
