"""What is drawn has the figures it was told to have."""

from itertools import pairwise
from statistics import fmean, median, pstdev, quantiles

import pytest

from llmtap.workload.synthetic import WORKLOADS, draw

N = 40_000


@pytest.mark.parametrize(
    ("name", "input_median", "output_median"),
    [("chat", 156, 234), ("long-chat", 1_400, 234), ("bursty", 251, 34)],
)
def test_medians_are_those_of_the_source(name: str, input_median: int, output_median: int) -> None:
    requests = draw(WORKLOADS[name], N, seed=42)
    # The standard error of a median of N lognormal values is 1.25 sigma / sqrt(N): below 1 % of it here.
    assert median(requests.input) == pytest.approx(input_median, rel=0.03)
    assert median(requests.output) == pytest.approx(output_median, rel=0.03)


def test_tails_and_means_are_those_of_the_source() -> None:
    chat = draw(WORKLOADS["chat"], N, seed=1)
    assert quantiles(chat.input, n=20)[-1] == pytest.approx(892, rel=0.05)
    assert quantiles(chat.output, n=20)[-1] == pytest.approx(789, rel=0.05)
    long = draw(WORKLOADS["long-chat"], N, seed=1)
    assert fmean(long.input) == pytest.approx(1_600, rel=0.02)
    # Cut at 16,000 tokens: the mean of what is left is a little below 611.
    assert 560 < fmean(draw(WORKLOADS["bursty"], N, seed=1).input) < 630


def test_arrivals_have_their_rate_and_their_burstiness() -> None:
    arrivals = draw(WORKLOADS["chat"], N, seed=3).arrival_ns
    gaps = [b - a for a, b in pairwise(arrivals)]
    assert arrivals[0] == 0
    assert fmean(gaps) == pytest.approx(1e9, rel=0.03)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(1, rel=0.03)
    bursts = draw(WORKLOADS["bursty"], N, seed=3).arrival_ns
    gaps = [b - a for a, b in pairwise(bursts)]
    assert min(gaps) >= 0
    assert pstdev(gaps) / fmean(gaps) > 8  # of a tail so heavy a sample seldom has all
    assert sum(gap < 1_000_000 for gap in gaps) > 0.9 * N
