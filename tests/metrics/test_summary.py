from array import array
from typing import Any

import pytest

from llmtap.exchange.exchange import OUTPUT, Added, EventLog, Exchange, Timeline, Tokens
from llmtap.exchange.outcome import EventClass, Outcome, Reading, TokenSource
from llmtap.metrics.catalogue import METRICS
from llmtap.metrics.cost import Price
from llmtap.metrics.deadlines import Benefit
from llmtap.metrics.latency import measure
from llmtap.metrics.objectives import Objectives
from llmtap.metrics.summary import (
    ENDPOINTS_MAX,
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
        arrival_ns=0,
        submit_ns=0,
        first_byte_ns=log.t_ns[0],
        first_any_ns=log.t_ns[0],
        first_token_ns=log.t_ns[0],
        first_content_ns=log.t_ns[0],
        last_token_ns=log.t_ns[-1],
        response_end_ns=log.t_ns[-1],
        events=log,
    )
    x = Exchange(relay="r", seq=1, arrival_wall_ns=0, timeline=t, stream=True, outcome=outcome)
    x.tokens = Tokens(input=7, output=tokens * len(times_ms), source=TokenSource.TOKEN_IDS)
    x.reads = len(times_ms)
    return x


def whole(end_ms: int, outcome: Outcome = Outcome.COMPLETE) -> Exchange:
    """An answer in one piece."""
    x = stream([end_ms], outcome=outcome)
    x.stream = False
    return x


def summary_of(*exchanges: Exchange, objectives: str | None = None) -> Summary:
    summary = Summary(Objectives.parse(objectives) if objectives else None)
    for x in exchanges:
        summary.add(x)
    return summary


def out_of(*exchanges: Exchange, duration: float = 1.0, objectives: str | None = None) -> dict[str, Any]:
    return summary_of(*exchanges, objectives=objectives).to_dict(WINDOW, duration)


def test_streams_fill_every_metric() -> None:
    out = out_of(stream([100, 120, 150]), stream([300, 320, 340]), duration=10.0)
    metrics = out["metrics"]
    assert metrics.keys() == {metric.name for metric in METRICS}
    assert {name: m["n"] for name, m in metrics.items()} == {
        "ttft": 2,
        "ttft_any": 2,
        "ttft_reasoning": 0,
        "ttft_tool_call": 0,
        "first_event": 2,
        "ttfb": 2,
        "tpot": 2,
        "e2e": 2,
        "user_idle": 2,
        "user_idle_eq4": 2,
        "user_idle_from_first_token": 2,
        "tbc_max": 2,
        "jitter": 2,
        "smooth_benefit": 2,
        "fluidity_index_doc": 0,
        "fluidity_index_code": 0,
        "qoe_area_step": 0,
        "tbc": 4,
        "itl": 4,
        "itl_server": 0,
    }
    assert metrics["ttft"]["mean"] == pytest.approx(0.2)
    assert (metrics["tbc"]["max"], metrics["tbc"]["mean"]) == (0.03, pytest.approx(0.0225))
    # n - 5 l: 3 - 0.5 and 3 - 1.5 tokens
    assert (metrics["smooth_benefit"]["min"], metrics["smooth_benefit"]["max"]) == (1.5, 2.5)
    assert out["smooth_goodput"] == {
        "tokens_per_second": pytest.approx(0.4),
        "tokens_per_second_eq4": pytest.approx(0.45),
        "n": 2,
        "alpha": 5.0,
        "speed_tokens_per_second": 20.0,
        "idle": "max(t_i - submit - V(i-1)), f(l) = l in seconds",
    }
    assert (out["n"], out["goodput"], out["cost"], out["clock_disagreement"]) == (2, None, None, {})
    assert out["tokens"] == {
        "input": 14,
        "output": 6,
        "reasoning": None,
        "cached": None,
        "input_per_second": 1.4,
        "output_per_second": 0.6,
        "source": {"token_ids": 2},
        "cancelled": None,
        "after_cancel": None,
    }


