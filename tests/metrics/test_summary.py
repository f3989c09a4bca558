from array import array
from typing import Any

import pytest

from llmtap.exchange.exchange import OUTPUT, Added, EventLog, Exchange, Timeline, Tokens
from llmtap.exchange.outcome import EventClass, Outcome, TokenSource
from llmtap.metrics.cost import Price
from llmtap.metrics.deadlines import Benefit
from llmtap.metrics.latency import measure
from llmtap.metrics.objectives import Objectives
from llmtap.metrics.summary import (
    DISAGREEMENTS,
    METRICS,
    NO_TOKEN_REASONS,
    Summary,
    clock_disagreement,
    no_token_reason,
    tokens_after_cancel,
)

MS = 1_000_000
WINDOW = {"name": "1m"}


def stream(times_ms: list[int], *, tokens: int = 1, outcome: Outcome = Outcome.COMPLETE) -> Exchange:
    """A streamed answer with a chunk of `tokens` tokens at each time, submitted at 0."""
    log = EventLog()
    for t in times_ms:
        log.add(t * MS, EventClass.CONTENT, 100, tokens, OUTPUT)
    t = Timeline(
        arrival_ns=0, submit_ns=0, first_byte_ns=log.t_ns[0], first_any_ns=log.t_ns[0],
        first_token_ns=log.t_ns[0],
        first_content_ns=log.t_ns[0], last_token_ns=log.t_ns[-1], response_end_ns=log.t_ns[-1], events=log,
    )  # fmt: skip
    x = Exchange(relay="r", seq=1, arrival_wall_ns=0, timeline=t, stream=True, outcome=outcome)
    x.tokens = Tokens(input=7, output=tokens * len(times_ms), source=TokenSource.TOKEN_IDS)
    x.reads = len(times_ms)
    return x


def whole(end_ms: int, outcome: Outcome = Outcome.COMPLETE) -> Exchange:
    """An answer in one piece."""
    x = stream([end_ms], outcome=outcome)
    x.stream = False
    return x


def summary_of(*exchanges: Exchange) -> Summary:
    summary = Summary()
    for x in exchanges:
        summary.add(x)
    return summary


def test_streams_fill_every_metric() -> None:
    out = summary_of(stream([100, 120, 150]), stream([300, 320, 340])).to_dict(WINDOW, 10.0)
    assert out["n"] == 2
    assert out["metrics"].keys() == set(METRICS)  # type: ignore[attr-defined]
    metrics = out["metrics"]
    assert isinstance(metrics, dict)
    assert {name: m["n"] for name, m in metrics.items()} == {
        "ttft": 2, "ttft_any": 2, "ttft_reasoning": 0, "ttft_tool_call": 0, "first_event": 2, "ttfb": 2,
        "tpot": 2, "e2e": 2, "user_idle": 2, "user_idle_from_first_token": 2, "tbc_max": 2, "jitter": 2,
        "smooth_benefit": 2, "fluidity_index_doc": 0, "fluidity_index_code": 0, "qoe_area_step": 0,
        "tbc": 4, "itl": 4, "itl_server": 0,
    }  # fmt: skip
    assert metrics["ttft"]["mean"] == pytest.approx(0.2)
    assert metrics["tbc"]["max"] == 0.03
    assert metrics["tbc"]["mean"] == pytest.approx(0.0225)
    # n - 5 l: 3 - 0.5 and 3 - 1.5 tokens
    assert (metrics["smooth_benefit"]["min"], metrics["smooth_benefit"]["max"]) == (1.5, 2.5)
    assert out["smooth_goodput"] == {
        "tokens_per_second": pytest.approx(0.4), "n": 2, "alpha": 5.0, "speed_tokens_per_second": 20.0,
        "idle": "max(t_i - submit - V(i-1)), f(l) = l in seconds",
    }  # fmt: skip
    assert (out["goodput"], out["cost"], out["clock_disagreement"]) == (None, None, {})
    assert out["tokens"] == {
        "input": 14, "output": 6, "reasoning": None, "cached": None, "input_per_second": 1.4,
        "output_per_second": 0.6,
        "source": {"token_ids": 2}, "cancelled": None, "after_cancel": None,
    }  # fmt: skip


