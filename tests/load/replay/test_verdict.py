"""What speaks against a result: each rule by itself, at its limit and beyond."""

from typing import Any

import pytest

from llmtap.load.replay.verdict import LIMITS, findings, unchecked
from llmtap.load.run import TIME_UP
from llmtap.metrics.histogram import Histogram


def result(**changes: Any) -> dict[str, Any]:
    """One that nothing speaks against, with changes by a path of keys joined with a dot."""
    told: dict[str, Any] = {
        "load": {"sent_share": 1.0, "planned": 1_000, "due": 1_000, "in_time": 1_000},
        "metrics": {"ttft": {"n": 100, "p50": 0.1}, "tbc": {"p50": 0.02}},
        "window": {"seconds": 60.0},
        "plan": {"body": {"stream": True}, "tokenizer": "named"},
        "dispatch_lateness": {"n": 1_000, "p99": 0.0005},
        "outcomes": {"complete": 90, "refused": 10},
        "uncertainties": {"n": 1_000, "p99": 0.005},
        "sender": {"clock": "mono", "lost": [], "processes": [{"cpu_share": 0.5}], "clocks": []},
        "lengths": {"input_counted": 1_000, "input_usage": 1_000, "input_apart": 0},
    }
    for path, value in changes.items():
        *way, last = path.split("__")
        at = told
        for key in way:
            at = at[key]
        at[last] = value
    return told


def test_rows_of_the_trace_that_were_left_out_make_a_result_partial() -> None:
    [found] = findings(result(plan__rows=60, plan__rows_left_out=40))
    assert (found.what, found.figure, found.partial, found.invalidates) == ("left_out", 0.4, True, False)


def test_a_stopped_run_is_partial_and_estimated_lengths_are_a_caution() -> None:
    stopped = {"planned": 100, "unsent": 83, "stopped": "somebody stopped it", "sent_share": None}
    [found] = findings(result(load=stopped))
    assert (found.what, found.figure, found.partial, found.invalidates) == ("stopped", 0.83, True, False)
    [found] = findings(result(plan__rows=30, plan__rows_estimated=30))
    assert (found.what, found.share, found.partial, found.invalidates) == ("estimated", 1.0, False, False)


def test_a_generated_load_that_ends_with_its_duration_is_as_planned() -> None:
    ended = {"planned": 58, "unsent": 55, "stopped": TIME_UP, "sent_share": None}
    assert list(findings(result(load=ended))) == []
    [found] = findings(result(load=ended, plan__trace="a.csv"))
    assert found.what == "stopped"


def clock(rtt: float, *, shared: bool = False) -> dict[str, Any]:
    return {"host": f"n{rtt}", "shared": shared, "rtt": rtt, "offset": 0.5}


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"sender__lost": [-9]}, "lost"),
        ({"dispatch_lateness__p99": 0.0051}, "dispatch_lateness"),
        ({"load__sent_share": 0.994, "load__in_time": 994}, "rate"),
        ({"unread": 30}, "unread"),
        ({"sender__processes": [{"cpu_share": 0.2}, {"cpu_share": 0.9}]}, "sender_cpu"),
        ({"uncertainties__p99": 0.011}, "uncertainty"),
        ({"uncertainties__p99": 0.021, "sender__clock": "kernel"}, "uncertainty"),
        ({"dispatch_lateness__p99": 0.021, "metrics__ttft__p50": 60.0}, "dispatch_lateness"),
        ({"outcomes": {"complete": 9, "upstream_error": 1}}, "failed"),
        ({"metrics__ttft": {"n": 0, "p50": None}}, "no_tokens"),
        ({"sender__clocks": [clock(0.003), clock(0.0201)]}, "clocks"),
        ({"lengths__input_apart": 101}, "prompt_tokens"),
    ],
)
def test_each_rule_alone(changes: dict[str, Any], what: str) -> None:
    [found] = findings(result(**changes))
    assert found.what == what
    assert found.limit in found.to_dict().values()
    assert found.invalidates


@pytest.mark.parametrize(("late", "n"), [(1, 70), (14, 200), (15, 200)])
@pytest.mark.parametrize(("figure", "name"), [("dispatch_lateness", "lateness"), ("uncertainties",) * 2])
def test_a_small_share_that_is_late_is_a_caution(figure: str, name: str, late: int, n: int) -> None:
    values = Histogram([20_000_000] * late + [4_000_000] * (n - late))
    [found] = findings(result(**{f"{figure}__n": n, f"{figure}__p99": 0.02}), **{name: values})
    assert found.share == late / n
    assert f"{late} of them" in found.says
    assert found.invalidates == (late / n > 0.07)


