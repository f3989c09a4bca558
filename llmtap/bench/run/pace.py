"""Estimate the duration of a benchmark from the durations of its first loads.

A test declares the loads that it expects to send (`ExpectedLoads`, `BenchTest.expected`); a session reports
warm-ups, loads and answers to a `Pace`, and `perform.py` announces the duration of all tests after the first
load, and corrects it after each further one. Before the first load, no duration is announced: the warm-up and
the answers take most of the time of a short benchmark, and the speed of the server is not known yet.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final, NamedTuple

SLOTS_DEFAULT: Final = 16
"""Assumed concurrency at the capacity of a server, until a test has measured it."""
SEARCH_LOADS: Final = 4
"""Expected number of loads of a search for the capacity by closed loops (`levels.find_capacity`)."""
LEVELS_EXPECTED: Final = 10
"""Assumed number of levels of a search; the real one ends at the capacity, which is not known yet."""

REPORT_DEFAULT_S: Final = 5.0
"""Assumed seconds of the self-test and the report after a test, until a first test has ended."""


class ExpectedLoads(NamedTuple):
    """The loads that a test is expected to send."""

    loads: int
    seconds: float = 0.0
    """Total time in seconds until the last request is sent, over the loads of known duration."""
    answers: float = 0.0
    """Of the loads of unknown duration: number of responses that one slot (a client of a closed loop) gets
    one after another, summed over the loads. Times the mean duration of a response, it is their time."""
    warmups: int = 1

    def plus(self, more: "ExpectedLoads") -> "ExpectedLoads":
        """Return the sum of these loads and `more`."""
        return ExpectedLoads(
            self.loads + more.loads, self.seconds + more.seconds, self.answers + more.answers, self.warmups
        )


def expected_search(rounds: int) -> ExpectedLoads:
    """Return the loads of a search for capacity with `rounds` requests per slot and load."""
    return ExpectedLoads(SEARCH_LOADS, answers=SEARCH_LOADS * rounds)


def expected_open_loops(requests: int, shares: Iterable[float], rate_rps: float | None) -> ExpectedLoads:
    """Return the open loops of `requests` requests at these shares of the capacity.

    `rate_rps`: capacity; None if it is not measured yet.
    """
    parts = [requests / share for share in shares]
    if rate_rps is None:
        return ExpectedLoads(len(parts), answers=sum(parts) / SLOTS_DEFAULT)
    return ExpectedLoads(len(parts), seconds=sum(parts) / rate_rps)


@dataclass(slots=True)
class Pace:
    """Measured durations of warm-ups, loads and reports, in seconds."""

    _warmups_s: list[float] = field(default_factory=list)
    _overheads_s: list[float] = field(default_factory=list)
    """For each load: duration minus the time to send its requests. It contains
    preparation and last responses."""
    _responses_s: list[float] = field(default_factory=list)
    """Median E2E of each load."""
    _reports_s: list[float] = field(default_factory=list)
    """For each test: duration of the self-test and the report, after the last load."""

    def add_warmup(self, seconds: float) -> None:
        self._warmups_s.append(seconds)

    def add_load(self, sending_s: float, duration_s: float, response_s: float | None) -> None:
        """Add a load: time to send its requests, duration, and median E2E, in seconds."""
        self._overheads_s.append(max(0.0, duration_s - sending_s))
        if response_s is not None:
            self._responses_s.append(response_s)

    def add_report(self, seconds: float) -> None:
        self._reports_s.append(seconds)

    @property
    def is_known(self) -> bool:
        """Whether a load has been measured."""
        return bool(self._overheads_s)

    def seconds(self, expected: ExpectedLoads) -> float:
        """Return the estimated duration of a test."""
        return (
            expected.warmups * _mean(self._warmups_s)
            + expected.loads * _mean(self._overheads_s)
            + expected.seconds
            + expected.answers * _mean(self._responses_s)
            + (_mean(self._reports_s) if self._reports_s else REPORT_DEFAULT_S)
        )


def _mean(values: list[float]) -> float:
    return fmean(values) if values else 0.0