def test_an_answer_in_one_piece_has_no_first_token_to_wait_for() -> None:
    metrics = summary_of(whole(900)).to_dict(WINDOW, 1.0)["metrics"]
    assert isinstance(metrics, dict)
    assert {name for name, m in metrics.items() if m["n"]} == {"ttfb", "e2e"}


@pytest.mark.parametrize(
    ("outcome", "counted"),
    [(Outcome.COMPLETE, 1), (Outcome.REFUSED, 1), (Outcome.UPSTREAM_ERROR, 0), (Outcome.TRUNCATED, 0),
     (Outcome.CLIENT_CANCELLED, 0), (Outcome.REJECTED, 0)],
)  # fmt: skip
def test_end_to_end_pools_answers_that_ended_well(outcome: Outcome, counted: int) -> None:
    out = summary_of(whole(900, outcome)).to_dict(WINDOW, 1.0)
    assert isinstance(out["metrics"], dict)
    assert out["metrics"]["e2e"]["n"] == counted
    assert out["outcomes"] == {outcome.value: 1}


@pytest.mark.parametrize(
    ("exchanges", "option", "samples"),
    [([stream([0, 40], tokens=4)], "B-even", {"B-even": 4}),
     ([stream([0, 40], tokens=-1)], "A", {"A": 1}),
     ([stream([0, 40], tokens=2), stream([0, 40], tokens=-1)], "A+B-even", {"A": 1, "B-even": 2}),
     ([stream([0])], None, {})],
)  # fmt: skip
def test_the_itl_option_is_named(exchanges: list[Exchange], option: str | None, samples: object) -> None:
    for x in exchanges:
        if x.timeline.events.tokens[0] < 0:
            x.tokens = Tokens(output=99, source=TokenSource.USAGE)
    metrics = summary_of(*exchanges).to_dict(WINDOW, 1.0)["metrics"]
    assert isinstance(metrics, dict)
    assert (metrics["itl"]["option"], metrics["itl"]["samples"]) == (option, samples)


def test_chunking_says_how_the_answers_were_cut() -> None:
    out = summary_of(stream([1, 2, 3]), stream([1], tokens=5)).to_dict(WINDOW, 1.0)
    assert out["chunking"] == {
        "events": 4, "content_events": 4, "reads": 4, "events_per_read": 1.0, "tokens_per_chunk_mean": 2.0,
        "tokens_per_chunk_max": 5, "single_token_share": 0.75, "chunks_with_known_tokens": 4,
        "bytes_per_event_mean": 100.0, "bursts": {"n": 0, "streams": 0, "events": 0, "hold_max": None},
    }  # fmt: skip


def test_bursts_are_summed_up() -> None:
    held, steady = stream([0, 10, 20, 30, 130, 130, 130]), stream([0, 10, 20])
    worse = stream([0, 10, 20, 30, 430, 430, 430, 430])
    out = summary_of(held, steady, worse).to_dict(WINDOW, 1.0)
    assert isinstance(out["chunking"], dict)
    assert out["chunking"]["bursts"] == {"n": 2, "streams": 2, "events": 7, "hold_max": 0.4}


def test_goodput_is_of_the_summarys_objectives() -> None:
    summary = Summary(Objectives.parse("ttft:200ms tpot:50ms"))
    for x in (stream([100, 120]), stream([300, 320]), stream([100, 120, 140], tokens=5)):
        summary.add(x)
    out = summary.to_dict(WINDOW, 10.0)
    goodput = out["goodput"]
    assert isinstance(goodput, dict)
    assert (goodput["objectives"], goodput["met"], goodput["counted"]) == ("ttft:200ms tpot:50ms", 2, 3)
    assert (goodput["requests_per_second"], goodput["tokens_per_second"]) == (0.2, 1.7)
    assert isinstance(out["metrics"], dict)
    assert out["metrics"]["fluidity_index_code"]["n"] == 3
    assert out["metrics"]["fluidity_index_code"]["max"] == 1.0
    assert out["metrics"]["qoe_area_step"]["n"] == 3
    assert summary.copy().to_dict(WINDOW, 10.0) == out


