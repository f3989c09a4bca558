import gzip
from typing import Any

import pytest

from llmtap.channel.frames import FrameKind, Hello
from llmtap.channel.status import RelayStatus
from llmtap.exchange import observer as observer_module
from llmtap.exchange.exchange import Exchange
from llmtap.exchange.observer import Observer
from llmtap.exchange.outcome import Outcome, ReadingLimit, TokenSource
from llmtap.meter.pipeline.assembler import CPU_FREE_NS, CPU_MAX_NS, CPU_PER_BYTE_NS, Assembler
from llmtap.meter.pipeline.cooperative_yield import CooperativeYield
from llmtap.metrics.latency import measure, metrics_of
from llmtap.metrics.objectives import Objectives
from tests.support.traffic.tap_frames import MS, Script

HELLO = Hello(relay="r0", pid=7, clock="kernel", anchor_mono_ns=1_000, anchor_wall_ns=5_000)


class Ear:
    """A sink that remembers what it was told."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []
        self.statuses: list[tuple[str, RelayStatus]] = []
        self.failures: list[str] = []
        self.live = 0

    def observe(
        self, relay: str, seq: int, arrival_ns: int, arrival_wall_ns: int, head: bytes, clock: str
    ) -> Observer:
        return Observer(relay, seq, arrival_ns, arrival_wall_ns, head, clock)

    def on_open(self) -> None:
        self.live += 1

    def on_discard(self, n: int = 1) -> None:
        self.live -= n

    def on_end(self, x: Exchange) -> None:
        self.live -= 1
        self.exchanges.append(x)

    def on_status(self, relay: str, status: RelayStatus) -> None:
        self.statuses.append((relay, status))

    def on_error(self, kind: str, error: BaseException | str) -> None:
        self.failures.append(kind)


def digest(script: Script, **about: Any) -> tuple[Ear, Assembler]:
    ear = Ear()
    assembler = Assembler(HELLO, ear, **about)
    assembler.digest(script.frames())
    assert ear.live == len(assembler)
    return ear, assembler


def test_frames_become_the_exchange_they_tell_of() -> None:
    ear, assembler = digest(Script().stream(4))
    (x,) = ear.exchanges
    assert (x.id, x.clock, x.model, x.request_id, x.status) == ("r0-4", "kernel", "tiny", "req-4", 200)
    assert (x.outcome, x.stream, x.finish_reason) == (Outcome.COMPLETE, True, "stop")
    assert (x.tokens.output, x.tokens.source) == (3, TokenSource.USAGE)
    assert x.arrival_wall_ns == 4_000
    assert (x.timeline.submit_ns, x.timeline.delivered_ns) == (MS, 162 * MS)
    assert (x.uncertainty_ns, x.added.request_ns, x.added.first_chunk_ns) == (5_000, MS, 30_000)
    metrics = metrics_of(x)
    assert (metrics["ttft"], metrics["tbc_max"], metrics["e2e"]) == (0.1, 0.02, 0.16)
    assert len(assembler) == 0
    assert ear.failures == []


def test_frames_of_an_exchange_that_began_before_us_are_passed_over() -> None:
    ear, _ = digest(Script().word(1, 5).end(1, 6, 1).close(1, 7).stream(2))
    assert [x.seq for x in ear.exchanges] == [2]
    assert ear.failures == []


@pytest.mark.parametrize("where", ["__init__", "response_slices", "finish"])
def test_an_observer_that_raises_costs_only_its_exchange(where: str) -> None:
    from llmtap.exchange.observer import Observer

    class Broken(Observer):
        pass

    def fail(self: Observer, *args: object, **named: object) -> None:
        raise ZeroDivisionError("broken on purpose")

    setattr(Broken, where, fail)

    class Unlucky(Ear):
        def observe(self, relay: str, seq: int, *args: Any) -> Observer:
            return (Broken if seq == 1 else Observer)(relay, seq, *args)

    ear = Unlucky()
    assembler = Assembler(HELLO, ear)
    assembler.digest(Script().stream(1).stream(2).frames())
    assert ear.failures == ["ZeroDivisionError"]
    assert [x.seq for x in ear.exchanges] == [2]
    assert (len(assembler), ear.live) == (0, 0)


def test_what_was_open_when_its_relay_died_ends_as_our_error_with_all_that_was_seen() -> None:
    script = Script().request(1).head(1, 50).word(1, 60).word(1, 80).request(2, 90).stream(3)
    script.request(4).frame(FrameKind.DROP, 4)
    ear, assembler = digest(script)
    assembler.lose()
    assert (ear.live, len(assembler), ear.failures) == (0, 0, [])
    ended = {x.seq: x for x in ear.exchanges}
    assert [x.seq for x in ear.exchanges] == [3, 1, 2], "each once; what the relay gave up stays away"
    cut, waiting = ended[1], ended[2]
    assert ended[3].outcome is Outcome.COMPLETE
    for x in (cut, waiting):
        assert x.outcome is Outcome.TAP_ERROR
        assert x.error is not None
        assert (x.timeline.response_end_ns, x.timeline.delivered_ns) == (None, None)
        assert x.no_token_reason is None, "nobody knows what would have come"
    assert (cut.model, cut.status, len(cut.timeline.events)) == ("tiny", 200, 2)
    metrics = metrics_of(cut)
    assert (metrics["ttft"], metrics["tbc_max"], metrics["e2e"]) == (0.059, 0.02, None)
    assert waiting.timeline.submit_ns == 91 * MS
    objectives = Objectives.parse("ttft:1ms e2e:1ms")
    for x in (cut, waiting):
        assert objectives.meets(measure(x), x) is None, "and it counts against nobody"


HOUR = 3_600_000_000_000


@pytest.mark.parametrize("step", [HOUR, -HOUR, 200 * MS, -200 * MS])
def test_a_wall_clock_that_is_set_moves_dates_and_no_duration(step: int) -> None:
    wall = HELLO.anchor_wall_ns - HELLO.anchor_mono_ns
    script = Script().stream(1).request(2, 200).request(3, 205)
    script.anchor(mono_ns=250 * MS, wall_ns=250 * MS + wall + step, steps=1, since_ns=240 * MS)
    script.head(2, 260).word(2, 270).end(2, 280, 1).close(2, 281)
    script.request(4, 245).close(4, 290).request(5, 300).head(5, 310).word(5, 320).end(5, 340, 1).close(
        5, 341
    )
    # A request whose head took long: it arrived before the clock was set.
    script.request(6, 230).close(6, 350).close(3, 360)
    ear, _ = digest(script)
    assert ear.failures == []
    result = {x.seq: (x.arrival_wall_ns, x.anchor) for x in ear.exchanges}
    assert result == {
        1: (wall, 0),
        2: (200 * MS + wall, 0),
        3: (205 * MS + wall, 0),
        6: (230 * MS + wall, 0),
        4: (245 * MS + wall + step, 1),
        5: (300 * MS + wall + step, 1),
    }
    across, after = (next(metrics_of(x) for x in ear.exchanges if x.seq == seq) for seq in (2, 5))
    assert (across["ttft"], across["e2e"]) == (0.069, 0.079)
    assert (after["ttft"], after["e2e"]) == (0.019, 0.039)


def test_anchors_are_counted_as_the_relay_counts_them() -> None:
    script = Script()
    for n in range(1, 10):
        script.anchor(mono_ns=n * 100 * MS, wall_ns=n * 1_000, steps=n // 2, since_ns=n * 100 * MS - 1)
        script.request(n, n * 100 + 1).close(n, n * 100 + 2)
    ear, _ = digest(script.request(10, 1).close(10, 901))
    assert [x.anchor for x in ear.exchanges[:-1]] == [n // 2 for n in range(1, 10)]
    assert [x.arrival_wall_ns - n * 1_000 for n, x in enumerate(ear.exchanges[:-1], 1)] == [MS] * 9
    assert ear.exchanges[-1].anchor == 3, "older than all that are remembered: by the oldest"


def test_pauses_by_the_client_are_kept_with_the_exchange_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(observer_module, "HOLDS_MAX", 2)
    script = Script().request(1).head(1, 50).word(1, 60)
    for end_ms in (500, 700, 900):
        script.frame(FrameKind.HELD, 1, end_ms * MS, 100 * MS).word(1, end_ms + 1)
    ear, _ = digest(script.end(1, 910, 4).close(1, 911, paused_ns=300 * MS))
    (x,) = ear.exchanges
    assert list(x.timeline.holds) == [400 * MS, 500 * MS, 600 * MS, 700 * MS]
    assert x.timeline.paused_ns == 300 * MS
    assert x.reading_limits == (ReadingLimit.HOLDS,)


def test_interim_heads_and_unknown_kinds_change_nothing() -> None:
    script = Script().request(1).frame(FrameKind.INTERIM, 1, 2 * MS, 0, b"HTTP/1.1 103 Early Hints\r\n\r\n")
    script.frame(99, 1, 3 * MS).head(1, 5).word(1, 6).end(1, 7, 1).close(1, 8)
    ear, _ = digest(script)
    assert ear.failures == []
    assert ear.exchanges[0].status == 200


def test_a_tunnels_bytes_are_timed() -> None:
    script = Script().request(1)
    upgrade = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n"
    script.frame(FrameKind.RESPONSE_HEAD, 1, 5 * MS, 0, upgrade).frame(FrameKind.UPGRADED, 1, 5 * MS)
    script.frame(FrameKind.TUNNEL_UP, 1, 6 * MS, 10, b"ping").frame(
        FrameKind.TUNNEL_DOWN, 1, 9 * MS, 10, b"pong"
    )
    ear, _ = digest(script.close(1, 20))
    (x,) = ear.exchanges
    assert (ear.failures, x.status, x.timeline.first_byte_ns) == ([], 101, 9 * MS)


def too_costly(assembler: Assembler, frame: Any, times: int = 1) -> None:
    for _ in range(times):
        assembler.charge(frame, CPU_FREE_NS + CPU_MAX_NS // 2 + CPU_PER_BYTE_NS * len(frame[4]) + 1)


def test_an_exchange_whose_parsing_takes_too_long_is_timed_and_not_parsed() -> None:
    ear, assembler = digest(Script().request(1).request(2).head(1, 5).head(2, 5).word(1, 6).word(2, 6))
    first = Script().word(1, 7).frames()[0]
    too_costly(assembler, first)
    assert ear.failures == []
    too_costly(assembler, first)
    too_costly(assembler, first)
    assert ear.failures == ["parse_cpu"], "counted once"
    assembler.digest(
        Script().word(1, 8).word(2, 8).end(1, 9, 1).end(2, 9, 1).close(1, 9).close(2, 9).frames()
    )
    given_up, other = sorted(ear.exchanges, key=lambda x: x.seq)
    assert given_up.error is not None and "CPU" in given_up.error
    assert given_up.unparsed_events == given_up.reads - 1 > 0
    assert given_up.timeline.last_token_ns == 6 * MS
    assert (other.error, other.unparsed_events) == (None, 0)


def test_a_long_exchange_may_be_charged_with_a_share_of_its_duration() -> None:
    hour_ms = 3_600_000
    ear, assembler = digest(Script().request(1).head(1, 5))
    for second in range(3_600):  # a pause of 15 ms each second
        assembler.charge(Script().word(1, 1_000 * second).frames()[0], 15_000_000)
    assert ear.failures == []
    too_costly(assembler, Script().word(1, hour_ms).frames()[0], 80)
    assert ear.failures == ["parse_cpu"]


_GZIP = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Encoding: gzip\r\n\r\n"


class Ticks:
    """Clocks of which each reading takes a millisecond."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        self.now_ns += MS
        return self.now_ns


