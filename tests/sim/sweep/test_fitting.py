"""Invariant: what a simulated engine took for an iteration is what its capture tells."""

import json
import random
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

import llmtap
from llmtap.exchange.exchange import EventLog, Exchange
from llmtap.sim.engine import Engine, RunRecord, run_virtual
from llmtap.sim.model_options import (
    SEED_MODEL,
    IterationModel,
    LatencyModel,
    Serving,
    ServingSetup,
)
from llmtap.sim.schedulers.registry import SCHEDULERS
from llmtap.sim.sweep.batch_grid import GridError, GridPoint, fit_batches, load_grid
from llmtap.sim.sweep.engine_load import KvMemory
from llmtap.sim.sweep.fit_report import capture_report, caution_of, grid_report
from llmtap.sim.sweep.fitting import IterationFit, fit_capture, fit_exchanges
from llmtap.sim.sweep.linear_fit import FitError, nearest, prediction_accuracy
from llmtap.sim.sweep.simulate import ExchangeMaker, ExchangeMeasuring, simulate
from llmtap.workload.requests import Requests

S = 1_000_000_000
MODEL = IterationModel(beta_ns=8e6, gamma=0.4, prefill_ns=40_000, context_ns=30.0)
CHUNKS = {"chunked_prefill": 512, "continuous_batching": None}
SERVING = Serving(kv_tokens=1_000_000, chunk=512)

ALONE = "requests that had the engine to themselves"
GAPS = "gaps between tokens while nobody waited"
ANSWERS = "whole answers, from first token to last"


def work(n: int, rate_rps: float, *, rest_every: int = 0) -> Requests:
    """Poisson arrivals, with a pause of 20 s before every so many; lognormal lengths."""
    chance, at_s = random.Random(5), 0.0
    columns = tuple(array("q") for _ in range(3))
    for i in range(n):
        at_s += chance.expovariate(rate_rps) + (20 if rest_every and i % rest_every == 0 else 0)
        given, made = chance.lognormvariate(6, 0.8), chance.lognormvariate(4, 0.6)
        for column, value in zip(columns, (at_s * S, given, made), strict=True):
            column.append(max(1, round(value)))
    return Requests(*columns)


def captured(to: Path, requests: Requests, scheduler: str = "continuous_batching") -> Path:
    setup = ServingSetup(iterations=MODEL, serving=SERVING)
    simulate(scheduler, requests, setup, measuring=ExchangeMeasuring(capture=to))
    return to


def assert_found(fit: IterationFit, rel: float) -> None:
    for name in ("beta_ns", "gamma", "prefill_ns", "context_ns"):
        assert getattr(fit.model, name) == pytest.approx(getattr(MODEL, name), rel=rel), name


@pytest.mark.parametrize("scheduler", CHUNKS)
@pytest.mark.parametrize(
    ("rate_rps", "rest_every"), [(5, 20), (2, 0)], ids=["bursts with pauses", "light load"]
)
def test_the_constants_come_back_from_a_capture(
    scheduler: str, rate_rps: float, rest_every: int, tmp_path: Path
) -> None:
    place = captured(tmp_path, work(400, rate_rps, rest_every=rest_every), scheduler)
    fit = fit_capture(str(place), chunk=CHUNKS[scheduler])
    assert_found(fit, 1e-4)
    assert fit.base_ns == pytest.approx(MODEL.beta_ns, rel=1e-6)
    assert (fit.prefill.source, fit.decode.source) == (ALONE, GAPS)
    assert min(fit.prefill.r2, fit.decode.r2) > 0.9999
    assert max(fit.prefill.error_max, fit.decode.error_max) < 1e-3
    assert fit.prefill.points >= 10
    assert fit.decode.points > 5_000
    unseen = {"prefill": fit.prefill_unseen, "decode": fit.decode_unseen}
    assert all(part is not None and part.r2 > 0.9999 and part.rms_error < 1e-3 for part in unseen.values())
    assert caution_of(unseen) is None


