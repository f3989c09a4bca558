"""Collect the values of each arm of a running A/B experiment, and compute figures and differences from them.

`meter/experiments.py` adds each exchange to the `ArmSample` of its arm while traffic runs. For each metric,
the sample has a `Figure`: a histogram and sums over units, in bounded memory. From figures, the `_interval`
functions return the interval of one arm, and the `_difference` functions a `Difference` between an arm and
the control.

Units (requests, conversations or tenants) are assigned to arms independently; values within a unit are
similar. So a mean is a ratio of sums over units, and intervals of quantiles are widened by the design effect.
A look is one evaluation of the running experiment. Intervals for a single look are Welch's t, order
statistics, Wilson's score and MOVER. `anytime` intervals are valid at every look: asymptotic confidence
sequences for means (from `FIRST_LOOK` units on), the Dirichlet mixture for counts and quantiles. Differences
of means can be adjusted by a covariate: a property of a unit that no arm can change.

Source: Welch 1947; Wilson 1927; Newcombe 1998; Zou and Donner 2008 (MOVER); Woodruff 1952; Kish 1965 (design
effect); Waudby-Smith, Arbour, Sinha, Kennedy, Ramdas 2021, theorem 2.2; Lindon and Malek 2020; Howard and
Ramdas 2022; Deng, Xu, Kohavi and Walker 2013 (CUPED); Lindon, Ham, Tingley and Bojinov 2022.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappush, heapreplace
from math import ceil, floor, log, sqrt
from random import Random
from typing import Final

from msgspec import Struct

from llmtap.metrics import statistics
from llmtap.metrics.histogram import RELATIVE_ERROR, Histogram

FIRST_LOOK: Final = 50
"""Minimum number of units in each arm for an anytime interval of a mean. From this number on, a simulation in
the tests (2,000 looks at log-normal times of shape 1) has a smaller rate of false alarms than alpha."""
UNITS_MAX: Final = 20_000
"""Maximum number of units of an arm in memory, about 1 KB each; the oldest are removed. If a
removed unit has a further exchange, it counts as a new unit."""
SAMPLE_UNITS: Final = 512
"""Number of units in the sample for design effects: enough to estimate a variance to within 6 %."""
SAMPLE_VALUES: Final = 128
"""Maximum number of values of each sampled unit in memory; more values are sampled at random."""
EVENTS_MIN: Final = 20
"""Minimum number of events in two arms together for the normal approximation of a difference of shares."""
_SUMS: Final = (
    "_has_several_values",
    "_sum_n2",
    "_sum_nx",
    "_sum_sn",
    "_sum_s2",
    "_sum_sx",
    "_sum_x",
    "_sum_x2",
    "units",
    "units_with",
    "units_without",
)
"""Attributes of a Figure that are sums, so that figures are merged by adding them."""


class SavedFigure(Struct, array_like=True):
    """A Figure in the form in which it is saved."""

    histogram: bytes
    """Packed `Histogram` of all values."""
    sums: list[str]
    """Values of `_SUMS` as decimal digits, because sums of squares can have more than 64 bits."""
    sampled: list[tuple[int, int, list[int]]]
    """For each sampled unit: its id, the number of its values, and a sample of its values."""


class Figure:
    """Values of one metric in one arm: a histogram, and sums over units. Values are integers (ns, or counts),
    so that the sums, and differences of large sums, are exact."""

    __slots__ = (
        "_has_several_values",
        "_negative_ids",
        "_random",
        "_sampled",
        "_sum_n2",
        "_sum_nx",
        "_sum_s2",
        "_sum_sn",
        "_sum_sx",
        "_sum_x",
        "_sum_x2",
        "histogram",
        "units",
        "units_with",
        "units_without",
    )

    def __init__(self) -> None:
        self.histogram = Histogram()
        self.units = 0
        """Number of units with at least one value."""
        self.units_with = 0
        """Number of units that have a value other than 0; for a share, units in which the event happened."""
        self.units_without = 0
        """For a share, whose values are 0 and 1: number of units that have a value of 0."""
        # Sums over all units of S^2, S N and N^2, where a unit has N values with the sum S.
        self._sum_s2 = self._sum_sn = self._sum_n2 = 0
        # Sums over all units of X, X^2, S X and N X, where X is the covariate of a unit.
        self._sum_x = self._sum_x2 = self._sum_sx = self._sum_nx = 0
        self._has_several_values = False
        """Whether any unit has more than one value."""
        self._sampled: dict[int, tuple[list[int], array[int]]] = {}
        """Number of values, and sample of values, of the units with the smallest ids. These units are a
        random sample, because ids are hashes."""
        self._negative_ids: list[int] = []
        """Heap of the negative ids of the sampled units, so that the largest id comes first."""
        self._random = Random(0)
        """Chooses which values of a sampled unit are kept; seeded, so that results can be repeated."""

    @property
    def n(self) -> int:
        return self.histogram.n

    @property
    def mean(self) -> float | None:
        return self.histogram.mean

    def add(
        self, unit: int, values: Sequence[int], before: tuple[int, int] = (0, 0), covariate: int = 0
    ) -> tuple[int, int]:
        """Add values of a unit. Return the number and the sum of all its values so far. `before`: result of
        the previous call for this unit. `covariate`: value of the unit, the same in each call."""
        n0, s0 = before
        n, s = n0 + len(values), s0 + sum(values)
        if n == n0:
            return before
        self._sum_s2 += s * s - s0 * s0
        self._sum_sn += s * n - s0 * n0
        self._sum_n2 += n * n - n0 * n0
        self._sum_sx += covariate * (s - s0)
        self._sum_nx += covariate * (n - n0)
        if not n0:
            self._sum_x += covariate
            self._sum_x2 += covariate * covariate
        self.units += not n0
        self.units_with += bool(s) and not s0
        self.units_without += s < n and not s0 < n0
        self.histogram.record_many(values)
        if n > 1:
            self._has_several_values = True
        self._sample(unit, values, new=not n0)
        return n, s

    def error(self) -> float | None:
        """Return the standard error of the mean, a ratio of sums over units; None with fewer than two units.

        It is sqrt(K / (K - 1) sum (S_u - m N_u)^2) / N, where S_u is the sum of the N_u values of unit u, K
        the number of units, and m = S / N the mean of all values.
        """
        k, n, total = self.units, self.n, self.histogram.total
        if k < 2:
            return None
        # `squares` is the sum in the formula times N^2. So all terms are integers, and the result is exact.
        squares = self._sum_s2 * n * n - 2 * total * n * self._sum_sn + total * total * self._sum_n2
        return sqrt(squares * k / (k - 1)) / (n * n) if squares > 0 else 0.0

    @property
    def covariate_mean(self) -> float:
        return self._sum_x / self.units

    def covariate_moments(self) -> tuple[float, float]:
        """Return the covariance of the mean with the covariate's mean, and the variance of the covariate's
        mean.

        At least two units are needed. With the residuals r_u = S_u - m N_u (as in `error`) and the covariates
        x_u, whose mean is x: K / (K - 1) sum r_u (x_u - x) / (N K), and K / (K - 1) sum (x_u - x)^2 / K^2.
        """
        k, n, total = self.units, self.n, self.histogram.total
        # Compute with integers, so that the difference of large products is exact.
        covariance = (self._sum_sx * n - total * self._sum_nx) / n
        variance = (self._sum_x2 * k - self._sum_x * self._sum_x) / k
        return covariance / ((k - 1) * n), variance / ((k - 1) * k)

    def design_effect(self, value: float) -> float:
        """Return the design effect for the share of values up to `value`, at least 1.

        It is the variance of this share / its variance if all values were independent, from the linearised
        variance of a ratio over the sampled units. Source: Kish 1965.
        """
        if not self._has_several_values or len(self._sampled) < 2:
            return 1.0
        below, sizes = [], []
        for (n,), values in self._sampled.values():
            below.append(n * sum(map(value.__ge__, values)) / len(values))
            sizes.append(n)
        n = sum(sizes)
        share = sum(below) / n
        if not 0 < share < 1:
            # The share has no variance. Assume the worst case: all values of a unit are equal.
            return max(1.0, n / len(sizes))
        k = len(sizes)
        spread = sum((b - share * size) ** 2 for b, size in zip(below, sizes, strict=True))
        return max(1.0, k / (k - 1) * spread / (n * share * (1 - share)))

    def copy(self) -> "Figure":
        """Return a copy for another thread."""
        twin = Figure()
        twin.histogram = self.histogram.copy()
        for name in _SUMS:
            setattr(twin, name, getattr(self, name))
        twin._sampled = {unit: (n[:], values[:]) for unit, (n, values) in self._sampled.items()}
        return twin

    def to_saved(self) -> SavedFigure:
        """Return a copy in the form in which it is saved."""
        sampled = [(unit, n, values.tolist()) for unit, ((n,), values) in self._sampled.items()]
        return SavedFigure(
            self.histogram.to_bytes(), [str(int(getattr(self, name))) for name in _SUMS], sampled
        )

    def merge_saved(self, saved: SavedFigure) -> None:
        """Add the values of other units, or further values of the same units."""
        self.histogram.merge_bytes(saved.histogram)
        for name, text in zip(_SUMS, saved.sums, strict=True):
            setattr(self, name, getattr(self, name) + int(text))
        for unit, n, values in saved.sampled:
            new = unit not in self._sampled
            self._sample(unit, values, new=new)
            if unit in self._sampled:
                self._sampled[unit][0][0] += n - len(values)

    def _sample(self, unit: int, values: Sequence[int], *, new: bool) -> None:
        """Keep the values of a unit if it is one of the SAMPLE_UNITS units with the smallest ids."""
        units = self._sampled
        if new and unit not in units:
            if len(units) < SAMPLE_UNITS:
                heappush(self._negative_ids, -unit)
            elif unit < -self._negative_ids[0]:
                del units[-heapreplace(self._negative_ids, -unit)]
            else:
                return
            units[unit] = ([0], array("q"))
        elif unit not in units:
            return
        n_cell, sample = units[unit]
        n = n_cell[0]
        room = SAMPLE_VALUES - len(sample)
        if room > 0:
            sample.extend(values[:room])
            n += min(room, len(values))
        for value in values[max(0, room) :]:
            # Reservoir sampling (Vitter 1985, algorithm R): each value is in the sample with equal
            # probability.
            n += 1
            place = int(self._random.random() * n)
            if place < SAMPLE_VALUES:
                sample[place] = value
        n_cell[0] = n


class ArmSample:
    """Figures of the exchanges of one arm, by metric."""

    def __init__(self, names: Iterable[str], *, single: bool) -> None:
        """`names`: metrics. `single`: whether every unit is one exchange."""
        self.figures = {name: Figure() for name in names}
        self.forgotten_units = 0
        """Number of units that were removed from memory, since there were more than UNITS_MAX."""
        self._units_are_single = single
        """Whether every unit is one exchange, so no sums of units are needed."""
        self._units: OrderedDict[int, tuple[int, dict[str, tuple[int, int]]]] = OrderedDict()
        """Covariate of each unit, and number and sum of its values by metric; the oldest unit is first."""
        self._units_are_saved = False
        """Whether the units were already saved, so that `to_saved` omits them."""

    def add(self, unit: int, values: Mapping[str, Sequence[int]], covariate: int = 0) -> None:
        """Add an exchange of a unit: its values of each metric, if it has any. The covariate of the unit's
        first exchange is used, because the arm could have changed the covariate later."""
        figures = self.figures
        if self._units_are_single:
            for name, some in values.items():
                figures[name].add(unit, some, covariate=covariate)
            return
        first_covariate, sums = self._units.setdefault(unit, (covariate, {}))
        if not sums:
            if len(self._units) > UNITS_MAX:
                self._units.popitem(last=False)
                self.forgotten_units += 1
        else:
            self._units.move_to_end(unit)
        for name, some in values.items():
            sums[name] = figures[name].add(unit, some, sums.get(name, (0, 0)), first_covariate)

    def to_saved(self) -> "SavedSample":
        """Return a copy in the form in which it is saved."""
        units = [] if self._units_are_saved else [(unit, *sums) for unit, sums in self._units.items()]
        figures = {name: figure.to_saved() for name, figure in self.figures.items()}
        return SavedSample(figures, self.forgotten_units, units)

    def clear(self) -> None:
        """Remove all figures, but not the sums of units, so that later values of a unit are added to them."""
        self.figures = {name: Figure() for name in self.figures}
        self.forgotten_units = 0
        self._units_are_saved = True

    def save_units_again(self) -> None:
        """Include the sums of units in the next `to_saved`, because the previous copy could not be saved."""
        self._units_are_saved = False

    def merge_saved(self, saved: "SavedSample") -> None:
        """Add a saved sample, without the metrics that this sample does not have."""
        for name, figure in self.figures.items():
            if name in saved.figures:
                figure.merge_saved(saved.figures[name])
        self.forgotten_units += saved.forgotten
        for unit, covariate, sums in saved.units:
            self._units.setdefault(unit, (covariate, sums))
        while len(self._units) > UNITS_MAX:
            self._units.popitem(last=False)


class SavedSample(Struct, array_like=True):
    """An ArmSample in the form in which it is saved."""

    figures: dict[str, SavedFigure]
    forgotten: int
    """Number of units that were removed from memory (`ArmSample.forgotten_units`)."""
    units: list[tuple[int, int, dict[str, tuple[int, int]]]]
    """For each unit: its id, its covariate, and the number and sum of its values by metric."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of an arm from the control: the arm's figure minus the control's."""

    estimate: float
    """Difference of the means, shares or percentiles."""
    interval: statistics.Interval | None
    """Confidence interval that is valid for a single look."""
    anytime: statistics.Interval | None
    """Confidence interval valid at every look: its level holds for the intervals of all looks together."""
    p: float | None = None
    """p-value of "there is no difference" that is valid at every look."""
    unadjusted: float | None = None
    """Estimate before the adjustment by the covariate; None without adjustment."""
    variance_left: float = 1.0
    """Share of the estimate's variance that the covariate does not explain."""


