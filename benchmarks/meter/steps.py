"""How soon is a step of TTFT found, and how many steps are reported on days without one?

Virtual time: `llmtap.metrics.step_change` judges simulated streams. Requests arrive at random, with a
pattern of the day, quieter weekends, and an autocorrelated rate. Prompts are short or long, and their mix
changes. One prefill after another makes the queue, so that TTFT depends on load and prompt length. A random
factor has a heavy tail, and each day has a level of its own (standard deviation 4 %).

    .venv/bin/python benchmarks/meter/steps.py [--days 100] [--steps 400] [--ratio 1.5] [--rate 5] [--seed 1]
"""

import argparse
import copy
import itertools
import json
import sys
import time
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from llmtap.metrics.step_change import FALSE_ALARM_DAYS, StepDetector
from llmtap.units import NS_PER_S

DAY_S: Final = 86_400
FOUND_S_MAX: Final = 180.0
"""Time within which a step must be found."""
WARM_UP_DAYS: Final = 3
SPAN_S: Final = 900
"""Time after a step for which the detector may look for it."""
NULL_RATE_RPS: Final = 1.0
RATE_EDGES: Final = (0.0, 0.6, 0.9, 1.1, 10.0)
"""Limits of the classes of steps, as multiples of --rate; the third class is that of the asked rate."""
USE: Final = 0.28
"""Share of the time in which the server works, in the mean of weekdays."""