@pytest.mark.parametrize("scheduler", CHUNKS)
def test_a_server_at_the_limit_of_its_memory_needs_the_number_of_its_blocks(
    scheduler: str, tmp_path: Path
) -> None:
    serving = structs.replace(SERVING, kv_tokens=4_000)
    setup = ServingSetup(iterations=MODEL, serving=serving)
    simulate(scheduler, work(400, 6), setup, measuring=ExchangeMeasuring(capture=tmp_path))
    exchanges = list(llmtap.read(tmp_path).exchanges())
    unaware = fit_exchanges(exchanges, chunk=CHUNKS[scheduler])
    assert unaware.decode.r2 < 0.2
    assert unaware.decode_unseen is not None and unaware.decode_unseen.is_poor
    assert "decode: R^2" in str(caution_of({"decode": unaware.decode_unseen}))
    fit = fit_exchanges(exchanges, chunk=CHUNKS[scheduler], memory=KvMemory(4_000 // 16, 16))
    assert fit.decode.r2 > 0.9999 and fit.decode.points > 2 * unaware.decode.points
    assert fit.decode_unseen is not None and fit.decode_unseen.r2 > 0.9999
    assert fit.model.beta_ns == pytest.approx(MODEL.beta_ns, rel=1e-4)
    assert fit.model.context_ns == pytest.approx(MODEL.context_ns, rel=1e-3)


def test_a_server_that_changed_is_predicted_poorly() -> None:
    rows = [
        *exchanges_of_a_run(work(200, 2), MODEL),
        *exchanges_of_a_run(work(200, 2), replace(MODEL, beta_ns=2 * MODEL.beta_ns), after_ns=200 * S),
    ]
    fit = fit_exchanges(rows)
    assert fit.decode_unseen is not None and fit.decode_unseen.is_poor
    assert caution_of({"prefill": fit.prefill_unseen, "decode": fit.decode_unseen}) is not None


def test_a_capture_whose_second_half_has_more_load_is_judged_by_its_first_half() -> None:
    rows = [
        *exchanges_of_a_run(work(30, 0.05), MODEL),
        *exchanges_of_a_run(work(400, 5), MODEL, after_ns=700 * S),
    ]
    fit = fit_exchanges(rows)
    assert fit.decode_unseen is not None and fit.decode_unseen.r2 > 0.99


@pytest.mark.parametrize(("spread", "is_poor"), [(0.02, False), (0.5, True)])
def test_noise_of_durations_that_are_nearly_equal_is_no_poor_fit(spread: float, is_poor: bool) -> None:
    chance = random.Random(1)
    measured = [1 + chance.uniform(-spread, spread) for _ in range(1_000)]
    unseen = prediction_accuracy(measured, [1.0] * 1_000)
    assert unseen.r2 < 0.1 and unseen.is_poor is is_poor
    # The standard deviation of a uniform distribution is its width divided by the root of 12.
    assert unseen.rms_error == pytest.approx(2 * spread / 12**0.5, rel=0.05)


def exchanges_of_a_run(requests: Requests, model: IterationModel, after_ns: int = 0) -> list[Exchange]:
    requests = replace(requests, arrival_ns=array("q", [t + after_ns for t in requests.arrival_ns]))
    requests.predicted = requests.output
    record = RunRecord.for_requests(len(requests), 1)
    maker = ExchangeMaker("continuous_batching", requests, record)
    made: list[Exchange] = []

    class Watch:
        def on_ended(self, request: int, token_ns: Sequence[int], end_ns: int, *, served: bool) -> None:
            made.append(maker.exchange(request, token_ns, end_ns, served=served))

    scheduler = SCHEDULERS["continuous_batching"].build(
        requests, ServingSetup(iterations=model, serving=SERVING)
    )
    run_virtual(requests, Engine(scheduler), watch=Watch(), record=record)
    return made


def without_events(x: Exchange) -> Exchange:
    """As a trace tells it that has first and last tokens alone."""
    return replace(x, timeline=replace(x.timeline, events=EventLog()))


@pytest.mark.parametrize("scheduler", CHUNKS)
def test_first_and_last_tokens_tell_how_long_iterations_are(scheduler: str, tmp_path: Path) -> None:
    place = captured(tmp_path, work(600, 4, rest_every=100), scheduler)
    rows = [without_events(x) for x in llmtap.read(place).exchanges()]
    fit = fit_exchanges(rows, chunk=CHUNKS[scheduler])
    assert fit.decode.source == ANSWERS
    assert fit.decode.r2 > 0.98
    # Whether it is for their number or for what they have in memory cannot be told well: both rise together.
    for d in (1, 4, 16, 32):
        found, truth = (model.duration_ns(0, d, 600 * d) for model in (fit.model, MODEL))
        assert found == pytest.approx(truth, rel=0.05), d
    assert fit.model.prefill_ns == pytest.approx(MODEL.prefill_ns, rel=1e-4)


def test_a_dynamo_trace_is_fitted_by_its_first_tokens_and_ends(tmp_path: Path) -> None:
    place = captured(tmp_path / "capture", work(600, 4, rest_every=100))
    file = tmp_path / "dynamo.jsonl"
    with file.open("w") as out:
        for i, x in enumerate(llmtap.read(place).exchanges()):
            t = x.timeline
            assert t.submit_ns is not None and t.first_token_ns is not None and t.last_token_ns is not None
            request = {
                "request_id": str(i),
                "request_received_ms": round(t.submit_ns / 1e6, 3),
                "input_tokens": x.tokens.input,
                "output_tokens": x.tokens.output,
                "ttft_ms": (t.first_token_ns - t.submit_ns) / 1e6,
                "total_time_ms": (t.last_token_ns - t.submit_ns) / 1e6,
            }
            record = {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "request": request}
            print(json.dumps(record), file=out)
    fit = fit_capture(str(file))
    assert fit.prefill.source == ALONE and fit.decode.source == ANSWERS
    assert fit.model.prefill_ns == pytest.approx(MODEL.prefill_ns, rel=1e-3)
    for d in (1, 4, 16, 32):
        found, truth = (model.duration_ns(0, d, 600 * d) for model in (fit.model, MODEL))
        assert found == pytest.approx(truth, rel=0.05), d


def test_a_capture_of_several_models_gets_a_caution(tmp_path: Path) -> None:
    rows = list(llmtap.read(captured(tmp_path, work(60, 0.05))).exchanges())
    mixed = [replace(x, model=f"model-{i % 2}") for i, x in enumerate(rows)]
    for exchanges, models in ((rows, 1), (mixed, 2)):
        fit = fit_exchanges(exchanges)
        caution = capture_report("a", fit, memory_known=True).caution
        assert fit.model_count == models and ("2 models" in (caution or "")) is (models == 2)


def test_a_server_that_tells_of_its_queue_is_believed(tmp_path: Path) -> None:
    work_ = work(60, 0.05)
    place = captured(tmp_path, work_)
    late_ms = 250.0

    def queued(x: Exchange) -> Exchange:
        t = x.timeline
        stamps = {name: getattr(t, name) - round(late_ms * 1e6) for name in ("arrival_ns", "submit_ns")}
        timing: list[dict[str, object]] = [{"name": "queue", "ms": late_ms, "where": "header"}]
        return replace(x, timeline=replace(t, **stamps), server_timing=timing)

    rows = list(llmtap.read(place).exchanges())
    plain, result = fit_exchanges(rows), fit_exchanges([queued(x) for x in rows])
    assert plain.base_ns is not None
    assert result.base_ns == pytest.approx(plain.base_ns, abs=2_000)
    twice = [replace(q, server_timing=(q.server_timing or []) * 2) for q in map(queued, rows)]
    assert fit_exchanges(twice).base_ns == result.base_ns, "the engine's word and the gateway's on one wait"
    silent = fit_exchanges([replace(queued(x), server_timing=None) for x in rows])
    assert silent.base_ns == pytest.approx(plain.base_ns + late_ms * 1e6, abs=2_000)


def one(at_s: float, given: int | None, *token_s: float) -> Exchange:
    """A request alone on the axis of time, by its tokens' times."""
    columns = (array("q", [round(at_s * S)]), *(array("q", [n or 0]) for n in (given, 0, 0)))
    times = [round(t * S) for t in token_s]
    x = ExchangeMaker("x", Requests(*columns)).exchange(
        0, times, times[-1] if times else 0, served=bool(times)
    )
    x.tokens.input = given
    return x


SAME = [one(10 * i, 100, *(10 * i + 1 + k / 100 for k in range(20))) for i in range(20)]
UNTELLING: list[tuple[list[Exchange], str]] = [
    ([], "no row has the times of arrival, first"),
    ([one(0, 5)], "no row has the times of arrival, first"),
    ([one(0, None, 1, 2, 3)], "no row has a number of input tokens"),
    ([one(0, 5, 1, 2, 3)], "0 answers have times and at least 8 tokens"),
    (SAME[:5], "5 answers have times and at least 8 tokens"),
    (SAME, "was always 1, so its effect"),
]


@pytest.mark.parametrize(("rows", "missing"), UNTELLING)
def test_what_the_rows_do_not_tell_is_named(rows: list[Exchange], missing: str) -> None:
    with pytest.raises(FitError, match=missing):
        fit_exchanges(rows)


def test_prompts_of_one_length_do_not_tell_what_a_token_of_them_takes() -> None:
    # Pairs that run together and singles, all of 100 tokens and none taken in while others run.
    pairs = [one(1_000 + 10 * i, 100, *(1_001 + 10 * i + k / 50 for k in range(20))) for i in range(20)]
    with pytest.raises(FitError, match="different lengths one at a time"):
        fit_exchanges([*SAME, *(x for x in pairs for _ in range(2))])


RISING = {"one": [1.0] * 4, "up": [0.0, 1.0, 2.0, 3.0], "odd": [0.0, 1.0, 0.0, 1.0]}


@pytest.mark.parametrize(
    ("values", "needed", "found"),
    [
        ([1, 4, 5, 8], ["one"], {"one": 1.0, "up": 2.0, "odd": 1.0}),
        # 1 + 2 up - odd: without `odd` the nearest is 0.8 + 1.8 up.
        ([1, 2, 5, 6], ["one"], {"one": 0.8, "up": 1.8}),
        ([4, 3, 2, 1], ["one"], {"one": 2.5}),
        ([4, 3, 2, 1], ["one", "up"], None),
        ([-1, -1, -1, -1], ["one"], None),
    ],
)
def test_no_constant_is_below_0_and_those_needed_are_above(
    values: list[float], needed: list[str], found: dict[str, float] | None
) -> None:
    best = nearest(RISING, values, needed)
    if found is None:
        assert best is None
    else:
        assert best is not None
        assert best[0] == pytest.approx(found, abs=1e-9)
        result = [sum(found[name] * RISING[name][i] for name in found) for i in range(4)]
        assert best[1] == pytest.approx(result, abs=1e-9)


GRID = [(b, length) for b in (1, 2, 4, 8, 16, 32) for length in (128, 256, 512, 1024, 2048)]
"""Seed 004, 3.2."""


def grid_of(model: LatencyModel) -> list[GridPoint]:
    return [(b, n, (model.alpha_ns + n * model.step_ns(b)) / 1e9) for b, n in GRID]


@pytest.mark.parametrize(
    ("size", "length", "seconds"),
    [
        (1, 0, 0.059653),
        (1, 150, 0.920953),
        (2, 1000, 0.059653 + 5.742 * 1.158),
        (8, 1580, 11.64052054),
    ],
)
def test_a_batch_takes_alpha_and_beta_for_each_token_of_its_longest(
    size: int, length: int, seconds: float
) -> None:
    assert SEED_MODEL.batch_ns(size, length) == round(seconds * 1e9)


@given(st.floats(1e5, 1e9), st.floats(1e3, 1e8), st.floats(0, 2))
def test_a_fit_to_a_models_own_grid_is_that_model(alpha: float, beta: float, gamma: float) -> None:
    found = fit_batches(grid_of(LatencyModel(alpha, beta, gamma)))
    assert found.model.alpha_ns == pytest.approx(alpha, rel=1e-6)
    assert found.model.beta_ns == pytest.approx(beta, rel=1e-9)
    assert found.model.gamma == pytest.approx(gamma, rel=1e-6, abs=1e-9)
    assert (found.part.points, found.part.r2) == (30, pytest.approx(1, abs=1e-12))
    assert found.part.error_max < 1e-9


@pytest.mark.parametrize(
    "points",
    [
        [],
        [(1, 100, 1.0)],
        [(4, 100, 1.0), (4, 200, 2.0), (4, 300, 3.0)],  # one batch size
        [(1, 100, 1.0), (2, 100, 1.5), (4, 100, 2.0)],  # one length
        [(1, 100, 3.0), (1, 200, 2.0), (2, 100, 3.0), (2, 200, 2.0)],  # longer is quicker
    ],
)
def test_a_grid_that_does_not_tell_the_model_is_refused(points: list[GridPoint]) -> None:
    with pytest.raises(GridError):
        fit_batches(points)


def test_equal_durations_that_were_predicted_wrongly_are_a_poor_fit() -> None:
    """They have no variance, of which R^2 is a share."""
    assert prediction_accuracy([10.0] * 5, [10.0] * 5).r2 == 1.0
    wrong = prediction_accuracy([10.0] * 5, [25.0] * 5)
    assert (wrong.r2, wrong.rms_error, wrong.is_poor) == (0.0, 1.5, True)


@pytest.mark.parametrize(("unit", "doubtful"), [(1.0, False), (1_000.0, True)])
def test_a_grid_in_milliseconds_gets_a_caution(unit: float, doubtful: bool) -> None:
    points = [(b, n, (0.02 + 0.005 * n * (1 + 0.3 * (b - 1) / b)) * unit) for b in (1, 2, 8) for n in (9, 99)]
    report = grid_report("grid.csv", fit_batches(points), None)
    assert report.valid and ("milliseconds" in (report.caution or "")) is doubtful


COLUMNS = "batch_size,max_seq_len,mean_latency_sec\n"


def test_a_grid_is_read_by_the_names_of_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "grid.csv"
    path.write_text("std,mean_latency_sec,batch_size,max_seq_len\n0.1,0.080,1,128\n\n0.1,0.485,32,1024\n")
    assert load_grid(path) == [(1, 128, 0.080), (32, 1024, 0.485)]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "line 1: expected the columns .* got no column batch_size"),
        ("batch_size,max_seq_len\n1,2\n", "line 1: expected the columns .* got no column mean_latency_sec"),
        (f"batch_size,{COLUMNS}1,1,2,3\n", "line 1: the column batch_size occurs twice"),
        (f"{COLUMNS}1,2\n", "line 2: expected"),
        (f"{COLUMNS}1,2,3\nx,2,3\n", "line 3: expected"),
        (f"{COLUMNS}0,2,3\n", "line 2: expected batch_size >= 1, .* got 0"),
        (f"{COLUMNS}1,2,nan\n", "line 2: expected batch_size >= 1, .* got 1"),
    ],
)
def test_a_grid_that_is_none_is_refused_with_the_line(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "grid.csv"
    path.write_text(text)
    with pytest.raises(GridError, match=problem):
        load_grid(path)