def test_both_readings_of_the_deadlines_are_reported() -> None:
    """Readers of 50 ms a token wait 100 and 300 ms by V (i - 1), and 50 and 250 ms by V i."""
    summary = summary_of(stream([100, 120, 150]), stream([300, 320, 340]))
    packed = Summary()
    packed.merge_bytes(summary.to_bytes())
    packed.merge(summary)
    out: Any = packed.to_dict(WINDOW, 10.0)
    by_submit, literal = out["metrics"]["user_idle"], out["metrics"]["user_idle_eq4"]
    assert [by_submit["min"], by_submit["max"]] == [0.1, 0.3]
    assert [literal["min"], literal["max"]] == [0.05, 0.25]
    # Twice each stream: 3 tokens less 5 for each second of the wait, in 10 s.
    assert out["smooth_goodput"]["tokens_per_second"] == pytest.approx(2 * (6 - 5 * 0.4) / 10)
    assert out["smooth_goodput"]["tokens_per_second_eq4"] == pytest.approx(2 * (6 - 5 * 0.3) / 10)
    # The first token comes before V: the wait is never below 0. The grace of the reader changes only its own.
    early = stream([10, 60])
    m = measure(early, Benefit(grace_tokens=3))
    assert (m.user_idle_ns, m.user_idle_eq4_ns) == (0, 0)
    m = measure(stream([120, 130]), Benefit(grace_tokens=2))
    assert (m.user_idle_ns, m.user_idle_eq4_ns) == (20 * MS, 70 * MS)


@pytest.mark.parametrize("outcome", Outcome)
def test_an_answer_in_one_piece_has_a_first_byte_and_an_end_if_it_ended_well(outcome: Outcome) -> None:
    out = out_of(whole(900, outcome))
    ended_well = outcome in (Outcome.COMPLETE, Outcome.REFUSED)
    assert {name for name, m in out["metrics"].items() if m["n"]} == {"ttfb"} | (
        {"e2e"} if ended_well else set()
    )
    assert out["outcomes"] == {outcome.value: 1}


@pytest.mark.parametrize(
    ("exchanges", "option", "samples"),
    [
        ([stream([0, 40], tokens=4)], "B-even", {"B-even": 4}),
        ([stream([0, 40], tokens=-1)], "A", {"A": 1}),
        ([stream([0, 40], tokens=2), stream([0, 40], tokens=-1)], "A+B-even", {"A": 1, "B-even": 2}),
        ([stream([0])], None, {}),
    ],
)
def test_the_itl_option_is_named(exchanges: list[Exchange], option: str | None, samples: object) -> None:
    for x in exchanges:
        if x.timeline.events.tokens[0] < 0:
            x.tokens = Tokens(output=99, source=TokenSource.USAGE)
    itl = out_of(*exchanges)["metrics"]["itl"]
    assert (itl["option"], itl["samples"]) == (option, samples)


@pytest.mark.parametrize(("end_ms", "differs"), [(150, False), (150.9, False), (151.1, True), (250, True)])
def test_both_forms_of_tpot_where_they_differ_by_more_than_one_percent(end_ms: float, differs: bool) -> None:
    """Three tokens from 50 to 150 ms: TPOT is 50 ms to the last token."""
    x = stream([50, 100, 150])
    x.timeline.response_end_ns = round(end_ms * 1e6)
    tpot = out_of(x, x)["metrics"]["tpot"]
    assert tpot["mean"] == pytest.approx(0.05)
    assert ("to_end" in tpot) == differs
    if differs:
        assert (tpot["to_end"]["n"], tpot["to_end"]["mean"]) == (2, pytest.approx((end_ms - 50) / 2e3))
    # The end of a cancelled stream is not that of its generation.
    x.outcome = Outcome.CLIENT_CANCELLED
    assert "to_end" not in out_of(x)["metrics"]["tpot"]


