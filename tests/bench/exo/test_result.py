"""Rates, batches and energy of the exo benchmark, worked out by hand."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from llmtap.bench.exo.grid import make_grid
from llmtap.bench.exo.result import (
    ExoBatch,
    ExoRun,
    Timing,
    batch_of,
    generation_tps,
    invalid_columns,
    prefill_tps,
    prefix_hit,
    table_rows,
    timing_of,
)
from llmtap.bench.exo.server import Power
from llmtap.exchange.exchange import Exchange, Tokens
from llmtap.exchange.outcome import Outcome, TokenSource
from llmtap.load.monitor.timeseries import Columns
from llmtap.load.replay.findings import Finding
from llmtap.net.server_metrics import MonitorSeries
from llmtap.sim.model_options import LatencyModel
from llmtap.sim.sweep.batch_grid import fit_batches, length_counted, load_grid
from tests.bench.exo.exo import exo_run
from tests.support.traffic.exchanges import streamed

MS = 1_000_000
S = 1_000 * MS


def test_generation_counts_the_gaps_between_tokens() -> None:
    assert generation_tps(129, 2.56) == 50.0
    assert generation_tps(2, 0.02) == 50.0
    assert generation_tps(1, 2.0) is None, "one token has no gap"
    assert generation_tps(None, 2.0) is generation_tps(5, None) is generation_tps(5, 0.0) is None


def test_prefill_counts_the_tokens_that_were_computed() -> None:
    assert prefill_tps(512, None, 0.128) == prefill_tps(512, 0, 0.128) == 4_000.0
    assert prefill_tps(512, 448, 0.016) == 4_000.0
    assert prefill_tps(512, 512, 0.016) is None, "nothing was computed"
    assert prefill_tps(None, 0, 1.0) is prefill_tps(512, 0, None) is None


@pytest.mark.parametrize(
    ("prompt", "cached", "known", "hit"),
    [
        (512, None, True, None),
        (512, 0, True, "none"),
        (512, 496, True, "exact"),  # all but the block with the last token
        (512, 495, True, "partial"),
        (512, 511, True, "exact"),
        (520, 512, False, "partial"),  # another prompt's beginning, however much of this one it is
        (512, 512, False, "exact"),
        (None, 5, True, None),
    ],
)
def test_how_much_was_cached(prompt: int | None, cached: int | None, known: bool, hit: str | None) -> None:
    assert prefix_hit(prompt, cached, is_repeat=known) == hit


def exchange_with(*entries: tuple[str, float], stream: bool = True) -> Exchange:
    timing = [{"name": name, "ms": ms, "where": "timings"} for name, ms in entries]
    return streamed(words=5, gap_ms=20, server_timing=timing or None, stream=stream)


def test_the_server_s_times_go_before_ours() -> None:
    result = timing_of(exchange_with(("prefill", 50.0), ("decode", 200.0)))
    assert result == ("server", 0.05, 0.2)
    result = timing_of(exchange_with(("queue", 7.0), ("ttft_from_schedule", 50.0), ("decode", 200.0)))
    assert result == ("server", 0.05, 0.2)


@pytest.mark.parametrize("entries", [(), (("prefill", 50.0),), (("decode", 200.0),)])
def test_a_server_that_does_not_tell_both_is_measured_by_our_stamps(entries: Any) -> None:
    result = timing_of(exchange_with(*entries))
    # Submitted after 1 ms, the first word after 100 ms, four gaps of 20 ms.
    assert result == ("client", 0.099, 0.08)


def test_an_answer_in_one_piece_has_only_the_server_s_times() -> None:
    result = timing_of(exchange_with(stream=False))
    assert result == ("client", None, None)
    result = timing_of(exchange_with(("decode", 200.0), stream=False))
    assert result == ("server", None, 0.2)


def answer(tokens: int, end_s: float, late_ms: float, outcome: Outcome = Outcome.COMPLETE) -> Exchange:
    """Of a batch that began at 100 s."""
    x = streamed(
        outcome=outcome,
        tokens=Tokens(64, tokens, None, 0, TokenSource.USAGE),
        dispatch_late_ns=round(late_ms * MS),
    )
    x.timeline.response_end_ns = 100 * S + round(end_s * S)
    return x


def batch(*answers: Exchange, rates: Sequence[float | None]) -> ExoBatch:
    return batch_of(answers, rates, began_ns=100 * S, start_s=3.0, joules=None, findings=[])


def test_the_aggregate_is_the_fastest_one_s_rate_times_the_number() -> None:
    answers = [answer(20, 1.0, 0.1), answer(20, 1.2, 0.4), answer(20, 1.6, 0.2), answer(20, 1.1, 0.3)]
    result = batch(*answers, rates=[40.0, 50.0, 45.0, 48.0])
    assert result.per_req_tps == 50.0
    assert result.agg_gen_tps == 200.0
    assert result.wall_s == 1.6
    assert result.start_spread_s == pytest.approx(0.3e-3)


def test_a_batch_with_a_failure_has_no_aggregate() -> None:
    failed = answer(3, 0.5, 0.1, Outcome.UPSTREAM_RESET)
    result = batch(answer(20, 1.0, 0.1), failed, rates=[40.0, None])
    assert result.per_req_tps == 40.0
    assert result.agg_gen_tps is result.wall_s is None


def run(
    repeat: int, prompt_tps: float | None, rate: float, *, stored: bool = False, index: int = 0
) -> ExoRun:
    report = batch(answer(20, 1.0, 0.0), answer(20, 1.0, 0.0), rates=[rate, rate])
    return exo_run(
        20,
        prompt_tps,
        rate,
        report,
        repeat_index=repeat,
        concurrency=2,
        concurrent_index=index,
        prefix_cache_hit="exact" if stored else "none",
        prompt_tps_stored=stored,
    )


def test_a_row_is_the_median_of_its_repeats_and_their_range() -> None:
    runs = [run(0, 100.0, 10.0), run(0, 300.0, 10.0, index=1), run(1, 500.0, 40.0), run(2, 240.0, 20.0)]
    (row,) = table_rows([*runs, run(3, 9_999.0, 20.0, stored=True)])
    assert (row.pp_tokens, row.tg, row.concurrency, row.repeats, row.failed) == (64, 20, 2, 4, 0)
    # Of the first repeat 200, the middle of its two requests; a stored rate is no measurement.
    assert row.figures["prompt_tps"] == (3, 240.0, 200.0, 500.0)
    assert row.figures["agg_gen_tps"] == (4, 40.0, 20.0, 80.0)
    assert row.hits == {"none": 4, "exact": 1}
    assert row.figures["joules"] is None


def sampled(**series: Sequence[float | None]) -> Columns:
    """A sample each second from 10 s on."""
    columns = Columns({name: MonitorSeries("any") for name in series})
    for i, row in enumerate(zip(*series.values(), strict=True)):
        columns.add((10 + i) * S, 0, dict(zip(series, row, strict=True)))
    return columns


def test_energy_is_that_of_the_window() -> None:
    columns = sampled(gpu0_power=[100.0] * 6, gpu1_power=[0.0, 100.0, 200.0, 300.0, 400.0, 500.0])
    result = Power(columns, {}).energy(11 * S, 14 * S)
    # 100 W for 3 s, and a line from 100 W to 400 W.
    assert result is not None
    assert (result.joules, result.known_ns, result.missing_ns) == (300.0 + 750.0, 3 * S, 0)


def test_nodes_power_has_that_of_their_gpus_in_it() -> None:
    local, node = sampled(gpu0_power=[100.0] * 3), sampled(power=[250.0] * 3)
    result = Power(local, {"n1": node, "n2": node}).energy(10 * S, 12 * S)
    assert result is not None and result.joules == 1_000.0


def test_nobody_tells_the_power() -> None:
    assert Power(sampled(host_cpu=[0.5]), {}).energy(10 * S, 11 * S) is None
    assert Power(None, {}).energy(10 * S, 11 * S) is None
    untold = sampled(gpu0_power=[100.0] * 2, gpu1_power=[None] * 2)
    assert Power(untold, {}).energy(100 * S, 101 * S) is None, "no sample is near"


def test_peak_memory_is_the_most_of_all_gpus_at_one_moment() -> None:
    columns = sampled(gpu0_memory=[5, 1, 2, 9, 99], gpu1_memory=[5, 3, 1, 1, 99], server_memory=[500] * 5)
    power = Power(columns, {})
    # From the last sample before to the first after: 11, 12 and 13 s.
    assert power.peak_memory(11 * S + 1, 12 * S + 1) == 10
    assert Power(sampled(server_memory=[7, 8, 6]), {}).peak_memory(10 * S, 12 * S) == 8
    assert Power(None, {}).peak_memory(0, 1) is None


MODEL = LatencyModel(alpha_ns=60 * MS, beta_ns=5 * MS, gamma=0.3)
LATE_S = 0.001
_BATCH = ExoBatch(
    start_s=0.0,
    wall_s=None,
    per_req_tps=None,
    agg_gen_tps=None,
    start_spread_s=0.002,
    joules=None,
    findings=[],
)
PLACE = {"repeat_index": 0, "concurrency": 1, "concurrent_index": 0}


def grid_run(size: int, tokens: int, repeat: int, index: int, seconds: float) -> ExoRun:
    """A request of a batch that took `seconds` from its first byte, sent 1 ms after the common start."""
    return exo_run(
        tokens,
        None,
        1e9 / MODEL.step_ns(size),
        _BATCH,
        repeat_index=repeat,
        concurrency=size,
        concurrent_index=index,
        elapsed_s=LATE_S + seconds,
        ttft_s=0.06,
        dispatch_late_s=LATE_S,
        uncertainty_s=0.0005,
    )


def planted(changed: Mapping[tuple[int, int], dict[str, Any]] = {}) -> list[ExoRun]:
    """Three repeats of each cell; the first takes a second longer, the last one 2 ms longer.

    `changed`: fields of the last request of the last batch of a cell.
    """
    runs = []
    for size, tokens in ((b, n) for b in (1, 2, 4) for n in (16, 64)):
        for repeat, more_s in enumerate((1.0, 0.0, 0.002)):
            seconds = MODEL.batch_ns(size, tokens) / 1e9 + more_s
            runs += [grid_run(size, tokens, repeat, i, seconds) for i in range(size)]
        runs[-1] = msgspec.structs.replace(runs[-1], **changed.get((size, tokens), {}))
    return runs


def test_the_file_has_the_constants_that_were_planted(tmp_path: Path) -> None:
    grid = make_grid(planted(), warmup=1, length="output")
    assert [(c.batch, c.length, c.n, c.problem) for c in grid.cells] == [
        (b, n, 2, None) for b in (1, 2, 4) for n in (16, 64)
    ]
    for cell in grid.cells:
        seconds = MODEL.batch_ns(cell.batch, cell.length) / 1e9
        assert (cell.min_s, cell.max_s) == (pytest.approx(seconds), pytest.approx(seconds + 0.002))
        assert [cell.median_s, cell.mean_s, cell.model_s] == pytest.approx([seconds + 0.001] * 3)
        assert cell.std_s == pytest.approx(0.002 / 2**0.5)
        assert cell.uncertainty_s == 0.002, "the requests were sent 2 ms apart"
    place = tmp_path / "grid.csv"
    place.write_text(grid.to_csv())
    assert length_counted(place) == "output"
    read = fit_batches(load_grid(place))
    assert (read.model.alpha_ns, read.model.beta_ns, read.model.gamma) == (
        pytest.approx(MODEL.alpha_ns + MS, rel=1e-6),
        pytest.approx(MODEL.beta_ns, rel=1e-6),
        pytest.approx(MODEL.gamma, rel=1e-5),
    )
    assert [c.length for c in make_grid(planted(), warmup=1, length="prompt+output").cells][:2] == [
        80,
        128,
    ]


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"outcome": "upstream_reset"}, "1 of 4 requests failed: upstream_reset"),
        ({"stats": exo_run(9, None, 1.0, _BATCH, **PLACE).stats}, "an answer has 9 of 64 tokens"),
        ({"ttft_s": 0.5}, "not all requests ran at the same time"),
        (
            {"ttft_s": None},
            "answers were not streamed: whether all requests ran at the same time is not known",
        ),
    ],
)
def test_a_cell_that_was_no_batch_is_named_and_left_out(changed: dict[str, Any], problem: str) -> None:
    grid = make_grid(planted({(4, 64): changed}), warmup=1, length="output")
    assert [(c.batch, c.length, c.problem) for c in grid.cells if c.problem] == [(4, 64, problem)]
    assert grid.fit is not None and grid.fit.part.points == 5
    assert "\n4,64," not in grid.to_csv()
    assert "\n4,16," in grid.to_csv()


@pytest.mark.parametrize(
    ("by", "spoils", "figures"),
    [
        ("client", ("ttft", "tbc"), ["prefill"]),
        ("client", ("tpot", "e2e"), ["generation", "wall"]),
        ("server", ("ttft", "tpot", "tokens"), []),
        ("server", ("e2e",), ["wall"]),
        ("client", ("load", "jitter"), []),
    ],
)
def test_a_figure_is_not_valid_if_what_it_rests_on_is_not(
    by: Literal["server", "client"], spoils: tuple[str, ...], figures: list[str]
) -> None:
    """The server's clock is right however late the client was."""
    batch = ExoBatch(
        start_s=0.0,
        wall_s=1.0,
        per_req_tps=1.0,
        agg_gen_tps=1.0,
        start_spread_s=0.0,
        joules=None,
        findings=[Finding("late", 1.0, 0.0, "late", spoils).to_judged()],
    )
    assert invalid_columns(batch, Timing(by, 1.0, 1.0)) == figures
