"""What varies among runs decides the axis and the lines, whatever the order of the runs."""

import random
from typing import Any

import pytest

from llmtap.report.sweep import (
    option_text,
    read_sweep,
    setting_text,
    sweep_lines,
    sweep_table,
    values_text,
)
from tests.report.simulated_runs import run

Runs = list[dict[str, Any]]


def shape(runs: Runs) -> tuple[str | None, list[str], list[str], list[tuple[str, list[Any]]]]:
    sweep = read_sweep(runs)
    lines = [(line.label, [x for x, _ in line.points]) for line in sweep.lines]
    axis = None if sweep.axis is None else sweep.axis.name
    return axis, [d.name for d in sweep.by], [d.name for d in sweep.along], lines


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([run("a", 3)], (None, [], [], [("a", ["a"])])),
        ([run("a", 3), run("b", 3)], (None, ["scheduler"], [], [("a", ["a"]), ("b", ["b"])])),
        (
            [run(s, r) for r in (9, 1, 3) for s in "ab"],
            ("load", ["scheduler"], [], [("a", [1, 3, 9]), ("b", [1, 3, 9])]),
        ),
        # The number with the most values is the axis, and the other tells lines apart.
        (
            [run("a", r, servers=s) for r in (2, 1) for s in (4, 2, 1)],
            ("servers", ["load"], [], [("1 req/s", [1, 2, 4]), ("2 req/s", [1, 2, 4])]),
        ),
        # With as many, the load.
        (
            [run("a", r, servers=s) for r in (1, 2) for s in (1, 2)],
            ("load", ["servers"], [], [("1 server", [1, 2]), ("2 servers", [1, 2])]),
        ),
        # A time that is fixed makes more requests at a higher rate: they decide no line.
        (
            [run(s, r, n=r * 100) for r in (1, 2, 3) for s in "ab"],
            ("load", ["scheduler"], ["requests"], [("a", [1, 2, 3]), ("b", [1, 2, 3])]),
        ),
        # More rows at one scale are another rate and no other load.
        (
            [run("a", r, n=n, scale=10.0) for r, n in ((2.7, 1_000), (2.9, 10_000), (2.8, 100_000))],
            ("requests", [], [], [("a", [1_000, 10_000, 100_000])]),
        ),
        (
            [run("a", 1, eps=e) for e in (0.005, 0.001)],
            ("eps", [], [], [("a", [0.001, 0.005])]),
        ),
        # Seeds make lines, never an axis.
        (
            [run("a", r, seed=s) for r in (1, 2) for s in (1, 2, 3)],
            ("load", ["seed"], [], [(f"seed {s}", [1, 2]) for s in (1, 2, 3)]),
        ),
        # What a scheduler has for itself is in its name, and no axis.
        (
            [run("a", 1), run("b", 1, model={"beta": 0.1, "prefill": 0.2})],
            (None, ["scheduler", "model beta"], [],
             [("a, model beta 0.005742", ["a"]), ("b, model beta 0.1", ["b"])]),
        ),
        # Who has no bins stands beside those who have, at each of their numbers.
        (
            [run("m", 1, bins=b) for b in (2, 4, 8)] + [run("f", 1)],
            ("bins", ["scheduler"], [], [("m", [2, 4, 8]), ("f", [2, 4, 8])]),
        ),
        (
            [run("m", 1, eps=e) for e in (0.002, 0.001)] + [run("f", 1, eps=None)],
            ("eps", ["scheduler"], [], [("m", [0.001, 0.002]), ("f", [0.001, 0.002])]),
        ),
        # What a scheduler's name says already is not said again.
        (
            [run(s, 1, serving={"output_delay": d}) for s, d in (("a", 0.0), ("output_delay", 0.05))],
            (None, ["scheduler"], [], [("a", ["a"]), ("output_delay", ["output_delay"])]),
        ),
        (
            [run("a", r, serving={"output_delay": d}) for r in (1, 2, 3) for d in (0.0, 0.05)],
            ("load", ["output_delay"], [],
             [("output_delay 0 s", [1, 2, 3]), ("output_delay 50 ms", [1, 2, 3])]),
        ),
    ],
)  # fmt: skip
def test_what_varies_decides_axis_and_lines(runs: Runs, expected: object) -> None:
    assert shape(runs) == expected


def test_who_does_not_read_the_axis_is_a_level_line() -> None:
    lines = read_sweep([run("m", 1, bins=b) for b in (2, 4)] + [run("f", 1)]).lines
    assert [(line.label, line.level) for line in lines] == [("m", False), ("f", True)]
    # But who arrives all at once has no rate: that is no line.
    alone = run("f", 1, load={"mode": "open", "offered_rps": None}, scale=None)
    lines = read_sweep([run("m", r, scale=None) for r in (1, 2)] + [alone]).lines
    assert [(line.label, line.level, len(line.points)) for line in lines] == [
        ("m", False, 2),
        ("f", False, 0),
    ]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [("eps", 0.005, "5 ms"), ("eps", 0.0012345, "1.2345 ms"), ("request_sla", 20.0, "20 s"),
     ("ttft", 0, "0 s"), ("swap_token", 7.5e-6, "7.5 us"), ("bins", 8, "8"), ("prefix_cache", True, "on"),
     ("bin_edges", [0, 10], "0, 10"), ("bin_edges", [], "none"), ("window", "arrivals", "arrivals"),
     ("chunk", None, "-")],
)  # fmt: skip
def test_values_of_options_read_alike_everywhere(name: str, value: Any, text: str) -> None:
    assert (option_text(name, value), setting_text(name, value)) == (text, f"{name} {text}")


