"""Invariant: each response of a session is an exchange, timed from the message that asked for it, and its
tokens are its own."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.channel.frames import FrameKind, Hello
from llmtap.exchange.exchange import Exchange
from llmtap.exchange.outcome import Outcome, TokenSource
from llmtap.meter.pipeline.assembler import Assembler
from llmtap.protocol.websocket import Opcode, frame
from tests.meter.pipeline.test_assembler import Ear
from tests.support.traffic.tap_frames import Script

SWITCHED = b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
HELLO = Hello(relay="r0", pid=7, clock="mono", anchor_mono_ns=0, anchor_wall_ns=5_000)
HELD_NS = 3
"""From the read of a message to its write."""

Step = tuple[str, int, bytes]


def up(t_ns: int, kind: str, **fields: Any) -> Step:
    return "up", t_ns, frame(json.dumps({"type": kind, **fields}).encode(), key=b"abcd")


def down(t_ns: int, kind: str, **fields: Any) -> Step:
    return "down", t_ns, frame(json.dumps({"type": kind, **fields}).encode())


def answer(t_ns: int, name: str, tokens: int, status: str = "completed", **lane: Any) -> list[Step]:
    """A response of two events with text: 20 and 30 ns after its creation, and its end 40 ns after."""
    usage = {"input_tokens": 5, "output_tokens": tokens}
    response = {"id": name, "object": "response", "model": "gpt-6"}
    done = {**response, "status": status, "usage": usage}
    if status == "incomplete":
        done["incomplete_details"] = {"reason": "steered"}
    return [
        down(t_ns, "response.created", response=response, **lane),
        down(t_ns + 20, "response.output_text.delta", delta="a", obfuscation="x", **lane),
        down(t_ns + 30, "response.output_text.delta", delta="b", **lane),
        down(t_ns + 40, f"response.{status}", response=done, **lane),
    ]


def play(
    *steps: Step,
    path: bytes = b"/v1/responses",
    outcome: str = "complete",
    size: int = 1 << 20,
    live: int | None = 0,
) -> list[Exchange]:
    head = b"GET %b HTTP/1.1\r\nHost: g\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n" % path
    script = Script().frame(FrameKind.OPEN, 1, 1, 0, head).frame(FrameKind.REQUEST_END, 1, 1)
    script.frame(FrameKind.RESPONSE_HEAD, 1, 5, 0, SWITCHED).frame(FrameKind.UPGRADED, 1, 5)
    for side, t_ns, data in steps:
        kind = FrameKind.TUNNEL_UP if side == "up" else FrameKind.TUNNEL_DOWN
        for at in range(0, len(data), size):
            script.frame(kind, 1, t_ns, HELD_NS, data[at : at + size])
    ear = Ear()
    assembler = Assembler(HELLO, ear)
    assembler.digest(script.frames())
    assert ear.live == len(assembler)
    assert live is None or ear.live == 1 + live
    assembler.digest(Script().close(1, 9, outcome=outcome).frames())
    assert (ear.failures, ear.live, len(assembler)) == ([], 0, 0)
    return ear.exchanges


def points(x: Exchange) -> tuple[int | None, ...]:
    t = x.timeline
    return t.arrival_ns, t.submit_ns, t.first_token_ns, t.last_token_ns, t.response_end_ns


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_two_responses_are_two_exchanges(size: int) -> None:
    first, second = play(
        up(100, "response.create", model="gpt-6", input="hello"),
        *answer(110, "resp_1", 7),
        up(1_000, "response.create", model="gpt-6", input="more", previous_response_id="resp_1"),
        *answer(1_010, "resp_2", 4),
        size=size,
    )
    assert [points(x) for x in (first, second)] == [
        (100, 103, 130, 140, 150),
        (1_000, 1_003, 1_030, 1_040, 1_050),
    ]
    assert [x.id for x in (first, second)] == ["r0-1.1", "r0-1.2"]
    for x, tokens in ((first, 7), (second, 4)):
        assert (x.tokens.output, x.tokens.input, x.tokens.source) == (tokens, 5, TokenSource.USAGE)
        assert (x.retries, x.outcome, x.stream, x.status, x.padded) == (0, Outcome.COMPLETE, True, 101, True)
        assert (x.model, x.dialect, x.endpoint) == ("gpt-6", "openai.responses", "responses")
        assert (x.finish_reason, x.unparsed_events, len(x.timeline.events)) == ("completed", 0, 4)


def test_responses_on_two_streams_do_not_mix() -> None:
    steps = [
        up(100, "response.create", stream_id="a", model="m", input="x"),
        up(105, "response.create", stream_id="b", model="m", input="y"),
        *answer(110, "resp_a", 7, stream_id="a"),
        *answer(115, "resp_b", 4, stream_id="b"),
    ]
    found = play(*sorted(steps, key=lambda step: step[1]))
    assert [(points(x), x.tokens.output) for x in found] == [
        ((100, 103, 130, 140, 150), 7),
        ((105, 108, 135, 145, 155), 4),
    ]


@pytest.mark.parametrize("lane", [{}, {"stream_id": "a"}])
def test_a_steered_response_ends_and_its_continuation_begins_with_the_steering(lane: dict[str, str]) -> None:
    *begun, cut = answer(110, "resp_1", 7, "incomplete", **lane)
    steered, more = play(
        up(100, "response.create", model="m", input="x", **lane),
        *begun,
        up(145, "response.steer", previous_response_id="resp_1", input="shorter"),
        down(146, "response.steer.accepted", steer={"id": "s", "previous_response_id": "resp_1"}),
        cut,
        *answer(200, "resp_2", 4, **lane),
    )
    assert (steered.finish_reason, steered.outcome, steered.tokens.output) == (
        "incomplete:steered",
        Outcome.COMPLETE,
        7,
    )
    assert points(more) == (145, 148, 220, 230, 240)
    assert (more.tokens.output, len(more.timeline.events)) == (4, 4)


def test_audio_that_is_committed_begins_a_realtime_response() -> None:
    def of(name: str, kind: str, t_ns: int, **fields: Any) -> Step:
        return down(t_ns, kind, response_id=name, **fields)

    def done(name: str, t_ns: int, tokens: int, status: str = "completed") -> Step:
        usage = {"input_tokens": 4, "output_tokens": tokens}
        return down(t_ns, "response.done", response={"id": name, "status": status, "usage": usage})

    found = play(
        down(50, "session.created", session={"model": "gpt-realtime"}),
        up(100, "input_audio_buffer.commit"),
        down(105, "input_audio_buffer.committed", item_id="i"),
        down(110, "response.created", response={"id": "r1"}),
        of("r1", "response.output_audio.delta", 130, delta="AAAA"),
        done("r1", 150, 6),
        down(200, "input_audio_buffer.speech_stopped", item_id="j"),
        down(210, "response.created", response={"id": "r2"}),
        up(215, "response.create", response={"conversation": "none"}),
        down(220, "response.created", response={"id": "r3"}),
        of("r3", "response.output_text.delta", 225, delta="side"),
        of("r2", "response.output_audio.delta", 230, delta="AAAA"),
        up(240, "response.cancel", response_id="r2"),
        done("r3", 245, 2),
        done("r2", 250, 1, "cancelled"),
        path=b"/v1/realtime?model=gpt-realtime",
    )
    assert [(points(x), x.tokens.output, x.outcome) for x in found] == [
        ((100, 103, 130, 130, 150), 6, Outcome.COMPLETE),
        ((215, 218, 225, 225, 245), 2, Outcome.COMPLETE),
        ((200, 203, 230, 230, 250), 1, Outcome.CLIENT_CANCELLED),
    ]
    assert {(x.dialect, x.model) for x in found} == {("openai.realtime", "gpt-realtime")}


def test_a_user_who_interrupts_cancels_the_response() -> None:
    def done(name: str, t_ns: int, status: str) -> Step:
        response = {"id": name, "status": status, "usage": {"input_tokens": 9, "output_tokens": 3}}
        if status == "cancelled":
            response["status_details"] = {"type": "cancelled", "reason": "turn_detected"}
        return down(t_ns, "response.done", response=response)

    spoken, silent, answered = play(
        up(100, "input_audio_buffer.commit"),
        down(102, "input_audio_buffer.committed", item_id="i"),
        down(104, "response.created", response={"id": "r1"}),
        down(110, "response.output_audio.delta", response_id="r1", delta="AAAA"),
        down(115, "input_audio_buffer.speech_started", item_id="j"),
        done("r1", 118, "cancelled"),
        down(140, "input_audio_buffer.speech_stopped", item_id="j"),
        down(143, "response.created", response={"id": "r2"}),
        done("r2", 150, "cancelled"),
        up(200, "response.create"),
        down(204, "response.created", response={"id": "r3"}),
        down(210, "response.output_audio.delta", response_id="r3", delta="AAAA"),
        done("r3", 220, "completed"),
        path=b"/v1/realtime?model=gpt-realtime",
    )
    assert [(x.outcome, x.no_token_reason, x.tokens.output) for x in (spoken, silent, answered)] == [
        (Outcome.CLIENT_CANCELLED, None, 3),
        (Outcome.CLIENT_CANCELLED, "cancelled", 3),
        (Outcome.COMPLETE, None, 3),
    ]


@pytest.mark.parametrize(
    ("code", "outcome"),
    [("previous_response_not_found", Outcome.UPSTREAM_ERROR), ("content_filter", Outcome.REFUSED)],
)
def test_an_error_takes_the_place_of_the_response_that_was_asked_for(code: str, outcome: Outcome) -> None:
    error = {"type": "invalid_request_error", "code": code, "event_id": "e1"}
    ok, refused = play(
        up(100, "response.create", model="m", input="x", stream_id="a"),
        up(101, "response.create", model="m", input="x", event_id="e1"),
        *answer(110, "resp_1", 7, stream_id="a"),
        down(160, "error", status=400, error=error),
    )
    assert (ok.outcome, refused.outcome, refused.tokens.output) == (Outcome.COMPLETE, outcome, None)
    assert (refused.error is None) == (outcome is Outcome.REFUSED)


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        ("complete", Outcome.TRUNCATED),
        ("client_cancelled", Outcome.CLIENT_CANCELLED),
        ("upstream_reset", Outcome.UPSTREAM_RESET),
    ],
)
def test_the_end_of_the_session_is_that_of_its_responses(outcome: str, expected: Outcome) -> None:
    (x,) = play(
        up(100, "response.create", model="m", input="x"),
        *answer(110, "resp_1", 7)[:2],
        outcome=outcome,
        live=1,
    )
    assert (x.outcome, x.timeline.first_token_ns, x.tokens.output) == (expected, 130, 1)


def test_the_limit_of_sixty_minutes_fails_what_runs_and_nothing_before_it() -> None:
    late_ns = 60 * 60 * 10**9
    error = {"type": "invalid_request_error", "code": "websocket_connection_limit_reached"}
    found = play(
        up(100, "response.create", model="m", input="x"),
        *answer(110, "resp_1", 7),
        up(late_ns - 50, "response.create", model="m", input="y"),
        *answer(late_ns - 40, "resp_2", 4)[:3],
        up(late_ns - 45, "response.create", model="m", input="z", stream_id="b"),
        down(late_ns, "error", status=400, error=error),
        live=1,
    )
    assert [(x.outcome, x.timeline.arrival_ns, len(x.timeline.events)) for x in found] == [
        (Outcome.COMPLETE, 100, 4),
        (Outcome.UPSTREAM_ERROR, late_ns - 50, 4),
        (Outcome.TRUNCATED, late_ns - 45, 0),
    ]


def test_a_session_without_a_response_is_the_exchange_of_its_tunnel() -> None:
    steps = (down(50, "session.created", session={"model": "m"}), ("down", 60, frame(b"", Opcode.PING)))
    (x,) = play(*steps, path=b"/v1/realtime")
    assert (x.id, x.stream, len(x.timeline.events)) == ("r0-1", False, 2)


@given(
    st.lists(
        st.sampled_from(
            [
                ("up", "response.create"),
                ("up", "response.steer"),
                ("up", "response.cancel"),
                ("up", "input_audio_buffer.commit"),
                ("down", "response.created"),
                ("down", "response.output_text.delta"),
                ("down", "response.completed"),
                ("down", "error"),
                ("down", "input_audio_buffer.committed"),
                ("down", "session.created"),
            ]
        ),
        max_size=20,
    ),
    st.lists(st.sampled_from(["a", "", None, 3, [], {"id": 1}, {"id": "a", "model": []}]), min_size=4),
    st.sampled_from([b"/v1/responses", b"/v1/realtime"]),
)
def test_no_order_of_messages_loses_count(kinds: list[tuple[str, str]], odd: list[Any], path: bytes) -> None:
    names = ("stream_id", "response", "response_id", "error", "session", "delta", "event_id")
    steps = [
        (up if side == "up" else down)(
            100 + i, kind, **{name: odd[(i + k) % len(odd)] for k, name in enumerate(names)}
        )
        for i, (side, kind) in enumerate(kinds)
    ]
    found = play(*steps, path=path, live=None)
    assert len({x.id for x in found}) == len(found)