def test_with_the_deadlines_of_equation_4_a_reader_waits_less_by_the_time_of_a_token() -> None:
    x = stream([100, 120, 150])
    summary = Summary(reader=Benefit.at_speed(100, grace_tokens=1))
    summary.add(x)
    out = summary.to_dict(WINDOW, 1.0)
    assert out["metrics"]["user_idle"]["p50"] == pytest.approx(0.120)  # type: ignore[index]
    assert out["smooth_goodput"]["idle"].startswith("max(t_i - submit - V i), f(l)")  # type: ignore[index]
    other = Summary()
    other.merge_bytes(summary.to_bytes())
    assert other.to_dict(WINDOW, 1.0) == out


def test_smooth_goodput_says_for_which_reader() -> None:
    fast, slow = Benefit.at_speed(100, alpha=1), Benefit.at_speed(10, f="tokens")
    x = stream([100, 120, 150])
    summary = Summary()
    summary.add(x, measure(x, fast))
    out = summary.to_dict(WINDOW, 1.0)["smooth_goodput"]
    assert isinstance(out, dict)
    # Read at 10 ms a token the third is due at 120 and comes at 150: 30 ms after the first 100.
    assert out["tokens_per_second"] == pytest.approx(3 - 0.13)
    assert (out["alpha"], out["speed_tokens_per_second"]) == (1, 100.0)
    summary.add(x, measure(x, slow))
    summary.add(x, measure(x, fast))
    out = summary.to_dict(WINDOW, 1.0)["smooth_goodput"]
    assert isinstance(out, dict)
    assert (out["alpha"], out["speed_tokens_per_second"]) == (None, None)
    assert out["idle"] == "max(t_i - submit - V(i-1)), several f"
    assert out["readers"] == [
        {"alpha": 1, "speed_tokens_per_second": 100.0, "f": "f(l) = l in seconds"},
        {"alpha": 5.0, "speed_tokens_per_second": 10.0, "f": "f(l) = l / V in tokens"},
    ]


def test_the_servers_clock_is_compared_with_ours() -> None:
    x, y = stream([100, 120]), stream([100, 120])
    x.server_timing = [{"name": "ttft", "ms": 90, "where": "usage"}]
    y.server_timing = [{"name": "ttft", "ms": 130, "where": "usage"}]
    x.server_gaps_ns = array("q", [19 * MS])
    out = summary_of(x, y).to_dict(WINDOW, 1.0)
    disagreement, metrics = out["clock_disagreement"], out["metrics"]
    assert isinstance(disagreement, dict)
    assert isinstance(metrics, dict)
    assert disagreement.keys() == {"ttft"}
    assert (disagreement["ttft"]["n"], disagreement["ttft"]["min"], disagreement["ttft"]["max"]) == (
        2,
        -0.03,
        0.01,
    )
    assert (metrics["itl_server"]["n"], metrics["itl_server"]["max"], metrics["itl_server"]["option"]) == (
        1, 0.019, "C",
    )  # fmt: skip
    assert metrics["itl"]["policy"] == {
        "C (the server's stamps) beside direct (single-token chunks); tokens by token_ids": 1,
        "direct (single-token chunks); tokens by token_ids": 1,
    }


def test_a_price_makes_a_cost() -> None:
    summary = summary_of(stream([100, 120]))
    cost = summary.to_dict(WINDOW, 10.0, price=Price(gpus=2, per_gpu_hour=36))["cost"]
    assert isinstance(cost, dict)
    assert (cost["spent"], cost["per_output_token"], cost["per_good_token"]) == (
        pytest.approx(0.2),
        pytest.approx(0.1),
        None,
    )
    summary = Summary(Objectives.parse("ttft:1s"))
    summary.add(stream([100, 120]))
    cost = summary.to_dict(WINDOW, 10.0, price=Price(gpus=2, per_gpu_hour=36))["cost"]
    assert isinstance(cost, dict)
    assert cost["per_good_token"] == pytest.approx(0.1)


def test_refusals_are_counted_by_kind() -> None:
    refused = stream([1], outcome=Outcome.REFUSED)
    refused.refusal = {"kind": "content_filter", "source": "finish_reason"}
    out = summary_of(refused, stream([1], outcome=Outcome.REFUSED), stream([1])).to_dict(WINDOW, 1.0)
    assert out["refusals"] == {
        "n": 2,
        "share": pytest.approx(2 / 3),
        "kinds": {"content_filter": 1, "unknown": 1},
    }


