"""Invariant: a coarse row is never exact, never more than a half too large, and right within its steps."""

from array import array
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from llmtap.capture.privacy.coarse import STEPS
from llmtap.capture.store.rows import exchanges_of, to_batch
from llmtap.exchange.exchange import Exchange, RequestShape, Turn
from tests.support.traffic.exchanges import MS, US, any_exchange, streamed


def rows(*xs: Exchange, level: str) -> list[dict[str, Any]]:
    batch, failed = to_batch(xs, capture="c1", level=level)
    assert not failed
    batch.validate(full=True)
    found: list[dict[str, Any]] = batch.to_pylist()
    return found


def test_sizes_are_padded_and_times_are_on_the_grid() -> None:
    asked = RequestShape(roles=["user", "user"], sizes=array("q", [3, 5_300]))
    x = streamed(words=300, gap_ms=7.3, shape=asked, turn=Turn("s", "prefix", 1, "p", 1_234 * MS))
    x.arrival_wall_ns += 999_999_999
    (row,) = rows(x, level="coarse")
    (exact,) = rows(x, level="shape")
    assert (row["level"], row["session"], row["blocks"]) == ("coarse", "s", exact["blocks"])
    assert row["arrival_ns"] == x.arrival_wall_ns - 999_999_999
    assert row["arrival"].timestamp() * 1e9 == row["arrival_ns"]
    assert (row["submit_us"], row["first_content_us"], row["response_end_us"]) == (0, 100_000, 2_200_000)
    assert (row["think_us"], row["uncertain"]) == (1_200_000, True)
    assert row["uncertainty_us"] == exact["uncertainty_us"] + STEPS["time_us"]
    assert row["message_bytes"] == [1_024, 6_144]
    assert (row["input_tokens"], row["output_tokens"]) == (128, 384)
    assert row["response_bytes"] == 65_536 >= exact["response_bytes"] == 54_802
    # 300 words and the end in steps of 100 ms: the count of events tells the duration, and nothing more.
    assert row["event_us"] == [*range(100_000, 2_300_000, 100_000), 2_200_000]
    assert row["event_class"] == ["content"] * 22 + ["done"]
    assert row["event_bytes"][0] == 3_072 and row["event_bytes"][-1] == 1_024
    assert all(row[name] is None for name in ("event_tokens", "reads", "usage", "server_gap_us"))


def test_a_blank_flag_holds_only_where_all_events_of_the_step_are_blank() -> None:
    x = streamed(words=4, gap_ms=60)
    x.timeline.events.flags[:4] = bytes([3, 2, 3, 3])
    (row,) = rows(x, level="coarse")
    assert row["event_us"] == [100_000, 200_000, 200_000] and row["event_flags"] == [2, 3, 0]


@settings(max_examples=30)
@given(st.lists(any_exchange(), max_size=3))
def test_any_row_is_right_within_its_steps(xs: list[Exchange]) -> None:
    for coarse, exact in zip(rows(*xs, level="coarse"), rows(*xs, level="shape"), strict=True):
        for name in exact:
            a, b = exact[name], coarse[name]
            if a is None or b is None or isinstance(a, list) or not name.endswith(("_us", "_bytes")):
                continue
            if name == "uncertainty_us":
                assert b == a + STEPS["time_us"]
            elif name.startswith(("added", "connect_", "dispatch", "slo")):
                assert a == b
            elif name.endswith("_us"):
                assert 0 <= a - b < STEPS["time_us"]
            else:
                assert a <= b <= max(a * 1.5, a + STEPS["bytes"])
    batch, _ = to_batch(xs, capture="c1", level="coarse")
    for x, back in zip(xs, exchanges_of(batch), strict=True):
        assert len(back.timeline.events) <= len(x.timeline.events)
        assert back.uncertainty_ns >= STEPS["time_us"] * US