def _dense() -> bytes:
    """A compressed stream of 8 MB in 40 kB."""
    event = b'data: {"choices":[' + b",".join([b"{}"] * 4_000) + b"]}\n\n"
    return gzip.compress(b"".join(b":%d\n\n" % i + event for i in range(700)))


def test_the_event_loop_gets_turns_within_one_frame_and_its_cpu_time_is_limited() -> None:
    ear, ticks = Ear(), Ticks()
    assembler = Assembler(HELLO, ear)
    turns = CooperativeYield(ticks, lambda: None, ticks)
    script = Script().request(1).frame(FrameKind.RESPONSE_HEAD, 1, 5, 0, _GZIP)
    script.frame(FrameKind.RESPONSE_DATA, 1, 6, 0, _dense()).stream(2)
    loop_turns = 0
    for _ in assembler.work(turns.pace(script.frames(), None, assembler.charge), turns):
        loop_turns += 1
        turns.begin_turn()
    assert loop_turns > 40
    assert [x.seq for x in ear.exchanges] == [2]
    assert ear.failures == []
    turns.cpu_ns = lambda: ticks() * 100
    script = Script().request(3).frame(FrameKind.RESPONSE_HEAD, 3, 5, 0, _GZIP)
    script.frame(FrameKind.RESPONSE_DATA, 3, 6, 0, _dense()).close(3, 7)
    steps = sum(1 for _ in assembler.work(turns.pace(script.frames(), None, assembler.charge), turns))
    assert ear.failures == ["parse_cpu"]
    assert steps < loop_turns // 4
    assert ear.exchanges[-1].error is not None and "CPU time" in ear.exchanges[-1].error


def test_a_compressed_message_that_was_not_negotiated_is_not_inflated() -> None:
    head = b"GET /v1/realtime HTTP/1.1\r\nHost: g\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n%b\r\n"
    extension = b"Sec-WebSocket-Extensions: permessage-deflate\r\n"
    switched = b"HTTP/1.1 101 S\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n%b\r\n"
    hello = bytes.fromhex("c107f248cdc9c90700")
    for offered, accepted in ((b"", b""), (extension, b""), (b"", extension), (extension, extension)):
        script = Script().frame(FrameKind.OPEN, 1, 1, 0, head % offered).frame(FrameKind.REQUEST_END, 1, 1)
        script.frame(FrameKind.RESPONSE_HEAD, 1, 5, 0, switched % accepted).frame(FrameKind.UPGRADED, 1, 5)
        script.frame(FrameKind.TUNNEL_DOWN, 1, 6, 0, hello).close(1, 7)
        ear, _ = digest(script)
        understood = bool(offered and accepted)
        assert (ear.failures == []) is understood
        (x,) = ear.exchanges
        assert (x.error is None) is understood
        assert understood or "its first byte is 0xc1" in str(x.error)
