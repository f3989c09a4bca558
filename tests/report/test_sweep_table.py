from typing import Any

import pytest

from llmtap.report.sweep_table import sweep_lines, sweep_table

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


def test_who_has_no_such_setting_has_a_dash() -> None:
    spans = [[0, 10], [10, None]]
    results = [result(), result(scheduler="m", bins=spans), result(scheduler="m", bins=[[0, None]])]
    titles, rows = sweep_table(results)
    assert [row[titles.index("bins")] for row in rows] == ["-", "2", "1"]


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


def test_both_models_are_told_once_each() -> None:
    iterations = {"beta": 0.007, "gamma": 0.3, "prefill": 9e-5, "context": 0.0}
    _, *models = sweep_lines([result(), result(model=iterations), result()])
    assert [line.partition(" of ")[0] for line in models] == [
        "model T(b, L) = alpha + beta L (1 + gamma (b - 1)/b)",
        "model T(p, d, c) = beta (1 + gamma (d - 1)/d) + prefill p + context c",
    ]


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