def mean_interval(figure: Figure, alpha: float) -> statistics.Interval | None:
    """Return the mean's interval for a single look; None with fewer than two units."""
    error, mean = figure.error(), figure.mean
    if error is None or mean is None:
        return None
    reach = statistics.t_quantile(alpha, figure.units - 1) * error
    return mean - reach, mean + reach


def mean_difference(arm: Figure, control: Figure, alpha: float, *, adjust: bool = False) -> Difference | None:
    """Return the difference of means; None if an arm has no value. `adjust`: whether to use the covariate."""
    if arm.mean is None or control.mean is None:
        return None
    estimate = arm.mean - control.mean
    errors = arm.error(), control.error()
    if errors[0] is None or errors[1] is None:
        return Difference(estimate, None, None)
    va, vc = errors[0] ** 2, errors[1] ** 2
    unadjusted, variance_left = None, 1.0
    if adjust and va + vc > 0:
        (ca, xa), (cc, xc) = arm.covariate_moments(), control.covariate_moments()
        if xa + xc > 0:
            slope = (ca + cc) / (xa + xc)
            unadjusted = estimate
            estimate -= slope * (arm.covariate_mean - control.covariate_mean)
            variance_left = max(0.0, 1 - slope * (ca + cc) / (va + vc))
            va, vc = va * variance_left, vc * variance_left
    error = sqrt(va + vc)
    if error == 0:
        return Difference(estimate, None, None, None, unadjusted, variance_left)
    # Degrees of freedom by Welch and Satterthwaite.
    df = (va + vc) ** 2 / (va**2 / (arm.units - 1) + vc**2 / (control.units - 1))
    reach = statistics.t_quantile(alpha, df) * error
    z = estimate / error
    anytime = p = None
    if min(arm.units, control.units) >= FIRST_LOOK:
        n = arm.units + control.units
        far = statistics.mixture_width(n, alpha) * error
        anytime = (estimate - far, estimate + far)
        p = statistics.anytime_p(statistics.mixture_e_log(z, n, alpha))
    return Difference(estimate, (estimate - reach, estimate + reach), anytime, p, unadjusted, variance_left)


