"""Statistics of arrival times: rate, burstiness, ties; comparison with a plan or with a Poisson process.

`figures` takes times in ns, `compare` planned and actual send times; the result of a replay has both
(`load/replay/result.py`). Arrivals are generated in `workload/arrivals.py`.

The gaps of a Poisson process are exponential and independent: coefficient of variation 1, small
Kolmogorov-Smirnov distance and autocorrelations. Each figure comes with its limit under pure chance.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, sqrt
from operator import mul
from statistics import NormalDist
from typing import Any, Final

from llmtap.metrics.statistics import deviation, percentile

KS_95: Final = 1.358
"""Kolmogorov's distance times sqrt(n) that chance exceeds once in twenty times, if the law (its rate) is
known beforehand."""
KS_95_OWN_MEAN: Final = 1.094
"""The same if the exponential's mean is that of the values, which brings it nearer to them: Stephens 1974,
"EDF statistics for goodness of fit", for large n."""
LAGS: Final = 20
_SHARES: Final = {"p50": 0.50, "p90": 0.90, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Autocorrelation:
    value: float
    """Value of largest magnitude, from -1 to 1."""
    lag: int
    limit: float
    """Magnitude that independent gaps exceed once in twenty times."""


@dataclass(frozen=True, slots=True)
class ArrivalFigures:
    """Figures of a sequence of times. A figure that does not apply is None: a single arrival has no gaps."""

    n: int
    span_ns: int
    rate_rps: float | None
    """Gaps per second of the span; None if all come at once."""
    gap_mean_ns: float | None
    gap_min_ns: int | None
    gap_cv: float | None
    """Standard deviation (of the population) / mean; None if all come at once."""
    ties: float | None
    """Share of the gaps that are 0."""
    ks: float | None
    """Distance of the gaps' distribution to the exponential."""
    ks_limit: float | None
    """Value of `ks` that chance exceeds once in twenty times."""
    ks_rate_rps: float | None
    """Rate of that exponential: the one given, or that of the gaps."""
    ks_own_mean: bool
    """Whether the rate is that of the gaps, with the limit KS_95_OWN_MEAN."""
    autocorrelation: Autocorrelation | None

    def to_dict(self) -> dict[str, Any]:
        found = self.autocorrelation
        return {
            "n": self.n, "span": self.span_ns / 1e9, "rate_rps": self.rate_rps,
            "gap_mean": _seconds(self.gap_mean_ns), "gap_min": _seconds(self.gap_min_ns),
            "gap_cv": self.gap_cv, "ties": self.ties,
            "ks": None if self.ks is None else {
                "distance": self.ks, "limit_95": self.ks_limit, "rate_rps": self.ks_rate_rps,
                "rate_from": "the gaps' mean" if self.ks_own_mean else "what was asked",
            },
            "autocorrelation": None if found is None else {
                "value": found.value, "lag": found.lag, "limit_95": found.limit,
            },
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Punctuality:
    """Actual send times compared with a plan."""

    planned: int
    sent: int
    asked_rps: float | None
    """Gaps per second of the plan's span."""
    achieved_rps: float | None
    """Gaps per second of the span of what was sent."""
    ratio: float | None
    """Achieved / asked, below 1 if requests were late or left out; None if either is None."""
    late_ns: Mapping[str, float]
    """Sent - planned, of those sent: mean, min, max, p50, p90, p99; empty if none was. Early is < 0."""
    early: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "planned": self.planned, "sent": self.sent, "asked_rps": self.asked_rps,
            "achieved_rps": self.achieved_rps, "ratio": self.ratio, "early": self.early,
            "lateness": {name: value / 1e9 for name, value in self.late_ns.items()},
        }  # fmt: skip