def test_chunking_says_how_the_answers_were_cut() -> None:
    held, worse = [0, 10, 20, 30, 130, 130, 130], [0, 10, 20, 30, 430, 430, 430, 430]
    assert out_of(stream([1, 2, 3]), stream([1], tokens=5), stream(held), stream(worse))["chunking"] == {
        "events": 19,
        "content_events": 19,
        "reads": 19,
        "events_per_read": 1.0,
        "tokens_per_chunk_mean": pytest.approx(23 / 19),
        "tokens_per_chunk_max": 5,
        "single_token_share": pytest.approx(18 / 19),
        "chunks_with_known_tokens": 19,
        "bytes_per_event_mean": 100.0,
        "bursts": {"n": 2, "streams": 2, "events": 7, "hold_max": 0.4},
    }


def test_goodput_is_of_the_summarys_objectives() -> None:
    exchanges = stream([100, 120]), stream([300, 320]), stream([100, 120, 140], tokens=5)
    out = out_of(*exchanges, duration=10.0, objectives="ttft:200ms tpot:50ms")
    goodput, metrics = out["goodput"], out["metrics"]
    assert (goodput["objectives"], goodput["met"], goodput["counted"]) == ("ttft:200ms tpot:50ms", 2, 3)
    assert (goodput["requests_per_second"], goodput["tokens_per_second"]) == (0.2, 1.7)
    assert (metrics["fluidity_index_code"]["n"], metrics["fluidity_index_code"]["max"]) == (3, 1.0)
    assert metrics["qoe_area_step"]["n"] == 3


def test_with_the_deadlines_of_equation_4_a_reader_waits_less_by_the_time_of_a_token() -> None:
    summary = Summary(reader=Benefit.at_speed(100, grace_tokens=1))
    summary.add(stream([100, 120, 150]))
    out: Any = summary.to_dict(WINDOW, 1.0)
    assert out["metrics"]["user_idle"]["p50"] == pytest.approx(0.120)
    assert out["smooth_goodput"]["idle"].startswith("max(t_i - submit - V i), f(l)")
    other = Summary()
    other.merge_bytes(summary.to_bytes())
    assert other.to_dict(WINDOW, 1.0) == out


def test_smooth_goodput_says_for_which_reader() -> None:
    fast, slow = Benefit.at_speed(100, alpha=1), Benefit.at_speed(10, f="tokens")
    x = stream([100, 120, 150])
    summary = Summary()
    summary.add(x, measure(x, fast))
    out: Any = summary.to_dict(WINDOW, 1.0)["smooth_goodput"]
    # Read at 10 ms a token the third is due at 120 and comes at 150: 30 ms after the first 100.
    assert out["tokens_per_second"] == pytest.approx(3 - 0.13)
    assert (out["alpha"], out["speed_tokens_per_second"]) == (1, 100.0)
    summary.add(x, measure(x, slow))
    out = summary.to_dict(WINDOW, 1.0)["smooth_goodput"]
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
    out = out_of(x, y)
    assert {name: (d["n"], d["min"], d["max"]) for name, d in out["clock_disagreement"].items()} == {
        "ttft": (2, -0.03, 0.01)
    }
    server = out["metrics"]["itl_server"]
    assert (server["n"], server["max"], server["option"]) == (1, 0.019, "C")
    direct = "direct (single-token chunks); tokens by token_ids"
    assert out["metrics"]["itl"]["policy"] == {f"C (the server's stamps) beside {direct}": 1, direct: 1}


@pytest.mark.parametrize(("objectives", "good"), [(None, None), ("ttft:1s", pytest.approx(0.1))])
def test_a_price_makes_a_cost(objectives: str | None, good: object) -> None:
    summary = summary_of(stream([100, 120]), objectives=objectives)
    cost: Any = summary.to_dict(WINDOW, 10.0, price=Price(gpus=2, per_gpu_hour=36))["cost"]
    figures = (cost["spent"], cost["per_output_token"], cost["per_good_token"])
    assert figures == (pytest.approx(0.2), pytest.approx(0.1), good)


