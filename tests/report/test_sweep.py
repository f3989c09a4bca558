"""What varies among runs decides the axis and the lines, whatever the order of the runs."""

import random
from typing import Any

import pytest

from llmtap.report.sweep import (
    BEST,
    best_runs_text,
    queue_grows,
    read_sweep,
    sweep_lines,
    sweep_table,
)
from tests.report.simulated_runs import run

Runs = list[dict[str, Any]]


def shape(runs: Runs) -> tuple[str | None, list[str], list[tuple[str, list[Any]]]]:
    sweep = read_sweep(runs)
    lines = [(line.label, [x for x, _ in line.points]) for line in sweep.lines]
    axis = None if sweep.axis is None else sweep.axis.name
    return axis, [d.name for d in sweep.line_dimensions], lines


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([run("a", 3)], (None, [], [("a", ["a"])])),
        ([run("a", 3), run("b", 3)], (None, ["scheduler"], [("a", ["a"]), ("b", ["b"])])),
        (
            [run(s, r) for r in (9, 1, 3) for s in "ab"],
            ("load", ["scheduler"], [("a", [1, 3, 9]), ("b", [1, 3, 9])]),
        ),
        # The number with the most values is the axis, and the other tells lines apart.
        (
            [run("a", r, servers=s) for r in (2, 1) for s in (4, 2, 1)],
            ("servers", ["load"], [("1 req/s", [1, 2, 4]), ("2 req/s", [1, 2, 4])]),
        ),
        # With as many, the load.
        (
            [run("a", r, servers=s) for r in (1, 2) for s in (1, 2)],
            ("load", ["servers"], [("1 server", [1, 2]), ("2 servers", [1, 2])]),
        ),
        # More rows at one scale are another rate and no other load.
        (
            [run("a", r, n=n, scale=10.0) for r, n in ((2.7, 1_000), (2.9, 10_000), (2.8, 100_000))],
            ("requests", [], [("a", [1_000, 10_000, 100_000])]),
        ),
        (
            [run("a", 1, eps=e) for e in (0.005, 0.001)],
            ("eps", [], [("a", [0.001, 0.005])]),
        ),
        # Who does not know the option is a level line.
        (
            [run("a", 1), *(run("b", 1, serving={"chunk": c}) for c in (128, 256))],
            ("chunk", ["scheduler"], [("a", [128, 256]), ("b", [128, 256])]),
        ),
        # Seeds make lines, never an axis.
        (
            [run("a", r, seed=s) for r in (1, 2) for s in (1, 2, 3)],
            ("load", ["seed"], [(f"seed {s}", [1, 2]) for s in (1, 2, 3)]),
        ),
        # What a scheduler has for itself is in its name, and no axis.
        (
            [run("a", 1), run("b", 1, model={"beta": 0.1, "prefill": 0.2})],
            (None, ["scheduler"], [("a", ["a"]), ("b", ["b"])]),
        ),
        # Who has no bins stands beside those who have, at each of their numbers.
        (
            [run("m", 1, bins=b) for b in (2, 4, 8)] + [run("f", 1)],
            ("bins", ["scheduler"], [("m", [2, 4, 8]), ("f", [2, 4, 8])]),
        ),
        (
            [run("m", 1, eps=e) for e in (0.002, 0.001)] + [run("f", 1, eps=None)],
            ("eps", ["scheduler"], [("m", [0.001, 0.002]), ("f", [0.001, 0.002])]),
        ),
        # What a scheduler's name says already is not said again.
        (
            [run(s, 1, serving={"output_delay": d}) for s, d in (("a", 0.0), ("output_delay", 0.05))],
            (None, ["scheduler"], [("a", ["a"]), ("output_delay", ["output_delay"])]),
        ),
        (
            [run("a", r, serving={"output_delay": d}) for r in (1, 2, 3) for d in (0.0, 0.05)],
            ("load", ["output_delay"], [("output_delay 0 s", [1, 2, 3]), ("output_delay 50 ms", [1, 2, 3])]),
        ),
    ],
)
def test_what_varies_decides_axis_and_lines(runs: Runs, expected: object) -> None:
    assert shape(runs) == expected


def test_who_arrives_all_at_once_has_no_rate_and_is_no_line() -> None:
    alone = run("f", 1, load={"mode": "open", "offered_rps": None}, scale=None)
    lines = read_sweep([run("m", r, scale=None) for r in (1, 2)] + [alone]).lines
    assert [(line.label, len(line.points)) for line in lines] == [("m", 2), ("f", 0)]


def test_the_order_of_runs_moves_no_point() -> None:
    runs = [run("a", r, servers=s, n=n) for r in (1, 2, 3) for s in (1, 2) for n in (1_000, 2_000)]
    told = shape(runs)
    for seed in range(5):
        random.Random(seed).shuffle(runs)
        assert shape(runs) == told, f"seed {seed}"


def starred(runs: Runs) -> set[tuple[str, str]]:
    """Scheduler and head of the cells marked as the best."""
    table = sweep_table(runs)
    return {
        (row[0], head)
        for row in table.rows
        for head, cell in zip(table.heads, row, strict=True)
        if BEST in cell
    }


@pytest.mark.parametrize(
    ("a", "b", "won"),
    [
        # Differences of 0.1, 0.2 and 0.3: 0.2 +- 0.248. Of 0.2, 0.2 and 0.3: 0.233 +- 0.143.
        ([1.1, 2.2, 3.3], [1.0, 2.0, 3.0], False),
        ([1.2, 2.2, 3.3], [1.0, 2.0, 3.0], True),
        ([1.5, 2.5], [1.0, 2.0], False),  # two seeds are too few
        ([1.5, 2.5, None], [1.0, 2.0, 3.0], False),
    ],
)
def test_a_run_is_the_best_if_repeats_show_it(a: list[float | None], b: list[float], won: bool) -> None:
    runs = [
        run(name, 1, seed=seed, throughput_rps=value)
        for name, values in (("a", a), ("b", b))
        for seed, value in enumerate(values)
    ]
    assert starred(runs) == ({("a", "req/s")} if won else set())
    assert ("a was best by throughput" in best_runs_text(runs)) is won


def test_of_one_seed_no_run_is_the_best_and_the_way_to_find_out_is_said() -> None:
    runs = [run(name, 1, throughput_rps=value) for name, value in (("a", 1), ("b", 2))]
    assert (starred(runs), "--seed 1,2,3" in best_runs_text(runs)) == (set(), True)
    assert best_runs_text(runs[:1]) == ""


def test_a_p99_of_few_requests_is_marked_in_the_table() -> None:
    for n, mark in ((999, "*"), (1_000, "")):
        (row,) = sweep_table([run("a", 1, n=n)]).rows
        assert [cell.endswith("*") for cell in row].count(True) == len(mark)


@pytest.mark.parametrize(
    ("completed", "waited", "grows"),
    [(0.89, 6.0, True), (0.9, 6.0, False), (0.5, 5.0, False), (0.5, None, False), (None, 6.0, False)],
)
def test_a_queue_grows_if_requests_wait_longer_than_they_run(
    completed: float | None, waited: float | None, grows: bool
) -> None:
    told = run("a", 1.0) | {
        "throughput_rps": completed,
        "latency": {"p50": 10.0},
        "queueing": {"p50": waited},
    }
    assert queue_grows(told) is grows
    said = [line for line in sweep_lines([told]) if line.startswith("may be overloaded: a:")]
    assert bool(said) is grows