def test_uncertainty_is_the_worst_seen_and_uncertainties_those_of_the_exchanges() -> None:
    summary = Summary()
    for width_ms in (1, 1, 3):
        x = stream([1])
        x.uncertainty_ns = width_ms * MS
        summary.add(x)
    copied = Summary()
    copied.merge_bytes(summary.to_bytes())
    out: Any = copied.to_dict(WINDOW, 1.0)
    assert out["uncertainty"] == 0.003
    assert [out["uncertainties"][name] for name in ("n", "p50", "max")] == [
        3,
        pytest.approx(0.001, rel=1e-3),
        0.003,
    ]
    summary.saw_uncertainty(5 * MS)
    summary.saw_uncertainty(4 * MS)
    assert summary.to_dict(WINDOW, 1.0)["uncertainty"] == 0.005


def test_what_the_tap_added_is_summed_up() -> None:
    x = stream([1])
    x.added = Added(request_ns=40_000, first_chunk_ns=30_000)
    x.added.chunks_ns.extend([30_000, 20_000])
    added = summary_of(x).to_dict(WINDOW, 1.0)["added"]
    assert isinstance(added, dict)
    assert {point: (a["n"], a["max"]) for point, a in added.items()} == {
        "request": (1, 0.00004), "first_chunk": (1, 0.00003), "chunk": (2, 0.00003),
    }  # fmt: skip


def test_nothing_seen_is_null_and_never_zero() -> None:
    out = Summary().to_dict(WINDOW, 0.0)
    assert out["load"] == {"mode": "live", "offered_rps": None, "achieved_rps": None}
    assert out["uncertainty"] is None
    assert isinstance(out["tokens"], dict)
    assert out["tokens"]["output"] is None
    assert isinstance(out["smooth_goodput"], dict)
    assert out["smooth_goodput"]["tokens_per_second"] is None


def test_merging_equals_adding_together() -> None:
    refused = stream([5, 9, 30], tokens=3, outcome=Outcome.REFUSED)
    refused.refusal = {"kind": "model"}
    refused.uncertainty_ns = 9
    refused.added.chunks_ns.extend([1, 2, 3])
    refused.server_timing = [{"name": "decode", "ms": 5}]
    held = stream([0, 10, 20, 30, 130, 130, 130])
    parts = [[stream([100, 120]), whole(7)], [refused, held], []]
    merged = Summary()
    for part in parts:
        merged.merge(summary_of(*part))
    together = summary_of(*(x for part in parts for x in part))
    assert merged.to_dict(WINDOW, 3.0) == together.to_dict(WINDOW, 3.0)
    assert merged.copy().to_dict(WINDOW, 3.0) == together.to_dict(WINDOW, 3.0)
    assert (merged.n, merged.benefit_n) == (4, 3)


def exchange(
    *times_ms: int, tokens: int = 1, outcome: Outcome = Outcome.COMPLETE, stream: bool = True
) -> Exchange:
    log = EventLog()
    log.add(0, EventClass.ROLE, 100, -1, 0)
    for t in times_ms:
        log.add(t * MS, EventClass.CONTENT, 100, tokens, OUTPUT)
    t = Timeline(arrival_ns=0, submit_ns=0, events=log)
    x = Exchange(relay="r", seq=1, arrival_wall_ns=0, timeline=t, stream=stream, outcome=outcome)
    if tokens > 0:
        x.tokens = Tokens(output=tokens * len(times_ms), source=TokenSource.TOKEN_IDS)
    return x


def reason(x: Exchange) -> str | None:
    return no_token_reason(x, measure(x))


@pytest.mark.parametrize(
    ("outcome", "kind", "expected"),
    [
        (Outcome.COMPLETE, None, "empty"),
        (Outcome.REFUSED, None, "refusal"),
        (Outcome.REFUSED, "model_refusal", "refusal"),
        (Outcome.REFUSED, "input_guardrail", "guardrail"),
        (Outcome.REFUSED, "output_guardrail", "guardrail"),
        (Outcome.REFUSED, "gateway_policy", "guardrail"),
        (Outcome.CLIENT_ERROR, None, "client_error"),
        (Outcome.UPSTREAM_ERROR, None, "error"),
        (Outcome.UPSTREAM_RESET, None, "error"),
        (Outcome.UPSTREAM_TIMEOUT, None, "error"),
        (Outcome.TRUNCATED, None, "error"),
        (Outcome.CLIENT_CANCELLED, None, "cancelled"),
        (Outcome.REJECTED, None, "rejected"),
    ],
)
def test_no_token_has_a_reason(outcome: Outcome, kind: str | None, expected: str) -> None:
    x = exchange(outcome=outcome)
    x.refusal = None if kind is None else {"kind": kind}
    assert reason(x) == expected
    assert expected in NO_TOKEN_REASONS


