"""What speaks against a result: each rule by itself, at its limit and beyond."""

from typing import Any

import pytest

from llmtap.replay.verdict import LIMITS, findings


def result(**changes: Any) -> dict[str, Any]:
    """One that nothing speaks against, with changes by a path of keys joined with a dot."""
    told: dict[str, Any] = {
        "load": {"sent_share": 1.0},
        "metrics": {"ttft": {"n": 100, "p50": 0.1}, "tbc": {"p50": 0.02}},
        "window": {"seconds": 60.0},
        "plan": {"body": {"stream": True}},
        "dispatch_lateness": {"p99": 0.0005},
        "outcomes": {"complete": 90, "refused": 10},
        "uncertainties": {"p99": 0.005},
        "sender": {"clock": "mono", "lost": [], "processes": [{"cpu_share": 0.5}]},
    }
    for path, value in changes.items():
        *way, last = path.split("__")
        at = told
        for key in way:
            at = at[key]
        at[last] = value
    return told


def test_nothing_is_said_of_a_good_run() -> None:
    assert findings(result()) == []


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"sender__lost": [-9]}, "lost"),
        ({"dispatch_lateness__p99": 0.0051}, "dispatch_lateness"),
        ({"load__sent_share": 0.994}, "rate"),
        ({"sender__processes": [{"cpu_share": 0.2}, {"cpu_share": 0.9}]}, "sender_cpu"),
        ({"uncertainties__p99": 0.011}, "uncertainty"),
        ({"uncertainties__p99": 0.021, "sender__clock": "kernel"}, "uncertainty"),
        ({"dispatch_lateness__p99": 0.021, "metrics__ttft__p50": 60.0}, "dispatch_lateness"),
        ({"outcomes": {"complete": 9, "upstream_error": 1}}, "failed"),
        ({"metrics__ttft": {"n": 0, "p50": None}}, "no_tokens"),
    ],
)
def test_each_rule_alone(changes: dict[str, Any], what: str) -> None:
    [found] = findings(result(**changes))
    assert found.what == what
    assert found.limit in found.to_dict().values()


@pytest.mark.parametrize(
    "changes",
    [
        {"dispatch_lateness__p99": 0.005},  # 5 % of the TTFT p50
        {"load__sent_share": LIMITS["rate_share"]},
        {"load__sent_share": None},
        {"sender__processes": [{"cpu_share": 0.9}], "window__seconds": 4.9},  # which is its start
        {"metrics__ttft": {"n": 0, "p50": None}, "plan__body__stream": False},
        {"dispatch_lateness": None},
        {"sender__clock": "kernel", "uncertainties__p99": 0.02},  # which is not in a kernel's stamps
        {"metrics__ttft__p50": None, "dispatch_lateness__p99": 0.002},
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
