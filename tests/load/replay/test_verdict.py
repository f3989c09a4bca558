"""What speaks against a result: each rule by itself, at its limit and beyond."""

from typing import Any

import msgspec
import pytest

from llmtap.load.replay.findings import LIMITS, check_gaps, findings
from llmtap.load.replay.verdict import verdict_of, verdict_sentence
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
        "ttft_uncertainties": {"n": 1_000, "p99": 0.001},
        "sender": {"clock": "mono", "lost": [], "processes": [{"cpu_share": 0.5}], "clocks": []},
        "lengths": {"input_counted": 1_000, "input_usage": 1_000, "input_apart": 0},
        "answers": {
            "n": 100,
            "streamed": 100,
            "output": 100,
            "silent": 0,
            "content": 100,
            "reasoning_only": 0,
            "tool_call_only": 0,
            "refusal_only": 0,
        },
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
    assert (found.kind, found.figure, found.partial, found.invalidates()) == ("left_out", 0.4, True, False)


def test_a_stopped_run_is_partial_and_estimated_lengths_are_a_caution() -> None:
    stopped = {"planned": 100, "unsent": 83, "stopped": "somebody stopped it", "sent_share": None}
    [found] = findings(result(load=stopped))
    assert (found.kind, found.figure, found.partial, found.invalidates()) == ("stopped", 0.83, True, False)
    [found] = findings(result(plan__rows=30, plan__rows_estimated=30))
    assert (found.kind, found.share, found.partial, found.invalidates()) == ("estimated", 1.0, False, False)


def test_a_generated_load_that_ends_with_its_duration_is_as_planned() -> None:
    ended = {"planned": 58, "unsent": 55, "stopped": TIME_UP, "sent_share": None}
    assert list(findings(result(load=ended))) == []
    [found] = findings(result(load=ended, plan__trace="a.csv"))
    assert found.kind == "stopped"


def clock(rtt: float, *, shared: bool = False) -> dict[str, Any]:
    return {"host": f"n{rtt}", "shared": shared, "rtt": rtt, "offset": 0.5}


RULES: list[tuple[dict[str, Any], str, set[str], set[str]]] = [
    ({"sender__lost": [-9]}, "lost", {"load", "ttft", "e2e", "tokens"}, set()),
    ({"dispatch_lateness__p99": 0.0051}, "dispatch_lateness", {"load", "ttft_scheduled"}, {"ttft", "e2e"}),
    ({"load__sent_share": 0.994, "load__in_time": 994}, "rate", {"load", "ttft", "e2e"}, set()),
    ({"unread": 30}, "unread", {"load", "input_tokens"}, set()),
    ({"sender__processes": [{"cpu_share": 0.2}, {"cpu_share": 0.9}]}, "sender_cpu", set(), {"ttft", "tbc"}),
    ({"ttft_uncertainties__p99": 0.011}, "ttft_uncertainty", {"ttft", "ttfb"}, set()),
    ({"uncertainties__p99": 0.021, "sender__clock": "kernel"}, "uncertainty", {"tbc", "jitter"}, set()),
    ({"dispatch_lateness__p99": 0.021, "metrics__ttft__p50": 60.0}, "dispatch_lateness", {"load"}, {"ttft"}),
    ({"outcomes": {"complete": 9, "upstream_error": 1}}, "failed", set(), {"e2e", "ttft"}),
    ({"answers__output": 0}, "no_tokens", {"ttft", "tpot", "tokens", "e2e", "ttfb"}, set()),
    ({"answers__silent": 8}, "silent", {"e2e", "ttfb", "goodput"}, set()),
    ({"answers__silent": 7}, "silent", set(), {"e2e", "ttfb", "goodput"}),
    ({"answers__by_chunks": 8}, "by_chunks", {"tpot", "tokens", "smooth_goodput"}, set()),
    ({"answers__by_chunks": 7}, "by_chunks", set(), {"tpot", "tokens", "smooth_goodput"}),
    ({"sender__clocks": [clock(0.003), clock(0.0201)]}, "clocks", {"load"}, set()),
    ({"lengths__input_apart": 101}, "prompt_tokens", {"ttft", "input_tokens"}, set()),
]