def quantile_interval(
    figure: Figure, share: float, alpha: float, *, anytime: bool = False
) -> statistics.Interval | None:
    """Return the interval of a quantile by order statistics; None if it would need a rank outside the sample.

    For a single look, the ranks follow from Student's t and the design effect d; with `anytime`, from the
    `count_range` of n / d independent values. The interval includes the histogram's relative error.
    """
    n, units = figure.n, figure.units
    value = figure.histogram.percentile(share)
    if value is None or units < 2:
        return None
    d = figure.design_effect(value)
    if anytime:
        below, upto = (d * count for count in statistics.count_range(n / d, share, alpha))
        # If k values are below the quantile, it lies between the k-th value and the value after it.
        first, last = (ceil(below) - 1) / (n - 1), floor(upto) / (n - 1)
        if first < 0 or last > 1:
            return None
    else:
        reach = statistics.t_quantile(alpha, units - 1) * sqrt(d * share * (1 - share) / n)
        first, last = share - reach, share + reach
        if first <= 0 or last >= 1:
            return None
    low, high = figure.histogram.percentiles((first, last))
    assert low is not None and high is not None
    return low - RELATIVE_ERROR * abs(low), high + RELATIVE_ERROR * abs(high)


def quantile_difference(arm: Figure, control: Figure, share: float, alpha: float) -> Difference | None:
    """Return the difference of a quantile between two arms. The anytime interval is the range of all
    differences between values in the arms' intervals at alpha / 2."""
    a, c = arm.histogram.percentile(share), control.histogram.percentile(share)
    if a is None or c is None:
        return None
    intervals = quantile_interval(arm, share, alpha), quantile_interval(control, share, alpha)
    interval = (
        None
        if intervals[0] is None or intervals[1] is None
        else _difference_interval(a, intervals[0], c, intervals[1])
    )
    anytime_intervals = (
        quantile_interval(arm, share, alpha / 2, anytime=True),
        quantile_interval(control, share, alpha / 2, anytime=True),
    )
    anytime = (
        None
        if anytime_intervals[0] is None or anytime_intervals[1] is None
        else (
            anytime_intervals[0][0] - anytime_intervals[1][1],
            anytime_intervals[0][1] - anytime_intervals[1][0],
        )
    )
    return Difference(a - c, interval, anytime)


