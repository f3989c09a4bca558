"""Findings are right by hand, and their intervals hold the truth as often as they say."""

from array import array
from dataclasses import dataclass

import pytest

from benchmarks.load.workloads import Claim, check
from llmtap.workload.lengths import Fixed, Lengths, LogNormal, UniformLengths
from llmtap.workload.plan import ComposedWorkload, Sharing, WorkloadPlan
from llmtap.workload.requests import Requests

NINE = Fixed(tokens=9)
SHARING = Sharing(fraction=0.5, tokens=UniformLengths(min=1, max=99), contexts=2)


@dataclass(frozen=True)
class Known:
    """A workload of given rows."""

    messages: tuple[int, ...]
    contexts: tuple[int, ...]
    lengths: tuple[int, ...] = (30, 70)
    input: Lengths | None = None
    output: Lengths | None = NINE
    sharing: Sharing | None = SHARING

    def plan(self, count: int, seed: int) -> WorkloadPlan:
        requests = Requests(output=array("q", [9] * len(self.messages)))
        return WorkloadPlan(requests, array("q", self.messages), array("q", self.contexts), self.lengths)


@pytest.mark.parametrize(
    ("column", "statistic", "found", "expected"),
    [
        ("message", "mean", 55, None),
        ("message", "min", 10, None),
        ("message", "max", 100, None),
        ("message", "p50", 55, None),
        ("message", "p90", 91, None),
        ("message", "share 30", 0.1, None),
        ("output", "p99", 9, 9),
        ("output", "mean", 9, 9),
        ("output", "share 9", 1, 1),
        ("sharing", "share", 0.4, 0.5),
        ("context", "share 1", 0.75, 0.5),
        ("context", "share 2", 0.25, 0.5),
        ("context", "min", 30, None),
        ("context", "max", 70, None),
    ],
)
def test_each_statistic_is_what_it_is_by_hand(
    column: str, statistic: str, found: float, expected: float | None
) -> None:
    claim = Claim(column, statistic, None, "by hand")  # type: ignore[arg-type]
    known = Known(tuple(range(10, 101, 10)), (0, 0, 0, 1, -1, -1, -1, -1, -1, -1))
    (finding,) = check(known, (claim,), 10, 0)
    assert finding.found == pytest.approx(found)
    assert finding.expected == expected
    assert finding.covers(finding.found)


def test_intervals_hold_the_truth_in_95_of_100() -> None:
    """Of 400 samples: 380 but for 4 sigma of a binomial, 17; intervals by rank are a little too wide."""
    lengths = LogNormal(mu=5.5, sigma=1.0, min=32, max=4_096)
    claims = tuple(Claim("message", name, None, "") for name in ("mean", "p50", "p95"))
    workload = ComposedWorkload("w", lengths, NINE)
    held = dict.fromkeys(("mean", "p50", "p95"), 0)
    for seed in range(400):
        for x in check(workload, claims, 400, seed):
            assert x.expected is not None
            held[x.claim.statistic] += x.covers(x.expected)
    assert all(380 - 17 <= n <= 400 for n in held.values()), held
