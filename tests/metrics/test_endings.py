import pytest

from llmtap.exchange.exchange import OUTPUT, EventLog, Exchange, Timeline, Tokens
from llmtap.exchange.outcome import EventClass, Outcome, TokenSource
from llmtap.metrics.latency import measure
from llmtap.metrics.summary import NO_TOKEN_REASONS, no_token_reason, tokens_after_cancel

MS = 1_000_000


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


@pytest.mark.parametrize("outcome", list(Outcome))
def test_whoever_got_a_token_has_none(outcome: Outcome) -> None:
    assert reason(exchange(5, outcome=outcome)) is None


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