@pytest.mark.parametrize(("changes", "what", "spoils", "doubts"), RULES)
def test_each_rule_alone_names_the_figures_that_it_concerns(
    changes: dict[str, Any], what: str, spoils: set[str], doubts: set[str]
) -> None:
    [found] = findings(result(**changes))
    assert found.kind == what
    assert found.to_judged().limit == found.limit
    assert spoils <= set(found.invalid_figures) and doubts <= set(found.doubtful_figures)
    assert bool(spoils) == bool(found.invalid_figures) and bool(doubts) == bool(found.doubtful_figures)


def judged(told: dict[str, Any]) -> dict[str, Any]:
    """The verdict on a result whose figures all have values."""
    names = ("ttft", "ttft_any", "ttfb", "tpot", "tbc", "itl", "tbc_max", "jitter", "e2e")
    told["metrics"] = {name: {"n": 90, "p50": 0.1, **told["metrics"].get(name, {})} for name in names}
    told |= {"tokens": {"output": 500, "input": 100}, "corrected": {"ttft": {"n": 90}}}
    public: dict[str, Any] = msgspec.to_builtins(verdict_of(findings(told), told))
    return public


def test_late_reads_spoil_the_times_between_chunks_and_no_other_figure() -> None:
    told = result(uncertainties__p99=0.5, sender__clock="kernel", metrics__tbc={"p50": 0.02})
    verdict = judged(told)
    states = {name: one["state"] for name, one in verdict["figures"].items()}
    assert {name for name, state in states.items() if state == "not_valid"} == {
        "tbc",
        "itl",
        "tbc_max",
        "jitter",
    }
    assert {states[name] for name in ("ttft", "tpot", "e2e", "load")} == {"valid"}
    assert verdict["figures"]["tbc"]["error"] == 0.5
    assert verdict["valid"] and not verdict["failed"] and verdict["not_valid"] == []
    # A bound of the objectives makes it a requested figure.
    told["goodput"] = {"objectives": "ttft:1s tbc_p99:50ms", "counted": 90}
    asked = judged(told)
    assert not asked["valid"] and asked["not_valid"] == ["tbc"]


def test_failed_requests_fail_the_load_and_leave_the_figures_of_the_others() -> None:
    verdict = judged(result(outcomes={"complete": 80, "truncated": 20}))
    assert verdict["failed"] and not verdict["valid"] and verdict["not_valid"] == []
    assert verdict["figures"]["e2e"]["state"] == "doubtful" and verdict["figures"]["e2e"]["share"] == 0.2


def test_goodput_with_a_bound_of_tokens_is_not_valid_by_chunks() -> None:
    told = result(answers__by_chunks=100)
    told["goodput"] = {"objectives": "ttft:1s", "counted": 90}
    assert judged(told)["figures"]["goodput"]["state"] == "valid"
    told["goodput"] = {"objectives": "tpot:50ms", "counted": 90}
    verdict = judged(told)
    assert verdict["figures"]["goodput"]["state"] == "not_valid"
    assert verdict["not_valid"] == ["tpot", "goodput", "tokens"] and not verdict["failed"]


@pytest.mark.parametrize(("late", "n"), [(1, 70), (14, 200), (15, 200)])
@pytest.mark.parametrize(("figure", "name"), [("dispatch_lateness", "lateness"), ("ttft_uncertainties",) * 2])
def test_a_small_share_that_is_late_is_a_caution(figure: str, name: str, late: int, n: int) -> None:
    values = Histogram([20_000_000] * late + [4_000_000] * (n - late))
    [found] = findings(result(**{f"{figure}__n": n, f"{figure}__p99": 0.02}), **{name: values})
    assert found.share == late / n
    assert f"{late} of them" in found.text
    assert bool(found.invalid_figures) == (late / n > 0.07)


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
    assert "2.1 ms" in found.text


def test_another_tokenizer_is_told_and_invalidates_only_where_the_load_was_another() -> None:
    told = {"input_counted": 1_000, "input_usage": 1_080, "input_apart": 80}
    [found] = findings(result(lengths=told))
    assert (found.kind, found.figure, found.limit) == ("prompt_tokens", 0.08, LIMITS["prompt_tokens"])
    assert not found.invalidates()
    assert "the server counted 1,080 prompt tokens, we 1,000: prompt by prompt 8.0 % apart" in found.text
    # What is too long here and too short there does not cancel.
    [found] = findings(result(lengths={"input_counted": 1_000, "input_usage": 1_000, "input_apart": 120}))
    assert found.invalidates()
    assert found.limit == LIMITS["prompt_tokens_most"]
    [found] = findings(result(lengths__input_apart=100))
    assert not found.invalidates(), "at the limit"
    [found] = findings(result(lengths__input_apart=500, plan__tokenizer=None))
    assert not found.invalidates(), "nobody asked for exact lengths"


