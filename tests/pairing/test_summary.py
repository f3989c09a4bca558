"""The summary of many pairs, from exchanges that were written to captures and read back."""

from pathlib import Path
from typing import Any

import pytest

import llmtap
from llmtap.exchange.exchange import Exchange
from llmtap.pairing.clock import SAME_CLOCK, VantageOffset
from llmtap.pairing.figures import FIGURES
from llmtap.pairing.matching import match
from llmtap.pairing.summary import ClockSummary, pair_captures, summarise
from tests.support.storage.captures import write_capture
from tests.support.traffic.gateway import MS, SEND_NS, US, Crossing, Failed, words


def sides(*crossings: Crossing) -> tuple[list[Exchange], list[Exchange]]:
    played = [crossing.play(seq) for seq, crossing in enumerate(crossings, 1)]
    return [front for front, _ in played], [back for _, backs in played for back in backs]


def many(n: int, **changes: Any) -> list[Crossing]:
    """Requests with delays of 1, 2, ... n ms in front of the engine."""
    return [
        Crossing(prompt=f"p{i}", at_ns=1_000 * MS + i * 500 * MS, request_ns=(i + 1) * MS).with_(**changes)
        for i in range(n)
    ]


def stored(folder: Path, exchanges: list[Exchange]) -> list[Exchange]:
    write_capture(folder / "llmtap-1.parquet", exchanges)
    return list(llmtap.read(folder).exchanges())


def test_percentiles_are_those_of_the_delays_and_their_intervals_contain_them() -> None:
    fronts, backs = sides(*many(99, uncertainty_ns=50 * US))
    figures = summarise(match(fronts, backs), SAME_CLOCK).figures
    assert set(figures) == {figure.name for figure in FIGURES}
    request = figures["request"]
    assert (request.n, request.marks) == (99, ["p90", "p99"])
    p50 = request.p50
    assert p50.value == pytest.approx(0.050)
    # Wilson's interval of the share 0.5 of 99, as ranks, and 102 us of uncertainty on each side.
    assert (p50.low, p50.high) == pytest.approx((0.040_49 - 102e-6, 0.059_51 + 102e-6), abs=1e-4)
    token = figures["token"]
    assert (token.n, token.pairs) == (99 * 12, 99)
    assert token.p50.value == pytest.approx(400e-6)


def test_captures_of_one_host_have_one_clock_whatever_the_wall_clock_says(tmp_path: Path) -> None:
    fronts, backs = sides(*many(5))
    for x in backs:
        x.arrival_wall_ns += 900 * US  # the anchor of another relay
    summary = pair_captures(
        stored(tmp_path / "front", fronts), stored(tmp_path / "back", backs), comparable=True
    )
    assert summary.clock == ClockSummary("monotonic", 0, 0)
    assert summary.counts.pairs == 5
    p50 = summary.figures["request"].p50
    assert p50.value == pytest.approx(0.003, abs=2e-6)


def test_the_clock_of_another_host_is_bounded_by_the_traffic() -> None:
    fronts, backs = sides(*many(20, back_clock_ns=-80 * MS))
    summary = pair_captures(fronts, backs, comparable=True)
    clock = summary.clock
    assert clock.source == "traffic"
    assert abs(clock.offset + 0.080) <= clock.uncertainty <= 0.002
    assert summary.counts.pairs == 20
    request = summary.figures["request"].p50
    assert request.low <= 0.0105 <= request.high
    # A difference of two durations needs no common clock.
    ttft = summary.figures["ttft"].p50
    assert ttft.value == pytest.approx((10.5 * MS + SEND_NS + 5 * MS) / 1e9)


def test_captures_with_different_keys_are_paired_by_ids_only() -> None:
    ids = {"front_fields": ["X-Request-Id: a"], "back_fields": ["X-Request-Id: a"]}
    fronts, backs = sides(Crossing(prompt="a", **ids), Crossing(prompt="b"))
    summary = pair_captures(fronts, backs, comparable=False, clock=VantageOffset())
    assert summary.evidence == {"request_id": 1}
    assert summary.counts.unpaired_front == summary.counts.unpaired_back == 1


def test_attempts_texts_and_examples_are_counted() -> None:
    fronts, backs = sides(
        Crossing(prompt="a"),
        Crossing(prompt="b", failed=[Failed(tokens=4)]),
        Crossing(prompt="c", tokens=words(40), deliver=lambda tokens: tokens[:20]),
    )
    summary = pair_captures(fronts, backs, comparable=True, clock=SAME_CLOCK)
    assert summary.attempts == {"delivered": 3, "retry": 1}
    assert summary.text == {"equal": 2, "cut": 1}
    assert summary.figures["tokens_undelivered"].total == 4 + 20
    (difference,) = summary.differences
    assert difference.front == "front-3" and difference.relation == "cut"
    assert summary.slowest[0].front == "front-2"


def test_arms_of_an_experiment_have_figures_of_their_own() -> None:
    crossings = many(20)
    for i, one in enumerate(many(20)):
        crossings.insert(2 * i + 1, one.with_(prompt=f"q{i}", request_ns=one.request_ns + 300 * MS))
    fronts, backs = sides(*crossings)
    assert pair_captures(fronts, backs, comparable=True, clock=SAME_CLOCK).arms == {}
    for i, x in enumerate(fronts):
        x.arm = ("plain", "guarded")[i % 2]
    summary = pair_captures(fronts, backs, comparable=True, clock=SAME_CLOCK)
    medians = {arm: figures["request"].p50.value for arm, figures in summary.arms.items()}
    assert medians["guarded"] - medians["plain"] == pytest.approx(0.3)
    assert {figures["request"].n for figures in summary.arms.values()} == {20}


def test_nothing_to_pair_is_no_error() -> None:
    summary = pair_captures([], [], comparable=True)
    assert summary.counts.pairs == 0
    assert all(figure.n == 0 and figure.p50 is None for figure in summary.figures.values())