def test_the_order_of_runs_moves_no_point() -> None:
    runs = [run("a", r, servers=s, n=n) for r in (1, 2, 3) for s in (1, 2) for n in (1_000, 2_000)]
    told = shape(runs)
    for seed in range(5):
        random.Random(seed).shuffle(runs)
        assert shape(runs) == told, f"seed {seed}"


def test_a_run_without_a_rate_has_no_place_among_rates() -> None:
    alone = run("a", 1, load={"mode": "open", "offered_rps": None}, scale=None)
    sweep = read_sweep([run("a", 2, scale=None), run("a", 1, scale=None), alone])
    assert [[x for x, _ in line.points] for line in sweep.lines] == [[1, 2]]


def test_no_results_are_no_sweep() -> None:
    with pytest.raises(ValueError, match="no results"):
        read_sweep([])


@pytest.mark.parametrize(
    ("values", "text"),
    [([], ""), ([None], ""), ([3, 1, 3], "1, 3"), ([5, 4, 3, 2, 1], "1 to 5"), (["b", "a", "b"], "b, a"),
     ([True, False], "on, off"), ([0.5, None, 2], "0.5, 2")],
)  # fmt: skip
def test_values_are_told_once_and_many_numbers_as_a_range(values: list[Any], text: str) -> None:
    assert values_text(values) == text


TIMES = {"n": 9, "mean": 1234.567, "p50": 1.0, "p95": 2.0, "p99": 3.456}
BASE = [
    "scheduler", "requests", "req/s", "tok/s", "mean s", "p50 s", "p95 s", "p99 s", "late", "slow", "busy",
    "batch", "queue p50 s",
]  # fmt: skip

WAITED = (
    "smooth: goodput for a reader of 20 tokens/s, alpha 5; "
    "idle: what such a reader waited with nothing to read"
)


MODEL = (
    "model T(b, L) = alpha + beta L (1 + gamma (b - 1)/b) of a batch: alpha 20 ms, beta 1 ms/token, gamma 0.5"
)
SERVING = {"kv_tokens": 37_333, "queue_max": 8, "ttft": 1.0, "tbt": 0.2}


def result(**changed: Any) -> dict[str, Any]:
    told: dict[str, Any] = {
        "scheduler": "static_fifo", "n": 1_000, "trace": "a.csv", "scale": 1.0, "servers": 1, "seed": 42,
        "load": {"offered_rps": 0.27012}, "metrics": {"e2e": TIMES}, "throughput_rps": 0.12345,
        "throughput_tps": 1234.5, "latency": TIMES, "queueing": TIMES, "request_sla_violation": 0.01234,
        "token_sla_violation": 0.0, "utilization": 0.9876, "batch_mean": 7.891, "bins": None,
        "outcomes": {"complete": 1_000}, "model": {"alpha": 0.02, "beta": 0.001, "gamma": 0.5}, "fit": None,
        "readings": {"request_sla": 20.0, "token_sla": 0.01, "eps": 0.005, "bins": 8},
    }  # fmt: skip
    return told | changed


MEASURED = {
    "metrics": {"e2e": TIMES, "ttft": TIMES, "itl": TIMES | {"p99": None}, "user_idle": TIMES},
    "smooth_goodput": {"tokens_per_second": 99.0, "alpha": 5.0, "speed_tokens_per_second": 20.0},
    "goodput": {"objectives": "ttft:1s", "requests_per_second": 0.1},
}


def test_one_run_has_the_columns_of_the_seed() -> None:
    titles, rows = sweep_table([result()])
    assert titles == BASE
    assert rows == [[
        "static_fifo", "1,000", "0.1235", "1,234", "1,234.57", "1.00", "2.00", "3.46", "1.23%", "0.00%",
        "98.8%", "7.89", "1.00",
    ]]  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "title", "cells"),
    [
        ({"servers": 4}, "servers", ["1", "4"]),
        ({"seed": 43}, "seed", ["42", "43"]),
        ({"scale": 10.0, "load": {"offered_rps": 2.7012}}, "offered req/s", ["0.2701", "2.701"]),
        ({"readings": result()["readings"] | {"eps": 0.001}}, "eps", ["5 ms", "1 ms"]),
        ({"serving": {"chunk": 64}}, None, []),
    ],
)
def test_what_varies_has_a_column(changed: dict[str, Any], title: str | None, cells: list[str]) -> None:
    titles, rows = sweep_table([result(), result(**changed)])
    more = [one for one in titles if one not in BASE]
    assert more == ([] if title is None else [title])
    if title is not None:
        at = titles.index(title)
        assert at == 2
        assert [row[at] for row in rows] == cells
    assert {len(row) for row in rows} == {len(titles)}


