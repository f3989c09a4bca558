"""Parameters that a test cannot run with are named before anything is sent."""

from pathlib import Path
from typing import Any

import pytest

from llmtap.bench.run.measurement import Measurement
from llmtap.bench.run.session import Load
from llmtap.bench.run.test import test_named as named
from llmtap.bench.sut.sut import TargetArm
from llmtap.errors import ConfigError
from llmtap.units import NS_PER_S, Duration
from tests.bench.support import Planted, perform

S = NS_PER_S
GIVEN: dict[str, dict[str, Any]] = {"tradeoff": {"max_rate": 10.0}, "capacity": {"ttft_p99": Duration(S)}}
"""What else a test needs."""
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("ttft", {}, "rate"),
    ("ttft", {"rate": 1.0, "concurrency": 2}, "concurrency"),
    ("throughput", {"duration": Duration(59 * S)}, "duration"),
    ("throughput", {"rate_min": 1.5}, "rate_min"),
    ("throughput", {"rate_min": 4.0, "rate_max": 2.0}, "rate_max"),
    ("throughput", {"mode": "closed", "concurrency_min": 9, "concurrency_max": 8}, "concurrency_max"),
    ("tradeoff", {"duration": Duration(30 * S)}, "duration"),
    ("tradeoff", {"levels": [10, 50, 100]}, "levels"),
    ("tradeoff", {"levels": [20, 10, *range(30, 121, 10)]}, "levels"),
    ("tradeoff", {"levels": list(range(20, 121, 10))}, "levels"),
    ("capacity", {"ttft_p99": None}, "ttft_p99"),
    ("capacity", {"initial": 9, "maximum": 8}, "maximum"),
    ("capacity", {"duration": Duration(30 * S)}, "duration"),
    ("capacity", {"per_slot": 10}, "per_slot"),
    ("fairness", {"classes": [{"name": "a", "share": 1.0, "input": [1, 2], "output": [1, 2]}]}, "classes"),
    ("memory-pressure", {}, "capacity"),
    ("memory-pressure", {"capacity": 8, "duration": Duration(60 * S)}, "duration"),
    ("memory-pressure", {"capacity": 8, "levels": [110, 150]}, "levels"),
    ("memory-pressure", {"capacity": 8, "levels": [100, 150, 125]}, "levels"),
    ("long-context", {"lengths": [256, 256]}, "lengths"),
    ("long-context", {"workload": "synthetic-uniform"}, "workload"),
]
ABOUT = {"cache_off": TargetArm(about="a"), "cache_on": TargetArm(about="b")}
FILTERS = "[arms.input_filter], [arms.output_filter] or [arms.full]"
ARMS: list[tuple[str, dict[str, TargetArm], str]] = [
    ("prefix-cache", {}, "[arms.cache_off]"),
    ("prefix-cache", {"cache_on": TargetArm()}, "[arms.cache_off]"),
    ("prefix-cache", {"cache_off": TargetArm()}, "[arms.cache_on]"),
    ("prefix-cache", ABOUT, "[arms.cache_off]"),
    ("guardrail-overhead", {}, "[arms.baseline]"),
    ("guardrail-overhead", {"full": TargetArm()}, "[arms.baseline]"),
    ("guardrail-overhead", {"baseline": TargetArm()}, FILTERS),
]


def nothing(name: str, load: Load) -> Measurement:
    raise AssertionError(f"{name} was sent")


def refused(session: Planted, test: str, **params: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        perform(named(test), session, **params)
    return caught.value


@pytest.mark.parametrize(("test", "params", "place"), CASES)
def test_a_parameter_that_cannot_be(tmp_path: Path, test: str, params: dict[str, Any], place: str) -> None:
    session = Planted(tmp_path, nothing, test)
    assert refused(session, test, **{**GIVEN.get(test, {}), **params}).place == place


@pytest.mark.parametrize(("test", "arms", "place"), ARMS)
def test_an_arm_that_is_missing(tmp_path: Path, test: str, arms: dict[str, TargetArm], place: str) -> None:
    session = Planted(tmp_path, nothing, test)
    session.arms = arms
    assert refused(session, test).place == place


@pytest.mark.parametrize("test", ["throughput", "tradeoff", "capacity"])
def test_a_quick_run_may_be_shorter(tmp_path: Path, test: str) -> None:
    session, one = Planted(tmp_path, nothing, test), named(test)
    session.quick = True
    assert one.check is not None
    one.check(session, one.params(**one.quick))