def test_refusals_are_counted_by_kind() -> None:
    refused = stream([1], outcome=Outcome.REFUSED)
    refused.refusal = {"kind": "content_filter", "source": "finish_reason"}
    assert out_of(refused, stream([1], outcome=Outcome.REFUSED), stream([1]))["refusals"] == {
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
    out: Any = summary.to_dict(WINDOW, 1.0)
    assert (out["uncertainty"], out["uncertainties"]["n"], out["uncertainties"]["max"]) == (0.003, 3, 0.003)
    assert out["uncertainties"]["p50"] == pytest.approx(0.001, rel=1e-3)
    summary.add_uncertainty(5 * MS)
    summary.add_uncertainty(4 * MS)
    assert summary.to_dict(WINDOW, 1.0)["uncertainty"] == 0.005


def test_what_the_tap_added_is_summed_up() -> None:
    x = stream([1])
    x.added = Added(request_ns=40_000, first_chunk_ns=30_000)
    x.added.chunks_ns.extend([30_000, 20_000])
    assert {point: (a["n"], a["max"]) for point, a in out_of(x)["added"].items()} == {
        "request": (1, 0.00004),
        "first_chunk": (1, 0.00003),
        "chunk": (2, 0.00003),
    }


def test_nothing_seen_is_null_and_never_zero() -> None:
    out = out_of(duration=0.0)
    assert out["load"] == {"mode": "live", "offered_rps": None, "achieved_rps": None}
    assert (out["uncertainty"], out["tokens"]["output"]) == (None, None)
    assert out["smooth_goodput"]["tokens_per_second"] is None


def test_merging_and_packing_equal_adding_together() -> None:
    refused = stream([5, 9, 30], tokens=3, outcome=Outcome.REFUSED)
    refused.refusal = {"kind": "model"}
    refused.uncertainty_ns = 9
    refused.added.chunks_ns.extend([1, 2, 3])
    refused.server_timing = [{"name": "decode", "ms": 5}]
    held = stream([0, 10, 20, 30, 130, 130, 130])
    parts = [[stream([100, 120]), whole(7)], [refused, held], []]
    merged, unpacked = Summary(), Summary()
    for part in parts:
        merged.merge(summary_of(*part, objectives="ttft:200ms tpot:50ms"))
        unpacked.merge_bytes(summary_of(*part, objectives="ttft:200ms tpot:50ms").to_bytes())
    together = out_of(*(x for part in parts for x in part), duration=3.0, objectives="ttft:200ms tpot:50ms")
    for found in (merged, merged.copy(), unpacked):
        assert found.to_dict(WINDOW, 3.0) == together
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
        (Outcome.REFUSED, "model_refusal", "refusal"),
        (Outcome.REFUSED, "output_guardrail", "guardrail"),
        (Outcome.CLIENT_ERROR, None, "client_error"),
        (Outcome.UPSTREAM_RESET, None, "error"),
        (Outcome.CLIENT_CANCELLED, None, "cancelled"),
        (Outcome.REJECTED, None, "rejected"),
    ],
)
def test_no_token_has_a_reason(outcome: Outcome, kind: str | None, expected: str) -> None:
    x = exchange(outcome=outcome)
    x.refusal = None if kind is None else {"kind": kind}
    assert reason(x) == expected
    assert expected in NO_TOKEN_REASONS


@pytest.mark.parametrize(
    ("stream", "outcome", "expected"),
    [
        (True, Outcome.TAP_ERROR, None),
        (False, Outcome.TAP_ERROR, None),
        (False, Outcome.COMPLETE, None),
        (False, Outcome.UPSTREAM_ERROR, "error"),
    ],
)
def test_no_token_without_a_reason(stream: bool, outcome: Outcome, expected: str | None) -> None:
    assert reason(exchange(stream=stream, outcome=outcome)) == expected


