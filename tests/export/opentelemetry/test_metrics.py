"""Invariant: what the totals hold is what was recorded, whenever it was taken and however it was added."""

from llmtap.exchange.exchange import Exchange
from llmtap.exchange.outcome import Outcome
from llmtap.export.opentelemetry.metrics import MetricRecorder, Point, Totals
from llmtap.export.opentelemetry.semconv import VERSIONS
from tests.support.telemetry import MS, chat, read


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


def test_totals_go_on_from_take_to_take() -> None:
    recorder = MetricRecorder(VERSIONS["1.41"], 100)
    totals = Totals(recorder, {})
    put(recorder, chat())
    list(totals.gather())
    assert recorder.take() == {}
    put(recorder, chat(), chat())
    (duration,) = by_name(list(totals.gather()))["gen_ai.client.operation.duration"]
    assert counted(duration) == (3, 3 * 261 * MS)
    assert list(totals.gather()) != []


def test_each_term_is_counted_in_its_metric() -> None:
    recorder = MetricRecorder(VERSIONS["1.41"], 100)
    put(recorder, chat())
    found = by_name(list(Totals(recorder, {}).gather()))
    totals = {name: sorted(map(counted, points)) for name, points in found.items()}
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
        "llmtap.exchanges": [(1, 1)],
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
        recorder = MetricRecorder(VERSIONS[version], 100)  # type: ignore[arg-type]
        put(recorder, x)
        found = by_name(list(Totals(recorder, {}).gather()))
        assert set(found) == {duration, tokens, "gen_ai.server.request.duration", "llmtap.exchanges"}


def test_http_that_is_no_operation_is_only_counted() -> None:
    recorder = MetricRecorder(VERSIONS["1.41"], 100)
    put(recorder, chat(endpoint=None, method="GET", path="/v1/models"))
    ((name, (point,)),) = by_name(list(Totals(recorder, {}).gather())).items()
    assert name == "llmtap.exchanges"
    assert dict(point.attributes)["llmtap.outcome"] == "complete"


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
