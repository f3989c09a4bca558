"""Counting verdicts: who is judged by what, and that merging loses nothing."""

from collections import Counter

import pytest

from llmtap.exchange.exchange import OUTPUT, EventLog, Exchange, Timeline, Tokens
from llmtap.exchange.outcome import EventClass, Outcome, TokenSource
from llmtap.metrics.latency import measure
from llmtap.metrics.objectives import REQUESTED, Goodput, Objectives, judge

MS = 1_000_000
GOLD = Objectives.parse("ttft:200ms e2e:1s")
FREE = Objectives.parse("ttft:900ms")


def exchange(ttft_ms: int, tokens: int = 10, outcome: Outcome = Outcome.COMPLETE) -> Exchange:
    log = EventLog()
    log.add(ttft_ms * MS, EventClass.CONTENT, 100, tokens, OUTPUT)
    t = Timeline(
        arrival_ns=0, submit_ns=0, first_token_ns=ttft_ms * MS, first_content_ns=ttft_ms * MS,
        last_token_ns=ttft_ms * MS, response_end_ns=ttft_ms * MS, events=log,
    )  # fmt: skip
    x = Exchange(relay="r", seq=1, arrival_wall_ns=0, timeline=t, stream=True, outcome=outcome)
    x.tokens = Tokens(output=tokens, source=TokenSource.TOKEN_IDS)
    return x


def tally(objectives: Objectives | None, *exchanges: Exchange) -> Goodput:
    goodput = Goodput()
    for x in exchanges:
        goodput.add(objectives, measure(x), x)
    return goodput


def test_good_ones_count_by_the_request_and_by_the_token() -> None:
    goodput = tally(
        GOLD, exchange(100), exchange(300, tokens=30), exchange(1_100, tokens=20),
        exchange(50, tokens=40, outcome=Outcome.UPSTREAM_RESET), exchange(1, outcome=Outcome.REJECTED),
    )  # fmt: skip
    out = goodput.to_dict(2.0)
    assert out is not None
    assert out == {
        "objectives": "ttft:200ms e2e:1s", "met": 1, "counted": 4, "attainment": 0.25,
        "requests_per_second": 0.5, "tokens_per_second": 5.0, "token_attainment": 0.1,
        "broken": {"e2e": 1, "ended": 1, "ttft": 2}, "by": out["by"],
    }  # fmt: skip


def test_adding_says_the_verdict() -> None:
    goodput = Goodput()
    x, late, away = exchange(100), exchange(300), exchange(1, outcome=Outcome.REJECTED)
    assert [goodput.add(GOLD, measure(e), e) for e in (x, late, away)] == [True, False, None]
    assert goodput.add(None, measure(x), x) is None


def test_without_objectives_there_is_no_goodput() -> None:
    assert tally(None, exchange(1)).to_dict(1.0) is None
    assert Goodput().to_dict(1.0) is None


def test_a_request_is_judged_by_what_it_asked_for() -> None:
    x = exchange(250)
    x.slo_ttft_ns = 300 * MS
    assert judge(GOLD, measure(x), x) == (Objectives.parse("ttft:300ms e2e:1s"), True)
    x.slo_ttft_ns = 249 * MS
    assert judge(None, measure(x), x) == (Objectives.parse("ttft:249ms"), False)
    # Under the class's name, or one for all: a client cannot make names without end.
    assert tally(GOLD, x).by_objectives.keys() == {GOLD.text}
    x.slo_tpot_ns = 7
    assert tally(None, x).by_objectives.keys() == {REQUESTED}


def test_each_is_kept_under_its_own_objectives() -> None:
    goodput = tally(GOLD, exchange(100), exchange(300))
    goodput.merge(tally(FREE, exchange(300)))
    out = goodput.to_dict(1.0)
    assert out is not None
    assert (out["objectives"], out["met"], out["counted"]) == ("several, see by", 2, 3)
    assert isinstance(out["by"], dict)
    assert {name: (c["met"], c["counted"]) for name, c in out["by"].items()} == {
        "ttft:200ms e2e:1s": (1, 2), "ttft:900ms": (1, 1),
    }  # fmt: skip


def test_merging_equals_adding_together() -> None:
    exchanges = [exchange(t, tokens=t) for t in (100, 150, 300, 2_000)]
    merged = Goodput()
    for x in exchanges:
        merged.merge(tally(GOLD, x))
    assert merged.to_dict(3.0) == tally(GOLD, *exchanges).to_dict(3.0)
    assert merged.total().broken == Counter({"ttft": 2, "e2e": 1})


def test_no_time_has_no_rate() -> None:
    out = tally(GOLD, exchange(1)).to_dict(0.0)
    assert out is not None
    assert (out["requests_per_second"], out["tokens_per_second"]) == (None, None)
    assert out["attainment"] == pytest.approx(1.0)
