"""Steps of TTFT: a rise is found and measured, and what load, prompts or chance explain is none."""

import copy
import random
from math import exp, log

import pytest

from benchmarks.meter.steps import FOUND_S_MAX, find_steps, null_alarms
from llmtap.metrics.step_change import (
    CELL_STREAMS_MIN,
    FALSE_ALARM_DAYS,
    RISE,
    STREAMS_MIN,
    THRESHOLD_MIN,
    Noise,
    StepDetector,
    StepState,
    pack_detectors,
    unpack_detectors,
)

S = 1_000_000_000
HOUR_S = 3_600
DAY_S = 24 * HOUR_S
TTFT_S = 0.4


class Server:
    """Streams at a steady rate into a detector. TTFT is TTFT_S times a random factor and a given one."""

    def __init__(self, seed: int = 1) -> None:
        self.rng = random.Random(seed)
        self.detector = StepDetector(0)
        self.now_s = 0.0

    def run(self, seconds: float, *, factor: float = 1.0, tokens: int = 1_000, gap_s: float = 2.0) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += gap_s
            ttft_s = TTFT_S * factor * self.rng.lognormvariate(0, 0.3)
            self.detector.add(self.now_ns, int(ttft_s * S), tokens, 4 * tokens, S)

    @property
    def now_ns(self) -> int:
        return int(self.now_s * S)

    @property
    def state(self) -> StepState:
        return self.detector.state(self.now_ns)


_day = Server()
_day.run(26 * HOUR_S)


@pytest.fixture
def server() -> Server:
    """A server with the history of a day."""
    assert _day.state is StepState.STEADY
    return copy.deepcopy(_day)


def test_a_step_is_found_with_its_begin_and_ratio(server: Server) -> None:
    began_s = server.now_s
    server.run(600, factor=1.6)
    step = server.detector.open_step
    assert step is not None
    assert server.state is StepState.STEP
    assert abs(step.since_ns / S - began_s) <= 120, "a block has 60 s"
    assert step.found_ns <= (began_s + 400) * S
    low, high = step.ratio_interval()
    assert low < 1.6 < high < 1.9
    assert step.ratio == pytest.approx(1.6, rel=0.1)
    assert step.baseline_ns / S == pytest.approx(TTFT_S, rel=0.05)
    assert step.ttft_ns == pytest.approx(step.baseline_ns * step.ratio)
    assert step.history_ns == pytest.approx(26 * HOUR_S * S, rel=0.01)
    assert step.n >= 4 * STREAMS_MIN


def restarted(server: Server, shift_s: float = 0.0) -> StepDetector:
    """The detector of the next meter, whose clock is `shift_s` ahead."""
    saved = unpack_detectors(pack_detectors({"m": server.detector.export()}))["m"]
    detector = StepDetector(server.now_ns + int(shift_s * S))
    detector.absorb(saved, int(shift_s * S))
    return detector


@pytest.mark.parametrize("before_s", [0, 100, 600])
def test_the_next_meter_finds_the_same_step(server: Server, before_s: int) -> None:
    began_s, history_ns = server.now_s, server.detector.history_ns(server.now_ns)
    server.run(before_s, factor=1.6)
    found = copy.copy(server.detector.open_step)
    shift_s = -7.5 * HOUR_S
    server.detector = restarted(server, shift_s)
    server.now_s += shift_s
    assert server.detector.history_ns(server.now_ns) == history_ns + before_s * S
    server.run(700 - before_s, factor=1.6)
    step = server.detector.open_step
    assert step is not None
    assert abs(step.since_ns / S - shift_s - began_s) <= 180
    assert step.ratio == pytest.approx(1.6, rel=0.1)
    if found is not None:
        assert step.since_ns == found.since_ns + shift_s * S
        assert step.n > found.n
    server.run(HOUR_S)
    assert server.state is StepState.STEADY


def test_streams_that_another_meter_ends_after_its_replacement_count(server: Server) -> None:
    other = Server()
    server.detector = restarted(server)
    other.now_s, other.detector = server.now_s, StepDetector(server.now_ns)
    other.run(20, factor=1.2)
    server.run(20)
    server.detector.absorb(other.detector.export(), 0)
    parts = server.detector.export().parts.values()
    assert sum(n for n, _, _ in parts) == 20
    assert sum(total for _, total, _ in parts) / 20 == pytest.approx(log(TTFT_S * S), abs=0.3)


def test_after_a_long_time_without_a_meter_the_test_begins_again(server: Server) -> None:
    server.run(70, factor=2)
    assert server.detector.export().sum > 0
    server.now_s += HOUR_S
    late, saved = StepDetector(server.now_ns), server.detector.export()
    late.absorb(saved, 0)
    assert late.export().sum == 0


