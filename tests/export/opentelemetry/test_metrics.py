"""Invariant: what the totals hold is what was recorded, whenever it was taken and however it was added."""

import pytest

from llmtap.exchange.exchange import Exchange
from llmtap.exchange.outcome import Outcome, TokenSource
from llmtap.export.opentelemetry.semconv import VERSIONS
from llmtap.export.opentelemetry.signals import MetricRecorder, Point, Totals, error_type
from tests.export.telemetry import MS, chat, read


def put(recorder: MetricRecorder, *exchanges: Exchange) -> None:
    for x in exchanges:
        recorder.record(x, *read(x))


def counted(point: Point) -> tuple[int, int]:
    counts, total = point.cell.read()
    return sum(counts), total


def by_name(points: list[Point]) -> dict[str, list[Point]]:
    found: dict[str, list[Point]] = {}
    for point in points:
        found.setdefault(point.measure.instrument.name, []).append(point)
    return found


def test_the_error_stands_at_durations_only() -> None:
    recorder = MetricRecorder(VERSIONS["1.41"], 100)
    put(recorder, chat(), chat(outcome=Outcome.TRUNCATED), chat(outcome=Outcome.CLIENT_CANCELLED))
    found = by_name(list(Totals(recorder, {}).gather()))
    with_error = {
        name for name, points in found.items() for point in points if "error.type" in dict(point.attributes)
    }
    assert with_error == {
        "gen_ai.client.operation.duration",
        "gen_ai.server.request.duration",
        "llmtap.exchanges",
    }
    assert len(found["gen_ai.client.operation.duration"]) == 2, "a cancel is no error"
    assert len(found["gen_ai.client.operation.time_to_first_chunk"]) == 1


def test_series_beyond_the_bound_are_one_that_says_so() -> None:
    recorder = MetricRecorder(VERSIONS["1.41"], 2)
    totals = Totals(recorder, {"": ("gw", 443)})
    put(recorder, *(chat(model=f"m{i}") for i in range(10)))
    list(totals.gather())
    put(recorder, *(chat(model=f"m{i}") for i in range(10)))
    points = by_name(list(totals.gather()))["gen_ai.client.operation.duration"]
    counts = {
        dict(point.attributes).get("gen_ai.request.model", "overflow"): counted(point)[0] for point in points
    }
    assert counts == {"m0": 2, "m1": 2, "overflow": 16}
    (overflow,) = (point for point in points if ("otel.metric.overflow", True) in point.attributes)
    assert overflow.attributes == [("otel.metric.overflow", True)]
    usage = by_name(list(totals.gather()))["gen_ai.client.token.usage"]
    marked = [dict(p.attributes)["gen_ai.token.type"] for p in usage if len(p.attributes) == 2]
    assert sorted(marked) == ["input", "output"], "two overflows of one metric need telling apart"


def test_the_server_is_that_of_the_arm() -> None:
    recorder = MetricRecorder(VERSIONS["1.41"], 100)
    put(recorder, chat(), chat(arm="guarded"), chat(arm="plain"))
    totals = Totals(recorder, {"": ("gw", 443), "guarded": ("rails", 8000)})
    points = by_name(list(totals.gather()))["gen_ai.client.operation.duration"]
    servers = {
        (a.get("llmtap.arm"), a["server.address"], a["server.port"])
        for a in (dict(point.attributes) for point in points)
    }
    assert servers == {(None, "gw", 443), ("guarded", "rails", 8000), ("plain", "gw", 443)}


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


def test_the_body_of_an_error_is_no_chunk() -> None:
    x = chat()
    x.outcome, x.status = Outcome.UPSTREAM_ERROR, 503
    _, terms = read(x)
    assert (terms.first_chunk_ns, terms.chunk_times_ns, terms.error_type) == (None, [], "503")


@pytest.mark.parametrize(
    ("outcome", "status", "told"),
    [
        (Outcome.COMPLETE, 200, None),
        (Outcome.REFUSED, 400, "400"),
        (Outcome.CLIENT_CANCELLED, 200, None),
        (Outcome.CLIENT_CANCELLED, 500, "500"),
        (Outcome.UPSTREAM_ERROR, 404, "404"),
        (Outcome.UPSTREAM_ERROR, 200, "upstream_error"),
        (Outcome.UPSTREAM_TIMEOUT, None, "upstream_timeout"),
        (Outcome.REJECTED, None, "rejected"),
    ],
)
def test_what_counts_as_an_error(outcome: Outcome, status: int | None, told: str | None) -> None:
    assert error_type(chat(outcome=outcome, status=status)) == told


@pytest.mark.parametrize(
    ("source", "counted"),
    [
        (TokenSource.USAGE, 3),
        (TokenSource.TOKEN_IDS, 3),
        (TokenSource.LOGPROBS, 3),
        (TokenSource.RUNNING_USAGE, 3),
        (TokenSource.TOKENIZER, None),
        (TokenSource.CHUNKS, None),
    ],
)
def test_usage_is_what_the_provider_told_or_showed(source: TokenSource, counted: int | None) -> None:
    x = chat()
    x.tokens.source = source
    _, terms = read(x)
    assert terms.output_tokens == counted
    assert (terms.server_per_token_ns is None) == (counted is None)


def test_a_cancelled_exchange_ends_with_the_last_thing_seen() -> None:
    x = chat(outcome=Outcome.CLIENT_CANCELLED)
    x.timeline.response_end_ns = x.timeline.delivered_ns = None
    assert read(x)[1].duration_ns == 260 * MS
    x = chat(outcome=Outcome.REJECTED, endpoint=None)
    x.timeline = type(x.timeline)(arrival_ns=7)
    _, terms = read(x)
    assert (terms.duration_ns, terms.operation, terms.provider) == (0, None, None)
