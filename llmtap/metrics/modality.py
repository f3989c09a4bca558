"""The shape of a distribution: one mode or several, where they are, and how its tail falls off.

Source: IETF seed 000, 5.4.4.3, which asks whether a distribution is unimodal and what its tail is like, and
gives P99 / P50 for the latter. That ratio knows nothing of where a distribution begins (a constant part makes
any tail look light), so beside it stands the shape of the tail itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage, signal, stats

from llmtap.metrics.dip import VALUES_MIN, dip, dip_p
from llmtap.metrics.statistics import tail_ratio

__all__ = ["Dip", "Tail", "dip_test", "modes", "tail"]

Values = NDArray[np.float64]

GRID: Final = 2_048
"""Places at which a density is worked out."""
WIDE: Final = 10.0
"""The greatest value over the least from which modes are looked for on a logarithmic scale."""
OUTERMOST: Final = 0.002
"""Part of the values that is left out on either side."""
MODE_SHARE_MIN: Final = 0.01
"""Of all values: so many a mode has above the level of its valleys, or nobody would miss it."""
MODE_VALUES_MIN: Final = 10
MODE_ERRORS_MIN: Final = 4.0
"""And so many standard errors of their number, or it may be a clump that luck has made."""
_ALMOST: Final = 1 - 1e-9
TAIL_SHARE: Final = 0.1
"""Of the values, the greatest, whose shape is the tail's."""
TAIL_VALUES_MIN: Final = 50
"""Below it any shape fits."""
TAIL_VALUES_MAX: Final = 2_000
"""With more values the tail begins further out, where it is more of a tail."""


@dataclass(frozen=True, slots=True)
class Dip:
    """What the dip test found."""

    dip: float
    """Distance to the nearest unimodal distribution: 1/4 is two points, 0.01 is hardly to be seen."""
    p: float
    """Chance of that with one mode; 0.0005 stands for that or less."""
    n: int
    """Values it was worked out from."""
    unimodal: bool
    """The test did not reject one mode: p >= alpha."""


def dip_test(
    values: Sequence[float], *, alpha: float = 0.05, n_max: int = 20_000, seed: int = 0, grain: float = 0.0
) -> Dip | None:
    """Whether the values may have come from one mode; None below 4 values.

    Not jittered unless `grain` says how coarse the clock was: stamps are of nanoseconds, so that equal gaps
    are no rounding but a pace, or events that shared a read, and such a place is a mode. Where times were
    rounded (a trace in ms), values are spread evenly over their grain, which leaves one mode one mode and two
    modes two, as long as the grain is finer than they are.

    What it misses are small modes: one with 2 % of the values, however far out. `modes` names those.

    Of more than `n_max` values so many are drawn at random: more would find any departure, however small.
    Values that are alike within a request or a batch are fewer than they look, and p is then too small: look
    at `dip`, too.

    Args:
        grain: of the values, in their unit; 0: they are exact.
    """
    data = np.asarray(values, dtype=float)
    random = np.random.default_rng(seed)
    if len(data) > n_max:
        data = random.choice(data, n_max, replace=False)
    n = len(data)
    if n < VALUES_MIN:
        return None
    if grain:
        data = data + random.uniform(-grain / 2, grain / 2, n)
    found = dip(data)
    p = dip_p(found, n)
    return Dip(found, p, n, p >= alpha)


def modes(values: Sequence[float]) -> list[float]:
    """Where the values gather: the peaks of their density, ascending; none without values.

    For telling people, after `dip_test` has said that there are several. The density is by a Gaussian kernel
    of Silverman's width, on a logarithmic scale where values are all above 0 and spread over more than a
    factor of 10. Zeros, which are gaps of events that shared a read, are a place of their own. A peak counts
    when what rises above its valleys is 1 % of the values, ten at least, and more than luck would pile up.
    """
    data = np.asarray(values, dtype=float)
    if not len(data):
        return []
    enough = max(MODE_VALUES_MIN, MODE_SHARE_MIN * len(data))
    positive = data[data > 0]
    if len(positive) and (data == 0).sum() >= enough:
        return [0.0, *_places(positive, enough)]
    return _places(data, enough)