def test_a_step_ends_when_ttft_returns(server: Server) -> None:
    server.run(HOUR_S, factor=2)
    ended_s = server.now_s
    server.run(HOUR_S)
    step = server.detector.step
    assert step is not None
    assert step.until_ns is not None
    assert abs(step.until_ns / S - ended_s) <= 120
    assert step.ratio == pytest.approx(2, rel=0.1)
    assert server.state is StepState.STEADY


def test_without_a_day_of_history_nothing_is_a_step() -> None:
    server = Server()
    server.run(12 * HOUR_S)
    server.run(11 * HOUR_S, factor=3)
    assert server.detector.step is None
    assert server.state is StepState.LEARNING


def test_a_small_rise_and_a_short_spike_are_no_steps(server: Server) -> None:
    server.run(20, factor=30)
    server.run(HOUR_S)
    server.run(6 * HOUR_S, factor=RISE**0.4)
    assert server.detector.step is None


def test_longer_prompts_and_more_load_are_no_steps() -> None:
    server = Server()
    for _ in range(9):
        server.run(HOUR_S)
        server.run(HOUR_S, tokens=4_000, factor=4)
        server.run(HOUR_S, gap_s=0.5, factor=2)
    assert server.state is StepState.STEADY
    server.run(2 * HOUR_S, tokens=4_000, factor=4)
    server.run(2 * HOUR_S, gap_s=0.5, factor=2)
    assert server.detector.step is None
    server.run(HOUR_S, gap_s=0.5, factor=2 * 1.6)
    assert server.detector.open_step is not None, "at the load at which TTFT is twice as long"


def test_a_load_that_the_history_does_not_have_is_not_judged(server: Server) -> None:
    server.run(CELL_STREAMS_MIN / 4, gap_s=0.25, factor=3)
    assert server.state is StepState.NEW_LOAD
    assert server.detector.step is None


def test_too_few_streams_are_not_judged(server: Server) -> None:
    server.run(HOUR_S, gap_s=20, factor=3)
    assert server.state is StepState.FEW
    assert server.detector.step is None


def test_a_history_of_more_than_a_week_ago_does_not_count(server: Server) -> None:
    server.now_s += 9 * DAY_S
    server.run(6 * HOUR_S)
    server.run(HOUR_S, factor=3)
    assert server.state is StepState.LEARNING
    assert server.detector.step is None


def test_a_step_of_a_day_is_the_new_normal(server: Server) -> None:
    server.run(25 * HOUR_S, factor=2)
    assert server.detector.step is not None
    assert server.detector.open_step is None
    assert server.state is StepState.LEARNING
    server.run(24 * HOUR_S, factor=2)
    assert server.state is StepState.STEADY
    server.run(HOUR_S, factor=3.2)
    assert server.detector.open_step is not None
    assert server.detector.open_step.ratio == pytest.approx(1.6, rel=0.1)


def test_requests_without_a_token_count_are_judged_by_their_size() -> None:
    detector, rng = StepDetector(0), random.Random(1)
    for i in range(1, DAY_S // 2 + 400):
        factor = 1.6 if i > DAY_S // 2 + 50 else 1.0
        detector.add(2 * i * S, int(TTFT_S * factor * rng.lognormvariate(0, 0.3) * S), None, 4_000)
    assert detector.open_step is not None


@pytest.mark.parametrize("slow", [0.0, 0.0025])
def test_the_threshold_gives_the_stated_time_between_false_alarms(slow: float) -> None:
    """The mean time by Siegmund's formula at the threshold, in units of 30 s."""
    noise = Noise(stream=2.0, batch=0.001, slow=slow)
    h, v, k = noise.threshold(5 / S), noise.long_run(5 / S), log(RISE) / 2 - 2 * slow**0.5
    assert h > THRESHOLD_MIN
    assert v == pytest.approx(20 * (0.001 + 2.0 / 3_000))
    x = 2 * k * h / v
    assert v / (2 * k * k) * (exp(x) - 1 - x) == pytest.approx(FALSE_ALARM_DAYS * DAY_S / 30, rel=1e-6)


def test_steps_are_found_in_time_in_traffic_with_a_pattern_of_the_day() -> None:
    results = find_steps(4, RISE, 5.0, seed=3, warm_up_days=1)
    assert len(results) == 4
    assert all(result.after_s is not None and result.after_s <= FOUND_S_MAX for result in results)
    assert all(result.covered for result in results)


def test_no_step_is_reported_on_days_without_one() -> None:
    assert null_alarms(5, seed=3, rate_rps=0.5) == []
