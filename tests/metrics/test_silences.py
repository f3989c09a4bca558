"""The silences of a stream, by its timeline; and the time-out that they suggest."""

from typing import Any

import pytest

from llmtap.exchange.exchange import EventLog, Exchange
from llmtap.exchange.outcome import EventClass, Outcome, Reading
from llmtap.metrics.latency import measure
from llmtap.metrics.silences import (
    Silence,
    SilenceCounts,
    SilenceKind,
    client_timeout,
    resumption_to_dict,
    silences_of,
)
from llmtap.metrics.survival import SurvivalCounts
from tests.support.traffic.streams import MS, streamed

S = 1_000 * MS
FIRST, NEXT = SilenceKind.FIRST_TOKEN, SilenceKind.NEXT_TOKEN


def silences(x: Exchange) -> list[Silence]:
    return list(silences_of(x, measure(x)))


def without_token(*, end_ms: int | None, left_ms: int | None = None) -> Exchange:
    """A stream of keep-alives, submitted at 0."""
    x = streamed(1)
    t = x.timeline
    t.events = EventLog()
    t.events.add(50 * MS, EventClass.KEEPALIVE, 12, -1, 0)
    t.first_token_ns = t.first_content_ns = t.last_token_ns = None
    t.response_end_ns = None if end_ms is None else end_ms * MS
    t.delivered_ns = None if left_ms is None else left_ms * MS
    return x


def test_gaps_of_a_tenth_of_a_second_and_the_wait_for_the_first_token_are_silences() -> None:
    x = streamed(250, 290, 389, 489, 6_489)
    assert silences(x) == [
        Silence(FIRST, 250 * MS, True),
        Silence(NEXT, 100 * MS, True),
        Silence(NEXT, 6 * S, True),
    ]
    assert silences(streamed(99, 198)) == []


def test_keep_alives_end_no_silence() -> None:
    x = streamed(50, 3_050)
    log = EventLog()
    log.add(50 * MS, EventClass.CONTENT, 9, 1, x.timeline.events.flags[0])
    for at_ms in range(150, 3_050, 100):
        log.add(at_ms * MS, EventClass.KEEPALIVE, 9, -1, 0)
    log.add(3_050 * MS, EventClass.CONTENT, 9, 1, x.timeline.events.flags[0])
    x.timeline.events = log
    assert silences(x) == [Silence(NEXT, 3 * S, True)]


def test_the_end_of_the_stream_or_the_client_that_leaves_censors_a_silence() -> None:
    ended = streamed(50, 90, outcome=Outcome.TRUNCATED)
    ended.timeline.response_end_ns = 5_090 * MS
    assert silences(ended) == [Silence(NEXT, 5 * S, False)]
    left = streamed(50, 90, outcome=Outcome.CLIENT_CANCELLED)
    left.timeline.response_end_ns, left.timeline.delivered_ns = None, 30_090 * MS
    assert silences(left) == [Silence(NEXT, 30 * S, False)]
    lost = streamed(50, 90, outcome=Outcome.TAP_ERROR)
    lost.timeline.response_end_ns = None
    assert silences(lost) == [], "nobody knows how long it lasted"


def test_a_stream_without_a_token_has_waited_for_its_first() -> None:
    assert silences(without_token(end_ms=8_000)) == [Silence(FIRST, 8 * S, False)]
    assert silences(without_token(end_ms=None, left_ms=9_000)) == [Silence(FIRST, 9 * S, False)]
    assert silences(without_token(end_ms=None)) == []


def test_whole_answers_and_streams_that_were_not_understood_have_no_silences() -> None:
    whole = streamed(7_000)
    whole.stream = False
    unread = without_token(end_ms=8_000)
    unread.reading, unread.unparsed_events = Reading.NONE, 3
    counts = SilenceCounts()
    for x in (whole, unread, streamed(200)):
        counts.add(x, measure(x))
    assert counts.streams == 1
    assert silences(whole) == silences(unread) == []
    assert {kind: one.n for kind, one in counts.kinds.items()} == {FIRST: 1, NEXT: 0}
    # Keep-alives alone do not need to be understood.
    waiting = without_token(end_ms=8_000)
    waiting.reading = Reading.NONE
    assert silences(waiting) == [Silence(FIRST, 8 * S, False)]


def test_how_many_went_on_after_a_silence() -> None:
    counts = SilenceCounts().kinds[NEXT]
    for _ in range(3):
        counts.add(40 * S, ended=True)
    for _ in range(237):
        counts.add(95 * S, ended=False)
    # Silent for 31 s: the step of the grid below it is 30 s. Of 240, 3 went on; until 90 s, all are known.
    found = resumption_to_dict(counts, 31 * S)
    assert {name: found[name] for name in ("silence", "n", "resumed", "until")} == {
        "silence": 30.0,
        "n": 240,
        "resumed": 3,
        "until": 90.0,
    }
    assert found["share"] == pytest.approx(3 / 240)
    later = resumption_to_dict(counts, 700 * S)
    assert (later["silence"], later["n"], later["share"]) == (600.0, 0, None)


def many(*groups: tuple[int, float, bool]) -> SurvivalCounts:
    counts = SilenceCounts().kinds[NEXT]
    for n, seconds, resumed in groups:
        for _ in range(n):
            counts.add(round(seconds * S), ended=resumed)
    return counts


def timeout_of(*groups: tuple[int, float, bool]) -> Any:
    counts = SilenceCounts()
    counts.kinds[NEXT] = many(*groups)
    document: Any = counts.to_dict()
    return document[NEXT.value]["timeout"]


def test_the_suggested_time_out_is_the_silence_after_which_fewer_than_one_in_100_goes_on() -> None:
    counts = many((5_000, 0.5, True), (60, 3, True), (3, 40, True), (237, 95, False))
    found = client_timeout(counts)
    assert found is not None
    # 3 of the 240 that are silent for 3.3 s to 40 s go on: 1.25 %. After that none does.
    assert (found.since, found.n, found.share) == (45 * S, 237, 0.0)
    assert found.until == 90 * S
    counts = many((5_000, 0.5, True), (60, 3, True), (2, 40, True), (238, 95, False))
    found = client_timeout(counts)
    assert found is not None
    assert (found.since, found.n, found.share) == (3.3 * S, 240, pytest.approx(2 / 240))


def test_no_time_out_is_suggested_without_100_silences_or_if_they_go_on() -> None:
    assert timeout_of((99, 95, False)) is None
    # 99 of 5,099 last longer than 0.5 s: too few to know how many of them go on.
    few = timeout_of((5_000, 0.5, True), (99, 95, False))
    assert (few["silence"], few["n"], few["suggested"]) == (0.5, 5_099, False)
    # Each of the 1,020 is known until 90 s, but no longer silence is.
    going_on = timeout_of((1_000, 20, True), (20, 95, False))
    assert (going_on["silence"], going_on["share"]) == (20.0, pytest.approx(1_000 / 1_020))
    assert going_on["suggested"] is False
    assert timeout_of((1_000, 2, True), (200, 95, False))["suggested"] is True
