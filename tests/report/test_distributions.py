"""What is drawn solid rests on enough samples; the tail is the same distribution, read from above."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.report.distributions import (
    Curve,
    Distribution,
    distributions_of,
    is_doubtful,
    panels_of,
    table_of,
)
from tests.support.replay_results import replay_result

SHARES = [0.0, 0.1, 0.5, 0.9, 0.98, 0.99, 0.995, 0.999, 0.9995, 1.0]


def drawn(n: int, seconds: list[float], panel: int = 0) -> list[dict[str, Any]]:
    curve = Curve("x", n, SHARES, seconds, 0, "solid")
    return panels_of(Distribution("k", "h", "a", [curve]))[panel].data


@pytest.mark.parametrize(
    ("n", "share", "doubt"),
    [(999, 0.98, False), (999, 0.99, True), (1_000, 0.99, False), (9_999, 0.999, True),
     (10_000, 0.999, False), (3, 1.0, False), (3, 0.5, False)],
)  # fmt: skip
def test_how_many_samples_a_percentile_needs(n: int, share: float, doubt: bool) -> None:
    assert is_doubtful(n, share) is doubt


@pytest.mark.parametrize(("n", "solid_until"), [(999, 0.98), (1_000, 0.995), (10_000, 1.0)])
def test_what_rests_on_too_few_is_dotted(n: int, solid_until: float) -> None:
    solid, *dotted = drawn(n, [s + 1 for s in SHARES])
    assert solid["line"]["dash"] == "solid"
    assert solid["y"][-1] == solid_until
    assert [one["line"]["dash"] for one in dotted] == ["dot"] * (solid_until < 1)
    for one in dotted:
        # It goes on where the other ends.
        assert (one["x"][0], one["y"][0]) == (solid["x"][-1], solid["y"][-1])
        assert one["y"][-1] == 1.0


@given(st.lists(st.floats(0, 1e3), min_size=len(SHARES), max_size=len(SHARES)), st.integers(1, 20_000))
def test_the_tail_is_the_same_seen_from_above(values: list[float], n: int) -> None:
    """Each point of the tail is one of the whole; none is rarer than one sample in all."""
    seconds = sorted(values)
    whole = {
        (x, round(1 - y, 9)) for one in drawn(n, seconds) for x, y in zip(one["x"], one["y"], strict=True)
    }
    tail = [(x, y) for one in drawn(n, seconds, 1) for x, y in zip(one["x"], one["y"], strict=True)]
    assert set(tail) <= whole
    assert all(y * n > 0.999 for _, y in tail)
    assert all(a[0] <= b[0] and a[1] >= b[1] for a, b in pairwise(tail))


def test_what_is_far_apart_is_drawn_by_its_ratios_and_zeros_are_told() -> None:
    (panel, _) = panels_of(
        Distribution("k", "h", "a", [Curve("gap", 5, SHARES, [0, 0, 0.01, *([0.02] * 6), 0.9], 0, "solid")])
    )
    assert panel.layout["xaxis"]["type"] == "log"
    assert min(x for one in panel.data for x in one["x"]) > 0
    assert "10 % at 0, left of the axis" in panel.words
    (near, _) = panels_of(Distribution("k", "h", "a", [Curve("x", 5, SHARES, [1.0] * 10, 0, "solid")]))
    assert "type" not in near.layout["xaxis"]
    assert "left of the axis" not in near.words


def test_long_times_are_in_seconds() -> None:
    for top, unit, x in ((9.9, "ms", 9_900), (10.0, "s", 10.0)):
        curve = Curve("x", 5, SHARES, [9.0] * 9 + [top], 0, "solid")
        panel = panels_of(Distribution("k", "h", "a", [curve]))[0]
        assert panel.layout["xaxis"]["title"]["text"] == unit
        assert panel.data[-1]["x"][-1] == pytest.approx(x)


def test_the_table_has_the_same_figures_marked() -> None:
    (ttft, gaps, *_) = distributions_of(replay_result(60))
    heads, rows = table_of(ttft)
    assert heads == ["", "TTFT from submit, ms", "TTFT from schedule, ms"]
    cells = dict(rows)
    assert cells["n"] == ["60", "60"]
    assert cells["p50"] == ["99.0", "100"]
    assert cells["p99"] == ["99.0*", "100*"]
    assert not cells["max"][0].endswith("*")
    assert [curve.name for curve in gaps.curves] == ["TBC", "ITL (option B-even)"]
