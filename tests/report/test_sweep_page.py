"""The page of a sweep says what the results say: each series, table and caption."""

from collections.abc import Callable
from functools import cache
from typing import Any

from llmtap.report.document import COLOURS, DASHES, SYMBOLS, colour_name
from llmtap.report.sweep import read_sweep
from llmtap.report.sweep_page import _line_choices, sweep_html
from tests.report.simulated_runs import flights, run
from tests.support.results.pages import Page

Results = list[dict[str, Any]]
Figure = Callable[[dict[str, Any]], float | None]


def page(results: Results, **options: Any) -> Page:
    return Page(sweep_html(results, sla=True, **options))


@cache
def measured() -> tuple[dict[str, Any], ...]:
    return tuple(flights(("static_fifo", "continuous_batching"), (1.0, 4.0, 16.0)))


def stat(metric: str, name: str) -> Figure:
    return lambda r: r["metrics"][metric][name]


PLOTS: list[tuple[str, str, Figure]] = [
    ("throughput-0", "Completed requests, req/s", lambda r: r["throughput_rps"]),
    ("throughput-1", "Tokens, tokens/s", lambda r: r["throughput_tps"]),
    ("goodput-0", "Goodput, req/s", lambda r: r["goodput"]["requests_per_second"]),
    ("goodput-1", "Smooth goodput, tokens/s", lambda r: r["smooth_goodput"]["tokens_per_second"]),
    ("first-token-0", "TTFT p50, s", stat("ttft", "p50")),
    ("first-token-1", "TTFT p99, s", stat("ttft", "p99")),
    ("between-tokens-0", "ITL p99, s", stat("itl", "p99")),
    ("between-tokens-1", "TPOT p50, s", stat("tpot", "p50")),
    ("between-tokens-2", "TPOT p99, s", stat("tpot", "p99")),
    ("user-idle-0", "User idle p50, s", stat("user_idle", "p50")),
    ("user-idle-1", "User idle p99, s", stat("user_idle", "p99")),
    ("user-idle-2", "User idle, d_i = V i, p99, s", stat("user_idle_eq4", "p99")),
    ("end-to-end-0", "E2E p50, s", stat("e2e", "p50")),
    ("end-to-end-1", "E2E p99, s", stat("e2e", "p99")),
    ("violations-0", "Outside the request SLA, share", lambda r: r["request_sla_violation"]),
    ("violations-1", "Outside the token SLA, share", lambda r: r["token_sla_violation"]),
    ("violations-2", "SLO attainment, share", lambda r: r["goodput"]["attainment"]),
    ("use-0", "Utilisation, share", lambda r: r["utilization"]),
    ("use-1", "Batch size, mean", lambda r: r["batch_mean"]),
    ("queueing-0", "Queueing p50, s", lambda r: r["queueing"]["p50"]),
    ("queueing-1", "Queueing p99, s", lambda r: r["queueing"]["p99"]),
    ("memory-0", "Preempted requests, share", lambda r: (r.get("engine") or {}).get("preempted_share")),
]


def test_every_series_of_measured_runs_has_their_figures_to_the_last_digit() -> None:
    results = list(measured())
    made = page(results)
    titles = [heading.removesuffix(" (log)") for heading in made.headings]
    drawn = 0
    for plot, title, figure in PLOTS:
        assert title in titles
        expected: dict[str, list[tuple[Any, Any]]] = {}
        for r in sorted(results, key=lambda r: r["load"]["offered_rps"]):
            expected.setdefault(r["scheduler"], []).append((r["load"]["offered_rps"], figure(r)))
        expected = {
            name: points for name, points in expected.items() if any(y is not None for _, y in points)
        }
        assert made.series(plot) == expected, plot
        drawn += sum(y is not None for points in expected.values() for _, y in points)
    # Two schedulers at three rates; but one of them has no memory to tell of.
    assert drawn == 2 * 3 * (len(PLOTS) - 1) + 3
    assert made.figures["plots"].keys() == {plot for plot, _, _ in PLOTS}


def test_lines_look_unlike_each_other_without_colour() -> None:
    runs = [run(s, r, servers=k) for s in "abc" for r in (1, 2, 3, 4) for k in (1, 2, 4)]
    looks = [line.look for line in _line_choices(read_sweep(runs))]
    assert len({(look.dash, look.symbol) for look in looks}) == len(looks) == 9
    assert len({look.ink for look in looks}) == min(9, COLOURS)
    many = [
        line.look for line in _line_choices(read_sweep([run(f"s{i}", r) for i in range(20) for r in (1, 2)]))
    ]
    assert {look.ink for look in many} == set(map(colour_name, range(COLOURS)))
    assert {look.dash for look in many} == set(DASHES)
    assert {look.symbol for look in many} == set(SYMBOLS)
    assert len({(look.dash, look.symbol) for look in many}) == 20