@pytest.mark.parametrize("stream", [True, False])
def test_nobody_knows_what_would_have_come_through_a_relay_that_died(stream: bool) -> None:
    assert reason(exchange(stream=stream, outcome=Outcome.TAP_ERROR)) is None


def test_of_an_answer_in_one_piece_only_failures_count() -> None:
    assert reason(exchange(stream=False)) is None
    assert reason(exchange(stream=False, outcome=Outcome.UPSTREAM_ERROR)) == "error"


class TestAfterCancel:
    @pytest.mark.parametrize(
        ("tokens", "left_ms", "after"),
        [(1, 25, 2), (3, 25, 6), (-1, 25, 2), (1, 30, 1), (1, 40, 0), (1, 5, 4)],
    )
    def test_what_came_later_than_the_client_left(self, tokens: int, left_ms: int, after: int) -> None:
        x = exchange(10, 20, 30, 40, tokens=tokens, outcome=Outcome.CLIENT_CANCELLED)
        x.timeline.delivered_ns = left_ms * MS
        assert tokens_after_cancel(x, measure(x)) == after

    def test_a_client_that_stayed_has_no_such_figure(self) -> None:
        x = exchange(10)
        x.timeline.delivered_ns = 5 * MS
        assert tokens_after_cancel(x, measure(x)) is None

    def test_without_a_stamp_nothing_is_known_to_be_late(self) -> None:
        x = exchange(10, outcome=Outcome.CLIENT_CANCELLED)
        assert tokens_after_cancel(x, measure(x)) == 0


def timed(*told: dict[str, object]) -> Exchange:
    """First token after 100 ms, five in all at 20 ms, whole after 200."""
    x = stream([100, 120, 140, 160, 180])
    x.timeline.response_end_ns = 200 * MS
    x.server_timing = list(told) or None
    return x


def disagreement(*told: dict[str, object]) -> dict[str, int]:
    x = timed(*told)
    return clock_disagreement(x, measure(x))


def test_each_duration_is_ours_minus_the_servers() -> None:
    found = disagreement(
        {"name": "ttft", "ms": 90.5, "where": "usage"},
        {"name": "decode", "ms": 81.0, "where": "usage"},
        {"name": "mean_itl", "ms": 20, "where": "usage"},
        {"name": "total", "ms": 171, "where": "header:x"},
        {"name": "queue", "ms": 5, "where": "usage"},
    )
    assert found == {"ttft": 9_500_000, "decode": -1 * MS, "itl": 0, "e2e": 29 * MS}
    assert found.keys() == set(DISAGREEMENTS)


def test_queue_and_prefill_stand_for_a_ttft_that_is_not_told() -> None:
    queue, prefill = {"name": "queue", "ms": 10}, {"name": "prefill", "ms": 60}
    assert disagreement(queue, prefill) == {"ttft": 30 * MS}
    assert disagreement(prefill) == {}
    assert disagreement(queue, prefill, {"name": "ttft", "ms": 99}) == {"ttft": 1 * MS}


@pytest.mark.parametrize(
    "told",
    [
        {"name": "decode", "ms": "70"},
        {"name": "decode"},
        {"ms": 70},
        {"name": 7, "ms": 70},
        {"name": "decode", "ms": float("nan")},
        {"name": "decode", "ms": float("inf")},
        {"name": "load", "ms": 7},
    ],
)
def test_what_cannot_be_compared_is_left_out(told: dict[str, object]) -> None:
    assert disagreement(told) == {}


def test_a_point_that_we_did_not_see_is_left_out() -> None:
    x = timed({"name": "ttft", "ms": 1}, {"name": "total", "ms": 2})
    x.timeline.submit_ns = None
    assert clock_disagreement(x, measure(x)) == {}
