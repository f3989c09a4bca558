"""Invariant: what the totals hold is what was recorded, whenever it was taken and however it was added."""

from bisect import bisect_left

from hypothesis import given
from hypothesis import strategies as st

from llmtap.exchange.exchange import Exchange
from llmtap.exchange.outcome import Outcome
from llmtap.export.opentelemetry.metrics import MetricCell, MetricRecorder, Point, Totals
from llmtap.export.opentelemetry.semconv import semconv
from tests.support.telemetry import MS, chat, read

EDGES = (10, 20, 40)


@given(st.lists(st.integers(-5, 100)), st.lists(st.integers(-5, 100)))
def test_many_at_once_are_as_one_by_one(values: list[int], more: list[int]) -> None:
    one, many, merged = MetricCell(EDGES), MetricCell(EDGES), MetricCell(EDGES)
    for value in values + more:
        one.add(value, EDGES)
    many.add_many(values + more, EDGES)
    merged.add_many(values, EDGES)
    other = MetricCell(EDGES)
    other.add_many(more, EDGES)
    merged.merge(other)
    expected = [0, 0, 0, 0]
    for value in values + more:
        expected[bisect_left(EDGES, value)] += 1
    for cell in (one, many, merged):
        assert (cell.counts, cell.total) == (expected, sum(values + more))


def test_an_edge_belongs_to_its_bucket() -> None:
    cell = MetricCell(EDGES)
    cell.add_many([10, 20, 21, 40, 41], EDGES)
    assert cell.counts == [1, 1, 2, 1]


def put(recorder: MetricRecorder, *exchanges: Exchange) -> None:
    for x in exchanges:
        recorder.record(x, *read(x))


def by_name(points: list[Point]) -> dict[str, list[Point]]:
    found: dict[str, list[Point]] = {}
    for point in points:
        found.setdefault(point.measure.instrument.name, []).append(point)
    return found


def test_totals_go_on_from_take_to_take() -> None:
    recorder = MetricRecorder(semconv("1.41"), 100)
    totals = Totals(recorder, {})
    put(recorder, chat())
    list(totals.gather())
    assert recorder.take() == {}
    put(recorder, chat(), chat())
    (duration,) = by_name(list(totals.gather()))["gen_ai.client.operation.duration"]
    assert (sum(duration.cell.counts), duration.cell.total) == (3, 3 * 261 * MS)
    assert list(totals.gather()) != []


def test_each_term_is_counted_in_its_metric() -> None:
    recorder = MetricRecorder(semconv("1.41"), 100)
    put(recorder, chat())
    found = by_name(list(Totals(recorder, {}).gather()))
    totals = {
        name: sorted((sum(point.cell.counts), point.cell.total) for point in points)
        for name, points in found.items()
    }
    assert totals == {
        "gen_ai.client.operation.duration": [(1, 261 * MS)],
        "gen_ai.client.operation.time_to_first_chunk": [(1, 100 * MS)],
        "gen_ai.client.operation.time_per_output_chunk": [(4, 160 * MS)],
        "gen_ai.client.token.usage": [(1, 3), (1, 7)],
        "gen_ai.server.request.duration": [(1, 250 * MS)],
        "gen_ai.server.time_to_first_token": [(1, 100 * MS)],
        "gen_ai.server.time_per_output_token": [(1, 75 * MS)],
        "llmtap.time_to_first_token": [(1, 100 * MS)],
        "llmtap.inter_chunk": [(2, 140 * MS)],
        "llmtap.user_idle": [(1, 140 * MS)],
        "llmtap.exchanges": [(0, 1)],
    }


def test_embeddings_have_metrics_of_their_own_in_the_moved_conventions() -> None:
    x = chat(stream=False, endpoint="embeddings", model="e")
    for version, duration, tokens in (
        ("1.41", "gen_ai.client.operation.duration", "gen_ai.client.token.usage"),
        (
            "genai-main",
            "gen_ai.client.embeddings.duration",
            "gen_ai.client.embeddings.operation.input_tokens",
        ),
    ):
        recorder = MetricRecorder(semconv(version), 100)  # type: ignore[arg-type]
        put(recorder, x)
        found = by_name(list(Totals(recorder, {}).gather()))
        assert set(found) == {duration, tokens, "gen_ai.server.request.duration", "llmtap.exchanges"}


def test_http_that_is_no_operation_is_only_counted() -> None:
    recorder = MetricRecorder(semconv("1.41"), 100)
    put(recorder, chat(endpoint=None, method="GET", path="/v1/models"))
    ((name, (point,)),) = by_name(list(Totals(recorder, {}).gather())).items()
    assert name == "llmtap.exchanges"
    assert dict(point.attributes)["llmtap.outcome"] == "complete"


def test_the_error_stands_at_durations_only() -> None:
    recorder = MetricRecorder(semconv("1.41"), 100)
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
    recorder = MetricRecorder(semconv("1.41"), 2)
    totals = Totals(recorder, {"": ("gw", 443)})
    put(recorder, *(chat(model=f"m{i}") for i in range(10)))
    list(totals.gather())
    put(recorder, *(chat(model=f"m{i}") for i in range(10)))
    points = by_name(list(totals.gather()))["gen_ai.client.operation.duration"]
    counts = {
        dict(point.attributes).get("gen_ai.request.model", "overflow"): sum(point.cell.counts)
        for point in points
    }
    assert counts == {"m0": 2, "m1": 2, "overflow": 16}
    (overflow,) = (point for point in points if ("otel.metric.overflow", True) in point.attributes)
    assert overflow.attributes == [("otel.metric.overflow", True)]
    usage = by_name(list(totals.gather()))["gen_ai.client.token.usage"]
    marked = [dict(p.attributes)["gen_ai.token.type"] for p in usage if len(p.attributes) == 2]
    assert sorted(marked) == ["input", "output"], "two overflows of one metric need telling apart"


def test_the_server_is_that_of_the_arm() -> None:
    recorder = MetricRecorder(semconv("1.41"), 100)
    put(recorder, chat(), chat(arm="guarded"), chat(arm="plain"))
    totals = Totals(recorder, {"": ("gw", 443), "guarded": ("rails", 8000)})
    points = by_name(list(totals.gather()))["gen_ai.client.operation.duration"]
    servers = {
        (a.get("llmtap.arm"), a["server.address"], a["server.port"])
        for a in (dict(point.attributes) for point in points)
    }
    assert servers == {(None, "gw", 443), ("guarded", "rails", 8000), ("plain", "gw", 443)}