def share_interval(figure: Figure, alpha: float) -> statistics.Interval | None:
    """Return Wilson's interval of a share (the mean of zeros and ones); None with fewer than two units. Since
    values within a unit are similar, n is the number of independent values that have the same variance."""
    p, error = figure.mean, figure.error()
    if p is None or error is None:
        return None
    n: float = figure.n
    if p in (0, 1):
        n = figure.units  # Without variance, assume that all values of a unit are equal.
    elif error > 0:
        n = min(n, p * (1 - p) / error**2)
    return statistics.share_range(p, n, statistics.t_quantile(alpha, figure.units - 1))


def share_difference(
    arm: Figure, control: Figure, weights: tuple[float, float] | None, alpha: float
) -> Difference | None:
    """Return the difference of two shares; `weights`: part of all units in each arm; None: unknown.

    p is exact (None without weights): if the arms do not differ, a unit with the event is in an arm with the
    probability of the arm's weight. This is true for any rate of the event, even if the rate changes over the
    day (Lindon and Malek 2020). It is also true for a unit with a value of 0 (without the event); if the
    event happens in almost every unit, only these units show a difference. p is twice the smaller of the
    p-values of these two tests (Bonferroni).
    """
    a, c = arm.mean, control.mean
    if a is None or c is None:
        return None
    intervals = share_interval(arm, alpha), share_interval(control, alpha)
    interval = (
        None
        if intervals[0] is None or intervals[1] is None
        else _difference_interval(a, intervals[0], c, intervals[1])
    )
    counts = (arm.units_with, control.units_with)
    p = None
    if weights is not None:
        expected = [w / sum(weights) for w in weights]
        without = (arm.units_without, control.units_without)
        e_log = max(statistics.events_e_log(units, expected) for units in (counts, without))
        p = statistics.anytime_p(e_log - log(2))
    by_mean = mean_difference(arm, control, alpha)
    enough = sum(counts) >= EVENTS_MIN and by_mean is not None
    anytime = by_mean.anytime if enough and by_mean is not None else None
    return Difference(a - c, _between_shares(interval), _between_shares(anytime), p)


def _between_shares(interval: statistics.Interval | None) -> statistics.Interval | None:
    """Limit an interval to the range of a difference of shares (-1 to 1), which approximations can exceed."""
    return None if interval is None else (max(-1.0, interval[0]), min(1.0, interval[1]))


def _difference_interval(
    a: float, around_a: statistics.Interval, c: float, around_c: statistics.Interval
) -> statistics.Interval:
    """Return the interval of a - c from the intervals of a and c, by MOVER (Zou and Donner 2008)."""
    low = a - c - sqrt((a - around_a[0]) ** 2 + (around_c[1] - c) ** 2)
    high = a - c + sqrt((around_a[1] - a) ** 2 + (c - around_c[0]) ** 2)
    return low, high
