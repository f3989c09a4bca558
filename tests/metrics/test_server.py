import pytest

from llmtap.exchange.exchange import OUTPUT, EventLog, Exchange, Timeline, Tokens
from llmtap.exchange.outcome import EventClass, TokenSource
from llmtap.metrics.latency import measure
from llmtap.metrics.summary import DISAGREEMENTS, clock_disagreement

MS = 1_000_000


def exchange(*told: dict[str, object]) -> Exchange:
    """First token after 100 ms, five in all at 20 ms, whole after 200."""
    log = EventLog()
    for t_ms in (100, 120, 140, 160, 180):
        log.add(t_ms * MS, EventClass.CONTENT, 100, 1, OUTPUT)
    t = Timeline(
        arrival_ns=0, submit_ns=0, first_token_ns=100 * MS, last_token_ns=180 * MS, response_end_ns=200 * MS,
        events=log,
    )  # fmt: skip
    x = Exchange(relay="r", seq=1, arrival_wall_ns=0, timeline=t, stream=True)
    x.tokens = Tokens(output=5, source=TokenSource.TOKEN_IDS)
    x.server_timing = list(told) or None
    return x


def disagreement(*told: dict[str, object]) -> dict[str, int]:
    x = exchange(*told)
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


def test_the_first_telling_counts() -> None:
    assert disagreement({"name": "decode", "ms": 70}, {"name": "decode", "ms": 1}) == {"decode": 10 * MS}


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


def test_nothing_told_is_nothing() -> None:
    assert disagreement() == {}


def test_a_point_that_we_did_not_see_is_left_out() -> None:
    x = exchange({"name": "ttft", "ms": 1}, {"name": "total", "ms": 2})
    x.timeline.submit_ns = None
    assert clock_disagreement(x, measure(x)) == {}