@pytest.mark.parametrize(
    ("tokens", "left_ms", "outcome", "after"),
    [
        (1, 25, Outcome.CLIENT_CANCELLED, 2),
        (3, 25, Outcome.CLIENT_CANCELLED, 6),
        (-1, 25, Outcome.CLIENT_CANCELLED, 2),
        (1, 30, Outcome.CLIENT_CANCELLED, 1),
        (1, 40, Outcome.CLIENT_CANCELLED, 0),
        (1, None, Outcome.CLIENT_CANCELLED, 0),
        (1, 5, Outcome.COMPLETE, None),
    ],
)
def test_tokens_after_cancel(tokens: int, left_ms: int | None, outcome: Outcome, after: int | None) -> None:
    x = exchange(10, 20, 30, 40, tokens=tokens, outcome=outcome)
    x.timeline.delivered_ns = None if left_ms is None else left_ms * MS
    assert tokens_after_cancel(x, measure(x)) == after


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


QUEUE, PREFILL = {"name": "queue", "ms": 10}, {"name": "prefill", "ms": 60}


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([QUEUE, PREFILL], {"ttft": 30 * MS}),
        ([PREFILL], {}),
        ([QUEUE, PREFILL, {"name": "ttft", "ms": 99}], {"ttft": 1 * MS}),
        ([{"name": "decode", "ms": "70"}, {"name": "decode"}, {"ms": 70}, {"name": 7, "ms": 70}], {}),
        ([{"name": "decode", "ms": float("nan")}, {"name": "decode", "ms": float("inf")}], {}),
        ([{"name": "load", "ms": 7}], {}),
    ],
    ids=["queue and prefill", "prefill only", "ttft first", "wrong types", "not finite", "other name"],
)
def test_what_the_server_tells_is_compared_or_left_out(
    told: list[dict[str, object]], expected: dict[str, int]
) -> None:
    assert disagreement(*told) == expected


def test_a_point_that_we_did_not_see_is_left_out() -> None:
    x = timed({"name": "ttft", "ms": 1}, {"name": "total", "ms": 2})
    x.timeline.submit_ns = None
    assert clock_disagreement(x, measure(x)) == {}


def test_times_of_inferred_answers_stand_apart_and_answers_without_dialect_have_their_place() -> None:
    read, inferred = Summary(), Summary()
    for summary, reading in ((read, Reading.DIALECT), (inferred, Reading.INFERRED)):
        x = stream([100, 140])
        x.reading, x.path, x.content_type = reading, "/api/chat", "text/event-stream"
        summary.add(x)
    unread = stream([1])
    unread.reading, unread.unparsed_events, unread.path = Reading.NONE, 3, "/v2/x"
    inferred.add(unread)
    inferred.add(unread)
    read.merge_bytes(inferred.to_bytes())
    out: Any = read.to_dict({}, 1.0)
    assert out["readings"] == {"dialect": 1, "inferred": 1, "none": 2}
    assert (out["metrics"]["tbc"]["n"], out["inferred"]["tbc"]["n"]) == (1, 1)
    assert out["without_dialect"] == [
        {"reading": "none", "path": "/v2/x", "content_type": None, "n": 2},
        {"reading": "inferred", "path": "/api/chat", "content_type": "text/event-stream", "n": 1},
    ]


def test_places_of_answers_without_dialect_are_bounded() -> None:
    summary, other = Summary(), Summary()
    for i in range(ENDPOINTS_MAX + 10):
        x = stream([1])
        x.reading, x.unparsed_events, x.path = Reading.NONE, 1, f"/{i}"
        (summary if i % 2 else other).add(x)
    summary.merge_bytes(other.to_bytes())
    places: Any = summary.to_dict({}, 1.0)["without_dialect"]
    assert len(places) == ENDPOINTS_MAX + 1
    assert (places[0]["path"], places[0]["n"]) == ("other", 10)
