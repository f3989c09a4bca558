"""What a paused capture says: worked out by hand from a rate that is known."""

import pytest

from llmtap.export.sinks import CapturePause
from llmtap.meter.pipeline.capture_pause import CAUSES, PauseWatch

S = 1_000_000_000
MIB = 1 << 20


def watch() -> PauseWatch:
    return PauseWatch(64 * MIB, "/var/spool/llmtap", "/captures")


def paused(one: PauseWatch, at_s: int, mib: int, dropped: int = 0) -> CapturePause:
    one.update("disk_full", at_s * S, rows=10 * mib, n_bytes=mib * MIB, dropped=dropped)
    assert one.pause is not None
    return one.pause


def test_memory_lasts_as_long_as_it_fills_at_the_rate_since_the_pause_began() -> None:
    one = watch()
    assert paused(one, 100, 4).memory_lasts is None
    assert paused(one, 104, 8).memory_lasts is None, "too early for a rate"
    # 20 MiB in 20 s, and 40 MiB are left.
    state = paused(one, 120, 24)
    assert (state.seconds, state.waiting, state.waiting_bytes, state.lost) == (20, 240, 24 * MIB, 0)
    assert state.memory_lasts == 40
    assert "lasts for about 40 s" in state.sentence
    assert "240 exchanges wait" in state.sentence
    assert "/var/spool/llmtap" in state.sentence
    assert paused(one, 420, 24).memory_lasts == 640
    assert "about 11 min" in paused(one, 420, 24).sentence


def test_exchanges_lost_since_the_pause_began_are_in_its_place() -> None:
    one = watch()
    paused(one, 100, 4, dropped=5)
    state = paused(one, 130, 64, dropped=12)
    assert (state.lost, state.memory_lasts) == (7, 0)
    assert "7 exchanges were not captured" in state.sentence


def test_without_traffic_nothing_is_said_of_a_rate() -> None:
    one = watch()
    paused(one, 100, 4)
    assert paused(one, 200, 4).memory_lasts is None


def test_a_pause_that_ends_is_over_and_the_next_one_begins_anew() -> None:
    one = watch()
    paused(one, 100, 4)
    one.update(None, 110 * S, rows=0, n_bytes=0, dropped=0)
    assert one.pause is None
    assert paused(one, 200, 1).seconds == 0


@pytest.mark.parametrize("reason", CAUSES)
def test_every_reason_has_a_cause_and_a_remedy(reason: str) -> None:
    one = watch()
    one.update(reason, 0, rows=1, n_bytes=1, dropped=0)
    assert one.pause is not None
    assert "{" not in one.pause.sentence
    assert "resumes by itself" in one.pause.sentence