@dataclass(slots=True)
class Traffic:
    """Endless streams of one model. `rate_rps`: mean rate of requests on weekdays."""

    rate_rps: float
    seed: int
    day: int = 0
    rng: np.random.Generator = field(init=False)
    wave: float = 0.0
    level: float = 0.0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def next_day(self) -> tuple[list[int], list[int], list[int]]:
        """Return end, TTFT and prompt tokens of the streams of a day; times in ns."""
        rng, seconds = self.rng, np.arange(DAY_S)
        waves = np.empty(DAY_S // 60)
        for minute in range(len(waves)):  # correlation of 20 minutes, standard deviation 0.2
            self.wave = 0.951 * self.wave + rng.normal(0, 0.2 * 0.309)
            waves[minute] = self.wave
        weekday = 0.6 if self.day % 7 >= 5 else 1.0
        pattern = 1 + 0.6 * np.sin(2 * np.pi * (seconds / DAY_S - 0.3))
        per_second = rng.poisson(self.rate_rps * weekday * pattern * np.exp(np.repeat(waves, 60)))
        arrival = np.repeat(seconds, per_second) + rng.random(per_second.sum())
        arrival.sort()
        n = len(arrival)
        share = 0.15 + 0.1 * np.sin(2 * np.pi * (arrival / DAY_S - 0.7)) + rng.normal(0, 0.03)
        is_long = rng.random(n) < share
        tokens = np.where(is_long, rng.lognormal(8.3, 0.5, n), rng.lognormal(5.7, 0.9, n)).clip(5, 30_000)
        # A long prompt has 4,560 tokens in the mean and a short one 448, so 1,065 for the mix.
        service = tokens * USE / (self.rate_rps * 1_065)
        work = np.cumsum(np.concatenate(([0.0], service[:-1] - np.diff(arrival))))
        wait = work - np.minimum.accumulate(work)  # Lindley's recursion
        self.level = 0.7 * self.level + rng.normal(0, 0.04 * 0.714)
        tail = np.where(rng.random(n) < 0.01, 2 + 2 * rng.pareto(1.5, n), 1.0)
        ttft = (wait + service + 0.05) * rng.lognormal(0, 0.5, n) * np.exp(self.level) * tail
        end = arrival + ttft + rng.exponential(5.0, n)
        order = np.argsort(end)
        ends_ns = ((end[order] + self.day * DAY_S) * NS_PER_S).astype(np.int64)
        self.day += 1
        return (
            ends_ns.tolist(),
            (ttft[order] * NS_PER_S).astype(np.int64).tolist(),
            tokens[order].astype(int).tolist(),
        )

    def streams(self) -> Iterator[tuple[int, int, int]]:
        while True:
            yield from zip(*self.next_day(), strict=True)


def null_alarms(days: int, seed: int, rate_rps: float = NULL_RATE_RPS) -> list[float]:
    """Return the days at which steps were reported in so many judged days without one."""
    detector, latest = StepDetector(0), None
    alarms: list[float] = []
    last_ns = (days + 1) * DAY_S * NS_PER_S
    for end_ns, ttft_ns, tokens in Traffic(rate_rps, seed).streams():
        if end_ns > last_ns:
            return alarms
        detector.add(end_ns, ttft_ns, tokens, 0)
        if detector.step is not latest:
            latest = detector.step
            alarms.append(end_ns / NS_PER_S / DAY_S)
    raise AssertionError


@dataclass(frozen=True, slots=True)
class Found:
    after_s: float | None
    """Time from the step to its report; None: not reported."""
    rate_rps: float
    """Rate of the streams in the FOUND_S_MAX after the step."""
    since_s: float = 0.0
    """Reported begin of the step, minus the true one."""
    ratio: float = 0.0
    covered: bool = False
    """Whether the interval holds the true ratio."""


def find_steps(
    steps: int, ratio: float, rate_rps: float, seed: int, warm_up_days: int = WARM_UP_DAYS
) -> list[Found]:
    """Plant steps at equal distances over a day, each in a copy of the detector; return what was found."""
    traffic = Traffic(rate_rps, seed)
    detector = StepDetector(0)
    for _ in range(warm_up_days):
        for end_ns, ttft_ns, tokens in zip(*traffic.next_day(), strict=True):
            detector.add(end_ns, ttft_ns, tokens, 0)
    day = list(zip(*traffic.next_day(), strict=True))
    every_ns = (DAY_S - SPAN_S) * NS_PER_S // steps
    starts_ns = [warm_up_days * DAY_S * NS_PER_S + (i + 1) * every_ns for i in range(steps)]
    results = []
    for place, (end_ns, ttft_ns, tokens) in enumerate(day):
        if starts_ns and end_ns >= starts_ns[0]:
            results.append(find_step(copy.deepcopy(detector), day[place:], starts_ns.pop(0), ratio))
        detector.add(end_ns, ttft_ns, tokens, 0)
    return results


def find_step(
    detector: StepDetector, streams: list[tuple[int, int, int]], start_ns: int, ratio: float
) -> Found:
    last_ns = start_ns + FOUND_S_MAX * NS_PER_S
    rate_rps = bisect_right(streams, last_ns, key=lambda stream: stream[0]) / FOUND_S_MAX
    for end_ns, ttft_ns, tokens in streams:
        if end_ns > start_ns + SPAN_S * NS_PER_S:
            break
        detector.add(end_ns, int(ttft_ns * ratio), tokens, 0)
        step = detector.open_step
        if step is not None:
            low, high = step.ratio_interval()
            return Found(
                (end_ns - start_ns) / NS_PER_S,
                rate_rps,
                (step.since_ns - start_ns) / NS_PER_S,
                step.ratio,
                low <= ratio <= high,
            )
    return Found(None, rate_rps)


def summary(results: list[Found], low_rps: float, high_rps: float) -> dict[str, object]:
    """Return how soon the steps of a class of rates were found."""
    chosen = [result for result in results if low_rps <= result.rate_rps < high_rps]
    after = [result.after_s for result in chosen if result.after_s is not None]
    quantiles = (
        zip(("median", "p95", "max"), np.quantile(after, (0.5, 0.95, 1)), strict=True) if after else ()
    )
    return {
        "requests_per_s": [low_rps, high_rps],
        "steps": len(chosen),
        "found": len(after),
        "in_time": sum(one <= FOUND_S_MAX for one in after),
        "found_after_s": {name: float(value) for name, value in quantiles},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--days", type=int, default=100)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--ratio", type=float, default=1.5)
    parser.add_argument("--rate", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    began = time.perf_counter()
    results = find_steps(args.steps, args.ratio, args.rate, args.seed)
    found = [result for result in results if result.after_s is not None]
    by_rate = [
        summary(results, low * args.rate, high * args.rate) for low, high in itertools.pairwise(RATE_EDGES)
    ]
    alarms = null_alarms(args.days, args.seed)
    result = {
        "ratio": args.ratio,
        "rate_rps": args.rate,
        "by_rate": by_rate,
        "since_error_s": {"median": float(np.median([r.since_s for r in found]))} if found else None,
        "ratio_reported": {"median": float(np.median([r.ratio for r in found]))} if found else None,
        "intervals_with_ratio": sum(r.covered for r in found),
        "null_days": args.days,
        "alarms": alarms,
        "alarms_stated": args.days / FALSE_ALARM_DAYS,
        "seconds": time.perf_counter() - began,
    }
    print(json.dumps(result, indent=2))
    in_time = by_rate[2]["in_time"] == by_rate[2]["steps"]
    return 0 if in_time and len(alarms) <= args.days / FALSE_ALARM_DAYS else 1


if __name__ == "__main__":
    sys.exit(main())
