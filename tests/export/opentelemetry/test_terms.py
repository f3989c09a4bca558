"""The conventions' terms, by hand.

A chat that arrives at 0, is handed on at 10 ms, and has chunks at 100 (role), 110, 150, 250 and 260 ms
(usage); its last byte leaves at 261 ms.
"""

import pytest

from llmtap.exchange.outcome import Outcome, TokenSource
from llmtap.export.opentelemetry.spans import TEXT_MAX, error_type
from tests.support.telemetry import MS, chat, read


def test_the_terms_of_a_chat() -> None:
    _, terms = read(chat())
    assert (terms.operation, terms.provider, terms.model) == ("chat", "openai", "gpt-x")
    assert terms.duration_ns == 261 * MS
    assert terms.first_chunk_ns == 100 * MS, "a keep-alive is no chunk, a role is"
    assert terms.chunk_times_ns == [t * MS for t in (100, 110, 150, 250, 260)], "nor is the end marker"
    assert terms.server_duration_ns == 250 * MS
    assert terms.server_first_token_ns == 100 * MS
    assert terms.server_per_token_ns == (250 - 100) * MS // 2
    assert terms.output_tokens == 3


@pytest.mark.parametrize(
    ("outcome", "status", "told"),
    [
        (Outcome.COMPLETE, 200, None),
        (Outcome.REFUSED, 200, None),
        (Outcome.REFUSED, 400, "400"),
        (Outcome.CLIENT_CANCELLED, 200, None),
        (Outcome.CLIENT_CANCELLED, None, None),
        (Outcome.CLIENT_CANCELLED, 500, "500"),
        (Outcome.UPSTREAM_ERROR, 404, "404"),
        (Outcome.UPSTREAM_ERROR, 529, "529"),
        (Outcome.UPSTREAM_ERROR, 200, "upstream_error"),
        (Outcome.UPSTREAM_RESET, 200, "upstream_reset"),
        (Outcome.UPSTREAM_TIMEOUT, None, "upstream_timeout"),
        (Outcome.TRUNCATED, 200, "truncated"),
        (Outcome.REJECTED, 413, "413"),
        (Outcome.REJECTED, None, "rejected"),
    ],
)
def test_what_counts_as_an_error(outcome: Outcome, status: int | None, told: str | None) -> None:
    assert error_type(chat(outcome=outcome, status=status)) == told


def test_a_failed_answer_has_a_duration_but_no_server_terms_of_success() -> None:
    _, terms = read(chat(outcome=Outcome.UPSTREAM_RESET))
    assert terms.duration_ns == 261 * MS
    assert (terms.server_first_token_ns, terms.server_per_token_ns) == (None, None)


def test_an_answer_in_one_piece_has_no_terms_of_a_stream() -> None:
    _, terms = read(chat(stream=False))
    assert (terms.first_chunk_ns, terms.server_first_token_ns, terms.chunk_times_ns) == (None, None, [])
    assert terms.server_duration_ns == 250 * MS


@pytest.mark.parametrize(
    ("source", "counted"),
    [
        (TokenSource.USAGE, 3), (TokenSource.TOKEN_IDS, 3), (TokenSource.LOGPROBS, 3),
        (TokenSource.RUNNING_USAGE, 3), (TokenSource.TOKENIZER, None), (TokenSource.CHUNKS, None),
    ],
)  # fmt: skip
def test_usage_is_what_the_provider_told_or_showed(source: TokenSource, counted: int | None) -> None:
    x = chat()
    x.tokens.source = source
    _, terms = read(x)
    assert terms.output_tokens == counted
    assert (terms.server_per_token_ns is None) == (counted is None)


def test_hidden_reasoning_leaves_no_time_per_token() -> None:
    x = chat()
    x.tokens.reasoning = 2
    assert read(x)[1].server_per_token_ns is None
    x.timeline.first_reasoning_ns = x.timeline.first_token_ns
    assert read(x)[1].server_per_token_ns is not None


def test_a_cancelled_exchange_ends_with_the_last_thing_seen() -> None:
    x = chat(outcome=Outcome.CLIENT_CANCELLED)
    x.timeline.response_end_ns = x.timeline.delivered_ns = None
    assert read(x)[1].duration_ns == 260 * MS
    x = chat(outcome=Outcome.REJECTED, endpoint=None)
    x.timeline = type(x.timeline)(arrival_ns=7)
    _, terms = read(x)
    assert (terms.duration_ns, terms.operation, terms.provider) == (0, None, None)


def test_names_of_others_have_a_bound() -> None:
    _, terms = read(chat(model="m" * 10_000, response_model=None))
    assert terms.model == "m" * TEXT_MAX
    assert terms.response_model is None


def test_the_operator_knows_the_provider_best() -> None:
    assert read(chat(), "api.openai.com", "vllm")[1].provider == "vllm"
    assert read(chat(), "api.groq.com")[1].provider == "groq"
