"""Invariant: a simulated Exchange measures as the one that a tap makes of the same answer passing by."""

import json
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.exchange.exchange import Exchange
from llmtap.exchange.observer import Observer
from llmtap.exchange.outcome import Outcome, TokenSource
from llmtap.metrics.latency import DEFAULT_BENEFIT, chunking_of, measure
from llmtap.metrics.objectives import Objectives
from llmtap.metrics.summary import Summary
from llmtap.sim.engine import RunRecord
from llmtap.sim.sweep.simulate import ExchangeMaker, VirtualMeter
from llmtap.workload.requests import Requests

MS = 1_000_000
EPOCH_NS = 1_700_000_000 * 10**9
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nContent-Length: 16\r\n\r\n"


def column(*values: int) -> "array[int]":
    return array("q", values)


def requests(arrival_ns: int = 0, given: int = 7, **more: object) -> Requests:
    """One request; its output does not matter, since tokens are told."""
    return Requests(column(arrival_ns), column(given), column(1), column(1), **more)  # type: ignore[arg-type]


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def passing_by(arrival_ns: int, token_ns: list[int], end_ns: int) -> Exchange:
    """The same answer through an observer: an event for each token, and usage at the end."""
    o = Observer("sim-x", 1, arrival_ns, EPOCH_NS + arrival_ns, REQUEST)
    o.request_data(b'{"model": "sim"}', arrival_ns)
    o.request_end(arrival_ns)
    o.submitted(arrival_ns, 0)
    o.response_head(HEAD, token_ns[0], 0)
    frame = {"object": "chat.completion.chunk", "model": "sim"}
    for t_ns in token_ns:
        choice = {"index": 0, "delta": {"content": "word"}, "finish_reason": None}
        o.response_data(event(frame | {"choices": [choice]}), t_ns, 0)
    usage = {"prompt_tokens": 7, "completion_tokens": len(token_ns), "total_tokens": 7 + len(token_ns)}
    stop = event(frame | {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": usage})
    o.response_data(stop + b"data: [DONE]\n\n", end_ns, 0)
    o.response_end(end_ns)
    return o.finish(end_ns, "complete", None, None, 0, 0, 0, 0)


@given(
    st.integers(0, 10**12),
    st.lists(st.integers(0, 10**10), min_size=1, max_size=40),
    st.integers(0, 10**9),
)
def test_it_measures_as_the_same_answer_passing_by(arrival_ns: int, gaps: list[int], rest_ns: int) -> None:
    token_ns = [arrival_ns + sum(gaps[: i + 1]) for i in range(len(gaps))]
    end_ns = token_ns[-1] + rest_ns
    ours = ExchangeMaker("x", requests(arrival_ns, epoch_ns=EPOCH_NS)).exchange(
        0, token_ns, end_ns, served=True
    )
    live = passing_by(arrival_ns, token_ns, end_ns)
    mine, theirs = measure(ours), measure(live)
    assert mine.metrics() == theirs.metrics()
    assert (mine.tbc_ns, mine.itl_even_ns, mine.itl_policy) == (
        theirs.tbc_ns, theirs.itl_even_ns, theirs.itl_policy,
    )  # fmt: skip
    for name in (
        "relay", "seq", "id", "arrival_wall_ns", "outcome", "method", "path", "endpoint", "dialect", "model",
        "response_model", "tenant", "status", "stream", "finish_reason", "tokens", "usage", "error",
        "no_token_reason",
    ):  # fmt: skip
        assert getattr(ours, name) == getattr(live, name), name
    told = ours.to_dict(mine.metrics(), chunking_of(ours))
    assert told["timeline"] == live.to_dict(theirs.metrics(), chunking_of(live))["timeline"]


def test_a_request_that_makes_no_token_is_an_empty_answer() -> None:
    x = ExchangeMaker("x", requests()).exchange(0, (), 5 * MS, served=True)
    assert (x.outcome, x.no_token_reason, x.tokens.output, x.status) == (Outcome.COMPLETE, "empty", 0, 200)
    assert (measure(x).ttft_ns, measure(x).e2e_ns, measure(x).ttfb_ns) == (None, 5 * MS, 5 * MS)
    assert Objectives.parse("ttft:1s").meets(measure(x), x) is False


OUTCOMES = [
    # tokens that left before it was given up, outcome, status, streamed, its counts, its words
    ((), Outcome.UPSTREAM_ERROR, 503, False, (None, None, TokenSource.NONE), None),
    ((3 * MS, 4 * MS), Outcome.TRUNCATED, 200, True, (7, 2, TokenSource.RUNNING_USAGE), 7 + 2),
]


@pytest.mark.parametrize(("token_ns", "outcome", "status", "stream", "tokens", "total"), OUTCOMES)
def test_what_the_scheduler_gave_up_failed_upstream_and_misses_every_objective(
    token_ns: tuple[int, ...], outcome: Outcome, status: int, stream: bool,
    tokens: tuple[int | None, int | None, TokenSource], total: int | None,
) -> None:  # fmt: skip
    x = ExchangeMaker("x", requests()).exchange(0, token_ns, 5 * MS, served=False)
    assert (x.outcome, x.status, x.stream) == (outcome, status, stream)
    assert (x.tokens.input, x.tokens.output, x.tokens.source) == tokens
    assert (x.usage or {}).get("total_tokens") == total
    assert (x.finish_reason, x.error) == (None, "given up by the scheduler")
    assert Objectives.parse("ttft:1s tpot:1s e2e:1s").meets(measure(x), x) is False
    assert measure(x).e2e_ns == 5 * MS


@pytest.mark.parametrize(("found", "cached"), [((), None), ((0,), 0), ((5,), 5), ((-1,), None)])
def test_what_the_prefix_cache_had_is_in_the_usage(found: tuple[int, ...], cached: int | None) -> None:
    played = RunRecord.begun(1, 1)
    played.cached = column(*found)
    x = ExchangeMaker("x", requests(), played).exchange(0, (5,), 6, served=True)
    assert x.tokens.cached == cached
    details = None if cached is None else {"cached_tokens": cached}
    assert (x.usage or {}).get("prompt_tokens_details") == details


def three() -> ExchangeMaker:
    columns = (array("q", [0, 10 * MS, 20 * MS]), *(array("q", [n] * 3) for n in (5, 4, 4)))
    return ExchangeMaker("x", Requests(*columns))


def test_slow_is_who_had_any_gap_above_the_bound() -> None:
    meter = VirtualMeter(three(), Summary(), DEFAULT_BENEFIT, 10 * MS, lambda x: None)
    meter.ended(0, [100 * MS], 100 * MS, served=True)  # one token has no gap, however late
    meter.ended(1, [100 * MS, 110 * MS, 120 * MS], 500 * MS, served=True)
    assert meter.slow == 0
    meter.ended(2, [100 * MS, 110 * MS, 120 * MS + 1, 121 * MS], 121 * MS, served=False)
    assert meter.slow == 1