def figures(times_ns: Sequence[int], *, rate_rps: float | None = None) -> ArrivalFigures:
    """Return the figures of arrivals at these times, in any order.

    `rate_rps`: rate of the exponential to compare with; None: that of the gaps.
    """
    ordered = sorted(times_ns)
    gaps = [b - a for a, b in pairwise(ordered)]
    n, span_ns = len(gaps), ordered[-1] - ordered[0] if ordered else 0
    own_rps = n * 1e9 / span_ns if span_ns else None
    law_rps = own_rps if rate_rps is None else rate_rps
    spread = deviation(gaps)
    known = n > 0 and law_rps is not None
    return ArrivalFigures(
        n=len(ordered),
        span_ns=span_ns,
        rate_rps=own_rps,
        gap_mean_ns=span_ns / n if n else None,
        gap_min_ns=min(gaps) if n else None,
        gap_cv=None if spread is None or not span_ns else spread * n / span_ns,
        ties=gaps.count(0) / n if n else None,
        ks=ks_exponential(gaps, law_rps) if law_rps is not None else None,
        ks_limit=(KS_95 if rate_rps is not None else KS_95_OWN_MEAN) / sqrt(n) if known else None,
        ks_rate_rps=law_rps if known else None,
        ks_own_mean=rate_rps is None,
        autocorrelation=strongest_autocorrelation(gaps),
    )


def ks_exponential(gaps_ns: Sequence[int], rate_rps: float) -> float | None:
    """Return the largest distance between the share of gaps up to x and 1 - exp(-rate x); None without gaps.

    Gaps of 0 count fully: if a third are 0, the distance is at least a third.
    """
    n = len(gaps_ns)
    if not n:
        return None
    far = 0.0
    for i, gap_ns in enumerate(sorted(gaps_ns)):
        law = 1 - exp(-rate_rps * gap_ns / 1e9)
        # Just before this gap, and at it. Of equal gaps the first and the last decide.
        far = max(far, law - i / n, (i + 1) / n - law)
    return far


def strongest_autocorrelation(gaps_ns: Sequence[int], lags: int = LAGS) -> Autocorrelation | None:
    """Return the most significant autocorrelation of the lags 1 to `lags`; None with too few or equal gaps.

    r(k) = sum of d(i) d(i + k) / sum of d(i)^2, d being distances from the mean. Gaps that differ by 1 ns are
    equal.
    """
    n = len(gaps_ns)
    if n <= lags:
        return None
    middle = sum(gaps_ns) / n
    d = [gap - middle for gap in gaps_ns]
    whole = sum(map(mul, d, d))
    if max(gaps_ns) - min(gaps_ns) <= 1:
        return None
    found = [sum(map(mul, d, d[lag:])) / whole for lag in range(1, lags + 1)]
    value = max(found, key=abs)
    # The r of independent gaps is about normal with deviation 1 / sqrt(n); Bonferroni for the largest.
    limit = NormalDist().inv_cdf(1 - 0.05 / (2 * lags)) / sqrt(n)
    return Autocorrelation(value, found.index(value) + 1, limit)


def compare(planned_ns: Sequence[int], sent_ns: Sequence[int | None]) -> Punctuality:
    """Compare send times with the plan, row by row; None is a row that was not sent.

    Both count from one moment. Raises ValueError for different numbers of rows.
    """
    late = sorted(s - p for p, s in zip(planned_ns, sent_ns, strict=True) if s is not None)
    asked_rps = _rate_rps(planned_ns)
    achieved_rps = _rate_rps([t for t in sent_ns if t is not None])
    told: dict[str, float] = {}
    if late:
        told = {"mean": sum(late) / len(late), "min": late[0], "max": late[-1]}
        for name, p in _SHARES.items():
            value = percentile(late, p)
            assert value is not None
            told[name] = value
    return Punctuality(
        planned=len(planned_ns), sent=len(late), asked_rps=asked_rps, achieved_rps=achieved_rps,
        ratio=achieved_rps / asked_rps if asked_rps and achieved_rps else None,
        late_ns=told, early=sum(ns < 0 for ns in late),
    )  # fmt: skip


def _rate_rps(times_ns: Sequence[int]) -> float | None:
    span_ns = max(times_ns) - min(times_ns) if times_ns else 0
    return (len(times_ns) - 1) * 1e9 / span_ns if span_ns else None


def _seconds(ns: float | None) -> float | None:
    return None if ns is None else ns / 1e9