def test_measured_runs_add_columns_and_others_have_dashes_there() -> None:
    titles, rows = sweep_table([result(**MEASURED), result(capacity={"rps": 3.0})])
    assert titles == [*BASE, "TTFT p50 s", "TTFT p99 s", "TBT p99 s", "idle p99 s", "smooth tok/s",
                      "goodput req/s", "capacity req/s"]  # fmt: skip
    assert rows[0][len(BASE) :] == ["1.000", "3.456", "-", "3.456", "99", "0.1", "-"]
    assert rows[1][len(BASE) :] == ["-", "-", "-", "-", "-", "-", "3"]


def test_figures_that_nobody_has_are_dashes() -> None:
    nothing = result(
        throughput_rps=None, token_sla_violation=None, utilization=None, batch_mean=None,
        latency=dict.fromkeys(TIMES), queueing=dict.fromkeys(TIMES),
    )  # fmt: skip
    [row] = sweep_table([nothing])[1]
    assert [cell for cell in row if cell != "-"] == ["static_fifo", "1,000", "1,234", "1.23%"]


def test_the_lines_below_say_what_figures_mean() -> None:
    line, model = sweep_lines([result()])
    assert line == (
        "late: outside the request SLA of 20 s; slow: outside the token SLA of 10 ms. "
        "Offered: 0.2701 requests/s on average."
    )
    assert model == MODEL + "; seed 004's GPU"
    at_once = result(load={"offered_rps": None})
    assert next(sweep_lines([at_once])).endswith("Offered: all at once.")
    assert "Offered" not in next(sweep_lines([result(), at_once]))
    strict = result()["readings"] | {"request_sla": 5.0}
    lines = list(sweep_lines([result(**MEASURED), result(load={"offered_rps": 3.0}, readings=strict)]))
    assert lines == [
        "late: outside the request SLA of 20, 5 s; slow: outside the token SLA of 10 ms.",
        "goodput: requests that met ttft:1s",
        WAITED,
        MODEL + "; seed 004's GPU",
    ]


def test_what_the_model_was_fitted_to_is_said_once() -> None:
    grid = {"grid": "g.csv", "r2": 1.0, "points": 4, "error_max": 0.125}
    [_, line] = sweep_lines([result(fit=grid), result(fit=grid)])
    assert line == MODEL + "; R^2 1.00000 on 4 points, off by 12.5% at most"
    part = {"source": "gaps", "points": 1_000, "r2": 0.5, "error_max": 0.1}
    capture = {"capture": "c", "r2": 0.5, "prefill": part, "decode": part}
    model = {"beta": 0.007, "gamma": 0.3, "prefill": 9e-5, "context": 1e-9}
    [_, line] = sweep_lines([result(fit=capture, model=model)])
    assert line == (
        "model T(p, d, c) = beta (1 + gamma (d - 1)/d) + prefill p + context c of an iteration: "
        "beta 7 ms, gamma 0.3, prefill 90 us/token, context 1 ns/token; "
        "prefill by gaps: R^2 0.50000 on 1,000 points; decode by gaps: R^2 0.50000 on 1,000 points"
    )


def test_requests_that_were_not_served_have_columns_where_there_are_any() -> None:
    some = {"unserved": {"too_large": 37, "queue_full": 2, "late": 4, "late_midway": 3}, "serving": SERVING}
    titles, rows = sweep_table([result(), result(**some)])
    assert titles[2:4] == ["refused", "given up"]
    assert [row[2:4] for row in rows] == [["0", "0"], ["39", "7"]]


def test_why_requests_were_not_served_is_said_below() -> None:
    some = result(unserved={"too_large": 37, "queue_full": 2, "late": 4, "late_midway": 3}, serving=SERVING)
    more = result(unserved={"too_large": 1_200}, serving=SERVING | {"kv_tokens": 100})
    assert list(sweep_lines([result(), some]))[1:5] == [
        "refused: 37 requests need more than the KV memory holds (kv_tokens 37,333)",
        "refused: 2 requests came when as many waited as may (queue_max 8)",
        "given up: 4 requests had no token in time (ttft 1 s)",
        "given up: 3 requests had a token too late and were served no further (ttft 1 s, tbt 200 ms)",
    ]
    assert list(sweep_lines([some, more]))[1] == (
        "refused: 37, 1,200 requests in a run need more than the KV memory holds (kv_tokens 37,333, 100)"
    )


@pytest.mark.parametrize(("rps", "text"), [(3.0, "3"), (0.0, "0"), (None, "no limit")])
def test_a_capacity_is_told_and_explained(rps: float | None, text: str) -> None:
    told = [result(capacity={"rps": rps, "allowed": 0.05})]
    assert sweep_table(told)[1][0][-1] == text
    assert "no more than 0.05 of the requests are late" in list(sweep_lines(told))[1]