def _places(data: Values, enough: float) -> list[float]:
    """On the scale that fits. A few values far out would take all of the grid, and are no mode."""
    low, high = (
        np.quantile(data, OUTERMOST, method="lower"),
        np.quantile(data, 1 - OUTERMOST, method="higher"),
    )
    inner = data[(data >= low) & (data <= high)]
    if low > 0 and high > WIDE * low:
        return [float(np.exp(x)) for x in _peaks(np.log(inner), enough)]
    return _peaks(inner, enough)


def _peaks(data: Values, enough: float) -> list[float]:
    """On a linear scale."""
    spread = min(float(data.std()), float(stats.iqr(data)) / 1.349) or float(data.std())
    low, high = float(data.min()), float(data.max())
    if not spread or low == high:
        return [low]
    width = 0.9 * spread * len(data) ** -0.2
    low, high = low - 4 * width, high + 4 * width
    cell = max((high - low) / GRID, width / 20)
    cells = int((high - low) / cell) + 1
    counts, edges = np.histogram(data, bins=cells, range=(low, low + cells * cell))
    density = ndimage.gaussian_filter1d(counts.astype(float), width / cell, mode="constant", truncate=4)
    found, about = signal.find_peaks(density, prominence=0)
    kept = []
    for place, depth in zip(found, about["prominences"], strict=True):
        level = density[place] - depth * _ALMOST  # not just below its valley by rounding
        down = np.flatnonzero(density <= level)
        after = int(np.searchsorted(down, place))
        left = down[after - 1] + 1 if after else 0
        right = down[after] if after < len(down) else len(density)
        mass = float(density[left:right].sum())
        if mass - level * (right - left) >= max(enough, MODE_ERRORS_MIN * sqrt(mass)):
            kept.append(float((edges[place] + edges[place + 1]) / 2))
    return kept or [float(np.median(data))]


@dataclass(frozen=True, slots=True)
class Tail:
    """How the greatest values fall off."""

    ratio: float | None
    """P99 / P50 (5.4.4.3); None without values, or where half of them are 0."""
    kind: Literal["light", "exponential", "heavy"] | None
    """Lighter than an exponential, not to be told from one, or heavier, by whether the interval of `shape`
    lies below 0, across it, or above; None with fewer than 50 values in the tail (500 in all)."""
    shape: float | None
    """Of the generalised Pareto distribution fitted to what exceeds `threshold`: 0 is an exponential tail,
    above it a power of 1 / shape, below it one that ends."""
    low: float | None
    high: float | None
    """Of the shape, 95 %."""
    threshold: float | None
    n: int
    """Values beyond the threshold."""


def tail(values: Sequence[float]) -> Tail:
    """The tail of values in any order: of the greatest tenth of them, 2,000 at most.

    By maximum likelihood, the interval by its information (1 + shape) / sqrt(n). Of a distribution with a
    small mode far out, this describes that mode. The values are taken for independent.

    Source: Pickands 1975, and Smith 1987 (the interval).
    """
    data = np.sort(np.asarray(values, dtype=float))
    if not len(data):
        return Tail(None, None, None, None, None, None, 0)
    p50, p99 = np.quantile(data, (0.5, 0.99))
    ratio = tail_ratio(float(p50), float(p99))
    n = min(int(len(data) * TAIL_SHARE), TAIL_VALUES_MAX)
    if n < TAIL_VALUES_MIN:
        return Tail(ratio, None, None, None, None, None, n)
    threshold = float(data[-n - 1])
    beyond = data[-n:] - threshold
    if beyond[0] == beyond[-1]:  # one value: it ends there
        return Tail(ratio, "light", None, None, None, threshold, n)
    shape, _, _ = stats.genpareto.fit(beyond / beyond.mean(), 0.1, floc=0)
    reach = float(stats.norm.ppf(0.975)) * max(0.0, 1 + shape) / sqrt(n)
    low, high = float(shape - reach), float(shape + reach)
    kind: Literal["light", "exponential", "heavy"] = (
        "heavy" if low > 0 else "light" if high < 0 else "exponential"
    )
    return Tail(ratio, kind, float(shape), low, high, threshold, n)
