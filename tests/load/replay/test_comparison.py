"""Comparison of two results of replays: differences, their intervals, and what differs in the set-up."""

import json
from statistics import NormalDist

import msgspec
import pytest

from llmtap.gates.comparison import BurstCaution, ComparedFigure, ReplayComparison
from llmtap.load.replay.comparison import compare_replays, comparison_document, difference_interval
from llmtap.metrics.intervals import Interval, quantile_interval, share_interval
from llmtap.report.render import markdown
from tests.support.results.replay_results import replay_result, saved


def figures(told: ReplayComparison) -> dict[tuple[str, str], ComparedFigure]:
    json.dumps(msgspec.to_builtins(told), allow_nan=False)
    return {(row.name, row.figure): row for row in told.comparisons[0].figures}


def test_the_interval_of_two_shares_is_that_of_newcombes_example() -> None:
    a, b = share_interval(48, 80), share_interval(56, 70)
    assert a is not None
    assert b is not None
    assert difference_interval(a, b) == (pytest.approx(0.0524, abs=5e-5), pytest.approx(0.3339, abs=5e-5))


def test_the_interval_of_medians_is_near_the_normal_approximation_of_uniform_samples() -> None:
    n = 10_000
    found = quantile_interval([i / n for i in range(n)], 0.5)
    assert found is not None
    low, high = difference_interval(found, found)
    reach = NormalDist().inv_cdf(0.975) * (2 * 0.25 / n) ** 0.5  # the variance of a median: 1 / (4 n f^2)
    assert (low, high) == (pytest.approx(-reach, rel=0.03), pytest.approx(reach, rel=0.03))


def test_an_end_that_is_open_on_either_side_is_open_in_the_difference() -> None:
    closed, low, high = (
        Interval(1, 0, 2, 9, 0.95, "", open_below=below, open_above=above)
        for below, above in ((False, False), (True, False), (False, True))
    )
    ends = [
        difference_interval(*pair) for pair in ((closed, low), (low, closed), (closed, high), (high, closed))
    ]
    assert [(start is None, end is None) for start, end in ends] == [
        (True, False),
        (False, True),
        (False, True),
        (True, False),
    ]


def test_a_slower_server_is_a_difference_with_an_interval_and_the_same_load() -> None:
    base, slow = replay_result(400), replay_result(400)
    slow["metrics"]["e2e"] |= {"p50": 0.5}
    slow["plan"]["target"] = "http://other:8000"
    slow["sender"]["llmtap"] = "0.0.1"
    told = compare_replays(saved({"a": base, "b": slow}))
    row = figures(told)["e2e", "p50"]
    assert row.difference == 0.5 - base["metrics"]["e2e"]["p50"]
    assert row.low < row.difference < row.high
    assert (row.n_a, row.few_a, figures(told)["ttft", "p99"].few_a) == (400, False, True)
    assert figures(told)["itl", "p50"].difference == 0
    assert figures(told)["itl", "p50"].low is None
    differing = {row.name: row.load for row in told.comparisons[0].set_up}
    assert differing == {"target": False, "sender.llmtap": False}


def test_itl_of_different_options_has_no_difference_and_tbc_has_one() -> None:
    even, chunks = replay_result(400), replay_result(400)
    even["metrics"]["itl"]["option"], chunks["metrics"]["itl"]["option"] = "B-even", "A"
    told = compare_replays(saved({"a": even, "b": chunks}))
    rows = {(row.name, row.option): row for row in told.comparisons[0].figures}
    for option, here, there in (("B-even", "a", "b"), ("A", "b", "a")):
        row = rows["itl", option]
        assert (getattr(row, here), getattr(row, there)) == (even["metrics"]["itl"]["p99"], None)
        assert (getattr(row, f"few_{there}"), row.difference, row.share) == (False, None, None)
    assert rows["tbc", None].difference == 0
    assert [(row.name, row.a, row.b) for row in told.comparisons[0].set_up] == [("ITL option", "B-even", "A")]
    text = markdown(comparison_document(told))
    assert "ITL (B-even) p50, ms" in text
    assert "ITL is of different options" in text
    chunks["metrics"]["itl"]["option"] = even["metrics"]["itl"]["option"] = "A+B-even"  # shares may differ
    assert figures(compare_replays(saved({"a": even, "b": chunks})))["itl", "p50"].difference is None


def test_another_load_is_named() -> None:
    results = {"a": replay_result(400), "b": replay_result(200, failed=20), "c": replay_result(9)}
    told = compare_replays(saved(results))
    set_up = told.comparisons[0].set_up
    assert [(row.name, row.a, row.b) for row in set_up if row.load] == [
        ("rows", 400, 200),
        ("requests", 400, 200),
    ]
    ended = figures(told)["answers complete", "share"]
    assert (ended.a, ended.b, ended.n_b) == (1, 0.9, 200)
    assert ended.low < -0.1 < ended.high < 0
    assert [(one.a, one.b) for one in told.comparisons] == [("a", "b"), ("a", "c")]


def test_requests_that_are_not_judged_have_a_row() -> None:
    base, unread = replay_result(400), replay_result(400)
    assert ("not judged", "count") not in figures(compare_replays(saved({"a": base, "b": base})))
    unread["goodput"] = {**(base.get("goodput") or {}), "not_judged": 30}
    told = compare_replays(saved({"a": base, "b": unread}))
    row = figures(told)["not judged", "count"]
    assert (row.b, row.n_b, row.unit) == (30, 400, "requests")
    assert "not judged, requests" in markdown(comparison_document(told))


def test_a_result_whose_chunks_come_in_bursts_is_not_compared_by_its_gaps() -> None:
    steady, bursty = replay_result(400), replay_result(400)
    bursty["chunking"]["events_per_read"] = 8.04
    bursty["metrics"]["tbc"]["p50"] = 0.0
    for a, b in (("steady", "held"), ("held", "steady")):
        told = compare_replays(saved({name: bursty if name == "held" else steady for name in (a, b)}))
        assert told.comparisons[0].cautions == [BurstCaution("held", ("tpot", "tbc", "itl"), 8.04)]
        rows = figures(told)
        untold = {metric for metric, figure in rows if figure == "p50" and rows[metric, figure].share is None}
        assert untold == {"tpot", "tbc", "itl"}
        assert rows["tbc_max", "p50"].difference == 0
        assert "held: 8 chunks come at a time" in markdown(comparison_document(told))
    assert compare_replays(saved({"a": bursty, "b": bursty})).comparisons[0].cautions == []


def test_a_metric_without_values_is_no_figure_on_either_side() -> None:
    base, silent = replay_result(20), replay_result(20)
    del silent["hdr_histograms"]["ttft"]
    silent["metrics"]["ttft"] = dict.fromkeys(silent["metrics"]["ttft"]) | {"n": 0}
    row = figures(compare_replays(saved({"a": base, "b": silent})))["ttft", "p50"]
    assert (row.n_a, row.n_b, row.b, row.difference, row.low) == (20, 0, None, None, None)
    assert ("ttft", "p50") not in figures(compare_replays(saved({"a": silent, "b": silent})))
