"""The page of a sweep says what the results say: each series, table and caption."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from llmtap.cli.sim_sweep import option_defaults
from llmtap.report.page import COLOURS
from llmtap.report.plots import DASHES, SYMBOLS
from llmtap.report.sweep import read_sweep
from llmtap.report.sweep_page import NOT_MEASURED, _line_choices, sweep_html
from tests.report.simulated_runs import flights, run
from tests.support.results.pages import Page

Results = list[dict[str, Any]]
Figure = Callable[[dict[str, Any]], float | None]

RATES = [run(s, r) for s in ("static_fifo", "multi_bin_dynamic") for r in (3, 1, 9)]


def page(results: Results, **options: Any) -> Page:
    return Page(sweep_html(results, **options))


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
    ("between-tokens-0", "TBT p99, s", stat("itl", "p99")),
    ("between-tokens-1", "TPOT p50, s", stat("tpot", "p50")),
    ("between-tokens-2", "TPOT p99, s", stat("tpot", "p99")),
    ("user-idle-0", "User idle p50, s", stat("user_idle", "p50")),
    ("user-idle-1", "User idle p99, s", stat("user_idle", "p99")),
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


def test_every_chart_has_a_table_of_the_same_figures() -> None:
    made = page(RATES)
    head, *rows = made.tables["violations"]
    assert head == ["line", "offered load, requests/s", "n of Outside the request SLA",
                    "Outside the request SLA, share", "Outside the token SLA, share"]  # fmt: skip
    assert rows == [
        [name, str(rate), "2,000", f"{rate} %", f"{rate / 10:g} %"]
        for name in ("static_fifo", "multi_bin_dynamic")
        for rate in (1, 3, 9)
    ]
    assert made.tables["queueing"][1] == ["static_fifo", "1", "2,000", "0.1429", "0.4286"]
    sections = [given["id"] for tag, given in made.elements if tag == "section"]
    assert set(sections) == made.tables.keys()


def test_a_percentile_of_too_few_samples_is_marked_wherever_it_stands() -> None:
    made = page([run("a", r, n=n) for r, n in ((1, 999), (2, 1_000))])
    p50, p99 = (made.figures["plots"][f"queueing-{i}"]["data"][0] for i in (0, 1))
    assert p99["marker"]["symbol"] == ["circle-open", "circle"]
    assert p50["marker"]["symbol"] == ["circle", "circle"]
    assert "n 999 (too few)" in p99["hovertext"][0]
    assert "too few" not in p99["hovertext"][1] + "".join(p50["hovertext"])
    assert [row[-2] for row in made.tables["queueing"][1:]] == ["0.4286*", "0.8571"]
    assert "fewer than 1,000 samples" in made.words
    assert "fewer than 1,000 samples" not in page(RATES).words


def test_hovering_tells_the_line_the_place_the_figure_and_the_samples() -> None:
    series = page(list(measured())).figures["plots"]["first-token-1"]["data"][1]
    p99 = next(r for r in measured() if r["scheduler"] == "continuous_batching")["metrics"]["ttft"]["p99"]
    line, place, figure, samples = series["hovertext"][0].split("<br>")
    assert (line, place, samples) == ("continuous_batching", "1 req/s offered", "n 60 (too few)")
    assert figure == f"TTFT p99 {p99 * 1e3:.4g} ms"


def test_what_was_offered_is_drawn_beside_what_was_done_and_is_no_run() -> None:
    plots = page(RATES).figures["plots"]
    *runs, offered = plots["throughput-0"]["data"]
    assert (offered["x"], offered["y"], offered["meta"]["line"]) == ([1, 3, 9], [1, 3, 9], None)
    assert plots["throughput-0"]["layout"]["yaxis"]["range"] == [0, pytest.approx(9 * 0.9 * 1.1)]
    assert [d["meta"]["line"] for d in runs] == [0, 1]
    assert [d["meta"]["line"] for d in plots["throughput-1"]["data"]] == [0, 1]


def test_what_no_run_has_is_left_out() -> None:
    made = page(RATES)
    assert {plot.rsplit("-", 1)[0] for plot in made.figures["plots"]} == {
        "throughput", "end-to-end", "violations", "use", "queueing"
    }  # fmt: skip
    assert not [heading for heading in made.headings if "TTFT" in heading or "oodput" in heading]
    assert "ITL option" not in made.words
    bare = [{"scheduler": "a", "n": 5, "throughput_rps": 2.5, "load": {"offered_rps": 3.0}}]
    assert page(bare).series("throughput-0") == {"a": [("a", 2.5)]}
    assert len(page(bare).figures["plots"]) == 1


def test_one_result_is_a_page_too() -> None:
    made = page(RATES[:1])
    assert made.series("queueing-1") == {"static_fifo": [("static_fifo", RATES[0]["queueing"]["p99"])]}
    assert made.tables["queueing"][1:] == [["static_fifo", "2,000", "0.4286", "1.286"]]
    assert "1 run." in made.words
    assert not [tag for tag, _ in made.elements if tag in ("fieldset", "select", "label")]


def test_every_figure_says_what_it_rests_on() -> None:
    defaults = option_defaults()
    results = flights(("shortest_predicted_first",), (1.0, 2.0), token_sla="20ms", predictor="noisy")
    made = page(results, defaults=defaults)
    assert made.captions.keys() == {given["id"] for tag, given in made.elements if tag == "section"} - {
        "settings"
    }
    window = results[1]["window"]["seconds"], results[0]["window"]["seconds"]
    for name, caption in made.captions.items():
        for said in (
            "n 60", "open loop, offered 1, 2 req/s", "first arrival to last completion",
            f"{window[0]:.4g}, {window[1]:.4g} s", "seed 42", "beta 0.005742, gamma 0.316",
            "set: token_sla 20 ms, predictor noisy", NOT_MEASURED,
        ):  # fmt: skip
            assert said in caption or (name in ("use", "memory", "between-tokens") and said == "n 60"), name
    assert "objectives ttft:200ms tpot:50ms" in made.captions["goodput"]
    assert "alpha 5, reader of 20 tokens/s" in made.captions["goodput"]
    assert "alpha 5, reader of 20 tokens/s" in made.captions["user-idle"]
    assert "tokens counted by usage" in made.captions["goodput"]
    option = results[0]["metrics"]["itl"]["option"]
    assert f"ITL option {option}" in made.captions["between-tokens"]
    assert "request SLA 20 s, token SLA 0.02 s" in made.captions["violations"]
    assert "options at their defaults" in page(list(measured()), defaults=defaults).words
    assert "options at their defaults" not in page(list(measured())).words
    # Each by what its own scheduler does where nobody sets it.
    own = page(flights(("output_delay", "continuous_batching"), (1.0,)), defaults=defaults)
    assert "options at their defaults" in own.words
    assert ["output_delay", "50 ms, 0 s", "50 ms, 0 s"] in own.tables["settings"]


def test_the_dotted_line_of_the_offered_load_has_its_key() -> None:
    for results in (RATES, [run("a", r) for r in (1, 2)], [run(s, 1) for s in "ab"]):
        made = page(results)
        drawn = [one for plot in made.figures["plots"].values() for one in plot["data"]]
        keys = [given for tag, given in made.elements if (tag, given.get("class")) == ("span", "offered")]
        assert len(keys) == sum(one["name"] == "offered load" for one in drawn)


def test_a_level_line_is_one_row_of_the_table() -> None:
    made = page([run("m", 1, bins=b, utilization=b / 10) for b in (2, 4)] + [run("f", 1, utilization=0.7)])
    assert made.series("use-0") == {"m": [(2, 0.2), (4, 0.4)], "f": [(2, 0.7), (4, 0.7)]}
    rows = [row[:2] for row in made.tables["use"][1:]]
    assert rows == [["m", "2"], ["m", "4"], ["f", "any"]]
    assert "70 % (f)" in made.captions["use"]


def test_a_capacity_says_how_many_may_be_late() -> None:
    made = page([run("a", r, capacity={"allowed": 0.01, "rps": r * 3}) for r in (1, 2)])
    assert made.series("capacity-0") == {"a": [(1, 3), (2, 6)]}
    assert "capacity with at most 1 % late · request SLA 20 s" in made.captions["capacity"]


def test_lines_look_unlike_each_other_without_colour() -> None:
    runs = [run(s, r, servers=k) for s in "abc" for r in (1, 2, 3, 4) for k in (1, 2, 4)]
    looks = _line_choices(read_sweep(runs))
    assert len({(look.dash, look.symbol) for look in looks}) == len(looks) == 9
    assert [look.colour for look in looks] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    many = _line_choices(read_sweep([run(f"s{i}", r) for i in range(20) for r in (1, 2)]))
    assert {look.colour for look in many} == set(range(COLOURS))
    assert {look.dash for look in many} == set(DASHES)
    assert {look.symbol for look in many} == set(SYMBOLS)
    assert len({(look.dash, look.symbol) for look in many}) == 20


def test_of_many_lines_the_page_begins_with_a_few() -> None:
    runs = [run("m", 27, scale=1.0, servers=s, bins=b, n=n) for s in (1, 2, 3, 4, 5, 6, 7, 8)
            for b in (1, 2, 4, 8, 16, 32) for n in (1_000, 10_000, 100_000)]  # fmt: skip
    made = page(runs)
    chosen = [given["value"] for tag, given in made.elements if tag == "option" and "selected" in given]
    assert chosen == ["100,000 requests"]
    assert len(made.tables["queueing"]) == 1 + len(runs)
    assert not [given for tag, given in page(RATES).elements if "selected" in given]
