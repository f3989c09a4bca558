"""Conditions that end a load early: their parsing, and a queue that grows without end."""

import random

import pytest

from llmtap.errors import ConfigError
from llmtap.load.stop_conditions import QueueGrowth, StopConditions, parse_stop_when


@pytest.mark.parametrize(
    ("text", "conditions"),
    [
        ("error_rate>10%", StopConditions(0.1)),
        ("error_rate > 0.25", StopConditions(0.25)),
        ("error_rate>0%", StopConditions(0.0)),
        ("saturated", StopConditions(saturated=True)),
        ("saturated, error_rate>99.9%", StopConditions(0.999, True)),
        ("error_rate>10% saturated", StopConditions(0.1, True)),
    ],
)
def test_conditions_are_separated_by_blanks_or_commas(text: str, conditions: StopConditions) -> None:
    assert parse_stop_when(text) == conditions


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "error_rate",
        "error_rate>100%",
        "error_rate<10%",
        "error_rate>=10%",
        "error_rate>half",
        "ttft_p99>1s",
        "error_rate>10% error_rate>20%",
        "saturation",
        "error_rate>-1%",
    ],
)
def test_a_condition_that_cannot_end_a_load_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_stop_when(text)
    assert refused.value.place == "--stop-when"


def seconds_to_stop(
    rate: float, capacity: float, seconds: float, *, seed: int = 1, latency: int = 0
) -> float | None:
    """Return when `QueueGrowth` stops a queue with these rates per second; `latency`: waiting at least."""
    draw = random.Random(seed)
    growth, sent, waiting, step = QueueGrowth(), 0, 0, 0.01
    for i in range(round(seconds / step)):
        arrived = draw.random() < rate * step
        sent += arrived
        waiting += arrived
        if waiting > latency and draw.random() < capacity * step:
            waiting -= 1
        if i % 25 == 0 and growth.add(round(i * step * 1e9), sent, waiting) is not None:
            return i * step
    return None


@pytest.mark.parametrize("overload", [1.2, 2.0, 4.0])
def test_a_queue_that_grows_without_end_is_found(overload: float) -> None:
    found = seconds_to_stop(10 * overload, 10, 600)
    assert found is not None
    assert found < (300 if overload < 2 else 60)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("use", [0.5, 0.8, 0.95])
def test_a_queue_below_the_capacity_is_not(use: float, seed: int) -> None:
    assert seconds_to_stop(20 * use, 20, 600, seed=seed) is None


def test_a_steady_queue_of_many_requests_is_not() -> None:
    assert seconds_to_stop(20, 40, 600, latency=200) is None


def test_a_queue_of_requests_sent_at_once_is_not() -> None:
    growth = QueueGrowth()
    assert all(growth.add(served * 10**8, 1_000, 1_000 - served) is None for served in range(1_001))


def test_bursts_that_the_server_works_off_are_not() -> None:
    growth, sent, waiting, step_ns, t_ns = QueueGrowth(), 0, 0, 100_000_000, 0
    for period in range(100):
        for step in range(100):  # 100 requests in 1 s, and then a pause of 9 s
            arrived = 10 if step < 10 else 0
            sent, waiting, t_ns = sent + arrived, waiting + arrived, t_ns + step_ns
            waiting -= min(2, waiting)
            assert growth.add(t_ns, sent, waiting) is None, period