@pytest.mark.parametrize(
    "changes",
    [
        {"dispatch_lateness__p99": 0.005},  # 5 % of the TTFT p50
        {"load__sent_share": LIMITS["rate_share"]},
        {"load__sent_share": None},
        # Two that were due as the plan ended.
        {"load": {"sent_share": 0.9, "planned": 20, "due": 20, "in_time": 18}},
        {"sender__processes": [{"cpu_share": 0.9}], "window__seconds": 4.9},  # which is its start
        {"metrics__ttft": {"n": 0, "p50": None}, "plan__body__stream": False},
        {"dispatch_lateness": None},
        {"sender__clock": "kernel", "uncertainties__p99": 0.02},  # which is not in a kernel's stamps
        {"metrics__ttft__p50": None, "dispatch_lateness__p99": 0.002},
        {"sender__clocks": [clock(0.02), clock(0.5, shared=True)]},  # half of a round trip
        {"lengths__input_apart": 10},
        {"lengths": {"input_counted": 0, "input_usage": 0, "input_apart": 0}},
    ],
)
def test_at_the_limit_nothing_is_said(changes: dict[str, Any]) -> None:
    assert findings(result(**changes)) == []


def test_a_fast_server_is_measured_by_the_absolute_limit() -> None:
    [found] = findings(
        result(metrics__ttft__p50=0.001, dispatch_lateness__p99=0.0021, sender__clock="kernel")
    )
    assert found.limit == LIMITS["lateness_p99"]
    assert "2.1 ms" in found.says


def test_another_tokenizer_is_told_and_invalidates_only_where_the_load_was_another() -> None:
    told = {"input_counted": 1_000, "input_usage": 1_080, "input_apart": 80}
    [found] = findings(result(lengths=told))
    assert (found.what, found.figure, found.limit) == ("prompt_tokens", 0.08, LIMITS["prompt_tokens"])
    assert not found.invalidates
    assert "the server counted 1,080 prompt tokens, we 1,000: prompt by prompt 8.0 % apart" in found.says
    # What is too long here and too short there does not cancel.
    [found] = findings(result(lengths={"input_counted": 1_000, "input_usage": 1_000, "input_apart": 120}))
    assert found.invalidates
    assert found.limit == LIMITS["prompt_tokens_most"]
    [found] = findings(result(lengths__input_apart=100))
    assert not found.invalidates, "at the limit"
    [found] = findings(result(lengths__input_apart=500, plan__tokenizer=None))
    assert not found.invalidates, "nobody asked for exact lengths"


@pytest.mark.parametrize("gap", [0.0, 0.00005])
def test_uncertainty_of_a_server_that_sends_bursts_is_limited_by_its_time_per_token(gap: float) -> None:
    # Eight tokens of 25 ms in a burst; a burst may be cut into several reads.
    bursty: dict[str, Any] = {
        "sender__clock": "kernel", "metrics__tbc": {"p50": gap}, "metrics__tpot": {"p50": 0.025},
    }  # fmt: skip
    values = Histogram([26_000_000] * 8 + [24_000_000] * 92)
    changes = bursty | {"uncertainties": {"n": 100, "p99": 0.026}}
    [found] = findings(result(**changes), uncertainties=values)
    assert (found.what, found.limit, found.share, found.invalidates) == ("uncertainty", 0.025, 0.08, True)
    assert "the limit by the TPOT p50" in found.says
    assert findings(result(**bursty, uncertainties={"n": 100, "p99": 0.025})) == []
    assert unchecked(result(**changes)) == []


def test_a_single_fast_token_is_limited_by_the_time_between_chunks() -> None:
    fast: dict[str, Any] = {"metrics__tbc": {"p50": 0.0008}, "metrics__tpot": {"p50": 0.0009}}
    [found] = findings(result(**fast, sender__clock="kernel"))
    assert (found.what, found.limit) == ("uncertainty", 0.0008)


@pytest.mark.parametrize("tpot", [None, 0.0, 0.00002])
def test_answers_in_one_read_leave_their_timestamps_unchecked(tpot: float | None) -> None:
    held = result(sender__clock="kernel", metrics__tbc={"p50": 0.0}, metrics__tpot={"p50": tpot})
    assert findings(held) == []
    [says] = unchecked(held)
    assert says.startswith("whether several chunks got one timestamp")
    assert unchecked(result(sender__clock="kernel")) == unchecked(result()) == []
    # Without streams there are no chunks.
    whole = {"metrics__ttft": {"n": 0, "p50": None}, "plan__body__stream": False}
    assert unchecked(held | result(sender__clock="kernel", metrics__tbc={"p50": None}, **whole)) == []