@pytest.mark.parametrize("gap", [0.0, 0.00005])
def test_uncertainty_of_a_server_that_sends_bursts_is_limited_by_its_time_per_token(gap: float) -> None:
    # Eight tokens of 25 ms in a burst; a burst may be cut into several reads.
    bursty: dict[str, Any] = {
        "sender__clock": "kernel",
        "metrics__tbc": {"p50": gap},
        "metrics__tpot": {"p50": 0.025},
    }
    values = Histogram([26_000_000] * 8 + [24_000_000] * 92)
    changes = bursty | {"uncertainties": {"n": 100, "p99": 0.026}}
    [found] = findings(result(**changes), uncertainties=values)
    assert (found.kind, found.limit, found.share) == ("uncertainty", 0.025, 0.08)
    assert "tbc" in found.invalid_figures
    assert "the limit by the TPOT p50" in found.text
    assert findings(result(**bursty, uncertainties={"n": 100, "p99": 0.025})) == []
    assert check_gaps(result(**changes)) == []


def test_a_single_fast_token_is_limited_by_the_time_between_chunks() -> None:
    fast: dict[str, Any] = {"metrics__tbc": {"p50": 0.0008}, "metrics__tpot": {"p50": 0.0009}}
    [found] = findings(result(**fast, sender__clock="kernel"))
    assert (found.kind, found.limit) == ("uncertainty", 0.0008)


@pytest.mark.parametrize("tpot", [None, 0.0, 0.00002])
def test_answers_in_one_read_leave_their_timestamps_skipped_checks(tpot: float | None) -> None:
    held = result(sender__clock="kernel", metrics__tbc={"p50": 0.0}, metrics__tpot={"p50": tpot})
    assert findings(held) == []
    [says] = check_gaps(held)
    assert says.startswith("whether several chunks got one timestamp")
    assert check_gaps(result(sender__clock="kernel")) == check_gaps(result()) == []
    # Without streams there are no chunks.
    whole = {"metrics__ttft": {"n": 0, "p50": None}, "plan__body__stream": False}
    assert check_gaps(held | result(sender__clock="kernel", metrics__tbc={"p50": None}, **whole)) == []


@pytest.mark.parametrize("kind", ["reasoning_only", "tool_call_only", "refusal_only"])
def test_answers_without_content_are_a_caution_and_ttft_any_stands_for_ttft(kind: str) -> None:
    none = {"n": 0, "p50": None}
    told = result(
        answers__content=0,
        **{f"answers__{kind}": 100},
        metrics={"ttft": none, "ttft_any": {"n": 100, "p50": 0.1}, "tbc": {"p50": 0.02}},
    )
    [found] = findings(told)
    assert (found.kind, found.share, found.invalidates()) == ("no_content", 1.0, False)
    told["dispatch_lateness"]["p99"] = 0.0049  # within 5 % of the TTFT-any
    assert len(findings(told)) == 1


def test_answers_in_one_piece_are_a_caution() -> None:
    [found] = findings(result(answers__streamed=60))
    assert (found.kind, found.share, found.invalidates()) == ("whole", 0.4, False)
    assert findings(result(answers__streamed=60, plan__body={"stream": False})) == []


def test_recorded_requests_that_ask_for_no_text_need_no_token() -> None:
    assert findings(result(answers__output=0, answers__content=0, plan__body={"stream": None})) == []


def test_a_sentence_on_a_failed_load_names_the_few_figures_that_it_left() -> None:
    states = {"load": "doubtful", "ttfb": "valid"}
    says = "the load failed; doubtful: request rates; valid: TTFB"
    assert verdict_sentence(states, failed=True) == says
    assert verdict_sentence({"load": "valid"}, failed=True) == "the load failed; valid: request rates"
    assert verdict_sentence({}) == "all figures are valid"
